"""A recovery of a run that had been committed: it is repeated, unless its feeds are tracked."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook, RecordingHook
from tests.support.hooks import PhaseHook
from tests.support.sessions import counting, double, outcome, recovery_policy, use_up
from tests.support.waiting import forever, raises_after

pytestmark = pytest.mark.every_python

LOST = ah.AbortedError("lost")


class Numbers:
    """Feeds that can be tracked: their state is a position."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < len(self.numbers):
            self.position += 1
            yield self.numbers[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def training(
    step: Callable[..., Any], feeds: Numbers, *hooks: Any, **options: Any
) -> ah.AsyncMonitoredSession:
    """Make a session of a step that tracks these feeds."""
    policy = recovery_policy(**options.pop("policy", {}))
    creator = ah.ChiefSessionCreator(
        step, scaffold=ah.Scaffold(tracked={"feeds": feeds}), **options
    )
    return ah.AsyncMonitoredSession(creator, hooks, recovery=policy)


@pytest.mark.parametrize("are_tracked", [False, True], ids=["not tracked", "tracked"])
@pytest.mark.parametrize("suspend", [False, True], ids=["in-turn", "suspended"])
async def test_after_run_of_a_committed_run_fails(are_tracked: bool, suspend: bool) -> None:
    """The run is repeated and counts twice; with tracked feeds its values are returned and nothing
    does. The loop continues in either case.

    A later run that fails before its commit does not return what this one committed.
    """
    fed, losses, numbers = list[int](), list[int](), Numbers(1, 2, 3)

    async def step(batch: int) -> dict[str, int]:
        fed.append(batch)
        return {"loss": 10 * batch}

    faults = {("after_run", 2): LOST, ("before_run", 3 if are_tracked else 4): LOST}
    hooks = [FaultInjectionHook(faults, suspend=suspend), RecordingHook(suspend=suspend)]
    async with training(step, numbers, *hooks) as session:
        feeds: Any = numbers if are_tracked else [1, 2, 3]
        await use_up(session.steps("loss", feeds=feeds), losses)
        assert session.status().recoveries == 2
    assert losses == [10, 20, 30]
    assert fed == ([1, 2, 3] if are_tracked else [1, 2, 2, 3])
    assert session.global_step.latest.step == len(fed)


async def test_a_background_task_fails_during_after_run() -> None:
    """A background task that fails while `after_run` waits interrupts a run that had been
    committed; it is returned.
    """
    inside, made, losses, numbers = asyncio.Event(), 0, list[int](), Numbers(1)

    async def produce() -> None:
        await inside.wait()
        raise ah.UnavailableError("away")

    async def start(session: ah.Session, coord: ah.Coordinator) -> None:
        nonlocal made
        made += 1
        if made == 1:
            coord.start_soon(produce)

    async def wait(*_: object) -> None:
        if made == 1:
            inside.set()
            await forever()

    hooks = [PhaseHook("after_create_session", start), PhaseHook("after_run", wait)]
    async with training(double, numbers, *hooks) as session:
        await use_up(session.steps("loss", feeds=numbers), losses)
    assert (made, losses, session.global_step.latest.step) == (2, [2], 1)


async def test_a_hook_that_fails_after_every_commit_is_given_up() -> None:
    """A run that is returned after a recovery is no completed one: failures in a row use up the
    attempts.
    """
    lost, numbers = ah.AbortedError("lost"), Numbers(*range(9))
    hooks = [PhaseHook("after_run", raises_after(0, lost))]
    session = training(double, numbers, *hooks, policy={"max_attempts": 3})
    use = lambda session: use_up(session.steps("loss", feeds=numbers))  # noqa: E731
    assert await outcome(session, use) is lost
    assert session.global_step.latest.step == 4
    assert [note for note in lost.__notes__ if "the run of step" in note] == [
        f"  the run of step {step}: AbortedError('lost')" for step in (1, 2, 3, 4)
    ]


async def test_a_step_function_is_repeated() -> None:
    """`run_step_fn` repeats its function: what of it is done, only the function knows."""
    attempts = 0

    async def step_fn(context: ah.session.StepContext) -> Any:
        nonlocal attempts
        attempts += 1
        return await context.run_with_hooks("train")

    hooks = [FaultInjectionHook({("after_run", 1): LOST})]
    async with counting(*hooks, recovery=recovery_policy()) as session:
        assert await session.run_step_fn(step_fn) == 1
    assert (attempts, session.global_step.latest.step) == (2, 2)


async def test_a_step_function_that_handles_the_error_keeps_nothing_of_it() -> None:
    """Neither the error nor the result of the run is held until the next recovery."""

    class Lost(ah.AbortedError):
        pass

    kept: list[weakref.ref[Lost]] = []

    async def lose(*_: object) -> None:
        error = Lost("lost")
        kept.append(weakref.ref(error))
        raise error

    async def step_fn(context: ah.session.StepContext) -> None:
        with contextlib.suppress(Lost):
            await context.run_with_hooks("train")

    async with counting(PhaseHook("after_run", lose), recovery=recovery_policy()) as session:
        await session.run_step_fn(step_fn)
        gc.collect()
        assert [one() for one in kept] == [None]


async def test_a_commit_of_an_epoch_that_has_ended_is_repeated() -> None:
    """The step store was reset meanwhile, to a later step: the commit belongs to the steps before
    the reset.
    """
    fed, numbers, store = list[int](), Numbers(1), ah.MemoryStepStore()

    async def step(batch: int) -> dict[str, int]:
        fed.append(batch)
        return {"loss": batch}

    async def reset() -> None:
        await store.reset(5)

    hooks = [FaultInjectionHook({("after_run", 1): LOST, ("after_create_session", 2): reset})]
    async with training(step, numbers, *hooks, global_step=store) as session:
        await use_up(session.steps("loss", feeds=numbers))
    assert fed == [1, 1]
