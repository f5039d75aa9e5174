"""Errors of a session that ends: none is lost, whatever else ends it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook, ManualClock, RecordingHook
from tests.support.checks import logged_errors
from tests.support.hooks import PhaseHook
from tests.support.sessions import (
    CreatorOf,
    counting_graph,
    doubling,
    forever_step,
    outcome,
    recovery_policy,
    run_session,
)
from tests.support.waiting import fail, forever, parked, raises_after, ticks, uncancellable

pytestmark = pytest.mark.every_python

OWNERS = pytest.mark.parametrize("owner", ["session", "coord"])


def notes(error: BaseException | None) -> list[str]:
    return [*getattr(error, "__notes__", [])]


class OddError(Exception):
    """Has no text: its `__repr__` and `__str__` raise."""

    def __repr__(self) -> str:
        raise AttributeError("code")

    __str__ = __repr__


# -- several ends: which comes out, and where the others are

BODY, TASK, END, CLOSE = (f"of the {place}" for place in ("body", "task", "end", "close"))
CANCEL = "a cancel"
THEN = "and then: OSError('{}')"
KEPT: dict[str, tuple[set[str], str, list[str], str | None, list[str]]] = {
    # What fails, and whether the caller is cancelled at the end: what comes out, its notes, its
    # context, what is logged.
    "body and task": (
        {BODY, TASK},
        BODY,
        [f"a background task had failed: OSError({TASK!r})"],
        None,
        [TASK],
    ),
    "body and close": ({BODY, CLOSE}, BODY, [THEN.format(CLOSE)], None, [CLOSE]),
    "cancel, body": ({CANCEL, BODY}, CANCEL, [], BODY, [BODY]),
    "cancel, end": ({CANCEL, END}, CANCEL, [], END, [END]),
    "cancel, task and close": (
        {CANCEL, TASK, CLOSE},
        CANCEL,
        [THEN.format(CLOSE)],
        TASK,
        [TASK, CLOSE],
    ),
}


@pytest.mark.parametrize(("fails", "raised", "noted", "context", "log"), KEPT.values(), ids=KEPT)
async def test_of_several_errors_none_is_lost(
    fails: set[str],
    raised: str,
    noted: list[str],
    context: str | None,
    log: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first one comes out, or the cancel of the caller while hooks are closed; the others are
    in it, and logged.
    """
    closing = asyncio.Event()
    released = asyncio.Event()

    async def fail_in(place: str) -> None:
        if place in fails:
            raise OSError(place)

    async def close(_: object) -> None:
        closing.set()
        await released.wait()
        await fail_in(CLOSE)

    async def task() -> None:
        try:
            await session.coord.wait_for_stop()
        finally:
            await fail_in(TASK)

    async def use(_: object) -> None:
        session.coord.start_soon(task)
        await ticks()
        await fail_in(BODY)

    hooks = [PhaseHook("end", lambda _: fail_in(END)), PhaseHook("close", close)]
    session = doubling(*hooks, name="trainer")
    ending = asyncio.create_task(outcome(session, use))
    await closing.wait()
    if CANCEL in fails:
        ending.cancel()
        await ticks()
    released.set()
    error = await ending
    assert error is not None
    assert str(error) == raised if raised != CANCEL else isinstance(error, asyncio.CancelledError)
    assert [
        note for note in notes(error) if not note.startswith(("raised by", "in session"))
    ] == noted
    assert (error.__context__ is None) if context is None else str(error.__context__) == context
    assert [str(failure) for failure in logged_errors(caplog)] == log
    assert all(message.startswith("session 'trainer': ") for message in caplog.messages)


