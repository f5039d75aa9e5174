"""Scenarios with a version gate, with producers before it and a trainer behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohooks as ah
from tests.fuzz.explored.fixture import Fixture, scenario
from tests.fuzz.explored.stores import StoreFixture, store_scenario

_END = (
    ah.errors.PublisherFailedError,
    ah.errors.PublisherFinishedError,
    ah.errors.StoreClosedError,
)
"""The errors of a producer when no more versions will come."""


@contextlib.asynccontextmanager
async def gate_of(
    fixture: Fixture, versions: ah.StepStore, *, tickets: Any = (), **options: Any
) -> AsyncIterator[ah.version_gate.VersionGate]:
    """A gate, and what must hold of it at the end; what is in the queue `tickets` then is given
    up.
    """
    gate = ah.version_gate.VersionGate(versions, **options)
    try:
        yield gate
    finally:
        while tickets and not tickets.empty():
            ticket = tickets.get_nowait()
            if ticket is not None:
                ticket.drop()
        seen = gate.statistics()
        if seen.open or seen.waiting or gate._ledger.entering:
            fixture.add_violation(
                f"leak: the gate still has {seen}, {gate._ledger.entering} entering"
            )
        if seen.admitted != seen.used + seen.shipped + seen.dropped:
            fixture.add_violation(f"the gate has lost count: {seen}")
        if seen.lag_max > gate.max_lag:
            fixture.add_violation(f"the gate admitted the use of a stale item: {seen}")
        places = (gate.max_lag + 1) * gate.per_version
        if seen.room + gate._ledger.reserved != places:
            fixture.add_violation(f"the gate has {places} places, and {seen.room} are free: {seen}")
        if (parked := versions.statistics()).waiting:
            fixture.add_violation(f"leak: the versions still have {parked}")


async def produce(
    fixture: Fixture,
    gate: ah.version_gate.VersionGate,
    queue: asyncio.Queue[ah.version_gate.Ticket | None],
    **options: Any,
) -> None:
    """Make two items and hand them on; in any case notify the trainer of the end."""
    try:
        for _ in range(2):
            async with gate.admit(**options) as ticket:
                await fixture.pause("produce", 1)
                queue.put_nowait(ticket.hand_off())
    except _END:
        pass
    finally:
        queue.put_nowait(None)


async def consume(
    fixture: Fixture,
    versions: ah.StepStore,
    queue: asyncio.Queue[ah.version_gate.Ticket | None],
    producers: int,
) -> None:
    """Make a version of each item."""
    with versions.publisher("trainer"):
        while producers:
            ticket = await queue.get()
            if ticket is None:
                producers -= 1
            elif ticket.use():
                await fixture.pause("consume", 1)
                await versions.advance()


@scenario("producers and a trainer at a gate", hooks=0, parallel=True)
async def producers(fixture: Fixture) -> None:
    versions, queue = ah.MemoryStepStore(), asyncio.Queue[Any]()
    async with gate_of(fixture, versions, tickets=queue, max_lag=fixture.seed % 2) as gate:
        await fixture.run_together(
            trainer=lambda: consume(fixture, versions, queue, 3),
            one=lambda: produce(fixture, gate, queue),
            two=lambda: produce(fixture, gate, queue),
            three=lambda: produce(fixture, gate, queue),
        )


@scenario("no room in time", hooks=0, parallel=True)
async def late(fixture: Fixture) -> None:
    versions = ah.MemoryStepStore()

    async def wait(secs: float) -> None:
        with contextlib.suppress(ah.errors.StepTimeoutError):
            async with gate.admit(timeout=secs):
                await fixture.pause("late", 1)

    async def end() -> None:
        await asyncio.sleep(9)
        versions.publisher("trainer").close()  # this ends the wait without a timeout

    async def without_timeout() -> None:
        with contextlib.suppress(*_END):
            async with gate.admit():
                pass

    async with gate_of(fixture, versions, max_lag=0) as gate, gate.admit():
        await fixture.run_together(
            helper_end=end, one=lambda: wait(2), two=lambda: wait(3), three=without_timeout
        )


@scenario("a gate whose store is closed", hooks=0, parallel=True)
async def closed(fixture: Fixture) -> None:
    versions = ah.MemoryStepStore()

    async def enter() -> None:
        with contextlib.suppress(*_END):
            async with gate.admit():
                await fixture.pause("enter", 2)

    async def close() -> None:
        await fixture.pause("close", 3)
        await versions.aclose()

    async with gate_of(fixture, versions, max_lag=0) as gate:
        await fixture.run_together(one=enter, two=enter, three=enter, helper_closer=close)


@scenario("a gate whose versions are reset", hooks=0, parallel=True)
async def reset(fixture: Fixture) -> None:
    versions, queue = ah.MemoryStepStore(5), asyncio.Queue[Any]()

    async def reset_versions() -> None:
        await fixture.pause("reset", 3)
        await versions.reset(2)

    async with gate_of(fixture, versions, tickets=queue, max_lag=1) as gate:
        await fixture.run_together(
            trainer=lambda: consume(fixture, versions, queue, 2),
            one=lambda: produce(fixture, gate, queue),
            two=lambda: produce(fixture, gate, queue),
            helper_reset=reset_versions,
        )


@scenario("a stop of the session at a gate", hooks=1)
async def until_stop(fixture: Fixture) -> None:
    versions = ah.MemoryStepStore()

    async def enter(call: int) -> None:
        async with gate.admit(until=session.until):
            await fixture.pause("enter", 1)
        if call == 1:
            session.start_soon(stop)  # there never will be room for another one

    async def stop() -> None:
        await fixture.pause("stop", 9)
        session.request_stop("enough")

    fixture.actions["h0.before_run"] = enter
    async with gate_of(fixture, versions, max_lag=0) as gate, fixture.open() as session:
        while True:
            await fixture.run(session)


@store_scenario("a gate between processes", parallel=True)
async def between_processes(fixture: StoreFixture) -> None:
    """The trainer is in another process than the producers."""

    async def ship(count: int) -> None:
        with contextlib.suppress(*_END):
            for _ in range(count):
                async with gate.admit():
                    await fixture.pause("ship", 1)

    async def publish() -> None:
        with trainer.store.publisher("trainer"):
            for _ in range(2):
                await fixture.advance(trainer.store)

    async with (
        fixture.process("trainer") as trainer,
        fixture.process("producers") as producing,
        gate_of(fixture, producing.store, max_lag=0) as gate,
    ):
        await fixture.run_together(trainer=publish, one=lambda: ship(2), two=lambda: ship(1))
