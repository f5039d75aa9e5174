"""Rows about the step store: advancing past parked waiters, and waking many together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohooks as ah
from tests.benchmarks.measure import Counts, Lane, Setup, compared, repeated

FAR = 10**12
"""A step that is not reached here."""


@asynccontextmanager
async def advance_past_waiters(counts: Counts) -> AsyncIterator[Setup]:
    """Advancing costs the same with any number of waiters, as long as none is due."""
    lonely, crowded = ah.MemoryStepStore(), ah.MemoryStepStore()
    waits = [asyncio.create_task(crowded.wait_for(FAR + number)) for number in range(counts.parked)]
    await asyncio.sleep(0)
    assert crowded.statistics().waiting == counts.parked
    try:
        yield compared(
            f"advance with {counts.parked:,} parked waiters, none due / with none parked",
            1.2,
            repeated(crowded.advance),
            repeated(lonely.advance),
        )
    finally:
        await crowded.aclose()
        await asyncio.gather(*waits, return_exceptions=True)
        await lonely.aclose()


@asynccontextmanager
async def wake_waiters(counts: Counts) -> AsyncIterator[Setup]:
    """Waking many at one step, against as many futures that tasks await, until all have run."""
    store = ah.MemoryStepStore()
    try:
        yield compared(
            f"waking {counts.woken:,} waiters at one step, until all have run / setting as many"
            " futures",
            2.0,
            _waking(store, counts.woken),
            _setting(counts.woken),
            most_times=1,
            most_rounds=40,
        )
    finally:
        await store.aclose()


def _waking(store: ah.StepStore, count: int) -> Lane:
    async def lane(times: int) -> float:
        secs = 0.0
        for _ in range(times):
            step = store.latest.step + 1
            waits = [asyncio.create_task(store.wait_for(step)) for _ in range(count)]
            await asyncio.sleep(0)
            began = time.perf_counter()
            await store.advance()
            secs += await _secs_until_run(waits, began)
        return secs

    return lane


def _setting(count: int) -> Lane:
    async def bare(future: asyncio.Future[int]) -> int:
        return await future

    async def lane(times: int) -> float:
        loop = asyncio.get_running_loop()
        secs = 0.0
        for _ in range(times):
            futures: list[asyncio.Future[int]] = [loop.create_future() for _ in range(count)]
            waits = [asyncio.create_task(bare(future)) for future in futures]
            await asyncio.sleep(0)
            began = time.perf_counter()
            for future in futures:
                future.set_result(1)
            secs += await _secs_until_run(waits, began)
        return secs

    return lane


async def _secs_until_run(waits: Sequence[asyncio.Task[Any]], began: float) -> float:
    """Return the seconds from `began` until the last of the waits has run."""
    while not waits[-1].done():  # noqa: ASYNC110 - ticks of the loop are what is measured
        await asyncio.sleep(0)
    secs = time.perf_counter() - began
    assert all(wait.done() for wait in waits)
    return secs
