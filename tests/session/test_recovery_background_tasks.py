"""Background tasks that fail together, or during a recovery: one recovery, and no cancellation comes out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

import aiohooks as ah
from tests.support.sessions import NO_BACKOFF, double, recovery_policy
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
        raise ah.AbortedError("for good")  # of a type that the policy has

    async def go() -> None:
        async with ah.AsyncMonitoredSession(double, [Workers(1, crash)], recovery=NO_BACKOFF) as session:
            session.start_soon(fail)
            async for _ in session.steps("loss"):
                pass

    with pytest.raises(ah.AbortedError, match="for good"):
        await go()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.parametrize("later", range(4))
async def test_a_run_that_begins_when_a_task_fails(later: int) -> None:
    """The run recovers from the failure that it finds; the interrupt for the same failure does not cancel the recovery."""
    failing = asyncio.Event()

    async def crash(coord: ah.Coordinator, number: int) -> None:
        await ticks(5)
        failing.set()
        raise ah.AbortedError("crash")

    workers = Workers(1, crash)
    async with ah.AsyncMonitoredSession(double, [workers], recovery=NO_BACKOFF) as session:
        while not failing.is_set():
            await ticks()
        await ticks(later)
        await session.run("loss")
    assert workers.sessions == 2


class FailingStarter(ah.SessionRunHook):
    """Starts a task in every session; that of the second session fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.sessions = 0

    async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
        self.sessions += 1
        coord.start_soon(self.one, self.sessions)

    async def one(self, number: int) -> None:
        if number == 2:
            raise self.error


@pytest.mark.parametrize("error", [ah.AbortedError("again"), ValueError("for good")], ids=["recoverable", "not recoverable"])
async def test_a_task_of_the_new_session_fails_while_hooks_get_it(error: Exception) -> None:
    """The failure is recovered from, or comes out; the interrupt of the other hooks is not taken for a cancellation."""
    starter, runs = FailingStarter(error), 0

    class Waiting(ah.SessionRunHook):
        async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
            await ticks(5)

    async def step() -> dict[str, int]:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise ah.AbortedError("the step")
        return {"loss": 1}

    async def go() -> None:
        async with ah.AsyncMonitoredSession(step, [starter, Waiting()], recovery=NO_BACKOFF) as session:
            await session.run("loss")

    if isinstance(error, ah.AbortedError):
        await go()
        assert (starter.sessions, runs) == (3, 2)
    else:
        with pytest.raises(ValueError, match="for good") as raised:
            await go()
        assert raised.value is error
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


# -- while a loop of steps waits for its next feed


class FailingTasks(ah.SessionRunHook):
    """Starts a background task in every session; those of the first sessions fail when the test says so."""

    def __init__(self, failures: int, error: BaseException, recover: Callable[[], object] = lambda: None) -> None:
        self.fail = asyncio.Event()
        self.sessions = 0
        self._failures, self._error, self._recover = failures, error, recover

    async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
        self.sessions += 1
        if self.sessions > 1:
            self._recover()
        coord.start_soon(self._task, coord, self.sessions)

    async def _task(self, coord: ah.Coordinator, number: int) -> None:
        if number <= self._failures:
            await self.fail.wait()
            raise self._error
        await coord.wait_for_stop()


@pytest.mark.parametrize("failures", [1, 3])
async def test_a_loss_during_the_wait_for_a_feed_is_recovered_meanwhile(failures: int) -> None:
    """The session recovers while the wait continues, also if the feed comes from what the recovery starts again."""
    arrived, feeds_closed = asyncio.Event(), False
    hook = FailingTasks(failures, ah.UnavailableError("away"), recover=lambda: hook.sessions > failures and arrived.set())

    async def feeds() -> AsyncIterator[int]:
        nonlocal feeds_closed
        try:
            yield 1
            hook.fail.set()
            await arrived.wait()
            yield 2
            yield 3
        finally:
            feeds_closed = True

    async with ah.AsyncMonitoredSession(double, [hook], recovery=recovery_policy(no_progress_limit=9)) as session:
        assert [loss async for loss in session.steps("loss", feeds=feeds())] == [2, 4, 6]
        assert session.stop_reason is None
    assert (hook.sessions, feeds_closed, session.global_step.latest.step) == (failures + 1, True, 3)


async def test_a_loss_during_the_wait_for_a_queue_is_recovered_meanwhile() -> None:
    """The same for feeds out of a queue, into which the recovery puts the next one."""
    queue = asyncio.Queue[int]()
    queue.put_nowait(1)
    hook = FailingTasks(1, ah.UnavailableError("away"), recover=lambda: queue.put_nowait(2))
    losses: list[int] = []
    async with ah.AsyncMonitoredSession(double, [hook, ah.StopAtStepHook(last_step=2)], recovery=NO_BACKOFF) as session:
        async for loss in session.steps("loss", feeds=queue):
            losses.append(loss)
            hook.fail.set()
    assert (losses, hook.sessions) == ([2, 4], 2)


async def test_a_loss_before_the_wait_for_a_feed_is_recovered_first() -> None:
    """What failed in the body of the loop is recovered before the next feed is waited for."""
    hook, seen = FailingTasks(1, ah.UnavailableError("away")), list[int]()

    async def feeds() -> AsyncIterator[int]:
        for number in (1, 2, 3):
            seen.append(hook.sessions)
            yield number

    async with ah.AsyncMonitoredSession(double, [hook], recovery=NO_BACKOFF) as session:
        async for loss in session.steps("loss", feeds=feeds()):
            if loss == 4:
                hook.fail.set()
                await ticks(3)
    assert seen == [1, 1, 2]
    assert session.global_step.latest.step == 3


async def test_a_recovery_that_gives_up_ends_the_wait_for_a_feed() -> None:
    """The last error comes out of the loop, with the history, when the attempts are used up."""
    hook = FailingTasks(9, error := ah.UnavailableError("away"))

    async def feeds() -> AsyncIterator[int]:
        hook.fail.set()
        await asyncio.Event().wait()
        yield 1

    session = ah.AsyncMonitoredSession(double, [hook], recovery=recovery_policy(max_attempts=2, no_progress_limit=9))

    async def train() -> None:
        async with session:
            async for _ in session.steps("loss", feeds=feeds()):
                pass

    with pytest.raises(ah.UnavailableError) as caught:
        await train()
    assert caught.value is error
    assert any("2 attempts are used up" in note for note in caught.value.__notes__)
    assert hook.sessions == 3


@pytest.mark.parametrize("how", ["stop", "failure", "cancel"])
async def test_what_ends_the_wait_for_a_feed(how: str) -> None:
    """A stop, a failure that is not recovered, and a cancellation end the wait, also during a recovery."""
    waiting, error = asyncio.Event(), ValueError("wrong")
    pauses = ah.RecoveryPolicy(backoff=ah.Backoff(initial_secs=600, max_secs=600, jitter=False))
    hook = FailingTasks(1, error if how == "failure" else ah.UnavailableError("away"))

    async def feeds() -> AsyncIterator[int]:
        waiting.set()
        await asyncio.Event().wait()
        yield 1

    session = ah.AsyncMonitoredSession(double, [hook], recovery=pauses)

    async def train() -> None:
        async with session:
            async for _ in session.steps("loss", feeds=feeds()):
                pass

    training = asyncio.create_task(train())
    await waiting.wait()
    hook.fail.set()
    await ticks()
    if how == "stop":
        session.request_stop("enough")
        await training
        assert session.stop_reason == "enough"
    elif how == "cancel":
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
    else:
        with pytest.raises(ValueError, match="wrong") as caught:
            await training
        assert caught.value is error
