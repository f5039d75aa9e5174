"""`RecoveryPolicy(after_commit=...)`: a recovery of a run that had been committed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook, RecordingHook
from tests.support.hooks import PhaseHook
from tests.support.sessions import counting, outcome, recovery_policy, use_up
from tests.support.waiting import forever, raises_after

pytestmark = pytest.mark.every_python

RETURN = recovery_policy(after_commit="return")
REPEAT = recovery_policy(after_commit="repeat")
BOTH = pytest.mark.parametrize("policy", [REPEAT, RETURN], ids=["repeat", "return"])
LOST = ah.AbortedError("lost")


@BOTH
@pytest.mark.parametrize("suspend", [False, True], ids=["in-turn", "suspended"])
async def test_after_run_of_a_committed_run_fails(policy: ah.RecoveryPolicy, suspend: bool) -> None:
    """The run is repeated and counts twice, or its values are returned and nothing does; the loop
    continues in either case.

    A later run that fails before its commit does not return what this one committed.
    """
    fed, losses = list[int](), list[int]()

    async def step(batch: int) -> dict[str, int]:
        fed.append(batch)
        return {"loss": 10 * batch}

    faults = {("after_run", 2): LOST, ("before_run", 3 if policy is RETURN else 4): LOST}
    hooks = [FaultInjectionHook(faults, suspend=suspend), RecordingHook(suspend=suspend)]
    async with ah.AsyncMonitoredSession(step, hooks, recovery=policy) as session:
        await use_up(session.steps("loss", feeds=[1, 2, 3]), losses)
        assert session.status().recoveries == 2
    assert losses == [10, 20, 30]
    assert fed == ([1, 2, 2, 3] if policy is REPEAT else [1, 2, 3])
    assert session.global_step.latest.step == len(fed)


async def test_a_background_task_fails_during_after_run() -> None:
    """A background task that fails while `after_run` waits interrupts a run that had been
    committed; it is returned.
    """
    inside, made = asyncio.Event(), 0

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
    async with counting(*hooks, recovery=RETURN) as session:
        assert await session.run("train") == 1
        assert await session.run("total") == 1
    assert (made, session.global_step.latest.step) == (2, 1)


@pytest.mark.parametrize("save_every", [1, 10], ids=["saved", "not saved"])
async def test_what_a_restore_brings_back(tmp_path: Path, save_every: int) -> None:
    """A chief that restores the commit itself returns, one that restores an earlier checkpoint
    repeats: nothing counts twice.
    """
    fed, seen, graph = list[int](), list[int](), ah.Graph()
    graph.placeholder("x")
    graph.variable("total", 0)

    @graph.train_op(adds_to="total")
    def train(x: int) -> int:
        fed.append(x)
        return x

    creator = ah.ChiefSessionCreator(graph, checkpoint_dir=tmp_path)
    saver = ah.CheckpointSaverHook(every=ah.Every(steps=save_every), on_busy="wait")
    fault = ah.configure(FaultInjectionHook({("after_run", 2): LOST}), order=200)  # after the saver
    async with ah.AsyncMonitoredSession(creator, [saver, fault], recovery=RETURN) as session:
        await use_up(session.steps("train", feeds=[{"x": 1}, {"x": 10}, {"x": 100}]), seen)
        total, step = await session.run("total", {"x": 0}), session.global_step.latest.step
    assert seen == [1, 10, 100]
    if save_every == 1:
        assert (fed, total, step) == ([1, 10, 100], 111, 3)
    else:  # only the save at the beginning is there: the first run is lost, the second repeated
        assert (fed, total, step) == ([1, 10, 10, 100], 110, 2)


async def test_a_hook_that_fails_after_every_commit_is_given_up() -> None:
    """A run that is returned after a recovery is no completed one: failures in a row use up the
    attempts.
    """
    lost, policy = ah.AbortedError("lost"), recovery_policy(after_commit="return", max_attempts=3)
    hooks = [PhaseHook("after_run", raises_after(0, lost))]
    session = counting(*hooks, recovery=policy)
    assert await outcome(session, lambda session: use_up(session.steps("train"))) is lost
    assert session.global_step.latest.step == 4
    assert [note for note in lost.__notes__ if "the run of step" in note] == [
        f"  the run of step {step}: AbortedError('lost')" for step in (1, 2, 3, 4)
    ]


@BOTH
async def test_a_step_function_is_repeated(policy: ah.RecoveryPolicy) -> None:
    """`run_step_fn` repeats its function under either policy: what of it is done, only the function
    knows.
    """
    attempts = 0

    async def step_fn(context: ah.session.StepContext) -> Any:
        nonlocal attempts
        attempts += 1
        return await context.run_with_hooks("train")

    hooks = [FaultInjectionHook({("after_run", 1): LOST})]
    async with counting(*hooks, recovery=policy) as session:
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

    async with counting(PhaseHook("after_run", lose), recovery=RETURN) as session:
        await session.run_step_fn(step_fn)
        gc.collect()
        assert [one() for one in kept] == [None]


async def test_a_commit_of_an_epoch_that_has_ended_is_repeated() -> None:
    """The step store was reset meanwhile, to a later step: the commit belongs to the steps before
    the reset.
    """
    runs, store = 0, ah.MemoryStepStore()

    async def step() -> dict[str, int]:
        nonlocal runs
        runs += 1
        return {"loss": runs}

    async def reset() -> None:
        await store.reset(5)

    hooks = [FaultInjectionHook({("after_run", 1): LOST, ("after_create_session", 2): reset})]
    async with ah.AsyncMonitoredSession(step, hooks, global_step=store, recovery=RETURN) as session:
        assert await session.run("loss") == 2
