"""Stores over processes whose callers are cancelled, or whose store is closed, at every point on the way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.stores._protocol import Leave
from tests.support.fake_engine import FakeEngine, FakeStepStore
from tests.support.waiting import ticks

pytestmark = pytest.mark.every_python

Work = Callable[[FakeStepStore], Coroutine[Any, Any, object]]


async def advance(store: FakeStepStore) -> object:
    """One write."""
    return await store.advance()


async def lead(store: FakeStepStore) -> object:
    """A whole term."""
    async with store.lead():
        await store.mark_initialised()
        return await store.advance()


async def wait_initialised(store: FakeStepStore) -> object:
    """A wait for the chief, which is there."""
    return await store.wait_initialised()


async def block(store: FakeStepStore) -> object:
    """Opened, used and closed."""
    async with store:
        with store.publisher("one"):
            await store.advance()
        await store.flush()
    return None


async def value(store: FakeStepStore) -> object:
    """A look."""
    return await store.value()


WORKS: list[Work] = [advance, lead, wait_initialised, block, value]


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("close", [False, True])
async def test_a_cut_at_every_point(work: Work, close: bool) -> None:
    """The caller is cancelled, or the store closed, after so many ticks: nothing is left in the engine, and others go on."""
    for after in range(40):
        engine = FakeEngine()
        async with FakeStepStore(engine) as other:
            if work is wait_initialised:
                await lead(other)
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
        raise AssertionError("it was never done")


async def test_closing_in_the_middle_of_a_term_gives_the_lead_back() -> None:
    """Also where the block of `lead` is left only later: the next chief need not wait for the lease to run out."""
    engine = FakeEngine()
    async with FakeStepStore(engine) as a, FakeStepStore(engine) as b, a.lead():
        await a.aclose()
        async with asyncio.timeout(5), b.lead() as term:
            assert term.number == 2
    left = [request for request in engine.requests if isinstance(request, Leave)]
    assert len(left) == 2


async def test_an_advance_for_a_thread_that_never_began() -> None:
    """The store is closed before its task has begun: the thread is told, and does not wait for ever."""
    store = FakeStepStore(FakeEngine())
    await store.advance()
    asked = threading.Event()
    ended: list[BaseException | None] = []

    def work() -> None:
        answer = store.advance_threadsafe()
        asked.set()
        ended.append(answer.exception(30))

    thread = threading.Thread(target=work)
    thread.start()
    asked.wait(30)
    # What the thread has asked for comes first in the next turn of the loop; this comes just behind, before its task begins.
    tasks = store._tasks  # pyright: ignore[reportPrivateUsage]
    asyncio.get_running_loop().call_soon(lambda: [task.cancel() for task in tuple(tasks)])
    await asyncio.to_thread(thread.join)
    assert isinstance(ended[0], ah.errors.StoreClosedError)
    await store.aclose()
