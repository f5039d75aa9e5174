"""The Ray store with its actor in this process: all laws, and every kind of death of the actor."""

from __future__ import annotations

import asyncio
import logging
import random

import pytest

pytest.importorskip("ray")

from aiohooks import PublisherFailedError, open_step_store
from aiohooks.errors import PublisherFinishedError
from aiohooks.stores import Position

#
from aiohooks.stores._protocol import (
    Answer,
    Fail,
    Failure,
    Join,
    LastExit,
    Lead,
    Leave,
    Member,
    Request,
    Snapshot,
    Write,
)
from aiohooks.stores.ray import RayStepStore
from aiohooks.stores.ray._actor import StepKeeper, Wish, answer_of, kind_of, packed, request_of, snapshot_of, unpacked
from aiohooks.stores.ray._counter import Ledger
from aiohooks.testing import check_step_store, step_store_checks
from tests.support.fake_ray import FakeCluster


def test_the_run_is_named_as_with_other_engines() -> None:
    """Who gives no name gets the same one everywhere; nothing is connected yet."""
    assert RayStepStore().run == open_step_store("ray://").run == open_step_store("local://").run


@pytest.mark.parametrize("law", step_store_checks())
async def test_laws(law: str) -> None:
    """The laws of all stores, and nothing waits in the actor in the end."""
    cluster = FakeCluster()
    await check_step_store(cluster.store, law)
    for actor in cluster.actors.values():
        assert not actor.keeper.watches
        actor.stop()


async def test_a_thousand_waiters_are_one_call() -> None:
    """However many wait in a process, one call waits in the actor, and it is woken once for all of them."""
    cluster = FakeCluster()
    actor = cluster.actor("fake")
    async with cluster.store() as a, cluster.store() as b:
        waits = [asyncio.ensure_future(a.wait_for(10 + number % 5)) for number in range(1000)]
        while a.statistics().waiting < 1000 or len(actor.keeper.watches) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert len(actor.keeper.watches) == 2  # one of each process
        await b.advance(20)
        assert set(await asyncio.gather(*waits)) == {20}
    assert not actor.keeper.watches
    actor.stop()


