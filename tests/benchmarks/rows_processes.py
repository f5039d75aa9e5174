"""Rows about step stores of several processes: each engine against its bare client, and two stores
side by side.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from tests.benchmarks.measure import Counts, Figure, Lane, Setup, Times, compared, repeated
from tests.benchmarks.store_engine import Counter, Engine, engine_of, opened
from tests.benchmarks.store_peers import peers

CALLERS = 64
CROWD, PROCESSES = 1000, 4


class EngineLanes:
    """Makes the lanes of one row: counters and other processes on one server."""

    def __init__(self, name: str, engine: Engine, url: str, stack: AsyncExitStack) -> None:
        self._name = name
        self._engine = engine
        self._url = url
        self._stack = stack

    async def _opened(self, kind: str) -> Counter:
        return await self._stack.enter_async_context(opened(self._engine, kind, self._url))

    async def waking(self, kind: str, processes: int, each: int) -> Lane:
        """Make a lane from calling `advance` here until the last of so many waiters in so many
        other processes has been woken.
        """
        counter = await self._opened(kind)
        others = await self._stack.enter_async_context(
            peers(self._name, kind, self._url, processes, each)
        )
        step = await counter.advance()

        async def lane(times: int) -> float:
            nonlocal step
            secs = 0.0
            for _ in range(times):
                await others.arm(step + 1)
                await asyncio.sleep(self._engine.settled_secs)
                began = time.perf_counter()
                step = await counter.advance()
                secs += await others.woken() - began
            return secs

        return lane

    async def advancing(self, kind: str) -> dict[str, Lane]:
        """Make two lanes of as many advances: all at the same time, and one after the other."""
        counter = await self._opened(kind)

        async def together() -> None:
            await asyncio.gather(*(counter.advance() for _ in range(CALLERS)))

        async def alone() -> None:
            for _ in range(CALLERS):
                await counter.advance()

        return {f"{kind} together": repeated(together), f"{kind} alone": repeated(alone)}


@asynccontextmanager
async def lanes_of(name: str) -> AsyncIterator[tuple[Engine, EngineLanes]]:
    """Run a server of an engine for the time of the block."""
    engine = engine_of(name)
    with engine.serve() as url:
        async with AsyncExitStack() as stack:
            yield engine, EngineLanes(name, engine, url, stack)


def each(lane: str) -> Callable[[Times], float]:
    """Return the time of one advance in a lane of `advancing`."""
    return lambda times: times[lane] / CALLERS


OURS, BARE = "ours", "bare"


@asynccontextmanager
async def wake(name: str, _: Counts) -> AsyncIterator[Setup]:
    """From `advance` in one process until a waiter in another one is woken."""
    async with lanes_of(name) as (engine, row):
        what = f"{engine.title}: a wake in another process / {engine.by_hand}"
        ours, bare = [await row.waking(kind, 1, 1) for kind in (OURS, BARE)]
        yield compared(what, engine.wake_bar, ours, bare)


@asynccontextmanager
async def crowd(name: str, counts: Counts) -> AsyncIterator[Setup]:
    """The same until the last of a thousand waiters in four processes is woken."""
    processes = min(PROCESSES, 1 + counts.woken // 20)
    count = max(1, min(CROWD, counts.woken) // processes)
    async with lanes_of(name) as (engine, row):
        what = (
            f"{engine.title}: the last of {processes * count:,} waiters in {processes} processes /"
            " the same by hand"
        )
        ours, bare = [await row.waking(kind, processes, count) for kind in (OURS, BARE)]
        yield compared(what, engine.crowd_bar, ours, bare, most_times=1, most_rounds=30)


@asynccontextmanager
async def callers(name: str, _: Counts) -> AsyncIterator[Setup]:
    """Many callers of a process advance at the same time, and one alone; without waiters. The times
    are for one advance.
    """
    async with lanes_of(name) as (engine, row):
        many, one = (
            f"{engine.title}: {CALLERS} callers advance together",
            f"{engine.title}: one caller advances",
        )
        together, alone = each("ours together"), each("ours alone")
        yield Setup(
            {**await row.advancing(OURS), **await row.advancing(BARE)},
            [
                Figure(
                    f"{many} / {engine.one_call} each",
                    engine.together_bar,
                    together,
                    each("bare together"),
                ),
                Figure(f"{many} / one after the other", engine.together_bar, together, alone),
                Figure(
                    f"{one} / {engine.one_call} each time",
                    engine.alone_bar,
                    alone,
                    each("bare alone"),
                ),
            ],
            most_rounds=100,
        )
