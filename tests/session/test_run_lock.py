"""Invalid uses of a session: closed, never entered, entered twice, from inside, from another loop or thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import RecordingHook
from tests.support.checks import drop, refused
from tests.support.hooks import PhaseHook
from tests.support.sessions import counting_graph, do_nothing, double
from tests.support.waiting import forever, result_without_suspending, ticks, until_true

Use = Callable[[ah.AsyncMonitoredSession], Awaitable[Any]]


async def use_step_fn(session: ah.AsyncMonitoredSession) -> None:
    """Run a step function."""

    async def step_fn(context: ah.session.StepContext) -> None:
        await context.run_with_hooks("loss")

    await session.run_step_fn(step_fn)


async def use_start_soon(session: ah.AsyncMonitoredSession) -> None:
    session.start_soon(do_nothing)


async def use_until(session: ah.AsyncMonitoredSession) -> None:
    await session.until(do_nothing())


async def use_steps(session: ah.AsyncMonitoredSession) -> None:
    async for _ in session.steps("loss"):
        break


RUNS: dict[str, Use] = {"run": lambda session: session.run("loss"), "run_step_fn": use_step_fn}
USES: dict[str, Use] = {**RUNS, "start_soon": use_start_soon}


# -- closed, never entered, entered twice


@pytest.mark.parametrize("owner", ["session", "coord"])
@pytest.mark.parametrize("use", RUNS.values(), ids=RUNS)
async def test_the_end_is_a_clean_one_for_background_tasks(use: Use, owner: str) -> None:
    """A run that such a task begins while the session closes is one of those that a stop ends, and no failure."""
    ends: list[str] = []

    async def background() -> None:
        await session.coord.wait_for_stop()
        try:
            await use(session)
        except ah.StopRequestedError as stopped:
            ends.append(str(stopped))
            raise

    async with ah.AsyncMonitoredSession(double) as session:
        (session if owner == "session" else session.coord).start_soon(background)
        await ticks()
    assert ends == ["the session has ended"]


@pytest.mark.parametrize("use", USES.values(), ids=USES)
async def test_a_closed_session_is_not_used(use: Use) -> None:
    """After its block a session refuses runs and tasks: a SessionClosedError, which is a RuntimeError."""
    async with ah.AsyncMonitoredSession(double) as session:
        pass
    with refused(ah.errors.SessionClosedError, "this session is closed") as caught:
        await use(session)
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize("use", {**USES, "until": use_until, "steps": use_steps}.values(), ids=[*USES, "until", "steps"])
async def test_a_session_that_was_never_entered_is_not_used(use: Use) -> None:
    """A session refuses everything before `async with`, and says that this is missing."""
    with refused(ah.errors.SessionClosedError, "`async with`") as caught:
        await use(ah.AsyncMonitoredSession(double))
    assert isinstance(caught.value, RuntimeError)


async def test_what_a_session_knows_before_it_is_entered() -> None:
    """Before `async with` closing does nothing and no step store is known; status and stop work."""
    session = ah.AsyncMonitoredSession(double)
    with refused(ah.errors.SessionClosedError, "not entered", "`async with`"):
        await session.aclose()
    with refused(ah.errors.SessionClosedError, "the step store is known", "`async with`"):
        _ = session.global_step
    assert session.should_stop()
    assert session.status().state == "new"
    assert session.stop_reason is None


@pytest.mark.parametrize("leave", [False, True], ids=["open", "closed"])
async def test_a_session_is_entered_once(leave: bool) -> None:
    """Entering again, open or closed, is refused and changes nothing; `begin` is called once."""
    hook = RecordingHook()
    session = ah.AsyncMonitoredSession(double, [hook])
    async with session:
        if not leave:
            with refused(ah.errors.SessionClosedError, "this session is open", "entered once", "make a new one"):
                await session.__aenter__()
            assert await session.run("loss") == 2
    if leave:
        with refused(ah.errors.SessionClosedError, "this session is closed", "entered once", "make a new one"):
            await session.__aenter__()
    assert hook.phases().count("begin") == 1
    assert hook.closed_with == [None]


async def test_a_session_that_failed_to_open_is_closed() -> None:
    """If entering fails the session is closed, and cannot be tried again."""

    async def fail() -> None:
        raise OSError("no network")

    session = ah.AsyncMonitoredSession(double, [PhaseHook("begin", fail)])
    with pytest.raises(OSError, match="no network"):
        async with session:
            raise AssertionError("the block must not run")
    with refused(ah.errors.SessionClosedError, "this session is closed", "make a new one"):
        await session.__aenter__()
    assert session.should_stop()


async def test_a_raw_session_that_was_replaced_says_so() -> None:
    """After recovery the previous session is closed, and says where the new one is."""
    sessions: list[ah.Session] = []

    async def keep(session: ah.Session, coord: ah.Coordinator) -> None:
        sessions.append(session)

    async def lose(batch: int = 1) -> dict[str, int]:
        if len(sessions) == 1:
            raise ah.AbortedError("lost")
        return {"loss": batch}

    recovery = ah.RecoveryPolicy(backoff=ah.Backoff(initial_secs=0))
    async with ah.AsyncMonitoredSession(lose, [PhaseHook("after_create_session", keep)], recovery=recovery) as session:
        await session.run("loss")
        assert [one.closed for one in sessions] == [True, False]
        with refused(ah.errors.SessionClosedError, "this session is closed", "the latest after_create_session got"):
            await sessions[0].run("loss")


# -- from inside


Phase = tuple[str, str]


@pytest.mark.parametrize(
    ("phase", "says"), [("begin", "opening"), ("after_create_session", "opening"), ("end", "closing"), ("close", "closing")]
)
async def test_hooks_do_not_run_their_session_outside_of_runs(phase: str, says: str) -> None:
    """While a session opens or closes a hook cannot run it; the error is the session's, as any of a hook."""
    session: ah.AsyncMonitoredSession

    async def run(*_: object) -> None:
        await session.run("loss")

    session = ah.AsyncMonitoredSession(double, [PhaseHook(phase, run)])
    with refused(ah.errors.SessionClosedError, f"this session is {says}"):
        async with session:
            pass


