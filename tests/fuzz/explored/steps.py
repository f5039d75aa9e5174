"""Scenarios of steps: errors in each phase, clean ends, recovery."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import Any

import aiohooks as ah
from tests.fuzz.explored.fixture import (
    Action,
    Broken,
    Fixture,
    ScriptedHook,
    Worse,
    fails,
    graph_of_a_step,
    scenario,
    soon,
    two_steps,
    two_steps_with,
)

# -- steps

for _count in range(6):
    scenario(f"two steps, {_count} hooks", hooks=_count)(two_steps)
scenario("two steps, sessions from a creator", hooks=2, creator=True)(two_steps)


@scenario("hooks of different orders", hooks=4)
async def orders(fixture: Fixture) -> None:
    hooks = [ah.configure(hook, order=number // 2) for number, hook in enumerate(fixture.hooks)]
    async with fixture.open(hooks=hooks) as session:
        await fixture.run(session)


@scenario("some suspend, some override little", hooks=2)
async def mixed(fixture: Fixture) -> None:
    class Late(ah.SessionRunHook):
        async def after_run(self, *_: object) -> None:
            await fixture.perform("late.after_run")

    class Still(ah.SessionRunHook):
        async def before_run(self, run_context: Any) -> ah.SessionRunArgs:
            return ah.SessionRunArgs(["w", "global_step"])

    async with fixture.open(
        hooks=[Still(), *fixture.hooks, Late(), ah.SessionRunHook()]
    ) as session:
        await fixture.run(session, ["train", "left"])
        await fixture.run(session)


@scenario("a run without hooks inside, then with", hooks=2)
async def step_fn(fixture: Fixture) -> None:
    async def fn(step_context: ah.session.StepContext) -> None:
        await step_context.session.run("left")
        await fixture.pause("step_fn", 1)
        await step_context.run_with_hooks("train")

    async with fixture.open() as session:
        await session.run_step_fn(fn)


@scenario("a coroutine function is the step", hooks=2)
async def step_function(fixture: Fixture) -> None:
    async def feeds() -> AsyncGenerator[int]:
        for number in range(2):
            await fixture.pause("feeds", 1)
            yield number

    async def train_step(batch: int) -> dict[str, int]:
        await fixture.perform("train")
        return {"loss": batch}

    for hook in fixture.hooks:
        assert isinstance(hook, ScriptedHook)
        hook.fetches = "loss"
    session = ah.AsyncMonitoredSession(train_step, hooks=fixture.hooks)
    generator = feeds()
    try:
        async with session:
            async for _ in session.steps("loss", feeds=generator):
                await fixture.pause("between", 1)
    finally:
        await generator.aclose()


@scenario("an operation in a thread", hooks=1)
async def to_thread(fixture: Fixture) -> None:
    running = threading.Event()
    fixture.graph = graph_of_a_step()

    @fixture.graph.operation
    @ah.in_thread
    def blocking(x: int) -> int:
        running.set()
        running.clear()
        return x

    async with fixture.open() as session:
        await fixture.probe.watch("thread", session.run, ["blocking", "train"])
    if running.is_set():
        fixture.add_violation("thread: the thread was not waited for")


@scenario("never recovers", hooks=1, expect=ah.AbortedError)
async def singular(fixture: Fixture) -> None:
    fixture.actions["train"] = fails(ah.AbortedError)
    session = ah.session.AsyncSingularMonitoredSession(
        fixture.graph, hooks=fixture.hooks, global_step=fixture.store, variables=fixture.variables
    )
    async with session:
        await fixture.run(session)


# -- errors in each phase


for _phase in ("begin", "after_create_session", "before_run", "after_run", "end", "close"):
    scenario(f"error in {_phase}", expect=Broken)(two_steps_with(**{f"h1_{_phase}": fails(Broken)}))
scenario("error in an operation", expect=Broken)(two_steps_with(right=fails(Broken, at=2)))


@scenario("error in the block", expect=Broken)
async def error_in_block(fixture: Fixture) -> None:
    async with fixture.open() as session:
        await fixture.run(session)
        raise Broken


def _fails_in_any_case(error: type[BaseException]) -> Action:
    async def action(call: int) -> None:
        try:
            await soon()
        finally:
            raise error  # also when it is cancelled because of another one

    return action


scenario("errors in two hooks together", hooks=5, expect=(ExceptionGroup, Broken, Worse))(
    two_steps_with(
        h1_before_run=_fails_in_any_case(Broken), h3_before_run=_fails_in_any_case(Worse)
    )
)
scenario("errors in close of all, and in the run", expect=Worse)(
    two_steps_with(train=fails(Worse), **{f"h{number}_close": fails(Broken) for number in range(3)})
)


@scenario("failing observers are only logged", hooks=3, vanishing=True)
async def observers(fixture: Fixture) -> None:
    hooks = [ah.configure(hook, on_error="log") for hook in fixture.hooks]
    for label in ("h0.before_run", "h1.after_run", "h2.after_create_session", "h1.end", "h0.close"):
        fixture.actions[label] = fails(Broken)
    async with fixture.open(hooks=hooks) as session:
        await fixture.run(session)


# -- clean ends and stops


scenario("the input ends in an operation", hooks=2, vanishing=True)(
    two_steps_with(left=fails(ah.OutOfRangeError, at=2))
)


@scenario("a hook asks for a stop", hooks=1)
async def stop_by_hook(fixture: Fixture) -> None:
    hooks = [ah.StopAtStepHook(last_step=1), *fixture.hooks]
    async with fixture.open(hooks=hooks) as session:
        while not session.should_stop():
            await fixture.run(session)
        await fixture.run(session)


def check_drained(fixture: Fixture, session: ah.AsyncMonitoredSession, taken: int) -> None:
    """Check that a session has used all the elements that were taken, and stops for the reason of
    its drain.
    """
    if fixture.runs != taken or session.stop_reason != "enough":
        fixture.add_violation(
            f"drain: {fixture.runs} of {taken} elements were used, and the session ends:"
            f" {session.stop_reason}"
        )


@scenario("a drain with elements taken ahead", hooks=1)
async def drain_ahead(fixture: Fixture) -> None:
    taken = 0

    async def feeds() -> AsyncGenerator[dict[str, int]]:
        nonlocal taken
        while True:
            taken += 1
            await fixture.pause("feeds", 1)
            yield {"x": 1}

    async with fixture.open() as session:
        steps = session.steps("train", feeds=feeds(), prefetch=2)
        async for _ in steps:
            fixture.runs += 1
            session.request_drain("enough")
        check_drained(fixture, session, taken)


@scenario("a drain of a queue with its producer", hooks=1)
async def drain_queue(fixture: Fixture) -> None:
    queue, taken = asyncio.Queue[dict[str, int]](1), 0

    async def produce(coord: ah.Coordinator) -> None:
        nonlocal taken
        while True:
            await coord.until(fixture.pause("source", 1), drain=True)
            taken += 1
            await coord.until(queue.put({"x": 1}))

    async with fixture.open() as session:
        producer = session.start_soon(produce, session.coord)
        async for _ in session.steps("train", feeds=queue, producer=producer):
            fixture.runs += 1
            session.request_drain("enough")
        check_drained(fixture, session, taken)


@scenario("aclose in the block, and again", hooks=2)
async def close_by_hand(fixture: Fixture) -> None:
    async with fixture.open() as session:
        await fixture.run(session)
        await session.aclose()
        await session.aclose()


# -- recovery


for _label in ("h1_before_run", "h0_after_run", "train", "create", "h1_after_create_session"):
    scenario(f"recovers from {_label}", hooks=2, creator=True, vanishing=True)(
        two_steps_with(**{_label: fails(ah.AbortedError)})
    )


@scenario("recovery is exhausted", hooks=2, creator=True, expect=ah.UnavailableError)
async def exhausted(fixture: Fixture) -> None:
    fixture.actions["right"] = fails(ah.UnavailableError, until=9)
    async with fixture.open(
        recovery=ah.RecoveryPolicy(max_attempts=2, backoff=ah.Backoff(initial_secs=0))
    ) as session:
        await fixture.run(session)


@scenario("recovery pauses", hooks=1, creator=True)
async def pauses(fixture: Fixture) -> None:
    async def lost(call: int) -> None:
        if call <= 2:
            raise ah.AbortedError

    fixture.actions["train"] = lost
    backoff = ah.Backoff(initial_secs=2.0, jitter=False)
    async with fixture.open(recovery=ah.RecoveryPolicy(backoff=backoff)) as session:
        await fixture.run(session)


@scenario("recovery with work in the background", hooks=1, creator=True)
async def recovery_background(fixture: Fixture) -> None:
    class Starter(ah.SessionRunHook):
        async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
            coord.start_soon(fixture.probe.watch, "worker", coord.wait_for_stop)

    fixture.actions["train"] = fails(ah.AbortedError)
    async with fixture.open(hooks=[*fixture.hooks, Starter()]) as session:
        session.start_soon(fixture.probe.watch, "worker", session.coord.wait_for_stop)
        await fixture.run(session)
