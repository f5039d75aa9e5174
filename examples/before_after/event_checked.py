"""A wait until the version of a policy is new enough: an event that is cleared, checked and
awaited.
"""

from __future__ import annotations

import asyncio

import aiohooks as ah

from .shape import Fault, Shape

WANTED = 5


class Policy:
    """The version, and an event that is set when it changes."""

    def __init__(self) -> None:
        self.version = 0
        self.updated = asyncio.Event()


async def old(fault: Fault) -> None:
    """The publisher fails at version 2; its task is done, but the wait does not check it."""
    policy = Policy()

    async def publish() -> None:
        for _ in range(2):
            await asyncio.sleep(0.01)
            policy.version += 1
            policy.updated.set()
        raise fault.failure()

    publisher = asyncio.create_task(publish())
    while policy.version < WANTED:
        policy.updated.clear()
        if policy.version < WANTED:
            await policy.updated.wait()
    await publisher


async def ours(fault: Fault) -> None:
    """The wait raises an error that names the publisher, with its failure as the cause."""
    versions = ah.MemoryStepStore(run="policy")
    coord = ah.Coordinator()

    async def publish() -> None:
        with versions.publisher("trainer"):
            for _ in range(2):
                await asyncio.sleep(0.01)
                await versions.advance()
            raise fault.failure()

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
