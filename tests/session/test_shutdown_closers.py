"""Several tasks that close one session, and calls that would wait for themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock
from tests.support.checks import refused
from tests.support.hooks import PhaseHook
from tests.support.sessions import double
from tests.support.waiting import forever, ticks, until_true

pytestmark = pytest.mark.every_python


class SlowEnd(ah.SessionRunHook):
    """An `end` that saves until the test lets it finish, and a `close` after it."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.released = asyncio.Event()
        self.done: list[str] = []

    async def end(self, session: ah.Session) -> None:
        self.started.set()
        await self.released.wait()
        self.done.append("end")

    async def close(self, exc: BaseException | None) -> None:
        await ticks()
        self.done.append("close")


# -- several closers


async def test_a_block_that_fails_while_another_task_closes() -> None:
    """An error that leaves the block during another task's `aclose` waits for it, and is raised then, the same object."""
    hook, error = SlowEnd(), OSError("late")

    async def use() -> None:
        async with ah.AsyncMonitoredSession(double, [hook]) as session:
            closing = asyncio.create_task(session.aclose())
            closing.add_done_callback(lambda _: hook.done.append("closed"))
            await hook.started.wait()
            asyncio.get_running_loop().call_soon(hook.released.set)
            raise error

    with pytest.raises(OSError, match="late") as caught:
        await use()
    assert caught.value is error
    await ticks()
    assert hook.done == ["end", "close", "closed"]


async def test_a_cancelled_second_closer_waits_for_the_grace_period_only() -> None:
    """After a cancel the second closer waits for at most the grace period, however long the first one takes."""
    hook = SlowEnd()
    with ManualClock() as clock:
        async with ah.AsyncMonitoredSession(double, [hook], stop_grace_period_secs=9) as session:
            closing = asyncio.create_task(session.aclose())
            await hook.started.wait()
            second = asyncio.create_task(session.aclose())
            await ticks()
            second.cancel()
            await ticks(20)
            clock.advance(8.9)
            await ticks(20)
            assert not second.done()
            clock.advance(0.1)
            await asyncio.wait([second])
            assert second.cancelled()
            assert not closing.done()
            hook.released.set()
            await closing


async def test_closing_a_session_that_fails_to_open() -> None:
    """`aclose` of another task while a failed opening is being closed waits until that is complete."""
    hook = SlowEnd()

    async def slow_close(exc: BaseException | None) -> None:
        hook.started.set()
        await hook.released.wait()
        hook.done.append("close")

    async def fails(session: ah.Session, coord: ah.Coordinator) -> None:
        raise OSError("no data")

    session = ah.AsyncMonitoredSession(double, [PhaseHook("close", slow_close), PhaseHook("after_create_session", fails)])
    opening = asyncio.create_task(session.__aenter__())
    await hook.started.wait()
    assert session.status().state == "closing"
    second = asyncio.create_task(session.aclose())
    await ticks(20)
    assert not second.done()
    hook.released.set()
    await second
    assert hook.done == ["close"]
    with pytest.raises(OSError, match="no data"):
        await opening


@pytest.mark.parametrize("first", [OSError("no data"), KeyboardInterrupt()], ids=repr)
async def test_an_error_that_ends_the_program_while_a_failed_opening_is_closed(first: BaseException) -> None:
    """It wins over the error of the opening, unless that ends the program itself."""

    async def fails(session: ah.Session, coord: ah.Coordinator) -> None:
        raise first

    async def ends(exc: BaseException | None) -> None:
        raise SystemExit(3)

    session = ah.AsyncMonitoredSession(double, [PhaseHook("close", ends), PhaseHook("after_create_session", fails)])
    with pytest.raises(SystemExit if isinstance(first, OSError) else KeyboardInterrupt):
        await session.__aenter__()


async def test_the_error_of_a_block_is_kept_when_its_wait_is_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    """A block that fails while another task closes, and is cancelled then: the error is the context of the cancel, and logged."""
    hook, error = SlowEnd(), OSError("late")
    closers: list[asyncio.Task[None]] = []

    async def use() -> None:
        async with ah.AsyncMonitoredSession(double, [hook]) as session:
            closers.append(asyncio.create_task(session.aclose()))
            await hook.started.wait()
            raise error

    body = asyncio.create_task(use())
    await hook.started.wait()
    await ticks()
    body.cancel()
    await ticks()
    hook.released.set()
    with pytest.raises(asyncio.CancelledError) as caught:
        await body
    assert caught.value.__context__ is error
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [error]
    await asyncio.wait(closers)


async def test_a_session_that_is_closed_inside_a_hook_of_another() -> None:
    """Overlapping hooks may close one session: the second one waits, it does not count as part of the first one's closing."""
    hook = SlowEnd()
    inner = ah.AsyncMonitoredSession(double, [hook])
    await inner.__aenter__()
    closed: list[list[str]] = []

    async def closes(run_context: ah.SessionRunContext) -> None:
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0, hook.released.set)
        await inner.aclose()
        closed.append(list(hook.done))

    async with ah.AsyncMonitoredSession(double, [PhaseHook("before_run", closes), PhaseHook("before_run", closes)]) as outer:
        await outer.run("loss")
    assert closed == [["end", "close"]] * 2


