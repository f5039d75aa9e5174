"""What is logged when the end of a session, a recovery or a `join` waits for long; and how long
that is by default.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock
from tests.support.hooks import PhaseHook
from tests.support.sessions import NO_BACKOFF, doubling, outcome
from tests.support.waiting import advance_clock, forever, parked, ticks

pytestmark = pytest.mark.every_python


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was logged, without the lines of code."""
    return [record.getMessage().partition(".<locals>")[0] for record in caplog.records]


def closing(
    hooks: Sequence[Any] = (),
    use: Callable[[ah.AsyncMonitoredSession], Awaitable[object]] = lambda _: ticks(),
) -> Any:
    """Open a session, use it, and leave it."""
    return outcome(doubling(*hooks, name="trainer"), use)


@pytest.mark.parametrize("phase", ["end", "close"])
async def test_a_hook_that_is_waited_for_is_logged(
    phase: str, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A hook whose `end` or `close` takes longer than a second is named, once."""
    gate = asyncio.Event()

    async def wait(*_: object) -> None:
        await gate.wait()

    ending = await parked(closing([PhaseHook(phase, wait)]), 20)
    clock.advance(1)
    (text,) = messages(caplog)
    assert text.startswith("a caller has waited 1 s for the end of session trainer: ")
    assert f"PhaseHook.{phase} for 1 s" in text
    clock.advance(8)
    assert len(messages(caplog)) == 1
    gate.set()
    assert await ending is None
    assert clock.pending == 0


async def test_a_recovery_that_waits_says_so(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A task that delays the replacement of its session by its cleanup is named after a second."""
    gate = asyncio.Event()

    async def cleans_up() -> None:
        try:
            await forever()
        finally:
            await gate.wait()

    async def starts(session: ah.Session, coord: ah.Coordinator) -> None:
        if not gate.is_set():
            coord.start_soon(cleans_up)
            await ticks()
            raise ah.AbortedError("lost")

    hooks = [PhaseHook("after_create_session", starts)]
    session = doubling(*hooks, recovery=NO_BACKOFF, name="trainer")
    opening = await parked(outcome(session), 20)
    clock.advance(1)
    gate.set()
    assert await opening is None
    assert messages(caplog)[0] == "session 'trainer': recovering from AbortedError('lost')"
    assert messages(caplog)[1].startswith(
        "a caller has waited 1 s for session 'trainer' to recover: background task 'cleans_up', at "
    )


@pytest.mark.plain_tasks
async def test_the_default_grace_period(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It is 10 seconds, of a session and of a `join`; each is named after a
    second.
    """
    ended = list[str]()
    coord = ah.Coordinator()

    async def join() -> None:
        coord.start_soon(forever, name="reader")
        await coord.join()
        ended.append("join")

    async def use() -> None:
        async with doubling() as session:
            session.start_soon(forever)
        ended.append("session")

    tasks = [asyncio.create_task(join())]
    await ticks(20)
    clock.advance(5)
    assert messages(caplog) == []  # before the stop
    coord.request_stop()
    tasks.append(asyncio.create_task(use(), name="reader of shard 3"))
    await ticks(20)
    await advance_clock(clock, 9.9, 20)
    assert ended == []
    clock.advance(0.1)
    await asyncio.wait(tasks)
    assert sorted(ended) == ["join", "session"]
    joining, closing_session = messages(caplog)[:2]
    assert joining.startswith("a caller has waited 1 s for coordinator to join background task")
    assert closing_session.startswith("a caller has waited 1 s for the end of session: step 0")
