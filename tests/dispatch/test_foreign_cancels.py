"""Code of others in hooks and steps cancels its task for reasons of its own: that is no cancel of the caller, and hides none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock
from tests.support.checks import refused
from tests.support.hooks import BeforeRunHook, PhaseHook
from tests.support.sessions import double
from tests.support.waiting import fail, forever, ticks, until_true

pytestmark = pytest.mark.every_python

Call = Callable[[], Coroutine[Any, Any, Any]]


async def group_whose_child_fails() -> None:
    """Before Python 3.13 such a group leaves the cancel count of its task one too high."""
    with contextlib.suppress(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(fail(ValueError("handled")))


async def group_whose_body_waits() -> None:
    """The group cancels its body."""
    with contextlib.suppress(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(fail(ValueError("handled")))
            await forever()


async def timeout_of_the_standard_library() -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0):
            await forever()


async def timeout_that_leaves_its_cancel() -> None:
    """What async_timeout 4.0.2 does: it cancels the task, and never takes that back."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_soon(task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await forever()


async def scope_of_anyio() -> None:
    with anyio.move_on_after(0):
        await forever()


async def group_of_anyio() -> None:
    with contextlib.suppress(ExceptionGroup):
        async with anyio.create_task_group() as group:
            group.start_soon(fail, ValueError("handled"))
            await forever()


class Calls:
    async def on(self) -> None: ...


async def hook_group_that_fails() -> None:
    class Failing:
        async def on(self) -> None:
            await fail(ValueError("handled"))

    class Waiting:
        async def on(self) -> None:
            await forever()

    with contextlib.suppress(ValueError):
        await ah.compose(Calls, [Waiting(), Failing()]).on()


async def session_that_fails() -> None:
    with contextlib.suppress(ValueError):
        async with ah.AsyncMonitoredSession(
            double, [BeforeRunHook(forever), BeforeRunHook(lambda: fail(ValueError("handled")))]
        ) as session:
            await session.run("double")


TOOLS = (
    group_whose_child_fails,
    group_whose_body_waits,
    timeout_of_the_standard_library,
    timeout_that_leaves_its_cancel,
    scope_of_anyio,
    group_of_anyio,
    hook_group_that_fails,
    session_that_fails,
)
tools = pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.__name__)
places = pytest.mark.parametrize("place", [0, 1], ids=["in the caller's task", "in its own"])


def then(*calls: Call) -> Call:
    async def in_turn() -> None:
        for call in calls:
            await call()

    return in_turn


async def awaits_a_cancelled_future() -> None:
    future = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.cancel)
    await future


async def in_a_task(call: Call) -> Any:
    """Await `call()` in a task of its own, whose cancel count may be left as it likes."""
    return await asyncio.create_task(call())


def run_with(place: int, call: Call, other: Call = ticks, **options: Any) -> Call:
    """A run with two hooks: one calls `call` in before_run, the other `other`."""
    hooks: list[Any] = [BeforeRunHook(other), BeforeRunHook(other)]
    hooks[place] = ah.configure(BeforeRunHook(call), **options)

    async def run() -> Any:
        async with ah.AsyncMonitoredSession(double, hooks) as session:
            return await session.run("double")

    return run


@places
@tools
async def test_a_run_goes_through(tool: Call, place: int) -> None:
    """A hook that has settled its own cancels does not end the run."""
    assert await in_a_task(run_with(place, tool)) == {"loss": 2, "batch": 1}


@tools
async def test_a_step_goes_through(tool: Call) -> None:
    """So does a step function, an operation beside another, a step function of runs, and a hook that is called alone."""

    async def step() -> int:
        await tool()
        return 1

    graph = ah.Graph()
    graph.operation(name="one")(step)
    graph.operation(name="two")(step)

    async def main() -> None:
        async with ah.AsyncMonitoredSession(step, [PhaseHook("begin", tool), PhaseHook("end", lambda _: tool())]) as session:
            assert await session.run("step") == 1

            async def both(step_context: ah.session.StepContext) -> None:
                await tool()
                assert await step_context.run_with_hooks("step") == 1

            await session.run_step_fn(both)
        async with ah.AsyncMonitoredSession(graph) as session:
            assert await session.run(["one", "two"]) == [1, 1]

    await in_a_task(main)


@places
@tools
async def test_a_cancel_of_the_caller_wins(tool: Call, place: int) -> None:
    """The caller is cancelled after the hook has used the tool: that comes out, also if another hook fails with it."""
    for other in (forever, ticks):
        task = asyncio.create_task(run_with(place, then(tool, forever), other)())
        await ticks(20)
        assert not task.done()
        task.cancel("outside")
        with pytest.raises(asyncio.CancelledError, match="outside"):
            await task


