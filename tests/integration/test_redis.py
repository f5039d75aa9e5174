"""The Redis store on real servers: its addresses, the commands it sends, and its keys.

What all engines with a server promise is in `test_store_servers.py`.
"""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from aiohooks.errors import InvalidArgumentError
from aiohooks.stores import SharedStepStore
from aiohooks.stores.redis import RedisEngine
from aiohooks.testing.step_store import check_step_store
from tests.support.redis_servers import KINDS, execute
from tests.support.redis_servers import server as server
from tests.support.store_proxy import Proxy
from tests.support.store_servers import Server, running
from tests.support.stores import shared_store
from tests.support.waiting import parked_wait

pytestmark = pytest.mark.usefixtures("streams")


@pytest.mark.parametrize("protocol", [2, 3])
async def test_contract_in_both_protocols(server: Server, protocol: int) -> None:
    """Replies that have another shape in RESP3 are read."""
    for check in ("wakes", "resets", "ends_with_the_last_publisher", "leads"):
        await check_step_store(
            lambda run: shared_store(f"{server.url}?protocol={protocol}", run=run), check
        )


@pytest.mark.parametrize("kind", KINDS)
async def test_unix_socket_and_database(kind: str, tmp_path: Path) -> None:
    """A server is reached through a socket file as well; the number of a database may follow the
    address.
    """
    socket = tmp_path / f"{kind}.sock"
    with running(kind, tmp_path, ["--unixsocket", str(socket)], keeps=False) as server:
        await check_step_store(lambda run: shared_store(f"unix://{socket}", run=run), "wakes")
        await check_step_store(lambda run: shared_store(f"{server.url}/3", run=run), "wakes")


async def test_a_client_of_ones_own(server: Server) -> None:
    """A function that returns clients of redis-py takes the place of the URL."""
    new_client = functools.partial(
        redis.asyncio.Redis, port=server.port, decode_responses=True, socket_timeout=None
    )
    for check in ("wakes", "resets", "leads"):
        await check_step_store(
            lambda run: SharedStepStore(RedisEngine(client=new_client), run=run), check
        )


# The commands that it sends.


async def call_counts(server: Server) -> dict[str, int]:
    """Return how often each command was called since `CONFIG RESETSTAT`, also by scripts."""
    stats = await execute(server, "INFO", "commandstats")
    return {name.removeprefix("cmdstat_"): int(of["calls"]) for name, of in stats.items()}


async def until_blocked(server: Server, count: int) -> None:
    """Wait until this number of clients is blocked in the server."""
    while (await execute(server, "INFO", "clients"))["blocked_clients"] != count:
        pass


async def test_a_wake_costs_one_read_without_polling(server: Server, run: str) -> None:
    """With a heartbeat of an hour, ten wakes cost ten blocking reads and ten calls of the
    script.
    """
    async with (
        shared_store(server.url, run=run, heartbeat=3600) as waiting,
        shared_store(server.url, run=run, heartbeat=3600) as advancing,
    ):
        loop = asyncio.get_running_loop()
        woken = [loop.create_future() for _ in range(11)]

        async def follow() -> None:
            for step in range(1, 12):
                await waiting.wait_for(step)
                woken[step - 1].set_result(None)

        following = asyncio.create_task(follow())
        await advancing.advance()
        await woken[0]
        await until_blocked(server, 2)
        await execute(server, "CONFIG", "RESETSTAT")
        for future in woken[1:]:
            await advancing.advance()
            await future
        await following
        await until_blocked(server, 2)
        counts = await call_counts(server)
    assert counts["evalsha"] == 10
    # The last one is the current blocking read.
    assert counts["xread"] == 10
    assert counts["xadd"] == 10


async def test_many_waiters_are_one_blocked_client(server: Server, run: str) -> None:
    """A thousand waiters of a process are one blocked client and two connections; closing leaves
    none.
    """
    before = len(await execute(server, "CLIENT LIST"))
    async with shared_store(server.url, run=run) as store:
        waits = [await parked_wait(store, step) for step in range(1, 1_001)]
        await until_blocked(server, 1)
        assert len(await execute(server, "CLIENT LIST")) == before + 2
        assert await store.advance(1_000) == 1_000
        assert await asyncio.gather(*waits) == [1_000] * 1_000
    while len(await execute(server, "CLIENT LIST")) != before:
        pass


async def test_a_wait_for_a_lower_step_ends_the_blocking_read(server: Server, run: str) -> None:
    """A waiter for a lower step than that of the blocking read is woken long before the
    heartbeat.
    """
    async with (
        shared_store(server.url, run=run, heartbeat=3600) as waiting,
        shared_store(server.url, run=run, heartbeat=3600) as advancing,
    ):
        tasks = []
        for step in (1_000, 50, 7, 3):
            await until_blocked(server, 2)
            tasks.append(await parked_wait(waiting, step))
        await advancing.advance(3)
        assert await tasks.pop() == 3
        await advancing.advance(997)
        assert await asyncio.gather(*tasks) == [1_000] * 3


async def test_a_cancelled_call_leaves_the_connection_to_the_others(
    server: Server, run: str
) -> None:
    """A reply without a caller is read, and the next caller gets its own."""
    async with (
        Proxy.to(server.port) as proxy,
        shared_store(f"redis://127.0.0.1:{proxy.port}", run=run) as store,
    ):
        for number in range(20):
            calls = [
                asyncio.create_task(call)
                for call in (store.value(), store.advance(), store.value(), store.raise_to(2))
            ]
            for _ in range(number % 5):
                await asyncio.sleep(0)
            for call in calls[::2]:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        assert (await store.value()).step == 21


async def test_without_the_right_to_end_its_own_read(server: Server, run: str) -> None:
    """The connection is replaced: slower, but the waiter for a lower step is woken."""
    await execute(server, "ACL", "SETUSER", "slow", "on", ">p", "~aiohooks:*", "+@all", "-pexpire")
    async with (
        shared_store(server.url.replace("//", "//slow:p@"), run=run, heartbeat=3600) as store,
        shared_store(server.url, run=run) as other,
    ):
        await until_blocked(server, 2)
        wait = await parked_wait(store, 3)
        await other.advance(3)
        assert await wait == 3


# Arguments.


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("redis://localhost?nonsense=1", {}, "nonsense"),
        ("redis://localhost?protocol=4", {}, "protocol"),
        ("redis://localhost:port", {}, "redis://host:6379"),
        ("redis://localhost", {"client": object}, "client= takes the place of the URL"),
        ("redis://localhost", {"answer_timeout": 0}, "answer_timeout is 0"),
        ("redis://localhost", {"heartbeat": -1}, "heartbeat is -1"),
        ("rediss://localhost", {"ssl_ca_certs": "/nowhere/ca.crt"}, "No such file"),
    ],
)
def test_invalid_arguments(url: Any, options: dict[str, Any], said: str) -> None:
    """They are refused when the store is created, with what to give instead."""
    with pytest.raises(InvalidArgumentError, match=said):
        shared_store(url, **options)


def test_a_password_is_not_shown() -> None:
    """Neither the store's text nor an error about its URL contains the password."""
    assert "secret" not in repr(shared_store("redis://user:secret@localhost"))
    with pytest.raises(InvalidArgumentError) as raised:
        shared_store("redis://user:secret@localhost?nonsense=1")
    assert "secret" not in str(raised.value)