async def test_a_task_of_a_nested_end_does_not_hold_up_the_outer_session(caplog: pytest.LogCaptureFixture) -> None:
    """It keeps the context of the closing, which is over: its wait for a step is not one of the outer session's own."""
    store, begun = ah.MemoryStepStore(), asyncio.Event()
    waits: list[asyncio.Task[int]] = []

    async def wait() -> int:
        await begun.wait()
        return await store.wait_for(2)

    async def start(*_: object) -> None:
        waits.append(asyncio.create_task(wait()))

    async def nest(run_context: ah.SessionRunContext) -> None:
        if not waits:
            async with ah.AsyncMonitoredSession(double, [PhaseHook("end", start)]):
                pass

    async with ah.AsyncMonitoredSession(double, [PhaseHook("before_run", nest)], global_step=store) as outer:
        await outer.run("loss")
        begun.set()
        await ticks()
        assert (store.statistics().waiting, caplog.messages) == (1, [])
        await outer.run("loss")
        assert await waits[0] == 2


@pytest.mark.parametrize("start", [1, 5], ids=lambda start: f"closed-at-{start}")
async def test_two_closers_that_are_cancelled_at_any_time(start: int) -> None:
    """The block and a supervisor close one session, and either is cancelled at any time, or both.

    Every hook is closed once, `end` is called at most once, a closer that was cancelled in time ends as cancelled, the other one
    as if nothing had been, and none returns before the closing is complete.
    """

    class Hook(ah.SessionRunHook):
        def __init__(self) -> None:
            self.calls: list[str] = []

        async def end(self, session: ah.Session) -> None:
            self.calls.append("end")
            await ticks(2)

        async def close(self, exc: BaseException | None) -> None:
            await ticks(2)
            self.calls.append("close")

    async def step() -> dict[str, int]:
        await ticks(1)
        return {"loss": 1}

    async def attempt(cancel_body: int | None, cancel_supervisor: int | None) -> None:
        hooks = [Hook(), Hook()]
        session = ah.AsyncMonitoredSession(step, hooks)
        early: list[str] = []

        async def use() -> None:
            try:
                async with session:
                    session.start_soon(session.until, forever())
                    async for _ in session.steps("loss"):
                        pass
            finally:
                early.extend("body" for hook in hooks if "close" not in hook.calls)

        async def supervise() -> None:
            await ticks(start)
            try:
                await session.aclose()
            except ah.errors.SessionClosedError:  # it is still opening, or failed to open
                return
            early.extend("supervisor" for hook in hooks if "close" not in hook.calls)

        tasks = {asyncio.create_task(use()): cancel_body, asyncio.create_task(supervise()): cancel_supervisor}
        cancelled: list[asyncio.Task[None]] = []
        for tick in range(40):
            for task, when in tasks.items():
                if when == tick and task.cancel():
                    cancelled.append(task)
            await asyncio.sleep(0)
        await asyncio.wait(tasks, timeout=0)
        if any(not task.done() for task in tasks):  # the supervisor was cancelled before it could close
            session.request_stop()
            await asyncio.wait(tasks)
        what = f"body cancelled at {cancel_body}, supervisor at {cancel_supervisor}"
        for task in tasks:
            assert task.cancelled() == (task in cancelled), (what, task)
            assert task.cancelled() or task.exception() is None, (what, task)
        begun = [hook for hook in hooks if hook.calls]
        assert all(hook.calls.count("close") == 1 and hook.calls.count("end") <= 1 for hook in begun), (what, hooks[0].calls)
        assert len(begun) in (0, 2), what
        assert not begun or early == [], (what, early)

    for first in (None, *range(36)):
        await attempt(first, None)
        for second in range(0, 36, 6):
            await attempt(first, second)


# -- calls that would wait for themselves


@pytest.mark.parametrize("phase", ["before_run", "after_run", "end", "close"])
async def test_a_hook_cannot_close_its_session(phase: str) -> None:
    """`aclose` inside a hook, also one of the end, is refused: it would wait for the hook itself."""
    attempts: list[str] = []

    async def closes(*_: object) -> None:
        with refused(ah.errors.NestedRunError, "aclose was called from inside", "which would deadlock"):
            await session.aclose()
        attempts.append(phase)

    session = ah.AsyncMonitoredSession(double, [PhaseHook(phase, closes)])
    async with session:
        await session.run("loss")
    assert attempts == [phase]


async def test_a_background_task_cannot_close_its_session() -> None:
    """`aclose` in a background task is refused immediately, before and while the session closes: it is to request a stop."""
    attempts: list[str] = []

    async def closes() -> None:
        for _ in range(2):
            with refused(
                ah.errors.NestedRunError, "aclose was called from the background task 'closes'", "use request_stop to end"
            ):
                await session.aclose()
            attempts.append(session.status().state)
            await session.coord.wait_for_stop()

    session = ah.AsyncMonitoredSession(double)
    with ManualClock() as clock:
        async with session:
            session.start_soon(closes)
            session.coord.start_soon(closes)
            await session.run("loss")
            await ticks()
    assert attempts == ["open", "open", "closing", "closing"]
    assert clock.now() == 0


