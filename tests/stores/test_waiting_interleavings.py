"""The step store under every order of events, and whether exploration finds a fault in it."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from aiohooks._core.scope import RunScope
from aiohooks._core.waits import ThresholdWaiters
from aiohooks.errors import AiohooksError
from aiohooks.stores import MemoryStepStore, Publisher
from aiohooks.stores._protocol import MAX_STEP
from aiohooks.stores.base import Waiter, WaitRegistry
from aiohooks.testing import ExplorationError, explore
from tests.fuzz.explored.store_waits import CROWD, SMALL, run

pytestmark = pytest.mark.asyncio(
    loop_factories=["asyncio"]
)  # what is explored has a loop of its own


@pytest.mark.parametrize("name", SMALL)
async def test_small_scenarios_hold_in_every_order(name: str) -> None:
    """No wake-up is lost, no waiter woken too early, nothing left, in any order of the scenario's
    tasks.
    """
    assert (
        await explore(partial(run, SMALL[name]), disturb=["order"], exhaust=1_000)
    ).schedules >= 20


async def test_a_larger_scenario_holds_in_many_orders() -> None:
    """Two thousand orders of a scenario that has too many of them."""
    assert (await explore(partial(run, CROWD), disturb=["order"], seeds=2_000)).disturbances[
        "order"
    ] > 2_000


# --- seeded faults: each must be found


class ChecksThenParks(MemoryStepStore):
    """Checks the step, suspends, and parks: an advance in between is missed."""

    async def wait_for(self, step: int, **options: Any) -> int:
        if self.latest.step >= step:
            return self.latest.step
        await asyncio.sleep(0)
        return await self._waits.wait(step)


class WakesTooEarly(MemoryStepStore):
    """Wakes all waiters at every advance."""

    async def advance(self, by: int = 1) -> int:
        step = await super().advance(by)
        for _, waiter in self._waits.waiters.pop_all():
            waiter.set_result(step)
        self._waits.wake()
        return step


class _DiscardsAll(ThresholdWaiters[AiohooksError]):
    def discard(self, threshold: int, future: Waiter) -> bool:
        self._futures.get(threshold, {}).clear()
        return super().discard(threshold, future)


class CancelTakesAll(MemoryStepStore):
    """A cancelled waiter removes the others at its threshold."""

    def __init__(self) -> None:
        super().__init__()
        self._waits.waiters = _DiscardsAll(MAX_STEP + 1)


class _DiscardsNone(ThresholdWaiters[AiohooksError]):
    def discard(self, threshold: int, future: Waiter) -> bool:
        return False


class KeepsTheCancelled(MemoryStepStore):
    """A cancelled waiter stays parked."""

    def __init__(self) -> None:
        super().__init__()
        self._waits.waiters = _DiscardsNone(MAX_STEP + 1)


class _IgnoresPublishers(WaitRegistry):
    def _park_publishers(self, waiter: Waiter, step: int, innermost: RunScope) -> list[Publisher]:
        return []


class OverlooksWaitingPublishers(MemoryStepStore):
    """Does not fail the waits when the remaining publishers only wait for each other."""

    def __init__(self) -> None:
        super().__init__()
        subscribe = self._waits._subscribe
        hooks = subscribe, self._on_publisher_changed, self._on_unreachable
        self._waits = _IgnoresPublishers(self.run, self.latest, *hooks)


class LeavesATask(MemoryStepStore):
    """Starts a task for each advance that is never ended."""

    async def advance(self, by: int = 1) -> int:
        self.task = asyncio.get_running_loop().create_task(asyncio.Event().wait())
        return await super().advance(by)


@pytest.mark.parametrize(
    ("fault", "name", "message"),
    [
        (ChecksThenParks, "two waiters, two writers", "lost wake-up: b wants 3"),
        (WakesTooEarly, "two waiters, two writers", "false release: b wants 3"),
        (CancelTakesAll, "cancelled around its wake-up", "lost wake-up: b wants 2"),
        (KeepsTheCancelled, "two cancels", "1 waiters are counted, 0 wait"),
        (OverlooksWaitingPublishers, "everyone left waits", "is not set"),
        (LeavesATask, "two waiters, two writers", "tasks are left"),
    ],
)
async def test_seeded_faults_are_found(
    fault: type[MemoryStepStore], name: str, message: str
) -> None:
    """A store with a fault fails soon, with what is wrong and disturbances that repeat it."""
    program = partial(run, SMALL[name], fault)
    with pytest.raises(ExplorationError, match=message) as found:
        await explore(program, disturb=["order"], exhaust=3)
    with pytest.raises(ExplorationError, match=message):
        await explore(program, replay=found.value.replay)
