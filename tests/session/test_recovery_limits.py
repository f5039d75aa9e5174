"""The limits of recovery: how often, with which pauses, and what is left when it gives up."""

from __future__ import annotations

import asyncio

import pytest

import aiohooks as ah
from aiohooks.session.recovery import RecoveryHistory
from aiohooks.testing import ManualClock, RecordingHook
from tests.support.checks import refused
from tests.support.hooks import PhaseHook, SessionRecorder
from tests.support.sessions import NO_BACKOFF, failing_step, recovery_policy
from tests.support.waiting import ticks

pytestmark = pytest.mark.every_python

# -- pauses


async def test_pauses_grow_up_to_a_limit() -> None:
    """Each attempt in a row is preceded by a pause twice as long as the one before, up to `max_secs`."""
    with ManualClock() as clock:
        recovery = ah.RecoveryPolicy(backoff=ah.Backoff(1, 5, jitter=False), no_progress_limit=10)
        step = failing_step(*[ah.AbortedError("lost")] * 5)
        async with ah.AsyncMonitoredSession(step, recovery=recovery) as session:
            running = asyncio.create_task(session.run("loss"))
            for recoveries, secs in enumerate((1, 2, 4, 5, 5), 1):
                await ticks(20)
                assert session.status().recoveries == recoveries
                clock.advance(secs - 0.001)
                await ticks(20)
                assert session.status().recoveries == recoveries
                assert not running.done()
                clock.advance(0.001)
            assert await running == 1
            assert clock.now() == pytest.approx(17)
            assert clock.pending == 0


async def test_a_completed_run_ends_the_series() -> None:
    """After a completed run the pauses, and the attempts, start from the beginning."""
    with ManualClock() as clock:
        recovery = ah.RecoveryPolicy(max_attempts=1, backoff=ah.Backoff(1, jitter=False))
        step = failing_step(ah.AbortedError("1"), None, ah.AbortedError("2"), None, ah.AbortedError("3"))
        async with ah.AsyncMonitoredSession(step, recovery=recovery) as session:
            for _ in range(3):
                running = asyncio.create_task(session.run("loss"))
                await ticks(20)
                clock.advance(1)
                assert await running == 1
            assert session.status().recoveries == 3


@pytest.mark.parametrize("attempt", [1, 2, 3, 10, 5000])
def test_a_pause_with_jitter_is_a_part_of_the_longest(attempt: int) -> None:
    """With jitter a pause is random, from 0 to what it would be without."""
    longest = ah.Backoff(0.5, 30, jitter=False).pause_secs(attempt)
    assert longest == min(30, 0.5 * 2 ** min(attempt - 1, 100))
    pauses = {ah.Backoff(0.5, 30).pause_secs(attempt) for _ in range(50)}
    assert all(0 <= pause <= longest for pause in pauses)
    assert len(pauses) > 1


async def test_a_stop_ends_the_pause_and_the_run_is_repeated() -> None:
    """A stop during a recovery ends the pause, and the run is still repeated."""
    with ManualClock() as clock:
        step = failing_step(ah.AbortedError("lost"))
        async with ah.AsyncMonitoredSession(step, recovery=ah.RecoveryPolicy(backoff=ah.Backoff(60))) as session:
            running = asyncio.create_task(session.run("loss"))
            await ticks(20)
            assert not running.done()
            session.request_stop("enough")
            assert await running == 1
            assert session.should_stop()
            with refused(ah.StopRequestedError, "enough"):
                await session.run("loss")
            assert clock.pending == 0


