"""How a session ends: background failures, errors of `end` and `close`, and closing it from elsewhere."""

from __future__ import annotations

import asyncio
import logging

import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook, ManualClock, RecordingHook
from tests.support.checks import refused
from tests.support.hooks import PhaseHook
from tests.support.sessions import double
from tests.support.waiting import fail, forever, ticks

pytestmark = pytest.mark.every_python


# -- background tasks


async def test_a_step_function_that_settles_the_cancel_of_a_background_failure() -> None:
    """It returns its result, nothing is left of the cancel, and the failure comes out of the next run."""
    begun = asyncio.Event()

    async def settle(context: ah.session.StepContext) -> str:
        try:
            begun.set()
            await forever()
        except asyncio.CancelledError:
            return "settled"
        raise AssertionError

    async def fail_then() -> None:
        await begun.wait()
        raise OSError("no disk")

    task = asyncio.current_task()
    assert task is not None
    async with ah.AsyncMonitoredSession(double) as session:
        session.start_soon(fail_then)
        assert await session.run_step_fn(settle) == "settled"
        assert task.cancelling() == 0
        with pytest.raises(OSError, match="no disk"):
            await session.run("loss")
    assert task.cancelling() == 0


@pytest.mark.parametrize("end", [ah.OutOfRangeError("no more"), StopAsyncIteration(), ah.StopRequestedError("stop")], ids=repr)
async def test_a_clean_end_of_a_task_stops_the_session_cleanly(end: Exception) -> None:
    """End of input in a background task is a stop of the whole session, and no failure."""
    hook = RecordingHook()
    async with ah.AsyncMonitoredSession(double, [hook]) as session:
        session.start_soon(fail, end, name="reader")
        await ticks()
        assert [one async for one in session.steps("loss")] == []
    assert hook.closed_with == [None]
    assert session.stop_reason == f"background task 'reader' ended: {end!r}"


async def test_the_body_error_stays_primary() -> None:
    """An unrelated error of the body is raised; the background failure is noted on it."""
    error = ValueError("the body")

    async def use() -> None:
        async with ah.AsyncMonitoredSession(double) as session:
            session.start_soon(fail, OSError("died"))
            await ticks()
            raise error

    with pytest.raises(ValueError, match="the body") as caught:
        await use()
    assert caught.value is error
    assert caught.value.__notes__ == ["a background task had failed: OSError('died')"]


async def test_a_background_loop_over_runs_ends_with_the_session() -> None:
    """A task that keeps running the session while the block is left ends cleanly with it."""
    runs: list[int] = []

    async def work(session: ah.AsyncMonitoredSession) -> None:
        while not session.should_stop():
            runs.append(await session.run("loss"))

    async def step() -> dict[str, int]:
        await asyncio.sleep(0)
        return {"loss": 1}

    async with ah.AsyncMonitoredSession(step) as session:
        for _ in range(2):
            session.start_soon(work, session)
        for _ in range(3):
            await session.run("loss")
    assert session.status().state == "closed"


# -- errors of end and close


async def test_errors_of_end_are_collected() -> None:
    """Every hook's `end` is called whatever the others' do; one error is raised as it is, several as one group."""
    for failing in ([1], [0, 2]):
        record: list[tuple[str, str]] = []
        errors = {number: OSError(f"end of {number}") for number in failing}
        hooks = [
            FaultInjectionHook({("end", 1): errors[number]} if number in errors else {}, str(number), record=record)
            for number in range(3)
        ]
        with pytest.raises((OSError, ExceptionGroup)) as caught:
            async with ah.AsyncMonitoredSession(double, hooks) as session:
                await session.run("loss")
        raised = caught.value
        assert (raised.exceptions if isinstance(raised, ExceptionGroup) else (raised,)) == tuple(errors.values())
        assert [name for name, phase in record if phase == "end"] == ["0", "1", "2"]
        assert [name for name, phase in record if phase == "close"] == ["2", "1", "0"]
        assert [hook.closed_with for hook in hooks] == [[raised]] * 3


@pytest.mark.parametrize("phase", ["end", "close"])
async def test_groups_out_of_end_and_close_are_flat(phase: str) -> None:
    """All hooks are called, and their errors raised; the members of a group stand in for it, each with the group's notes."""
    group = ExceptionGroup("two rows are bad", [ValueError(1), ExceptionGroup("nested", [ValueError(2)])])
    group.add_note("in file rows.csv")
    hooks = [FaultInjectionHook({(phase, 1): error}, str(error)) for error in (group, KeyError("b"))]
    with pytest.raises(ExceptionGroup, match=f"2 failures in {phase}") as caught:
        async with ah.AsyncMonitoredSession(double, hooks):
            pass
    rows = [error for error in caught.value.exceptions if isinstance(error, ValueError)]
    expected = [KeyError, ValueError, ValueError] if phase == "close" else [ValueError, ValueError, KeyError]
    assert [type(error) for error in caught.value.exceptions] == expected
    assert [error.args for error in rows] == [(1,), (2,)]
    origin = f"raised by FaultInjectionHook#1.{phase}"
    assert all(error.__notes__ == ["in file rows.csv", origin] for error in rows)


async def test_an_earlier_error_is_not_replaced_by_one_of_close(caplog: pytest.LogCaptureFixture) -> None:
    """The first error reaches the caller; errors of closing are noted on it and logged."""
    error = ValueError("first")
    with pytest.raises(ValueError, match="first") as caught:
        async with ah.AsyncMonitoredSession(double, [FaultInjectionHook({("close", 1): OSError("then")})]):
            raise error
    assert caught.value is error
    assert caught.value.__notes__ == ["and then: OSError('then')"]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


