"""The plays of the cancel sweep: sessions with 0 to 5 hooks, in every phase and every kind of trouble."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import anyio

import aiohooks as ah
from tests.programmes.stage import Act, Stage, StageHook, StageScenario, graph_of_a_step, soon

SCENARIOS: list[StageScenario] = []

Play = Callable[[Stage], Awaitable[None]]


class Broken(Exception):
    """What a play fails with."""


class Worse(Exception):
    """What another part of it fails with."""


def scenario(name: str, **options: Any) -> Callable[[Play], Play]:
    """Adds a play to the list."""

    def add(play: Play) -> Play:
        SCENARIOS.append(StageScenario(name, play, **options))
        return play

    return add


def fails(error: type[BaseException], *, at: int = 1, until: int | None = None) -> Act:
    """An act that raises at its `at`-th call, or at all from `at` to `until`."""

    async def act(call: int) -> None:
        if at <= call <= (at if until is None else until):
            raise error(f"call {call}")

    return act


# -- steps


async def two_steps(stage: Stage) -> None:
    async with stage.open() as session:
        for _ in range(2):
            await stage.run(session)


for _count in range(6):
    scenario(f"two steps, {_count} hooks", hooks=_count)(two_steps)
scenario("two steps, sessions from a creator", hooks=2, creator=True)(two_steps)


@scenario("hooks of different orders", hooks=4)
async def orders(stage: Stage) -> None:
    hooks = [ah.configure(hook, order=number // 2) for number, hook in enumerate(stage.hooks)]  # type: ignore[arg-type]
    async with stage.open(hooks=hooks) as session:
        await stage.run(session)


@scenario("some suspend, some override little", hooks=2)
async def mixed(stage: Stage) -> None:
    class Late(ah.SessionRunHook):
        async def after_run(self, run_context: Any, run_values: Any) -> None:
            await stage.perform("late.after_run")

    class Still(ah.SessionRunHook):
        async def before_run(self, run_context: Any) -> ah.SessionRunArgs:
            return ah.SessionRunArgs(["w", "global_step"])

    async with stage.open(hooks=[Still(), *stage.hooks, Late(), ah.SessionRunHook()]) as session:
        await stage.run(session, ["train", "left"])
        await stage.run(session)


@scenario("a run without hooks inside, then with", hooks=2)
async def step_fn(stage: Stage) -> None:
    async def fn(step_context: ah.StepContext) -> None:
        await step_context.session.run("left")
        await stage.pause("step_fn", 1)
        await step_context.run_with_hooks("train")

    async with stage.open() as session:
        await session.run_step_fn(fn)


@scenario("a coroutine function is the step", hooks=2)
async def step_function(stage: Stage) -> None:
    async def feeds() -> AsyncGenerator[int]:
        for number in range(2):
            await stage.pause("feeds", 1)
            yield number

    async def train_step(batch: int) -> dict[str, int]:
        await stage.perform("train")
        return {"loss": batch}

    for hook in stage.hooks:
        assert isinstance(hook, StageHook)
        hook.fetches = "loss"
    session = ah.AsyncMonitoredSession(train_step, hooks=stage.hooks)
    generator = feeds()
    try:
        async with session:
            async for _ in session.steps("loss", feeds=generator):
                await stage.pause("between", 1)
    finally:
        await generator.aclose()


@scenario("an operation in a thread", hooks=1)
async def in_thread(stage: Stage) -> None:
    running = threading.Event()
    stage.graph = graph_of_a_step()

    @stage.graph.operation(thread=True)
    def blocking(x: int) -> int:
        running.set()
        running.clear()
        return x

    async with stage.open() as session:
        await stage.probe.watch("thread", session.run, ["blocking", "train"])
    if running.is_set():
        stage.problem("I10: the thread was not waited for")


@scenario("never recovers", hooks=1, expect=ah.AbortedError)
async def singular(stage: Stage) -> None:
    stage.acts["train"] = fails(ah.AbortedError)
    session = ah.AsyncSingularMonitoredSession(stage.graph, hooks=stage.hooks, global_step=stage.store, variables=stage.variables)
    async with session:
        await stage.run(session)


# -- errors in each phase


def _error_in(phase: str) -> Play:
    async def play(stage: Stage) -> None:
        stage.acts[f"h1.{phase}"] = fails(Broken)
        await two_steps(stage)

    return play


for _phase in ("begin", "after_create_session", "before_run", "after_run", "end", "close"):
    scenario(f"error in {_phase}", expect=Broken)(_error_in(_phase))


@scenario("error in an operation", expect=Broken)
async def error_in_operation(stage: Stage) -> None:
    stage.acts["right"] = fails(Broken, at=2)
    await two_steps(stage)


@scenario("error in the block", expect=Broken)
async def error_in_block(stage: Stage) -> None:
    async with stage.open() as session:
        await stage.run(session)
        raise Broken


@scenario("errors in two hooks at once", hooks=5, expect=(ExceptionGroup, Broken, Worse))
async def two_errors(stage: Stage) -> None:
    def act_of(error: type[BaseException]) -> Act:
        async def act(call: int) -> None:
            try:
                await soon()
            finally:
                raise error  # also when it is cancelled because of the other one

        return act

    stage.acts["h1.before_run"] = act_of(Broken)
    stage.acts["h3.before_run"] = act_of(Worse)
    await two_steps(stage)


@scenario("errors in close of all, and in the run", expect=Worse)
async def errors_everywhere(stage: Stage) -> None:
    stage.acts["train"] = fails(Worse)
    for number in range(3):
        stage.acts[f"h{number}.close"] = fails(Broken)
    await two_steps(stage)


@scenario("failing observers are only logged", hooks=3, vanishing=True)
async def observers(stage: Stage) -> None:
    hooks = [ah.configure(hook, on_error="log") for hook in stage.hooks]  # type: ignore[arg-type]
    for label in ("h0.before_run", "h1.after_run", "h2.after_create_session", "h1.end", "h0.close"):
        stage.acts[label] = fails(Broken)
    async with stage.open(hooks=hooks) as session:
        await stage.run(session)


# -- clean ends and stops


@scenario("the input ends in an operation", hooks=2, vanishing=True)
async def out_of_range(stage: Stage) -> None:
    stage.acts["left"] = fails(ah.OutOfRangeError, at=2)
    await two_steps(stage)


@scenario("a hook asks for a stop", hooks=1)
async def stop_by_hook(stage: Stage) -> None:
    hooks = [ah.StopAtStepHook(last_step=1), *stage.hooks]
    async with stage.open(hooks=hooks) as session:
        while not session.should_stop():
            await stage.run(session)
        await stage.run(session)


@scenario("aclose in the block, and again", hooks=2)
async def close_by_hand(stage: Stage) -> None:
    async with stage.open() as session:
        await stage.run(session)
        await session.aclose()
        await session.aclose()


# -- recovery


def _recovers_from(label: str) -> Play:
    async def play(stage: Stage) -> None:
        stage.acts[label] = fails(ah.AbortedError)
        await two_steps(stage)

    return play


for _label in ("h1.before_run", "h0.after_run", "train", "create", "h1.after_create_session"):
    scenario(f"recovers from {_label}", hooks=2, creator=True, vanishing=True)(_recovers_from(_label))


@scenario("recovery is used up", hooks=2, creator=True, expect=ah.UnavailableError)
async def exhausted(stage: Stage) -> None:
    stage.acts["right"] = fails(ah.UnavailableError, until=9)
    async with stage.open(recovery=ah.RecoveryPolicy(max_attempts=2, backoff=ah.Backoff(initial_secs=0))) as session:
        await stage.run(session)


@scenario("recovery pauses", hooks=1, creator=True, manual=True)
async def pauses(stage: Stage) -> None:
    async def lost(call: int) -> None:
        if call <= 2:
            let_time_pass(stage, 40, 0.5)
            raise ah.AbortedError

    stage.acts["train"] = lost
    backoff = ah.Backoff(initial_secs=2.0, jitter=False)
    async with stage.open(recovery=ah.RecoveryPolicy(backoff=backoff)) as session:
        await stage.run(session)


def let_time_pass(stage: Stage, ticks: int, secs: float) -> None:
    """Moves the manual clock at every tick of the loop from now on, until the operation has ended."""
    stage.clock.advance(secs)
    if ticks and not stage.left:
        asyncio.get_running_loop().call_soon(let_time_pass, stage, ticks - 1, secs)


@scenario("recovery with work in the background", hooks=1, creator=True)
async def recovery_background(stage: Stage) -> None:
    class Starter(ah.SessionRunHook):
        async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
            coord.start_soon(stage.probe.watch, "worker", coord.wait_for_stop)

    stage.acts["train"] = fails(ah.AbortedError)
    async with stage.open(hooks=[*stage.hooks, Starter()]) as session:
        session.start_soon(stage.probe.watch, "worker", session.coord.wait_for_stop)
        await stage.run(session)


# -- waiting for steps and for others


async def advance_slowly(stage: Stage, steps: int) -> None:
    """Another worker: commits variables and step as a session does."""
    session = ah.Session(stage.graph, global_step=stage.store, variables=stage.variables)
    for _ in range(steps):
        await soon()
        await session.run("push")
    await session.aclose()


@scenario("a hook waits for a step", hooks=1)
async def step_waiter(stage: Stage) -> None:
    hooks = [ah.GlobalStepWaiterHook(3), *stage.hooks]

    async def waiter() -> None:
        async with stage.open(hooks=hooks) as session:
            await stage.run(session)

    await stage.together(waiter=waiter, helper=lambda: advance_slowly(stage, 4))


@scenario("a hook waits in a task of its own", hooks=2)
async def wait_in_hook(stage: Stage) -> None:
    async def wait(call: int) -> None:
        await stage.store.wait_for(2)

    stage.acts["h1.before_run"] = wait
    async with stage.open() as session:
        session.start_soon(stage.probe.watch, "~advance", advance_slowly, stage, 3)
        await stage.run(session)


@scenario("a stop ends a wait for a step", hooks=1, vanishing=True)
async def stop_ends_wait(stage: Stage) -> None:
    async def stop(call: int) -> None:
        session.request_stop("enough")

    stage.acts["h0.before_run"] = stop
    session = stage.session(hooks=[ah.GlobalStepWaiterHook(10), *stage.hooks])
    async with session:
        await stage.run(session)


@scenario("a wait for a step is too long", hooks=1, manual=True, expect=ah.StepTimeoutError)
async def step_timeout(stage: Stage) -> None:
    async def later(call: int) -> None:
        await soon()
        stage.clock.advance(5)

    stage.acts["h0.before_run"] = later
    async with stage.open(hooks=[ah.GlobalStepWaiterHook(10, timeout=5), *stage.hooks]) as session:
        await stage.run(session)


@scenario("until an event comes", hooks=1)
async def until(stage: Stage) -> None:
    event = asyncio.Event()

    async def producer() -> None:
        await stage.pause("producer", 2)
        event.set()

    async with stage.open() as session:
        session.start_soon(stage.probe.watch, "~producer", producer)
        await session.until(event.wait())
        future = asyncio.get_running_loop().create_future()
        session.start_soon(stage.probe.watch, "~producer", _resolve, future)
        assert await session.until(future) == 1
        await stage.run(session)


async def _resolve(future: asyncio.Future[int]) -> None:
    await soon()
    if not future.done():
        future.set_result(1)


@scenario("until, and a stop comes", hooks=1)
async def until_stop(stage: Stage) -> None:
    async with stage.open() as session:

        async def stopper() -> None:
            await stage.pause("stopper", 2)
            session.request_stop("enough")

        session.start_soon(stage.probe.watch, "~stopper", stopper)
        await session.until(asyncio.Event().wait())


@scenario("a stop inside until and inside a hook, without a pause", hooks=2)
async def stop_at_once(stage: Stage) -> None:
    async with stage.open() as session:

        async def quick() -> int:
            session.request_stop("enough")
            return 1

        async def stop(call: int) -> None:
            if call == 2:
                await session.until(quick())

        stage.acts["h0.after_run"] = stop
        await stage.run(session)
        await stage.run(session)
        await stage.run(session)


@scenario("until, and the producer fails", hooks=1, expect=Broken)
async def until_failure(stage: Stage) -> None:
    stage.acts["~background"] = fails(Broken)
    async with stage.open() as session:
        session.start_soon(stage.perform, "~background")
        await session.until(asyncio.Event().wait())


# -- background work


@scenario("background work ends by itself", hooks=1)
async def background(stage: Stage) -> None:
    async with stage.open() as session:
        for number in range(2):
            session.start_soon(stage.perform, f"background {number}")
        await stage.run(session)


@scenario("background work fails during a run", hooks=2, expect=Broken)
async def background_fails(stage: Stage) -> None:
    async def wait(call: int) -> None:
        await asyncio.Event().wait()

    stage.acts["~background"] = fails(Broken)
    stage.acts["h1.before_run"] = wait
    async with stage.open() as session:
        session.start_soon(stage.perform, "~background")
        await stage.run(session)


@scenario("background work outlives the grace period", hooks=1, manual=True)
async def grace(stage: Stage) -> None:
    async def stubborn(call: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await soon()

    async def last(call: int) -> None:
        let_time_pass(stage, 300, 1)

    stage.acts["background"] = stubborn
    stage.acts["h0.end"] = last
    async with stage.open(stop_grace_period_secs=50) as session:
        session.start_soon(stage.perform, "background")
        await stage.run(session)


@scenario("a coordinator alone", hooks=0)
async def coordinator(stage: Stage) -> None:
    coord = ah.Coordinator()

    async def worker() -> None:
        while not coord.should_stop():
            await soon()

    async def stopper() -> None:
        await stage.pause("stopper", 3)
        coord.request_stop("enough")

    coord.start_soon(stage.probe.watch, "worker", worker)
    coord.start_soon(stage.probe.watch, "~stopper", stopper)
    try:
        await coord.wait_for_stop()
    finally:
        coord.request_stop("leaving")
        await finish(coord.join)


async def finish(fn: Callable[[], Awaitable[Any]]) -> None:
    """Awaits `fn()` to its end although the caller is cancelled, as a careful user's `finally` does."""
    with anyio.CancelScope(shield=True):
        task = asyncio.ensure_future(fn())
        cancel: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancel = error
        if cancel is not None:
            raise cancel
        task.result()


