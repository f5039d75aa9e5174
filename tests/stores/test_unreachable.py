"""When a store over processes ends waits as hopeless: only after its engine has said so, for others may have moved meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
from aiohooks._aio.run_scope import begin_run
from aiohooks.stores import SharedStepStore
from aiohooks.stores._protocol import Snapshot
from aiohooks.stores.local import LocalStepStore
from tests.support.fake_engine import FakeEngine, FakeStepStore
from tests.support.waiting import ticks

pytestmark = pytest.mark.every_python

Pair = tuple[SharedStepStore, SharedStepStore]
Two = Callable[[], AbstractAsyncContextManager[Pair]]
Wait = Callable[[SharedStepStore], Coroutine[Any, Any, object]]


class Deaf(FakeStepStore):
    """Hears of nothing that others do: all that it knows it has asked for."""

    async def _watch(self) -> None:
        await asyncio.Event().wait()


class DeafLocal(LocalStepStore):
    """The same in files."""

    def _on_inotify(self) -> None:
        if self._inotify is not None:
            self._inotify.read_events()


@pytest.fixture(params=["fake", "local"])
def two(request: pytest.FixtureRequest, tmp_path: Path) -> Two:
    """Two stores of one run, the first of them deaf."""

    @asynccontextmanager
    async def opened() -> AsyncGenerator[Pair]:
        engine = FakeEngine()
        if request.param == "fake":
            async with Deaf(engine) as a, FakeStepStore(engine) as b:
                yield a, b
        else:
            async with DeafLocal(tmp_path) as a, LocalStepStore(tmp_path) as b:
                yield a, b

    return opened


def wait_for_step(store: SharedStepStore) -> Coroutine[Any, Any, object]:
    """As a worker waits."""
    return store.wait_for(5)


async def wait_for_change(store: SharedStepStore) -> object:
    """As one that watches waits."""
    changes = store.changes()
    await anext(changes)
    return (await anext(changes)).step


async def wait_initialised(store: SharedStepStore) -> object:
    """As a worker waits for its chief."""
    await store.wait_initialised()
    return store.latest.step


WAITS = [wait_for_step, wait_for_change, wait_initialised]


@pytest.mark.parametrize("wait", WAITS)
async def test_who_leaves_does_not_end_a_wait_that_was_served(two: Two, wait: Wait) -> None:
    """A publisher leaves here, and another process was there already where the wait goes to: the wait ends well."""
    async with two() as (a, b):
        publisher = a.publisher("trainer")
        await a.flush()
        waits = asyncio.ensure_future(wait(a))
        await ticks(20)
        async with b.lead():
            await b.mark_initialised()
            await b.advance(5)
            assert not waits.done()
            publisher.close()
            assert await waits == 5


@pytest.mark.parametrize("wait", WAITS)
async def test_a_wait_that_begins_asks_first(two: Two, wait: Wait) -> None:
    """Nobody is left as far as is known here, and another process has come since, whose work is waited for."""
    async with two() as (a, b):
        with a.publisher("trainer"):
            await a.flush()
        await a.flush()
        async with b.lead():
            await b.mark_initialised()
            b.publisher("another")
            await b.flush()
            waits = asyncio.ensure_future(wait(a))
            await ticks(20)
            assert not waits.done() or wait is wait_initialised
            await b.advance(5)
            await a.value()
            assert await waits in (0, 5)


async def test_a_publisher_that_waits_itself_asks_first(two: Two) -> None:
    """The last one here that could work begins to wait; one that is not known here yet is at work elsewhere."""
    async with two() as (a, b):
        with a.publisher("early"):
            await a.flush()
        await a.flush()
        publisher = a.publisher("late")
        await a.flush()
        b.publisher("another")
        await b.flush()

        async def wait() -> int:
            begin_run(object(), publisher)
            return await a.wait_for(5)

        waits = asyncio.ensure_future(wait())
        await ticks(20)
        assert not waits.done()
        await b.advance(5)
        await a.value()
        assert await waits == 5


async def test_hopeless_waits_end(two: Two) -> None:
    """When the engine says the same, they end, each with an error of its own; those that come later at once."""
    async with two() as (a, _):
        publisher = a.publisher("trainer")
        waits = [asyncio.ensure_future(wait(a)) for wait in WAITS]
        await ticks(20)
        publisher.close()
        for each in [*waits, *(asyncio.ensure_future(wait(a)) for wait in WAITS)]:
            with pytest.raises((ah.errors.PublisherFinishedError, StopAsyncIteration), match=r"trainer finished at step 0|^$"):
                await each


async def test_waits_do_not_end_while_nobody_can_say() -> None:
    """While the engine is away the waits stay; when it is back they end, or end well."""
    engine = FakeEngine()
    async with FakeStepStore(engine) as a, FakeStepStore(engine) as b:
        publisher = a.publisher("trainer")
        await a.flush()
        waits = asyncio.ensure_future(a.wait_for(5))
        await ticks(20)
        engine.go()
        publisher.close()
        await ticks(50)
        assert not waits.done()
        engine.come_back()
        assert await b.advance(5) == 5
        assert await waits == 5


class Slow(FakeStepStore):
    """Its looks take until they are let go, and it is deaf."""

    looks = 0

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(engine)
        self.let = asyncio.Event()

    async def _watch(self) -> None:
        await asyncio.Event().wait()

    async def _read_run_once(self) -> Snapshot:
        snapshot = await super()._read_run_once()
        self.looks += 1
        await self.let.wait()
        return snapshot


async def test_what_was_read_before_does_not_count() -> None:
    """A look that began before the last publisher left does not say that nobody is left: another one is made."""
    engine = FakeEngine()
    async with Slow(engine) as a, FakeStepStore(engine) as b:
        first = a.publisher("first")
        waits = asyncio.ensure_future(a.wait_for(5))
        await ticks(20)
        first.close()
        await ticks(20)
        second = a.publisher("second")
        second.close()  # while the answer is on its way
        await b.advance(5)
        a.let.set()
        assert await waits == 5
        assert a.looks == 2
