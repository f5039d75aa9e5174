"""Five hooks that do in each phase what a test tells them, and other small things for tests of what runs together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import aiohooks as ah

HOOKS = range(5)
PHASES = ("after_create_session", "before_run", "after_run")
Act = Callable[[int, str], Coroutine[Any, Any, Any]]


class Hook(ah.SessionRunHook):
    """Awaits `act(number, phase)` in each phase that overlaps; `before_run` returns what that returns."""

    def __init__(self, number: int, act: Act) -> None:
        self.number = number
        self.act = act

    async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
        await self.act(self.number, "after_create_session")

    async def before_run(self, run_context: ah.SessionRunContext) -> ah.SessionRunArgs | None:
        args: ah.SessionRunArgs | None = await self.act(self.number, "before_run")
        return args

    async def after_run(self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
        await self.act(self.number, "after_run")


def hooks(act: Act) -> list[Hook]:
    """Five of them."""
    return [Hook(number, act) for number in HOOKS]


async def train() -> dict[str, int]:
    """The step."""
    return {"loss": 7}


async def run_once(given: list[Any]) -> None:
    """One session, one run."""
    async with ah.AsyncMonitoredSession(train, given) as session:
        await session.run("train")


async def ticks(count: int) -> None:
    """Lets everything that is runnable run, so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def elapse(secs: float) -> None:
    """Waits on the current clock."""
    passed = asyncio.get_running_loop().create_future()
    ah.current_clock().call_later(secs, lambda: passed.done() or passed.set_result(None))
    await passed
