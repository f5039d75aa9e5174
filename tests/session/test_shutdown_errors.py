"""Errors of a session that ends: none is lost, whatever else ends it."""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback
from collections.abc import AsyncIterator

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock, RecordingHook
from tests.support.checks import refused
from tests.support.hooks import PhaseHook
from tests.support.sessions import counting_graph, double, recovery_policy
from tests.support.waiting import fail, fails_after, forever, ticks

pytestmark = pytest.mark.every_python


def shown(error: BaseException) -> str:
    """Return everything that a traceback of the error shows: its context and notes, too."""
    return "".join(traceback.format_exception(error))


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the errors in the log, with tracebacks."""
    return [repr(record.exc_info[1]) for record in caplog.records if record.levelno == logging.ERROR and record.exc_info]


class OddError(Exception):
    """Has no text: its `__repr__` and `__str__` raise."""

    def __repr__(self) -> str:
        raise AttributeError("code")

    __str__ = __repr__


# -- the caller is cancelled


async def test_an_error_of_end_is_kept_when_a_later_end_is_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    """The caller is cancelled in the `end` of one hook: the error of an earlier one is noted on that, and logged."""
    started = asyncio.Event()

    async def fails(session: ah.Session) -> None:
        raise OSError("the last save failed")

    async def hangs(session: ah.Session) -> None:
        started.set()
        await forever()

    async def use() -> None:
        async with ah.AsyncMonitoredSession(double, [PhaseHook("end", fails), PhaseHook("end", hangs)], name="trainer"):
            pass

    ending = asyncio.create_task(use())
    await started.wait()
    ending.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await ending
    assert "and then: OSError('the last save failed')" in shown(caught.value)
    assert logged(caplog) == ["OSError('the last save failed')"]
    assert caplog.records[0].getMessage().startswith("session 'trainer': ")


@pytest.mark.parametrize("first", ["a task and close", "the block", "end"])
async def test_errors_are_kept_when_closing_is_cancelled(first: str, caplog: pytest.LogCaptureFixture) -> None:
    """A cancel while hooks close wins over all errors: of tasks and `close`, the block, `end`; they are in it, and logged."""
    started, released = asyncio.Event(), asyncio.Event()

    async def slow(exc: BaseException | None) -> None:
        started.set()
        await released.wait()
        if first == "a task and close":
            raise OSError("disk full")

    async def end(session: ah.Session) -> None:
        if first == "end":
            raise OSError("the last save failed")

    async def flush(coord: ah.Coordinator) -> None:
        await coord.wait_for_stop()
        if first == "a task and close":
            raise ValueError("not flushed")

    async def use() -> None:
        async with ah.AsyncMonitoredSession(double, [PhaseHook("end", end), PhaseHook("close", slow)]) as session:
            session.coord.start_soon(flush, session.coord)
            await ticks()
            if first == "the block":
                raise ValueError("the body")
            raise ah.OutOfRangeError("no more")

    ending = asyncio.create_task(use())
    await started.wait()
    ending.cancel()
    await ticks()
    released.set()
    with pytest.raises(asyncio.CancelledError) as caught:
        await ending
    expected = {
        "a task and close": ["ValueError('not flushed')", "OSError('disk full')"],
        "the block": ["ValueError('the body')"],
        "end": ["OSError('the last save failed')"],
    }[first]
    assert logged(caplog) == expected
    if first == "a task and close":
        assert all(f"and then: {error}" in shown(caught.value) for error in expected)
    else:
        assert repr(caught.value.__context__) == expected[0]


async def test_a_background_error_is_kept_when_the_body_is_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    """A background task that fails in its cleanup, because the body was cancelled: the error is noted and logged."""

    async def background() -> None:
        try:
            await forever()
        finally:
            raise OSError("cleanup failed")

    async def use() -> None:
        async with ah.AsyncMonitoredSession(double) as session:
            session.start_soon(background)
            await forever()

    body = asyncio.create_task(use())
    await ticks(10)
    body.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await body
    assert "a background task had failed: OSError('cleanup failed')" in shown(caught.value)
    assert logged(caplog) == ["OSError('cleanup failed')"]


async def test_an_error_of_the_run_has_the_background_error_before_it_as_a_note() -> None:
    """A step function that answers its cancel with an error of its own: that comes out."""

    async def step_fn(context: ah.session.StepContext) -> None:
        session.start_soon(fail, OSError("lost"))
        try:
            await forever()
        except asyncio.CancelledError:
            raise ValueError("the step") from None

    with pytest.raises(ValueError, match="the step") as caught:
        async with ah.AsyncMonitoredSession(double) as session:
            await session.run_step_fn(step_fn)
    assert "a background task had failed before: OSError('lost')" in caught.value.__notes__


@pytest.mark.parametrize(
    ("own", "expected"),
    [(None, "CancelledError('from outside')"), (OSError("close failed"), "OSError('close failed')")],
    ids=repr,
)
async def test_an_error_of_close_keeps_the_cancel_of_the_block(own: OSError | None, expected: str) -> None:
    """As its context, by which code further out knows that it was cancelled; unless it has one of its own."""

    async def ends(exc: BaseException | None) -> None:
        if own is None:
            raise SystemExit(3)
        try:
            raise own
        except OSError:
            sys.exit(3)

    async def use() -> BaseException | None:
        try:
            async with ah.AsyncMonitoredSession(double, [PhaseHook("close", ends)]):
                await forever()
        except SystemExit as caught:
            return caught.__context__
        return None

    ending = asyncio.create_task(use())
    await ticks(20)
    ending.cancel("from outside")
    assert repr(await ending) == expected


# -- errors that end the program


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("first", ["body", "close", "cancel"])
async def test_an_error_that_ends_the_program_comes_out_of_close(error: BaseException, first: str) -> None:
    """`SystemExit` and `KeyboardInterrupt` of a `close` are raised themselves, whatever failed before; that is their context."""
    started, released = asyncio.Event(), asyncio.Event()

    async def fails(exc: BaseException | None) -> None:
        raise OSError("close failed")

    async def ends(exc: BaseException | None) -> None:
        started.set()
        await released.wait()
        raise error

    async def use() -> BaseException | None:
        hooks = [PhaseHook("close", ends), *([PhaseHook("close", fails)] if first == "close" else [])]
        try:
            async with ah.AsyncMonitoredSession(double, hooks):
                if first == "body":
                    raise ValueError("the body")
        except BaseException as caught:
            return caught
        return None

    ending = asyncio.create_task(use())
    await started.wait()
    if first == "cancel":
        ending.cancel()
        await ticks()
    released.set()
    raised = await ending
    assert raised is error
    if first == "body":
        assert repr(raised.__context__) == "ValueError('the body')"
    if first == "close":
        assert raised.__notes__[-1] == "and then: OSError('close failed')"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), OSError("connection")], ids=repr)
@pytest.mark.parametrize("part", ["session", "store"])
async def test_an_error_of_a_part_does_not_keep_the_others_from_closing(error: BaseException, part: str) -> None:
    """Whatever the raw session or the step store raises: the hooks are closed, and the error comes out."""

    class Store(ah.MemoryStepStore):
        async def flush(self, timeout: float | None = None) -> None:
            if part == "store":
                raise error
            await super().flush(timeout)

    class Broken(ah.Session):
        async def aclose(self) -> None:
            await super().aclose()
            if part == "session":
                raise error

    class Creator:
        graph = counting_graph()

        async def create_session(self) -> ah.Session:
            return Broken(self.graph, global_step=Store())

    hook = RecordingHook()

    async def use() -> BaseException | None:
        try:
            async with ah.AsyncMonitoredSession(Creator(), [hook]):
                pass
        except BaseException as caught:
            return caught
        return None

    assert await use() is error
    assert hook.closed_with == [None]


# -- errors stay as they are


@pytest.mark.parametrize("owner", ["session", "coord"])
@pytest.mark.parametrize("wait", ["until", "run", "feeds", "between", "next run", "block"])
async def test_a_background_error_comes_out_of_every_wait(wait: str, owner: str) -> None:
    """The same object, once, with the cause and the context that it had; it is the reason of the stop, and no clean end."""
    error, hook, ended = ValueError("bad"), RecordingHook(), list[str]()

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

    session = ah.AsyncMonitoredSession(step, [hook])

    async def use() -> None:
        async with session:
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
            assert [one async for one in session.steps("step")] == []

    with pytest.raises(ValueError, match="bad") as caught:
        await use()
    assert caught.value is error
    assert repr(error.__cause__) == repr(error.__context__) == "KeyError('root')"
    assert ended == (["step"] if wait == "run" else [])
    assert hook.closed_with == [error]
    assert "end" not in hook.phases()
    assert session.stop_reason == "background task 'background' failed: ValueError('bad')"


@pytest.mark.parametrize("wait", ["until", "run", "wait_for_stop"])
async def test_an_error_that_cannot_be_shown_ends_waits_all_the_same(wait: str) -> None:
    """A background error whose own methods raise ends waits and runs like any other; the messages say that it has no text."""
    error = OddError()

    async def step() -> None:
        await forever()

    session = ah.AsyncMonitoredSession(step)

    async def use() -> None:
        async with session:
            session.start_soon(fail, error, name="odd")
            if wait == "until":
                await session.until(forever())
            elif wait == "run":
                await session.run("step")
            else:
                assert await session.coord.wait_for_stop()

    with pytest.raises(OddError) as caught:
        await use()
    assert caught.value is error
    assert session.stop_reason == "background task 'odd' failed: <OddError, whose repr raises AttributeError>"
    assert session.status().failure == "<OddError, whose repr raises AttributeError>"


async def test_errors_that_cannot_be_shown_end_a_session_like_others() -> None:
    """Such errors can be raised by the body, an `end` or a `close`, by two at a time, and be recovered from."""

    async def fails(*_: object) -> None:
        raise OddError

    async def use(*hooks: ah.SessionRunHook, error: Exception | None = None) -> None:
        async with ah.AsyncMonitoredSession(double, hooks) as session:
            session.start_soon(fails)
            session.start_soon(fails)
            await ticks()
            if error is not None:
                raise error

    for hooks in ([], [PhaseHook("end", fails)], [PhaseHook("close", fails), PhaseHook("close", fails)]):
        for error in (None, OddError()):
            with pytest.raises(OddError):
                await use(*hooks, error=error)

    lost = [OddError()]

    async def step() -> None:
        if lost:
            raise lost.pop()

    async with ah.AsyncMonitoredSession(step, recovery=recovery_policy(on=(OddError,))) as session:
        await session.run("step")
    assert session.status().recoveries == 1


async def test_equal_errors_are_two_errors(caplog: pytest.LogCaptureFixture) -> None:
    """Two errors that compare equal are still two: the second one is reported, too."""

    class EqualError(Exception):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, EqualError)

        __hash__ = Exception.__hash__

    coord = ah.Coordinator()
    first, second = EqualError("first"), EqualError("second")
    coord.start_soon(fail, first)
    coord.start_soon(fail, second)
    with pytest.raises(EqualError) as caught:
        await coord.join()
    assert caught.value is first
    assert [one is two for one, two in zip(coord.errors, (first, second), strict=True)] == [True, True]
    assert len(caplog.records) == 1


# -- background tasks and recovery


@pytest.mark.parametrize("owner", ["session", "coord"])
async def test_a_task_that_fails_in_the_grace_period_makes_the_end_an_error(owner: str) -> None:
    """It does not matter whether it was started from the session or from the coordinator of its raw session."""
    error, hook = OSError("could not flush"), RecordingHook()

    async def flush() -> None:
        await session.coord.wait_for_stop()
        raise error

    session = ah.AsyncMonitoredSession(double, [hook])

    async def use() -> None:
        async with session:
            (session if owner == "session" else session.coord).start_soon(flush)
            await session.run("loss")

    with pytest.raises(OSError, match="could not flush") as caught:
        await use()
    assert caught.value is error
    assert hook.closed_with == [error]


async def test_a_task_that_fails_after_its_session_has_ended_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A task that ignored its cancellation, and fails after the session has ended without it: the error is logged."""
    released = asyncio.Event()

    async def stubborn() -> None:
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue
        raise OSError("too late")

    with ManualClock() as clock:

        async def use() -> None:
            async with ah.AsyncMonitoredSession(double, stop_grace_period_secs=9) as session:
                tasks.append(session.start_soon(stubborn))

        tasks: list[asyncio.Task[None]] = []
        ending = asyncio.create_task(use())
        for _ in range(2):
            await ticks(20)
            assert not ending.done()
            clock.advance(9)
        await ending
        released.set()
        await asyncio.wait(tasks)
    assert logged(caplog) == ["OSError('too late')"]


