"""The NATS store on a real server: what it costs there, streams and messages of others, a cluster.

What all engines with a server promise is in `test_store_servers.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client

from aiohooks._aio.clock import LoopClock
from aiohooks.errors import StoreRefusedError
from aiohooks.stores.nats import NatsStepStore
from aiohooks.stores.nats._connection import NatsConnection, NoResponderError, parse_address
from aiohooks.stores.nats.store import NatsEngine, RunSubjects
from tests.support.nats_servers import request_api, running_cluster
from tests.support.store_servers import Server, running
from tests.support.waiting import HANG_SECS, parked, parked_wait, until_true

pytestmark = pytest.mark.usefixtures("streams")

numbers = itertools.count(1)


@pytest.fixture
def name() -> str:
    """A name for a run or stream of this test, on this loop."""
    return f"test-{next(numbers)}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for the tests that leave it running."""
    with running("nats", tmp_path_factory.mktemp("nats")) as one:
        yield one


def store_of(port: int, **options: Any) -> NatsStepStore:
    """Return a store with short times."""
    return NatsStepStore(f"nats://127.0.0.1:{port}", **{"heartbeat": 0.5, "lease_secs": HANG_SECS, **options})


async def test_nothing_is_left_in_the_server(server: Server, name: str) -> None:
    """Waiters cost the server nothing: no consumer, and no connection or subscription once the stores are closed."""
    stores = [store_of(server.port, run=name, stream=name) for _ in range(3)]
    for store in stores:
        await store.__aenter__()
    waits = [asyncio.ensure_future(store.wait_for(5)) for store in stores for _ in range(20)]
    await stores[0].advance(2)
    info = await request_api(server.url, f"STREAM.INFO.{name}")
    assert info["state"]["consumer_count"] == 0
    assert info["state"]["messages"] == 1
    await stores[1].advance(3)
    assert await asyncio.gather(*waits) == [5] * 60
    for store in stores:
        await store.aclose()
    info = await request_api(server.url, f"STREAM.INFO.{name}")
    assert info["state"]["consumer_count"] == 0


async def test_a_wake_is_one_message(server: Server, name: str) -> None:
    """With a heartbeat of an hour each wake costs one message, and no request."""
    async with store_of(server.port, run=name, heartbeat=3600) as a, store_of(server.port, run=name, heartbeat=3600) as b:
        engine = b._engine
        assert isinstance(engine, NatsEngine)
        connection = engine._connection
        assert connection is not None
        stats = connection._client.stats
        sent, got = stats["out_msgs"], stats["in_msgs"]
        for step in range(1, 21):
            wait = await parked(b.wait_for(step))
            await a.advance()
            assert await wait == step
        assert stats["out_msgs"] - sent == 0
        assert stats["in_msgs"] - got == 20


# Streams and messages of others.


async def configure(server: Server, request: str, name: str, setting: dict[str, Any]) -> None:
    """Create or update a stream of step stores with another setting."""
    config = {**RunSubjects(name, "r").stream_config(1, None), **setting}
    reply = await request_api(server.url, f"STREAM.{request}.{name}", config)
    assert "error" not in reply, reply


HARMFUL = [
    {"discard": "new", "discard_new_per_subject": True},
    {"discard": "new", "max_msgs": 3},
    {"max_bytes": 2048},
    {"max_msg_size": 300},
    {"max_age": 1_000_000_000},
    {"deny_purge": True},
    {"no_ack": True},
    {"allow_msg_counter": True},
    {"sources": [{"name": "OTHER"}]},
    {"max_msgs_per_subject": 2},
    {"retention": "interest"},
]
HARMLESS = [{"discard": "new"}, {"storage": "memory"}, {"deny_delete": True}, {"compression": "s2"}, {"max_age": 10_000_000_000}]


@pytest.mark.parametrize("setting", [*HARMFUL, *HARMLESS], ids=json.dumps)
async def test_a_stream_of_others(server: Server, setting: dict[str, Any], name: str) -> None:
    """What would break a write, a read or a deletion is refused with the name of the setting; other streams are used."""
    await configure(server, "CREATE", name, setting)
    store = store_of(server.port, stream=name, lease_secs=5.0)  # less than a harmless max_age
    if setting in HARMFUL:
        with pytest.raises(StoreRefusedError, match=rf"its {[*setting][-1]} is .*; take another name with stream="):
            await store.advance()
        return await store.aclose()
    assert [await store.advance(), await store.advance()] == [1, 2]
    await store.forget()


