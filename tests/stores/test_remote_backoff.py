"""How often a store behind a connection tries to reconnect, on a manual clock."""

from __future__ import annotations

from aiohooks.testing import ManualClock
from tests.support.fake_engine import FakeEngine, FakeStepStore
from tests.support.waiting import advance_clock, ticks


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
