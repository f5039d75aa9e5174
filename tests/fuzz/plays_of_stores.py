"""Plays of the cancel sweep: sessions and waits on a store over processes, with a chief, workers, outages and lost answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import aiohooks as ah
from aiohooks.stores import Position
from aiohooks.stores._protocol import Join, Lead, Leave, Member, Write
from tests.fuzz.playbook import Play, finish, scenario
from tests.fuzz.stage import soon
from tests.fuzz.stage_of_stores import RUN, Process, StoreStage


def on_stores(name: str, **options: Any) -> Callable[[Play], Play]:
    """Adds a play on a stage with an engine."""
    return scenario(name, **{"stage": StoreStage, "manual": True, "hooks": 0, **options})


async def lead_and_train(stage: StoreStage, process: Process, runs: int = 2) -> None:
    """What a chief does."""
    async with stage.open(process.session(chief=True, hooks=stage.hooks)) as session:
        for _ in range(runs):
            await stage.run(session)


# -- sessions


@on_stores("a chief on an engine", hooks=1)
async def chief_alone(stage: StoreStage) -> None:
    async with stage.process("chief") as chief:
        await lead_and_train(stage, chief)


@on_stores("the session opens its store", hooks=1)
async def opened_by_session(stage: StoreStage) -> None:
    async with stage.process("chief", opened=False) as chief:
        await lead_and_train(stage, chief, 1)


@on_stores("a chief and workers on an engine", hooks=1, parallel=True)
async def chief_and_workers(stage: StoreStage) -> None:
    async def worker(process: Process, step: int) -> None:
        hooks = [ah.GlobalStepWaiterHook(step)]
        async with process.session(chief=False, hooks=hooks) as session:
            await session.run("train")

    async with stage.process("chief") as chief, stage.process("one") as one, stage.process("two") as two:
        await stage.together(
            helper_chief=lambda: lead_and_train(stage, chief, 3),
            one=lambda: worker(one, 1),
            two=lambda: worker(two, 2),
        )


@on_stores("a worker whose chief may be gone", parallel=True)
async def worker_without_chief(stage: StoreStage) -> None:
    """However the chief ends, the worker is told: there is no step 9."""

    async def worker() -> None:
        with contextlib.suppress(ah.PublisherFailedError, ah.errors.PublisherFinishedError):
            async with process.session(chief=False, hooks=[ah.GlobalStepWaiterHook(9)]) as session:
                await session.run("train")

    async with stage.process("chief") as chief, stage.process("worker") as process:
        await stage.together(chief=lambda: lead_and_train(stage, chief, 1), worker=worker)


@on_stores("two chiefs, one after the other", hooks=1, parallel=True)
async def two_chiefs(stage: StoreStage) -> None:
    """Time stands still: no lease runs out, and the second one can begin only because the first one gave the lead back."""

    async def second() -> None:
        async with two.session(chief=True) as session:
            await stage.run(session)

    async with stage.process("one") as one, stage.process("two") as two:
        await stage.together(one=lambda: lead_and_train(stage, one), two=second)


@on_stores("a chief recovers on an engine", hooks=1, vanishing=True)
async def chief_recovers(stage: StoreStage) -> None:
    async def lost(call: int) -> None:
        if call == 1:
            raise ah.AbortedError

    stage.acts["train"] = lost
    async with stage.process("chief") as chief:
        await lead_and_train(stage, chief)


# -- trouble with the engine


@on_stores("the engine is away during a run", hooks=1)
async def away_in_run(stage: StoreStage) -> None:
    async def away(call: int) -> None:
        if call == 1:
            stage.outage(12)

    stage.acts["train"] = away
    async with stage.process("chief", lease_secs=1000) as chief:
        await lead_and_train(stage, chief)


@on_stores("the engine loses its data during a run", hooks=1, parallel=True)
async def data_lost(stage: StoreStage) -> None:
    async def lost(call: int) -> None:
        if call == 2:
            stage.outage(12, data_lost=True)

    stage.acts["train"] = lost

    async def waiter() -> None:
        await other.store.wait_for(3)

    async with stage.process("chief", lease_secs=1000) as chief, stage.process("other", lease_secs=1000) as other:
        await stage.together(helper_chief=lambda: lead_and_train(stage, chief, 3), waiter=waiter)


@on_stores("answers are lost", parallel=True)
async def answers_lost(stage: StoreStage) -> None:
    async def writer() -> None:
        for _ in range(2):
            stage.engine.answers_to_lose = 1
            await stage.advance(process.store)

    async with stage.process("writer") as process:
        stage.pass_time()
        await stage.together(one=writer, two=writer)


@on_stores("the engine is away at the opening", expect=ah.errors.StoreUnavailableError)
async def away_at_opening(stage: StoreStage) -> None:
    stage.engine.go()
    stage.pass_time()
    async with stage.process("early", connect_timeout=1.0) as process:
        await stage.advance(process.store)


@on_stores("the store is closed while it is used", parallel=True)
async def closed_in_use(stage: StoreStage) -> None:
    """With the engine away: whatever goes on there ends with the store, and needs no time for it."""

    async def user(fn: Callable[[], Any]) -> None:
        with contextlib.suppress(ah.errors.StoreClosedError, ah.errors.StoreUnavailableError):
            await fn()

    async def closer() -> None:
        try:
            await stage.pause("closer", 3)
        finally:
            await finish(process.store.aclose)
            stage.stands_still = True

    async def chief() -> None:
        async with process.store.lead():
            await asyncio.Event().wait()

    async with stage.process("closing") as process:
        stage.engine.go()
        stage.pass_time(0.05)
        store = process.store
        await stage.together(
            value=lambda: user(store.value),
            advance=lambda: user(lambda: stage.advance(store)),
            waiter=lambda: user(lambda: store.wait_for(5)),
            worker=lambda: user(store.wait_initialised),
            chief=lambda: user(chief),
            helper_closer=closer,
        )


# -- waits and writes without a session


@on_stores("advances of several tasks are one request", parallel=True)
async def combined(stage: StoreStage) -> None:
    async def writer() -> None:
        for _ in range(2):
            await stage.advance(process.store)

    async with stage.process("writers") as process:
        await stage.together(one=writer, two=writer, three=writer)


@on_stores("waits of all kinds on an engine", parallel=True)
async def waits(stage: StoreStage) -> None:
    async def watcher() -> None:
        async for position in other.store.changes():
            if position.step >= 21:
                break

    async def writer() -> None:
        for _ in range(3):
            await stage.advance(one.store)
            await soon()

    async with stage.process("one") as one, stage.process("other") as other:
        await stage.together(
            waiter=lambda: other.store.wait_for(5, timeout=60),
            late=lambda: other.store.wait_for(21, on_reset="raise"),
            watcher=watcher,
            helper_writer=writer,
        )


@on_stores("nobody initialises anything", expect=ah.errors.SessionNotReadyError)
async def never_ready(stage: StoreStage) -> None:
    async with stage.process("worker") as worker:
        stage.pass_time()
        async with worker.session(chief=False, max_wait_secs=2.0) as session:
            await session.run("train")


@on_stores("a chief's own ways with its store")
async def by_hand(stage: StoreStage) -> None:
    async with stage.process("chief", opened=False) as process:
        store = process.store
        async with store.lead():
            with store.publisher("trainer"):
                await store.mark_initialised()
                await stage.advance(store)
                await store.flush(5)
                await store.value()
        await store.raise_to(1)
        await store.aclose()
        await store.aclose()


@on_stores("no wait leaves a timer", parallel=True)
async def no_timers(stage: StoreStage) -> None:
    """Also while the store stays open, and others have leases that may run out."""

    async def lead() -> None:
        async with store.lead():
            await stage.pause("leading", 1)

    async def wait() -> None:
        kinds: list[Callable[[], Any]] = [lead, lambda: store.wait_initialised(500), lambda: store.wait_for(1, timeout=500)]
        try:
            await kinds[stage.seed % 3]()
        finally:
            await finish(store.flush)
            if stage.clock.pending:
                stage.problem(f"I9: {stage.clock.pending} timers are left by a wait")

    async def other() -> None:
        await stage.pause("other", 5)
        stage.engine.apply(RUN, Join(chief._replace(term=1, ready=True)))
        await stage.pause("other", 1)
        stage.engine.apply(RUN, Leave(chief.id))
        stage.engine.apply(RUN, Write("advance", 1, Position(1, 0), 1, "other", 1))

    stage.digits = 1  # the one of `other`
    chief = Member("other/1", "another", 1000.0)
    stage.engine.clock = stage.clock
    stage.engine.apply(RUN, Lead(chief))
    async with stage.process("waits") as process:
        store = process.store
        await stage.together(wait=wait, helper_other=other)


# -- others that have died


def _dead(stage: StoreStage, request: type[Join] | type[Lead]) -> None:
    stage.engine.clock = stage.clock
    stage.engine.apply(RUN, request(Member("dead/1", "the dead one", 2.0)))


@on_stores("the last publisher has died", expect=ah.PublisherFailedError)
async def dead_publisher(stage: StoreStage) -> None:
    _dead(stage, Join)
    async with stage.process("worker") as process:
        stage.pass_time()
        await process.store.wait_for(1)


@on_stores("the chief before has died", hooks=1)
async def dead_chief(stage: StoreStage) -> None:
    _dead(stage, Lead)
    async with stage.process("chief") as process:
        stage.pass_time()
        await lead_and_train(stage, process, 1)


@on_stores("the chief before takes its time", hooks=1, parallel=True)
async def busy_lead(stage: StoreStage) -> None:
    async def other_chief() -> None:
        await stage.pause("other chief", 5)
        stage.engine.apply(RUN, Leave("other/1"))

    stage.engine.clock = stage.clock
    stage.engine.apply(RUN, Lead(Member("other/1", "another", 1000.0)))
    async with stage.process("chief") as process:
        await stage.together(chief=lambda: lead_and_train(stage, process, 1), helper=other_chief)
