"""The Redis store against real servers: the laws of a step store, what it asks of the server, and what it leaves there."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import redis.asyncio

from aiohooks.errors import InvalidArgumentError
from aiohooks.stores import Position, StepStore, open_step_store
from aiohooks.stores.redis import RedisStepStore
from aiohooks.testing.step_store import check_step_store, step_store_checks
from tests.support.redis_servers import KINDS, server_of
from tests.support.store_proxy import Proxy
from tests.support.store_servers import Server, first_stream, running

NUMBERS = itertools.count()


@pytest.fixture(scope="module", params=KINDS or ["valkey"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from server_of(request.param, tmp_path_factory.mktemp("redis"))


@pytest.fixture
def run() -> str:
    """The name of a run that nobody has begun."""
    return f"run {next(NUMBERS)}"


@pytest.fixture(autouse=True)
async def _stream() -> None:
    await first_stream()


async def asked(server: Server, *command: str | int) -> Any:
    """What the server answers to a command that somebody else gives."""
    async with redis.asyncio.Redis(port=server.port, protocol=2, decode_responses=True) as other:
        return await cast("Any", other).execute_command(*command)


async def called(server: Server) -> dict[str, int]:
    """How often each command was called since `CONFIG RESETSTAT`, also by scripts."""
    stats = await asked(server, "INFO", "commandstats")
    return {name.removeprefix("cmdstat_"): int(of["calls"]) for name, of in stats.items()}


async def parked(store: StepStore, step: int, count: int = 1) -> list[asyncio.Task[int]]:
    """So many tasks that wait for a step."""
    before = store.statistics().waiting
    tasks = [asyncio.create_task(store.wait_for(step)) for _ in range(count)]
    while store.statistics().waiting < before + count:  # noqa: ASYNC110 - a store has no event for this
        await asyncio.sleep(0)
    return tasks


async def blocked(server: Server, count: int) -> None:
    """Until so many clients block."""
    while (await asked(server, "INFO", "clients"))["blocked_clients"] != count:
        pass


@pytest.mark.parametrize("law", step_store_checks())
async def test_it_keeps_the_laws(server: Server, law: str) -> None:
    """Every law of a step store."""
    await check_step_store(lambda run: RedisStepStore(server.url, run=run), law)


@pytest.mark.parametrize("protocol", [2, 3])
async def test_it_keeps_the_laws_in_both_protocols(server: Server, protocol: int) -> None:
    """In RESP3 some answers have another shape."""
    for law in ("wakes", "resets", "tells_who_finished", "leads"):
        await check_step_store(lambda run: RedisStepStore(f"{server.url}?protocol={protocol}", run=run), law)


async def test_it_is_opened_by_its_url(server: Server, run: str) -> None:
    """`open_step_store` knows the scheme; the number of a database may follow the address."""
    async with open_step_store(f"{server.url}/3", run=run) as store:
        assert isinstance(store, RedisStepStore)
        assert await store.advance(2) == 2
        assert await store.value() == Position(1, 2)
        await store.forget()
    assert not await asked(server, "KEYS", f"aiohooks:{{{run}}}*")


async def test_through_a_socket_in_the_file_system(tmp_path: Path) -> None:
    """A server of this machine may be reached without a port."""
    """A server is reached through a socket file as well."""
    for kind in KINDS:
        socket = tmp_path / f"{kind}.sock"
        with running(kind, tmp_path, ["--unixsocket", str(socket)], keeps=False):
            await check_step_store(lambda run, at=socket: RedisStepStore(f"unix://{at}", run=run), "wakes")  # type: ignore[misc]


# What it asks of the server.


async def test_a_wake_costs_one_read_and_no_poll(server: Server, run: str) -> None:
    """With an hour between heartbeats wakes still come: for ten of them ten blocking reads, and ten calls of the script."""
    async with (
        RedisStepStore(server.url, run=run, heartbeat=3600) as waiting,
        RedisStepStore(server.url, run=run, heartbeat=3600) as advancing,
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
        await blocked(server, 2)
        await asked(server, "CONFIG", "RESETSTAT")
        for future in woken[1:]:
            await advancing.advance()
            await future
        await following
        await blocked(server, 2)
        counts = await called(server)
    assert counts["evalsha"] == 10
    # The last one is the read that blocks now.
    assert counts["xread"] == 10
    assert counts["xadd"] == 10


async def test_one_wait_in_the_server_however_many_here(server: Server, run: str) -> None:
    """A thousand waiters in a process are one blocked client, and two connections; closing leaves none."""
    before = len(await asked(server, "CLIENT LIST"))
    async with RedisStepStore(server.url, run=run) as store:
        waits = [task for step in range(1, 1_001) for task in await parked(store, step)]
        await blocked(server, 1)
        assert len(await asked(server, "CLIENT LIST")) == before + 2
        assert await store.advance(1_000) == 1_000
        assert await asyncio.gather(*waits) == [1_000] * 1_000
    while len(await asked(server, "CLIENT LIST")) != before:
        pass


async def test_a_lower_step_is_listened_for_at_once(server: Server, run: str) -> None:
    """A waiter for a lower step than the blocking read waits for is woken all the same, long before the heartbeat."""
    async with (
        RedisStepStore(server.url, run=run, heartbeat=3600) as waiting,
        RedisStepStore(server.url, run=run, heartbeat=3600) as advancing,
    ):
        tasks = []
        for step in (1_000, 50, 7, 3):
            await blocked(server, 2)
            tasks += await parked(waiting, step)
        await advancing.advance(3)
        assert await tasks.pop() == 3
        await advancing.advance(997)
        assert await asyncio.gather(*tasks) == [1_000] * 3


async def test_no_wake_is_lost_between_many_that_come_and_go(server: Server, run: str) -> None:
    """Waits begin, are cancelled and end in any order while others advance; nobody stays."""
    chance = random.Random(4)
    async with (
        RedisStepStore(server.url, run=run, heartbeat=3600) as one,
        RedisStepStore(server.url, run=run, heartbeat=3600) as other,
    ):

        async def wait_again_and_again(store: StepStore) -> None:
            for _ in range(30):
                wanted = store.latest.step + chance.randrange(1, 30)
                if chance.random() < 0.3:
                    impatient = asyncio.create_task(store.wait_for(wanted))
                    await asyncio.sleep(0)
                    impatient.cancel()
                elif wanted <= last:
                    assert await store.wait_for(wanted) >= wanted

        async def advance() -> None:
            while (await one.advance(chance.randrange(1, 3))) < last:
                pass

        last = 400
        await asyncio.gather(*(wait_again_and_again(store) for store in (one, other) * 5), advance())
        assert (one.statistics().waiting, other.statistics().waiting) == (0, 0)


async def test_a_cancelled_call_leaves_the_connection_to_the_others(server: Server, run: str) -> None:
    """Those whose callers have gone are answered, and the next one gets its own answer."""
    async with Proxy.to(server.port) as proxy, RedisStepStore(f"redis://127.0.0.1:{proxy.port}", run=run) as store:
        for number in range(20):
            calls = [asyncio.create_task(call) for call in (store.value(), store.advance(), store.value(), store.raise_to(2))]
            for _ in range(number % 5):
                await asyncio.sleep(0)
            for call in calls[::2]:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        assert (await store.value()).step == 21
        assert proxy.accepted == 2


async def test_opening_may_be_cancelled_anywhere(server: Server, run: str) -> None:
    """Closing takes back what there is by then: no connection is left."""
    before = len(await asked(server, "CLIENT LIST"))
    for ticks in range(0, 40, 3):
        store = RedisStepStore(server.url, run=run)
        opening = asyncio.create_task(store.advance())
        for _ in range(ticks):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        await store.aclose()
    while len(await asked(server, "CLIENT LIST")) != before:
        pass


async def test_where_waking_its_own_read_is_refused(server: Server, run: str) -> None:
    """Without the right to do so the connection is made anew: slower, but the waiter for a lower step is woken."""
    await asked(server, "ACL", "SETUSER", "slow", "on", ">p", "~aiohooks:*", "+@all", "-pexpire")
    async with (
        RedisStepStore(server.url.replace("//", "//slow:p@"), run=run, heartbeat=3600) as store,
        RedisStepStore(server.url, run=run) as other,
    ):
        await blocked(server, 2)
        wait = (await parked(store, 3))[0]
        await other.advance(3)
        assert await wait == 3


# What it finds changed on the server.


async def test_a_script_that_the_server_has_forgotten_is_sent_again(server: Server, run: str) -> None:
    """After SCRIPT FLUSH, or on a server that was started again."""
    """A server that has lost the script is given it again; the write counts once."""
    async with RedisStepStore(server.url, run=run) as store:
        assert await store.advance() == 1
        await asked(server, "SCRIPT", "FLUSH")
        assert await store.advance() == 2


async def test_keys_that_were_deleted_are_made_good_by_the_next_write(server: Server, run: str) -> None:
    """A run that was evicted or flushed goes on from the highest step that anybody knows."""
    async with RedisStepStore(server.url, run=run, heartbeat=3600) as one, RedisStepStore(server.url, run=run) as two:
        wait = (await parked(two, 42))[0]
        assert await one.advance(41) == 41
        await asked(server, "FLUSHALL")
        assert await one.advance() == 42
        assert await wait == 42


async def test_keys_that_were_deleted_are_made_good_by_a_heartbeat(server: Server, run: str) -> None:
    """Also when nobody writes: the members are told again, and the step is what it was."""
    async with (
        RedisStepStore(server.url, run=run, heartbeat=0.05) as store,
        RedisStepStore(server.url, run=run) as other,
    ):
        with other.publisher("trainer"):
            await other.advance(5)
            await other.flush()
            await store.value()
            await asked(server, "FLUSHALL")
            while await asked(server, "XLEN", f"aiohooks:{{{run}}}") != 1:
                pass
            assert (await other.value()) == Position(1, 5)


async def test_forgetting_a_run_leaves_no_key(server: Server, run: str) -> None:
    """Everything that the store has made in the server is gone."""
    """`forget` takes every key of the run, and of no other run, out of the server."""
    async with RedisStepStore(server.url, run=run) as store:
        with store.publisher("trainer"):
            wait = (await parked(store, 3))[0]
            await store.advance(3)
            await wait
        await store.flush()
        assert await asked(server, "KEYS", f"aiohooks:{{{run}}}*")
        await store.forget()
        assert not await asked(server, "KEYS", f"aiohooks:{{{run}}}*")


async def test_a_run_can_be_left_to_expire(server: Server, run: str) -> None:
    """With `expire_secs` every key of the run goes by itself when nobody is connected any more."""
    async with RedisStepStore(server.url, run=run, expire_secs=100) as store:
        with store.publisher("trainer"):
            await store.advance(3)
        await store.flush()
    keys = await asked(server, "KEYS", f"aiohooks:{{{run}}}*")
    assert len(keys) >= 4
    for key in keys:
        assert 0 < await asked(server, "TTL", key) <= 100


# What cannot be meant.


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("http://localhost", {}, "redis://host:6379"),
        ("localhost:6379", {}, "redis://host:6379"),
        ("redis://localhost?nonsense=1", {}, "nonsense"),
        ("redis://localhost?protocol=4", {}, "protocol"),
        ("redis://localhost:port", {}, "redis://host:6379"),
        (6379, {}, "give a text"),
        ("redis://localhost", {"answer_timeout": 0}, "answer_timeout is 0"),
        ("redis://localhost", {"expire_secs": 10}, "twice the heartbeat"),
        ("redis://localhost", {"heartbeat": -1}, "heartbeat is -1"),
    ],
)
def test_what_cannot_be_meant_is_refused(url: Any, options: dict[str, Any], said: str) -> None:
    """When the store is made, with what to give instead."""
    with pytest.raises(InvalidArgumentError, match=said):
        RedisStepStore(url, **options)


def test_a_password_is_not_shown() -> None:
    """Neither by the store nor by what is said of its URL."""
    assert "secret" not in repr(RedisStepStore("redis://user:secret@localhost"))
    with pytest.raises(InvalidArgumentError) as raised:
        RedisStepStore("redis://user:secret@localhost?nonsense=1")
    assert "secret" not in str(raised.value)
