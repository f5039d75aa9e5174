"""Background tasks that fail together, or during a recovery: one recovery, and no cancellation comes out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

import aiohooks as ah
from tests.support.sessions import NO_BACKOFF, double
from tests.support.waiting import ticks

pytestmark = pytest.mark.every_python

Work = Callable[[ah.Coordinator, int], Awaitable[None]]


class Workers(ah.SessionRunHook):
    """Starts workers in every session; those of the first session call the test's function."""

    def __init__(self, count: int, work: Work) -> None:
        self.count, self.work = count, work
        self.sessions = 0

    async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
        self.sessions += 1
        first = self.sessions == 1
        for number in range(self.count):
            coord.start_soon(self.one, first, coord, number)
        await ticks(3)

    async def one(self, first: bool, coord: ah.Coordinator, number: int) -> None:
        if first:
            await self.work(coord, number)
        await coord.until(asyncio.Event().wait())

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        await ticks(15)


async def train(workers: Workers, *, steps: int = 3) -> ah.AsyncMonitoredSession:
    session = ah.AsyncMonitoredSession(double, [workers, ah.StopAtStepHook(last_step=steps)], recovery=NO_BACKOFF)
    async with session:
        async for _ in session.steps("loss"):
            pass
    return session


@pytest.mark.parametrize("apart", [0, 1, 2, 5])
@pytest.mark.parametrize("count", [2, 6])
async def test_workers_that_crash_one_after_the_other(count: int, apart: int, caplog: pytest.LogCaptureFixture) -> None:
    """Several crashes within a few ticks are one recovery; a crash during the recovery does not cancel it."""

    async def crash(coord: ah.Coordinator, number: int) -> None:
        await ticks(8 + apart * number)
        raise ah.AbortedError(f"crash {number}")

    workers = Workers(count, crash)
    session = await train(workers)
    assert session.global_step.latest.step == 3
    assert workers.sessions == 2
    assert session.stop_reason == "step 3 reached the last step, 3"


async def test_an_error_that_is_passed_on_is_one_error(caplog: pytest.LogCaptureFixture) -> None:
    """Workers that wait in `until` get one worker's error, and end with it: that is no other failure, nor logged."""

    async def work(coord: ah.Coordinator, number: int) -> None:
        if number == 0:
            await ticks(8)
            raise ah.AbortedError("crash")

    workers = Workers(6, work)
    session = await train(workers)
    assert session.global_step.latest.step == 3
    assert workers.sessions == 2
    messages = [record.getMessage() for record in caplog.records]
    assert [text.partition(": ")[2] for text in messages] == ["recovering from AbortedError('crash')"]


@pytest.mark.parametrize("when", range(0, 40, 3))
async def test_a_task_of_the_whole_session_fails_meanwhile(when: int) -> None:
    """A task that no recovery brings back fails before, in or after the recovery of another: its error always comes out."""

    async def crash(coord: ah.Coordinator, number: int) -> None:
        await ticks(8)
        raise ah.AbortedError("crash")

    async def fail() -> None:
        await ticks(when)
        raise ValueError("for good")

    async def go() -> None:
        async with ah.AsyncMonitoredSession(double, [Workers(1, crash)], recovery=NO_BACKOFF) as session:
            session.start_soon(fail)
            async for _ in session.steps("loss"):
                pass

    with pytest.raises(ValueError, match="for good"):
        await go()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
