"""The step store under every order of events, and whether the explorer would find a fault."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from aiohooks.stores import MemoryStepStore, Publisher
from aiohooks.stores._waiting import Waiter, WaitersByThreshold, WaitRegistry
from aiohooks.stores.publishers import OwnWaits
from tests.support.interleaving_scenarios import SCENARIOS, SMALL, Actor, Crowd, StoreScenario, TwoWaitersTwoWriters
from tests.support.interleavings import Violation, explore, replay

# --- the store


@pytest.mark.parametrize("scenario", SMALL, ids=lambda scenario: scenario.__name__)
def test_small_scenarios_hold_in_every_order(scenario: type[StoreScenario]) -> None:
    """No wake-up is lost, no waiter woken too early, nothing left, in any order of the scenario's tasks."""
    explored = explore(scenario)
    assert explored.exhausted
    assert explored.schedules >= 20


def test_a_larger_scenario_holds_in_its_first_orders() -> None:
    """The first two thousand orders of a scenario that is too large to exhaust here."""
    assert explore(Crowd, limit=2000).schedules == 2000


# --- the explorer


class Race(StoreScenario):
    """Three tasks that only record their names, each twice."""

    orders: set[str] = set()  # noqa: RUF012 - collected over all schedules

    def actors(self) -> Mapping[str, Actor]:
        self.order = ""

        def recording(name: str) -> Actor:
            async def act() -> None:
                self.order += name
                await asyncio.sleep(0)
                self.order += name

            return act

        return {name: recording(name) for name in "abc"}

    def at_rest(self, tasks: Mapping[str, asyncio.Task[Any]]) -> None:
        super().at_rest(tasks)
        self.orders.add(self.order)


def test_explorer_tries_all_orders_once() -> None:
    """Three tasks of two parts each have 6! / 2!^3 = 90 orders: each is tried once."""
    explored = explore(Race)
    assert (explored.schedules, explored.exhausted, len(Race.orders)) == (90, True, 90)


# --- seeded faults: each must be found


class ChecksThenParks(MemoryStepStore):
    """Checks the step, suspends, and parks: an advance in between is missed."""

    async def wait_for(self, step: int, **options: Any) -> int:
        if self.latest.step >= step:
            return self.latest.step
        await asyncio.sleep(0)
        return await self._waits.wait(step, None, raise_on_reset=False)


class WakesTooEarly(MemoryStepStore):
    """Wakes all waiters at every advance."""

    async def advance(self, by: int = 1) -> int:
        step = await super().advance(by)
        for _, waiter in self._waits.waiters.pop_all():
            waiter.set_result(step)
        self._waits.wake()
        return step


class _DiscardsAll(WaitersByThreshold):
    def discard(self, threshold: int, waiter: Waiter) -> bool:
        self._buckets.get(threshold, {}).clear()
        return super().discard(threshold, waiter)


class CancelTakesAll(MemoryStepStore):
    """A cancelled waiter removes the others at its threshold."""

    def __init__(self) -> None:
        super().__init__()
        self._waits.waiters = _DiscardsAll()


class _DiscardsNone(WaitersByThreshold):
    def discard(self, threshold: int, waiter: Waiter) -> bool:
        return False


class KeepsTheCancelled(MemoryStepStore):
    """A cancelled waiter stays parked."""

    def __init__(self) -> None:
        super().__init__()
        self._waits.waiters = _DiscardsNone()


class _IgnoresPublishers(WaitRegistry):
    def _park_publishers(self, wait: asyncio.Future[Any], step: int) -> dict[Publisher, OwnWaits]:
        return {}


class OverlooksWaitingPublishers(MemoryStepStore):
    """Does not fail the waits when the remaining publishers only wait for each other."""

    def __init__(self) -> None:
        super().__init__()
        hooks = self._subscribe, self._on_publisher_changed, self._on_unreachable
        self._waits = _IgnoresPublishers(self.run, self.latest, *hooks)


class LeavesATask(MemoryStepStore):
    """Starts a task for each advance that is never ended."""

    async def advance(self, by: int = 1) -> int:
        self.task = asyncio.get_running_loop().create_task(asyncio.Event().wait())
        return await super().advance(by)


@pytest.mark.parametrize(
    ("fault", "name", "message", "within"),
    [
        (ChecksThenParks, "TwoWaitersTwoWriters", "lost wake-up: b wants 3", 100),
        (WakesTooEarly, "TwoWaitersTwoWriters", "false release: b wants 3", 100),
        (CancelTakesAll, "CancelAndWake", "lost wake-up: b wants 2", 100),
        (KeepsTheCancelled, "TwoCancels", "1 waiters are counted, 0 wait", 100),
        (OverlooksWaitingPublishers, "EveryoneLeftWaits", "InvalidStateError", 10),
        (LeavesATask, "TwoWaitersTwoWriters", "a task is left over", 1),
    ],
)
def test_seeded_faults_are_found(fault: type[MemoryStepStore], name: str, message: str, within: int) -> None:
    """A store with a fault fails soon, with what is wrong and a schedule that repeats it."""
    scenario = SCENARIOS[name]
    with pytest.raises(Violation, match=message) as violation:
        explore(lambda: scenario(fault), limit=within)
    with pytest.raises(Violation, match=message):
        replay(lambda: scenario(fault), violation.value.schedule)
    explore(scenario, limit=within)


class NeverEnds(TwoWaitersTwoWriters):
    """A task that waits indefinitely."""

    def actors(self) -> Mapping[str, Actor]:
        return {"hanging": lambda: asyncio.Event().wait()}


class Complains(TwoWaitersTwoWriters):
    """An error that reaches the loop's exception handler."""

    def actors(self) -> Mapping[str, Actor]:
        async def act() -> None:
            asyncio.get_running_loop().call_soon(lambda: 1 / 0)

        return {"careless": act}


@pytest.mark.parametrize(
    ("scenario", "message"),
    [(NeverEnds, r"hanging hangs, in schedule \[\]"), (Complains, "the loop's exception handler got .*ZeroDivisionError")],
)
def test_a_hang_and_a_lost_error_are_found(scenario: type[StoreScenario], message: str) -> None:
    """A deadlock and an unhandled error are violations."""
    with pytest.raises(Violation, match=message):
        explore(scenario)