@pytest.mark.parametrize("fate", ["dies before", "dies after"])
@pytest.mark.parametrize("seed", range(10))
async def test_writes_count_once_whenever_the_actor_dies(fate: str, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Four processes advance, the actor dies again and again, with and without having done what it was asked for last."""
    caplog.set_level(logging.ERROR)
    cluster, draw = FakeCluster(), random.Random(seed)
    actor = cluster.actor("fake")

    def decide(name: str) -> str:
        return fate if name == "apply" and actor.lives < 8 and draw.random() < 0.05 else ""

    stores = [cluster.store() for _ in range(4)]
    for store in stores:
        await store.advance()
    actor.decide = decide

    async def work(store: object, number: int) -> None:
        for _ in range(30):
            await stores[number].advance()

    target = 4 + 4 * 30
    waiting = asyncio.ensure_future(stores[0].wait_for(target))
    await asyncio.gather(*(work(store, number) for number, store in enumerate(stores)))
    assert await waiting == target
    assert {(await store.value()).step for store in stores} == {target}
    assert actor.lives > 1
    for store in stores:
        await store.aclose()
    assert not actor.keeper.watches
    actor.stop()


@pytest.mark.parametrize("fate", ["dies before", "dies after"])
async def test_a_publisher_leaves_once_whenever_the_actor_dies(fate: str) -> None:
    """It is told again to the next actor, which may have heard of it from others: waiters hear of one departure."""
    cluster = FakeCluster()
    actor = cluster.actor("fake")
    async with cluster.store() as a, cluster.store() as b:
        publisher = a.publisher("one")
        await a.flush()
        waiting = asyncio.ensure_future(b.wait_for(10))
        while not b._snapshot.members:  # noqa: ASYNC110
            await asyncio.sleep(0)
        actor.decide = lambda name: fate if name == "apply" and actor.lives == 1 else ""
        publisher.close()
        with pytest.raises(PublisherFinishedError, match="one finished at step 0, wanted 10"):
            await waiting
        await a.flush()
        assert (actor.lives, actor.keeper._state.exits) == (2, 1)
        assert not actor.keeper._state.members
    actor.stop()


async def test_a_restarted_actor_is_told_who_publishes() -> None:
    """Also of a process that died together with it: its lease runs out in the new one."""
    cluster = FakeCluster()
    actor = cluster.actor("fake")
    a, b, c = (cluster.store(lease_secs=0.3) for _ in range(3))
    for store in (a, b, c):
        await store.__aenter__()
    c.publisher("c")
    await c.flush()
    b.publisher("b")
    await b.flush()
    waiting = asyncio.ensure_future(a.wait_for(10))
    while {member.name for member in a._snapshot.members} != {"b", "c"}:  # noqa: ASYNC110
        await asyncio.sleep(0)
    # c dies, and the actor with it; b lives on, and leaves.
    c._stop_announcing()
    actor.die()
    while len(actor.keeper._state.members) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await b.aclose()
    with pytest.raises(PublisherFailedError, match="c failed at step 0"):
        await waiting
    for store in (a, c):
        await store.aclose()
    actor.stop()


def hello() -> bytes:
    """What somebody says who knows nothing."""
    return packed(Snapshot(Position(1, 0)), Ledger().since(0))


async def test_who_is_unknown_is_told_so() -> None:
    """An actor answers nobody who has not said what it knows: it would count from there."""
    keeper = StepKeeper()
    write = Write("advance", 1, Position(1, 0), 0, "p", 1)
    assert await keeper.watch(packed("another life", 0, Wish("p", 1, None, 1, 0, 1.0))) == b""
    assert await keeper.look(packed("another life", 0)) == b""
    assert await keeper.apply(packed("another life", 0, kind_of(write), write)) == b""
    life, *_ = unpacked(await keeper.hello(hello()))
    assert snapshot_of(unpacked(await keeper.look(packed(life, 0)))[1]).position == (1, 0)


async def test_the_newest_wish_is_in_force() -> None:
    """One that comes late, after a newer one, ends at once; a newer one ends the earlier."""
    keeper = StepKeeper()
    life, _, snapshot, *_ = unpacked(await keeper.hello(hello()))

    def watch(number: int, due: int) -> asyncio.Future[bytes]:
        wish = Wish("p", number, due, 1, snapshot_of(snapshot).revision, 60.0)
        return asyncio.ensure_future(keeper.watch(packed(life, 0, wish)))

    second = watch(2, 5)
    await asyncio.sleep(0)
    await watch(1, 9)
    assert not second.done()
    third = watch(3, 4)
    await second
    assert (await keeper.statistics())["waiting"] == 1
    await keeper.leave("p")
    await third
    assert not keeper.watches


def test_all_that_travels_arrives_as_it_was() -> None:
    """Requests, answers and snapshots, packed and unpacked."""
    member = Member("p/1", "trainer", 10.0, 7, 2, True, 3)
    requests: list[Request] = [
        Write("advance", 2, Position(1, 5), 1, "p", 9),
        Join(member),
        Leave("p/1", "trainer", 5, "ValueError: no"),
        Lead(member),
        Fail("ValueError: no"),
    ]
    for request in requests:
        travelled = request_of(*unpacked(packed(kind_of(request), request)))
        assert (type(travelled), travelled) == (type(request), request)
    snapshots = [
        Snapshot(Position(1, 0)),
        Snapshot(Position(2, 5), 3, True, 8, (member,), LastExit(4, "x", 5, "", True), Failure("no", Position(2, 4)), 1.5),
    ]
    for snapshot in snapshots:
        (fields,) = unpacked(packed(snapshot))
        assert snapshot_of(fields) == snapshot
        assert type(snapshot_of(fields).position) is Position
    answer = Answer("stale", Position(1, 2), 3, 4)
    assert answer_of(unpacked(packed(answer))[0]) == answer
