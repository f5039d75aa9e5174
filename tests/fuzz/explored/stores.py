"""Scenarios with a store of several processes: chiefs, workers, outages and lost answers.

Every request to the engine is a suspension at which the operation may be cancelled, also those that
the stores' own tasks make; these tasks themselves are never cancelled, since no one else knows
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import aiohooks as ah
from aiohooks.stores import Position
from aiohooks.stores._protocol import Answer, Join, Lead, Member, Request, Snapshot
from aiohooks.stores.engine import RunState
from tests.fuzz.explored.fixture import (
    Action,
    Body,
    Fixture,
    await_to_the_end,
    scenario,
    soon,
)
from tests.support.fake_engine import FakeConnection, FakeEngine, FakeStepStore
from tests.support.sessions import NO_BACKOFF

RUN = "default"


class WatchedConnection(FakeConnection):
    """The connection of one process: its requests are watched, and each answer is delayed, so that
    it may come too late.
    """

    def __init__(self, fixture: StoreFixture) -> None:
        super().__init__(fixture.engine)
        self.fixture = fixture
        self.connected = False

    async def _slowly(self, coro: Coroutine[Any, Any, Any]) -> Any:
        answer = await coro
        await self.fixture.pause("answer", 1)
        return answer

    async def connect(self) -> Snapshot:
        snapshot: Snapshot = await self._slowly(super().connect())
        self.connected = True
        return snapshot

    async def request(self, request: Request) -> Answer:
        answer: Answer = await self._slowly(super().request(request))
        return answer

    async def read(self) -> Snapshot:
        snapshot: Snapshot = await self._slowly(super().read())
        return snapshot

    async def disconnect(self) -> None:
        self.connected = False
        await super().disconnect()


class WatchedStore(FakeStepStore):
    """The store of one process, over a watched connection."""

    def __init__(self, fixture: StoreFixture, **options: Any) -> None:
        super().__init__(fixture.make_connection(fixture), run=RUN, **options)
        self.fixture = fixture

    @property
    def connected(self) -> bool:
        """Whether its connection was made and not closed."""
        assert isinstance(self.connection, WatchedConnection)
        return self.connection.connected


@dataclass
class Process:
    """One process: its own store and its own variables."""

    fixture: StoreFixture
    name: str
    store: WatchedStore
    variables: ah.Variables = field(default_factory=ah.Variables)

    def session(self, *, chief: bool, hooks: Any = (), **creator: Any) -> ah.AsyncMonitoredSession:
        """Make a session of a chief, or of a worker that waits for one."""
        kind = ah.ChiefSessionCreator if chief else ah.WorkerSessionCreator
        variables = (
            self.variables if chief else None
        )  # a worker's own ones, since the chief's are elsewhere
        made = kind(self.fixture.graph, global_step=self.store, variables=variables, **creator)
        self.variables = made._variables
        return ah.AsyncMonitoredSession(made, hooks, recovery=NO_BACKOFF, name=self.name)


@dataclass
class StoreFixture(Fixture):
    """A fixture with an engine and the processes that use it."""

    processes: list[Process] = field(default_factory=list)
    digits: int = 0
    """Number of calls of `advance`."""
    answered: set[int] = field(default_factory=set)
    make_store: type[WatchedStore] = WatchedStore
    make_connection: type[WatchedConnection] = WatchedConnection
    is_lost: bool = False
    """Whether the engine has lost its data: a chief brings the step back when it recovers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine = FakeEngine()

    async def operation(self) -> None:
        random.seed(self.seed)  # the pauses between two tries
        await super().operation()

    # -- for the scenario

    @contextlib.asynccontextmanager
    async def process(
        self, name: str, *, opened: bool = True, **options: Any
    ) -> AsyncIterator[Process]:
        """Make a process with a store, which is closed at the end; not `opened`, its first user
        opens it.
        """
        process = Process(self, name, self.make_store(self, **options))
        self.processes.append(process)
        if opened:
            async with process.store:
                yield process
            return
        try:
            yield process
        finally:
            await await_to_the_end(process.store.aclose)

    async def advance(self, store: ah.StepStore) -> None:
        """Advance by a power of four: the digits of the step show which advances were counted, and
        how often.
        """
        number, self.digits = self.digits, self.digits + 1
        await store.advance(4**number)
        self.answered.add(number)

    def outage(self, secs: float = 3, **how: Any) -> None:
        """Make the engine unavailable; it comes back after so many seconds."""
        self.engine.stop(**how)
        self.is_lost = self.is_lost or how.get("data_lost", False)
        self.timers.append(asyncio.get_running_loop().call_later(secs, self.engine.restart))

    # -- checks

    @property
    def run_state(self) -> RunState:
        """The run's state in the engine."""
        return self.engine.runs.get(RUN) or RunState()

    @property
    def step(self) -> int:
        """The latest step that the engine or a store knows; after a loss, that of the variables."""
        if self.is_lost:
            return self.weights
        return max(
            [self.run_state.position, *(one.store.latest for one in self.processes)],
            default=Position(1, 0),
        ).step

    @property
    def weights(self) -> int:
        """The sum of what the processes have added to their variables."""
        return sum(one.variables.snapshot().get("w", 0) for one in self.processes)

    def check(self) -> None:
        """Check that the variables are ahead of the step only while the engine has not answered."""
        if self.digits:
            return
        ahead = self.weights - self.step
        if not 0 <= ahead <= len(self.processes):
            self.add_violation(
                f"all or nothing: the variables are {ahead} ahead of step {self.step}"
            )

    def violations(self) -> list[str]:
        """Check that nothing is left here or in the engine, and that each advance was counted once
        or not at all.
        """
        found = super().violations()
        state = self.run_state
        if self.digits:
            found += self._miscounted()
        elif self.weights != self.step:
            found.append(f"exactly once: the variables are {self.weights}, the step is {self.step}")
        if state.position.step < self.step and not self.is_lost:
            found.append(f"the engine is at {state.position}, and step {self.step} was known")
        if self.engine.watchers:
            found.append("leak: the engine is still watched")
        ours = {one.store._members.process for one in self.processes}
        left = [member.name for member in state.members.values() if member.process in ours]
        if left:
            found.append(f"leak: the engine still has {', '.join(left)}")
        for one in self.processes:
            found += [f"leak: the store of {one.name} {what}" for what in self._left_of(one.store)]
        return found

    def _left_of(self, store: WatchedStore) -> list[str]:
        found: list[str] = []
        statistics = store.statistics()
        waits = store._waits
        if statistics.waiting or statistics.watching or waits.registered:
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
            found.append("exactly once: an advance was counted that was not requested")
        return found


