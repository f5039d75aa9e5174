"""Stores behind a connection that find a damaged run: on an engine in memory, a real Redis, a Ray
actor.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from typing import Any, cast

import pytest

import aiohooks as ah
from aiohooks.errors import StoreDamagedError
from aiohooks.stores import Position, SharedStepStore
from tests.support.fake_engine import FakeEngine, FakeStepStore
from tests.support.redis_servers import server as server
from tests.support.store_servers import Server, first_stream
from tests.support.stores import shared_store
from tests.support.waiting import parked, parked_wait

NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
async def _stream() -> None:
    await first_stream()


# --- on every engine


async def test_all_calls_and_waits_end_with_the_damage() -> None:
    """A run that is damaged while in use: nothing is retried, each caller has an error of its own,
    and closing is quick.
    """
    engine = FakeEngine()
    async with FakeStepStore(engine) as a:
        await a.advance()
        waits = [asyncio.ensure_future(a.wait_for(step)) for step in (5, 9)]
        initialised = await parked(a.wait_initialised(), 20)
        engine.damaged.add("default")
        calls: list[Coroutine[Any, Any, Any]] = [a.advance(), a.advance(), a.reset(1), a.value()]
        engine.cut()
        errors: list[Any] = await asyncio.gather(
            *waits, initialised, *calls, return_exceptions=True
        )
        for error in errors:
            assert isinstance(error, StoreDamagedError), error
            assert (error.path, error.found, error.expected) == ("default", "nonsense", "sense")
        assert len({id(error) for error in errors}) == len(errors)
        connections = engine.connections
        for call in (a.advance(), a.wait_for(3), a.value(), a.raise_to(7)):
            with pytest.raises(StoreDamagedError):
                await call
        a.publisher("late")
        await a.flush()
        assert engine.connections == connections
        engine.damaged.clear()


async def test_a_session_does_not_recover_from_damage() -> None:
    """Each new session would find the same."""
    engine = FakeEngine()
    runs = 0

    async def step() -> None:
        nonlocal runs
        runs += 1
        if runs == 2:
            engine.damaged.add("default")

    with pytest.raises(StoreDamagedError):  # noqa: PT012
        async with (
            FakeStepStore(engine) as steps,
            ah.AsyncMonitoredSession(step, global_step=steps) as session,
        ):
            while True:
                await session.run("step")
    assert runs == 2


async def damaged_and_forgotten(
    store: SharedStepStore, again: SharedStepStore
) -> StoreDamagedError:
    """Check the error of the first call, and that the run can be deleted and begins again."""
    with pytest.raises(
        StoreDamagedError, match=r"found .*, expected .*stop its processes.*forget\(\)"
    ) as caught:
        await store.value()
    assert caught.value.found
    assert caught.value.expected
    await store.forget()
    async with again:
        assert await again.value() == Position(1, 0)
        assert await again.advance() == 1
    return caught.value


# --- Redis and Valkey


REDIS_DAMAGE: list[tuple[str, tuple[str, ...]]] = [
    *(
        (f"another type: {what or 'stream'}", ("SET", what, "x"))
        for what in ("", "changes", "state", "answers")
    ),
    ("a term", ("HSET", "state", "term", "x")),
    ("a version", ("HSET", "state", "version", "x")),
    *(
        (f"no {field}", ("HDEL", "state", field))
        for field in ("term", "leader", "version", "layout", "data")
    ),
    ("an empty state", ("HSET", "state", "data", "")),
    ("a long layout", ("HSET", "state", "layout", "x" * 100_000)),
    ("a step beyond all steps", ("XADD", "", f"1-{2**60}", "run", "x")),
    ("an epoch beyond all epochs", ("XADD", "", f"{2**64 - 1}-1", "run", "x")),
    ("a later change", ("XADD", "changes", "9-9", "n", "")),
    ("a state", ("HSET", "state", "data", '{"position": [1, 0]}')),
    ("another layout", ("HSET", "state", "layout", "1")),
    ("a foreign stream", ("XADD", "", "9-9", "temperature", "12")),
]


@pytest.mark.parametrize(("what", "command"), REDIS_DAMAGE, ids=[what for what, _ in REDIS_DAMAGE])
async def test_redis(server: Server, what: str, command: tuple[str, ...]) -> None:
    """Keys that hold something else."""
    import redis

    run = f"damaged {next(NUMBERS)}"
    url = f"redis://127.0.0.1:{server.port}"
    async with shared_store(url, run=run) as store:
        await store.advance(3)
        await store.flush()
    name, key, *rest = command
    with redis.Redis(port=server.port) as other:
        key = f"aiohooks:{{{run}}}{':' if key else ''}{key}"
        if name not in ("HSET", "HDEL"):
            other.delete(key)
        cast("Any", other).execute_command(name, key, *rest)
    error = await damaged_and_forgotten(shared_store(url, run=run), shared_store(url, run=run))
    assert f"aiohooks:{{{run}}}*" in error.path


async def test_redis_damaged_meanwhile(server: Server) -> None:
    """Waiters are notified: the blocking read ends when its key is deleted or replaced."""
    import redis

    run = f"damaged {next(NUMBERS)}"
    async with shared_store(f"redis://127.0.0.1:{server.port}", run=run, heartbeat=0.2) as store:
        await store.advance(3)
        wait = await parked_wait(store, 9)
        with redis.Redis(port=server.port) as other:
            other.set(f"aiohooks:{{{run}}}", "mine")
        with pytest.raises(StoreDamagedError, match="WRONGTYPE"):
            await wait
        with pytest.raises(StoreDamagedError, match="WRONGTYPE"):
            await store.advance()
        await store.forget()


# --- Ray


@pytest.mark.parametrize("answer", [b"[]", (1, 2), None])
async def test_an_actor_of_another_version(answer: object) -> None:
    """An actor that answers something else, or has not the method."""
    from tests.support.fake_ray import FakeCluster

    cluster = FakeCluster()
    actor = cluster.actor("fake")

    async def connect(*args: object) -> object:
        return answer

    class Foreign:
        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"the actor has no method {name!r}")

    store: Any = cluster.store()
    if answer is None:
        store._engine._get_or_create_actor = Foreign
    else:
        vars(actor.instance)["connect"] = connect
    with pytest.raises(
        StoreDamagedError, match=r"expected a step actor of this version.*kill that actor"
    ):
        await store.value()
    await store.aclose()
    actor.stop()
