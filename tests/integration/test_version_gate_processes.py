"""Version gates of several processes, and a trainer in another one, over an engine: the bound holds, and no wait outlives it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.store_processes import WorkerProcess, reply_to
from tests.support.store_servers import running

pytestmark = pytest.mark.slow

MAX_LAG, PER_VERSION, SENDERS, VERSIONS = 1, 2, 2, 15
PLACES = (MAX_LAG + 1) * PER_VERSION


@pytest.fixture(params=["local", "valkey", "nats"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an engine."""
    if request.param == "local":
        yield f"local://{tmp_path}/steps"
    else:
        with running(request.param, tmp_path) as server:
            yield server.url


@contextlib.asynccontextmanager
async def trainer_and_senders(url: str, **options: Any) -> AsyncIterator[tuple[WorkerProcess, list[WorkerProcess]]]:
    """Run a trainer that publishes the versions, and processes with a gate each, which waits at its bound."""
    workers = await asyncio.gather(*(WorkerProcess.start() for _ in range(1 + SENDERS)))
    try:
        await asyncio.gather(*(each.do("open", url=url, run="weights", lease_secs=1.5, **options) for each in workers))
        trainer, *senders = workers
        await trainer.do("publish", name="trainer")
        for each in workers:
            await each.do("open_gate", max_lag=MAX_LAG, per_version=PER_VERSION)
        yield trainer, senders
    finally:
        await asyncio.gather(*(each.kill() for each in workers))


async def waiting(sender: WorkerProcess) -> asyncio.Future[dict[str, Any]]:
    """Return the order for one item more than there is room for, once it waits."""
    order = sender.order("ship")
    await sender.do("until_gate_waits")
    return order


@pytest.mark.sample
def test_the_bound_holds_across_processes(url: str) -> None:
    """Each gate admits the items of the next versions and not one more; items used in order are never older than the bound."""

    async def train() -> None:
        async with trainer_and_senders(url) as (trainer, senders):
            begun = 0  # the number of the newest version that may be published already
            queues = [asyncio.Queue[int]() for _ in senders]

            async def send(sender: WorkerProcess, queue: asyncio.Queue[int]) -> None:
                for number in range(VERSIONS * PER_VERSION):
                    [(step, version)] = await sender.do("ship")
                    assert step == number // PER_VERSION
                    assert step - version <= MAX_LAG
                    assert version <= begun
                    queue.put_nowait(version)

            for sender in senders:
                assert await sender.do("ship", times=PLACES) == [[number // PER_VERSION, 0] for number in range(PLACES)]
            orders = [await waiting(sender) for sender in senders]
            assert await trainer.do("advance") == 1
            for order in orders:
                assert (await reply_to(order, "ship"))["result"] == [[MAX_LAG + 1, 1]]

            # From here on each gate has begun anew, at the version that was published.
            await trainer.do("reset", step=0)
            for sender in senders:
                await sender.do("value")
                await sender.do("open_gate", max_lag=MAX_LAG, per_version=PER_VERSION)
            sending = [asyncio.ensure_future(send(*each)) for each in zip(senders, queues, strict=True)]
            for version in range(VERSIONS):
                for queue in queues:
                    assert all([version - await queue.get() <= MAX_LAG for _ in range(PER_VERSION)])
                begun = version + 1
                assert await trainer.do("advance") == begun
            await asyncio.gather(*sending)
            assert await trainer.do("lag_of", epoch=2, step=VERSIONS - 2) == 2
            assert await trainer.do("lag_of", epoch=1, step=VERSIONS) == 2**53 - 1

    asyncio.run(train())


def test_a_wait_ends_with_its_trainer(url: str) -> None:
    """A trainer that is killed, fails or finishes ends the waits of every process with the error of the page."""

    async def train() -> None:
        for end, expected in (("kill", "PublisherFailedError"), ("", "PublisherFinishedError"), ("oom", "PublisherFailedError")):
            async with trainer_and_senders(url) as (trainer, senders):
                await trainer.do("advance")
                for sender in senders:
                    await sender.do("value")
                    await sender.do("open_gate", max_lag=MAX_LAG, per_version=PER_VERSION)
                    await sender.do("ship", times=PLACES)
                orders = [await waiting(sender) for sender in senders]
                if end == "kill":
                    await trainer.kill()
                else:
                    await trainer.do("leave", name="trainer", error=end)
                for order in orders:
                    reply = await reply_to(order, "admission")
                    assert reply["error"] == expected
                    assert "trainer" in reply["text"]

    asyncio.run(train())


def test_others_replace_a_killed_trainer_and_a_killed_sender(url: str) -> None:
    """With on_lost="keep" waits continue with the next trainer; a new gate admits no more than one that was killed."""

    async def train() -> None:
        async with trainer_and_senders(url, on_lost="keep") as (trainer, (sender, victim)):
            await sender.do("ship", times=PLACES)
            await victim.do("ship", times=PLACES)
            order, _ = await waiting(sender), await waiting(victim)
            await asyncio.gather(trainer.kill(), victim.kill())
            async with trainer_and_senders(url, on_lost="keep") as (successor, (late, _)):
                assert await successor.do("advance") == 1
                assert (await reply_to(order, "admission"))["result"] == [[MAX_LAG + 1, 1]]
                await late.do("value")
                await late.do("open_gate", max_lag=MAX_LAG, per_version=PER_VERSION)
                assert await late.do("ship", times=PLACES) == [[1 + number // PER_VERSION, 1] for number in range(PLACES)]
                order = await waiting(late)
                assert await successor.do("advance") == 2
                assert (await reply_to(order, "admission"))["result"] == [[3, 2]]

    asyncio.run(train())