def store_scenario(name: str, **options: Any) -> Callable[[Body], Body]:
    """Add a scenario with an engine."""
    return scenario(name, **{"fixture": StoreFixture, "hooks": 0, **options})


async def lead_and_train(fixture: StoreFixture, process: Process, runs: int = 2) -> None:
    """Train as the chief."""
    await fixture.train(process.session(chief=True, hooks=fixture.hooks), runs=runs)


# -- sessions


@store_scenario("a chief on an engine", hooks=1)
async def chief_alone(fixture: StoreFixture) -> None:
    async with fixture.process("chief") as chief:
        await lead_and_train(fixture, chief)


@store_scenario("a worker whose chief may be gone", parallel=True)
async def worker_without_chief(fixture: StoreFixture) -> None:
    """However the chief ends, the worker is notified: there is no step 9."""

    async def worker() -> None:
        with contextlib.suppress(ah.errors.PublisherFailedError, ah.errors.PublisherFinishedError):
            async with process.session(
                chief=False, hooks=[ah.hooks.GlobalStepWaiterHook(9)]
            ) as session:
                await session.run("train")

    async with fixture.process("chief") as chief, fixture.process("worker") as process:
        await fixture.run_together(chief=lambda: lead_and_train(fixture, chief, 1), worker=worker)


@store_scenario("two chiefs, one after the other", hooks=1, parallel=True)
async def two_chiefs(fixture: StoreFixture) -> None:
    """No time passes and no lease expires: the second chief can begin only because the first one
    gave the lead back.
    """

    async def second() -> None:
        async with two.session(chief=True) as session:
            await fixture.run(session)

    async with fixture.process("one") as one, fixture.process("two") as two:
        await fixture.run_together(one=lambda: lead_and_train(fixture, one), two=second)
    if (secs := asyncio.get_running_loop().time()) > 1:
        fixture.add_violation(f"the lead was given back after {secs:g} s")


# -- failures of the engine


def _outage_at(fixture: StoreFixture, call: int, **how: Any) -> Action:
    async def action(number: int) -> None:
        if number == call:
            fixture.outage(**how)

    return action


@store_scenario("the engine is away during a run", hooks=1)
async def away_in_run(fixture: StoreFixture) -> None:
    fixture.actions["train"] = _outage_at(fixture, 1)
    async with fixture.process("chief", lease_secs=1000) as chief:
        await lead_and_train(fixture, chief)


