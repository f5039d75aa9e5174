"""A process with waiters on Redis: of our store, made by hand, or as TensorFlow's asks; says when the last has gone on.

    python -m tests.benchmarks._redis_waiters ours|bare|poll URL RUN COUNT

Each line of its input is a step: so many waiters wait for it, it prints `armed`, and then the time when the last one was woken.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import redis.asyncio

from aiohooks.stores.redis import RedisStepStore

Wait = Callable[[int], Awaitable[object]]
Serve = Callable[[Wait], Awaitable[None]]


async def ours(url: str, run: str, serve: Serve) -> None:
    """With the step store."""
    async with RedisStepStore(url, run=run) as store:
        await serve(store.wait_for)


async def bare(url: str, run: str, serve: Serve) -> None:
    """By hand, the least that can work: a blocking read from below the step, and a future for each waiter."""
    waits: dict[asyncio.Future[None], int] = {}
    begun = asyncio.Event()

    async def listen() -> None:
        reply: Any
        while True:
            await begun.wait()
            begun.clear()
            reply = await client.xread({run: f"1-{min(waits.values()) - 1}"}, block=0)
            seen = int(reply[0][1][-1][0].partition(b"-")[2])
            for wait in [wait for wait, step in waits.items() if step <= seen]:
                waits.pop(wait)
                wait.set_result(None)

    async def wait_for(step: int) -> None:
        wait: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waits[wait] = step
        begun.set()
        await wait

    async with redis.asyncio.Redis.from_url(url, protocol=2, socket_timeout=None) as client:
        listener = asyncio.ensure_future(listen())
        await serve(wait_for)
        listener.cancel()


async def poll(url: str, run: str, serve: Serve) -> None:
    """As TensorFlow's GlobalStepWaiterHook does: looks, sleeps for half a second, looks again."""

    async def wait_for(step: int) -> None:
        # When the others began is not known to it.
        await asyncio.sleep(0.5 * random.random())
        while await seen() < step:  # noqa: ASYNC110 - that is what it does
            await asyncio.sleep(0.5)

    async def seen() -> int:
        newest: Any = await client.xrevrange(run, count=1)
        return int(newest[0][0].partition(b"-")[2])

    async with redis.asyncio.Redis.from_url(url, protocol=2) as client:
        await serve(wait_for)


async def main(kind: str, url: str, run: str, count: int) -> None:
    """Serves until its input ends."""
    reader = asyncio.StreamReader()
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def serve(wait_for: Wait) -> None:
        print("ready", flush=True)
        while line := await reader.readline():
            waits = [asyncio.ensure_future(wait_for(int(line))) for _ in range(count)]
            await asyncio.sleep(0)
            print("armed", flush=True)
            await asyncio.gather(*waits)
            print(time.perf_counter(), flush=True)

    await {"ours": ours, "bare": bare, "poll": poll}[kind](url, run, serve)
    pipe.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