def another_hook() -> tuple[ValueError, asyncio.Event, Call]:
    """Make an error, an event, and a call that raises the error after the event."""
    error, gate = ValueError("of the other"), asyncio.Event()

    async def fails() -> None:
        await gate.wait()
        raise error

    return error, gate, fails


@places
@tools
async def test_the_error_of_another_hook_is_raised(tool: Call, place: int) -> None:
    """Another hook fails after the tool was used: its error ends the run, and not the cancel that this makes."""
    error, gate, fails = another_hook()

    async def opens() -> None:
        await tool()
        gate.set()
        await forever()

    with pytest.raises(ValueError, match="of the other") as raised:
        await in_a_task(run_with(place, opens, fails))
    assert raised.value is error or error in getattr(raised.value, "exceptions", ())


@places
@tools
async def test_a_tool_in_the_cleanup_hides_no_error(tool: Call, place: int) -> None:
    """A hook that another's failure ends uses the tool before it passes its cancel on: the failure comes out, and no cancel."""
    error, gate, fails = another_hook()

    async def cleans_up() -> None:
        gate.set()
        try:
            await forever()
        finally:
            await tool()

    with pytest.raises(ValueError, match="of the other") as raised:
        await in_a_task(run_with(place, cleans_up, fails))
    assert raised.value is error


async def group_with(call: Call) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(call())


async def hook_group_with(call: Call) -> None:
    class Waiting:
        async def on(self) -> None:
            await forever()

    class Calling:
        async def on(self) -> None:
            await call()

    await ah.compose(Calls, [Waiting(), Calling()]).on()


@places
@pytest.mark.parametrize("block", [group_with, hook_group_with], ids=lambda block: block.__name__)
async def test_a_cancel_during_a_cleanup_is_not_lost(block: Callable[[Call], Coroutine[Any, Any, None]], place: int) -> None:
    """Another hook's failure ends a block that raises the first cancel, whatever follows; the caller's follows, and wins."""
    gate, cleaning_up = asyncio.Event(), asyncio.Event()

    async def cleans_up() -> None:
        gate.set()
        try:
            await forever()
        finally:
            cleaning_up.set()
            await ticks()

    async def fails() -> None:
        await gate.wait()
        raise ValueError("of the other")

    task = asyncio.create_task(run_with(place, lambda: block(cleans_up), fails)())
    await cleaning_up.wait()
    task.cancel("outside")
    with pytest.raises(asyncio.CancelledError):
        await task


@places
@tools
async def test_a_time_limit_is_a_time_limit(tool: Call, place: int) -> None:
    """The hook exceeds its time limit after it used the tool: HookTimeoutError, and no cancel."""
    waiting = asyncio.Event()

    async def late() -> None:
        await tool()
        waiting.set()
        await forever()

    with ManualClock() as clock:
        task = asyncio.create_task(run_with(place, late, timeout=5)())
        await waiting.wait()
        await ticks()
        clock.advance(5)
        with refused(ah.errors.HookTimeoutError, "before_run", "5 s"):
            await task


async def timeout_of_the_test(clock: ManualClock) -> None:
    async with asyncio.timeout(None) as timeout:
        clock.call_later(5, lambda: timeout.reschedule(asyncio.get_running_loop().time()))
        await forever()


async def scope_of_the_test(clock: ManualClock) -> None:
    with anyio.CancelScope() as scope:
        clock.call_later(5, scope.cancel)
        await forever()


@places
@pytest.mark.parametrize("block", [timeout_of_the_test, scope_of_the_test], ids=lambda block: block.__name__)
async def test_a_block_inside_may_end_in_the_same_tick(
    block: Callable[[ManualClock], Coroutine[Any, Any, None]], place: int
) -> None:
    """A time limit of the hook's own code and that of the hook are over at the same time: HookTimeoutError, and no cancel."""
    with ManualClock() as clock:
        task = asyncio.create_task(run_with(place, lambda: block(clock), timeout=5)())
        await ticks()
        clock.advance(5)
        with refused(ah.errors.HookTimeoutError, "before_run", "5 s"):
            await task


@places
@tools
async def test_a_cancelled_future_is_reported(tool: Call, place: int) -> None:
    """A future that a third party cancels, awaited after the tool, is a HookCancelledError."""
    with refused(ah.errors.HookCancelledError, "before_run", "was cancelled, and not by its caller"):
        await in_a_task(run_with(place, then(tool, awaits_a_cancelled_future)))


