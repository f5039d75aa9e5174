"""The version gate against a model, and under random interleavings: the bound holds, no place is
lost.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from aiohooks.errors import PublisherFailedError, StepTimeoutError
from aiohooks.stores import MemoryStepStore, Position
from aiohooks.testing.clock import ManualClock
from aiohooks.version_gate import GateStatistics, Ticket, VersionGate
from tests.support.waiting import ticks


@dataclass(eq=False)
class Item:
    """The model of one admission."""

    task: asyncio.Task[None]
    handed_off: bool
    deadline: float | None
    leave: asyncio.Future[None]
    tickets: list[Ticket] = field(default_factory=list)
    position: Position | None = None
    state: str = "waiting"

    @property
    def ticket(self) -> Ticket:
        return self.tickets[0]


class GateAgainstModel(RuleBasedStateMachine):
    """Each rule does one thing, lets the loop run until it is idle, and compares."""

    items = Bundle("items")

    @initialize(max_lag=st.integers(0, 2), per_version=st.integers(1, 3), first=st.integers(0, 3))
    def make(self, max_lag: int, per_version: int, first: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.clock = ManualClock()
        with self.clock:
            self.versions = MemoryStepStore(first)
            self.gate = VersionGate(self.versions, max_lag=max_lag, per_version=per_version)
        self.max_lag = max_lag
        self.per_version = per_version
        self.position = Position(1, first)
        self.all: list[Item] = []
        self.used_ahead = self.shipped_ahead = 0
        self.lags: list[int] = []

    def do(self, call: Callable[[], Any]) -> Any:
        async def settled() -> Any:
            answer = call()
            if asyncio.iscoroutine(answer):
                answer = await answer
            await ticks(
                40 + 10 * len(self.all)
            )  # what has to follow has followed: items wait on the store one by one
            return answer

        return self.loop.run_until_complete(settled())

    def having(self, *states: str) -> list[Item]:
        return [item for item in self.all if item.state in states]

    def room(self) -> int:
        places = (self.max_lag + 1) * self.per_version
        return (
            places
            - len(self.having("open"))
            - self.shipped_ahead
            - min(self.used_ahead, self.per_version)
        )

    def admit_waiters(self) -> None:
        """Admit in the order of arrival, while there is room."""
        for item in self.having("waiting"):
            if self.room() <= 0:
                break
            item.state = "open"
            item.position = self.position

    def lag(self, item: Item) -> int | None:
        assert item.position is not None
        return (
            self.position.step - item.position.step
            if item.position.epoch == self.position.epoch
            else None
        )

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        with self.clock:
            # The last publisher to leave ends all waits.
            self.do(lambda: self.versions.publisher("last").close(RuntimeError("over")))
        for item in self.having("waiting"):
            assert isinstance(item.task.exception(), PublisherFailedError)
            item.state = "late"
        for item in self.all:
            item.task.cancel()
        self.do(lambda: None)
        assert not asyncio.all_tasks(self.loop)
        assert self.versions.statistics().waiting == 0
        assert self.clock.pending == 0
        self.loop.close()

    # Rules.

    @rule(target=items, handed_off=st.booleans(), timeout=st.sampled_from([None, None, 0, 5, 20]))
    def admit(self, handed_off: bool, timeout: float | None) -> Item:
        leave: asyncio.Future[None] = self.loop.create_future()

        async def work() -> None:
            async with self.gate.admit(timeout=timeout) as ticket:
                item.tickets.append(ticket)
                if handed_off:
                    ticket.hand_off()
                await leave

        deadline = None if timeout is None else self.clock.now() + timeout
        item = Item(self.loop.create_task(work()), handed_off, deadline, leave)
        self.all.append(item)
        self.admit_waiters()
        if item.state == "waiting" and timeout == 0:
            item.state = "late"
        self.do(lambda: None)
        return item

    @rule(by=st.sampled_from([1, 1, 1, 2, 5]))
    def publish(self, by: int) -> None:
        self.position = Position(self.position.epoch, self.position.step + by)
        self.used_ahead = 0
        self.shipped_ahead = max(0, self.shipped_ahead - by * self.per_version)
        self.admit_waiters()
        self.do(lambda: self.versions.advance(by))

    @rule(step=st.integers(0, 6))
    def reset(self, step: int) -> None:
        self.position = Position(self.position.epoch + 1, step)
        self.used_ahead = self.shipped_ahead = 0
        for item in self.having("open"):
            item.state = "invalidated"
        self.admit_waiters()
        self.do(lambda: self.versions.reset(step))

    @rule(item=items)
    def use(self, item: Item) -> None:
        if item.state in ("waiting", "late", "cancelled", "used", "shipped"):
            return
        lag = self.lag(item)
        may = item.state == "open" and lag is not None and lag <= self.max_lag
        if may:
            assert lag is not None
            item.state = "used"
            self.used_ahead += 1
            self.lags.append(lag)
        elif item.state == "open":
            item.state = "stale"
        self.admit_waiters()
        assert self.do(item.ticket.use) == may

    @rule(item=items)
    def drop(self, item: Item) -> None:
        if item.state == "open":
            item.state = "dropped"
            self.admit_waiters()
            self.do(item.ticket.drop)

    @rule(item=items)
    def end_block(self, item: Item) -> None:
        if item.leave.done() or not item.tickets:
            return
        if item.state == "open" and not item.handed_off:
            lag = self.lag(item)
            assert lag is not None
            item.state = "shipped" if lag <= self.max_lag else "stale"
            if item.state == "shipped":
                self.shipped_ahead += 1
                self.lags.append(lag)
            self.admit_waiters()
        self.do(lambda: item.leave.set_result(None))

    @rule(item=items)
    def cancel(self, item: Item) -> None:
        if not item.task.done():
            item.state = {"waiting": "cancelled", "open": "abandoned"}.get(item.state, item.state)
            self.admit_waiters()
            self.do(item.task.cancel)

    @rule(secs=st.sampled_from([1, 5, 70]))
    def time_passes(self, secs: float) -> None:
        self.do(lambda: self.clock.advance(secs))
        for item in self.having("waiting"):
            if item.deadline is not None and item.deadline <= self.clock.now():
                item.state = "late"

    @rule(target=items)
    def do_nothing(self) -> Any:
        return multiple()

    # What must hold.

    @invariant()
    def everything_agrees(self) -> None:
        if not hasattr(self, "loop"):
            return
        seen: GateStatistics = self.do(self.gate.statistics)
        for item in self.all:
            if item.state in ("waiting", "late", "cancelled"):
                assert not item.tickets, "admitted without room"
                assert item.task.done() == (item.state != "waiting")
                if item.state == "late":
                    assert isinstance(item.task.exception(), StepTimeoutError)
                continue
            assert item.tickets, "a lost wake-up"
            assert (item.ticket.position, item.ticket.state) == (item.position, item.state)
            assert 0 <= item.ticket.step - item.ticket.version <= self.max_lag
        assert seen.open == len(self.having("open"))
        assert seen.room == max(0, self.room())
        assert seen.waiting == len(self.having("waiting"))
        assert seen.used == len(self.having("used"))
        assert seen.shipped == len(self.having("shipped"))
        assert seen.stale == len(self.having("stale"))
        assert seen.invalidated == len(self.having("invalidated"))
        assert seen.abandoned == len(self.having("abandoned"))
        assert seen.dropped == len(self.having("dropped", "stale", "invalidated", "abandoned"))
        assert seen.admitted == seen.open + seen.used + seen.shipped + seen.dropped
        assert seen.due == sum(self.lag(item) == self.max_lag for item in self.having("open"))
        assert seen.lag_max == max(self.lags, default=0) <= self.max_lag
        assert seen.lag_mean == (sum(self.lags) / len(self.lags) if self.lags else 0)
        assert self.versions.statistics().waiting == bool(seen.waiting)


TestGateAgainstModel = GateAgainstModel.TestCase
TestGateAgainstModel.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)


# Interleavings: the loop is not idle between two events.


@dataclass
class Simulation:
    """Workers, a queue and a trainer, at speeds that a seed decides."""

    seed: int
    max_lag: int
    per_version: int
    in_order: bool = False
    waits_for_due: bool = False
    workers: int = 6
    versions_wanted: int = 40

    async def run(self) -> GateStatistics:
        """Run it, and check each item by a count of the versions of its own."""
        rnd = random.Random(self.seed)
        versions = MemoryStepStore(rnd.randrange(3))
        gate = VersionGate(versions, max_lag=self.max_lag, per_version=self.per_version)
        queue: asyncio.Queue[Ticket] = asyncio.Queue(maxsize=rnd.choice([0, 1, 3]))

        async def pause(most: int) -> None:
            for _ in range(rnd.randrange(most + 1)):
                await asyncio.sleep(0)

        async def work() -> None:
            while True:
                async with gate.admit() as ticket:
                    assert ticket.position == versions.latest
                    assert 0 <= ticket.step - ticket.version <= self.max_lag
                    await pause(2 if rnd.random() < 0.8 else 30)
                    await queue.put(ticket.hand_off())
                await pause(1)

        ahead: dict[int, Ticket] = {}
        expected = 0

        async def take() -> Ticket:
            """Return the next ticket, in order if `in_order`."""
            nonlocal expected
            while True:
                if self.in_order and expected in ahead:
                    expected += 1
                    return ahead.pop(expected - 1)
                ticket = await queue.get()
                if not self.in_order:
                    return ticket
                ahead[ticket.number] = ticket

        tasks = [asyncio.create_task(work()) for _ in range(self.workers)]
        made = 0
        while made < self.versions_wanted:
            batch = 0
            while batch < self.per_version or (self.waits_for_due and gate.due):
                ticket = await take()
                age = versions.latest.step - ticket.version
                if ticket.use():
                    assert 0 <= age <= self.max_lag
                    assert ticket.lag == age
                    batch += 1
                else:
                    assert age > self.max_lag
            await pause(3)
            await versions.advance()
            made += 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for ticket in [*ahead.values(), *(queue.get_nowait() for _ in range(queue.qsize()))]:
            ticket.drop()
        seen = gate.statistics()
        assert (seen.open, seen.waiting, versions.statistics().waiting) == (0, 0, 0)
        assert seen.admitted == seen.used + seen.shipped + seen.dropped
        assert seen.lag_max <= self.max_lag
        return seen


SHAPES = [(0, 1), (0, 4), (1, 1), (1, 4), (4, 2)]


@pytest.mark.parametrize(("max_lag", "per_version"), SHAPES)
async def test_the_bound_holds_in_any_order(max_lag: int, per_version: int) -> None:
    """Items overtake each other: none is used beyond the bound, and stale ones are dropped."""
    seen = [await Simulation(seed, max_lag, per_version).run() for seed in range(15)]
    assert max(statistics.lag_max for statistics in seen) == max_lag, "the bound is reached"
    if (max_lag, per_version) == (1, 4):
        assert any(statistics.stale for statistics in seen), "the count alone is not enough"


@pytest.mark.parametrize("how", ["in_order", "waits_for_due"])
@pytest.mark.parametrize(("max_lag", "per_version"), SHAPES)
async def test_no_item_is_stale(max_lag: int, per_version: int, how: str) -> None:
    """Used in the order of their admission, or by a trainer that continues to take items until none
    is due.
    """
    for seed in range(15):
        seen = await Simulation(seed, max_lag, per_version, **{how: True}).run()
        assert seen.stale == 0
