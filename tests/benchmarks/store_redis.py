"""Redis, or Valkey: redis-py by hand, with XADD and a blocking XREAD."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import redis.asyncio

from tests.benchmarks.store_engine import Engine, Waits
from tests.support.store_servers import running

STREAM = "bare"


@contextmanager
def serve() -> Iterator[str]:
    """Run a server that writes nothing to the disk."""
    with (
        tempfile.TemporaryDirectory() as directory,
        running("valkey", Path(directory), keeps=False) as server,
    ):
        yield server.url


class Bare:
    """A stream of one entry, which the server numbers; one blocking read from below the lowest step
    that is waited for.
    """

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._waits = Waits()
        self._begun = asyncio.Event()
        self._seen = 0

    async def advance(self) -> int:
        found: Any = await self._client.xadd(
            STREAM, {"s": ""}, id="1-*", maxlen=1, approximate=False
        )
        return int(found.partition(b"-")[2])

    async def wait_for(self, step: int) -> None:
        if step > self._seen:
            self._begun.set()
            await self._waits.park(step)

    async def listen(self) -> None:
        """Read for all waits of this process."""
        while True:
            await self._begun.wait()
            self._begun.clear()
            reply: Any = await self._client.xread(
                {STREAM: f"1-{min(self._waits.steps.values()) - 1}"}, block=0
            )
            self._seen = int(reply[0][1][-1][0].partition(b"-")[2])
            self._waits.wake(self._seen)


@asynccontextmanager
async def bare(url: str) -> AsyncIterator[Bare]:
    """Open it."""
    async with redis.asyncio.Redis.from_url(url, protocol=2, socket_timeout=None) as client:
        counter = Bare(client)
        listening = asyncio.ensure_future(counter.listen())
        yield counter
        listening.cancel()


ENGINE = Engine(
    title="Valkey",
    serve=serve,
    bare=bare,
    by_hand="XADD and a blocking XREAD by hand",
    one_call="one XADD",
    settled_secs=0.01,
)
