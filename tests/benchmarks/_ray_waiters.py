"""A process with waiters on Ray, of our store or made by hand: says when the last of them has gone on.

    python -m tests.benchmarks._ray_waiters ours|bare ADDRESS RUN COUNT

Each line of its input is a step: so many waiters wait for it, it prints `armed`, and then the time when the last one was woken.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohooks.stores import _ray_cluster
from aiohooks.stores.ray import RayStepStore

Wait = Callable[[int], Awaitable[object]]
NAMESPACE = "bench"


class Bare:
    """The least that can work: a step, and a future for each wait."""

    def __init__(self) -> None:
        self.step = 0
        self.waits: dict[asyncio.Future[None], int] = {}

    async def advance(self) -> int:
        self.step += 1
        for wait in [wait for wait, step in self.waits.items() if step <= self.step]:
            del self.waits[wait]
            wait.set_result(None)
        return self.step

    async def wait_for(self, step: int) -> int:
        if step > self.step:
            wait: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waits[wait] = step
            await wait
        return self.step


def bare_actor(run: str) -> Any:
    """Its actor, by name."""
    return _ray_cluster.named_actor(Bare, f"bare {run}", NAMESPACE)


async def main(kind: str, address: str, run: str, count: int) -> None:
    """Serves until its input ends."""
    reader = asyncio.StreamReader()
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def serve(wait_for: Wait) -> None:
        print("ready", flush=True)
        while line := await reader.readline():
            waits = [asyncio.ensure_future(wait_for(int(line))) for _ in range(count)]
            await asyncio.sleep(0.05)  # until they wait in the actor
            print("armed", flush=True)
            await asyncio.gather(*waits)
            print(time.perf_counter(), flush=True)

    await asyncio.to_thread(_ray_cluster.join, address, timeout=30, log_to_driver=False)
    if kind == "ours":
        async with RayStepStore(NAMESPACE, run=run) as store:
            await serve(store.wait_for)
    else:
        actor = await asyncio.to_thread(bare_actor, run)

        async def wait_for(step: int) -> None:
            await actor.wait_for.remote(step)

        await serve(wait_for)
    pipe.close()
    await asyncio.to_thread(_ray_cluster.leave)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