@tools
async def test_a_cancelled_future_in_the_next_run_is_reported(tool: Call) -> None:
    """The step function has used the tool between its two runs: a cancel of before is none of the second."""
    waits: list[Call] = [ticks, awaits_a_cancelled_future]

    async def twice(step_context: ah.session.StepContext) -> None:
        await step_context.run_with_hooks("double")
        await tool()
        await step_context.run_with_hooks("double")

    async def main() -> None:
        async with ah.AsyncMonitoredSession(double, [PhaseHook("before_run", lambda _: waits.pop(0)())]) as session:
            await session.run_step_fn(twice)

    with refused(ah.errors.HookCancelledError, "before_run", "was cancelled, and not by its caller"):
        await in_a_task(main)


@tools
async def test_a_stop_ends_a_wait_cleanly(tool: Call) -> None:
    """A stop that comes after the tool, inside `until`, is a clean end: `end` is called."""
    ended: list[object] = []

    async def end(session: ah.Session) -> None:
        ended.append(session)

    async def main() -> None:
        async with ah.AsyncMonitoredSession(double, [PhaseHook("end", end)]) as session:
            asyncio.get_running_loop().call_soon(session.start_soon, stop, session)
            await session.until(then(tool, forever)())

    async def stop(session: ah.AsyncMonitoredSession) -> None:
        await ticks(20)
        session.request_stop("enough")

    await in_a_task(main)
    assert len(ended) == 1


@tools
async def test_a_failed_background_task_ends_the_run(tool: Call) -> None:
    """A background task fails while a hook waits that has used the tool: its error comes out of the run."""
    error = ValueError("of the background task")

    async def fails() -> None:
        await ticks(20)
        raise error

    async def main() -> None:
        async with ah.AsyncMonitoredSession(double, [BeforeRunHook(then(tool, forever))]) as session:
            session.start_soon(fails)
            await session.run("double")

    with pytest.raises(ValueError, match="background") as raised:
        await in_a_task(main)
    assert raised.value is error


async def test_errors_of_a_group_beside_a_failing_hook() -> None:
    """A hook's task group fails in the cleanup that another hook's failure has caused: both errors come out, as a flat group."""

    async def cleans_up_badly() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0)
            raise KeyError("cleanup")

    async def in_a_group() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(cleans_up_badly())

    with pytest.raises(ExceptionGroup) as raised:
        await in_a_task(run_with(0, in_a_group, lambda: fail(ValueError("first"))))
    assert {type(error) for error in raised.value.exceptions} == {KeyError, ValueError}


@pytest.mark.parametrize("retries", [1, 2])
async def test_a_swallowed_cancel_of_the_caller(retries: int) -> None:
    """A hook in its caller's task that swallows a cancel swallows that one, as under a plain `await`; the next one comes out."""
    swallowed: list[int] = []

    async def swallows() -> None:
        for _ in range(retries):
            with contextlib.suppress(asyncio.CancelledError):
                await forever()
            swallowed.append(1)
        await forever()

    task = asyncio.create_task(run_with(0, swallows)())
    for number in range(retries):
        await ticks(20)
        task.cancel()
        await until_true(lambda: len(swallowed) > number)  # noqa: B023 - awaited before it changes
        assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("first", [False, True])
async def test_a_cancel_in_the_same_tick_as_the_librarys_own(first: bool) -> None:
    """The caller is cancelled in the tick in which a hook fails and the others are cancelled: with the caller's message."""
    fails_now = asyncio.Event()

    async def fails() -> None:
        await fails_now.wait()
        if first:
            task.cancel("outside")
        else:
            asyncio.get_running_loop().call_soon(task.cancel, "outside")
        raise ValueError("of the hook")

    task = asyncio.create_task(run_with(1, fails, forever)())
    await ticks(20)
    fails_now.set()
    with pytest.raises(asyncio.CancelledError, match="outside"):
        await task


async def test_a_scope_around_a_run_knows_its_own_cancel() -> None:
    """A scope of anyio ends a run whose hooks clean up with errors: the scope catches what comes out."""

    async def fails_in_cleanup() -> None:
        try:
            await forever()
        finally:
            raise ValueError("cleanup")

    async def main() -> bool:
        with anyio.move_on_after(0) as scope:
            await run_with(0, fails_in_cleanup, fails_in_cleanup)()
        return scope.cancelled_caught

    assert await in_a_task(main)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("where", ["run", "until"])
