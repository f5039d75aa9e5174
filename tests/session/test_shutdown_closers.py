"""Several tasks that close one session, and calls that would wait for themselves."""

from __future__ import annotations

import asyncio

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock
from tests.support.checks import refused
from tests.support.hooks import PhaseHook
from tests.support.sessions import doubling, outcome
from tests.support.waiting import ticks

pytestmark = pytest.mark.every_python


class SlowEnd(ah.SessionRunHook):
    """An `end` that saves until the test lets it finish, and a `close` after it."""

    def __init__(self, phase: str = "end") -> None:
        self.phase = phase
        self.started = asyncio.Event()
        self.released = asyncio.Event()
        self.done: list[str] = []

    async def end(self, session: ah.Session) -> None:
        await self._save("end")

    async def close(self, exc: BaseException | None) -> None:
        await self._save("close")

    async def _save(self, phase: str) -> None:
        if phase == self.phase:
            self.started.set()
            await self.released.wait()
        await ticks()
        self.done.append(phase)


# -- several closers


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_block_that_fails_while_another_task_closes(
    cancelled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits for that, and its error is raised then, the same object; of a cancel it is the
    context, and logged.
    """
    hook, error, closing = SlowEnd(), OSError("late"), list[asyncio.Task[None]]()

    async def use(session: ah.AsyncMonitoredSession) -> None:
        closing.append(asyncio.create_task(session.aclose()))
        closing[0].add_done_callback(lambda _: hook.done.append("closed"))
        await hook.started.wait()

    body = asyncio.create_task(outcome(doubling(hook), use, error))
    await hook.started.wait()
    await ticks(20)
    assert not body.done()
    if cancelled:
        body.cancel()
        await ticks()
    hook.released.set()
    raised = await body
    if cancelled:
        assert isinstance(raised, asyncio.CancelledError)
        assert raised.__context__ is error
        assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [error]
    else:
        assert raised is error
    await asyncio.wait(closing)
    await ticks()
    assert hook.done == ["end", "close", "closed"]


# -- calls that would wait for themselves


@pytest.mark.parametrize("phase", ["before_run", "after_run", "end", "close"])
async def test_a_hook_cannot_close_its_session(phase: str) -> None:
    """`aclose` inside a hook, also one of the end, is refused: it would wait for the hook
    itself.
    """
    attempts: list[str] = []

    async def closes(*_: object) -> None:
        with refused(
            ah.errors.NestedRunError, "aclose was called from inside", "which would deadlock"
        ):
            await session.aclose()
        attempts.append(phase)

    session = doubling(PhaseHook(phase, closes))
    assert await outcome(session, lambda session: session.run("loss")) is None
    assert attempts == [phase]


async def test_a_background_task_cannot_close_its_session(clock: ManualClock) -> None:
    """`aclose` in a background task is refused immediately, before and while the session closes: it
    is to request a stop.
    """
    attempts: list[str] = []

    async def closes() -> None:
        for _ in range(2):
            with refused(
                ah.errors.NestedRunError,
                "called from the background task 'closes'",
                "use request_stop to end",
            ):
                await session.aclose()
            attempts.append(session.status().state)
            await session.coord.wait_for_stop()

    async with doubling() as session:
        session.start_soon(closes)
        session.coord.start_soon(closes)
        await ticks()
    assert (attempts, clock.now()) == (["open", "open", "closing", "closing"], 0)