async def test_close_gets_the_error_with_which_recovery_gave_up() -> None:
    """A block that catches that error and is left without one: `end` is not called, `close` and tasks get the error."""
    hook, error = RecordingHook(), ah.AbortedError("lost")
    messages: list[str] = []

    async def step() -> None:
        raise error

    async def background() -> None:
        try:
            await forever()
        except asyncio.CancelledError as cancelled:
            messages.append(str(cancelled))
            raise

    async with ah.AsyncMonitoredSession(step, [hook], recovery=recovery_policy(max_attempts=0)) as session:
        session.start_soon(background)
        with refused(ah.AbortedError, "lost"):
            await session.run("step")
        await ticks()
    assert hook.closed_with == [error]
    assert "end" not in hook.phases()
    assert messages == ["the session failed: AbortedError('lost')"]


async def test_errors_of_close_are_raised_after_a_recovery_error_was_caught() -> None:
    """An error of `close` after the block has caught the error of a recovery comes out of the block: no other one does."""
    close_error = OSError("disk full")

    async def step() -> None:
        raise ah.AbortedError("lost")

    async def use() -> None:
        hook = PhaseHook("close", lambda exc: fails_after(0, close_error)())
        async with ah.AsyncMonitoredSession(step, [hook], recovery=recovery_policy(max_attempts=0)) as session:
            with refused(ah.AbortedError, "lost"):
                await session.run("step")

    with pytest.raises(OSError, match="disk full") as caught:
        await use()
    assert caught.value is close_error


