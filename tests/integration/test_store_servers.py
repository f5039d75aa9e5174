"""The laws of every engine with a server, on real ones: the contract, the loss of the data, what is
left behind, a server that is not there yet.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aiohooks.errors import StoreUnavailableError
from aiohooks.stores import Position, SharedStepStore, open_step_store
from aiohooks.testing import check_step_store, step_store_checks
from tests.support.losses import LOSSES, check_loss
from tests.support.redis_servers import KINDS, execute
from tests.support.redis_servers import server as server
from tests.support.store_servers import Server, free_port, restart_without_data, running
from tests.support.waiting import HANG_SECS, parked

pytestmark = pytest.mark.usefixtures("streams")


@pytest.fixture(params=KINDS)
def own_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A server to be killed."""
    with running(request.param, tmp_path) as started:
        yield started


def store_of(server: Server, **options: Any) -> SharedStepStore:
    """Return a store with short times between heartbeats."""
    defaults = {"run": "r", "heartbeat": 0.5, "lease_secs": HANG_SECS}
    store = open_step_store(server.url, **{**defaults, **options})
    assert isinstance(store, SharedStepStore)
    return store


async def contents(server: Server) -> Any:
    """Return the keys in a server, and how many clients it has."""
    return sorted(await execute(server, "KEYS", "*")), len(await execute(server, "CLIENT LIST"))


@pytest.mark.parametrize("check", step_store_checks())
async def test_contract(server: Server, check: str) -> None:
    """Every check of a step store passes."""
    await check_step_store(lambda run: open_step_store(server.url, run=run), check)


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


# Servers that are not there. `tests.fuzz.store_faults` takes them away while stores are open.


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