# -- several at once


@scenario("two tasks take turns", hooks=2, parallel=True)
async def turns(stage: Stage) -> None:
    async with stage.open() as session:

        async def runner() -> None:
            for _ in range(2):
                await stage.run(session)

        await stage.together(one=runner, two=runner, three=runner)


@scenario("the block is left during a run", hooks=1, parallel=True)
async def left_during_run(stage: Stage) -> None:
    session = stage.session()
    opened, running = asyncio.Event(), asyncio.Event()

    async def owner() -> None:
        try:
            async with session:
                opened.set()
                await running.wait()
        finally:
            opened.set()

    async def runner() -> None:
        try:
            await opened.wait()
            asyncio.get_running_loop().call_soon(running.set)
            await stage.run(session)
        except ah.SessionClosedError:
            pass
        finally:
            running.set()

    await stage.together(owner=owner, runner=runner)


@scenario("chief and worker share variables and step", hooks=1, parallel=True)
async def chief_and_worker(stage: Stage) -> None:
    graph = graph_of_a_step()

    async def chief() -> None:
        await stage.pause("chief", 2)
        async with stage.open(name="chief") as session:
            for _ in range(3):
                await stage.run(session)

    async def worker() -> None:
        creator = ah.WorkerSessionCreator(graph, global_step=stage.store, variables=stage.variables)
        session = ah.AsyncMonitoredSession(creator, hooks=[ah.GlobalStepWaiterHook(2)], name="worker")
        async with session:
            await session.run("train")

    await stage.together(helper_chief=chief, worker=worker)