@store_scenario("the engine loses its data during a run", hooks=1, parallel=True)
async def data_lost(fixture: StoreFixture) -> None:
    fixture.actions["train"] = _outage_at(fixture, 2, data_lost=True)

    async def train() -> None:
        await lead_and_train(fixture, chief, 3)
        assert fixture.run_state.position.step == fixture.weights, "the chief has reset the step"

    async def waiter() -> None:
        await other.store.wait_for(3)

    async with (
        fixture.process("chief", lease_secs=1000) as chief,
        fixture.process("other", lease_secs=1000) as other,
    ):
        await fixture.run_together(helper_chief=train, waiter=waiter)


@store_scenario("answers are lost", parallel=True)
async def answers_lost(fixture: StoreFixture) -> None:
    async def writer() -> None:
        for _ in range(2):
            fixture.engine.answers_to_lose = 1
            await fixture.advance(process.store)

    async with fixture.process("writer") as process:
        await fixture.run_together(one=writer, two=writer)


@store_scenario("the engine is away at the opening", expect=ah.errors.StoreUnavailableError)
async def away_at_opening(fixture: StoreFixture) -> None:
    fixture.engine.stop()
    async with fixture.process("early", connect_timeout=1.0) as process:
        await fixture.advance(process.store)


@store_scenario("the store is closed while it is used", parallel=True)
async def closed_in_use(fixture: StoreFixture) -> None:
    """With the engine unavailable: all operations end with the store, without waiting."""

    async def user(fn: Callable[[], Any]) -> None:
        with contextlib.suppress(ah.errors.StoreClosedError, ah.errors.StoreUnavailableError):
            await fn()

    async def closer() -> None:
        try:
            await fixture.pause("closer", 3)
        finally:
            await await_to_the_end(process.store.aclose)

    async def chief() -> None:
        async with process.store.lead():
            await asyncio.Event().wait()

    async with fixture.process("closing") as process:
        fixture.engine.stop()
        store = process.store
        await fixture.run_together(
            value=lambda: user(store.value),
            advance=lambda: user(lambda: fixture.advance(store)),
            waiter=lambda: user(lambda: store.wait_for(5)),
            worker=lambda: user(store.wait_initialised),
            chief=lambda: user(chief),
            helper_closer=closer,
        )


# -- waits and writes without a session


@store_scenario("advances of several tasks are one request", parallel=True)
async def combined(fixture: StoreFixture) -> None:
    async def writer() -> None:
        for _ in range(2):
            await fixture.advance(process.store)

    async with fixture.process("writers") as process:
        await fixture.run_together(one=writer, two=writer, three=writer)


@store_scenario("waits of all kinds on an engine", parallel=True)
async def waits(fixture: StoreFixture) -> None:
    async def watcher() -> None:
        async for position in other.store.changes():
            if position.step >= 21:
                break

    async def writer() -> None:
        for _ in range(3):
            await fixture.advance(one.store)
            await soon()

    async with fixture.process("one") as one, fixture.process("other") as other:
        await fixture.run_together(
            waiter=lambda: other.store.wait_for(5, timeout=60),
            late=lambda: other.store.wait_for(21, on_reset="raise"),
            watcher=watcher,
            helper_writer=writer,
        )


@store_scenario("the session is never initialised", expect=ah.errors.SessionNotReadyError)
async def never_ready(fixture: StoreFixture) -> None:
    async with (
        fixture.process("worker") as worker,
        worker.session(chief=False, max_wait_secs=2.0) as session,
    ):
        await session.run("train")


@store_scenario("a chief uses its store without a session")
async def by_hand(fixture: StoreFixture) -> None:
    async with fixture.process("chief", opened=False) as process:
        store = process.store
        async with store.lead():
            with store.publisher("trainer"):
                await store.mark_initialised()
                await fixture.advance(store)
                await store.flush(5)
                await store.value()
        await store.raise_to(1)
        await store.aclose()
        await store.aclose()


# -- other processes that have died


def _dead(fixture: StoreFixture, request: type[Join] | type[Lead]) -> None:
    fixture.engine.apply(RUN, request(Member("dead/1", "the dead one", 2.0)))


@store_scenario("the last publisher has died", expect=ah.errors.PublisherFailedError)
async def dead_publisher(fixture: StoreFixture) -> None:
    _dead(fixture, Join)
    async with fixture.process("worker") as process:
        await process.store.wait_for(1)


@store_scenario("the previous chief has died", hooks=1)
async def dead_chief(fixture: StoreFixture) -> None:
    _dead(fixture, Lead)
    async with fixture.process("chief") as process:
        await lead_and_train(fixture, process, 1)
