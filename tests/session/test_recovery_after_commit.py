"""A recovery of a run that had been committed: it is repeated, unless its feeds are tracked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook, RecordingHook
from tests.support.hooks import PhaseHook
from tests.support.sessions import (
    Loader,
    counting,
    double,
    outcome,
    recovery_policy,
    use_up,
)
from tests.support.waiting import raises_after

pytestmark = pytest.mark.every_python

LOST = ah.AbortedError("lost")


def training(
    step: Callable[..., Any], feeds: Loader, *hooks: Any, **options: Any
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
    fed, losses, numbers = list[int](), list[int](), Loader(3)

    async def step(batch: int) -> dict[str, int]:
        fed.append(batch)
        return {"loss": 10 * batch}

    faults = {("after_run", 2): LOST, ("before_run", 3 if are_tracked else 4): LOST}
    hooks = [FaultInjectionHook(faults, suspend=suspend), RecordingHook(suspend=suspend)]
    async with training(step, numbers, *hooks) as session:
        feeds: Any = numbers if are_tracked else range(3)
        await use_up(session.steps("loss", feeds=feeds), losses)
        assert session.status().recoveries == 2
    assert losses == [0, 10, 20]
    assert fed == ([0, 1, 2] if are_tracked else [0, 1, 1, 2])
    assert session.global_step.latest.step == len(fed)


async def test_a_hook_that_fails_after_every_commit_is_given_up() -> None:
    """A run that is returned after a recovery is no completed one: failures in a row use up the
    attempts.
    """
    lost, numbers = ah.AbortedError("lost"), Loader(9)
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


async def test_a_commit_of_an_epoch_that_has_ended_is_repeated() -> None:
    """The step store was reset meanwhile, to a later step: the commit belongs to the steps before
    the reset.
    """
    fed, numbers, store = list[int](), Loader(1), ah.MemoryStepStore()

    async def step(batch: int) -> dict[str, int]:
        fed.append(batch)
        return {"loss": batch}

    async def reset() -> None:
        await store.reset(5)

    hooks = [FaultInjectionHook({("after_run", 1): LOST, ("after_create_session", 2): reset})]
    async with training(step, numbers, *hooks, global_step=store) as session:
        await use_up(session.steps("loss", feeds=numbers))
    assert fed == [0, 0]
