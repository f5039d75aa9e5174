"""A process with waiters on NATS, of our store or made by hand: says when the last of them has gone on.

    python -m tests.benchmarks._nats_waiters ours|bare URL RUN COUNT

Each line of its input is a step: so many waiters wait for it, it prints `armed`, and then the time when the last one was woken.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable

from nats.aio.client import Client
from nats.js.api import DeliverPolicy

from aiohooks.stores.nats import NatsStepStore

Wait = Callable[[int], Awaitable[object]]


async def ours(url: str, run: str, serve: Callable[[Wait], Awaitable[None]]) -> None:
    """With the step store."""
    async with NatsStepStore(url, run=run) as store:
        await serve(store.wait_for)


async def bare(url: str, run: str, serve: Callable[[Wait], Awaitable[None]]) -> None:
    """By hand, the least that can work: an ordered consumer, and a future for each waiter."""
    client = Client()
    await client.connect(url)
    waits: dict[asyncio.Future[None], int] = {}
    seen = 0
    subscription = await client.jetstream().subscribe(
        f"bare.{run}", ordered_consumer=True, deliver_policy=DeliverPolicy.LAST_PER_SUBJECT
    )

    async def listen() -> None:
        nonlocal seen
        async for message in subscription.messages:
            seen = int(message.data)
            for wait in [wait for wait, step in waits.items() if step <= seen]:
                waits.pop(wait)
                wait.set_result(None)

    async def wait_for(step: int) -> None:
        if seen < step:
            wait: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waits[wait] = step
            await wait

    listener = asyncio.ensure_future(listen())
    await serve(wait_for)
    listener.cancel()
    await client.close()


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

    await (ours if kind == "ours" else bare)(url, run, serve)
    pipe.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
