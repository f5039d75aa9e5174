"""Generators may be only so far ahead of the trainer: a condition on a capacity that the trainer
raises.
"""

from __future__ import annotations

import asyncio
import functools

import aiohooks as ah

from .shape import Fault, Shape

BATCH, MAX_LAG = 4, 1


async def old(fault: Fault) -> None:
    """The trainer fails after two steps, so the condition is never notified again."""
    condition = asyncio.Condition()
    trained = 0

    async def train() -> None:
        nonlocal trained
        for _ in range(2):
            await asyncio.sleep(0.01)
            async with condition:
                trained += 1
                condition.notify_all()
        raise fault.failure()

    def has_room(submitted: int) -> bool:
        return submitted < (trained + MAX_LAG + 1) * BATCH

    trainer = asyncio.create_task(train())
    for submitted in range(40):
        async with condition:
            await condition.wait_for(functools.partial(has_room, submitted))
    await trainer


async def ours(fault: Fault) -> None:
    """Each item waits for a step of the trainer; the wait raises an error that names the failed
    trainer.
    """
    steps = ah.MemoryStepStore(run="training")
    coord = ah.Coordinator()

    async def train() -> None:
        with steps.publisher("trainer"):
            for _ in range(2):
                await asyncio.sleep(0.01)
                await steps.advance()
            raise fault.failure()

    coord.start_soon(train)
    for submitted in range(40):
        await steps.wait_for(submitted // BATCH - MAX_LAG)


SHAPE = Shape(
    name="condition with a capacity",
    fault="the trainer raises",
    old_code="await condition.wait_for(lambda: submitted < (trained + lag + 1) * batch)",
    our_code="await steps.wait_for(submitted // batch - lag)",
    names="trainer",
    old=old,
    ours=ours,
)