@pytest.mark.parametrize("phase", ["before_run", "after_run"])
@pytest.mark.parametrize("use", {**RUNS, "aclose": ah.AsyncMonitoredSession.aclose}.values(), ids=[*RUNS, "aclose"])
async def test_a_hook_does_not_use_the_session_it_belongs_to(phase: str, use: Use) -> None:
    """`run`, `run_step_fn` and `aclose` from inside a hook would deadlock: NestedRunError says what to use there."""
    session: ah.AsyncMonitoredSession

    async def call(*_: object) -> None:
        await use(session)

    session = ah.AsyncMonitoredSession(double, [PhaseHook(phase, call)])
    with refused(ah.errors.NestedRunError, "from inside a run", "run_context.session", "request_stop") as caught:
        async with session:
            await session.run("loss")
    assert isinstance(caught.value, RuntimeError)


async def test_a_task_that_a_hook_awaits_is_inside_the_run_too() -> None:
    """A hook that awaits a task which runs the session would deadlock as well, and gets the same error."""
    session: ah.AsyncMonitoredSession

    async def run_in_task(*_: object) -> None:
        await asyncio.create_task(session.run("loss"))

    async with ah.AsyncMonitoredSession(double, [PhaseHook("after_run", run_in_task)]) as session:
        with refused(ah.errors.NestedRunError, "run was called from inside a run", "run_context.session"):
            await session.run("loss")


async def test_an_operation_does_not_run_its_own_session() -> None:
    """The step itself is inside the run as a hook is."""
    session: ah.AsyncMonitoredSession

    async def step() -> dict[str, int]:
        return {"loss": await session.run("loss")}

    async with ah.AsyncMonitoredSession(step) as session:
        with refused(ah.errors.NestedRunError, "run was called from inside a run"):
            await session.run("loss")


async def test_a_step_function_runs_with_hooks_through_its_context_only() -> None:
    """Inside `run_step_fn` the session's own `run` is refused; the error names the context's `run_with_hooks`."""

    async def step_fn(context: ah.session.StepContext) -> Any:
        with refused(ah.errors.NestedRunError, "run was called from inside a run"):
            await session.run("loss")
        return await context.run_with_hooks("loss")

    async with ah.AsyncMonitoredSession(double) as session:
        assert await session.run_step_fn(step_fn) == 2


async def test_a_run_of_another_session_inside_a_run_is_allowed() -> None:
    """Sessions may be nested: the step of one may run another one, whose hooks get its own runs only."""
    async with ah.AsyncMonitoredSession(double) as inner:

        async def step() -> dict[str, int]:
            return {"loss": await inner.run("loss", {"batch": 7})}

        async with ah.AsyncMonitoredSession(step) as outer:
            assert await outer.run("loss") == 14


