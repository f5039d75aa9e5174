"""How a session ends: its reason, its background tasks, what hooks can still read, and closing it
from elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook, ManualClock
from tests.support.checks import refused
from tests.support.hooks import EndRecorder, PhaseHook
from tests.support.sessions import (
    NO_BACKOFF,
    counting,
    doubling,
    make_runs,
    outcome,
)
from tests.support.waiting import (
    HANG_SECS,
    advance_clock,
    forever,
    ticks,
    until_true,
)

pytestmark = pytest.mark.every_python

CLEAN_ENDS = [
    ah.OutOfRangeError("no more"),
    StopIteration("stray"),
    StopAsyncIteration(),
    ah.StopRequestedError("enough"),
]


# -- the reason


@pytest.mark.parametrize("end", CLEAN_ENDS, ids=repr)
async def test_an_exception_that_ends_the_block_cleanly_leaves_a_reason(
    end: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """A block that is left cleanly by an exception says by which: in `stop_reason`, and in the log
    at level INFO.
    """
    seen: list[bool] = []

    async def see(_: object) -> None:
        seen.append(session.coord.should_stop())

    caplog.set_level(logging.INFO, "aiohooks")
    session = doubling(PhaseHook("end", see), name="trainer")
    assert await outcome(session, error=end) is None
    reason = f"the block was left by {end!r}"
    assert (session.stop_reason, session.status().stop_reason) == (reason, reason)
    assert caplog.messages == [f"session 'trainer': {reason}, which is a clean end"]
    assert seen == [False]  # it is no stop: hooks and tasks are not interrupted by it


@pytest.mark.parametrize(
    ("asked", "end", "reason"),
    [
        ("in the block", None, "enough"),
        ("in the block", ah.StopRequestedError("?"), "enough"),
        ("in the block", OSError("broken"), "enough"),
        ("in close", None, "enough"),
        (None, None, None),
        (None, OSError("broken"), "the session failed: OSError('broken')"),
    ],
)
async def test_the_first_reason_is_kept(
    asked: str | None, end: BaseException | None, reason: str | None
) -> None:
    """Also as late as in the last hook; leaving the block without a stop is none, and a task that
    ends then invents none.
    """

    async def stop(place: str) -> None:
        if place == asked:
            assert session.stop_reason is None
            session.request_stop("enough")
            session.request_stop("even later")

    async def use(_: object) -> None:
        session.start_soon(session.until, forever())
        await ticks()
        await stop("in the block")

    session = doubling(PhaseHook("close", lambda _: stop("in close")))
    assert await outcome(session, use, end) is (end if isinstance(end, OSError) else None)
    assert session.stop_reason == reason


# -- background tasks


Start = Callable[[ah.AsyncMonitoredSession], Callable[..., asyncio.Task[Any]]]
STARTS: dict[str, Start] = {
    "session": lambda session: session.start_soon,
    "coord": lambda session: session.coord.start_soon,
}
BY = pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)


@BY
@pytest.mark.parametrize("starter", STARTS.values(), ids=STARTS)
async def test_a_task_that_is_started_in_the_grace_period_is_waited_for(
    start: Start, starter: Start, clock: ManualClock
) -> None:
    """A background task may start others while the session closes; they have what is left of the
    same grace period.
    """
    session = doubling(stop_grace_period_secs=9)
    ended = list[str]()

    async def flush() -> None:
        await ticks(10)
        ended.append("flush")

    async def slow() -> None:
        try:
            await forever()
        except asyncio.CancelledError as error:
            ended.append(str(error))
            raise

    async def watch() -> None:
        await session.coord.wait_for_stop()
        start(session)(flush)
        start(session)(slow)

    async def use(_: object) -> None:
        starter(session)(watch)
        await session.run("loss")

    ending = asyncio.create_task(outcome(session, use))
    await until_true(lambda: ended)
    await ticks(20)
    assert not ending.done()
    clock.advance(9)
    assert await ending is None
    assert clock.pending == 0
    assert ended == ["flush", "the session has ended, and its grace period of 9 s is over"]


@BY
async def test_no_task_is_started_after_the_background_tasks_have_ended(start: Start) -> None:
    """Starting a task in `close`, in the cleanup of a cancelled task or after the end is refused,
    so none survives.
    """
    refusals: list[str] = []

    async def starts(*_: object) -> None:
        with refused(ah.errors.SessionClosedError, "task"):
            start(session)(forever)
        refusals.append(session.status().state)

    async def starts_in_cleanup() -> None:
        try:
            await forever()
        finally:
            await starts()

    async def use(_: object) -> None:
        session.start_soon(starts_in_cleanup)
        session.coord.start_soon(starts_in_cleanup)
        await ticks()
        raise OSError("broken")

    session = doubling(PhaseHook("close", starts))
    assert isinstance(await outcome(session, use), OSError)
    await starts()
    assert refusals == ["closing", "closing", "closing", "closed"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("bad data"), "the session failed: ValueError('bad data')"),
        (asyncio.CancelledError(), "the session was cancelled"),
        (KeyboardInterrupt(), "the session failed: KeyboardInterrupt()"),
    ],
    ids=["failure", "cancel", "interrupt"],
)
async def test_background_tasks_get_the_reason_of_their_cancel(
    error: BaseException, reason: str, clock: ManualClock
) -> None:
    """At a failed end tasks are cancelled immediately and once, with the reason as message;
    `stop_reason` has it, too. `end` is not called.
    """
    messages: list[str] = []
    hook = EndRecorder()
    session = doubling(hook)

    async def generates(wait: Callable[[], Awaitable[Any]]) -> None:
        try:
            await wait()
        except asyncio.CancelledError as cancelled:
            messages.append(str(cancelled))
            await ticks()  # a second cancel would interrupt this
            messages.append(str(session.stop_reason))
            raise

    async def use(_: object) -> None:
        for wait in (forever, lambda: session.until(forever()), session.coord.wait_for_stop):
            session.start_soon(generates, wait)
        await ticks()

    assert await outcome(session, use, error) is error
    assert (messages, clock.now(), session.stop_reason) == ([reason] * 6, 0, reason)
    assert hook.calls == ["begin", f"close({type(error).__name__})"]


# -- errors of end and close


@pytest.mark.parametrize("phase", ["end", "close"])
async def test_groups_out_of_end_and_close_are_flat(phase: str) -> None:
    """All hooks are called, and their errors raised; the members of a group stand in for it, each
    with the group's notes.
    """
    group = ExceptionGroup(
        "two rows are bad", [ValueError(1), ExceptionGroup("nested", [ValueError(2)])]
    )
    group.add_note("in file rows.csv")
    hooks = [
        FaultInjectionHook({(phase, 1): error}, str(error)) for error in (group, KeyError("b"))
    ]
    raised = await outcome(doubling(*hooks))
    assert isinstance(raised, ExceptionGroup)
    assert f"2 failures in {phase}" in str(raised)
    rows = [error for error in raised.exceptions if isinstance(error, ValueError)]
    expected = (
        [KeyError, ValueError, ValueError]
        if phase == "close"
        else [ValueError, ValueError, KeyError]
    )
    assert [type(error) for error in raised.exceptions] == expected
    assert [error.args for error in rows] == [(1,), (2,)]
    assert all(
        error.__notes__ == ["in file rows.csv", f"raised by FaultInjectionHook.{phase}"]
        for error in rows
    )


# -- the last step in `close`


class LastStepHook(ah.SessionRunHook):
    """Reads its session when it is closed, as a hook does that writes the last step then."""

    session: ah.Session

    def __init__(self) -> None:
        self.closed_with: list[tuple[type[BaseException] | None, int, Any, bool]] = []

    async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
        self.session = session

    async def close(self, exc: BaseException | None) -> None:
        await asyncio.sleep(0)
        session = self.session
        step = session.global_step.latest.step
        total = session.variables.snapshot()["total"]
        self.closed_with.append((None if exc is None else type(exc), step, total, session.closed))


@pytest.mark.parametrize(
    ("faults", "kind", "step"),
    [
        ({("after_run", 3): OSError("no")}, OSError, 3),
        ({("before_run", 3): ah.AbortedError("lost")}, None, 3),
        ({("after_create_session", 1): OSError("no")}, OSError, 0),
    ],
    ids=["behind the commit", "recovered", "not opened"],
)
async def test_the_session_stays_readable_in_close(faults: Any, kind: Any, step: int) -> None:
    """The one that the hook got last is closed, and has the last step that was committed, with the
    variables of that step.
    """

    async def train(session: ah.AsyncMonitoredSession) -> None:
        await make_runs(session, 3, "train")

    hook = LastStepHook()
    session = counting(hook, FaultInjectionHook(faults), recovery=NO_BACKOFF)
    assert isinstance(await outcome(session, train), kind or type(None))
    assert hook.closed_with == [(kind, step, step, True)]


# -- a stop is quick


async def put_forever(queue: asyncio.Queue[int]) -> None:
    while True:
        await queue.put(1)


async def get_forever(queue: asyncio.Queue[int]) -> None:
    while True:
        await queue.get()


@pytest.mark.parametrize("work", [put_forever, get_forever])
async def test_tasks_that_only_queues_could_wake_are_cancelled_early(
    work: Callable[[asyncio.Queue[int]], Coroutine[Any, Any, None]],
    clock: ManualClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing uses their queues any more: the grace period would pass for nothing."""
    caplog.set_level("INFO")
    session = doubling(name="trainer")
    async with session:
        tasks = [session.start_soon(work, asyncio.Queue[int](1), name="pump") for _ in range(2)]
        await ticks()
        ending = asyncio.create_task(session.aclose())
        await ticks()
        for _ in range(4):
            await advance_clock(clock, 0.06)
        await ending
    assert all(task.cancelled() for task in tasks)
    assert "cancelled early, because no other task uses their queues" in caplog.text


