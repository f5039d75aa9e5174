"""The contract of step stores, on the one in memory: changes, loops and threads, statistics,
subscriptions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from aiohooks.errors import WrongLoopError
from aiohooks.stores import MemoryStepStore, Position
from tests.support.waiting import parked, result_without_suspending

pytestmark = pytest.mark.every_python


def asynchronous_calls(store: MemoryStepStore) -> list[Coroutine[Any, Any, object]]:
    """Call each method that suspends and is refused where the store cannot be used."""
    return [
        store.advance(),
        store.raise_to(5),
        store.reset(5),
        store.value(),
        store.wait_for(1),
        store.wait_initialised(),
        store.mark_initialised(),
        enter(store.lead()),
    ]


async def enter(block: AbstractAsyncContextManager[object]) -> None:
    async with block:
        pass


# --- changes


# --- loops and threads


def test_other_loop_is_refused_before_any_effect() -> None:
    """A store belongs to the loop of its first use; in another one every call fails and changes
    nothing.
    """
    store = MemoryStepStore()
    assert asyncio.run(store.advance()) == 1

    async def use() -> None:
        for coro in (*asynchronous_calls(store), store.aclose()):
            with pytest.raises(
                WrongLoopError, match="another event loop than its own; from a thread"
            ):
                await coro
        with pytest.raises(WrongLoopError):
            await anext(store.changes())
        with pytest.raises(WrongLoopError):
            store.publisher("chief")

    asyncio.run(use())
    with pytest.raises(WrongLoopError):  # where none is running
        result_without_suspending(store.advance())
    assert store.latest == Position(1, 1)


def test_without_a_loop_only_reading_is_allowed() -> None:
    """Outside of any loop `latest`, `statistics` and the repr work; a call that needs a loop is
    refused.
    """
    store = MemoryStepStore(3)
    assert store.latest == store.statistics().latest == Position(1, 3)
    with pytest.raises(WrongLoopError, match="where no event loop is running"):
        store.publisher("chief")
    with pytest.raises(WrongLoopError, match="where no event loop is running"):
        result_without_suspending(store.advance())
    assert repr(store) == "<MemoryStepStore 'default' at step 3 of epoch 1, no publisher>"


# --- statistics, subscriptions


async def test_statistics_can_be_read_in_any_thread() -> None:
    """Also while something waits, where the time of the wait is needed."""
    store = MemoryStepStore()
    waiting = await parked(store.wait_for(1))
    statistics = await asyncio.to_thread(store.statistics)
    assert statistics.waiting_secs is not None
    await store.advance()
    await waiting
