"""The Redis store when its connections fail: through a proxy in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiohooks.stores import Position
from aiohooks.stores.redis import RedisStepStore
from tests.support.redis_servers import until_blocked
from tests.support.store_proxy import Proxy
from tests.support.store_servers import Server, first_stream, running
from tests.support.waiting import parked_waits


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running("valkey", tmp_path_factory.mktemp("redis"), keeps=False) as one:
        yield one


@pytest.fixture(autouse=True)
async def _stream() -> None:
    await first_stream()


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


async def test_a_lost_answer_is_not_counted_twice(server: Server, run: str) -> None:
    """Each advance counts once, also if the script's reply is lost with its connection."""
    async with Proxy.to(server.port) as proxy, RedisStepStore(f"redis://127.0.0.1:{proxy.port}", run=run) as store:
        for step in range(1, 6):
            proxy.drop_answer(b"EVALSHA")
            assert await store.advance() == step
        assert await store.value() == Position(1, 5)
        assert proxy.lost_answers >= 5


async def test_a_truncated_reply(server: Server, run: str) -> None:
    """After any number of bytes: the step counts once, and the waiter in the other process is woken."""

    async def cut_off(group: int) -> None:
        own = f"{run} {group}"
        async with (
            Proxy.to(server.port) as proxy,
            RedisStepStore(f"redis://127.0.0.1:{proxy.port}", run=own) as cut,
            RedisStepStore(server.url, run=own) as whole,
        ):
            for step in range(1, 6):
                wait, other = (await parked_waits(cut, step))[0], (await parked_waits(whole, step))[0]
                proxy.cut_in_message(5 * group + step)
                assert await cut.advance() == step
                assert (await wait, await other) == (step, step)

    # Most of the time is spent in pauses between attempts: all groups have them at the same time.
    await asyncio.gather(*map(cut_off, range(12)))


async def test_a_step_crossed_during_an_outage_wakes_afterwards(server: Server, run: str) -> None:
    """The waiter wakes as soon as there is a connection; a call waits for the connection."""
    async with (
        Proxy.to(server.port) as proxy,
        RedisStepStore(f"redis://127.0.0.1:{proxy.port}", run=run) as away,
        RedisStepStore(server.url, run=run) as there,
    ):
        wait = (await parked_waits(away, 5))[0]
        await until_blocked(server, 2)
        proxy.cut()
        while away.outage_secs is None:  # noqa: ASYNC110 - a store has no event for this
            await asyncio.sleep(0)
        advance = asyncio.ensure_future(away.advance(10))
        assert await there.advance(5) == 5
        assert not wait.done()
        proxy.heal()
        assert await wait in (5, 15)
        assert await advance == 15


@pytest.mark.slow
async def test_a_silently_dead_connection(server: Server, run: str) -> None:
    """It is found after a heartbeat and a second, and the waiter is woken over a new one."""
    async with (
        Proxy.to(server.port) as proxy,
        RedisStepStore(f"redis://127.0.0.1:{proxy.port}", run=run, heartbeat=0.3) as away,
        RedisStepStore(server.url, run=run) as there,
    ):
        wait = (await parked_waits(away, 5))[0]
        await until_blocked(server, 2)
        proxy.black_hole(swallow_new=False)
        assert await there.advance(5) == 5
        assert await wait == 5
        assert proxy.accepted >= 4  # on a busy machine the new ones may count as dead, too


async def test_closing_while_the_server_does_not_answer(tmp_path: Path, run: str) -> None:
    """Closing ends, and so do all waits and calls."""
    with running("valkey", tmp_path, keeps=False) as server:
        store = RedisStepStore(server.url, run=run)
        await store.__aenter__()
        wait = (await parked_waits(store, 5))[0]
        server.pause()
        advance = asyncio.ensure_future(store.advance())
        await asyncio.sleep(0)
        await store.aclose()
        ended = await asyncio.gather(wait, advance, return_exceptions=True)
        server.resume()
        assert [type(one).__name__ for one in ended] == ["StoreClosedError"] * 2
    server.kill()
