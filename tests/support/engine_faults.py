"""Each engine with three processes on it, and the faults that it can have as a whole: for the programs with random faults.

The faults are in three groups: those that lose the engine's data, those in which it is away for longer than a lease, and brief
ones. `EngineSetup` is what the programs use; each trial has a run of its own.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import tempfile
import time
import urllib.request
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

from tests.support.store_proxy import Proxy
from tests.support.store_servers import Server, free_port
from tests.support.store_trials import WorkerProcess, numbers, reply_to
from tests.support.waiting import HANG_SECS, elapse

Group = Literal["data lost", "outage longer than a lease", "brief"]
GROUPS: tuple[Group, ...] = ("data lost", "outage longer than a lease", "brief")
ENGINES = ("redis", "valkey", "nats", "local", "ray")

S = TypeVar("S", bound="EngineSetup")
Strike = Callable[[S, float], Awaitable[None]]
"""Let the engine fail; its faults that last a while last so many seconds. It works again afterwards."""
Strikes = Mapping[Group, Mapping[str, Strike[S]]]


async def last(secs: float) -> None:
    """Let a fault last: its duration is part of it, there is no event to wait for."""
    await elapse(secs)


class EngineSetup(abc.ABC):
    """An engine and three processes."""

    strikes: ClassVar[Strikes[Any]]
    leased: ClassVar[bool] = True
    """Whether a process that is stopped counts as dead."""
    keeps_run: ClassVar[bool] = True
    """Whether the run continues after the data was lost; otherwise every call and wait ends with an error."""
    exact_sums: ClassVar[bool] = False
    """Whether every acknowledged advance counts, also of several processes, when the data is lost."""

    lease_secs: float = 0.5

    def __init__(self) -> None:
        self.workers: Sequence[WorkerProcess] = []

    @abc.abstractmethod
    async def begin(self, **options: Any) -> Sequence[WorkerProcess]:
        """Open a new run in all processes; return them."""

    @abc.abstractmethod
    async def end(self) -> str:
        """Close all stores; return what is left in the engine."""

    @abc.abstractmethod
    async def abandon(self) -> None:
        """End all processes, after a failed trial."""

    def links(self) -> Sequence[ProxiedWorker]:
        """Return the processes whose connection can fail."""
        return ()


async def nothing(setup: EngineSetup, secs: float) -> None:
    """The engine does not fail."""
    await last(secs)


async def until_nothing_left(left: Callable[[], Awaitable[str]]) -> str:
    """Wait until nothing is left in an engine; return what remains there."""
    until = time.monotonic() + HANG_SECS
    while (found := await left()) and time.monotonic() < until:
        await last(0.02)
    return found


async def close_all(workers: Sequence[WorkerProcess]) -> None:
    await asyncio.gather(*(one.do("close") for one in workers if one.alive))


# Engines with a server.


class ProxiedWorker(WorkerProcess):
    """A process behind a proxy of its own."""

    proxy: Proxy

    @classmethod
    async def behind(cls, proxy: Proxy) -> ProxiedWorker:
        """Start a process that uses the proxy."""
        one = await cls.start()
        one.proxy = proxy
        return one


async def restart_without_data(setup: ServerSetup, secs: float) -> None:
    await asyncio.to_thread(setup.server.kill)
    setup.server.lose_data()
    await last(secs)
    await asyncio.to_thread(setup.server.start)


async def restart(setup: ServerSetup, secs: float) -> None:
    await asyncio.to_thread(setup.server.kill)
    await last(secs)
    await asyncio.to_thread(setup.server.start)


async def pause(setup: ServerSetup, secs: float) -> None:
    setup.server.pause()
    await last(secs)
    setup.server.resume()


async def cut_links(setup: ServerSetup, secs: float) -> None:
    for one in setup.links():
        one.proxy.cut()
    await last(secs)
    for one in setup.links():
        one.proxy.heal()


async def swallow_links(setup: ServerSetup, secs: float) -> None:
    for one in setup.links():
        one.proxy.black_hole()
    await last(secs)
    for one in setup.links():
        one.proxy.heal()


class ServerSetup(EngineSetup):
    """A server, and a proxy before each process."""

    strikes: ClassVar[Strikes[Any]] = {
        "data lost": {"restarted without data": restart_without_data},
        "outage longer than a lease": {
            "killed for a while": restart,
            "stopped for a while": pause,
            "all links cut": cut_links,
            "all links a black hole": swallow_links,
        },
        "brief": {"none": nothing, "restarted": restart, "stopped": pause},
    }

    def __init__(self, server: Server, left: Callable[[], Awaitable[str]]) -> None:
        """`left` returns what is left in the server."""
        super().__init__()
        self.server = server
        self.workers: list[ProxiedWorker] = []
        self.run = ""
        self._left = left
        self._proxies: list[Proxy] = []

    @contextlib.asynccontextmanager
    async def start(self) -> AsyncGenerator[Self]:
        """Run the processes and proxies during the block; the server runs already."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                self._proxies = [await stack.enter_async_context(Proxy.to(self.server.port)) for _ in range(3)]
                self.workers = list(await asyncio.gather(*map(ProxiedWorker.behind, self._proxies)))
                try:
                    yield self
                finally:
                    await asyncio.gather(*(one.kill() for one in self.workers))
        finally:
            await asyncio.to_thread(self.server.kill)

    async def begin(self, **options: Any) -> Sequence[WorkerProcess]:
        self.run = f"trial-{next(numbers)}"
        for number, one in enumerate(self.workers):
            if not one.alive:
                self.workers[number] = await ProxiedWorker.behind(one.proxy)
        scheme = self.server.url.partition(":")[0]
        secs = {"heartbeat": 0.6 * self.lease_secs, "lease_secs": self.lease_secs, "connect_timeout": HANG_SECS}
        for one in self.workers:
            one.reset_counts()
            one.proxy.heal()
        opening = (
            one.do("open", url=f"{scheme}://127.0.0.1:{one.proxy.port}", run=self.run, **secs, **options) for one in self.workers
        )
        await asyncio.gather(*opening)
        return self.workers

    async def end(self) -> str:
        await close_all(self.workers)
        for proxy in self._proxies:
            proxy.end_all()  # also the server's ends of connections in a black hole
        return await until_nothing_left(self._left)  # the server needs a moment to notice the end

    async def abandon(self) -> None:
        for one in self.workers:
            one.proxy.heal()
            await one.kill()

    def links(self) -> Sequence[ProxiedWorker]:
        return self.workers