@pytest.mark.parametrize("ended", ["by a cancel", "by a task"])
async def test_errors_that_answer_a_cancel(ended: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of the block: the cleanup of a task fails; of a run that a failed task ends: the step
    function does, and has a note.
    """

    async def answers(*_: object) -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            raise ValueError("cleanup failed") from None

    async def use(session: ah.AsyncMonitoredSession) -> None:
        session.start_soon(answers if ended == "by a cancel" else raises_after(9, OSError("lost")))
        await (forever() if ended == "by a cancel" else session.run_step_fn(answers))

    body = await parked(outcome(doubling(), use), 20)
    body.cancel()
    raised = await body
    if ended == "by a cancel":
        assert isinstance(raised, asyncio.CancelledError)
        assert "a background task had failed: ValueError('cleanup failed')" in notes(raised)
        assert repr(logged_errors(caplog)) == "[ValueError('cleanup failed')]"
    else:
        assert repr(raised) == "ValueError('cleanup failed')"
        assert "a background task had failed before: OSError('lost')" in notes(raised)


# -- errors that end the program


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("first", ["body", "close", "cancel", "opening", "a fatal opening"])
async def test_an_error_that_ends_the_program_comes_out_of_close(
    kind: type[BaseException], first: str
) -> None:
    """It is raised itself, whatever failed before, which is its context; unless that ends the
    program, too.
    """
    closing = asyncio.Event()
    released = asyncio.Event()
    error = kind(3)
    fatal = SystemExit(4)

    async def ends(_: object) -> None:
        closing.set()
        await released.wait()
        raise error

    hooks = [PhaseHook("close", ends)]
    if first == "close":
        hooks.append(PhaseHook("close", raises_after(0, OSError("close failed"))))
    if "opening" in first:
        hooks.append(
            PhaseHook(
                "begin",
                raises_after(0, fatal if first == "a fatal opening" else OSError("no data")),
            )
        )
    body = ValueError("the body") if first == "body" else None
    ending = asyncio.create_task(outcome(doubling(*hooks), error=body))
    await closing.wait()
    if first == "cancel":
        ending.cancel()
        await ticks()
    released.set()
    raised = await ending
    assert raised is (fatal if first == "a fatal opening" else error)
    if first == "body":
        assert raised.__context__ is body
    if first == "close":
        assert notes(raised)[-1] == "and then: OSError('close failed')"


@pytest.mark.parametrize("before", ["a cancel", "an error"])
@pytest.mark.parametrize("own", [False, True])
async def test_an_error_that_hides_another_one(own: bool, before: str) -> None:
    """It has that as its context, by which code further out knows of a cancel; if it has its own,
    an error is in a note.
    """

    async def ends(_: object) -> None:
        try:
            if own:
                raise OSError("close failed")
        finally:
            sys.exit(3)

    session = doubling(PhaseHook("close", ends))
    ending = await parked(
        outcome(session, forever)
        if before == "a cancel"
        else outcome(session, error=ValueError("the body"))
    )
    await ticks(20)
    ending.cancel("from outside")
    raised = await ending
    assert isinstance(raised, SystemExit)
    hidden = "CancelledError('from outside')" if before == "a cancel" else "ValueError('the body')"
    assert repr(raised.__context__) == ("OSError('close failed')" if own else hidden)
    assert ("before that, the session failed: ValueError('the body')" in notes(raised)) is (
        own and before == "an error"
    )


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), OSError("connection")], ids=repr
)
@pytest.mark.parametrize("part", ["session", "store", "publisher"])
async def test_an_error_of_a_part_does_not_keep_the_others_from_closing(
    error: BaseException, part: str
) -> None:
    """Whatever the raw session, the step store or its publisher raises: the hooks are closed, and
    the error comes out.
    """

    class Store(ah.MemoryStepStore):
        async def flush(self, timeout: float | None = None) -> None:
            if part == "store":
                raise error

        def _leave(self, publisher: Any, exc: BaseException | None) -> None:
            super()._leave(publisher, exc)
            if part == "publisher":
                raise error

    class Broken(ah.Session):
        async def aclose(self) -> None:
            await super().aclose()
            if part == "session":
                raise error

    hook = RecordingHook()
    graph = counting_graph()
    creator = CreatorOf(Broken, graph, global_step=Store())
    assert await outcome(ah.AsyncMonitoredSession(creator, [hook])) is error
    assert hook.closed_with == [None]


# -- errors of background tasks


@OWNERS
@pytest.mark.parametrize("wait", ["until", "run", "feeds", "between", "next run", "block"])
async def test_a_background_error_comes_out_of_every_wait(wait: str, owner: str) -> None:
    """The same object, once, with the cause and the context that it had; it is the reason of the
    stop, and no clean end.
    """
    error = ValueError("bad")
    hook = RecordingHook()
    ended = list[str]()

    async def background() -> None:
        await ticks(2)
        try:
            raise KeyError("root")
        except KeyError as cause:
            raise error from cause

    async def step() -> None:
        try:
            await forever()
        finally:
            ended.append("step")

    async def feeds() -> AsyncIterator[int]:
        await forever()
        yield 1

    async def use(_: object) -> None:
        (session if owner == "session" else session.coord).start_soon(background)
        if wait == "until":
            await session.until(forever())
        elif wait == "run":
            await session.run("step")
        elif wait == "feeds":
            await anext(session.steps(feeds=feeds()))
        await ticks(10)
        assert (session.should_stop(), session.status().failure) == (True, repr(error))
        if wait == "between":
            await session.until(forever())
        elif wait == "next run":
            await session.run("step")
        assert [values async for values in session.steps("step")] == []

    session = ah.AsyncMonitoredSession(step, [hook])
    assert await outcome(session, use) is error
    assert repr(error.__cause__) == repr(error.__context__) == "KeyError('root')"
    assert ended == (["step"] if wait == "run" else [])
    assert (hook.closed_with, "end" in hook.phases()) == ([error], False)
    assert session.stop_reason == "background task 'background' failed: ValueError('bad')"


@pytest.mark.parametrize("wait", ["until", "run", "wait_for_stop", "body", "end", "close"])
async def test_an_error_that_cannot_be_shown_is_one_like_any_other(wait: str) -> None:
    """A background error whose own methods raise ends waits and runs, also beside others; messages
    say that it has no text.
    """
    error = OddError()

    async def use(session: ah.AsyncMonitoredSession) -> None:
        for _ in range(2):
            session.start_soon(fail, error, name="odd")
        waits: dict[str, Any] = {
            "until": lambda: session.until(forever()),
            "run": lambda: session.run("forever_step"),
        }
        await waits.get(wait, session.coord.wait_for_stop)()

    hooks = [PhaseHook(wait, raises_after(0, OddError())) for _ in range(2)]
    session = ah.AsyncMonitoredSession(forever_step, hooks)
    assert isinstance(await outcome(session, use, OddError() if wait == "body" else None), OddError)
    assert (
        session.stop_reason
        == "background task 'odd' failed: <OddError, whose repr raises AttributeError>"
    )
    assert session.status().failure == "<OddError, whose repr raises AttributeError>"
    lost = FaultInjectionHook({("before_run", 1): OddError()})
    recovering = await run_session(
        doubling(lost, recovery=recovery_policy(on=(OddError,))),
        1,
        "loss",
    )
    assert recovering.status().recoveries == 1


@pytest.mark.parametrize("owner", ["session", "coord"])
async def test_a_task_that_fails_after_its_session_has_ended_is_logged(
    owner: str, caplog: pytest.LogCaptureFixture, clock: ManualClock
) -> None:
    """A task that ignored its cancellation, and fails after the session has ended without it: the
    error is logged, with the reason why the session has ended its tasks.
    """
    released = asyncio.Event()
    tasks = list[asyncio.Task[None]]()

    async def stubborn() -> None:
        await uncancellable(released)
        raise OSError("too late")

    async def use(session: ah.AsyncMonitoredSession) -> None:
        starts: Any = session if owner == "session" else session.coord
        tasks.append(starts.start_soon(stubborn))

    ending = asyncio.create_task(outcome(doubling(stop_grace_period_secs=9), use))
    for _ in range(2):
        await ticks(20)
        assert not ending.done()
        clock.advance(9)
    assert await ending is None
    released.set()
    await asyncio.wait(tasks)
    assert repr(logged_errors(caplog)) == "[OSError('too late')]"
    assert "after the session has ended, and its grace period of 9 s is over" in caplog.text


async def test_a_background_failure_from_which_the_next_run_would_have_recovered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """There is no next run: the session ends cleanly, and a warning has the error."""
    error = ah.errors.UnavailableError("gone")
    async with doubling(name="chief") as session:
        session.coord.start_soon(fail, error, name="producer")
        await ticks()
    assert caplog.messages == [
        "session 'chief': a background task failed, from which the next run would have recovered"
    ]
    assert logged_errors(caplog) == [error]


@pytest.mark.parametrize("passes", range(1, 6))
async def test_an_error_that_meets_the_end_of_its_session_is_said(
    passes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A hook fails as its session is closed because of another error: its own is raised by the run,
    or in the log.
    """
    failing = asyncio.Event()
    runs = list[asyncio.Task[Any]]()

    async def fail_then(_: object) -> None:
        await failing.wait()
        raise ah.AbortedError("of the hook")

    async def use(session: ah.AsyncMonitoredSession) -> None:
        runs.append(asyncio.create_task(session.run("loss")))
        await ticks(5)
        failing.set()
        await ticks(passes)

    error = OSError("of the block")
    session = doubling(PhaseHook("before_run", fail_then), recovery=recovery_policy())
    assert await outcome(session, use, error) is error
    await asyncio.wait(runs)
    assert "of the hook" in f"{caplog.text} {runs[0].exception()!r}"