@pytest.mark.parametrize("setting", [{"sealed": True}, {"max_msg_size": 100}], ids=json.dumps)
async def test_a_stream_that_is_changed_meanwhile(server: Server, setting: dict[str, Any], name: str) -> None:
    """A write that the server will never accept is refused immediately, and after reconnecting what is refused is the stream."""
    async with store_of(server.port, stream=name) as store:
        assert await store.advance() == 1
        await configure(server, "UPDATE", name, setting)
        with pytest.raises(StoreRefusedError, match=r"the NATS server refuses it: .*look at the stream's settings"):
            await store.advance()
        assert (await store.value()).step == 1
        wait = await parked_wait(store, 9)
        engine = store._engine
        assert isinstance(engine, NatsEngine)
        engine._current_connection()._transport.abort()
        with pytest.raises(StoreRefusedError, match=f"its {next(iter(setting))} is"):
            await wait


async def test_headers_count(server: Server) -> None:
    """What the server would refuse by closing the connection is not sent; the longest message that it takes is."""
    connection = NatsConnection(parse_address(server.url), LoopClock(), {})
    await connection.open([f"127.0.0.1:{server.port}"], HANG_SECS)
    for headers, spare in ((None, 0), ({"Nats-Expected-Last-Subject-Sequence": "17"}, 53)):
        with pytest.raises(NoResponderError):
            await connection.request("no-one", b"x" * (2**20 - spare), HANG_SECS, headers)
        with pytest.raises(StoreRefusedError, match=r"no message of more than 1,048,576 bytes .* would have 1,048,577"):
            await connection.request("no-one", b"x" * (2**20 + 1 - spare), HANG_SECS, headers)
    await connection.ping(HANG_SECS)
    await connection.close()


@pytest.mark.parametrize("what", ["cut", "ahead", "number", "junk"])
async def test_a_message_of_others(server: Server, what: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A message where the server republishes: calls and waits continue with what the stream has; the log says what is ignored."""
    client = Client()
    await client.connect(server.url)
    options: dict[str, Any] = {"stream": name, "heartbeat": 600.0}
    async with store_of(server.port, **options) as trainer, store_of(server.port, **options) as worker:
        await trainer.advance(3)
        near, far = await parked_wait(worker, 4), await parked_wait(worker, 1000)
        data = (await client.jetstream().get_last_msg(name, f"{name}.run.default")).data or b""
        seq = {"cut": "2", "ahead": "1000000", "number": "x", "junk": "2"}[what]
        data = {"cut": data[:-3], "ahead": data, "number": data, "junk": b"junk"}[what]
        await client.publish(f"{name}.news.default", data, headers={"Nats-Sequence": seq})
        await client.close()
        assert await trainer.advance() == 4
        assert await near == 4
        assert await worker.advance() == 5
        if what in ("number", "junk"):  # a real message may come together with the others, and instead of them
            await until_true(lambda: "ignored what others have published" in caplog.text)
        assert not far.done()
        far.cancel()


@pytest.mark.sample
@pytest.mark.slow
async def test_the_leader_of_three_servers_is_killed(tmp_path: Path) -> None:
    """No acknowledged step is lost, each counts once, waiters are woken; the dead server comes back."""
    with running_cluster(tmp_path) as cluster:
        options: dict[str, Any] = {"replicas": 3, "lease_secs": HANG_SECS, "connect_timeout": HANG_SECS}
        async with NatsStepStore(cluster.url, **options) as a, NatsStepStore(cluster.url, **options) as b:
            for round_ in range(2):
                wait = asyncio.ensure_future(b.wait_for(30 * round_ + 30))
                assert await a.advance(10) == 30 * round_ + 10
                leader = await cluster.leader("AIOHOOKS")
                leader.kill()
                steps = [await a.advance() for _ in range(20)]
                assert steps == list(range(30 * round_ + 11, 30 * round_ + 31))
                assert await wait == 30 * round_ + 30
                await asyncio.to_thread(leader.start)
            assert (await b.value()).step == 60