# Redis and Valkey.


async def _execute(setup: ServerSetup, *command: str | int) -> Any:
    from tests.support.redis_servers import execute

    return await execute(setup.server, *command)


async def flush_all(setup: ServerSetup, secs: float) -> None:
    await _execute(setup, "FLUSHALL")
    await _execute(setup, "SCRIPT", "FLUSH")


async def evict_key(setup: ServerSetup, secs: float) -> None:
    keys = await _execute(setup, "KEYS", f"aiohooks:{{{setup.run}}}*")
    await _execute(setup, "DEL", random.Random(secs).choice(sorted(keys)))


async def drop_clients(setup: ServerSetup, secs: float) -> None:
    await _execute(setup, "CLIENT", "KILL", "TYPE", "normal")


async def make_replica(setup: ServerSetup, secs: float) -> None:
    await _execute(setup, "REPLICAOF", "127.0.0.1", "1")
    await last(secs)
    await _execute(setup, "REPLICAOF", "NO", "ONE")


async def fill_memory(setup: ServerSetup, secs: float) -> None:
    await _execute(setup, "CONFIG", "SET", "maxmemory", "1")
    await last(secs)
    await _execute(setup, "CONFIG", "SET", "maxmemory", "0")


class RedisSetup(ServerSetup):
    """Redis or Valkey."""

    strikes: ClassVar[Strikes[Any]] = {
        "data lost": {**ServerSetup.strikes["data lost"], "flushed": flush_all, "a key evicted": evict_key},
        "outage longer than a lease": {
            **ServerSetup.strikes["outage longer than a lease"],
            "a replica for a while": make_replica,
            "no memory for a while": fill_memory,
        },
        "brief": {**ServerSetup.strikes["brief"], "clients dropped": drop_clients},
    }


