"""What the tests of known bug shapes share: a hook made of one function, and sessions that run it once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohooks as ah
from tests.support.models import ticks


class Hook(ah.SessionRunHook):
    """A hook whose `before_run` is the given coroutine function; it knows when it was closed."""

    def __init__(self, act: Callable[[], Awaitable[Any]]) -> None:
        self.act = act
        self.ended = False
        self.closed = 0

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        try:
            await self.act()
        finally:
            self.ended = True

    async def close(self, exc: BaseException | None) -> None:
        self.closed += 1


async def step() -> None:
    """Nothing to do."""


async def for_ever() -> None:
    await asyncio.Event().wait()


async def run_once(*acts: Callable[[], Awaitable[Any]]) -> list[Hook]:
    """One run of a session with these hooks."""
    hooks = [Hook(act) for act in acts]
    async with ah.AsyncMonitoredSession(step, hooks) as session:
        await session.run("step")
    return hooks


def fails_after(count: int, error: BaseException) -> Callable[[], Awaitable[Any]]:
    async def act() -> None:
        await ticks(count)
        raise error

    return act
