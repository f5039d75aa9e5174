"""Rows about the Redis store, against redis-py used by hand: a blocking XREAD, and XADD.

python -m tests.benchmarks.store_redis --rounds 200 [--server redis]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib.util
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

from tests.benchmarks.measure import Counts, Figure, Lane, NotInstalledError, Row, Setup, measure
from tests.benchmarks.report import header, line
from tests.redis_servers import KINDS
from tests.source import ROOT
from tests.store_servers import Server, running

CALLERS = 64
SETTLED_SECS = 0.01
"""After this a wait that has begun is known to the server; it is not measured."""
Advance = Callable[[], Awaitable[object]]

kinds = KINDS[:1]


@asynccontextmanager
async def _server() -> AsyncIterator[Server]:
    if not kinds or importlib.util.find_spec("redis") is None:
        raise NotInstalledError("valkey-server")
    with tempfile.TemporaryDirectory() as directory, running(kinds[0], Path(directory), keeps=False) as server:
        yield server


@asynccontextmanager
async def _ours(server: Server) -> AsyncIterator[Advance]:
    from aiohooks.stores.redis import RedisStepStore

    async with RedisStepStore(server.url, run="bench") as store:
        yield store.advance


@asynccontextmanager
async def _bare(server: Server, run: str) -> AsyncIterator[Advance]:
    import redis.asyncio

    async with redis.asyncio.Redis.from_url(server.url, protocol=2) as client:

        async def advance() -> object:
            # The server counts the second half of the id by itself.
            return await client.xadd(run, {"s": ""}, id="1-*", maxlen=1, approximate=False)

        await advance()  # to step 0
        yield advance


@asynccontextmanager
async def _waiters(
    server: Server, kind: str, run: str, processes: int, count: int
) -> AsyncIterator[Callable[[int], Awaitable[Any]]]:
    """Processes with waiters: the result arms them for a step, and its result waits for when the last one has gone on."""
    command = [sys.executable, "-m", "tests.benchmarks._redis_waiters", kind, server.url, run, str(count)]
    pipe = asyncio.subprocess.PIPE
    async with AsyncExitStack() as stack:
        children: list[asyncio.subprocess.Process] = []
        for _ in range(processes):
            child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, cwd=ROOT)
            stack.push_async_callback(child.wait)
            assert child.stdin is not None
            stack.callback(child.stdin.close)
            children.append(child)

        async def heard() -> list[bytes]:
            return await asyncio.gather(*(child.stdout.readline() for child in children if child.stdout is not None))

        async def arm(step: int) -> Callable[[], Awaitable[float]]:
            for child in children:
                assert child.stdin is not None
                child.stdin.write(b"%d\n" % step)
            assert set(await heard()) == {b"armed\n"}
            await asyncio.sleep(SETTLED_SECS)

            async def woken() -> float:
                return max(map(float, await heard()))

            return woken

        assert set(await heard()) == {b"ready\n"}
        yield arm


def _waking(arm: Callable[[int], Awaitable[Any]], advance: Advance, first: int) -> Lane:
    step = first

    async def lane(times: int) -> float:
        nonlocal step
        secs = 0.0
        for _ in range(times):
            step += 1
            woken = await arm(step)
            began = time.perf_counter()
            await advance()
            secs += await woken() - began
        return secs

    return lane


@asynccontextmanager
async def _wakes(processes: int, waiters: int, theirs: str, bar: float | None, what: str) -> AsyncIterator[Setup]:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(_server())
        advance = await stack.enter_async_context(_ours(server))
        by_hand = await stack.enter_async_context(_bare(server, "bare"))
        arm_ours = await stack.enter_async_context(_waiters(server, "ours", "bench", processes, waiters))
        arm_theirs = await stack.enter_async_context(_waiters(server, theirs, "bare", processes, waiters))
        yield Setup(
            {"ours": _waking(arm_ours, advance, 0), "theirs": _waking(arm_theirs, by_hand, 0)},
            [Figure(what, bar, itemgetter("ours"), itemgetter("theirs"))],
            most_times=1,
        )


@asynccontextmanager
async def redis_wake(counts: Counts) -> AsyncIterator[Setup]:
    """From `advance` in one process until a waiter in another one goes on."""
    async with _wakes(
        1, 1, "bare", 1.5, "Redis: advance -> a waiter in another process / XADD -> blocking XREAD by hand"
    ) as setup:
        yield setup


@asynccontextmanager
async def redis_poll(counts: Counts) -> AsyncIterator[Setup]:
    """The same against a waiter that looks twice a second."""
    what = "Redis: advance -> a waiter in another process / one that looks every 0.5 s, as TensorFlow's"
    async with _wakes(1, 1, "poll", None, what) as setup:
        yield dataclasses.replace(setup, most_rounds=20)


@asynccontextmanager
async def redis_crowd(counts: Counts) -> AsyncIterator[Setup]:
    """The same until the last of a thousand waiters in four processes goes on."""
    each = max(1, min(250, counts.woken // 4))
    what = f"Redis: advance -> the last of {4 * each:,} waiters in 4 processes / the same by hand"
    async with _wakes(4, each, "bare", None, what) as setup:
        yield dataclasses.replace(setup, most_rounds=50)


@asynccontextmanager
async def redis_callers(counts: Counts) -> AsyncIterator[Setup]:
    """Many callers advance at the same time, and one alone, against an XADD for each."""
    async with _server() as server, _ours(server) as ours, _bare(server, "bare") as bare:

        def together(advance: Advance) -> Lane:
            async def lane(times: int) -> float:
                began = time.perf_counter()
                for _ in range(times):
                    await asyncio.gather(*(advance() for _ in range(CALLERS)))
                return time.perf_counter() - began

            return lane

        def one_by_one(advance: Advance) -> Lane:
            async def lane(times: int) -> float:
                began = time.perf_counter()
                for _ in range(times * CALLERS):
                    await advance()
                return time.perf_counter() - began

            return lane

        yield Setup(
            {
                "ours": together(ours),
                "theirs": together(bare),
                "ours alone": one_by_one(ours),
                "theirs alone": one_by_one(bare),
            },
            [
                Figure(
                    f"Redis: {CALLERS} callers advance at the same time / one XADD each",
                    1 / 3,
                    itemgetter("ours"),
                    itemgetter("theirs"),
                ),
                Figure(
                    f"Redis: {CALLERS} callers advance at the same time / one after the other",
                    1 / 3,
                    itemgetter("ours"),
                    itemgetter("ours alone"),
                ),
                Figure(
                    f"Redis: {CALLERS} advances one after the other / as many XADD one after the other",
                    None,
                    itemgetter("ours alone"),
                    itemgetter("theirs alone"),
                ),
            ],
            most_times=1,
        )


REDIS_ROWS: dict[str, Row] = {
    "redis-wake": redis_wake,
    "redis-callers": redis_callers,
    "redis-crowd": redis_crowd,
    "redis-poll": redis_poll,
}


async def _all(counts: Counts) -> None:
    print(header())
    for name, row in REDIS_ROWS.items():
        for result in await measure(name, row, counts):
            print(line(result), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--server", choices=KINDS, default=KINDS[0] if KINDS else None)
    given = parser.parse_args()
    kinds = [given.server]
    asyncio.run(_all(Counts(rounds=given.rounds)))