async def test_a_session_that_a_hook_opens_holds_up_that_of_the_hook() -> None:
    """While it is opened, the run that the hook is part of makes no step: a wait that depends on it ends."""
    steps = ah.MemoryStepStore()
    other = steps.publisher("other")

    async def wait_for_step() -> None:
        await steps.wait_for(5)

    async def open_another(*_: object) -> None:
        async with ah.AsyncMonitoredSession(double, [PhaseHook("begin", wait_for_step)]):
            raise AssertionError("not reached")

    async def main() -> None:
        hooks = [PhaseHook("before_run", open_another)]
        async with ah.AsyncMonitoredSession(double, hooks, global_step=steps) as session:
            await session.run("loss")

    running = asyncio.create_task(main())
    await until_true(lambda: steps.statistics().waiting)
    other.close()
    await running
    assert steps.latest.step == 0


async def test_two_sessions_that_run_each_other_are_refused() -> None:
    """A cycle over two sessions is found as well: the inner one's hook calls the outer one's `run`."""
    outer: ah.AsyncMonitoredSession

    async def run_outer(*_: object) -> None:
        await outer.run("step")

    async with ah.AsyncMonitoredSession(double, [PhaseHook("before_run", run_outer)]) as inner:

        async def step() -> dict[str, int]:
            return {"loss": await inner.run("loss")}

        async with ah.AsyncMonitoredSession(step) as outer:
            with refused(ah.errors.NestedRunError, "run was called from inside a run"):
                await outer.run("step")


async def test_a_background_task_started_in_a_hook_may_run_the_session() -> None:
    """A task that the session owns is not part of the run in which it was started: it waits for the lock."""
    started: list[asyncio.Task[Any]] = []

    async def start(*_: object) -> None:
        if not started:
            started.append(session.start_soon(session.run, "loss", {"batch": 50}))
            await ticks()
            assert session.status().queued == 1

    async with ah.AsyncMonitoredSession(double, [PhaseHook("before_run", start)]) as session:
        assert await session.run("loss") == 2
        assert await started[0] == 100


# -- another loop, another thread


