"""An engine in memory for RemoteStepStore: it can be unavailable, lose answers, and lose its data."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohooks._aio.clock import current_clock
from aiohooks.errors import StoreDamagedError, StoreUnavailableError
from aiohooks.stores import RemoteStepStore
from aiohooks.stores._protocol import Answer, Join, Lead, Request, Snapshot
from aiohooks.stores._run_state import RunState


class FakeEngine:
    """The server of the fake stores."""

    def __init__(self) -> None:
        self.runs: dict[str, RunState] = {}
        self.up = True
        self.damaged: set[str] = set()
        """The names of damaged runs."""
        self.answers_to_lose = 0
        self.requests: list[Request] = []
        self.leases: dict[tuple[str, str], float] = {}
        self.watchers: set[asyncio.Future[None]] = set()
        self.connections = 0
        self.clock = current_clock()

    def run(self, name: str) -> RunState:
        self.check()
        if name in self.damaged:
            raise StoreDamagedError(f"{name} is damaged", path=name, found="nonsense", expected="sense")
        return self.runs.setdefault(name, RunState())

    def check(self) -> None:
        if not self.up:
            raise StoreUnavailableError("the fake engine is unavailable")

    def apply(self, name: str, request: Request) -> Answer:
        self.requests.append(request)
        answer = self.run(name).apply(request)
        if isinstance(request, (Join, Lead)):
            self.leases[name, request.member.id] = self.clock.now() + request.member.ttl
        self.notify()
        if self.answers_to_lose:
            self.answers_to_lose -= 1
            raise StoreUnavailableError("the answer was lost")
        return answer

    def snapshot(self, name: str) -> Snapshot:
        state = self.run(name)
        now = self.clock.now()
        revision = state.revision
        for member in tuple(state.members.values()):
            if self.leases[name, member.id] <= now:
                state.expire(member.id, member.heartbeat)
        if state.revision != revision:
            self.notify()
        left = [self.leases[name, id] - now for id in state.members]
        return state.snapshot(min(left, default=None))

    def notify(self) -> None:
        for watcher in self.watchers:
            if not watcher.done():
                watcher.set_result(None)

    def cut(self) -> None:
        """End all connections; new ones can be made."""
        for watcher in self.watchers:
            if not watcher.done():
                watcher.set_exception(StoreUnavailableError("the fake engine closed the connection"))

    def stop(self, *, data_lost: bool = False) -> None:
        """Make the server unavailable, and lose its data if asked."""
        self.up = False
        if data_lost:
            self.runs.clear()
        self.notify()

    def restart(self) -> None:
        self.up = True


class FakeStepStore(RemoteStepStore):
    """A store on the fake engine, which reports only positions from the lowest threshold on, as real engines do."""

    def __init__(self, engine: FakeEngine, *, run: str = "default", **options: Any) -> None:
        super().__init__(run=run, **options)
        self._engine = engine
        self._threshold: int | None = None

    async def _open_connection(self) -> None:
        await asyncio.sleep(0)
        self._engine.check()
        self._engine.connections += 1

    async def _connect(self) -> Snapshot:
        await self._open_connection()
        return self._engine.snapshot(self.run)

    async def _watch(self) -> None:
        engine = self._engine
        while True:
            snapshot, known = engine.snapshot(self.run), self._snapshot
            reached = self._threshold is not None and snapshot.position.step >= self._threshold
            if reached or snapshot.revision != known.revision or snapshot.position.epoch != known.position.epoch:
                self._observe_snapshot(snapshot)
            watcher = asyncio.get_running_loop().create_future()
            engine.watchers.add(watcher)
            try:
                await watcher
            finally:
                engine.watchers.discard(watcher)

    async def _request_once(self, request: Request) -> Answer:
        self._engine.check()
        await asyncio.sleep(0)
        return self._engine.apply(self.run, request)

    async def _read_run_once(self) -> Snapshot:
        await asyncio.sleep(0)
        return self._engine.snapshot(self.run)

    async def _close_connection(self) -> None:
        await asyncio.sleep(0)

    async def _delete_run_once(self) -> None:
        self._engine.check()
        self._engine.damaged.discard(self.run)
        self._engine.runs.pop(self.run, None)

    def _subscribe(self, step: int | None) -> None:
        super()._subscribe(step)
        self._threshold = step
        self._engine.notify()
