"""The NATS store on a real server: the contract, what is left in the server, and broken connections."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client

from aiohooks import PublisherFailedError
from aiohooks._aio.clock import LoopClock
from aiohooks.errors import StoreRefusedError, StoreUnavailableError, WrongLoopError
from aiohooks.stores import Position, open_step_store
from aiohooks.stores.nats import NatsStepStore
from aiohooks.stores.nats._connection import NatsConnection, NoResponderError, parse_address
from aiohooks.stores.nats.store import NatsEngine, RunSubjects
from aiohooks.testing import check_step_store, step_store_checks
from tests.support.source import ROOT
from tests.support.store_proxy import FAULTS, Proxy
from tests.support.store_servers import Server, first_stream, running
from tests.support.waiting import HANG_SECS, parked_waits, until_true

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


@pytest.fixture(autouse=True)
async def _stream() -> None:
    await first_stream()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """A server to be killed."""
    with running("nats", tmp_path) as one:
        yield one


def store_of(port: int, **options: Any) -> NatsStepStore:
    """Return a store with short times."""
    return NatsStepStore(f"nats://127.0.0.1:{port}", **{"heartbeat": 0.5, "lease_secs": 2.0, **options})


async def request_api(server: Server, what: str, body: Any = None) -> Any:
    """Return the server's reply to a request of JetStream's API."""
    client = Client()
    await client.connect(server.url)
    reply = await client.request(f"$JS.API.{what}", json.dumps(body or {}).encode(), timeout=HANG_SECS)
    await client.close()
    return json.loads(reply.data)


@pytest.mark.parametrize("check", step_store_checks())
async def test_contract(server: Server, check: str, name: str) -> None:
    """Every check of a step store passes."""
    await check_step_store(lambda run: NatsStepStore(server.url, run=run, stream=name), check)


async def test_it_is_opened_by_its_url(server: Server, name: str) -> None:
    """`open_step_store` creates it, with its options."""
    store = open_step_store(server.url, run=name, stream=name)
    assert isinstance(store, NatsStepStore)
    async with store:
        assert await store.advance(3) == 3


async def test_a_look_from_outside_leaves_no_trace(server: Server, name: str) -> None:
    """`inspect` makes no stream where there is none, and writes no message."""
    async with contextlib.aclosing(NatsStepStore(server.url, run=name, stream=name)) as outside:
        assert await outside.inspect() is None
        assert "error" in await request_api(server, f"STREAM.INFO.{name}")
        async with NatsStepStore(server.url, run=name, stream=name) as store:
            assert await outside.inspect() is None
            await store.advance(2)
            before = (await request_api(server, f"STREAM.INFO.{name}"))["state"]
            found = await outside.inspect()
            assert found is not None
            assert (found.step, found.waiting) == (2, None)
            assert (await request_api(server, f"STREAM.INFO.{name}"))["state"] == before


async def test_runs_of_strange_names_never_meet(server: Server, name: str) -> None:
    """Each run has its own subject, whatever characters are in its name."""
    names = ["a.b", "a b", "a%2Eb", "a*b", "a>b", "*", ">", "ä", "a/b"]
    for count, run in enumerate(names, 1):
        async with store_of(server.port, run=run, stream=name) as store:
            assert await store.advance(count) == count
    for count, run in enumerate(names, 1):
        async with store_of(server.port, run=run, stream=name) as store:
            assert (await store.value()).step == count


async def test_nothing_is_left_in_the_server(server: Server, name: str) -> None:
    """Waiters cost the server nothing: no consumer, and no connection or subscription once the stores are closed."""
    stores = [store_of(server.port, run=name, stream=name) for _ in range(3)]
    for store in stores:
        await store.__aenter__()
    waits = [asyncio.ensure_future(store.wait_for(5)) for store in stores for _ in range(20)]
    await stores[0].advance(2)
    info = await request_api(server, f"STREAM.INFO.{name}")
    assert info["state"]["consumer_count"] == 0
    assert info["state"]["messages"] == 1
    await stores[1].advance(3)
    assert await asyncio.gather(*waits) == [5] * 60
    for store in stores:
        await store.aclose()
    info = await request_api(server, f"STREAM.INFO.{name}")
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
            wait = asyncio.ensure_future(b.wait_for(step))
            await asyncio.sleep(0)
            await a.advance()
            assert await wait == step
        assert stats["out_msgs"] - sent == 0
        assert stats["in_msgs"] - got == 20


async def test_concurrent_advances_are_one_message(server: Server, name: str) -> None:
    """A hundred simultaneous advances of a process cost two messages, not a hundred."""
    async with store_of(server.port, run=name, stream=name) as store:
        await store.advance()
        before = (await request_api(server, f"STREAM.INFO.{name}"))["state"]["last_seq"]
        steps = await asyncio.gather(*(store.advance() for _ in range(100)))
        assert sorted(steps) == list(range(2, 102))
        after = (await request_api(server, f"STREAM.INFO.{name}"))["state"]["last_seq"]
        assert after - before <= 2


async def test_it_survives_a_killed_server(own_server: Server) -> None:
    """The server is killed and comes back with its data: waits continue, writes are repeated, each counts once."""
    async with store_of(own_server.port) as a, store_of(own_server.port) as b:
        wait = asyncio.ensure_future(b.wait_for(20))
        await a.advance(10)
        own_server.kill()
        advances = [asyncio.ensure_future(a.advance()) for _ in range(10)]
        await asyncio.to_thread(own_server.start)
        assert sorted(await asyncio.gather(*advances)) == list(range(11, 21))
        assert await wait == 20
        assert await b.value() == Position(1, 20)
    own_server.kill()


async def test_a_server_without_its_data_is_raised(own_server: Server) -> None:
    """The server comes back empty: the step jumps to what the stores have seen, and members are announced again."""
    async with store_of(own_server.port) as a, store_of(own_server.port) as b:
        wait = asyncio.ensure_future(b.wait_for(20))
        with a.publisher("trainer"):
            await a.advance(15)
            own_server.kill()
            own_server.lose_data()
            await asyncio.to_thread(own_server.start)
            assert await a.advance(5) == 20
            assert await wait == 20
            await a.flush()
            await b.value()
            assert "trainer" in b.statistics().publishers
    own_server.kill()


async def test_a_lost_answer_is_not_counted_twice(server: Server, name: str) -> None:
    """The server has applied a request, and the answer is lost: the repeated request is not applied again."""
    async with Proxy.to(server.port) as proxy, store_of(proxy.port, run=name) as store:
        for count in range(1, 6):
            proxy.drop_answer(f"run.{name}".encode())
            assert await store.advance() == count
        assert proxy.lost_answers == 5
        assert (await store.value()).step == 5


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_broken_connection_is_replaced(server: Server, fault: str, name: str) -> None:
    """A step crossed while the waiter's connection is broken, in three ways, wakes it when the connection is back."""
    async with Proxy.to(server.port) as proxy, store_of(proxy.port, run=name) as b, store_of(server.port, run=name) as a:
        wait = asyncio.ensure_future(b.wait_for(5))
        await a.advance(2)
        await b.wait_for(2)
        proxy.fail(fault)
        await a.advance(3)
        proxy.heal()
        assert await wait == 5


