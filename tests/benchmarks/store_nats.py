"""Rows about the NATS store, against the client of NATS used by hand: publish and an ordered consumer.

python -m tests.benchmarks.store_nats --rounds 200
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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
from tests.source import ROOT
from tests.store_servers import Server, available, running

CALLERS = 64
Advance = Callable[[], Awaitable[int]]


@asynccontextmanager
async def _server() -> AsyncIterator[Server]:
    if not available("nats") or importlib.util.find_spec("nats") is None:
        raise NotInstalledError("nats-server")
    with tempfile.TemporaryDirectory() as directory, running("nats", Path(directory)) as server:
        yield server


@asynccontextmanager
async def _ours(server: Server, run: str = "bench") -> AsyncIterator[Any]:
    from aiohooks.stores.nats import NatsStepStore

    async with NatsStepStore(server.url, run=run) as store:
        yield store


@asynccontextmanager
async def _bare(server: Server) -> AsyncIterator[Any]:
    from nats.aio.client import Client

    client = Client()
    await client.connect(server.url)
    stream = client.jetstream()
    await stream.add_stream(name="bare", subjects=["bare.*"], max_msgs_per_subject=1)
    try:
        yield stream
    finally:
        await client.close()


@asynccontextmanager
async def _waiters(server: Server, kind: str, processes: int, count: int) -> AsyncIterator[Callable[[int], Awaitable[Any]]]:
    """Processes with waiters: the result arms them for a step, and its result waits for when the last one has gone on."""
    command = [sys.executable, "-m", "tests.benchmarks._nats_waiters", kind, server.url, "bench", str(count)]
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

            async def woken() -> float:
                return max(map(float, await heard()))

            return woken

        assert set(await heard()) == {b"ready\n"}
        yield arm


def _waking(arm: Callable[[int], Awaitable[Any]], advance: Advance, steps: list[int]) -> Lane:
    async def lane(times: int) -> float:
        secs = 0.0
        for _ in range(times):
            woken = await arm(steps[0] + 1)
            began = time.perf_counter()
            steps[0] = await advance()
            secs += await woken() - began
        return secs

    return lane


@asynccontextmanager
async def _wakes(processes: int, waiters: int, bar: float | None, what: str) -> AsyncIterator[Setup]:
    async with _server() as server, _ours(server) as store, _bare(server) as stream, AsyncExitStack() as stack:
        arm_ours = await stack.enter_async_context(_waiters(server, "ours", processes, waiters))
        arm_bare = await stack.enter_async_context(_waiters(server, "bare", processes, waiters))
        step = [0]

        async def publish() -> int:
            await stream.publish("bare.bench", b"%d" % (step[0] + 1))
            return step[0] + 1

        yield Setup(
            {"ours": _waking(arm_ours, store.advance, [0]), "bare": _waking(arm_bare, publish, step)},
            [Figure(what, bar, itemgetter("ours"), itemgetter("bare"))],
            most_times=1,
        )


@asynccontextmanager
async def nats_wake(counts: Counts) -> AsyncIterator[Setup]:
    """From `advance` in one process until a waiter in another one goes on."""
    async with _wakes(1, 1, 1.5, "NATS: advance -> a waiter in another process / publish -> ordered consumer by hand") as setup:
        yield setup


@asynccontextmanager
async def nats_crowd(counts: Counts) -> AsyncIterator[Setup]:
    """The same until the last of a thousand waiters in four processes goes on."""
    each = max(1, min(250, counts.woken // 4))
    what = f"NATS: advance -> the last of {4 * each:,} waiters in 4 processes / the same by hand"
    async with _wakes(4, each, None, what) as setup:
        yield dataclasses.replace(setup, most_rounds=50)


@asynccontextmanager
async def nats_callers(counts: Counts) -> AsyncIterator[Setup]:
    """Many callers advance at the same time, against one publish of the server's own counter for each."""
    async with _server() as server, _ours(server) as store, _bare(server) as stream:
        with contextlib.suppress(Exception):  # the counter is for servers from 2.12 on; an older one has only the last row
            from nats.js.api import StreamConfig

            await stream.add_stream(StreamConfig(name="counter", subjects=["counter.*"], allow_msg_counter=True))

        async def ours(times: int) -> float:
            began = time.perf_counter()
            for _ in range(times):
                await asyncio.gather(*(store.advance() for _ in range(CALLERS)))
            return time.perf_counter() - began

        async def counter(times: int) -> float:
            began = time.perf_counter()
            for _ in range(times):
                adds = (stream.publish("counter.bench", b"", headers={"Nats-Incr": "1"}) for _ in range(CALLERS))
                await asyncio.gather(*adds)
            return time.perf_counter() - began

        async def one_by_one(times: int) -> float:
            began = time.perf_counter()
            for _ in range(times):
                for _ in range(CALLERS):
                    await store.advance()
            return time.perf_counter() - began

        yield Setup(
            {"ours": ours, "counter": counter, "one by one": one_by_one},
            [
                Figure(
                    f"NATS: {CALLERS} callers advance at the same time / one publish to a JetStream counter each",
                    1 / 3,
                    itemgetter("ours"),
                    itemgetter("counter"),
                ),
                Figure(
                    f"NATS: {CALLERS} callers advance at the same time / one after the other",
                    1 / 3,
                    itemgetter("ours"),
                    itemgetter("one by one"),
                ),
            ],
            most_times=1,
        )


NATS_ROWS: dict[str, Row] = {"nats-wake": nats_wake, "nats-callers": nats_callers, "nats-crowd": nats_crowd}


async def _all(counts: Counts) -> None:
    print(header())
    for name, row in NATS_ROWS.items():
        for result in await measure(name, row, counts):
            print(line(result), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    asyncio.run(_all(Counts(rounds=parser.parse_args().rounds)))
