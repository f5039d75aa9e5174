"""Servers that lose their data, or are away for longer than a lease: the same laws for every engine with a server."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.errors import PublisherFailedError
from aiohooks.stores import Position, SharedStepStore, open_step_store
from aiohooks.testing import check_step_store, step_store_checks
from tests.support.redis_servers import execute
from tests.support.store_proxy import Proxy
from tests.support.store_servers import Server, first_stream, running
from tests.support.waiting import elapse, parked_waits, until_true

KINDS = ("valkey", "redis", "nats")
LEASE_SECS = 0.6

# For tests that wait for leases: the laws of the contract run on both loops.
one_loop = pytest.mark.asyncio(loop_factories=["uvloop"])


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """A kind of server; each test runs one of its own, which keeps its data on the disk."""
    return str(request.param)


@pytest.fixture(autouse=True)
async def _stream() -> None:
    await first_stream()


def store_of(server: Server, port: int | None = None, **options: Any) -> SharedStepStore:
    """Return a store with short times."""
    url = server.url.replace(str(server.port), str(port or server.port))
    store = open_step_store(url, **{"run": "r", "heartbeat": 0.5, "lease_secs": LEASE_SECS, **options})
    assert isinstance(store, SharedStepStore)
    return store


async def restart_without_data(server: Server) -> None:
    await asyncio.to_thread(server.kill)
    server.lose_data()
    await asyncio.to_thread(server.start)


async def flush_all(server: Server) -> None:
    await execute(server, "FLUSHALL")


@pytest.mark.slow
@pytest.mark.parametrize("lose", [restart_without_data, flush_all])
@pytest.mark.parametrize("check", step_store_checks(lose_data=True))
async def test_contract_without_its_data(
    kind: str, tmp_path: Path, check: str, lose: Callable[[Server], Awaitable[None]]
) -> None:
    """The checks of a step store for an engine that loses its data: with its process, or while its connections stay."""
    if lose is flush_all and kind == "nats":
        pytest.skip("only of Redis and Valkey")
    with running(kind, tmp_path) as server:
        await check_step_store(lambda run: store_of(server, run=run, lease_secs=5.0), check, lose_data=lambda: lose(server))


async def test_a_write_that_another_process_has_seen_counts_once(kind: str, tmp_path: Path) -> None:
    """A write is applied, its answer lost, and then the server's data; another process has seen the step: it counts once."""
    with running(kind, tmp_path) as server:
        async with Proxy.to(server.port) as proxy, store_of(server, proxy.port) as a, store_of(server) as b:
            assert await a.advance(5) == 5
            seen = asyncio.ensure_future(b.wait_for(6))
            await b.value()
            proxy.refuses = True
            proxy.drop_answer(b"AIOHOOKS.run.r" if server.kind == "nats" else b"\r\nwrite\r\n")
            sixth = asyncio.ensure_future(a.advance())
            assert await seen == 6
            await restart_without_data(server)
            assert await b.value() == Position(1, 6)
            assert not sixth.done()
            proxy.heal()
            assert await sixth == 6
            assert await b.value() == Position(1, 6)


async def test_a_write_that_a_process_has_found_when_it_came_counts_once(kind: str, tmp_path: Path) -> None:
    """Only a process that has opened its store after the write is left to give the run back: it knows the answer as well."""
    with running(kind, tmp_path) as server:
        async with Proxy.to(server.port) as proxy, store_of(server, proxy.port) as a:
            assert await a.advance(5) == 5
            proxy.refuses = True
            proxy.drop_answer(b"AIOHOOKS.run.r" if server.kind == "nats" else b"\r\nwrite\r\n")
            sixth = asyncio.ensure_future(a.advance())
            async with store_of(server) as first:
                assert await first.wait_for(6) == 6
            async with store_of(server) as late:
                (seventh,) = await parked_waits(late, 7)
                await until_true(lambda: late.latest == Position(1, 6))
                await restart_without_data(server)
                assert await late.value() == Position(1, 6)
                assert not sixth.done()
                proxy.heal()
                assert await sixth == 6
                assert await late.value() == Position(1, 6)
                await a.advance()
                assert await seventh == 7


@pytest.mark.slow
@one_loop
async def test_a_server_that_comes_back_with_an_older_copy_of_its_data(kind: str, tmp_path: Path) -> None:
    """What it has lost of the run is given back: the step, and how the last trainer left, which is no exit from before."""
    with running(kind, tmp_path) as server:
        async with store_of(server, lease_secs=5.0) as a, store_of(server, lease_secs=5.0) as b:
            a.publisher("first").close()
            assert await a.advance(5) == 5
            await a.flush()
            await asyncio.to_thread(server.kill)
            copy = await asyncio.to_thread(shutil.copytree, server.data, tmp_path / "copy")
            await asyncio.to_thread(server.start)
            early, late = a.publisher("early"), a.publisher("late")
            await a.flush()
            (waiting,) = await parked_waits(b, 20)
            early.close()
            assert await a.advance(5) == 10
            await b.wait_for(10)
            await a.flush()
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(shutil.rmtree, server.data)
            await asyncio.to_thread(shutil.copytree, copy, server.data)
            await asyncio.to_thread(server.start)
            assert (await b.value()).step == 10
            late.close(ZeroDivisionError("a bad batch"))
            with pytest.raises(PublisherFailedError, match="late") as raised:
                await waiting
            assert "a bad batch" in str(raised.value.__cause__)


