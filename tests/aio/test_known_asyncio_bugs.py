"""Known bugs of asyncio and of code that uses it, each tried on the library's own operations.

The library does not use `asyncio.wait_for`, `Condition` and `TaskGroup` (tests/project/test_architecture.py): tests of their bugs
are of the waits, locks and overlaps in their place. There are no eager tasks before Python 3.12; uvloop 0.23 fails with the
eager factory of 3.13.0 at the first task. Bugs that the cancel sweep found in this library are in `test_regressions.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import signal
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock, no_leaks
from tests.support.hooks import BeforeRunHook
from tests.support.sessions import double, run_in_before_run
from tests.support.waiting import HANG_SECS, fails_after, forever, ticks

Release = Callable[[], object]


# -- a result and a cancel in one tick


def wait_for_step() -> tuple[Awaitable[Any], Release]:
    store = ah.MemoryStepStore()
    return store.wait_for(1), lambda: store.advance().send(None)


def wait_for_variables() -> tuple[Awaitable[Any], Release]:
    variables = ah.Variables()
    return variables.wait_ready(), variables.mark_ready


def wait_for_stop() -> tuple[Awaitable[Any], Release]:
    coord = ah.Coordinator()
    return coord.wait_for_stop(), coord.request_stop


def wait_until_future() -> tuple[Awaitable[Any], Release]:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    return ah.Coordinator().until(future), lambda: future.set_result(1)


def wait_until_event() -> tuple[Awaitable[Any], Release]:
    event = asyncio.Event()
    return ah.Coordinator().until(event.wait()), event.set


def join() -> tuple[Awaitable[Any], Release]:
    coord, event = ah.Coordinator(), asyncio.Event()
    coord.start_soon(event.wait)
    return coord.join(), event.set


def hooked_run() -> tuple[Awaitable[Any], Release]:
    event = asyncio.Event()
    return run_in_before_run(event.wait), event.set


def overlapping_run() -> tuple[Awaitable[Any], Release]:
    event = asyncio.Event()
    return run_in_before_run(event.wait, event.wait), event.set


WAITS = [
    wait_for_step, wait_for_variables, wait_for_stop, wait_until_future, wait_until_event, join, hooked_run, overlapping_run,
]  # fmt: skip


@pytest.mark.parametrize("make", WAITS)
async def test_a_cancel_that_meets_the_result_is_not_lost(make: Callable[[], tuple[Awaitable[Any], Release]]) -> None:
    """A cancel in the tick in which the result is set and the wake-up queued still cancels (gh-86296)."""
    waiting, release = make()
    task = asyncio.ensure_future(waiting)
    await ticks()
    with contextlib.suppress(StopIteration):  # a coroutine that never suspends, driven by hand
        release()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_a_turn_given_to_a_cancelled_run_passes_to_the_next() -> None:
    """Of three runs, the second is cancelled in the tick in which it gets the lock; the third gets it."""
    gate = asyncio.Event()

    async def gated() -> None:
        await gate.wait()

    async with ah.AsyncMonitoredSession(gated) as session:

        async def first() -> None:
            await session.run("gated")
            second.cancel()

        tasks = [asyncio.create_task(first()), *(asyncio.create_task(session.run("gated")) for _ in range(2))]
        _, second, third = tasks
        await ticks()
        gate.set()
        await asyncio.wait(tasks)
        assert second.cancelled()
        assert third.result() is None
        assert session.global_step.latest.step == 2


async def test_waiters_beside_a_cancelled_waiter_are_woken() -> None:
    """A waiter cancelled in the tick in which its step is reached does not lose another waiter's wake-up."""
    store = ah.MemoryStepStore()
    waiters = [asyncio.create_task(store.wait_for(1)) for _ in range(3)]
    await ticks()
    await store.advance()
    waiters[0].cancel()
    waiters[1].cancel()
    await asyncio.wait(waiters)
    assert waiters[2].result() == 1
    assert store.statistics().waiting == 0


# -- nested groups and slow cleanups


