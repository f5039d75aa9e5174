"""Ray: an asynchronous actor by hand, in which each waiter awaits a future."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

# Before Ray, which looks for the token of the cluster when it is imported.
from tests.support.ray_cluster import membership, ray_cluster

# isort: split
import ray
import ray.util

from tests.benchmarks.store_engine import Engine, Waits

NAMESPACE = "bench"


@contextmanager
def serve() -> Iterator[str]:
    """Run a cluster on the loopback, or use that of the tests; this process and those that it
    starts are members.
    """
    with ExitStack() as stack:
        address = os.environ.get("AIOHOOKS_TEST_RAY") or stack.enter_context(ray_cluster())
        os.environ["RAY_ADDRESS"] = address
        stack.callback(os.environ.pop, "RAY_ADDRESS")
        stack.enter_context(membership(address))
        stack.callback(_end_actors)
        yield f"ray://{NAMESPACE}"


def _end_actors() -> None:
    for found in ray.util.list_named_actors(all_namespaces=True):
        if found["namespace"] == NAMESPACE:
            ray.kill(ray.get_actor(**found))


@contextmanager
def joined() -> Iterator[None]:
    """Make a process that this one has started a member of the cluster."""
    if ray.is_initialized():
        yield
        return
    with membership(os.environ["RAY_ADDRESS"]):
        yield


class Bare:
    """The actor: a step, and a future for each wait."""

    def __init__(self) -> None:
        self._step = 0
        self._waits = Waits()

    async def advance(self) -> int:
        self._step += 1
        self._waits.wake(self._step)
        return self._step

    async def wait_for(self, step: int) -> None:
        if step > self._step:
            await self._waits.park(step)


class Calls:
    """Calls the actor, once for each advance and each wait."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def advance(self) -> int:
        step: int = await self._actor.advance.remote()
        return step

    async def wait_for(self, step: int) -> None:
        await self._actor.wait_for.remote(step)


@asynccontextmanager
async def bare(_: str) -> AsyncIterator[Calls]:
    """Open it; the first caller creates the actor."""
    remote: Any = ray.remote(Bare)
    actor = remote.options(
        name="bare",
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_concurrency=100_000,
    )
    yield Calls(await asyncio.to_thread(actor.remote))


ENGINE = Engine(
    title="Ray",
    serve=serve,
    bare=bare,
    by_hand="an asynchronous actor by hand",
    one_call="one call of the actor",
    settled_secs=0.05,
    joined=joined,
)
