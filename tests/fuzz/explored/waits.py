"""Scenarios of waits for steps and tasks, background work, several tasks, time limits."""

from __future__ import annotations

import asyncio

import anyio

import aiohooks as ah
from tests.fuzz.explored.fixture import (
    Broken,
    Fixture,
    advance_slowly,
    await_to_the_end,
    fails,
    graph_of_a_step,
    scenario,
    soon,
)
from tests.support.waiting import forever

# -- waiting for steps and for others


@scenario("a hook waits for a step", hooks=1)
async def step_waiter(fixture: Fixture) -> None:
    hooks = [ah.hooks.GlobalStepWaiterHook(3), *fixture.hooks]

    async def waiter() -> None:
        async with fixture.open(hooks=hooks) as session:
            await fixture.run(session)

    await fixture.run_together(waiter=waiter, helper=lambda: advance_slowly(fixture, 4))


@scenario("a hook waits in a task of its own", hooks=2)
async def wait_in_hook(fixture: Fixture) -> None:
    async def wait(call: int) -> None:
        await fixture.store.wait_for(2)

    fixture.actions["h1.before_run"] = wait
    async with fixture.open() as session:
        session.start_soon(fixture.probe.watch, "~advance", advance_slowly, fixture, 3)
        await fixture.run(session)


@scenario("a stop ends a wait for a step", hooks=1, vanishing=True)
async def stop_ends_wait(fixture: Fixture) -> None:
    async def stop(call: int) -> None:
        session.request_stop("enough")

    fixture.actions["h0.before_run"] = stop
    session = fixture.session(hooks=[ah.hooks.GlobalStepWaiterHook(10), *fixture.hooks])
    async with session:
        await fixture.run(session)


@scenario("a wait for a step is too long", hooks=1, expect=ah.errors.StepTimeoutError)
async def step_timeout(fixture: Fixture) -> None:
    fixture.actions["h0.before_run"] = lambda _: soon()
    async with fixture.open(
        hooks=[ah.hooks.GlobalStepWaiterHook(10, timeout=5), *fixture.hooks]
    ) as session:
        await fixture.run(session)


@scenario("until an event comes", hooks=1)
async def until(fixture: Fixture) -> None:
    event = asyncio.Event()

    async def producer() -> None:
        await fixture.pause("producer", 2)
        event.set()

    async with fixture.open() as session:
        session.start_soon(fixture.probe.watch, "~producer", producer)
        await session.until(event.wait())
        future = asyncio.get_running_loop().create_future()
        session.start_soon(fixture.probe.watch, "~producer", _resolve, future)
        assert await session.until(future) == 1
        await fixture.run(session)


async def _resolve(future: asyncio.Future[int]) -> None:
    await soon()
    if not future.done():
        future.set_result(1)


@scenario("until, and a stop comes", hooks=1)
async def until_stop(fixture: Fixture) -> None:
    async with fixture.open() as session:

        async def stopper() -> None:
            await fixture.pause("stopper", 2)
            session.request_stop("enough")

        session.start_soon(fixture.probe.watch, "~stopper", stopper)
        await session.until(forever())


@scenario("a stop inside until and inside a hook, without a pause", hooks=2)
async def immediate_stop(fixture: Fixture) -> None:
    async with fixture.open() as session:

        async def quick() -> int:
            session.request_stop("enough")
            return 1

        async def stop(call: int) -> None:
            if call == 2:
                await session.until(quick())

        fixture.actions["h0.after_run"] = stop
        await fixture.run(session)
        await fixture.run(session)
        await fixture.run(session)


@scenario("until, and the producer fails", hooks=1, expect=Broken)
async def until_failure(fixture: Fixture) -> None:
    fixture.actions["~background"] = fails(Broken)
    async with fixture.open() as session:
        session.start_soon(fixture.perform, "~background")
        await session.until(forever())


# -- background work


@scenario("background work ends by itself", hooks=1)
async def background(fixture: Fixture) -> None:
    async with fixture.open() as session:
        for number in range(2):
            session.start_soon(fixture.perform, f"background {number}")
        await fixture.run(session)


@scenario("background work fails during a run", hooks=2, expect=Broken)
async def background_fails(fixture: Fixture) -> None:
    fixture.actions["~background"] = fails(Broken)
    fixture.actions["h1.before_run"] = forever
    async with fixture.open() as session:
        session.start_soon(fixture.perform, "~background")
        await fixture.run(session)


@scenario("background work outlives the grace period", hooks=1)
async def grace(fixture: Fixture) -> None:
    async def stubborn(call: int) -> None:
        try:
            await forever()
        finally:
            await soon()

    fixture.actions["background"] = stubborn
    async with fixture.open(stop_grace_period_secs=50) as session:
        session.start_soon(fixture.perform, "background")
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


# -- several tasks


@scenario("two tasks take turns", hooks=2, parallel=True)
async def turns(fixture: Fixture) -> None:
    async with fixture.open() as session:

        async def runner() -> None:
            for _ in range(2):
                await fixture.run(session)

        await fixture.run_together(one=runner, two=runner, three=runner)


@scenario("the block is left during a run", hooks=1, parallel=True)
async def left_during_run(fixture: Fixture) -> None:
    session = fixture.session()
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
            await fixture.run(session)
        except ah.errors.SessionClosedError:
            pass
        finally:
            running.set()

    await fixture.run_together(owner=owner, runner=runner)


@scenario("chief and worker share variables and step", hooks=1, parallel=True)
async def chief_and_worker(fixture: Fixture) -> None:
    graph = graph_of_a_step()

    async def chief() -> None:
        await fixture.pause("chief", 2)
        async with fixture.open(name="chief") as session:
            for _ in range(3):
                await fixture.run(session)

    async def worker() -> None:
        creator = ah.WorkerSessionCreator(
            graph, global_step=fixture.store, variables=fixture.variables
        )
        session = ah.AsyncMonitoredSession(
            creator, hooks=[ah.hooks.GlobalStepWaiterHook(2)], name="worker"
        )
        async with session:
            await session.run("train")

    await fixture.run_together(helper_chief=chief, worker=worker)


# -- time limits, and other kinds of cancellation


@scenario("a hook takes too long", hooks=2, expect=ah.errors.HookTimeoutError)
async def hook_timeout(fixture: Fixture) -> None:
    slow = fixture.seed & 1  # the one in the caller's task, or the one in a task of its own
    fixture.actions[f"h{slow}.before_run"] = forever
    fixture.actions[f"h{1 - slow}.before_run"] = lambda _: soon()
    hooks = [*fixture.hooks]
    hooks[slow] = ah.configure(fixture.hooks[slow], timeout=2)
    async with fixture.open(hooks=hooks) as session:
        await fixture.run(session)


@scenario("hooks with timeouts and scopes of their own", hooks=3)
async def own_timeouts(fixture: Fixture) -> None:
    async def expires(call: int) -> None:
        try:
            async with asyncio.timeout(0):
                await forever()
        except TimeoutError:
            pass

    async def moves_on(call: int) -> None:
        with anyio.move_on_after(0):
            await anyio.sleep_forever()

    for number in range(3):
        fixture.actions[f"h{number}.before_run"] = (
            expires if (number + fixture.seed) % 2 else moves_on
        )
        fixture.actions[f"h{number}.after_run"] = (
            moves_on if (number + fixture.seed) % 2 else expires
        )
    async with fixture.open() as session:
        await fixture.run(session)
