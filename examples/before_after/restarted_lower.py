"""An evaluation waits for a version; the trainer restarts from a checkpoint and publishes lower
versions again.
"""

from __future__ import annotations

import asyncio

import aiohooks as ah

from .shape import Fault, Shape

WANTED = 9


async def old(fault: Fault) -> None:
    """The condition compares numbers: it does not notice that the version was reset."""
    condition = asyncio.Condition()
    version = 0

    async def train() -> None:
        nonlocal version
        for published in (7, 8, 2):  # it restarts from version 2, and publishes no more for a while
            await asyncio.sleep(0.01)
            async with condition:
                if published < version:
                    fault.record()
                version = published
                condition.notify_all()
        await asyncio.Event().wait()

    trainer = asyncio.create_task(train())
    async with condition:
        await condition.wait_for(lambda: version >= WANTED)
    await trainer


async def ours(fault: Fault) -> None:
    """A restart begins a new epoch of the step; with `on_reset="raise"` the wait raises both
    positions.
    """
    versions = ah.MemoryStepStore(run="versions of the trainer")
    coord = ah.Coordinator()

    async def train() -> None:
        with versions.publisher("trainer"):
            await versions.raise_to(8)
            await asyncio.sleep(0.01)
            fault.record()
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
