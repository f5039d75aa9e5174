"""An engine in memory behind a connection: it can be unavailable, lose answers, and lose its
data.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Generator
from typing import Any

from aiohooks.errors import StoreDamagedError, StoreUnavailableError
from aiohooks.stores import Engine, SharedStepStore
from aiohooks.stores._protocol import Answer, Request, Snapshot
from aiohooks.stores.engine import RunState


class FakeEngine:
    """The server of the fake stores."""

    def __init__(self) -> None:
        self.runs: dict[str, RunState] = {}
        self.run_ids: dict[str, str] = {}
        self.up = True
        self.damaged: set[str] = set()
        """The names of damaged runs."""
        self.answers_to_lose = 0
        self.requests: list[Request] = []
        self.watchers: set[asyncio.Future[None]] = set()
        self.connections = 0
        self._numbers = itertools.count(1)

    def run(self, name: str) -> RunState:
        self.check()
        if name in self.damaged:
            raise StoreDamagedError(
                f"{name} is damaged", path=name, found="nonsense", expected="sense"
            )
        if name not in self.runs:
            self.runs[name], self.run_ids[name] = RunState(), str(next(self._numbers))
        return self.runs[name]

    def run_of(self, name: str, run_id: str) -> RunState:
        """Return a run that a store knows; with another id it is one that the store has said
        nothing to.
        """
        state = self.run(name)
        if self.run_ids[name] != run_id:
            raise StoreUnavailableError("the fake engine has lost its data")
        return state

    def check(self) -> None:
        if not self.up:
            raise StoreUnavailableError("the fake engine is unavailable")

    def apply(self, name: str, request: Request, run_id: str | None = None) -> Answer:
        """Apply a request of a store that knows the run of this id, or of another process."""
        self.requests.append(request)
        answer = (self.run(name) if run_id is None else self.run_of(name, run_id)).apply(request)
        self.notify()
        if self.answers_to_lose:
            self.answers_to_lose -= 1
            raise StoreUnavailableError("the answer was lost")
        return answer

    def notify(self) -> None:
        for watcher in self.watchers:
            if not watcher.done():
                watcher.set_result(None)

    def cut(self, *only: asyncio.Future[None]) -> None:
        """End all connections, or only these; new ones can be made."""
        for watcher in only or self.watchers:
            if not watcher.done():
                watcher.set_exception(
                    StoreUnavailableError("the fake engine closed the connection")
                )

    def stop(self, *, data_lost: bool = False) -> None:
        """Make the server unavailable, and lose its data if asked."""
        self.up = False
        if data_lost:
            self.lose_data()
        self.notify()

    def lose_data(self) -> None:
        """Lose all runs, while the connections stay."""
        self.runs.clear()
        self.run_ids.clear()

    def restart(self) -> None:
        self.up = True


class FakeConnection(Engine):
    """A store's connection to the fake engine, which reports only positions from the lowest
    threshold on, as real engines do.
    """

    def __init__(self, engine: FakeEngine) -> None:
        self.server = engine
        self._run_id = ""
        self._reported: Snapshot | None = None
        self._notified: asyncio.Future[None] | None = None

    async def connect(self) -> Snapshot:
        await asyncio.sleep(0)
        server, before = self.server, self._run_id
        server.check()
        server.connections += 1
        state = server.run(self.link.run)
        if before == server.run_ids[self.link.run] and state.position < self.link.waits.latest:
            server.lose_data()  # the rest of it: it is an older copy
            state = server.run(self.link.run)
        self._run_id = server.run_ids[self.link.run]
        if before not in ("", self._run_id):
            state.follow(self.link.waits.known_run)
            server.notify()
        self._reported = self._read()
        return self._reported

    def _read(self) -> Snapshot:
        state = self.server.run_of(self.link.run, self._run_id)
        return state.snapshot(self._run_id)

    async def watch(self) -> None:
        server, link = self.server, self.link
        while True:
            snapshot, known, threshold = self._read(), self._reported, link.waits.waiters.lowest
            if (
                known is None
                or snapshot.revision != known.revision
                or snapshot.position.epoch != known.position.epoch
            ):
                self._reported = snapshot
                link.observe(snapshot)
            elif snapshot.position.step >= threshold:
                link.observe(snapshot.position)
            self._notified = watcher = asyncio.get_running_loop().create_future()
            server.watchers.add(watcher)
            try:
                await watcher
            finally:
                server.watchers.discard(watcher)

    async def request(self, request: Request) -> Answer:
        self.server.check()
        await asyncio.sleep(0)
        with self._reconnecting():
            answer = self.server.apply(self.link.run, request, self._run_id)
            if answer.status == "lost":
                self.cut()
                raise StoreUnavailableError("the fake engine has an older copy of its data")
            self._read()
        return answer

    async def read(self) -> Snapshot:
        await asyncio.sleep(0)
        with self._reconnecting():
            return self._read()

    @property
    def is_current(self) -> bool:
        """Whether it knows the run as it is in the engine."""
        return self.server.run_ids.get(self.link.run) == self._run_id

    def cut(self) -> None:
        """End the connection; a new one can be made."""
        assert self._notified is not None
        self.server.cut(self._notified)

    @contextlib.contextmanager
    def _reconnecting(self) -> Generator[None]:
        """End the connection when the engine has lost its data."""
        try:
            yield
        except StoreUnavailableError as error:
            watcher = self._notified
            if not self.is_current and watcher is not None and not watcher.done():
                watcher.set_exception(error)
            raise

    async def disconnect(self) -> None:
        await asyncio.sleep(0)

    async def delete(self) -> None:
        await asyncio.sleep(0)
        self.server.check()
        self.server.damaged.discard(self.link.run)
        self.server.runs.pop(self.link.run, None)

    def subscribe(self, step: int | None) -> None:
        self.server.notify()


class FakeStepStore(SharedStepStore):
    """A store on the fake engine."""

    def __init__(self, server: FakeEngine | FakeConnection, **options: Any) -> None:
        self.connection = FakeConnection(server) if isinstance(server, FakeEngine) else server
        super().__init__(self.connection, **options)
