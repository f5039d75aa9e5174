"""Scenarios of sessions that the random programs do not have: feeds, a creator that suspends, waits
for steps; and an error in each phase.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import aiohooks as ah
from tests.fuzz.explored.fixture import (
    Broken,
    Fixture,
    ScriptedHook,
    Worse,
    advance_slowly,
    await_to_the_end,
    fails,
    scenario,
    soon,
    two_steps,
    two_steps_with,
)

for _count in range(6):
    scenario(f"two steps, {_count} hooks", hooks=_count)(two_steps)
scenario("two steps, sessions from a creator", hooks=2, creator=True)(two_steps)


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


# -- errors in each phase


for _phase in ("begin", "after_create_session", "before_run", "after_run", "end", "close"):
    scenario(f"error in {_phase}", expect=Broken)(two_steps_with(**{f"h1_{_phase}": fails(Broken)}))
scenario("error in an operation", expect=Broken)(two_steps_with(right=fails(Broken, at=2)))


scenario("errors in close of all, and in the run", expect=Worse)(
    two_steps_with(train=fails(Worse), **{f"h{number}_close": fails(Broken) for number in range(3)})
)


# -- clean ends and stops


scenario("the input ends in an operation", hooks=2, vanishing=True)(
    two_steps_with(left=fails(ah.OutOfRangeError, at=2))
)


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
        if fixture.runs != taken or session.stop_reason != "enough":
            fixture.add_violation(
                f"drain: {fixture.runs} of {taken} elements were used, and the session ends:"
                f" {session.stop_reason}"
            )


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


@scenario("recovery with work in the background", hooks=1, creator=True)
async def recovery_background(fixture: Fixture) -> None:
    class Starter(ah.SessionRunHook):
        async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
            coord.start_soon(fixture.probe.watch, "worker", coord.wait_for_stop)

    fixture.actions["train"] = fails(ah.AbortedError)
    async with fixture.open(hooks=[*fixture.hooks, Starter()]) as session:
        session.start_soon(fixture.probe.watch, "worker", session.coord.wait_for_stop)
        await fixture.run(session)


# -- waits for steps, and who advances


@scenario("a hook waits for a step", hooks=1)
async def step_waiter(fixture: Fixture) -> None:
    hooks = [ah.hooks.GlobalStepWaiterHook(3), *fixture.hooks]

    async def waiter() -> None:
        async with fixture.open(hooks=hooks) as session:
            await fixture.run(session)

    await fixture.run_together(waiter=waiter, helper=lambda: advance_slowly(fixture, 4))


@scenario("a wait for a step is too long", hooks=1, expect=ah.errors.StepTimeoutError)
async def step_timeout(fixture: Fixture) -> None:
    fixture.actions["h0.before_run"] = lambda _: soon()
    async with fixture.open(
        hooks=[ah.hooks.GlobalStepWaiterHook(10, timeout=5), *fixture.hooks]
    ) as session:
        await fixture.run(session)


@scenario("a coordinator alone", hooks=0)
async def coordinator(fixture: Fixture) -> None:
    coord = ah.Coordinator()

    async def worker() -> None:
        while not coord.should_stop():
            await soon()

    async def stopper() -> None:
        await fixture.pause("stopper", 3)
        coord.request_stop("enough")

    coord.start_soon(fixture.probe.watch, "worker", worker)
    coord.start_soon(fixture.probe.watch, "~stopper", stopper)
    try:
        await coord.wait_for_stop()
    finally:
        coord.request_stop("leaving")
        await await_to_the_end(coord.join)


@scenario("watching every step", hooks=0)
async def changes(fixture: Fixture) -> None:
    async def watcher() -> None:
        async for position in fixture.store.changes():
            if position.step == 3:
                break

    await fixture.run_together(watcher=watcher, helper=lambda: advance_slowly(fixture, 3))
