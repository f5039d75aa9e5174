"""Rows about the Ray store, against an asynchronous actor by hand: await a future in it, and advance.

python -m tests.benchmarks.store_ray --rounds 100
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from operator import itemgetter
from typing import Any

from tests.benchmarks.measure import Counts, Figure, Lane, NotInstalledError, Row, Setup, measure
from tests.benchmarks.report import header, line
from tests.ray_cluster import environment, keeper_of, ray_cluster
from tests.source import ROOT

CALLERS = 64
Advance = Callable[[], Awaitable[int]]


@contextlib.contextmanager
def _cluster() -> Iterator[str]:
    if importlib.util.find_spec("ray") is None:
        raise NotInstalledError("ray")
    from aiohooks.stores import _ray_cluster

    with contextlib.ExitStack() as stack:
        address = os.environ.get("AIOHOOKS_TEST_RAY") or stack.enter_context(ray_cluster())
        _ray_cluster.join(address, timeout=30, log_to_driver=False)
        stack.callback(_ray_cluster.leave)
        yield address


@asynccontextmanager
async def _engines(run: str) -> AsyncIterator[tuple[str, Any, Any]]:
    with _cluster() as address:
        from aiohooks.stores import _ray_cluster
        from aiohooks.stores.ray import RayStepStore
        from tests.benchmarks._ray_waiters import NAMESPACE, bare_actor

        bare = bare_actor(run)
        async with RayStepStore(NAMESPACE, run=run) as store:
            yield address, store, bare
            await store.forget()
        _ray_cluster.kill_actor(bare)


@asynccontextmanager
async def _waiters(address: str, run: str, kind: str, processes: int, count: int) -> AsyncIterator[Callable[[int], Any]]:
    """Processes with waiters: the result arms them for a step, and its result waits for when the last one has gone on."""
    command = [sys.executable, "-m", "tests.benchmarks._ray_waiters", kind, address, run, str(count)]
    pipe, env = asyncio.subprocess.PIPE, {**os.environ, **environment()}
    async with AsyncExitStack() as stack:
        children: list[asyncio.subprocess.Process] = []
        for _ in range(processes):
            child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, cwd=ROOT, env=env)
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


def _waking(arm: Callable[[int], Any], advance: Advance, step: int) -> Lane:

    async def lane(times: int) -> float:
        nonlocal step
        secs = 0.0
        for _ in range(times):
            woken = await arm(step + 1)
            began = time.perf_counter()
            step = await advance()
            secs += await woken() - began
        return secs

    return lane


@asynccontextmanager
async def _wakes(processes: int, each: int, bar: float | None, what: str, most_rounds: int) -> AsyncIterator[Setup]:
    run = f"wakes-{processes}-{each}"
    async with _engines(run) as (address, store, bare), AsyncExitStack() as stack:
        arm_ours = await stack.enter_async_context(_waiters(address, run, "ours", processes, each))
        arm_bare = await stack.enter_async_context(_waiters(address, run, "bare", processes, each))
        woken = await arm_ours(1)
        waiting = await asyncio.wrap_future(keeper_of(run, "bench").statistics.remote().future())
        assert waiting["waiting"] == processes + 1, waiting  # one call of each process, however many wait there
        await store.advance()
        await woken()

        async def advance() -> int:
            step: int = await bare.advance.remote()
            return step

        ours = _waking(arm_ours, store.advance, 1)
        yield Setup(
            {"ours": ours, "bare": _waking(arm_bare, advance, 0)},
            [Figure(what, bar, itemgetter("ours"), itemgetter("bare"))],
            most_times=1,
            most_rounds=most_rounds,
        )


@asynccontextmanager
async def ray_wake(counts: Counts) -> AsyncIterator[Setup]:
    """From `advance` in one process until a waiter in another one goes on."""
    what = "Ray: advance -> a waiter in another process / an asynchronous actor by hand"
    async with _wakes(1, 1, 1.5, what, 1_000_000) as setup:
        yield setup


@asynccontextmanager
async def ray_crowd(counts: Counts) -> AsyncIterator[Setup]:
    """The same until the last of a thousand waiters in four processes goes on."""
    each = max(1, min(250, counts.woken // 4))
    what = f"Ray: advance -> the last of {4 * each:,} waiters in 4 processes / each of them awaits the actor"
    async with _wakes(4, each, None, what, 30) as setup:
        yield setup


@asynccontextmanager
async def ray_callers(counts: Counts) -> AsyncIterator[Setup]:
    """Many callers advance at the same time, against one call of an actor for each."""
    async with _engines("callers") as (_, store, bare):

        async def ours(times: int) -> float:
            began = time.perf_counter()
            for _ in range(times):
                await asyncio.gather(*(store.advance() for _ in range(CALLERS)))
            return time.perf_counter() - began

        async def by_hand(times: int) -> float:
            began = time.perf_counter()
            for _ in range(times):
                await asyncio.gather(*(bare.advance.remote() for _ in range(CALLERS)))
            return time.perf_counter() - began

        async def one_by_one(times: int) -> float:
            began = time.perf_counter()
            for _ in range(times):
                for _ in range(CALLERS):
                    await store.advance()
            return time.perf_counter() - began

        callers = f"Ray: {CALLERS} callers advance at the same time"
        yield Setup(
            {"ours": ours, "by hand": by_hand, "one by one": one_by_one},
            [
                Figure(f"{callers} / one call of an actor by hand for each", 1 / 3, itemgetter("ours"), itemgetter("by hand")),
                Figure(f"{callers} / one after the other", 1 / 3, itemgetter("ours"), itemgetter("one by one")),
            ],
            most_times=1,
            most_rounds=50,
        )


RAY_ROWS: dict[str, Row] = {"ray-wake": ray_wake, "ray-callers": ray_callers, "ray-crowd": ray_crowd}


async def _all(counts: Counts) -> None:
    print(header())
    for name, row in RAY_ROWS.items():
        for result in await measure(name, row, counts):
            print(line(result), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    asyncio.run(_all(Counts(rounds=parser.parse_args().rounds)))
