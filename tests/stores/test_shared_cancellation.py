"""Stores over processes whose callers are cancelled, or whose store is closed, at every point of a call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.stores._protocol import Answer, Lead, Member, Request
from aiohooks.testing import ManualClock
from aiohooks.testing.leaks import no_leaks
from tests.support.fake_engine import FakeConnection, FakeEngine, FakeStepStore
from tests.support.waiting import parked, ticks

pytestmark = pytest.mark.every_python


# --- at every point

Work = Callable[[FakeStepStore], Coroutine[Any, Any, object]]


async def advance(store: FakeStepStore) -> object:
    """Advance once."""
    return await store.advance()


async def lead(store: FakeStepStore) -> object:
    """Lead for a term."""
    async with store.lead():
        await store.mark_initialised()
        return await store.advance()


async def wait_initialised(store: FakeStepStore) -> object:
    """Wait for the chief, which leads already."""
    return await store.wait_initialised()


async def block(store: FakeStepStore) -> object:
    """Open, use and close the store."""
    async with store:
        with store.publisher("one"):
            await store.advance()
        await store.flush()
    return None


async def value(store: FakeStepStore) -> object:
    """Read the position."""
    return await store.value()


WORKS: list[Work] = [advance, lead, wait_initialised, block, value]


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("close", [False, True])
async def test_cancelled_or_closed_at_every_point(work: Work, close: bool) -> None:
    """The caller is cancelled, or the store closed, after n ticks: nothing is left in the engine, and other stores work."""
    for after in range(40):
        engine = FakeEngine()
        async with FakeStepStore(engine) as other, contextlib.AsyncExitStack() as chief:
            if work is wait_initialised:
                await chief.enter_async_context(other.lead())
                await other.mark_initialised()
            store = FakeStepStore(engine)
            task = asyncio.ensure_future(work(store))
            await ticks(after)
            done = task.done()
            if close:
                await store.aclose()
            else:
                task.cancel()
            (result,) = await asyncio.gather(task, return_exceptions=True)
            if not done and close:
                assert not isinstance(result, BaseException) or isinstance(result, ah.errors.StoreClosedError), result
            await store.aclose()
            await chief.aclose()
            await other.flush()
            run = engine.runs["default"]
            assert run.members == {}, after
            async with other.lead(), asyncio.timeout(5):
                step = run.position.step
                assert await other.advance() == step + 1
                await ticks(40)
                assert run.position.step == step + 1
        if done:
            break
    else:
        raise AssertionError("the call never finished")


async def test_closing_ends_an_advance_for_a_thread_that_has_not_begun() -> None:
    """The store is closed before the advance has begun: the thread gets an error instead of waiting indefinitely."""
    store = FakeStepStore(FakeEngine())
    await store.advance()
    late = store.advance_threadsafe()
    await store.aclose()
    with pytest.raises(ah.errors.StoreClosedError):
        await asyncio.wrap_future(late)


# --- in one place


@pytest.mark.parametrize("after", range(4))
async def test_a_block_that_is_cancelled_at_its_beginning_leaves_no_connection(engine: FakeEngine, after: int) -> None:
    """`async with store`, cancelled while the store is opened, closes it: the caller cannot."""

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
        assert not engine.watchers
        with pytest.raises(ah.errors.StoreClosedError):
            await store.value()


async def _lead(store: ah.StepStore) -> None:
    async with store.lead():
        pass


@pytest.mark.parametrize("wait", [_lead, lambda store: store.wait_initialised(), lambda store: store.wait_for(3)])
async def test_a_cancelled_wait_leaves_no_timer(
    clock: ManualClock, engine: FakeEngine, wait: Callable[[ah.StepStore], Awaitable[object]]
) -> None:
    """The leases of others are watched while there is a wait, and no longer."""
    engine.apply("default", Lead(Member("other/1", "another", 1000.0)))
    async with FakeStepStore(engine) as store:
        task = asyncio.ensure_future(wait(store))
        await ticks(20)
        assert clock.pending
        task.cancel()
        await asyncio.wait([task])
        await store.flush()
        assert clock.pending == 0


async def test_a_failed_opening_whose_caller_was_cancelled_is_retried(clock: ManualClock, engine: FakeEngine) -> None:
    """The call that began it was cancelled; the next call does not get its failure, but opens the store again."""
    engine.stop()
    store = FakeStepStore(engine, connect_timeout=1.0)
    first = await parked(store.value())
    first.cancel()
    for _ in range(20):
        await ticks(10)
        clock.advance(1.0)
    engine.restart()
    assert (await store.value()).step == 0
    await store.aclose()


class _Broken(FakeConnection):
    async def request(self, request: Request) -> Answer:
        raise LookupError("no engine should raise this")


async def test_an_unexpected_error_ends_every_write_of_the_batch(engine: FakeEngine) -> None:
    """Each caller whose write was in the request gets the error; later writes are tried."""
    async with FakeStepStore(_Broken(engine)) as store:
        ends = await asyncio.gather(store.advance(), store.advance(2), store.reset(0), return_exceptions=True)
        assert [repr(end) for end in ends] == [repr(LookupError("no engine should raise this"))] * 3
        with pytest.raises(LookupError, match="no engine"):
            await store.advance()