async def in_another_loop(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine in a loop of its own, in a real thread, and return what it returned or raised."""
    return await asyncio.to_thread(asyncio.run, main())


LOOP_USES: dict[str, Use] = {
    **USES,
    "until": use_until,
    "aclose": ah.AsyncMonitoredSession.aclose,
    "wait_for_stop": lambda session: session.coord.wait_for_stop(1),
}


@pytest.mark.parametrize("use", LOOP_USES.values(), ids=LOOP_USES)
async def test_a_session_stays_in_its_loop(use: Use) -> None:
    """From another loop in another thread every method that could wait is refused, and the session is unchanged."""
    hook = RecordingHook()
    async with ah.AsyncMonitoredSession(double, [hook]) as session:
        with refused(ah.errors.WrongLoopError, "event loop") as caught:
            await in_another_loop(lambda: use(session))  # type: ignore[arg-type, return-value]
        assert isinstance(caught.value, RuntimeError)
        assert session.status().state == "open"
        assert await session.run("loss") == 2
    assert hook.closed_with == [None]


async def test_tasks_are_started_from_the_loop_only() -> None:
    """`start_soon` in a thread without a loop is refused; nothing is left un-awaited."""
    async with ah.AsyncMonitoredSession(double) as session:
        with refused(ah.errors.WrongLoopError, "event loop"):
            await asyncio.to_thread(session.start_soon, do_nothing)


def test_a_session_is_not_carried_to_the_next_loop() -> None:
    """A session entered in a loop that has ended is refused in the next one."""
    opened: list[ah.AsyncMonitoredSession] = []

    async def enter() -> None:
        opened.append(await ah.AsyncMonitoredSession(double).__aenter__())

    asyncio.run(enter())
    with refused(ah.errors.WrongLoopError, "belongs to another event loop"):
        asyncio.run(opened[0].run("loss"))
    with pytest.warns(ResourceWarning, match="was never closed"):
        drop(opened)


async def test_a_raw_session_stays_in_its_loop() -> None:
    """A raw session belongs to the loop of its first run."""
    session = ah.Session(counting_graph())
    assert await session.run("total") == 0
    with refused(ah.errors.WrongLoopError, "another event loop", "make one in each loop") as caught:
        await in_another_loop(lambda: session.run("total"))
    assert isinstance(caught.value, RuntimeError)
    assert await session.run("total") == 0


async def test_runs_of_one_step_function_take_turns() -> None:
    """A step function that makes two runs with hooks at the same time gets both, one after the other, each with its own calls."""
    events: list[str] = []

    class Recording(ah.SessionRunHook):
        async def before_run(self, run_context: ah.SessionRunContext) -> None:
            events.append(f"before {run_context.original_args.fetches}")
            await asyncio.sleep(0)

        async def after_run(self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
            await asyncio.sleep(0)
            events.append(f"after {run_context.original_args.fetches}")

    async def both(context: ah.session.StepContext) -> list[Any]:
        return list(await asyncio.gather(context.run_with_hooks("loss"), context.run_with_hooks("double")))

    async with ah.AsyncMonitoredSession(double, [Recording(), Recording()]) as session:
        assert await session.run_step_fn(both) == [2, {"loss": 2, "batch": 1}]
        assert await session.run("loss") == 2
    assert events[:8] == 2 * ["before loss"] + 2 * ["after loss"] + 2 * ["before double"] + 2 * ["after double"]


async def test_a_cancelled_run_of_a_step_function_gives_its_turn_back() -> None:
    """One of two runs at the same time is cancelled by the step function itself: the other one is made."""

    async def one_of_two(context: ah.session.StepContext) -> Any:
        tasks = [asyncio.create_task(context.run_with_hooks("loss")) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[1].cancel()
        return [one if isinstance(one, int) else type(one) for one in await asyncio.gather(*tasks, return_exceptions=True)]

    async def waits(run_context: ah.SessionRunContext) -> None:
        await asyncio.sleep(0)

    async with ah.AsyncMonitoredSession(double, [PhaseHook("before_run", waits)]) as session:
        assert await session.run_step_fn(one_of_two) == [asyncio.CancelledError, asyncio.CancelledError, 2]


@pytest.mark.parametrize("hooks", [1, 2], ids=["one hook", "hooks that overlap"])
async def test_a_later_run_of_a_step_function_is_cancelled(hooks: int) -> None:
    """Each of its runs may be made in a task of its own, whose cancel is not mistaken for one by a third party."""
    waiting: list[str] = []

    async def waits(run_context: ah.SessionRunContext) -> None:
        await asyncio.sleep(0)
        if run_context.original_args.fetches == "double":
            waiting.append("double")
            await forever()

    async def second_is_cancelled(context: ah.session.StepContext) -> bool:
        first, second = (asyncio.create_task(context.run_with_hooks(one)) for one in ("loss", "double"))
        await first
        await until_true(lambda: waiting)
        second.cancel()
        await asyncio.wait([second])
        return second.cancelled()

    async with ah.AsyncMonitoredSession(double, [PhaseHook("before_run", waits) for _ in range(hooks)]) as session:
        assert await session.run_step_fn(second_is_cancelled)


async def test_a_run_that_is_cancelled_when_it_gets_its_turn_passes_it_on() -> None:
    """The task that ends its run cancels the next one in the same tick: the one behind that runs."""

    async def waits(run_context: ah.SessionRunContext) -> None:
        await asyncio.sleep(0)

    async with ah.AsyncMonitoredSession(double, [PhaseHook("before_run", waits)]) as session:

        async def first() -> None:
            await session.run("loss")
            second.cancel()

        runs = asyncio.create_task(first())
        await asyncio.sleep(0)
        second, third = asyncio.create_task(session.run("loss")), asyncio.create_task(session.run("loss"))
        await runs
        await asyncio.wait([second])
        assert second.cancelled()
        assert await third == 2


async def test_a_run_that_begins_after_a_stop_does_not_wait_for_its_turn() -> None:
    """It ends immediately, though the run before it is still in progress."""

    async def waits(run_context: ah.SessionRunContext) -> None:
        await ended.wait()

    ended = asyncio.Event()
    async with ah.AsyncMonitoredSession(double, [PhaseHook("before_run", waits)]) as session:
        running = asyncio.create_task(session.run("loss"))
        await asyncio.sleep(0)
        session.request_stop("enough")
        with pytest.raises(ah.StopRequestedError, match="enough"):
            result_without_suspending(session.run("loss"))
        ended.set()
        assert await running == 2


async def test_a_session_is_not_closed_while_it_opens() -> None:
    """Another task that tries gets an error; the session opens, and is closed at its end. Its graph can then be extended."""
    graph, opening, tried = counting_graph(), asyncio.Event(), asyncio.Event()
    session = ah.AsyncMonitoredSession(graph, [PhaseHook("begin", lambda: opened())])

    async def opened() -> None:
        opening.set()
        await tried.wait()

    async def close() -> None:
        await opening.wait()
        try:
            with refused(ah.errors.SessionClosedError, "this session is still opening; raise an error in the hook to end it"):
                await session.aclose()
        finally:
            tried.set()

    closing = asyncio.create_task(close())
    async with session:
        await session.run("train")
        with refused(ah.errors.GraphFinalizedError, "late"):
            graph.operation(name="late")(lambda: 1)
    await closing
    graph.operation(name="late")(lambda: 1)
    assert await ah.Session(graph).run("late") == 1
