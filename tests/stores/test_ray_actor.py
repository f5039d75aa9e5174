"""The Ray store with its actor in this process: the contract, and every kind of death of the
actor.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest

from aiohooks import open_step_store
from aiohooks.stores import Position
from aiohooks.stores._protocol import Snapshot, Write
from aiohooks.stores.ray import LongPoll, RayEngine, StepActor
from aiohooks.testing import check_step_store, step_store_checks
from tests.support.fake_ray import FakeCluster
from tests.support.losses import LOSSES, check_loss


def test_the_run_is_named_as_with_other_engines() -> None:
    """Without a name the run has the same one on every engine; nothing is connected yet."""
    assert open_step_store("ray://").run == open_step_store("local://").run == "default"


@pytest.mark.parametrize("check", step_store_checks())
async def test_contract(check: str) -> None:
    """Every check of a step store passes, and no poll is left in the actor."""
    cluster = FakeCluster()
    await check_step_store(cluster.store, check)
    for actor in cluster.actors.values():
        assert not actor.instance.polls
        actor.stop()


@pytest.mark.parametrize("check", LOSSES)
async def test_contract_when_the_actor_dies(check: str) -> None:
    """The same checks when the actor dies, and its successor knows nothing."""
    cluster = FakeCluster()

    async def lose_data() -> None:
        for actor in cluster.actors.values():
            actor.die()

    await check_loss(functools.partial(cluster.store, lease_secs=2.0), check, lose_data)
    for actor in cluster.actors.values():
        actor.stop()


async def test_a_thousand_waiters_are_one_call() -> None:
    """However many waiters a process has, one poll is parked in the actor, and it is answered once
    for all of them.
    """
    cluster = FakeCluster()
    actor = cluster.actor("fake")
    async with cluster.store() as a, cluster.store() as b:
        waits = [asyncio.ensure_future(a.wait_for(10 + number % 5)) for number in range(1000)]
        while a.statistics().waiting < 1000 or len(actor.instance.polls) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert len(actor.instance.polls) == 2  # one of each process
        await b.advance(20)
        assert set(await asyncio.gather(*waits)) == {20}
        for store in (a, b):
            assert isinstance(store._engine, RayEngine)
            assert len(store._engine._replies) <= 2, "a poll, and what is being asked"
    assert not actor.instance.polls
    actor.stop()


NOTHING = Snapshot(Position(1, 0))


async def test_a_process_that_did_not_connect_is_not_answered() -> None:
    """An actor answers only processes that have said how far they know the run to have come:
    without that it would count in an epoch from before.
    """
    actor = StepActor()
    write = Write("advance", 1, Position(1, 0), 0, "p", 1)
    assert await actor.long_poll("another", LongPoll("p", 1, 1, 0, 1.0)) is None
    assert await actor.read("another") is None
    assert await actor.apply("another", write) is None
    snapshot = await actor.connect(NOTHING)
    assert await actor.read(snapshot.run_id) == snapshot


async def test_the_newest_poll_replaces_the_others() -> None:
    """A process has one poll: another one ends the earlier one immediately."""
    actor = StepActor()
    snapshot = await actor.connect(NOTHING)

    def send_poll(threshold: int) -> asyncio.Future[Any]:
        poll = LongPoll("p", threshold, 1, snapshot.revision, 60.0)
        return asyncio.ensure_future(actor.long_poll(snapshot.run_id, poll))

    first = send_poll(5)
    await asyncio.sleep(0)
    second = send_poll(4)
    await first
    assert not second.done()
    assert (await actor.statistics())["waiting"] == 1
    await actor.leave("p")
    await second
    assert not actor.polls