@contextlib.asynccontextmanager
async def redis_setup(kind: str, directory: Path) -> AsyncGenerator[EngineSetup]:
    async def left() -> str:
        from tests.support.redis_servers import execute

        clients = (await execute(server, "CLIENT LIST")) or []
        stats = await execute(server, "INFO", "clients")
        return f"{len(clients) - 1} connections are left" if len(clients) > 1 or stats["blocked_clients"] else ""

    server = Server(kind, directory)
    await asyncio.to_thread(server.start)
    async with RedisSetup(server, left).start() as setup:
        yield setup


# NATS.


@contextlib.asynccontextmanager
async def nats_setup(directory: Path) -> AsyncGenerator[EngineSetup]:
    monitor = free_port()

    def monitored(what: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{monitor}/{what}", timeout=HANG_SECS) as reply:
            return json.load(reply)

    def count_left() -> str:
        clients, consumers = monitored("connz")["num_connections"], monitored("jsz")["consumers"]
        return f"{clients} connections and {consumers} consumers are left" if clients or consumers else ""

    server = Server("nats", directory, ["-m", str(monitor)])
    await asyncio.to_thread(server.start)
    async with ServerSetup(server, lambda: asyncio.to_thread(count_left)).start() as setup:
        yield setup


# Files.


async def remove_directory(setup: LocalSetup, secs: float) -> None:
    while setup.run_directory.exists():  # a process may just be making a file in it
        shutil.rmtree(setup.run_directory, ignore_errors=True)


async def move_directory(setup: LocalSetup, secs: float) -> None:
    setup.run_directory.rename(setup.run_directory.with_name(f"{setup.run} moved"))


async def hold_lock(setup: LocalSetup, secs: float) -> None:
    """All writes wait, as if another process had been stopped while it held the lock."""
    fd = os.open(setup.run_directory, os.O_RDONLY)
    try:
        await asyncio.to_thread(fcntl.flock, fd, fcntl.LOCK_EX)
        await last(secs)
    finally:
        os.close(fd)


class LocalSetup(EngineSetup):
    """Files: there is no server, and no lease; who is stopped is not dead."""

    strikes: ClassVar[Strikes[Any]] = {
        "data lost": {"directory removed": remove_directory, "directory moved": move_directory},
        "outage longer than a lease": {"lock held": hold_lock},
        "brief": {"none": nothing, "lock held": hold_lock},
    }
    leased = False
    keeps_run = False

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.run = ""

    @property
    def run_directory(self) -> Path:
        return self.directory / self.run

    async def begin(self, **options: Any) -> Sequence[WorkerProcess]:
        self.run = f"trial-{next(numbers)}"
        workers = [one for one in self.workers if one.alive]
        self.workers = [*workers, *[await WorkerProcess.start() for _ in range(3 - len(workers))]]
        for one in self.workers:
            one.reset_counts()
        url = f"local://{self.directory}"
        await asyncio.gather(*(one.do("open", url=url, run=self.run, **options) for one in self.workers))
        return self.workers

    async def end(self) -> str:
        await close_all(self.workers)
        run = self.run_directory
        left = [*(run / "alive").iterdir()] if run.exists() else []
        return f"{left} are left" if left else ""

    async def abandon(self) -> None:
        await asyncio.gather(*(one.kill() for one in self.workers))


@contextlib.asynccontextmanager
async def local_setup(directory: Path) -> AsyncGenerator[EngineSetup]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as runs:
        setup = LocalSetup(Path(runs))
        try:
            yield setup
        finally:
            await setup.abandon()


# Ray.


async def kill_actor(setup: RaySetup, secs: float) -> None:
    await setup.signal_actor(signal.SIGKILL)
    await last(secs)


async def kill_actor_twice(setup: RaySetup, secs: float) -> None:
    """The actor is killed again as soon as it is back."""
    await setup.signal_actor(signal.SIGKILL)
    while True:
        try:
            await setup.signal_actor(signal.SIGKILL)
        except Exception:
            await last(0.05)
        else:
            return


async def stop_actor(setup: RaySetup, secs: float) -> None:
    pid = await setup.signal_actor(signal.SIGSTOP)
    await last(secs)
    os.kill(pid, signal.SIGCONT)


class RaySetup(EngineSetup):
    """An actor; lost connections are handled by Ray itself."""

    strikes: ClassVar[Strikes[Any]] = {
        "data lost": {"actor killed": kill_actor, "actor killed twice": kill_actor_twice},
        "outage longer than a lease": {"actor stopped": stop_actor},
        "brief": {"none": nothing, "actor stopped": stop_actor},
    }
    lease_secs = 1.0
    heartbeat_secs = 1.0
    exact_sums = True

    def __init__(self, address: str) -> None:
        super().__init__()
        self.run = ""
        self._address = address

    async def begin(self, **options: Any) -> Sequence[WorkerProcess]:
        self.run = f"trial-{os.getpid()}-{next(numbers)}"
        workers = [one for one in self.workers if one.alive]
        while len(workers) < 3:
            workers.append(await WorkerProcess.start("tests.support.ray_worker", self._address))
        self.workers = workers
        secs = {"heartbeat": self.heartbeat_secs, "lease_secs": self.lease_secs, "join_grace_secs": 0.0}
        where = {"url": "ray://faults", "run": self.run, "address": self._address}
        opening = [one.order("open", **where, **secs, **options) for one in workers]
        for one, opened in zip(workers, opening, strict=True):
            one.reset_counts()
            # A new process joins the cluster first.
            answer = await reply_to(opened, "open")
            assert "result" in answer, answer
        return workers

    async def end(self) -> str:
        from aiohooks.stores.ray import _cluster

        await close_all(self.workers)
        actor = await self.actor()

        async def polls() -> str:
            waiting: int = (await actor.statistics.remote())["waiting"]
            return f"{waiting} polls are left in the actor" if waiting else ""

        left = await until_nothing_left(polls)  # the poll of a killed process ends after its heartbeat
        await asyncio.to_thread(_cluster.kill_actor, actor)
        return left

    async def abandon(self) -> None:
        for one in self.workers:
            await one.kill()

    async def actor(self) -> Any:
        """Return the actor of the run."""
        from tests.support.ray_cluster import actor_of

        return await asyncio.to_thread(actor_of, self.run, "faults")

    async def signal_actor(self, number: signal.Signals) -> int:
        """Send a signal to the actor's process, and return its id."""
        pid: int = (await (await self.actor()).statistics.remote())["pid"]
        os.kill(pid, number)
        return pid


@contextlib.asynccontextmanager
async def ray_setup(address: str) -> AsyncGenerator[EngineSetup]:
    from aiohooks.stores.ray import _cluster

    await asyncio.to_thread(_cluster.join, address, timeout=HANG_SECS, log_to_driver=False)
    setup = RaySetup(address)
    try:
        yield setup
    finally:
        for one in setup.workers:
            await one.end()
        await asyncio.to_thread(_cluster.leave)


@contextlib.asynccontextmanager
async def cluster_of(engine: str) -> AsyncGenerator[str]:
    """Run what all setups of an engine share, and yield its address; a Ray cluster that runs already is in AIOHOOKS_TEST_RAY."""
    address = os.environ.get("AIOHOOKS_TEST_RAY", "")
    if engine != "ray" or address:
        yield address
        return
    from tests.support.ray_cluster import ray_cluster

    cluster = ray_cluster()
    address = await asyncio.to_thread(cluster.__enter__)
    try:
        yield address
    finally:
        await asyncio.to_thread(cluster.__exit__, None, None, None)


def engine_setup(engine: str, directory: Path, address: str = "") -> contextlib.AbstractAsyncContextManager[EngineSetup]:
    """Run an engine with its processes for the block; `address` is that of `cluster_of`."""
    if engine == "nats":
        return nats_setup(directory)
    if engine == "local":
        return local_setup(directory)
    if engine == "ray":
        return ray_setup(address)
    return redis_setup(engine, directory)
