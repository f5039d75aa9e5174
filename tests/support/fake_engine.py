"""An engine in memory, for stores over processes in one process: it can go away, lose answers, and lose its data."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohooks._aio.clock import current_clock
from aiohooks.errors import StoreDamagedError, StoreUnavailableError
from aiohooks.stores import RemoteStepStore
from aiohooks.stores._protocol import Answer, Join, Lead, Request, Snapshot
from aiohooks.stores._run_state import RunState


class FakeEngine:
    """What a server is to real stores."""

    def __init__(self) -> None:
        self.runs: dict[str, RunState] = {}
        self.up = True
        self.damaged: set[str] = set()
        """Runs that hold something else."""
        self.answers_to_lose = 0
        self.requests: list[Request] = []
        self.leases: dict[tuple[str, str], float] = {}
        self.watches: set[asyncio.Future[None]] = set()
        self.connections = 0
        self.clock = current_clock()

    def run(self, name: str) -> RunState:
        self.check()
        if name in self.damaged:
            raise StoreDamagedError(f"{name} is damaged", path=name, found="nonsense", expected="sense")
        return self.runs.setdefault(name, RunState())

    def check(self) -> None:
        if not self.up:
            raise StoreUnavailableError("the fake engine is away")

    def apply(self, name: str, request: Request) -> Answer:
        self.requests.append(request)
        answer = self.run(name).apply(request)
        if isinstance(request, (Join, Lead)):
            self.leases[name, request.member.id] = self.clock.now() + request.member.ttl
        self.tell()
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
            self.tell()
        left = [self.leases[name, id] - now for id in state.members]
        return state.snapshot(min(left, default=None))

    def tell(self) -> None:
        for watch in self.watches:
            if not watch.done():
                watch.set_result(None)

    def cut(self) -> None:
        """All connections end; new ones can be made."""
        for watch in self.watches:
            if not watch.done():
                watch.set_exception(StoreUnavailableError("the fake engine hung up"))

    def go(self, *, data_lost: bool = False) -> None:
        """The server dies."""
        self.up = False
        if data_lost:
            self.runs.clear()
        self.tell()

    def come_back(self) -> None:
        self.up = True


class FakeStepStore(RemoteStepStore):
    """A store behind it; only positions from its lowest threshold on are reported, as by real engines."""

    def __init__(self, engine: FakeEngine, *, run: str = "default", **options: Any) -> None:
        super().__init__(run=run, **options)
        self._engine = engine
        self._due: int | None = None

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
            snapshot = engine.snapshot(self.run)
            due = self._due is not None and snapshot.position.step >= self._due
            if due or snapshot.revision != self._snapshot.revision or snapshot.position.epoch != self._snapshot.position.epoch:
                self._observe_snapshot(snapshot)
            watch = asyncio.get_running_loop().create_future()
            engine.watches.add(watch)
            try:
                await watch
            finally:
                engine.watches.discard(watch)

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
        self._due = step
        self._engine.tell()