async def test_an_outer_cancel_wins_over_a_failure_inside() -> None:
    """Operations overlap inside a hook that overlaps with others; a failure within does not hide the outer cancel."""
    graph = ah.Graph()
    gate = asyncio.Event()

    @graph.operation
    async def broken() -> None:
        await gate.wait()
        raise ValueError

    @graph.operation
    async def slow() -> None:
        await forever()

    class Nested(ah.SessionRunHook):
        async def before_run(self, run_context: ah.SessionRunContext) -> None:
            await run_context.session.run(["broken", "slow"])

    async def body() -> None:
        async with ah.AsyncMonitoredSession(graph, [Nested(), BeforeRunHook(forever), Nested()]) as session:
            await session.run([])

    task = asyncio.create_task(body())
    await ticks()
    gate.set()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert task.cancelling() == 1


async def test_an_outer_cancel_wins_over_a_stop_inside() -> None:
    """A stop and an outer cancel meet in nested waits; the cancel comes out."""
    coord = ah.Coordinator()
    task = asyncio.create_task(coord.until(coord.until(forever())))
    await ticks()
    coord.request_stop("enough")
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


@pytest.mark.parametrize("overlap", [False, True], ids=["alone", "beside others"])
async def test_a_timeout_around_a_slow_cleanup_is_a_timeout(overlap: bool) -> None:
    """Hooks are slow to end; `asyncio.timeout` around the session still raises TimeoutError."""

    async def slow_to_end() -> None:
        try:
            await forever()
        finally:
            await ticks(3)

    with pytest.raises(TimeoutError) as failure:
        async with asyncio.timeout(0):
            await run_in_before_run(*[slow_to_end] * (3 if overlap else 1))
    assert type(failure.value) is TimeoutError
    await asyncio.sleep(0)


@pytest.mark.parametrize("late", [0, 1], ids=["first", "second"])
async def test_a_hooks_time_limit_around_a_slow_cleanup_is_a_timeout(late: int) -> None:
    """A hook that exceeds its timeout, and is then slow to end, raises HookTimeoutError."""

    async def slow_to_end() -> None:
        try:
            await forever()
        finally:
            await ticks(3)

    with ManualClock() as clock:

        async def passes_time() -> None:
            await ticks(2)
            clock.advance(5)

        acts = [slow_to_end, passes_time] if late == 0 else [passes_time, slow_to_end]
        hooks: list[Any] = [BeforeRunHook(act) for act in acts]
        hooks[late] = ah.configure(hooks[late], timeout=5)
        with pytest.raises(ah.errors.HookTimeoutError):
            async with ah.AsyncMonitoredSession(double, hooks) as session:
                await session.run("double")
    await asyncio.sleep(0)


# -- task factories


@pytest.fixture
async def eager() -> Any:
    """Make the loop start tasks eagerly, on Pythons that can."""
    factory = getattr(asyncio, "eager_task_factory", None)
    loop = asyncio.get_running_loop()
    if factory is None:
        pytest.skip("no eager tasks before 3.12")
    if not isinstance(loop, asyncio.SelectorEventLoop) and sys.version_info >= (3, 13):
        pytest.skip("E-7: uvloop 0.23 and the eager factory of 3.13.0 do not go together")
    loop.set_task_factory(factory)
    yield
    loop.set_task_factory(None)


@pytest.mark.usefixtures("eager")
async def test_with_eager_tasks_no_cancel_leaks() -> None:
    """Siblings of a failing hook are cancelled under an eager factory; the error comes out, no cancel after it."""
    error = ValueError("own")
    with pytest.raises(ValueError, match="own") as failure:
        await run_in_before_run(forever, fails_after(1, error), forever)
    assert failure.value is error
    await asyncio.sleep(0)


@pytest.mark.usefixtures("eager")
async def test_with_eager_tasks_a_child_that_fails_immediately_ends_the_run() -> None:
    """A background task that fails in its first step, started while a hook runs, ends the run instead of hanging it."""

    async def fails_immediately() -> None:
        raise ValueError("background")

    session = ah.AsyncMonitoredSession(double, [BeforeRunHook(lambda: starts()), BeforeRunHook(forever)])

    async def starts() -> None:
        await asyncio.sleep(0)
        session.start_soon(fails_immediately)
        await forever()

    with pytest.raises(ValueError, match="background"):
        async with session:
            await session.run("double")


