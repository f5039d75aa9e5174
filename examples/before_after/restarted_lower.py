"""An evaluation waits for a version; the trainer restarts from a checkpoint and publishes lower versions again."""

from __future__ import annotations

import asyncio

import aiohooks as ah

from .shape import Fault, Shape

WANTED = 9


async def old(fault: Fault) -> None:
    """The condition looks at a number: it cannot see that what it waits for is far away again."""
    condition = asyncio.Condition()
    version = 0

    async def train() -> None:
        nonlocal version
        for published in (7, 8, 2):  # it was restarted from version 2, and is slow to come back
            await asyncio.sleep(0.01)
            async with condition:
                if published < version:
                    fault.strikes()
                version = published
                condition.notify_all()
        await asyncio.Event().wait()

    trainer = asyncio.create_task(train())
    async with condition:
        await condition.wait_for(lambda: version >= WANTED)
    await trainer


async def ours(fault: Fault) -> None:
    """A restart is a new epoch of the step; who asked for it is told, with both marks."""
    versions = ah.MemoryStepStore(run="versions of the trainer")
    coord = ah.Coordinator()

    async def train() -> None:
        with versions.publisher("trainer"):
            await versions.raise_to(8)
            await asyncio.sleep(0.01)
            fault.strikes()
            await versions.reset(2)
            await asyncio.Event().wait()

    coord.start_soon(train)
    await versions.wait_for(WANTED, on_reset="raise")


SHAPE = Shape(
    name="version behind a condition",
    fault="the trainer restarts lower",
    old_code="await condition.wait_for(lambda: version >= n)",
    our_code='await versions.wait_for(n, on_reset="raise")',
    names="trainer",
    old=old,
    ours=ours,
)
