"""A worker starts at a step of the chief, which is late. TensorFlow's hook polled the step every
half second.

The period here is a fifth of that.
"""

from __future__ import annotations

import asyncio

import aiohooks as ah

from .shape import Fault, Shape

POLL_SECS, START_AT = 0.1, 3


async def old(fault: Fault) -> None:
    """The step is reached right after a poll, so the worker notices it at the next one."""
    step = polls = 0
    second_poll = asyncio.Event()

    async def train() -> None:
        nonlocal step
        await second_poll.wait()
        step = START_AT
        fault.record()

    chief = asyncio.create_task(train())
    while step < START_AT:
        polls += 1
        if polls == 2:
            second_poll.set()
        await asyncio.sleep(POLL_SECS)
    await chief


async def ours(fault: Fault) -> None:
    """A hook waits for the step before the first run, and is woken when it is reached."""

    async def step() -> dict[str, int]:
        return {"loss": 1}

    steps = ah.MemoryStepStore()
    chief = steps.publisher("chief")

    async def train() -> None:
        with chief:
            await asyncio.sleep(2 * POLL_SECS)
            await steps.advance(START_AT)
            fault.record()

    async with ah.AsyncMonitoredSession(
        step, [ah.hooks.GlobalStepWaiterHook(START_AT)], global_step=steps
    ) as session:
        session.start_soon(train)
        await session.run("loss")


SHAPE = Shape(
    name="poll of a step",
    fault="the chief is late",
    old_code="while step < n: sleep(0.5)",
    our_code="hooks=[GlobalStepWaiterHook(n)]",
    names="",
    old=old,
    ours=ours,
)