@pytest.mark.slow
@one_loop
@pytest.mark.parametrize("behind", [0, 2])
async def test_a_failover_by_hand(tmp_path: Path, behind: int) -> None:
    """The replica takes over behind the same address: it gets the steps that it missed, and no wait and no write is lost."""
    for name in ("master", "replica"):
        (tmp_path / name).mkdir()
    with running("valkey", tmp_path / "master") as master, running("valkey", tmp_path / "replica") as replica:
        await execute(replica, "REPLICAOF", "127.0.0.1", master.port)
        async with (
            Proxy.to(master.port) as address,
            store_of(master, address.port) as trainer,
            store_of(master, address.port) as waiter,
        ):
            with trainer.publisher("trainer"):
                assert await trainer.advance(5) == 5
                assert await execute(master, "WAIT", 1, 0) == 1
                (waiting,) = await parked_waits(waiter, 6 + behind)
                if behind:
                    await execute(replica, "REPLICAOF", "NO", "ONE")
                    assert await trainer.advance(behind) == 5 + behind
                    await waiter.wait_for(5 + behind)
                await asyncio.to_thread(master.kill)
                address.target = replica.port
                await execute(replica, "REPLICAOF", "NO", "ONE")
                assert await trainer.advance() == 6 + behind
                assert await waiting == 6 + behind
                assert (await waiter.value()).step == 6 + behind


@asynccontextmanager
async def killed(server: Server) -> AsyncGenerator[None]:
    """The server is away for the block: its process is gone."""
    await asyncio.to_thread(server.kill)
    yield
    await asyncio.to_thread(server.start)


@asynccontextmanager
async def stopped(server: Server) -> AsyncGenerator[None]:
    """The server is away for the block: its process is stopped, its connections stay."""
    server.pause()
    yield
    server.resume()


@asynccontextmanager
async def replica(server: Server) -> AsyncGenerator[None]:
    """The server accepts no writes for the block, though it answers reads: it is a replica."""
    await execute(server, "REPLICAOF", "127.0.0.1", "1")
    yield
    await execute(server, "REPLICAOF", "NO", "ONE")


@asynccontextmanager
async def full(server: Server) -> AsyncGenerator[None]:
    """The server accepts no writes for the block, though it answers reads: its memory is full."""
    await execute(server, "CONFIG", "SET", "maxmemory", "1")
    yield
    await execute(server, "CONFIG", "SET", "maxmemory", "0")


@pytest.mark.slow
@one_loop
@pytest.mark.parametrize("away", [killed, stopped, replica, full])
async def test_an_outage_longer_than_a_lease(kind: str, tmp_path: Path, away: Callable[[Server], Any]) -> None:
    """No lease runs out while it could not be renewed: the waiter waits on, the chief leads on, and the standby does not."""
    if away in (replica, full) and kind == "nats":
        pytest.skip("only of Redis and Valkey")
    with running(kind, tmp_path) as server:
        async with store_of(server) as chief, store_of(server) as standby, store_of(server) as waiter:
            async with chief.lead() as first:
                trainer = chief.publisher("trainer")
                with chief.publisher("warm-up"):
                    await chief.advance()
                await chief.flush()
                takes = asyncio.ensure_future(standby.lead().__aenter__())
                wait = asyncio.ensure_future(waiter.wait_for(3))
                await waiter.wait_for(1)
                async with away(server):
                    await elapse(4 * LEASE_SECS)  # how long it is away is part of the law
                assert await chief.advance() == 2
                await waiter.wait_for(2)
                # Longer than a lease: whoever is taken for dead would be removed by now.
                await elapse(3 * LEASE_SECS)
                assert not takes.done()
                assert not wait.done()
                assert await chief.advance() == 3
                assert await wait == 3
                trainer.close()
            assert (await takes).number > first.number


async def test_a_publisher_that_dies_during_an_outage_is_found(kind: str, tmp_path: Path) -> None:
    """After an outage every member is announced again; one that is not is found dead after its lease."""
    with running(kind, tmp_path) as server:
        async with Proxy.to(server.port) as proxy, store_of(server) as waiter:
            dead = store_of(server, proxy.port)
            await dead.value()
            dead.publisher("trainer")
            await dead.advance()
            await dead.flush()
            wait = asyncio.ensure_future(waiter.wait_for(3))
            await waiter.wait_for(1)
            proxy.cut()
            await restart_without_data(server)
            with pytest.raises(ah.PublisherFailedError, match="trainer failed at step 1, wanted 3"):
                await wait
            proxy.heal()
            await dead.aclose()


@pytest.mark.parametrize("when", ["while it is open", "while it is opened"])
async def test_the_error_of_a_lost_connection_is_retrieved(
    kind: str, tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The streams of a connection leave nothing that the loop logs, even where they are freed as parts of a cycle."""
    # It would retrieve the error, but the garbage collector may free the future first.
    monkeypatch.delattr(asyncio.StreamReaderProtocol, "__del__")
    with running(kind, tmp_path) as server:
        async with Proxy.to(server.port) as proxy, store_of(server, proxy.port, lease_secs=5.0) as store:
            if when == "while it is open":
                await store.advance()
            else:
                proxy.refuses = True
            waiting = asyncio.ensure_future(store.wait_for(2))
            accepted = proxy.accepted
            proxy.cut()
            await until_true(lambda: proxy.accepted > accepted)
            proxy.heal()
            while (await store.value()).step < 2:
                await store.advance()
            assert await waiting == 2