async def test_a_cancel_in_the_same_tick_as_a_background_failure(where: str, first: bool) -> None:
    """The caller is cancelled in the tick in which a failed background task ends its run, or its wait: with its own message."""
    fails_now = asyncio.Event()

    async def fails() -> None:
        await fails_now.wait()
        if first:
            task.cancel("outside")
        else:
            asyncio.get_running_loop().call_soon(asyncio.get_running_loop().call_soon, task.cancel, "outside")
        raise ValueError("of the background task")

    async def main() -> None:
        async with ah.AsyncMonitoredSession(double, [BeforeRunHook(forever)]) as session:
            session.start_soon(fails)
            await (session.run("double") if where == "run" else session.until(forever()))

    task = asyncio.create_task(main())
    await ticks(20)
    fails_now.set()
    with pytest.raises((asyncio.CancelledError, ValueError), match=r"outside|background") as raised:
        await task
    if first:
        assert isinstance(raised.value, asyncio.CancelledError)


async def test_a_cancel_after_an_absorbed_interrupt_is_not_lost() -> None:
    """An error leaves the session, which interrupts a run, and a hook absorbs that; a cancel of the run's task is still one."""
    error = ValueError("of the body")
    began, absorbed = asyncio.Event(), asyncio.Event()
    runs: list[asyncio.Task[Any]] = []

    async def absorbs() -> None:
        began.set()
        with contextlib.suppress(asyncio.CancelledError):
            await forever()
        absorbed.set()

    async def use() -> None:
        async with ah.AsyncMonitoredSession(double, [BeforeRunHook(absorbs), BeforeRunHook(forever)]) as session:
            runs.append(asyncio.create_task(session.run("double")))
            await began.wait()
            raise error

    using = asyncio.create_task(use())
    await absorbed.wait()
    await ticks()
    runs[0].cancel("for real")
    with pytest.raises(asyncio.CancelledError, match="for real"):
        await runs[0]
    with pytest.raises(ValueError, match="of the body") as raised:
        await using
    assert raised.value is error


async def test_a_cancel_that_a_nested_session_has_seen() -> None:
    """The caller is cancelled in the tick in which a session inside a hook cancels it for a failure of its own; then the hook's
    sibling fails, while that session closes: the cancel comes out.
    """  # noqa: D205
    fails_now, closing = asyncio.Event(), asyncio.Event()

    async def inner_failure() -> None:
        await fails_now.wait()
        asyncio.get_running_loop().call_soon(task.cancel, "outside")
        raise ValueError("inner")

    async def slow_close(_: object) -> None:
        closing.set()
        await ticks(20)

    async def nested() -> None:
        hooks = [BeforeRunHook(forever), BeforeRunHook(inner_failure), PhaseHook("close", slow_close)]
        async with ah.AsyncMonitoredSession(double, hooks) as session:
            await session.run("double")

    async def sibling() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await closing.wait()
        raise KeyError("sibling")

    task = asyncio.create_task(run_with(0, nested, sibling)())
    await ticks(20)
    fails_now.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_timeout_in_the_tick_of_the_librarys_own_cancel() -> None:
    """A hook's `asyncio.timeout` expires in the tick in which another hook fails and it is cancelled: that error comes out."""
    fails_now = asyncio.Event()

    async def expires() -> None:
        async with asyncio.timeout(None) as timeout:
            timeouts.append(timeout)
            await forever()

    async def fails() -> None:
        await fails_now.wait()
        timeouts[0].reschedule(asyncio.get_running_loop().time())  # by `call_soon`
        await asyncio.sleep(0)
        raise ValueError("of the other")

    timeouts: list[asyncio.Timeout] = []
    task = asyncio.create_task(run_with(0, expires, fails)())
    await ticks(20)
    fails_now.set()
    with pytest.raises(ValueError, match="of the other"):
        await task


async def test_a_cancel_in_the_tick_of_a_repeated_one() -> None:
    """A task group repeats the cancel that another hook's failure made, as from Python 3.13 on; the caller is cancelled then."""
    fails_now, repeated = asyncio.Event(), asyncio.Event()

    async def repeats() -> None:
        own = asyncio.current_task()
        assert own is not None
        try:
            await forever()
        except asyncio.CancelledError:
            own.uncancel()
            own.cancel()
            asyncio.get_running_loop().call_soon(own.cancel, "outside")
            repeated.set()

    async def fails() -> None:
        await fails_now.wait()
        raise ValueError("of the other")

    async def main() -> None:
        own = asyncio.current_task()
        assert own is not None
        own.cancel()  # long ago: so `uncancel` does not clear the one that is pending
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        await run_with(0, repeats, fails)()

    task = asyncio.create_task(main())
    await ticks(20)
    fails_now.set()
    await repeated.wait()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("how", ["as it is", "another", "an error"])
