"""Callers of a store over processes that are cancelled: what they had begun there ends with them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

import aiohooks as ah
from aiohooks.stores._protocol import Answer, Lead, Member, Request
from aiohooks.testing import ManualClock
from aiohooks.testing.leaks import no_leaks
from tests.support.fake_engine import FakeEngine, FakeStepStore
from tests.support.waiting import parked, ticks

pytestmark = pytest.mark.every_python


@pytest.fixture
def engine(clock: ManualClock) -> FakeEngine:
    return FakeEngine()


@pytest.mark.parametrize("after", range(4))
async def test_a_block_that_is_cancelled_at_its_beginning_leaves_no_connection(engine: FakeEngine, after: int) -> None:
    """`async with store`, cancelled while the store is opened, closes it: nobody else would."""

    async def block() -> None:
        async with store:
            await asyncio.Event().wait()

    async with no_leaks():
        store = FakeStepStore(engine)
        task = await parked(block())
        await ticks(after)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not engine.watches
        with pytest.raises(ah.errors.StoreClosedError):
            await store.value()


async def _lead(store: ah.StepStore) -> None:
    async with store.lead():
        pass


@pytest.mark.parametrize("wait", [_lead, lambda store: store.wait_initialised(), lambda store: store.wait_for(3)])
async def test_a_cancelled_wait_leaves_no_timer(
    clock: ManualClock, engine: FakeEngine, wait: Callable[[ah.StepStore], Awaitable[object]]
) -> None:
    """Leases of others are looked after while somebody waits, and no longer."""
    engine.apply("default", Lead(Member("other/1", "another", 1000.0)))
    async with FakeStepStore(engine) as store:
        task = asyncio.ensure_future(wait(store))
        await ticks(20)
        assert clock.pending
        task.cancel()
        await asyncio.wait([task])
        await store.flush()
        assert clock.pending == 0


@pytest.mark.parametrize("use", [lambda store: store.value(), lambda store: store.advance()])
async def test_who_insists_hears_at_once_that_the_store_is_closed(
    clock: ManualClock, engine: FakeEngine, use: Callable[[ah.StepStore], Awaitable[object]]
) -> None:
    """Not after the pause before its next try: when closing is over the clock stands still here."""
    async with no_leaks():
        store = FakeStepStore(engine)
        await store.value()
        engine.go()
        task = asyncio.ensure_future(use(store))
        await ticks(20)
        assert not task.done()
        closing = asyncio.ensure_future(store.aclose())
        await ticks(20)
        while not closing.done():  # who was about to lead may have to be taken out of the engine, which is away
            clock.advance(0.5)
            await ticks(20)
        with pytest.raises(ah.errors.StoreClosedError):
            await task


async def test_an_opening_that_nobody_waited_for_is_tried_again(clock: ManualClock, engine: FakeEngine) -> None:
    """The call that began it was cancelled; its failure is nothing to the next call, which finds the engine there."""
    engine.go()
    store = FakeStepStore(engine, connect_timeout=1.0)
    first = await parked(store.value())
    first.cancel()
    for _ in range(20):
        await ticks(10)
        clock.advance(1.0)
    engine.come_back()
    assert (await store.value()).step == 0
    await store.aclose()


class _Broken(FakeStepStore):
    async def _request_once(self, request: Request) -> Answer:
        raise LookupError("no engine should raise this")


async def test_an_error_that_nobody_thought_of_ends_every_write(engine: FakeEngine) -> None:
    """All who had a part in the request get it; later writes are tried."""
    async with _Broken(engine) as store:
        ends = await asyncio.gather(store.advance(), store.advance(2), store.reset(0), return_exceptions=True)
        assert [repr(end) for end in ends] == [repr(LookupError("no engine should raise this"))] * 3
        with pytest.raises(LookupError, match="no engine"):
            await store.advance()
