"""A batch is held until the policy's version is new enough: an event that is cleared, checked and awaited."""

from __future__ import annotations

import asyncio

import aiohooks as ah

from .shape import Fault, Shape

WANTED = 5


class Policy:
    """The version, and an event that says that it has changed."""

    def __init__(self) -> None:
        """No version yet."""
        self.version = 0
        self.updated = asyncio.Event()


async def old(fault: Fault) -> None:
    """The publisher dies at version 2; its task is kept, and nobody looks at it."""
    policy = Policy()

    async def publish() -> None:
        for _ in range(2):
            await asyncio.sleep(0.01)
            policy.version += 1
            policy.updated.set()
        raise fault.kills()

    publisher = asyncio.create_task(publish())
    while policy.version < WANTED:
        policy.updated.clear()
        if policy.version < WANTED:
            await policy.updated.wait()
    await publisher


async def ours(fault: Fault) -> None:
    """Whoever waits for a version is told that its publisher has died, with its error as the cause."""
    versions = ah.MemoryStepStore(run="policy")
    coord = ah.Coordinator()

    async def publish() -> None:
        with versions.publisher("trainer"):
            for _ in range(2):
                await asyncio.sleep(0.01)
                await versions.advance()
            raise fault.kills()

    coord.start_soon(publish)
    await versions.wait_for(WANTED)


SHAPE = Shape(
    name="event cleared and checked",
    fault="the publisher raises",
    old_code="while version < n: updated.clear(); await updated.wait()",
    our_code="await versions.wait_for(n)",
    names="trainer",
    old=old,
    ours=ours,
)