async def test_a_task_factory_gets_only_documented_options() -> None:
    """A task factory is called with what Python itself documents: a context, and no more."""
    loop = asyncio.get_running_loop()
    options: set[str] = set()

    def factory(loop: asyncio.AbstractEventLoop, coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
        options.update(kwargs)
        kwargs.pop("eager_start", None)
        return asyncio.Task(coro, loop=loop, **kwargs)

    loop.set_task_factory(factory)
    try:
        await run_in_before_run(ticks, ticks)
        coord = ah.Coordinator()
        coord.start_soon(ticks)
        await coord.join()
    finally:
        loop.set_task_factory(None)
    # uvloop adds of its own accord what Python's own loop adds only from 3.13.3 on.
    assert options <= {"context", "name", *(() if isinstance(loop, asyncio.SelectorEventLoop) else ("eager_start",))}


FORKS = """
    import asyncio, os, signal, sys, warnings
    import aiohooks as ah

    warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads

    async def step():
        pass

    async def main():
        async with ah.AsyncMonitoredSession(step, handle_signals=True) as session:
            await session.run("step")
            read_end, write_end = os.pipe()
            child = os.fork()
            if child == 0:
                os.write(write_end, b"!")
                while True:
                    signal.pause()
            os.read(read_end, 1)
            os.kill(child, signal.SIGTERM)
            kill_timer = asyncio.get_running_loop().call_later(20, os.kill, child, signal.SIGKILL)
            _, status = await asyncio.to_thread(os.waitpid, child, 0)
            kill_timer.cancel()
            await asyncio.sleep(0)
            print(status, session.should_stop())

    asyncio.run(main())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_signal_to_a_forked_child_is_the_childs() -> None:
    """A forked child dies of SIGTERM as it would without the library, and its parent's session does not stop."""
    source = textwrap.dedent(FORKS)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=50)
    assert done.stdout.split() == [str(int(signal.SIGTERM)), "False"], done.stderr


# -- references to tasks and threads


async def test_tasks_referenced_only_by_the_library_survive() -> None:
    """The collector runs while hooks, operations and background tasks wait, and none of them is lost."""
    done: list[str] = []

    async def collects(name: str) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
            gc.collect()
        done.append(name)

    async with ah.AsyncMonitoredSession(
        double, [BeforeRunHook(lambda: collects("a")), BeforeRunHook(lambda: collects("b"))]
    ) as session:
        session.start_soon(collects, "background")
        await session.run("double")
    assert sorted(done) == ["a", "b", "background"]


async def test_a_cancelled_run_waits_for_its_thread() -> None:
    """A thread cannot be cancelled; the run of its operation ends when the thread does."""
    graph = ah.Graph()
    gate, ended = threading.Event(), threading.Event()
    loop, began = asyncio.get_running_loop(), asyncio.Event()

    @graph.operation(thread=True)
    def blocks() -> None:
        loop.call_soon_threadsafe(began.set)
        gate.wait()
        ended.set()

    task = asyncio.create_task(ah.Session(graph).run("blocks"))
    await began.wait()
    task.cancel()
    await ticks(20)
    assert not task.done()
    gate.set()
    await asyncio.wait([task])
    assert task.cancelled()
    assert ended.is_set()


# -- siblings


