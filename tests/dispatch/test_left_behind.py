"""A hook that ignores its cancellation has the grace period; then the others continue without it, and its end is logged."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import weakref
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock
from tests.support.checks import refused
from tests.support.hooks import BeforeRunHook
from tests.support.sessions import double
from tests.support.waiting import fail, forever, ticks, until_true

pytestmark = [pytest.mark.every_python, pytest.mark.may_leak]


class Calls:
    async def on(self, depth: int) -> None: ...


places = pytest.mark.parametrize("place", [0, 1], ids=["in the caller's task", "in its own"])


class Uncancellable:
    """Waits until it is released, whatever is cancelled."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.released = asyncio.Event()
        self.cancels = 0
        self.error = error
        self.task: asyncio.Task[Any] | None = None

    async def wait(self) -> None:
        while not self.released.is_set():
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                self.cancels += 1
        self.task = asyncio.current_task()
        if self.error is not None:
            raise self.error


def hooks_with(place: int, call: Any, **options: Any) -> list[Any]:
    hooks: list[Any] = [BeforeRunHook(ticks), BeforeRunHook(ticks)]
    hooks[place] = ah.configure(BeforeRunHook(call), **options)
    return hooks


@places
@pytest.mark.parametrize("logged", [False, True])
async def test_a_time_limit_that_is_ignored(place: int, logged: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The time limit and the grace period pass: the run ends with HookTimeoutError, or continues if that is only logged.

    The hook is left running in a task that is not the caller's; a later error of it is logged.
    """
    hook = Uncancellable(OSError("late"))
    given = hooks_with(place, hook.wait, timeout=5, on_error="log" if logged else "raise")
    with ManualClock() as clock:
        async with ah.AsyncMonitoredSession(double, given, stop_grace_period_secs=9) as session:
            run = asyncio.create_task(session.run("loss"))
            await ticks()
            clock.advance(5)
            await ticks()
            assert hook.cancels == 1
            assert not run.done()
            clock.advance(9)
            if logged:
                assert await run == 2
            else:
                with refused(ah.errors.HookTimeoutError, f"BeforeRunHook#{place + 1}.before_run", "5 s"):
                    await run
            assert run.cancelling() == 0
            hook.released.set()
            await until_true(lambda: hook.task is not None)
            await ticks()
            assert hook.task is not run
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert (
        f"BeforeRunHook#{place + 1}.before_run at step 1 still runs 9 s after its cancellation; continuing without it" in messages
    )
    assert any(record.exc_info and record.exc_info[1] is hook.error for record in caplog.records)


async def test_the_late_error_of_a_hook_that_was_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    """Another hook fails, and this one ignores its cancel for longer than the grace period: its error is logged when it comes."""
    hook = Uncancellable(OSError("late"))
    given = [BeforeRunHook(lambda: fail(ValueError("first"))), BeforeRunHook(hook.wait)]
    with ManualClock() as clock:
        async with ah.AsyncMonitoredSession(double, given, stop_grace_period_secs=9) as session:
            run = asyncio.create_task(session.run("loss"))
            await until_true(lambda: hook.cancels)
            await ticks()
            clock.advance(9)
            with pytest.raises(ValueError, match="first"):
                await run
            hook.released.set()
            await until_true(lambda: hook.task is not None)
            await ticks()
    assert any(record.exc_info and record.exc_info[1] is hook.error for record in caplog.records)


async def test_a_hook_in_its_callers_task_that_ignores_its_cancel(caplog: pytest.LogCaptureFixture) -> None:
    """Without a time limit it runs in its caller's task like any awaited code, which has to wait: a warning says so."""
    hook = Uncancellable()
    given = [BeforeRunHook(hook.wait), BeforeRunHook(lambda: fail(ValueError("first")))]
    with ManualClock() as clock:
        async with ah.AsyncMonitoredSession(double, given, stop_grace_period_secs=9) as session:
            run = asyncio.create_task(session.run("loss"))
            await until_true(lambda: hook.cancels)
            clock.advance(9)
            await ticks()
            assert "still runs 9 s after its cancellation, in its caller's task, which waits for it" in caplog.text
            hook.released.set()
            with pytest.raises(ValueError, match="first"):
                await run


@places
async def test_a_group_is_called_inside_itself_under_a_time_limit(place: int) -> None:
    """A hook that calls its own group: the call that is left behind is the one whose time limit has passed."""
    hook = Uncancellable()
    group: ah.HookGroup[Calls]

    class Nesting:
        async def on(self, depth: int) -> None:
            if depth:
                with refused(ah.errors.HookTimeoutError, "Nesting"):
                    await group.hooks.on(depth - 1)
            else:
                await hook.wait()

    class Quick:
        async def on(self, depth: int) -> None:
            await asyncio.sleep(0)

    hooks: list[Any] = [Quick(), Quick()]
    hooks[place] = Nesting()
    group = ah.HookGroup(Calls, [ah.configure(one, timeout=5 + 10 * number) for number, one in enumerate(hooks)], grace_secs=2)
    with ManualClock() as clock:
        outer = asyncio.create_task(group.hooks.on(0))
        await ticks()
        clock.advance(15)
        await ticks()
        clock.advance(2)
        with refused(ah.errors.HookTimeoutError, "Nesting.on"):
            await outer
        hook.released.set()
        await until_true(lambda: hook.task is not None)


async def test_an_outer_call_is_left_behind_after_an_inner_one_has_ended() -> None:
    """A hook calls its own group, both with a time limit, and then ignores its cancel: the caller continues without it."""
    group: ah.HookGroup[Calls]
    hook = Uncancellable()

    class Nesting:
        async def on(self, depth: int) -> None:
            await asyncio.sleep(0)
            if depth:
                await group.hooks.on(depth - 1)
                await hook.wait()

    group = ah.HookGroup(Calls, [ah.configure(Nesting(), timeout=5)], grace_secs=2)
    with ManualClock() as clock:
        outer = asyncio.create_task(group.hooks.on(1))
        await ticks(10)
        clock.advance(5)
        await ticks()
        clock.advance(2)
        with refused(ah.errors.HookTimeoutError, "Nesting.on"):
            await outer
        hook.released.set()
        await until_true(lambda: hook.task is not None)
        assert hook.task is not outer


async def test_no_task_of_a_call_is_kept() -> None:
    """A group outlives the tasks that call it, and those of calls that were left behind, when they have ended."""
    hook = Uncancellable()

    class Waiting:
        async def on(self, depth: int) -> None:
            await (hook.wait() if depth else asyncio.sleep(0))

    group = ah.HookGroup(Calls, [ah.configure(Waiting(), timeout=5)], grace_secs=2)
    callers: weakref.WeakSet[asyncio.Task[None]] = weakref.WeakSet()
    with ManualClock() as clock:
        for depth in (0, 1):
            caller = asyncio.create_task(group.hooks.on(depth))
            callers.add(caller)
            await ticks(5)
            clock.advance(5)
            await ticks()
            clock.advance(2)
            await asyncio.wait([caller])
            assert (caller.exception() is None) is (depth == 0)
            del caller
        hook.released.set()
        await until_true(lambda: hook.task is not None)
        assert hook.task is not None
        callers.add(hook.task)
        hook.task = None
        await ticks(5)
    gc.collect()
    assert not callers
    assert group.status()[0].pending == 0


async def test_a_call_that_was_left_behind_outlives_its_group() -> None:
    """It continues to its end, also if nothing else refers to it."""
    waits: weakref.WeakSet[asyncio.Future[None]] = weakref.WeakSet()
    ended: list[str] = []

    class Waiting:
        async def on(self, depth: int) -> None:
            for _ in range(3):
                wait = asyncio.get_running_loop().create_future()
                waits.add(wait)
                with contextlib.suppress(asyncio.CancelledError):
                    await wait
                    return ended.append("on")

    with ManualClock() as clock:
        group = ah.HookGroup(Calls, [ah.configure(Waiting(), timeout=5)], grace_secs=2)
        caller = asyncio.create_task(group.hooks.on(1))
        await ticks(5)
        clock.advance(5)
        await ticks()
        clock.advance(2)
        await asyncio.wait([caller])
        assert isinstance(caller.exception(), ah.errors.HookTimeoutError)
        del caller, group
    await ticks()
    gc.collect()
    (pending,) = (wait for wait in waits if not wait.done())
    pending.set_result(None)
    await until_true(lambda: ended)


async def test_a_call_that_was_left_behind_ends_with_the_loop() -> None:
    """A cancel of the task in which it continues, such as that of `asyncio.run` at its end, is for the hook."""
    ended: list[Any] = []

    class Waiting:
        async def on(self, depth: int) -> None:
            for _ in ("at the time limit", "when it is left behind"):
                with contextlib.suppress(asyncio.CancelledError):
                    await forever()
            try:
                await forever()
            finally:
                ended.append(asyncio.current_task())

    before = asyncio.all_tasks()
    with ManualClock() as clock:
        caller = asyncio.create_task(ah.HookGroup(Calls, [ah.configure(Waiting(), timeout=5)], grace_secs=2).hooks.on(1))
        await ticks(5)
        clock.advance(5)
        await ticks()
        clock.advance(2)
        with refused(ah.errors.HookTimeoutError, "Waiting.on"):
            await caller
    (left,) = asyncio.all_tasks() - before
    await ticks()
    left.cancel()
    await asyncio.wait([left])
    assert ended == [left]
