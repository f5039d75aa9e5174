"""A trainer polls a queue, and checks between two polls whether the heartbeat of the worker is
recent.

The times are a tenth of common ones: a poll of 0.5 s, and a heartbeat that is stale after 5 s.
"""

from __future__ import annotations

import asyncio
import time

import aiohooks as ah

from .shape import Fault, Shape

POLL_SECS, STALE_SECS, ITEMS = 0.05, 0.5, 5


async def old(fault: Fault) -> None:
    """The worker is killed: the trainer notices it when the heartbeat is stale, and does not know
    the reason.
    """
    queue: asyncio.Queue[int] = asyncio.Queue()
    heartbeat = time.monotonic()

    async def work() -> None:
        nonlocal heartbeat
        while True:
            await asyncio.sleep(0.01)
            heartbeat = time.monotonic()
            if queue.qsize() < 2:
                await queue.put(1)

    worker = asyncio.create_task(work())
    for number in range(ITEMS):
        if number == 2:
            worker.cancel()
            fault.record()
        while True:
            try:
                await asyncio.wait_for(queue.get(), POLL_SECS)
                break
            except TimeoutError:
                if time.monotonic() - heartbeat > STALE_SECS:
                    raise RuntimeError("no heartbeat") from None


async def ours(fault: Fault) -> None:
    """The worker publishes the number of its items; its end fails the wait for the next one."""
    items = ah.MemoryStepStore(run="items")

    async def work() -> None:
        with items.publisher("rollout worker"):
            for _ in range(2):
                await asyncio.sleep(0.01)
                await items.advance()
            await asyncio.Event().wait()

    worker = asyncio.create_task(work())
    for number in range(ITEMS):
        if number == 2:
            worker.cancel()
            fault.record()
        await items.wait_for(number + 1)


SHAPE = Shape(
    name="poll with a heartbeat",
    fault="the worker is killed",
    old_code="await wait_for(queue.get(), 0.5), and is the heartbeat stale?",
    our_code="await items.wait_for(n)",
    names="rollout worker",
    old=old,
    ours=ours,
)
