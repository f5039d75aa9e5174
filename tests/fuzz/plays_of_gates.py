"""Plays of the cancel sweep: a version gate, with producers in front of it and a trainer behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohooks as ah
from tests.fuzz.playbook import let_time_pass, scenario
from tests.fuzz.plays_of_stores import on_stores
from tests.fuzz.stage import Stage, soon
from tests.fuzz.stage_of_stores import StoreStage

_END = (ah.PublisherFailedError, ah.errors.PublisherFinishedError, ah.errors.StoreClosedError)
"""How a producer hears that no version comes any more."""


@contextlib.asynccontextmanager
async def gate_of(stage: Stage, versions: ah.StepStore, *, tickets: Any = (), **options: Any) -> AsyncIterator[ah.VersionGate]:
    """A gate, and what must hold of it at the end; what is in the queue `tickets` then is given up."""
    gate = ah.VersionGate(versions, **options)
    try:
        yield gate
    finally:
        while tickets and not tickets.empty():
            ticket = tickets.get_nowait()
            if ticket is not None:
                ticket.drop()
        seen = gate.statistics()
        if seen.open or seen.waiting or gate._book.entering:
            stage.problem(f"I9: the gate still has {seen}, {gate._book.entering} coming")
        if seen.admitted != seen.used + seen.shipped + seen.dropped:
            stage.problem(f"the gate has lost count: {seen}")
        if seen.lag_max > gate.max_lag:
            stage.problem(f"the gate let something be used that was too old: {seen}")
        places = (gate.max_lag + 1) * gate.per_version
        if seen.room + gate._book._gone != places:
            stage.problem(f"the gate has {places} places, and {seen.room} are free: {seen}")
        if (parked := versions.statistics()).waiting:
            stage.problem(f"I9: the versions still have {parked}")


async def produce(
    stage: Stage, gate: ah.VersionGate, queue: asyncio.Queue[ah.version_gate.Ticket | None], **options: Any
) -> None:
    """Makes two items, and hands them on; whatever happens, the trainer hears that this is all."""
    try:
        for _ in range(2):
            async with gate.admit(**options) as ticket:
                await stage.pause("produce", 1)
                queue.put_nowait(ticket.hand_on())
    except _END:
        pass
    finally:
        queue.put_nowait(None)


async def consume(
    stage: Stage, versions: ah.StepStore, queue: asyncio.Queue[ah.version_gate.Ticket | None], producers: int
) -> None:
    """Makes a version of each item."""
    with versions.publisher("trainer"):
        while producers:
            ticket = await queue.get()
            if ticket is None:
                producers -= 1
            elif ticket.use():
                await stage.pause("consume", 1)
                await versions.advance()


@scenario("producers and a trainer at a gate", hooks=0, parallel=True)
async def producers(stage: Stage) -> None:
    versions, queue = ah.MemoryStepStore(), asyncio.Queue[Any]()
    async with gate_of(stage, versions, tickets=queue, max_lag=stage.seed % 2) as gate:
        await stage.together(
            trainer=lambda: consume(stage, versions, queue, 3),
            one=lambda: produce(stage, gate, queue),
            two=lambda: produce(stage, gate, queue),
            three=lambda: produce(stage, gate, queue),
        )


@scenario("shipped through a gate", hooks=0, parallel=True)
async def shipped(stage: Stage) -> None:
    """Whoever is cancelled takes up no version: those who are left are let in by those that come."""
    versions = ah.MemoryStepStore()

    async def ship(count: int) -> None:
        for _ in range(count):
            async with gate.admit():
                await stage.pause("ship", 1)

    async def publish() -> None:
        for _ in range(4):
            await soon()
            await versions.advance()

    async with gate_of(stage, versions, max_lag=0, per_version=2) as gate:
        await stage.together(one=lambda: ship(2), two=lambda: ship(2), three=lambda: ship(1), helper_trainer=publish)


@scenario("no room in time", hooks=0, parallel=True, manual=True)
async def late(stage: Stage) -> None:
    versions = ah.MemoryStepStore()

    async def wait(secs: float) -> None:
        with contextlib.suppress(ah.StepTimeoutError):
            async with gate.admit(timeout=secs):
                await stage.pause("late", 1)

    async def keep() -> None:
        async with gate.admit():
            await stage.pause("keep", 4)
            versions.publisher("nobody").close()  # the one who waits for ever is told

    async def for_ever() -> None:
        with contextlib.suppress(*_END):
            async with gate.admit():
                pass

    async with gate_of(stage, versions, max_lag=0) as gate:
        let_time_pass(stage, 50, 1)
        await stage.together(helper_keep=keep, one=lambda: wait(2), two=lambda: wait(3), three=for_ever)
    if stage.clock.pending:
        stage.problem(f"I9: {stage.clock.pending} timers are left")


@scenario("a gate whose store is closed", hooks=0, parallel=True)
async def closed(stage: Stage) -> None:
    versions = ah.MemoryStepStore()

    async def enter() -> None:
        with contextlib.suppress(*_END):
            async with gate.admit():
                await stage.pause("enter", 2)

    async def close() -> None:
        await stage.pause("close", 3)
        await versions.aclose()

    async with gate_of(stage, versions, max_lag=0) as gate:
        await stage.together(one=enter, two=enter, three=enter, helper_closer=close)


@scenario("a gate whose versions begin anew", hooks=0, parallel=True)
async def reset(stage: Stage) -> None:
    versions, queue = ah.MemoryStepStore(5), asyncio.Queue[Any]()

    async def begin_anew() -> None:
        await stage.pause("reset", 3)
        await versions.reset(2)

    async with gate_of(stage, versions, tickets=queue, max_lag=1) as gate:
        await stage.together(
            trainer=lambda: consume(stage, versions, queue, 2),
            one=lambda: produce(stage, gate, queue),
            two=lambda: produce(stage, gate, queue),
            helper_reset=begin_anew,
        )


@scenario("a stop of the session at a gate", hooks=1)
async def until_stop(stage: Stage) -> None:
    versions = ah.MemoryStepStore()

    async def enter(call: int) -> None:
        async with gate.admit(until=session.until):
            await stage.pause("enter", 1)
        if call == 1:
            session.start_soon(stop)  # there is no room for another one, and never will be

    async def stop() -> None:
        await stage.pause("stop", 9)
        session.request_stop("enough")

    stage.acts["h0.before_run"] = enter
    async with gate_of(stage, versions, max_lag=0) as gate, stage.open() as session:
        while True:
            await stage.run(session)


@scenario("a hook keeps near the versions", hooks=1, parallel=True)
async def gate_hook(stage: Stage) -> None:
    versions = ah.MemoryStepStore()

    async def publish() -> None:
        with versions.publisher("trainer"):
            for _ in range(3):
                await stage.pause("publish", 1)
                await versions.advance()

    async def train() -> None:
        async with stage.open(hooks=[ah.VersionGateHook(versions, max_lag=0), *stage.hooks]) as session:
            for _ in range(3):
                await stage.run(session)

    await stage.together(session=train, helper_trainer=publish)
    if versions.statistics().waiting:
        stage.problem("I9: the versions are still waited for")


@on_stores("a gate between processes", parallel=True)
async def between_processes(stage: StoreStage) -> None:
    """The trainer is in another process than the producers."""

    async def ship(count: int) -> None:
        with contextlib.suppress(*_END):
            for _ in range(count):
                async with gate.admit():
                    await stage.pause("ship", 1)

    async def publish() -> None:
        with trainer.store.publisher("trainer"):
            for _ in range(2):
                await stage.advance(trainer.store)

    async with (
        stage.process("trainer") as trainer,
        stage.process("producers") as producing,
        gate_of(stage, producing.store, max_lag=0) as gate,
    ):
        await stage.together(trainer=publish, one=lambda: ship(2), two=lambda: ship(1))