async def test_a_cancel_after_one_of_the_librarys_own_that_was_taken_back(how: str) -> None:
    """A hook absorbs the cancel that another hook's failure made and takes it back; a later cancel of the caller comes out."""
    absorbed = asyncio.Event()

    async def absorbs() -> None:
        own = asyncio.current_task()
        assert own is not None
        try:
            await forever()
        except asyncio.CancelledError:
            own.uncancel()
        absorbed.set()
        try:
            await forever()
        except asyncio.CancelledError:
            if how == "as it is":
                raise
            raise asyncio.CancelledError if how == "another" else ValueError("in the cleanup")  # noqa: B904 - by its context

    task = asyncio.create_task(run_with(0, absorbs, lambda: fail(KeyError("other")))())
    await absorbed.wait()
    task.cancel("outside")
    with pytest.raises(asyncio.CancelledError, match="outside"):
        await task


async def test_a_hook_that_takes_the_librarys_cancel_back_leaves_that_of_others() -> None:
    """A task that was cancelled before and cleans up has the same count after a run whose hook takes a cancel back."""

    async def takes_back() -> None:
        own = asyncio.current_task()
        assert own is not None
        try:
            await forever()
        finally:
            own.uncancel()

    async def main() -> None:
        own = asyncio.current_task()
        assert own is not None
        try:
            await forever()
        finally:
            with pytest.raises(KeyError):
                await run_with(0, takes_back, lambda: fail(KeyError("other")))()
            counts.append(own.cancelling())

    counts: list[int] = []
    task = asyncio.create_task(main())
    await ticks()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert counts == [1]


@pytest.mark.parametrize("repeats", [1, 3])
async def test_a_cancel_in_the_tick_of_a_block_that_ends_for_the_library(repeats: int) -> None:
    """A stop ends a wait whose block cancels itself until its children have ended, takes that back and raises the first cancel,
    as task groups of anyio do; the caller is cancelled in the tick of its last one: that comes out.
    """  # noqa: D205

    class Block:
        async def __aenter__(self) -> None: ...

        async def __aexit__(self, *exc: object) -> None:
            own, loop = asyncio.current_task(), asyncio.get_running_loop()
            assert own is not None
            for number in range(repeats):
                loop.call_soon(own.cancel, "of the block")
                if number == repeats - 1:
                    loop.call_soon(own.cancel, "outside")
                with contextlib.suppress(asyncio.CancelledError):
                    await forever()
            for _ in range(repeats):
                own.uncancel()

    async def wait_in_block() -> None:
        async with Block():
            waiting.set()
            await forever()

    waiting = asyncio.Event()
    async with ah.AsyncMonitoredSession(double) as session:
        task = asyncio.create_task(session.until(wait_in_block()))
        await waiting.wait()
        session.request_stop("enough")
        [ended] = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(ended, asyncio.CancelledError)


async def test_a_time_limit_in_the_context_of_the_librarys_cancel() -> None:
    """A hook cleans up after a time limit of its own, on a task with a stale count, and another fails: that error comes out."""
    cleaning = asyncio.Event()

    async def cleans_up() -> None:
        await timeout_that_leaves_its_cancel()
        try:
            async with asyncio.timeout(0):
                await forever()
        finally:
            cleaning.set()
            await forever()

    async def fails() -> None:
        await cleaning.wait()
        raise ValueError("of the other")

    with pytest.raises(ValueError, match="of the other"):
        await in_a_task(run_with(0, cleans_up, fails))


class _CountingTask(asyncio.Task[None]):
    """Counts the cancels that it gets."""

    cancels = 0

    def cancel(self, msg: Any | None = None) -> bool:
        self.cancels += 1
        return super().cancel(msg)


async def test_a_scope_of_anyio_cancels_a_run_once() -> None:
    """It repeats its cancel at every tick: not while the run waits for the cleanup of a hook, however long that takes."""
    gate, cleans, scope = asyncio.Event(), asyncio.Event(), anyio.CancelScope()

    async def clean_up(_: object) -> None:
        try:
            await forever()
        finally:
            cleans.set()
            await gate.wait()

    async def main() -> None:
        hooks = [PhaseHook("before_run", forever), PhaseHook("before_run", clean_up)]
        async with ah.AsyncMonitoredSession(double, hooks) as session:
            with scope:
                await session.run("double")

    task = _CountingTask(main())
    await ticks()
    scope.cancel()
    await cleans.wait()
    await ticks(20)
    assert task.cancels == 1
    gate.set()
    await task
    assert scope.cancelled_caught
