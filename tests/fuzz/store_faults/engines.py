"""The engines, each with three processes on it, and the faults that each can have as a whole.

The faults are in three groups: those that lose the engine's data, those in which it is away for
longer than a lease, and brief ones. An engine is an `EngineSetup`; each trial has a run of its own.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import fcntl
import os
import random
import shutil
import signal
import sqlite3
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from tests.fuzz._harness import scratch
from tests.support.store_processes import TICK_SECS, WorkerProcess, numbers, reply_to
from tests.support.store_proxy import Proxy
from tests.support.store_servers import Server
from tests.support.waiting import HANG_SECS, elapse

Group = Literal["data lost", "outage longer than a lease", "brief"]
GROUPS: tuple[Group, ...] = ("data lost", "outage longer than a lease", "brief")

Strike = Callable[[Any, float], Awaitable[None]]
"""Let the engine of a setup fail; its faults that last a while last so many seconds. It works again
afterwards.
"""
Strikes = Mapping[Group, Mapping[str, Strike]]


class EngineSetup(abc.ABC):
    """An engine and three processes."""

    strikes: ClassVar[Strikes]
    leased: ClassVar[bool] = True
    """Whether a process that is stopped counts as dead."""
    keeps_run: ClassVar[bool] = True
    """Whether the run continues after the data was lost; otherwise every call and wait ends with an
    error.
    """
    lease_secs: ClassVar[float] = 0.5

    def __init__(self) -> None:
        self.workers: list[WorkerProcess] = []
        self.run = ""

    @abc.abstractmethod
    def where(self, number: int) -> dict[str, Any]:
        """Return the URL and the options of the store of a process."""

    @abc.abstractmethod
    async def left(self) -> str:
        """Return what is left in the engine."""

    async def start_worker(self) -> WorkerProcess:
        """Start a process."""
        return await WorkerProcess.start()

    def links(self) -> Sequence[Proxy]:
        """Return the connections of the processes, if those can fail."""
        return ()

    async def begin(self, **options: Any) -> Sequence[WorkerProcess]:
        """Open a new run in all processes; return them."""
        self.run = f"trial-{os.getpid()}-{next(numbers)}"
        living = [one for one in self.workers if one.alive]
        self.workers = [
            *living,
            *await asyncio.gather(*(self.start_worker() for _ in range(3 - len(living)))),
        ]
        for link in self.links():
            link.heal()
        opening = [
            one.order("open", run=self.run, **self.where(number), **options)
            for number, one in enumerate(self.workers)
        ]
        for one, opened in zip(self.workers, opening, strict=True):
            one.forget()
            answer = await reply_to(opened, "open")
            assert "result" in answer, answer
        return self.workers

    async def end(self) -> str:
        """Close all stores; return what is left in the engine, which needs a moment to notice the
        end.
        """
        await asyncio.gather(*(one.do("close") for one in self.workers if one.alive))
        for link in self.links():
            link.end_all()  # also the server's ends of connections in a black hole
        until = time.monotonic() + HANG_SECS
        while (found := await self.left()) and time.monotonic() < until:
            await elapse(TICK_SECS)
        return found

    async def abandon(self) -> None:
        """End all processes, after a failed trial or the last one."""
        for link in self.links():
            link.heal()
        await asyncio.gather(*(one.kill() for one in self.workers))


async def nothing(setup: EngineSetup, secs: float) -> None:
    await elapse(secs)


# Engines with a server.


def killed(*, keeps_data: bool = True) -> Strike:
    async def strike(setup: ServerSetup, secs: float) -> None:
        await asyncio.to_thread(setup.server.kill)
        if not keeps_data:
            setup.server.lose_data()
        await elapse(secs)
        await asyncio.to_thread(setup.server.start)

    return strike


async def pause(setup: ServerSetup, secs: float) -> None:
    setup.server.pause()
    await elapse(secs)
    setup.server.resume()


def links(fail: Callable[[Proxy], None]) -> Strike:
    async def strike(setup: ServerSetup, secs: float) -> None:
        for link in setup.links():
            fail(link)
        await elapse(secs)
        for link in setup.links():
            link.heal()

    return strike


class ServerSetup(EngineSetup):
    """A server, and a proxy before each process."""

    strikes: ClassVar[Strikes] = {
        "data lost": {"restarted without data": killed(keeps_data=False)},
        "outage longer than a lease": {
            "killed for a while": killed(),
            "stopped for a while": pause,
            "all links cut": links(Proxy.cut),
            "all links a black hole": links(Proxy.black_hole),
        },
        "brief": {"none": nothing, "restarted": killed(), "stopped": pause},
    }

    def __init__(self, server: Server, proxies: Sequence[Proxy]) -> None:
        super().__init__()
        self.server = server
        self._proxies = proxies

    def where(self, number: int) -> dict[str, Any]:
        secs = {
            "heartbeat": 0.6 * self.lease_secs,
            "lease_secs": self.lease_secs,
            "connect_timeout": HANG_SECS,
        }
        return {
            "url": self.server.url.replace(str(self.server.port), str(self._proxies[number].port)),
            **secs,
        }

    def links(self) -> Sequence[Proxy]:
        return self._proxies


async def execute(setup: ServerSetup, *command: str | int) -> Any:
    from tests.support import redis_servers

    return await redis_servers.execute(setup.server, *command)


async def flush_all(setup: RedisSetup, secs: float) -> None:
    await execute(setup, "FLUSHALL")
    await execute(setup, "SCRIPT", "FLUSH")


async def evict_key(setup: RedisSetup, secs: float) -> None:
    keys = await execute(setup, "KEYS", f"aiohooks:{{{setup.run}}}*")
    await execute(setup, "DEL", random.Random(secs).choice(sorted(keys)))


async def drop_clients(setup: RedisSetup, secs: float) -> None:
    await execute(setup, "CLIENT", "KILL", "TYPE", "normal")


def set_for_a_while(command: Sequence[str | int], back: Sequence[str | int]) -> Strike:
    async def strike(setup: RedisSetup, secs: float) -> None:
        await execute(setup, *command)
        await elapse(secs)
        await execute(setup, *back)

    return strike


class RedisSetup(ServerSetup):
    """Redis or Valkey."""

    strikes: ClassVar[Strikes] = {
        "data lost": {
            **ServerSetup.strikes["data lost"],
            "flushed": flush_all,
            "a key evicted": evict_key,
        },
        "outage longer than a lease": {
            **ServerSetup.strikes["outage longer than a lease"],
            "a replica for a while": set_for_a_while(
                ("REPLICAOF", "127.0.0.1", 1), ("REPLICAOF", "NO", "ONE")
            ),
            "no memory for a while": set_for_a_while(
                ("CONFIG", "SET", "maxmemory", 1), ("CONFIG", "SET", "maxmemory", 0)
            ),
        },
        "brief": {**ServerSetup.strikes["brief"], "clients dropped": drop_clients},
    }

    async def left(self) -> str:
        clients = (await execute(self, "CLIENT LIST")) or []
        stats = await execute(self, "INFO", "clients")
        return (
            f"{len(clients) - 1} connections are left"
            if len(clients) > 1 or stats["blocked_clients"]
            else ""
        )


@contextlib.asynccontextmanager
async def server_setup(kind: str, directory: Path) -> AsyncGenerator[EngineSetup]:
    server = Server(kind, directory)
    await asyncio.to_thread(server.start)
    try:
        async with contextlib.AsyncExitStack() as stack:
            proxies = [await stack.enter_async_context(Proxy.to(server.port)) for _ in range(3)]
            setup = RedisSetup(server, proxies)
            stack.push_async_callback(setup.abandon)
            yield setup
    finally:
        await asyncio.to_thread(server.kill)


# Files.


async def remove_directory(setup: LocalSetup, secs: float) -> None:
    while setup.run_directory.exists():  # a process may just be making a file in it
        shutil.rmtree(setup.run_directory, ignore_errors=True)


async def move_directory(setup: LocalSetup, secs: float) -> None:
    setup.run_directory.rename(setup.run_directory.with_name(f"{setup.run} moved"))


async def hold_lock(setup: LocalSetup, secs: float) -> None:
    """All writes wait, as if another process had been stopped while it held the lock."""
    holder = sqlite3.connect(setup.run_directory / "run.db", isolation_level=None)
    with contextlib.closing(holder), (setup.run_directory / "waiting").open("rb") as closing:
        # Its attempts end after some seconds, which a process may take on a busy machine.
        while True:
            try:
                holder.execute("BEGIN IMMEDIATE")
                break
            except sqlite3.OperationalError:
                await elapse(0.01)
        await elapse(secs)
        holder.execute("ROLLBACK")
        # Processes close the database under this lock: if two did so at the same time, neither
        # would be the last, and the files of the log would stay.
        await asyncio.to_thread(fcntl.flock, closing, fcntl.LOCK_EX)
        holder.close()


async def kill_lock_holder(setup: LocalSetup, secs: float) -> None:
    """Another process is killed while it holds the lock: those that wait for the lock continue."""
    holder = await setup.start_worker()
    await holder.do("open", run=setup.run, **setup.where(0))
    await holder.do("hold_lock")
    await elapse(secs)
    await holder.kill()


class LocalSetup(EngineSetup):
    """Files: there is no server, and no lease; who is stopped is not dead."""

    strikes: ClassVar[Strikes] = {
        "data lost": {"directory removed": remove_directory, "directory moved": move_directory},
        "outage longer than a lease": {"lock held": hold_lock},
        "brief": {"none": nothing, "lock held": hold_lock, "lock holder killed": kill_lock_holder},
    }
    leased = False
    keeps_run = False

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    @property
    def run_directory(self) -> Path:
        return self.directory / self.run

    def where(self, number: int) -> dict[str, Any]:
        return {"url": f"local://{self.directory}"}

    async def left(self) -> str:
        return left_in(self.run_directory)


def left_in(run: Path) -> str:
    """Return what processes have left in the directory of a run, which none of them has open any
    more.
    """
    if not run.exists():
        return ""
    expected = {"run.db", "waiting", "notify", "alive"}
    left = [
        *(run / "alive").iterdir(),
        *(path for path in run.iterdir() if path.name not in expected),
    ]
    slots = (run / "waiting").read_bytes() if (run / "waiting").exists() else b""
    return f"{left} and the slots {slots!r} are left" if left or any(slots) else ""


@contextlib.asynccontextmanager
async def local_setup() -> AsyncGenerator[EngineSetup]:
    with scratch() as runs:
        setup = LocalSetup(runs)
        try:
            yield setup
        finally:
            await setup.abandon()


# Ray.


def kill_actor(*, times: int) -> Strike:
    """The actor is killed, and again as soon as it is back."""

    async def strike(setup: RaySetup, secs: float) -> None:
        for number in range(times):
            while True:
                try:
                    await setup.signal_actor(signal.SIGKILL)
                except Exception:
                    if not number:
                        raise
                    await elapse(0.05)  # it is not back yet
                else:
                    break
        if times == 1:
            await elapse(secs)

    return strike


async def stop_actor(setup: RaySetup, secs: float) -> None:
    pid = await setup.signal_actor(signal.SIGSTOP)
    await elapse(secs)
    os.kill(pid, signal.SIGCONT)


class RaySetup(EngineSetup):
    """An actor; lost connections are handled by Ray itself."""

    strikes: ClassVar[Strikes] = {
        "data lost": {
            "actor killed": kill_actor(times=1),
            "actor killed twice": kill_actor(times=2),
        },
        "outage longer than a lease": {"actor stopped": stop_actor},
        "brief": {"none": nothing, "actor stopped": stop_actor},
    }
    lease_secs = 1.0

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address

    def where(self, number: int) -> dict[str, Any]:
        secs = {"heartbeat": 1.0, "lease_secs": self.lease_secs}
        return {"url": "ray://faults", **secs}

    async def start_worker(self) -> WorkerProcess:
        return await WorkerProcess.start(self._address)

    async def left(self) -> str:
        waiting: int = (await (await self.actor()).statistics.remote())["waiting"]
        return (
            f"{waiting} polls are left in the actor" if waiting else ""
        )  # that of a killed process ends after its heartbeat

    async def end(self) -> str:
        import ray

        left = await super().end()
        await asyncio.to_thread(ray.kill, await self.actor())
        return left

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
    setup = RaySetup(address)
    try:
        yield setup
    finally:
        for worker in setup.workers:
            await worker.end()


@contextlib.asynccontextmanager
async def cluster_of(engine: str) -> AsyncGenerator[str]:
    """Run what all setups of an engine share, and yield its address; a Ray cluster that runs
    already is in AIOHOOKS_TEST_RAY. This process is a member of the Ray cluster.
    """
    if engine != "ray":
        yield ""
        return
    from tests.support.ray_cluster import membership, ray_cluster

    with contextlib.ExitStack() as stack:
        address = os.environ.get("AIOHOOKS_TEST_RAY", "")
        if not address:
            address = stack.enter_context(ray_cluster())
        stack.enter_context(membership(address))
        yield address


ENGINES: Mapping[str, type[EngineSetup]] = {
    "redis": RedisSetup,
    "valkey": RedisSetup,
    "local": LocalSetup,
    "ray": RaySetup,
}


def engine_setup(
    engine: str, directory: Path, address: str = ""
) -> contextlib.AbstractAsyncContextManager[EngineSetup]:
    """Run an engine with its processes for the block; `address` is that of `cluster_of`."""
    if engine == "local":
        return local_setup()
    if engine == "ray":
        return ray_setup(address)
    return server_setup(engine, directory)
