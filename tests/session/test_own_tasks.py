"""What a session may have to end has a task and a context of its own: whose cancel it was, what is
seen where, what is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook
from tests.support.checks import refused
from tests.support.sessions import (
    NO_BACKOFF,
    double,
    doubling,
)
from tests.support.waiting import forever

pytestmark = pytest.mark.every_python


@pytest.mark.parametrize("how", ["cancels itself", "is cancelled"])
@pytest.mark.parametrize("what", ["until", "a step function", "feeds", "a recovery"])
async def test_a_cancel_by_others_is_not_the_callers(what: str, how: str) -> None:
    """What a session awaits is cancelled, and its caller is not: that is an error that says so."""

    async def work(*_: object) -> None:
        current = asyncio.current_task()
        assert current is not None
        asyncio.get_running_loop().call_soon(current.cancel)
        if how == "cancels itself":
            current.cancel()
        await forever()

    async def feeds() -> AsyncIterator[int]:
        await work()
        yield 1

    lost = FaultInjectionHook(
        {("before_run", 1): ah.AbortedError("lost"), ("after_create_session", 2): work}
    )
    async with ah.AsyncMonitoredSession(
        double, [lost] if what == "a recovery" else [], recovery=NO_BACKOFF
    ) as session:
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "until": lambda: session.until(work()),
            "a step function": lambda: session.run_step_fn(work),
            "feeds": lambda: anext(session.steps("loss", feeds=feeds())),
            "a recovery": lambda: session.run("loss", {"batch": 1}),
        }
        with refused(ah.errors.HookCancelledError, "was cancelled, and not by its caller"):
            await calls[what]()


# -- what is kept of what a wait has taken


async def test_all_feeds_are_taken_in_one_task() -> None:
    """A generator of feeds may have a time limit around its `yield`, which belongs to a task."""
    tasks: set[Any] = set()

    async def feeds() -> AsyncIterator[int]:
        async with asyncio.timeout(1000):
            for number in range(4):
                await asyncio.sleep(0)
                tasks.add(asyncio.current_task())
                yield number

    async with doubling() as session:
        assert [loss async for loss in session.steps("loss", feeds=feeds())] == [0, 2, 4, 6]
    assert len(tasks) == 1
