"""Mistakes with stores over processes: what is said, and that nothing is harmed by them."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

import aiohooks as ah
from aiohooks.stores import SharedStepStore
from aiohooks.stores._protocol import Snapshot
from tests.support.fake_engine import FakeEngine, FakeStepStore
from tests.support.waiting import ticks


class Counted(FakeStepStore):
    """Counts how often it reads the run."""

    reads = 0

    async def _read_run_once(self) -> Snapshot:
        self.reads += 1
        return await super()._read_run_once()


async def finish(store: SharedStepStore) -> None:
    """After this nobody is left who could advance."""
    with store.publisher("trainer"):
        await store.flush()
    await store.flush()


async def test_a_wait_in_another_loop_is_refused_also_where_nobody_is_left() -> None:
    """The engine is not asked from another loop than the store's own, which would break its connection."""
    async with Counted(FakeEngine()) as store:
        await finish(store)
        before = store.reads
        with pytest.raises(ah.errors.WrongLoopError, match="another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(store.wait_for(5)))
        assert store.reads == before
        with pytest.raises(ah.errors.PublisherFinishedError):
            await store.wait_for(5)


async def test_many_hopeless_waits_ask_together() -> None:
    """However many begin at the same time, the engine is asked once, or once more."""
    async with Counted(FakeEngine()) as store:
        await finish(store)
        before = store.reads
        waits = [asyncio.ensure_future(store.wait_for(5)) for _ in range(500)]
        ended = Counter(map(type, await asyncio.gather(*waits, return_exceptions=True)))
        assert ended == {ah.errors.PublisherFinishedError: 500}
        assert store.reads - before <= 2


async def test_closing_ends_what_asks_the_engine() -> None:
    """Whoever is asking at that moment is told that the store was closed, not that its engine is away."""
    engine = FakeEngine()
    asking = FakeStepStore(engine)
    await asking.advance()
    await finish(asking)
    engine.go()
    calls = [asking.value(), asking.wait_for(5), asking.advance(), asking.raise_to(9), asking.lead().__aenter__()]
    tasks = [asyncio.ensure_future(call) for call in calls]
    await ticks(20)
    await asking.aclose()
    assert {type(one) for one in await asyncio.gather(*tasks, return_exceptions=True)} == {ah.errors.StoreClosedError}


async def test_a_store_in_memory_is_forgotten_by_closing_it() -> None:
    """So that what forgets its run works with every kind of store."""
    store = ah.open_step_store("memory://")
    waits = asyncio.ensure_future(store.wait_for(3))
    await ticks(2)
    await store.forget()
    with pytest.raises(ah.errors.StoreClosedError):
        await waits
    with pytest.raises(ah.errors.StoreClosedError):
        await store.advance()
