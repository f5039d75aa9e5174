"""Turns to run; and invalid uses of a session: closed, never entered, entered twice, from inside,
from another loop or thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook, RecordingHook
from tests.support.checks import refused
from tests.support.hooks import PhaseHook, SessionRecorder
from tests.support.sessions import (
    NO_BACKOFF,
    counting_graph,
    do_nothing,
    doubling,
    outcome,
)
from tests.support.waiting import (
    forever,
    parked,
    raises_after,
    result_without_suspending,
    ticks,
)

Use = Callable[[ah.AsyncMonitoredSession], Awaitable[Any]]
StepContext = ah.session.StepContext


async def use_step_fn(session: ah.AsyncMonitoredSession) -> None:
    """Run a step function."""

    async def step_fn(context: StepContext) -> None:
        await context.run_with_hooks("loss")

    await session.run_step_fn(step_fn)


async def use_start_soon(session: ah.AsyncMonitoredSession) -> None:
    session.start_soon(do_nothing)


async def use_steps(session: ah.AsyncMonitoredSession) -> None:
    async for _ in session.steps("loss"):
        break


RUNS: dict[str, Use] = {"run": lambda session: session.run("loss"), "run_step_fn": use_step_fn}
USES: dict[str, Use] = {**RUNS, "start_soon": use_start_soon}
WAITS: dict[str, Use] = {**USES, "until": lambda session: session.until(do_nothing())}


# -- turns


async def test_a_queued_run_that_finds_a_stop_does_not_begin() -> None:
    """The lock passes to the next one; a run that begins after the stop does not wait for its
    turn.
    """
    gate = asyncio.Event()

    async def stop(context: ah.SessionRunContext) -> None:
        context.request_stop("enough")
        await gate.wait()

    async with doubling(PhaseHook("before_run", stop)) as session:
        runs = [asyncio.create_task(session.run("loss")) for _ in range(3)]
        await ticks()
        with pytest.raises(ah.StopRequestedError, match="enough"):
            result_without_suspending(session.run("loss"))
        gate.set()
        results = await asyncio.gather(*runs, return_exceptions=True)
    assert results[0] == 2
    assert [type(result) for result in results[1:]] == [ah.StopRequestedError] * 2
    assert session.global_step.latest.step == 1


async def test_a_step_function_is_one_turn() -> None:
    """`run_step_fn` holds the lock once however many runs it makes; others wait for it as a
    whole.
    """
    order: list[str] = []

    async def step_fn(context: StepContext) -> str:
        for _ in range(2):
            order.append(f"with hooks {await context.run_with_hooks('loss')}")
            await ticks()
            order.append(f"raw {await context.session.run('loss')}")
        return "done"

    hook = RecordingHook()
    async with doubling(hook) as session:
        running = await parked(session.run_step_fn(step_fn), 1)
        order.append(f"run {await session.run('loss')}")
        assert await running == "done"
    assert order == ["with hooks 2", "raw 2", "with hooks 2", "raw 2", "run 2"]
    assert hook.phases().count("before_run") == 3
    assert session.global_step.latest.step == 5


# -- closed, never entered, entered twice


@pytest.mark.parametrize("use", USES.values(), ids=USES)
async def test_a_closed_session_is_not_used(use: Use) -> None:
    """After its block a session refuses runs and tasks: a SessionClosedError, which is a
    RuntimeError.
    """
    session = doubling()
    assert await outcome(session) is None
    says = "the session has ended" if use is USES["start_soon"] else "this session is closed"
    with refused(ah.errors.SessionClosedError, says) as caught:
        await use(session)
    assert isinstance(caught.value, RuntimeError)


NEW: dict[str, Use] = {**WAITS, "steps": use_steps, "aclose": ah.AsyncMonitoredSession.aclose}


@pytest.mark.parametrize("use", NEW.values(), ids=NEW)
async def test_a_session_that_was_never_entered_is_not_used(use: Use) -> None:
    """A session refuses everything before `async with`, and says that this is missing; status and
    stop work.
    """
    session = doubling()
    with refused(ah.errors.SessionClosedError, "`async with`"):
        await use(session)
    with refused(ah.errors.SessionClosedError, "the step store is known", "`async with`"):
        _ = session.global_step
    assert (session.should_stop(), session.status().state, session.stop_reason) == (
        True,
        "new",
        None,
    )


@pytest.mark.parametrize("how", ["open", "closed", "failed to open"])
async def test_a_session_is_entered_once(how: str) -> None:
    """Entering again is refused and changes nothing; `begin` is called once."""
    hook = RecordingHook()
    says = "this session is open" if how == "open" else "this session is closed"

    async def enter(_: object = None) -> None:
        with refused(ah.errors.SessionClosedError, says, "single-use", "make a new one"):
            await session.__aenter__()

    hooks = [
        hook,
        PhaseHook("begin" if "failed" in how else "?", raises_after(0, OSError("no network"))),
    ]
    session = doubling(*hooks)
    raised = await outcome(session, enter if how == "open" else do_nothing)
    if how != "open":
        await enter()
    assert isinstance(raised, OSError if "failed" in how else type(None))
    assert session.should_stop()
    assert (hook.phases().count("begin"), len(hook.closed_with)) == (1, 1)


async def test_a_raw_session_that_was_replaced_says_so() -> None:
    """After recovery the previous session is closed, and says where the new one is."""
    recorder = SessionRecorder()
    lost = FaultInjectionHook({("before_run", 1): ah.AbortedError("lost")})
    async with doubling(recorder, lost, recovery=NO_BACKOFF) as session:
        await session.run("loss")
        assert [raw.closed for raw in recorder.sessions] == [True, False]
        with refused(
            ah.errors.SessionClosedError,
            "this session is closed",
            "the latest after_create_session got",
        ):
            await recorder.sessions[0].run("loss")
        with refused(ah.errors.SessionClosedError, "its session was replaced"):
            recorder.coords[0].start_soon(forever)
        recorder.coords[1].start_soon(ticks)


async def test_a_session_is_not_closed_while_it_opens() -> None:
    """Another task that tries gets an error; the session opens, and is closed at its end. Its graph
    can then be extended.
    """
    graph = counting_graph()
    opening = asyncio.Event()
    tried = asyncio.Event()

    async def opened() -> None:
        opening.set()
        await tried.wait()

    async def close() -> None:
        await opening.wait()
        try:
            with refused(
                ah.errors.SessionClosedError,
                "this session is still opening; raise an error in the hook to end it",
            ):
                await session.aclose()
        finally:
            tried.set()

    session = ah.AsyncMonitoredSession(graph, [PhaseHook("begin", opened)])
    closing = asyncio.create_task(close())
    async with session:
        await session.run("train")
        with refused(ah.errors.GraphFinalizedError, "late"):
            graph.operation(name="late")(lambda: 1)
    await closing
    graph.operation(name="late")(lambda: 1)
    assert await ah.Session(graph).run("late") == 1


# -- from inside


@pytest.mark.parametrize(
    "place", ["before_run", "after_run", "a task of after_run", "step", "step function"]
)
@pytest.mark.parametrize("use", RUNS.values(), ids=RUNS)
async def test_what_is_part_of_a_run_does_not_run_the_session(place: str, use: Use) -> None:
    """It would deadlock: NestedRunError, which is a RuntimeError, says what to use in a hook, a
    task that it awaits, a step.
    """

    async def call(*_: object) -> None:
        with refused(
            ah.errors.NestedRunError, "from inside a run", "run_context.session", "request_stop"
        ) as caught:
            using: Any = use(session)
            await (asyncio.create_task(using) if "task" in place else using)
        assert isinstance(caught.value, RuntimeError)
        called.append(place)

    async def step() -> dict[str, int]:
        if place == "step":
            await call()
        return {"loss": 1}

    async def step_fn(context: StepContext) -> Any:
        if place == "step function":
            await call()
        return await context.run_with_hooks("loss")

    called: list[str] = []
    async with ah.AsyncMonitoredSession(
        step, [PhaseHook(place.removeprefix("a task of "), call)]
    ) as session:
        assert await session.run_step_fn(step_fn) == 1
    assert called == [place]


async def test_sessions_may_be_nested() -> None:
    """The step of one may run another one, whose hooks get its own runs only; a cycle over the two
    is refused.
    """

    async def run_outer(context: ah.SessionRunContext) -> None:
        if context.global_step == 2:
            await outer.run("step")

    async with doubling(PhaseHook("before_run", run_outer)) as inner:

        async def step() -> dict[str, int]:
            return {"loss": await inner.run("loss", {"batch": 7})}

        async with ah.AsyncMonitoredSession(step) as outer:
            assert await outer.run("loss") == 14
            with refused(ah.errors.NestedRunError, "run was called from inside a run"):
                await outer.run("step")


async def test_a_background_task_started_in_a_hook_may_run_the_session() -> None:
    """A task that the session owns is not part of the run in which it was started: it waits for the
    lock.
    """
    started: list[asyncio.Task[Any]] = []

    async def start(*_: object) -> None:
        if not started:
            started.append(session.start_soon(session.run, "loss", {"batch": 50}))
            await ticks()
            assert session.status().queued == 1

    async with doubling(PhaseHook("before_run", start)) as session:
        assert await session.run("loss") == 2
        assert await started[0] == 100


# -- another loop, another thread


LOOP_USES: dict[str, Use] = {
    **WAITS,
    "aclose": ah.AsyncMonitoredSession.aclose,
    "wait_for_stop": lambda session: session.coord.wait_for_stop(1),
}


@pytest.mark.parametrize("use", LOOP_USES.values(), ids=LOOP_USES)
async def test_a_session_stays_in_its_loop(use: Use) -> None:
    """From another loop, or none, in another thread every method that could wait is refused, and
    the session is unchanged.
    """
    hook = RecordingHook()
    async with doubling(hook) as session:
        with refused(ah.errors.WrongLoopError, "event loop") as caught:
            await asyncio.to_thread(lambda: asyncio.run(use(session)))  # type: ignore[arg-type]
        assert isinstance(caught.value, RuntimeError)
        with refused(ah.errors.WrongLoopError, "event loop"):
            await asyncio.to_thread(session.start_soon, do_nothing)
        assert session.status().state == "open"
        assert await session.run("loss") == 2
    assert hook.closed_with == [None]


async def test_a_raw_session_stays_in_its_loop() -> None:
    """A raw session belongs to the loop of its first run."""
    session = ah.Session(counting_graph())
    assert await session.run("total") == 0
    with refused(
        ah.errors.WrongLoopError, "another event loop", "Make a session in each loop"
    ) as caught:
        await asyncio.to_thread(lambda: asyncio.run(session.run("total")))
    assert isinstance(caught.value, RuntimeError)
    assert await session.run("total") == 0