async def test_a_task_cannot_join_itself() -> None:
    """`join` in one of the tasks it waits for is refused."""
    coord = ah.Coordinator()

    async def joins() -> None:
        await coord.join()

    coord.start_soon(joins)
    with refused(ah.errors.NestedRunError, "join was called from the background task 'joins'", "use wait_for_stop"):
        await coord.join()


# -- tasks that are started while the session closes


Start = Callable[[ah.AsyncMonitoredSession], Callable[..., asyncio.Task[Any]]]


@pytest.mark.parametrize("start", [lambda session: session.start_soon, lambda session: session.coord.start_soon], ids=["s", "c"])
@pytest.mark.parametrize(
    "starter", [lambda session: session.start_soon, lambda session: session.coord.start_soon], ids=["s", "c"]
)
async def test_a_task_that_is_started_in_the_grace_period_is_waited_for(start: Start, starter: Start) -> None:
    """A background task may start others while the session closes; they have what is left of the same grace period."""
    session = ah.AsyncMonitoredSession(double, stop_grace_period_secs=9)
    ended: list[str] = []

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

    async def use() -> None:
        async with session:
            starter(session)(watch)
            await session.run("loss")

    with ManualClock() as clock:
        ending = asyncio.create_task(use())
        await until_true(lambda: ended)
        await ticks(20)
        assert not ending.done()
        clock.advance(9)
        await ending
        assert clock.pending == 0
    assert ended == ["flush", "the session has ended, and its grace period of 9 s is over"]


@pytest.mark.parametrize("start", [lambda session: session.start_soon, lambda session: session.coord.start_soon], ids=["s", "c"])
async def test_no_task_is_started_after_the_background_tasks_have_ended(start: Start) -> None:
    """Starting a task in `close`, in the cleanup of a cancelled task or after the end is refused, so none survives."""
    session = ah.AsyncMonitoredSession(double)
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

    async def use() -> None:
        async with session:
            session.start_soon(starts_in_cleanup)
            session.coord.start_soon(starts_in_cleanup)
            await ticks()
            raise OSError("broken")

    session = ah.AsyncMonitoredSession(double, [PhaseHook("close", starts)])
    with pytest.raises(OSError, match="broken"):
        await use()
    await starts()
    assert refusals == ["closing", "closing", "closing", "closed"]


async def test_a_replaced_coordinator_starts_no_task() -> None:
    """A task started on the coordinator of a session that was replaced would belong to no session: it is refused."""
    coords: list[ah.Coordinator] = []

    async def keeps(session: ah.Session, coord: ah.Coordinator) -> None:
        coords.append(coord)

    errors: list[Exception] = [ah.AbortedError("lost")]

    async def step() -> None:
        if errors:
            raise errors.pop()

    policy = ah.RecoveryPolicy(backoff=ah.Backoff(initial_secs=0))
    async with ah.AsyncMonitoredSession(step, [PhaseHook("after_create_session", keeps)], recovery=policy) as session:
        await session.run("step")
        with refused(ah.errors.SessionClosedError, "its session was replaced"):
            coords[0].start_soon(forever)
        coords[1].start_soon(ticks)


# -- why background tasks are cancelled


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("bad data"), "the session failed: ValueError('bad data')"),
        (asyncio.CancelledError(), "the session was cancelled"),
    ],
    ids=["failure", "cancel"],
)
async def test_background_tasks_get_the_reason_of_their_cancel(error: BaseException, reason: str, clock: ManualClock) -> None:
    """At a failed end tasks are cancelled immediately and once, with the reason as message; `stop_reason` has it, too."""
    messages: list[str] = []
    session = ah.AsyncMonitoredSession(double)

    async def generates(wait: Callable[[], Awaitable[Any]]) -> None:
        try:
            await wait()
        except asyncio.CancelledError as cancelled:
            messages.append(str(cancelled))
            await ticks()  # a second cancel would interrupt this
            messages.append(str(session.stop_reason))
            raise

    async def use() -> None:
        async with session:
            for wait in (forever, lambda: session.until(forever()), session.coord.wait_for_stop):
                session.start_soon(generates, wait)
            await ticks()
            raise error

    with pytest.raises(type(error)):
        await use()
    assert messages == [reason] * 6
    assert clock.now() == 0
    assert session.stop_reason == reason


async def test_the_first_reason_of_a_stop_is_kept_when_the_session_fails() -> None:
    """A failure after a stop request does not replace its reason."""
    session = ah.AsyncMonitoredSession(double)

    async def use() -> None:
        async with session:
            session.request_stop("enough")
            raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        await use()
    assert session.stop_reason == "enough"


async def test_a_clean_end_invents_no_reason() -> None:
    """A session that ends without a stop request has no reason, also if background tasks end with it."""
    async with ah.AsyncMonitoredSession(double) as session:
        session.start_soon(session.until, forever())
        await ticks()
    assert session.stop_reason is None
