"""The laws of every engine with a server, on real ones: the contract, what is left behind, broken
connections, outages.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.errors import (
    StopRequestedError,
    StoreClosedError,
    StoreResetError,
    StoreUnavailableError,
)
from aiohooks.stores import Position, SharedStepStore, open_step_store
from aiohooks.testing import check_step_store, step_store_checks
from tests.support.losses import LOSSES, check_loss
from tests.support.redis_servers import KINDS, execute
from tests.support.store_proxy import FAULTS, Proxy
from tests.support.store_servers import Server, free_port, running
from tests.support.waiting import HANG_SECS, parked, parked_wait, ticks

pytestmark = pytest.mark.usefixtures("streams")


@pytest.fixture(scope="module", params=KINDS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server for the tests that leave it running."""
    with running(request.param, tmp_path_factory.mktemp(request.param)) as one:
        yield one


@pytest.fixture(params=KINDS)
def own_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A server to be killed."""
    with running(request.param, tmp_path) as one:
        yield one


def store_of(server: Server, port: int | None = None, **options: Any) -> SharedStepStore:
    """Return a store with short times."""
    url = server.url.replace(str(server.port), str(port or server.port))
    store = open_step_store(
        url, **{"run": "r", "heartbeat": 0.5, "lease_secs": HANG_SECS, **options}
    )
    assert isinstance(store, SharedStepStore)
    return store


async def contents(server: Server) -> Any:
    """Return the keys in a server, and how many clients it has."""
    return sorted(await execute(server, "KEYS", "*")), len(await execute(server, "CLIENT LIST"))


@pytest.mark.parametrize("check", step_store_checks())
async def test_contract(server: Server, check: str) -> None:
    """Every check of a step store passes."""
    await check_step_store(lambda run: open_step_store(server.url, run=run), check)


async def restart_without_data(server: Server) -> None:
    await asyncio.to_thread(server.kill)
    server.lose_data()
    await asyncio.to_thread(server.start)


async def flush_all(server: Server) -> None:
    await execute(server, "FLUSHALL")


@pytest.mark.sample
@pytest.mark.slow
@pytest.mark.parametrize("lose", [restart_without_data, flush_all])
@pytest.mark.parametrize("check", LOSSES)
async def test_contract_without_its_data(
    own_server: Server, check: str, lose: Callable[[Server], Awaitable[None]]
) -> None:
    """The checks of a step store for an engine that loses its data: with its process, or while its
    connections stay.
    """
    # What has left before the loss, its leases must end.
    make = functools.partial(store_of, own_server, lease_secs=5.0)
    await check_loss(lambda run: make(run=run), check, lambda: lose(own_server))
    await asyncio.to_thread(own_server.kill)


async def test_it_is_opened_by_its_url(server: Server, run: str) -> None:
    """`open_step_store` knows the scheme; a forgotten run leaves nothing."""
    async with store_of(server, run=f"{run} before") as store:
        await store.advance()
    before = await contents(server)
    async with store_of(server, run=run) as store:
        assert isinstance(store, SharedStepStore)
        with store.publisher("trainer"):
            assert await store.advance(2) == 2
            assert await store.value() == Position(1, 2)
        await store.flush()
        await store.forget()
    assert await contents(server) == before


async def test_runs_of_strange_names_never_meet(server: Server) -> None:
    """Each run has its own place, whatever characters are in its name."""
    names = ["a.b", "a b", "a%2Eb", "a*b", "a>b", "*", ">", "ä", "a/b", "{a}", "a}b"]
    for count, run in enumerate(names, 1):
        async with store_of(server, run=run) as store:
            assert await store.advance(count) == count
    for count, run in enumerate(names, 1):
        async with store_of(server, run=run) as store:
            assert (await store.value()).step == count
            await store.forget()


# Broken connections and servers that are away. `tests.fuzz.store_faults` has many more of them.


async def test_a_lost_answer_is_not_counted_twice(server: Server, run: str) -> None:
    """The server has applied a request, and the answer is lost: the repeated request is not applied
    again.
    """
    async with Proxy.to(server.port) as proxy, store_of(server, proxy.port, run=run) as store:
        for step in range(1, 6):
            proxy.drop_answer(b"EVALSHA")
            assert await store.advance() == step
        assert proxy.lost_answers >= 5
        assert await store.value() == Position(1, 5)


async def test_a_write_whose_answer_and_data_are_lost_is_not_repeated(own_server: Server) -> None:
    """A write is applied, its answer lost, and then the server's data; another process has seen the
    step, from which the run continues.
    """
    async with (
        Proxy.to(own_server.port) as proxy,
        store_of(own_server, proxy.port) as a,
        store_of(own_server) as b,
    ):
        assert await a.advance(5) == 5
        seen = asyncio.ensure_future(b.wait_for(6))
        await b.value()
        proxy.refuses = True
        proxy.drop_answer(b"\r\nwrite ")
        sixth = asyncio.ensure_future(a.advance())
        assert await seen == 6
        await restart_without_data(own_server)
        assert await b.value() == Position(2, 6)
        assert not sixth.done()
        proxy.heal()
        with pytest.raises(StoreResetError) as raised:
            await sixth
        assert (raised.value.old, raised.value.new) == (Position(1, 5), Position(2, 6))
        a.acknowledge_loss()
        assert await a.advance() == 7
    await asyncio.to_thread(own_server.kill)


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_broken_connection_is_replaced(server: Server, fault: str, run: str) -> None:
    """A step crossed while the waiter's connection is broken wakes it when the connection is back;
    so does a call.
    """
    async with (
        Proxy.to(server.port) as proxy,
        store_of(server, proxy.port, run=run) as b,
        store_of(server, run=run) as a,
    ):
        wait = asyncio.ensure_future(b.wait_for(5))
        await a.advance(2)
        await b.wait_for(2)
        proxy.fail(fault)
        advance = asyncio.ensure_future(b.advance())
        assert await a.advance(3) in (5, 6)
        proxy.heal()
        assert await wait in (5, 6)
        assert await advance in (3, 6)


async def test_no_server() -> None:
    """The error comes within `connect_timeout`, with the address and how to start a server; its
    cause is the client's error.
    """
    port = free_port()
    store = open_step_store(f"redis://user:secret@127.0.0.1:{port}", run="r", connect_timeout=0.1)
    with pytest.raises(StoreUnavailableError) as raised:
        await store.__aenter__()
    await store.aclose()
    assert raised.value.__cause__ is not None
    text = str(raised.value)
    assert f"127.0.0.1:{port}" in text
    assert "redis-server" in text
    assert "secret" not in text


async def test_a_server_that_is_still_starting(own_server: Server) -> None:
    """The first connection is tried again until `connect_timeout`."""
    own_server.kill()
    store = store_of(own_server, connect_timeout=3600.0)
    opening = await parked(store.__aenter__())
    await asyncio.to_thread(own_server.start)
    await opening
    assert await store.advance() == 1
    await store.aclose()
    own_server.kill()


async def test_closing_while_the_server_does_not_answer(own_server: Server) -> None:
    """Closing ends, and so do all waits and calls."""
    store = store_of(own_server)
    await store.__aenter__()
    wait = await parked_wait(store, 5)
    own_server.pause()
    advance = await parked(store.advance())
    await store.aclose()
    own_server.resume()
    for call in (wait, advance):
        with pytest.raises(StoreClosedError):
            await call
    own_server.kill()


@pytest.mark.parametrize("away", [Server.kill, Server.pause])
@pytest.mark.parametrize("creator", [ah.WorkerSessionCreator, ah.ChiefSessionCreator])
async def test_a_stop_ends_the_opening_of_a_session(
    own_server: Server, away: Callable[[Server], None], creator: Any
) -> None:
    """A session that waits for its chief, or for the lead, while the server is away, does not wait
    for the server to stop.
    """
    async with store_of(own_server) as other, store_of(own_server) as store, other.lead():
        session = ah.session.AsyncSingularMonitoredSession(creator(ah.Graph(), global_step=store))
        opening = asyncio.ensure_future(session.__aenter__())
        await store.value()
        await ticks(20)
        away(own_server)
        session.request_stop("it takes too long")
        with pytest.raises(StopRequestedError):
            await opening
        await asyncio.to_thread(own_server.resume if away is Server.pause else own_server.start)
    await asyncio.to_thread(own_server.kill)


@pytest.mark.slow
@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.parametrize("behind", [0, 2])
async def test_a_failover_by_hand(tmp_path: Path, behind: int) -> None:
    """The replica takes over behind the same address: no wait and no write is lost. If it lacks
    steps, that is found, and the run continues from the latest known one.
    """
    for name in ("master", "replica"):
        (tmp_path / name).mkdir()
    with (
        running("valkey", tmp_path / "master") as master,
        running("valkey", tmp_path / "replica") as replica,
    ):
        await execute(replica, "REPLICAOF", "127.0.0.1", master.port)
        async with (
            Proxy.to(master.port) as address,
            store_of(master, address.port) as trainer,
            store_of(master, address.port) as waiter,
        ):
            with trainer.publisher("trainer"):
                assert await trainer.advance(5) == 5
                assert await execute(master, "WAIT", 1, 0) == 1
                waiting = await parked_wait(waiter, 6 + behind)
                if behind:
                    await execute(replica, "REPLICAOF", "NO", "ONE")
                    assert await trainer.advance(behind) == 5 + behind
                    await waiter.wait_for(5 + behind)
                await asyncio.to_thread(master.kill)
                address.target = replica.port
                await execute(replica, "REPLICAOF", "NO", "ONE")
                if behind:
                    with pytest.raises(StoreResetError, match=f"at step {5 + behind} of epoch 1"):
                        await trainer.advance()
                    trainer.acknowledge_loss()
                assert await trainer.advance() == 6 + behind
                assert await waiting == 6 + behind
                assert (await waiter.value()).step == 6 + behind