async def test_a_background_failure_from_which_the_next_run_would_have_recovered(caplog: pytest.LogCaptureFixture) -> None:
    """There is no next run: the session ends cleanly, and a warning has the error."""
    error = ah.errors.UnavailableError("gone")
    async with ah.AsyncMonitoredSession(double, name="chief") as session:
        await session.run("loss")
        session.coord.start_soon(fail, error, name="producer")
        await ticks()
    (record,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert record.getMessage() == "session 'chief': a background task failed, from which the next run would have recovered"
    assert record.exc_info is not None
    assert record.exc_info[1] is error


@pytest.mark.parametrize("later", [0, 5], ids=["during the wait", "before it"])
@pytest.mark.parametrize("owner", ["session", "coord"])
async def test_a_background_failure_that_a_wait_has_raised_is_not_raised_again(owner: str, later: int) -> None:
    """Whoever caught it has dealt with it: the end of the session is clean."""
    error = ValueError("no")
    hook = RecordingHook()
    async with ah.AsyncMonitoredSession(double, [hook]) as session:
        (session if owner == "session" else session.coord).start_soon(fail, error)
        await ticks(later)
        with pytest.raises(ValueError, match="no") as raised:
            await session.until(forever())
        assert raised.value is error
    assert hook.phases()[-2:] == ["end", "close"]


async def test_an_error_that_hides_another_one_keeps_its_own_context() -> None:
    """A `close` that ends the program with an error of its own behind it has the error of the block in a note."""

    async def ends(exc: BaseException | None) -> None:
        try:
            raise OSError("close failed")
        except OSError:
            sys.exit(3)

    with pytest.raises(SystemExit) as raised:
        async with ah.AsyncMonitoredSession(double, [PhaseHook("close", ends)]):
            raise ValueError("the body")
    assert repr(raised.value.__context__) == "OSError('close failed')"
    assert "before that, the session failed: ValueError('the body')" in raised.value.__notes__