@pytest.mark.parametrize("victim", [0, 1], ids=["first", "second"])
async def test_a_hook_cancelled_by_others_is_reported(victim: int) -> None:
    """A third party cancels what a hook awaits: the run neither hangs nor succeeds."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    acts: list[Callable[[], Awaitable[Any]]] = [forever, forever]
    acts[victim] = lambda: future
    asyncio.get_running_loop().call_soon(asyncio.get_running_loop().call_soon, future.cancel)  # type: ignore[arg-type]
    with pytest.raises(ah.errors.HookCancelledError):
        await run_in_before_run(*acts)


async def test_an_error_does_not_hide_a_pending_cancel() -> None:
    """A hook fails in the tick of the outer cancel; a caller that catches the error could swallow the cancel."""

    async def body() -> None:
        try:
            await run_in_before_run(forever, fails_after(2, ValueError()))
        except ValueError:
            await forever()

    for after in range(1, 8):
        task = asyncio.create_task(body())
        await ticks(after)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=HANG_SECS)
        assert done, f"cancelled after {after} ticks"
        assert task.cancelled()


async def test_iterations_left_by_break_leave_nothing() -> None:
    """`steps` and `changes` are not async generators, so that nothing is finalised in another task."""
    store = ah.MemoryStepStore()
    async with no_leaks(stores=[store]):
        async with ah.AsyncMonitoredSession(double, global_step=store) as session:
            steps = session.steps("double")
            async for _ in steps:
                break
        changes = store.changes()
        async for _ in changes:
            break
    assert not inspect.isasyncgen(steps)
    assert not inspect.isasyncgen(changes)


@pytest.mark.parametrize("fails", [0, 1, 2])
async def test_one_failure_is_raised_as_it_is(fails: int) -> None:
    """One error is raised as the same object, in no group, wherever its hook runs."""
    error = ValueError("own")
    acts: list[Callable[[], Awaitable[Any]]] = [forever, forever, forever]
    acts[fails] = fails_after(2, error)
    with pytest.raises(ValueError, match="own") as failure:
        await run_in_before_run(*acts)
    assert failure.value is error


@pytest.mark.parametrize("place", [0, 1], ids=["first", "second"])
async def test_a_hook_that_swallows_a_cancel_does_not_disarm_a_timeout(place: int) -> None:
    """A hook ignores its cancellation and returns; the timeout around the run still expires, wherever the hook is in the list."""

    async def swallows() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            return

    acts: list[Callable[[], Awaitable[Any]]] = [forever]
    acts.insert(place, swallows)
    with pytest.raises(TimeoutError):  # noqa: PT012 - what stands behind the run must not be reached
        async with asyncio.timeout(0):
            await run_in_before_run(*acts)
            await forever()


async def test_siblings_of_a_failed_hook_have_ended_when_it_is_raised() -> None:
    """Unlike with `gather`, they are cancelled and have ended."""
    hooks = [BeforeRunHook(forever), BeforeRunHook(fails_after(2, ValueError("own"))), BeforeRunHook(forever)]
    async with ah.AsyncMonitoredSession(double, hooks) as session:
        with pytest.raises(ValueError, match="own"):
            await session.run("double")
        assert all(hook.ended for hook in hooks)
        hooks[0].call = hooks[1].call = hooks[2].call = ticks
        await session.run("double")


# -- interrupts and other awaitables


@pytest.mark.parametrize("strikes", [0, 1], ids=["first", "second"])
def test_keyboard_interrupt_closes_the_hooks(strikes: int) -> None:
    """KeyboardInterrupt ends the loop, and every hook is closed once on the way."""
    acts: list[Callable[[], Awaitable[Any]]] = [forever, forever]
    acts[strikes] = fails_after(2, KeyboardInterrupt())
    hooks = [BeforeRunHook(act) for act in acts]

    async def main() -> None:
        async with ah.AsyncMonitoredSession(double, hooks) as session:
            await session.run("double")

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    gc.collect()
    assert [hook.closed for hook in hooks] == [1, 1]


async def test_awaitables_other_than_coroutines_are_awaited() -> None:
    """`until` takes objects with `__await__` and generators marked as coroutines, which tasks refuse from 3.12 on."""

    class Patient:
        def __await__(self) -> Generator[Any, Any, int]:
            yield from asyncio.sleep(0).__await__()
            return 1

    @types.coroutine
    def old_style() -> Generator[Any, Any, int]:
        yield
        return 2

    coord = ah.Coordinator()
    assert await coord.until(Patient()) == 1
    assert await coord.until(old_style()) == 2
