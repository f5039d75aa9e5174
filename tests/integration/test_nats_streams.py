"""The NATS store on streams with settings of others, near the size limit of the server, and with messages of others."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from nats.aio.client import Client

from aiohooks._aio.clock import LoopClock
from aiohooks.errors import StoreRefusedError
from aiohooks.stores.nats import NatsStepStore
from aiohooks.stores.nats._connection import NatsConnection, NoResponderError, parse_address
from aiohooks.stores.nats.store import RunSubjects
from tests.support.store_servers import Server, first_stream, running
from tests.support.waiting import HANG_SECS, parked_waits, until_true

numbers = itertools.count(1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("nats")
    (folder / "nats.conf").write_text("max_payload: 4096\n", encoding="utf-8")
    with running("nats", folder, ["-c", str(folder / "nats.conf")]) as one:
        yield one


@pytest.fixture
def name() -> str:
    return f"test-{next(numbers)}"


@pytest.fixture(autouse=True)
async def _stream() -> None:
    await first_stream()


@asynccontextmanager
async def client_of(server: Server) -> AsyncIterator[Client]:
    client = Client()
    await client.connect(server.url)
    yield client
    await client.close()


async def configure(server: Server, request: str, name: str, setting: dict[str, Any]) -> None:
    """Create or update a stream of step stores with another setting."""
    config = {**RunSubjects(name, "r").stream_config(1, None), **setting}
    async with client_of(server) as client:
        reply = await client.request(f"$JS.API.STREAM.{request}.{name}", json.dumps(config).encode(), timeout=HANG_SECS)
    assert "error" not in json.loads(reply.data), reply.data


def store_of(server: Server, name: str, **options: Any) -> NatsStepStore:
    return NatsStepStore(server.url, run="r", stream=name, **options)


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


@pytest.mark.parametrize("setting", HARMFUL, ids=json.dumps)
async def test_a_setting_that_breaks_runs_is_refused(server: Server, setting: dict[str, Any], name: str) -> None:
    """A stream in which a write, a read or a deletion would fail is refused with the name of the setting."""
    await configure(server, "CREATE", name, setting)
    store = store_of(server, name)
    with pytest.raises(StoreRefusedError, match=rf"its {[*setting][-1]} is .*; take another name with stream="):
        await store.advance()
    await store.aclose()


@pytest.mark.parametrize("setting", HARMLESS, ids=json.dumps)
async def test_other_settings(server: Server, setting: dict[str, Any], name: str) -> None:
    """A stream of others that breaks nothing is used."""
    await configure(server, "CREATE", name, setting)
    async with store_of(server, name) as store:
        assert [await store.advance(), await store.advance()] == [1, 2]
        await store.forget()


@pytest.mark.parametrize("setting", [{"sealed": True}, {"max_msg_size": 100}], ids=json.dumps)
async def test_a_stream_that_is_changed_meanwhile(server: Server, setting: dict[str, Any], name: str) -> None:
    """A write that the server will never accept is refused immediately, and after reconnecting what is refused is the stream."""
    async with store_of(server, name) as store:
        assert await store.advance() == 1
        await configure(server, "UPDATE", name, setting)
        with pytest.raises(StoreRefusedError, match=r"the NATS server refuses it: .*look at the stream's settings"):
            await store.advance()
        assert (await store.value()).step == 1
        (wait,) = await parked_waits(store, 9)
        store._current_connection()._transport.abort()
        with pytest.raises(StoreRefusedError, match=f"its {next(iter(setting))} is"):
            await wait


async def test_headers_count(server: Server) -> None:
    """What the server would refuse by closing the connection is not sent; the longest message that it takes is."""
    connection = NatsConnection(parse_address(server.url), LoopClock(), {})
    await connection.open([f"127.0.0.1:{server.port}"], HANG_SECS)
    for headers, spare in ((None, 0), ({"Nats-Expected-Last-Subject-Sequence": "17"}, 53)):
        with pytest.raises(NoResponderError):
            await connection.request("no-one", b"x" * (4096 - spare), HANG_SECS, headers)
        with pytest.raises(StoreRefusedError, match=r"no message of more than 4,096 bytes .* would have 4,097"):
            await connection.request("no-one", b"x" * (4097 - spare), HANG_SECS, headers)
    await connection.ping(HANG_SECS)
    await connection.close()


@pytest.mark.parametrize("what", ["cut", "ahead", "number", "junk"])
async def test_a_message_of_others(server: Server, what: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A message where the server republishes: calls and waits continue with what the stream has, and the log says so."""
    async with client_of(server) as client, store_of(server, name) as trainer, store_of(server, name) as worker:
        await trainer.advance(3)
        (near,), (far,) = await parked_waits(worker, 4), await parked_waits(worker, 1000)
        data = (await client.jetstream().get_last_msg(name, f"{name}.run.r")).data or b""
        seq = {"cut": "2", "ahead": "1000000", "number": "x", "junk": "2"}[what]
        data = {"cut": data[:-3], "ahead": data, "number": data, "junk": b"junk"}[what]
        await client.publish(f"{name}.news.r", data, headers={"Nats-Sequence": seq})
        await client.flush()
        async with asyncio.timeout(HANG_SECS):
            assert await trainer.advance() == 4
            assert await near == 4
            assert await worker.advance() == 5
            await until_true(lambda: "ignored what others have published" in caplog.text or "is gone from" in caplog.text)
        assert not far.done()
        far.cancel()
