"""Plays of the cancel sweep: waiting for steps and others, background work, several tasks at once, time."""

from __future__ import annotations

import asyncio

import anyio

import aiohooks as ah
from tests.fuzz.playbook import Broken, advance_slowly, fails, finish, let_time_pass, scenario
from tests.fuzz.stage import Stage, graph_of_a_step, soon

# -- waiting for steps and for others


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


@scenario("watching every step", hooks=0)
async def changes(stage: Stage) -> None:
    async def watcher() -> None:
        async for position in stage.store.changes():
            if position.step == 3:
                break

    await stage.together(watcher=watcher, helper=lambda: advance_slowly(stage, 3))


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
        except ah.errors.SessionClosedError:
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


@scenario("a hook takes too long", hooks=2, manual=True, expect=ah.errors.HookTimeoutError)
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
