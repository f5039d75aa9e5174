"""A simulated cluster: a server of one of the engines, a chief, a standby and eight workers, and
what they do.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import secrets
import socket
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Literal
from unittest import mock

import aiohooks.stores.ray as ray_store
from aiohooks._core.clock import sleep
from aiohooks.errors import (
    PublisherFailedError,
    PublisherFinishedError,
    StaleTermError,
    StoreResetError,
    StoreUnavailableError,
)
from aiohooks.stores import Engine, SharedStepStore
from tests.fuzz.simulation.history import Call, History, Tenure, WaitEnd
from tests.fuzz.simulation.network import Network
from tests.fuzz.simulation.ray_engine import RayServer, SimulatedRayEngine
from tests.fuzz.simulation.redis_engine import RedisServer, simulated_redis_engine
from tests.fuzz.simulation.virtual_time import Process, World

ENGINES: dict[str, tuple[Callable[[Network], Any], Callable[[Network, Process], Engine]]] = {
    "redis": (RedisServer, simulated_redis_engine),
    "ray": (RayServer, SimulatedRayEngine),
}
Program = Callable[[Process, SharedStepStore], Coroutine[Any, Any, None]]
WORKERS = 8
UNREACHABLE = 10**9


class Cluster:
    """The server, the processes with their programs, and their history."""

    def __init__(self, world: World, engine: str) -> None:
        chance = world.chance
        self.world = world
        self.engine = engine
        self.network = Network(world, mean_delay_secs=chance.choice((0.0005, 0.002, 0.02)))
        make_server, self._make_engine = ENGINES[engine]
        self.server = self.network.server = make_server(self.network)
        self.history = History(world)
        self.lease_secs = chance.choice((3.0, 5.0))
        self.heartbeat_secs = chance.choice((3.0, 6.0))
        self.history.late_secs = 2 * self.lease_secs + self.heartbeat_secs + 4.0
        self.pace_secs = chance.choice((0.4, 1.5, 3.0))
        self.over = False
        """Whether the programs are to end."""
        self.tasks: dict[Process, asyncio.Task[Any]] = {}
        self.at_rest: dict[Process, tuple[SharedStepStore, asyncio.Future[None]]] = {}
        """The processes whose programs have ended, with their open stores, and what lets them
        end.
        """
        self._actions: dict[Process, asyncio.Task[None]] = {}
        self._lives = itertools.count(1)
        for name in ("chief", "standby", *(f"worker {number}" for number in range(1, WORKERS + 1))):
            self.start(name)

    @property
    def living(self) -> list[Process]:
        return list(self.tasks)

    def start(self, name: str) -> Process:
        """Start a process, which opens its store a little later."""
        process = Process(self.world, f"{name}#{next(self._lives)}")
        self.world.trace("start", process)
        self.tasks[process] = process.start(self._live(process, self.program_of(name)))
        return process

    def program_of(self, name: str) -> Program:
        """Return what a process of this name does."""
        return self._chief if name in ("chief", "standby") else self._worker

    def make_store(self, process: Process, **options: Any) -> SharedStepStore:
        """Make the store of a process."""
        return SharedStepStore(
            self._make_engine(self.network, process),
            run="default",
            lease_secs=self.lease_secs,
            heartbeat=self.heartbeat_secs,
            connect_timeout=20.0,
            **options,
        )

    def kill(self, process: Process) -> None:
        self.world.trace("kill", process)
        del self.tasks[process]
        self.at_rest.pop(process, None)
        for tenure in (*self.history.publishers, *self.history.leads):
            if tenure.process is process and tenure.ended is None:
                tenure.ended, tenure.how = self.world.now, "killed"
        process.alive = False
        self.network.hang_up(process)
        process.kill()

    def finish(self) -> None:
        """Have all programs end what they do."""
        self.over = True
        for process, action in self._actions.items():
            process.deliver(action.cancel)

    # Programs.

    async def _live(self, process: Process, program: Program) -> None:
        await sleep(self.world.chance.random() * 0.3)
        opened = False
        while not opened:
            store = self.make_store(process)
            try:
                async with store:
                    opened = True
                    self.history.opened.append((self.world.now, process))
                    await program(process, store)
                    self.at_rest[process] = store, process.create_future()
                    await self.at_rest[process][1]
                    return
            except StoreUnavailableError as error:
                if opened:
                    self.history.violations.append(
                        f"{process} gave up at {self.world.now:.3f}: {error!r}"
                    )
                    return
                self.world.trace(process, "could not open", error)

    async def _chief(self, process: Process, store: SharedStepStore) -> None:
        chance = self.world.chance
        while not self.over:
            await self._act(
                process, asyncio.ensure_future(self._lead(process, store, chance.randrange(2, 40)))
            )

    async def _lead(self, process: Process, store: SharedStepStore, steps: int) -> None:
        try:
            async with store.lead() as term:
                tenure = self._begin(self.history.leads, process, term.number)
                try:
                    await store.mark_initialised()
                    await self._publish(process, store, steps, term.number)
                finally:
                    self._end(tenure, "finished")
        except StoreResetError as error:
            self.world.trace(process, "has lost its run", content=error)
            store.acknowledge_loss()
        except StaleTermError as error:
            if not process.alive:
                return
            self.world.trace(process, "stale", error.term)
            self.history.stale_terms.append(WaitEnd(process, self.world.now, "stale", str(error)))

    async def lead_once(self, process: Process, store: SharedStepStore) -> None:
        """Lead for a while, at the end of the run."""
        async with store.lead() as term:
            tenure = self._begin(self.history.leads, process, term.number)
            store.acknowledge_loss()
            await self.advance(process, store, 1, term.number)
            await sleep(0.5)
            self._end(tenure, "finished")

    async def _worker(self, process: Process, store: SharedStepStore) -> None:
        chance = self.world.chance
        publishes = chance.random() < 0.3
        while not self.over:
            choice = chance.random()
            if choice < 0.15 and publishes:
                action = self._publish(process, store, chance.randrange(1, 6), 0)
            elif choice < 0.3:
                action = self.value(process, store)
            elif choice < 0.4:
                action = self.advance(process, store, chance.randrange(1, 4))
            else:
                action = self.wait(
                    process, store, store.latest.step + chance.choice((1, 1, 2, 5, 30))
                )
            task = asyncio.ensure_future(self._despite_losses(process, store, action))
            if chance.random() < 0.1:
                process.call_later(chance.random(), task.cancel)
            await self._act(process, task)

    async def _despite_losses(
        self, process: Process, store: SharedStepStore, action: Coroutine[Any, Any, None]
    ) -> None:
        try:
            await action
        except StoreResetError as error:
            self.world.trace(process, "its write is lost", content=error)
            store.acknowledge_loss()

    async def _publish(
        self, process: Process, store: SharedStepStore, steps: int, term: int
    ) -> None:
        chance = self.world.chance
        how = "failed" if chance.random() < 0.2 else "finished"
        name = f"{process}.{len(self.history.publishers)}"
        publisher = store.publisher(name)
        tenure = None
        try:
            await store.flush()
            tenure = self._begin(self.history.publishers, process, term, name)
            for _ in range(steps):
                if self.over:
                    break
                await asyncio.gather(
                    *(
                        self.advance(process, store, 1, term)
                        for _ in range(chance.choice((1, 1, 1, 3)))
                    )
                )
                await self._pause()
        finally:
            # Cancelled before its announcement was acknowledged: the engine may know it all the
            # same.
            self._end(tenure or self._begin(self.history.publishers, process, term, name), how)
            publisher.close(ValueError("simulated") if how == "failed" else None)

    def _begin(
        self, tenures: list[Tenure], process: Process, term: int, name: str = "chief"
    ) -> Tenure:
        self.world.trace(process, "begins", name, term)
        tenure = Tenure(name, process, self.world.now, term)
        tenures.append(tenure)
        return tenure

    def _end(self, tenure: Tenure, how: str) -> None:
        if tenure.ended is None:
            self.world.trace(tenure.process, "ends", tenure.name, how)
            tenure.ended, tenure.how = self.world.now, how

    async def _pause(self) -> None:
        await sleep(self.world.chance.expovariate(1 / self.pace_secs))

    async def _act(self, process: Process, action: asyncio.Task[None]) -> None:
        """Wait for an action, which `finish` cancels, and pause."""
        self._actions[process] = action
        try:
            await asyncio.wait([action])
        finally:
            if not action.done():
                action.cancel()
                await asyncio.wait([action])
            del self._actions[process]
        if not action.cancelled():
            action.result()
        if not self.over:
            await self._pause()

    # Operations.

    async def advance(
        self, process: Process, store: SharedStepStore, by: int, term: int = 0
    ) -> None:
        await self._do(process, store, "advance", by, store.advance(by), term)

    async def advance_again(self, process: Process, store: SharedStepStore, by: int) -> None:
        """Advance, and once more if that is the first write since a loss."""
        try:
            await self.advance(process, store, by)
        except StoreResetError:
            store.acknowledge_loss()
            await self.advance(process, store, by)

    async def value(self, process: Process, store: SharedStepStore) -> None:
        async def read() -> int:
            return (await store.value()).step

        await self._do(process, store, "read", 0, read())

    async def wait(self, process: Process, store: SharedStepStore, step: int) -> None:
        try:
            await self._do(process, store, "wait", step, store.wait_for(step))
        except (PublisherFinishedError, PublisherFailedError) as error:
            kind = "finished" if isinstance(error, PublisherFinishedError) else "failed"
            if not process.alive:
                return
            self.world.trace(process, "wait ended", error)
            self.history.wait_ends.append(WaitEnd(process, self.world.now, kind, str(error)))

    async def _do(
        self,
        process: Process,
        store: SharedStepStore,
        kind: Literal["advance", "read", "wait"],
        amount: int,
        answer: Coroutine[Any, Any, int],
        term: int = 0,
    ) -> None:
        world = self.world
        call = Call(process, kind, amount, world.now, store.latest, term)
        self.history.calls.append(call)
        world.trace(process, "begins", kind, amount)
        call.step = await answer
        call.ended = world.now
        call.known_after = store.latest
        world.trace(process, "ends", kind, amount, call.step)


@contextlib.contextmanager
def deterministic(seed: int) -> Generator[None]:
    """Let the library take its random choices, names and threads from the seed."""
    chance = random.Random(seed)
    state = random.getstate()
    random.seed(seed)

    async def call_inline(fn: Callable[..., Any], *args: Any, grace_secs: float = 0.0) -> Any:
        return fn(*args)

    with contextlib.ExitStack() as stack:
        patch = mock.patch.object
        stack.enter_context(
            patch(
                secrets, "token_hex", lambda size=8: f"{chance.getrandbits(8 * size):0{2 * size}x}"
            )
        )
        stack.enter_context(patch(socket, "gethostname", lambda: "simulated"))
        stack.enter_context(patch(os, "getpid", lambda: 1))
        stack.enter_context(patch(ray_store, "to_thread", call_inline))
        try:
            yield
        finally:
            random.setstate(state)
