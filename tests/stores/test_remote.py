"""Stores behind a connection: outages, lost answers, lost data, combined writes."""

from __future__ import annotations

import asyncio
import logging
import random

import pytest

import aiohooks as ah
from aiohooks.errors import StoreUnavailableError
from aiohooks.stores._protocol import (
    MAX_STEP,
    Answer,
    Expire,
    Request,
    Snapshot,
)
from aiohooks.testing import ManualClock, check_step_store, step_store_checks
from tests.support.fake_engine import FakeConnection, FakeEngine, FakeStepStore
from tests.support.losses import LOSSES, check_loss
from tests.support.waiting import advance_clock, parked, ticks

# --- the conformance suite


@pytest.mark.parametrize("check", step_store_checks())
async def test_conformance(check: str) -> None:
    """A store behind a connection passes every check, and leaves nothing in its engine."""
    engine = FakeEngine()
    await check_step_store(lambda run: FakeStepStore(engine, run=run), check)
    assert not engine.watchers


@pytest.mark.parametrize("check", LOSSES)
@pytest.mark.parametrize("connected", [True, False])
async def test_conformance_without_its_data(check: str, connected: bool) -> None:
    """The same where the engine loses its data, while the connections stay or with them."""
    engine = FakeEngine()

    async def lose_data() -> None:
        engine.lose_data()
        if not connected:
            engine.cut()

    await check_loss(lambda run: FakeStepStore(engine, run=run, lease_secs=2.0), check, lose_data)


# --- outages


async def test_a_connection_is_made_again_after_any_error(
    clock: ManualClock, engine: FakeEngine
) -> None:
    """An error that no engine should raise ends no wait, and no later write hangs."""

    class Odd(FakeConnection):
        odd = False

        async def connect(self) -> Snapshot:
            if self.odd:
                self.odd = False
                raise OSError("odd")
            return await super().connect()

    connection = Odd(engine)
    async with FakeStepStore(connection) as store:
        wait = await parked(store.wait_for(1))
        connection.odd = True
        engine.cut()
        await advance_clock(clock, 1, 40)
        assert await store.advance() == 1
        assert await wait == 1


async def test_first_connection_gives_up_in_time(clock: ManualClock, engine: FakeEngine) -> None:
    """The first call fails after `connect_timeout`, and the next one tries again."""
    engine.stop()
    store = FakeStepStore(engine, connect_timeout=7)
    calls = [asyncio.ensure_future(store.advance()), asyncio.ensure_future(store.wait_for(3))]
    for _ in range(10):
        await ticks(40)
        clock.advance(1)
    for call in calls:
        with pytest.raises(ah.errors.StoreUnavailableError, match="unavailable"):
            await call
    engine.restart()
    assert await store.advance() == 1  # the next call tries again
    await store.aclose()


# --- combining


async def test_each_caller_gets_an_error_of_its_own(engine: FakeEngine) -> None:
    """When a combined request is refused, each caller gets an error of its own."""
    async with FakeStepStore(engine) as a:
        await a.raise_to(MAX_STEP - 1)
        results = await asyncio.gather(a.advance(), a.advance(), return_exceptions=True)
        assert [type(result) for result in results] == [ah.errors.InvalidArgumentError] * 2
        assert results[0] is not results[1]
        # Engines count with numbers of 64 bits, so they cannot get this one.
        with pytest.raises(ah.errors.InvalidArgumentError, match=f"advance by {2**63}: give"):
            await a.advance(2**63)
        assert await a.advance() == MAX_STEP


# --- no polling


async def test_an_idle_store_sends_nothing(
    clock: ManualClock, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """A process without publishers sends the engine no request, waiting or not."""
    caplog.set_level(logging.INFO)
    async with FakeStepStore(engine) as b:
        wait = await parked(b.wait_for(5), 40)
        engine.requests.clear()
        for _ in range(60):
            await advance_clock(clock, 60, 40)
        assert engine.requests == []
        async with FakeStepStore(engine) as a:
            await a.advance(5)
        assert await wait == 5
        assert len(engine.requests) == 1


class ReadOnlyEngine(FakeEngine):
    """It can refuse all requests, and still be read."""

    read_only = False
    refused = 0
    """How many removals of members it has refused."""

    def apply(self, name: str, request: Request, run_id: str | None = None) -> Answer:
        if self.read_only:
            self.refused += isinstance(request, Expire)
            raise StoreUnavailableError("the fake engine accepts no requests")
        return super().apply(name, request, run_id)


@pytest.mark.parametrize("seed", range(4))
async def test_a_lease_does_not_run_out_because_of_requests_from_before_an_outage(
    clock: ManualClock, seed: int
) -> None:
    """What a standby could not remove while the engine refused all requests is not removed after
    it: it may be alive.
    """
    random.seed(seed)  # the pauses between two attempts
    engine = ReadOnlyEngine()
    async with (
        FakeStepStore(engine, lease_secs=4.0) as chief,
        FakeStepStore(engine, lease_secs=4.0) as standby,
    ):
        async with chief.lead() as term:
            await chief.flush()
            taking = asyncio.ensure_future(standby.lead().__aenter__())
            while not standby._waits.vacancies:
                await ticks()
            engine.read_only = True
            while not engine.refused:
                await ticks(20)
                clock.advance(0.5)
            engine.read_only = False
            for _ in range(40):
                await ticks(20)
                clock.advance(0.5)
            assert not taking.done()
            assert await chief.advance() == 1
            assert engine.run("default").term == term.number
        await taking


# -- how often a store tries to reconnect


async def test_reconnected_stores_have_no_storm() -> None:
    """After an outage each store connects once."""
    with ManualClock() as clock:
        engine = FakeEngine()
        stores = [FakeStepStore(engine) for _ in range(20)]
        for store in stores:
            await store.value()
        engine.stop()
        for _ in range(40):
            await ticks(10)
            clock.advance(2)
        engine.restart()
        before = engine.connections
        for _ in range(10):
            await ticks(10)
            clock.advance(2)
        assert engine.connections - before == len(stores)
        for store in stores:
            await store.aclose()


async def test_a_connection_that_fails_immediately_is_retried_less_often(
    clock: ManualClock,
) -> None:
    """A hundred seconds of connections that are cut immediately are some tens of attempts, not
    thousands.
    """
    engine = FakeEngine()
    async with FakeStepStore(engine):
        before = engine.connections
        for _ in range(1000):
            engine.cut()
            await ticks(10)
            clock.advance(0.1)
        assert 40 <= engine.connections - before <= 120


async def test_a_connection_that_has_lasted_is_made_again_immediately(clock: ManualClock) -> None:
    """A connection that is cut after six seconds is there again within the shortest pause, however
    often.
    """
    engine = FakeEngine()
    async with FakeStepStore(engine) as store, FakeStepStore(engine) as other:
        for _ in range(100):
            await advance_clock(clock, 6, 10)
            engine.cut()
            await ticks(10)
            await advance_clock(clock, 0.05, 10)
            assert (store._connection.lost_at, other._connection.lost_at) == (None, None)
    assert engine.connections == 2 * 101
