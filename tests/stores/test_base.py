"""The contract of step stores, on the one in memory: positions, writing, waiting, timeouts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from anyio import to_thread

import aiohooks as ah
from aiohooks.errors import InvalidArgumentError, StepTimeoutError, StoreClosedError, WrongLoopError
from aiohooks.stores import MemoryStepStore, Position, StepStore
from aiohooks.testing import check_step_store, step_store_checks
from aiohooks.testing.clock import ManualClock
from tests.support.waiting import advance_clock, parked, result_without_suspending

pytestmark = pytest.mark.every_python

MAX_STEP = 2**53 - 1


# --- positions and writing


async def test_writing_in_memory_never_suspends() -> None:
    """The writes of an inline store never suspend, so nothing runs between them and the code around
    them.
    """
    store = MemoryStepStore()
    assert store.inline
    assert not StepStore.inline
    assert result_without_suspending(store.advance()) == 1
    assert result_without_suspending(store.raise_to(4)) == 4
    assert result_without_suspending(store.reset(2)) == Position(2, 2)
    assert result_without_suspending(store.value()) == Position(2, 2)


async def test_advance_without_a_coroutine() -> None:
    """Where `inline` is true `advance_nowait` is `advance`; elsewhere it says what to use."""
    store = MemoryStepStore()
    task = await parked(store.wait_for(3))
    assert store.advance_nowait(3) == await task == 3
    with pytest.raises(InvalidArgumentError, match="advance by 0"):
        store.advance_nowait(0)
    with pytest.raises(TypeError, match="cannot advance without waiting; await advance"):
        StepStore.advance_nowait(store)
    await store.aclose()
    with pytest.raises(StoreClosedError):
        store.advance_nowait()
    assert store.latest == Position(1, 3)


async def test_a_step_above_the_highest_is_refused() -> None:
    """A step above the highest is refused, and the store does not move, with waiters or without."""
    store = MemoryStepStore(MAX_STEP - 1)
    with pytest.raises(
        InvalidArgumentError,
        match=rf"wait for step {MAX_STEP + 1}: give a whole number up to {MAX_STEP}",
    ):
        await store.wait_for(MAX_STEP + 1)
    task = await parked(store.wait_for(MAX_STEP))
    with pytest.raises(
        InvalidArgumentError, match=f"advance by 2 would lead to step {MAX_STEP + 1}"
    ):
        await store.advance(2)
    assert store.latest.step == MAX_STEP - 1
    assert await store.advance() == await task == MAX_STEP
    with pytest.raises(InvalidArgumentError, match="would lead to step"):
        await store.advance()


async def test_other_kinds_of_whole_numbers_are_steps() -> None:
    """What can be an index can be a step; what comes back is a plain int."""

    class Number:
        def __index__(self) -> int:
            return 3

    number: Any = Number()
    store = MemoryStepStore(number)
    assert (await store.advance(number), await store.wait_for(number)) == (6, 6)
    assert type(store.latest.step) is int


# --- waiting


async def test_cancelled_thresholds_do_not_accumulate() -> None:
    """However many different steps were waited for and cancelled, the memory for them stays
    bounded.
    """
    store = MemoryStepStore()
    steady = await parked(store.wait_for(1))
    most = 0
    for first in range(2, 20_000, 100):
        tasks = [asyncio.create_task(store.wait_for(first + number)) for number in range(100)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        most = max(most, len(store._waits.waiters._thresholds))
    assert most <= 2 * 101 + 64 + 100
    await store.advance()
    assert await steady == 1
    assert len(store._waits.waiters._thresholds) == 1  # that of no waits


# --- timeouts


async def test_the_timeout_error_has_what_was_wanted() -> None:
    """The error of a wait whose time is up has the step wanted, the step seen, the duration and the
    publishers.
    """
    with ManualClock() as clock:
        store = MemoryStepStore(run="digits")
        store.publisher("chief")
        task = await parked(store.wait_for(10, timeout=2.5))
        await store.advance(4)
        await advance_clock(clock, 2.4, 3)
        assert not task.done()
        clock.advance(0.1)
        with pytest.raises(
            StepTimeoutError,
            match=r"step 10 of digits was not reached in 2.5 s: seen step 4, published by chief",
        ) as error:
            await task
        assert (error.value.wanted, error.value.seen, error.value.waited_secs) == (10, 4, 2.5)
        assert isinstance(error.value, TimeoutError)
        assert (store.statistics().waiting, clock.pending) == (0, 0)


async def test_timeout_zero_never_suspends() -> None:
    """With `timeout=0` a step not reached is an error without suspending."""
    with ManualClock():
        store = MemoryStepStore()
        with pytest.raises(StepTimeoutError, match="not reached in 0 s: seen step 0, no publisher"):
            result_without_suspending(store.wait_for(1, timeout=0))
        with pytest.raises(InvalidArgumentError, match="timeout is inf"):
            result_without_suspending(store.wait_for(1, timeout=math.inf))


async def test_store_made_outside_a_loop_uses_the_loops_clock() -> None:
    """The timeouts of a store made outside of any loop use the clock of the loop that uses the
    store.
    """
    store = await to_thread.run_sync(MemoryStepStore)
    with pytest.raises(StepTimeoutError):
        await store.wait_for(1, timeout=0.001)


# -- the conformance suite, and what is its own


@pytest.mark.parametrize("check", step_store_checks())
async def test_conformance(check: str) -> None:
    """The store of one process passes every check."""
    stores: dict[str, MemoryStepStore] = {}

    def make(run: str) -> MemoryStepStore:
        return stores.setdefault(run, MemoryStepStore(run=run))

    await check_step_store(make, check)


async def test_a_store_in_memory_is_forgotten_by_closing_it() -> None:
    """Code that forgets its run works with every kind of store."""
    store = ah.open_step_store("memory://")
    waits = await parked(store.wait_for(3), 2)
    await store.forget()
    with pytest.raises(ah.errors.StoreClosedError):
        await waits
    with pytest.raises(ah.errors.StoreClosedError):
        await store.advance()


# -- loops and threads, statistics, subscriptions


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