# -- time, and other people's ways with cancellation


@scenario("a hook takes too long", hooks=2, manual=True, expect=ah.HookTimeoutError)
async def hook_timeout(stage: Stage) -> None:
    async def stuck(call: int) -> None:
        await asyncio.Event().wait()

    async def later(call: int) -> None:
        await soon()
        stage.clock.advance(3)

    slow = stage.seed & 1  # the one in the caller's task, or the one in a task of its own
    stage.acts[f"h{slow}.before_run"] = stuck
    stage.acts[f"h{1 - slow}.before_run"] = later
    hooks = [*stage.hooks]
    hooks[slow] = ah.configure(stage.hooks[slow], timeout=2)  # type: ignore[arg-type]
    async with stage.open(hooks=hooks) as session:
        await stage.run(session)


@scenario("hooks with timeouts and scopes of their own", hooks=3)
async def own_timeouts(stage: Stage) -> None:
    async def expires(call: int) -> None:
        try:
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        except TimeoutError:
            pass

    async def moves_on(call: int) -> None:
        with anyio.move_on_after(0):
            await anyio.sleep_forever()

    for number in range(3):
        stage.acts[f"h{number}.before_run"] = expires if (number + stage.seed) % 2 else moves_on
        stage.acts[f"h{number}.after_run"] = moves_on if (number + stage.seed) % 2 else expires
    async with stage.open() as session:
        await stage.run(session)
