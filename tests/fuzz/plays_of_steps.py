"""Plays of the cancel sweep: steps, errors in each phase, clean ends, recovery."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator
from typing import Any

import aiohooks as ah
from tests.fuzz.playbook import Broken, Play, Worse, fails, let_time_pass, scenario, two_steps
from tests.fuzz.stage import Act, Stage, StageHook, graph_of_a_step, soon

# -- steps

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
    async def fn(step_context: ah.session.StepContext) -> None:
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


@scenario("an operation in a thread", hooks=1, hang_secs=30.0)
async def to_thread(stage: Stage) -> None:
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


@scenario("recovery with work in the background", hooks=1, creator=True)
async def recovery_background(stage: Stage) -> None:
    class Starter(ah.SessionRunHook):
        async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
            coord.start_soon(stage.probe.watch, "worker", coord.wait_for_stop)

    stage.acts["train"] = fails(ah.AbortedError)
    async with stage.open(hooks=[*stage.hooks, Starter()]) as session:
        session.start_soon(stage.probe.watch, "worker", session.coord.wait_for_stop)
        await stage.run(session)