async def test_a_cancel_ends_the_pause_and_the_recovery() -> None:
    """A run that is cancelled while it pauses ends; there is no session any more, and the end is orderly."""
    hook = RecordingHook()
    with ManualClock():
        session = ah.AsyncMonitoredSession(
            failing_step(ah.AbortedError("lost")), [hook], recovery=ah.RecoveryPolicy(backoff=ah.Backoff(60, 60, jitter=False))
        )

        async def main() -> None:
            async with session:
                await session.run("loss")

        task = asyncio.create_task(main())
        await ticks(20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert hook.phases() == ["begin", "after_create_session", "before_run", "close"]


# -- giving up


async def test_attempts_are_counted() -> None:
    """After `max_attempts` recoveries in a row the last error is raised, the same object, with the history."""
    errors = [ah.AbortedError(f"number {number}") for number in range(1, 5)]
    sessions = SessionRecorder()
    session = ah.AsyncMonitoredSession(
        failing_step(*errors), [sessions], recovery=recovery_policy(max_attempts=3, no_progress_limit=9)
    )
    with pytest.raises(ah.AbortedError, match="number 4") as caught:
        async with session:
            await session.run("loss")
    assert caught.value is errors[3]
    assert caught.value.__notes__ == [
        "raised by operation 'step' at step 1",
        "recovery gave up: 3 attempts are used up; what failed, oldest first:",
        *(f"  the run of step 1: AbortedError('number {number}')" for number in range(1, 5)),
    ]
    assert sessions.attempts == [1, 2, 3, 4]
    assert [one.closed for one in sessions.sessions] == [True] * 4


async def test_a_session_that_gave_up_says_so() -> None:
    """After recovery gave up every use says so, caused by the last error; a loop ends; leaving is neither clean nor a failure."""
    hook = RecordingHook()
    error = ah.AbortedError("lost")
    async with ah.AsyncMonitoredSession(failing_step(error), [hook], recovery=recovery_policy(max_attempts=0)) as session:
        with pytest.raises(ah.AbortedError, match="lost"):
            await session.run("loss")
        for _ in range(2):
            with refused(
                ah.errors.RecoveryExhaustedError, "recovery has given up on AbortedError('lost')", "leave the session"
            ) as caught:
                await session.run("loss")
            assert caught.value.__cause__ is error
        assert session.should_stop()
        assert session.status().failure == "AbortedError('lost')"
        assert [values async for values in session.steps("loss")] == []
    assert "end" not in hook.phases()
    assert hook.phases().count("close") == 1


async def test_a_step_that_fails_again_and_again_is_given_up() -> None:
    """`no_progress_limit` is how often one step may fail, also when sessions, or earlier steps, succeed between."""
    graph = ah.Graph()
    failures: list[int] = []

    @graph.train_op
    async def train(global_step: int) -> int:
        if global_step == 2:
            failures.append(global_step)
            raise ah.AbortedError(f"failure {len(failures)}")
        return global_step

    async def use() -> None:
        async with ah.AsyncMonitoredSession(graph, recovery=recovery_policy(no_progress_limit=2, max_attempts=99)) as session:
            async for _ in session.steps("train"):
                pass

    with pytest.raises(ah.AbortedError, match="failure 3") as caught:
        await use()
    assert caught.value.__notes__[1:] == [
        "recovery gave up: step 3 failed 3 times (no_progress_limit=2); what failed, oldest first:",
        *(f"  the run of step 3: AbortedError('failure {number}')" for number in (1, 2, 3)),
    ]


def test_what_counts_as_progress() -> None:
    """That the step which failed was completed, not an earlier one, as after a restore; a step that fails anew counts anew."""
    history = RecoveryHistory(recovery_policy(no_progress_limit=2, max_attempts=1))
    lost = ah.AbortedError("lost")
    for _ in range(2):
        for _ in range(2):
            assert history.failed(lost, 5) is None
            history.completed(4)
        history.completed(5)
    for _ in range(2):
        assert history.failed(lost, 5) is None
        history.completed(4)
    assert history.failed(lost, 3) == "step 5 failed 3 times (no_progress_limit=2)"


async def test_runs_that_do_not_train_do_not_hide_a_failing_step() -> None:
    """Runs that succeed between and do not advance the step are no progress."""
    graph = ah.Graph()

    @graph.train_op
    async def train() -> None:
        raise ah.AbortedError("lost")

    graph.operation(name="look")(lambda: 1)

    async def use() -> None:
        async with ah.AsyncMonitoredSession(graph, recovery=recovery_policy(no_progress_limit=2, max_attempts=1)) as session:
            for _ in range(50):
                await session.run("look")
                await session.run("train")

    with pytest.raises(ah.AbortedError, match="lost") as caught:
        await use()
    assert "recovery gave up" in caught.value.__notes__[1]


async def test_an_error_while_recovering_ends_it() -> None:
    """Another error out of the new session's creation is raised as it is, and the session cannot be used any more."""

    async def second_time(session: ah.Session, coord: ah.Coordinator) -> None:
        if hook.calls == 2:
            raise OSError("cannot start again")

    hook = PhaseHook("after_create_session", second_time)
    record = RecordingHook()
    with pytest.raises(OSError, match="cannot start again"):
        async with ah.AsyncMonitoredSession(
            failing_step(ah.AbortedError("lost")), [hook, record], recovery=NO_BACKOFF
        ) as session:
            await session.run("loss")
    assert "end" not in record.phases()


async def test_a_clean_end_while_recovering_is_a_clean_end() -> None:
    """A clean-end error out of `after_create_session` while recovering ends the block; `end` gets the new, open session."""
    ended: list[tuple[int, bool]] = []

    async def second_time(session: ah.Session, coord: ah.Coordinator) -> None:
        sessions.append(session)
        if len(sessions) == 2:
            raise ah.OutOfRangeError("nothing left to do")

    async def end(session: ah.Session) -> None:
        ended.append((sessions.index(session), session.closed))

    sessions: list[ah.Session] = []
    hooks = [PhaseHook("after_create_session", second_time), PhaseHook("end", end)]
    async with ah.AsyncMonitoredSession(failing_step(ah.AbortedError("lost")), hooks, recovery=NO_BACKOFF) as session:
        await session.run("loss")
        raise AssertionError("the run must not return")
    assert ended == [(1, False)]
    assert sessions[1].closed