async def test_a_deleted_stream_is_made_again(server: Server, name: str) -> None:
    """The stream is deleted while stores use it: they notice, create it again, and raise the step."""
    async with store_of(server.port, stream=name) as a, store_of(server.port, stream=name) as b:
        await a.advance(7)
        await b.wait_for(7)
        wait = asyncio.ensure_future(b.wait_for(9))
        assert (await request_api(server, f"STREAM.DELETE.{name}"))["success"]
        assert await a.advance(2) == 9
        assert await wait == 9


async def test_a_dead_process_is_found_by_its_lease(server: Server, name: str) -> None:
    """A publisher killed by SIGKILL is found within its lease time, and waiters are notified."""
    program = f"""
        import asyncio
        from aiohooks.stores import open_step_store
        async def main():
            async with open_step_store({server.url!r}, run={name!r}, lease_secs=1.0) as store:
                store.publisher("the trainer")
                await store.flush()
                print("ready", flush=True)
                await asyncio.Event().wait()
        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    process = await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    output = process.stdout
    assert output is not None
    try:
        assert await asyncio.to_thread(output.readline) == "ready\n"
        async with store_of(server.port, run=name, lease_secs=1.0) as store:
            wait = asyncio.ensure_future(store.wait_for(5))
            await asyncio.sleep(0)
            process.kill()
            with pytest.raises(PublisherFailedError, match="the trainer failed at step 0"):
                await wait
    finally:
        process.kill()
        process.wait(HANG_SECS)
        output.close()


async def test_max_outage_secs(own_server: Server) -> None:
    """A longer outage ends waits and writes with the typed error; without a server, so does opening."""
    async with store_of(own_server.port, max_outage_secs=0.3) as store:
        wait = asyncio.ensure_future(store.wait_for(5))
        await asyncio.sleep(0)
        own_server.kill()
        with pytest.raises(StoreUnavailableError, match=r"no connection for 0\.3 s"):
            await wait
        with pytest.raises(StoreUnavailableError):
            await store.advance()
    with pytest.raises(StoreUnavailableError, match=rf"nats-server -p {own_server.port} -js -sd DIR") as caught:
        await store_of(own_server.port, connect_timeout=0.2).__aenter__()
    assert caught.value.__cause__ is not None


async def test_a_forked_store_is_refused(server: Server, name: str) -> None:
    """A forked store is refused in the child, and still works in the parent."""
    async with store_of(server.port, run=name) as store:
        store._waits.forked = True
        with pytest.raises(WrongLoopError, match="open_step_store"):
            await store.advance()
        store._waits.forked = False
        assert await store.advance() == 1


# Streams and messages of others.


async def configure(server: Server, request: str, name: str, setting: dict[str, Any]) -> None:
    """Create or update a stream of step stores with another setting."""
    config = {**RunSubjects(name, "r").stream_config(1, None), **setting}
    reply = await request_api(server, f"STREAM.{request}.{name}", config)
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
    store = store_of(server.port, stream=name)
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
        (wait,) = await parked_waits(store, 9)
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
        (near,), (far,) = await parked_waits(worker, 4), await parked_waits(worker, 1000)
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
