"""A stage with an engine: processes with stores, variables and sessions of their own, and what must hold in all of them.

Every request to the engine is a suspension at which the operation may be cancelled, also those that the stores' own tasks make;
these tasks themselves are never cancelled, since nobody else knows them. Time is moved by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any

import aiohooks as ah
from aiohooks.stores import Position
from aiohooks.stores._protocol import Answer, Request, Snapshot
from aiohooks.stores._run_state import RunState
from tests.fuzz.driver import SPARED
from tests.fuzz.playbook import finish
from tests.fuzz.stage import QUICK, Stage
from tests.support.fake_engine import FakeEngine, FakeStepStore

RUN = "default"


class StageStore(FakeStepStore):
    """A store of one process: its requests are watched, and each answer takes its time, so that it may come too late."""

    def __init__(self, stage: StoreStage, **options: Any) -> None:
        super().__init__(stage.engine, run=RUN, **options)
        self.stage = stage
        self.connected = False

    async def _seen(self, coro: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.current_task()
        assert task is not None
        if not task.get_name().startswith("step store"):
            return await coro  # of the caller's, who is watched where it is one of the play's
        return await self.stage.probe.watched(f"{SPARED}engine", coro)

    async def _slowly(self, coro: Coroutine[Any, Any, Any]) -> Any:
        answer = await coro
        await self.stage.pause("answer", 1)
        return answer

    async def _connect(self) -> Snapshot:
        snapshot: Snapshot = await self._seen(self._slowly(super()._connect()))
        self.connected = True
        return snapshot

    async def _request_once(self, request: Request) -> Answer:
        answer: Answer = await self._seen(self._slowly(super()._request_once(request)))
        return answer

    async def _read_run_once(self) -> Snapshot:
        snapshot: Snapshot = await self._seen(self._slowly(super()._read_run_once()))
        return snapshot

    async def _close_connection(self) -> None:
        self.connected = False
        await self._seen(super()._close_connection())


@dataclass
class Process:
    """What one process has: its own store and its own variables."""

    stage: StoreStage
    name: str
    store: StageStore
    variables: ah.Variables = field(default_factory=ah.Variables)

    def session(self, *, chief: bool, hooks: Any = (), **creator: Any) -> ah.AsyncMonitoredSession:
        """A session of a chief, or of a worker that waits for one."""
        kind = ah.ChiefSessionCreator if chief else ah.WorkerSessionCreator
        variables = self.variables if chief else None  # a worker's own ones, since the chief's are elsewhere
        made = kind(self.stage.graph, global_step=self.store, variables=variables, **creator)
        if not chief:
            self.variables = made._own  # type: ignore[union-attr, assignment]
        return ah.AsyncMonitoredSession(made, hooks, recovery=QUICK, name=self.name)


@dataclass
class StoreStage(Stage):
    """One performance on an engine."""

    processes: list[Process] = field(default_factory=list)
    digits: int = 0
    """How many advances were asked for by `advance`."""
    answered: set[int] = field(default_factory=set)
    make_store: type[StageStore] = StageStore
    stands_still: bool = False
    """Whether time passes no more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine = FakeEngine()

    async def operation(self) -> None:
        random.seed(self.seed)  # the pauses between two tries
        await super().operation()

    # -- what a play uses

    @contextlib.asynccontextmanager
    async def process(self, name: str, *, opened: bool = True, **options: Any) -> AsyncIterator[Process]:
        """A process with a store, which is closed at the end; not `opened`, whoever needs it first opens it."""
        if not self.processes:
            self.engine.clock = self.clock
        process = Process(self, name, self.make_store(self, **options))
        self.processes.append(process)
        if opened:
            async with process.store:
                yield process
            return
        try:
            yield process
        finally:
            await finish(process.store.aclose)

    async def advance(self, store: ah.StepStore) -> None:
        """Advances by a power of four: the digits of the step say which advances were counted, and how often."""
        number, self.digits = self.digits, self.digits + 1
        await store.advance(4**number)
        self.answered.add(number)

    def outage(self, ticks: int, secs: float = 0.25, **how: Any) -> None:
        """The engine is away for so many ticks; time passes from now on."""
        self.engine.go(**how)
        self.pass_time(secs, ticks)

    def pass_time(self, secs: float = 0.25, ticks: int = -1) -> None:
        """Moves the clock at every tick until the operation has ended; the engine comes back after `ticks`."""
        if self.left or self.stands_still:
            return
        self.clock.advance(secs)
        if ticks == 0:
            self.engine.come_back()
        asyncio.get_running_loop().call_soon(self.pass_time, secs, ticks - 1)

    # -- what must hold

    @property
    def run_state(self) -> RunState:
        """The run as the engine has it."""
        return self.engine.runs.get(RUN) or RunState()

    @property
    def step(self) -> int:
        """The step as far as it is known anywhere: an engine may have lost it."""
        return max([self.run_state.position, *(one.store.latest for one in self.processes)], default=Position(1, 0)).step

    @property
    def weights(self) -> int:
        """What all processes have added to their variables."""
        return sum(one.variables.snapshot().get("w", 0) for one in self.processes)

    def look(self) -> None:
        """Variables come first, the step comes when the engine says so."""
        if self.digits:
            return
        ahead = self.weights - self.step
        if not 0 <= ahead <= len(self.processes):
            self.problem(f"all or nothing: the variables are {ahead} ahead of step {self.step}")

    def status(self) -> list[str]:
        """Nothing is left here or in the engine, and each advance was counted once or not at all."""
        found = super().status()
        state = self.run_state
        if self.digits:
            found += self._miscounted()
        elif self.weights != self.step:
            found.append(f"exactly once: the variables are {self.weights}, the step is {self.step}")
        if state.position.step < self.step:
            found.append(f"the engine is at {state.position}, and {self.step} was known")
        if self.engine.watches:
            found.append("I9: the engine is still watched")
        ours = {one.store._process for one in self.processes}
        left = [member.name for member in state.members.values() if member.process in ours]
        if left:
            found.append(f"I9: the engine still has {', '.join(left)}")
        for one in self.processes:
            found += [f"I9: the store of {one.name} {what}" for what in self._left_of(one.store)]
        if self.clock.pending:
            found.append(f"I9: {self.clock.pending} timers are left")
        return found

    def _left_of(self, store: StageStore) -> list[str]:
        found: list[str] = []
        statistics = store.statistics()
        room = store._waits
        if statistics.waiting or statistics.watching or room.waiting or room.publishers.here:
            found.append(f"still has {statistics}")
        if store.connected:
            found.append("is still connected")
        return found

    def _miscounted(self) -> list[str]:
        found: list[str] = []
        step = self.step
        for number in range(self.digits):
            step, times = divmod(step, 4)
            if times > 1:
                found.append(f"exactly once: advance {number} was counted {times} times")
            elif not times and number in self.answered:
                found.append(f"exactly once: advance {number} was answered and not counted")
        if step:
            found.append("exactly once: something was counted that nobody asked for")
        return found
