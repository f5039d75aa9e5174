"""An engine loses its data in the middle of a training with a chief, a standby and three workers:
it continues from the checkpoint, with one chief.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.errors import PublisherFinishedError
from aiohooks.stores import SharedStepStore
from tests.support.ray_cluster import actor_of, nothing_left
from tests.support.ray_cluster import cluster as cluster
from tests.support.redis_servers import execute
from tests.support.store_proxy import Proxy
from tests.support.store_servers import restart_without_data, running
from tests.support.stores import shared_store

MakeStore = Callable[[], SharedStepStore]
Lose = Callable[[], Awaitable[object]]
LOST_AT, LAST = 23, 40


class Model:
    """Counts its steps."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class Training:
    """The processes of a run, each with a store of its own."""

    def __init__(self, make_store: MakeStore, lose: Lose, directory: Path) -> None:
        self.make_store = make_store
        self.lose = lose
        self.directory = directory
        self.is_lost = False
        self.leading: set[str] = set()
        self.restored: list[int] = []
        """The steps of the checkpoints that were restored since the loss."""
        self.seen: dict[str, int] = {}
        """The last step that each worker has seen."""

    async def run(self) -> None:
        """Train to the last step, and check what the processes have seen."""
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            for name in ("chief", "standby"):
                tasks.create_task(self.train(name))
            for number in range(3):
                tasks.create_task(self.work(f"worker {number}"))
        assert self.is_lost
        assert self.restored, "no chief has recovered"
        assert self.restored[0] in range(LOST_AT - 10, LOST_AT + 1)
        assert set(self.seen.values()) == {LAST}

    async def train(self, name: str) -> None:
        """Train whenever this process leads."""
        model = Model()

        async def step() -> dict[str, int]:
            assert self.leading == {name}
            if model.steps == LOST_AT and not self.is_lost:
                self.is_lost = True
                await self.lose()
            model.steps += 1
            return {"steps": model.steps}

        async with self.make_store() as store:
            creator = ah.ChiefSessionCreator(
                step,
                scaffold=ah.Scaffold(tracked={"model": model}),
                checkpoint_dir=self.directory,
                global_step=store,
            )
            hooks = [
                _Watch(self, name, model),
                ah.StopAtStepHook(last_step=LAST),
                ah.CheckpointSaverHook(every=ah.Every(steps=5)),
            ]
            async with ah.AsyncMonitoredSession(creator, hooks, name=name) as session:
                while not session.should_stop():
                    await session.run("steps")
            self.leading.discard(name)

    async def work(self, name: str) -> None:
        """See each step, until the chief has finished."""
        graph = ah.Graph()

        @graph.operation
        async def next_step() -> int:
            # Not the step after the latest: that may have been reached since the last run.
            return await store.wait_for(self.seen.get(name, 0) + 1)

        async with self.make_store() as store:
            creator = ah.WorkerSessionCreator(graph, global_step=store)
            with contextlib.suppress(PublisherFinishedError):
                async with ah.AsyncMonitoredSession(creator, name=name) as session:
                    while not session.should_stop():
                        self.seen[name] = await session.run("next_step")


class _Watch(ah.SessionRunHook):
    """Notes who leads and what it restores, and checks its steps."""

    def __init__(self, training: Training, name: str, model: Model) -> None:
        self._training = training
        self._name = name
        self._model = model

    async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
        """Lead from here on."""
        self._training.leading = {self._name}
        if session.restored is not None and self._training.is_lost:
            self._training.restored.append(session.restored.checkpoint.step)

    async def after_run(
        self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
    ) -> None:
        """Compare the step of the store with that of the model."""
        assert run_context.global_step == self._model.steps


# Redis.


@contextlib.asynccontextmanager
async def through_proxy(port: int) -> AsyncIterator[tuple[Proxy, MakeStore]]:
    async with Proxy.to(port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}"
        yield proxy, lambda: shared_store(url, run="lost", lease_secs=2.0)


@pytest.mark.parametrize("loss", ["flushed", "restarted", "failed over"])
async def test_redis(loss: str, tmp_path: Path) -> None:
    """FLUSHALL, a restart without the data, and a failover to a server that has none of it."""
    with (
        running("redis", tmp_path / "one", keeps=False) as server,
        running("redis", tmp_path / "other", keeps=False) as other,
    ):
        async with through_proxy(server.port) as (proxy, make_store):

            async def lose() -> None:
                if loss == "flushed":
                    await execute(server, "FLUSHALL")
                elif loss == "restarted":
                    await restart_without_data(server)
                else:
                    proxy.target = other.port
                    proxy.cut()
                    proxy.heal()

            await Training(make_store, lose, tmp_path / "checkpoints").run()


# Ray.


async def test_an_actor_that_dies(tmp_path: Path) -> None:
    """Its successor knows nothing of the run."""
    # It imports Ray, which reads its environment then: `ray_cluster` sets that first.
    from tests.support.fake_ray import FakeCluster

    fake = FakeCluster()

    async def lose() -> None:
        fake.actor("fake").die()

    await Training(lambda: fake.store(lease_secs=2.0), lose, tmp_path).run()
    fake.actor("fake").stop()


@pytest.mark.slow
@pytest.mark.may_leak  # but see `nothing_left`
@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_an_actor_that_is_killed(cluster: str, tmp_path: Path) -> None:
    """Ray starts it again, without its memory."""

    def make_store() -> SharedStepStore:
        store = shared_store("ray://aiohooks", run="lost", lease_secs=2.0)
        assert isinstance(store, SharedStepStore)
        return store

    async def lose() -> None:
        import ray

        ray.kill(actor_of("lost"), no_restart=False)

    async with nothing_left():
        await Training(make_store, lose, tmp_path).run()
        async with make_store() as store:
            await store.forget()
