"""NATS: its client by hand, with a message for each step and an ordered consumer."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from nats.aio.client import Client
from nats.js.api import DeliverPolicy, StreamConfig
from nats.js.client import JetStreamContext

from tests.benchmarks.store_engine import Engine, Waits
from tests.support.store_servers import running


@contextmanager
def serve() -> Iterator[str]:
    """A server with JetStream; its streams are on the disk."""
    with tempfile.TemporaryDirectory() as directory, running("nats", Path(directory)) as server:
        yield server.url


class Bare:
    """The newest message of a stream is the step, which its one publisher counts; an ordered consumer in each waiting process."""

    def __init__(self, stream: JetStreamContext) -> None:
        self._stream = stream
        self._waits = Waits()
        self._seen = 0
        self._listening: asyncio.Future[None] | None = None

    async def advance(self) -> int:
        self._seen += 1
        await self._stream.publish("bare.step", b"%d" % self._seen)
        return self._seen

    async def wait_for(self, step: int) -> None:
        if self._listening is None:
            subscription = await self._stream.subscribe(
                "bare.step", ordered_consumer=True, deliver_policy=DeliverPolicy.LAST_PER_SUBJECT
            )
            self._listening = asyncio.ensure_future(self._listen(subscription))
        if step > self._seen:
            await self._waits.park(step)

    async def _listen(self, subscription: JetStreamContext.PushSubscription) -> None:
        async for message in subscription.messages:
            self._seen = int(message.data)
            self._waits.wake(self._seen)

    def stop(self) -> None:
        """Stop listening."""
        if self._listening is not None:
            self._listening.cancel()


class Sum:
    """The server counts, so that many callers may add at the same time; servers from 2.12 on can."""

    def __init__(self, stream: JetStreamContext) -> None:
        self._stream = stream

    async def advance(self) -> int:
        answer = await self._stream.publish("sum.step", b"", headers={"Nats-Incr": "1"})
        return int(answer.val or 0)

    async def wait_for(self, step: int) -> None:
        raise NotImplementedError


@asynccontextmanager
async def _stream(url: str, config: StreamConfig) -> AsyncIterator[JetStreamContext]:
    client = Client()
    await client.connect(url)
    stream = client.jetstream()
    await stream.add_stream(config)  # does nothing if there is one like it
    try:
        yield stream
    finally:
        await client.close()


@asynccontextmanager
async def bare(url: str) -> AsyncIterator[Bare]:
    """Open the one that can also be waited for."""
    async with _stream(url, StreamConfig(name="bare", subjects=["bare.*"], max_msgs_per_subject=1)) as stream:
        counter = Bare(stream)
        yield counter
        counter.stop()


@asynccontextmanager
async def add(url: str) -> AsyncIterator[Sum]:
    """Open the one for many callers."""
    async with _stream(url, StreamConfig(name="sum", subjects=["sum.*"], allow_msg_counter=True)) as stream:
        yield Sum(stream)


ENGINE = Engine(
    title="NATS",
    serve=serve,
    bare=bare,
    by_hand="publish and an ordered consumer by hand",
    one_call="one publish to a JetStream counter",
    add=add,
)

if __name__ == "__main__":
    from tests.benchmarks.__main__ import main

    sys.exit(main(["--rows", "nats", *sys.argv[1:]]))
