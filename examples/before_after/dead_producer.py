"""A trainer takes items from a queue; the worker that fills it dies."""

from __future__ import annotations

import asyncio

import aiohooks as ah

from .shape import Fault, Shape

ITEMS = 5


async def fill(queue: asyncio.Queue[int], fault: Fault) -> None:
    """Put two items, then fail."""
    for item in range(2):
        await asyncio.sleep(0.01)
        await queue.put(item)
    raise fault.failure()


async def old(fault: Fault) -> None:
    """The queue does not know its producer, so its failure does not end the wait."""
    queue: asyncio.Queue[int] = asyncio.Queue()
    worker = asyncio.create_task(fill(queue, fault))
    for _ in range(ITEMS):
        await queue.get()
    await worker


async def ours(fault: Fault) -> None:
    """The session owns the producer: its error ends the wait, as the same object."""

    async def step(item: int) -> dict[str, int]:
        return {"loss": item}

    queue: asyncio.Queue[int] = asyncio.Queue()
    async with ah.AsyncMonitoredSession(step) as session:
        session.start_soon(fill, queue, fault, name="rollout worker")
        for _ in range(ITEMS):
            item = await session.until(queue.get())
            await session.run("loss", feed_dict={"item": item})


SHAPE = Shape(
    name="queue with a dead producer",
    fault="the producer raises",
    old_code="item = await queue.get()",
    our_code="item = await session.until(queue.get())",
    names="rollout worker",
    old=old,
    ours=ours,
)