# -- closing


async def test_closing_twice_is_harmless() -> None:
    """`aclose` inside the block is a clean end; again, and leaving the block, do nothing."""
    hook = RecordingHook()
    async with ah.AsyncMonitoredSession(double, [hook]) as session:
        await session.run("loss")
        await session.aclose()
        assert session.should_stop()
        await session.aclose()
    await session.aclose()
    assert hook.phases() == ["begin", "after_create_session", "before_run", "after_run", "end", "close"]


async def test_an_error_after_closing_reaches_the_caller() -> None:
    """A block that fails after `aclose` raises its error; one that means a clean end is swallowed."""
    async with ah.AsyncMonitoredSession(double) as session:
        await session.aclose()
        raise ah.OutOfRangeError("end")

    async def use() -> None:
        async with ah.AsyncMonitoredSession(double) as session:
            await session.aclose()
            raise OSError("late")

    with pytest.raises(OSError, match="late"):
        await use()


async def test_closing_lets_the_run_of_another_task_finish() -> None:
    """`aclose` during the run of another task waits for it, and for its `after_run`; queued ones do not begin."""
    gate, hook = asyncio.Event(), RecordingHook()

    async def step() -> dict[str, int]:
        await gate.wait()
        return {"loss": 5}

    async with ah.AsyncMonitoredSession(step, [hook]) as session:
        running = asyncio.create_task(session.run("loss"))
        await ticks()
        queued = asyncio.create_task(session.run("loss"))
        await ticks()
        closing = asyncio.create_task(session.aclose())
        await ticks()
        assert session.should_stop()
        assert not closing.done()
        gate.set()
        assert await running == 5
        await closing
        with refused(ah.errors.SessionClosedError, "this session is"):
            await queued
    assert hook.phases() == ["begin", "after_create_session", "before_run", "after_run", "end", "close"]


async def test_a_failing_block_ends_the_run_of_another_task() -> None:
    """When the block fails the run of another task is ended immediately."""

    async def step() -> None:
        await forever()

    runs: list[asyncio.Task[None]] = []

    async def use() -> None:
        async with ah.AsyncMonitoredSession(step) as session:
            runs.append(asyncio.create_task(session.run("step")))
            await ticks()
            raise OSError("broken")

    with ManualClock(), pytest.raises(OSError, match="broken"):
        await use()
    with refused(ah.errors.SessionClosedError, "the session was closed during this run"):
        await runs[0]


@pytest.mark.parametrize(
    "end",
    [ah.OutOfRangeError("no more"), StopIteration("stray"), StopAsyncIteration(), ah.StopRequestedError("enough")],
    ids=repr,
)
async def test_an_exception_that_ends_the_block_cleanly_leaves_a_reason(end: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """A block that is left cleanly by an exception says by which: in `stop_reason`, and in the log at level INFO."""
    seen: list[bool] = []

    async def see(session: ah.Session) -> None:
        seen.append(monitored.coord.should_stop())

    caplog.set_level(logging.INFO, "aiohooks")
    async with ah.AsyncMonitoredSession(double, [PhaseHook("end", see)], name="trainer") as monitored:
        raise end
    reason = f"the block was left by {end!r}"
    assert (monitored.stop_reason, monitored.status().stop_reason) == (reason, reason)
    assert caplog.messages == [f"session 'trainer': {reason}, which is a clean end"]
    assert seen == [False]  # it is no stop: hooks and tasks are not interrupted by it


async def test_a_stop_in_the_last_hook_is_the_reason() -> None:
    """A session that was left without one has none yet when its hooks are closed."""

    async def stop(*_: object) -> None:
        assert session.stop_reason is None
        session.request_stop("too late for the loop")
        session.request_stop("even later")

    async with ah.AsyncMonitoredSession(double, [PhaseHook("close", stop)]) as session:
        await session.run("loss")
    assert session.stop_reason == "too late for the loop"


async def test_a_stop_keeps_its_reason_when_an_exception_ends_the_block() -> None:
    """The reason of a stop is not replaced by the exception that then ends the block; leaving it without one has no reason."""
    async with ah.AsyncMonitoredSession(double) as session:
        session.request_stop("enough")
        await session.run("loss")
    assert session.stop_reason == "enough"
    async with ah.AsyncMonitoredSession(double) as session:
        await session.run("loss")
    assert session.stop_reason is None


@pytest.mark.parametrize("phase", ["begin", "before_run", "step", "end", "close"])
async def test_errors_name_the_session(phase: str) -> None:
    """An error of a session that was given a name says once in which one it was raised."""
    error = ValueError("wrong")

    async def raise_error(*_: object) -> None:
        raise error

    async def step() -> dict[str, int]:
        if phase == "step":
            raise error
        return {"loss": 1}

    async def main(name: str | None) -> None:
        async with ah.AsyncMonitoredSession(step, [PhaseHook(phase, raise_error)], name=name) as session:
            await session.run("loss")

    with pytest.raises(ValueError, match="wrong"):
        await main(None)
    unnamed = list(getattr(error, "__notes__", []))
    with pytest.raises(ValueError, match="wrong") as caught:
        await main("trainer")
    assert caught.value is error
    assert [note for note in error.__notes__ if note not in unnamed] == ["in session 'trainer'"]