async def test_a_queue_that_the_program_uses_is_not_idle(clock: ManualClock) -> None:
    """What a task of the session waits for may come from outside of the session."""
    queue = asyncio.Queue[int](1)

    async def produce() -> None:
        for number in range(5):
            await queue.put(number)

    async with doubling() as session:
        task = session.start_soon(produce)
        await ticks()
        ending = asyncio.create_task(session.aclose())
        await ticks()
        for _ in range(5):
            await advance_clock(clock, 0.06)
            await queue.get()
        await ending
    assert not task.cancelled()


async def test_a_wait_for_a_queue_with_a_time_limit_is_not_idle(clock: ManualClock) -> None:
    """Its task continues by itself, and has work left that it does then."""
    flushed = False
    limit = asyncio.timeout(HANG_SECS)

    async def flush_at_times() -> None:
        nonlocal flushed
        with pytest.raises(TimeoutError):
            async with limit:
                await asyncio.Queue[int]().get()
        await asyncio.sleep(0)
        flushed = True

    async with doubling() as session:
        session.start_soon(flush_at_times)
        await ticks()
        ending = asyncio.create_task(session.aclose())
        await ticks()
        for _ in range(5):
            await advance_clock(clock, 0.06)
        assert not ending.done()
        limit.reschedule(asyncio.get_running_loop().time())
        await ending
    assert flushed


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
