"""The connection of a store: calls, closing and leases while an engine fails in odd ways."""

from __future__ import annotations

import asyncio

import pytest

import aiohooks as ah
from aiohooks.errors import StoreClosedError, StoreRefusedError, StoreUnavailableError
from aiohooks.stores._protocol import Answer, Join, Member, Position, Request, Snapshot, Write
from aiohooks.testing import ManualClock
from tests.support.fake_engine import FakeConnection, FakeEngine, FakeStepStore
from tests.support.waiting import advance_clock, cancel_and_wait, parked, ticks

pytestmark = pytest.mark.every_python


class Deleted(FakeConnection):
    """Its reads fail without a pause as soon as the run is being deleted."""

    deleting = False
    finish: asyncio.Event

    async def read(self) -> Snapshot:
        if self.deleting:
            raise StoreUnavailableError("there is no such run")
        return await super().read()

    async def delete(self) -> None:
        self.deleting = True
        await self.finish.wait()
        await super().delete()


async def test_calls_end_when_the_run_is_forgotten() -> None:
    """They do not hold up the event loop, and do not wait for the end of the deletion."""
    connection = Deleted(FakeEngine())
    connection.finish = asyncio.Event()
    store = FakeStepStore(connection)
    await store.advance()
    forgetting = await parked(store.forget(), 40)
    assert connection.deleting
    with pytest.raises(StoreClosedError, match="was closed"):
        await store.value()
    connection.finish.set()
    await forgetting


async def test_a_call_does_not_bring_a_damaged_run_back() -> None:
    """A call while it is being deleted would make a new run."""
    engine = FakeEngine()
    engine.damaged.add("default")
    connection = Deleted(engine)
    connection.finish = asyncio.Event()
    store = FakeStepStore(connection)
    forgetting = await parked(store.forget(), 40)
    with pytest.raises(StoreClosedError):
        await store.value()
    connection.finish.set()
    await forgetting
    assert not engine.runs


async def test_a_cancelled_deletion_closes_the_store() -> None:
    """Its waits end, as it would not notice any more steps."""
    connection = Deleted(FakeEngine())
    connection.finish = asyncio.Event()
    store = FakeStepStore(connection)
    await store.advance()
    wait = await parked(store.wait_for(3))
    forgetting = await parked(store.forget(), 40)
    assert await cancel_and_wait(forgetting)
    with pytest.raises(StoreClosedError):
        await wait


class OddOnce(FakeConnection):
    """Fails once in an odd way, at what `odd` names."""

    odd = ""

    def fail_once(self, name: str, error: Exception) -> None:
        if self.odd == name:
            self.odd = ""
            raise error

    async def request(self, request: Request) -> Answer:
        if isinstance(request, Join):
            self.fail_once("renewal", OSError("odd"))
        return await super().request(request)

    async def read(self) -> Snapshot:
        self.fail_once("read", StoreRefusedError("refused once"))
        return await super().read()

    async def disconnect(self) -> None:
        await super().disconnect()
        self.fail_once("disconnect", OSError("odd"))


async def test_leases_are_renewed_after_an_odd_error(
    clock: ManualClock, engine: FakeEngine
) -> None:
    """The renewal is tried again, so that no other process finds the publisher dead."""
    connection = OddOnce(engine)
    async with FakeStepStore(connection) as store, FakeStepStore(engine) as other:
        with store.publisher("trainer"):
            await store.flush()
            wait = await parked(other.wait_for(5), 20)
            connection.odd = "renewal"
            for _ in range(60):
                await advance_clock(clock, 0.5, 40)
            assert not connection.odd
            assert not wait.done()
        assert await cancel_and_wait(wait)


async def test_a_refused_read_is_not_the_last_one(clock: ManualClock, engine: FakeEngine) -> None:
    """The leases of the others are still watched: a wait for a dead publisher ends."""
    connection = OddOnce(engine)
    async with FakeStepStore(connection) as store:
        await store.value()
        engine.apply("default", Join(Member("elsewhere/1", "dead", 10.0)))
        wait = await parked(store.wait_for(5), 40)
        connection.odd = "read"
        for _ in range(60):
            await advance_clock(clock, 0.5, 40)
        assert not connection.odd
        with pytest.raises(ah.errors.PublisherFailedError, match="dead failed at step 0"):
            await wait


async def test_a_connection_is_made_again_when_disconnecting_fails(
    clock: ManualClock, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """The error is logged; waits are notified as before."""
    connection = OddOnce(engine)
    async with FakeStepStore(connection) as store:
        wait = await parked(store.wait_for(5), 40)
        connection.odd = "disconnect"
        engine.cut()
        await ticks(40)
        await advance_clock(clock, 1, 40)
        engine.apply("default", Write("advance", 9, Position(1, 0), 0, "elsewhere", 1))
        assert await wait == 9
    assert "run default: disconnecting has failed" in caplog.text
