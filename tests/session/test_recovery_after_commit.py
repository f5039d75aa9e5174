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
from tests.support.hooks import PhaseHook, SessionRecorder
from tests.support.sessions import counting_graph, recovery_policy

pytestmark = pytest.mark.every_python

RETURN = recovery_policy(after_commit="return")
REPEAT = recovery_policy(after_commit="repeat")
BOTH = pytest.mark.parametrize("policy", [REPEAT, RETURN], ids=["repeat", "return"])
LOST = ah.AbortedError("lost")


@BOTH
@pytest.mark.parametrize("suspend", [False, True], ids=["in-turn", "suspended"])
async def test_after_run_of_a_committed_run_fails(policy: ah.RecoveryPolicy, suspend: bool) -> None:
    """The run is repeated and counts twice, or its values are returned and nothing does; the loop continues in either case."""
    fed: list[int] = []

    async def step(batch: int) -> dict[str, int]:
        fed.append(batch)
        return {"loss": 10 * batch}

    sessions = SessionRecorder()
    fault = FaultInjectionHook({("after_run", 2): LOST}, suspend=suspend)
    async with ah.AsyncMonitoredSession(step, [sessions, fault, RecordingHook(suspend=suspend)], recovery=policy) as session:
        assert [loss async for loss in session.steps("loss", feeds=[1, 2, 3])] == [10, 20, 30]
    assert fed == ([1, 2, 2, 3] if policy is REPEAT else [1, 2, 3])
    assert session.global_step.latest.step == len(fed)
    assert len(sessions.sessions) == 2
    assert session.status().recoveries == 1


async def test_an_earlier_failure_is_not_mistaken_for_this_one() -> None:
    """A run that fails before its commit does not return what an earlier one committed."""
    errors: dict[tuple[str, int], BaseException] = {("after_run", 1): LOST, ("before_run", 2): ah.UnavailableError("away")}

    async def step(batch: int) -> dict[str, int]:
        return {"loss": batch}

    async with ah.AsyncMonitoredSession(step, [FaultInjectionHook(errors)], recovery=RETURN) as session:
        assert [loss async for loss in session.steps("loss", feeds=[1, 2, 3])] == [1, 2, 3]
    assert session.global_step.latest.step == 3


async def test_a_background_task_fails_during_after_run() -> None:
    """A background task that fails while `after_run` waits interrupts a run that had been committed; it is returned."""
    inside, made = asyncio.Event(), 0

    class Producer(ah.SessionRunHook):
        async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
            nonlocal made
            made += 1
            if made == 1:
                coord.start_soon(self.produce)

        async def produce(self) -> None:
            await inside.wait()
            raise ah.UnavailableError("away")

        async def after_run(self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
            if made == 1:
                inside.set()
                await asyncio.Event().wait()

    async with ah.AsyncMonitoredSession(counting_graph(), [Producer()], recovery=RETURN) as session:
        assert await session.run("train") == 1
        assert await session.run("total") == 1
    assert (made, session.global_step.latest.step) == (2, 1)


@pytest.mark.parametrize("save_every", [1, 10], ids=["saved", "not saved"])
async def test_what_a_restore_brings_back(tmp_path: Path, save_every: int) -> None:
    """A chief that restores the commit itself returns, one that restores an earlier checkpoint repeats: nothing counts twice."""
    fed: list[int] = []
    graph = ah.Graph()
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
        assert [one async for one in session.steps("train", feeds=[{"x": 1}, {"x": 10}, {"x": 100}])] == [1, 10, 100]
        total, step = await session.run("total", {"x": 0}), session.global_step.latest.step
    if save_every == 1:
        assert (fed, total, step) == ([1, 10, 100], 111, 3)
    else:  # the save at the beginning is all there is: the first run is lost, the second is made again
        assert (fed, total, step) == ([1, 10, 10, 100], 110, 2)


async def test_a_hook_that_fails_after_every_commit_is_given_up() -> None:
    """A run that is returned after a recovery is no completed one: failures in a row use up the attempts."""

    async def fail(*_: Any) -> None:
        raise ah.UnavailableError("away")

    policy = recovery_policy(after_commit="return", max_attempts=3)
    session = ah.AsyncMonitoredSession(counting_graph(), [PhaseHook("after_run", fail)], recovery=policy)

    async def train() -> None:
        async with session:
            async for _ in session.steps("train"):
                pass

    with pytest.raises(ah.UnavailableError, match="away") as caught:
        await train()
    assert session.global_step.latest.step == 4
    assert [note for note in caught.value.__notes__ if "the run of step" in note] == [
        f"  the run of step {step}: UnavailableError('away')" for step in (1, 2, 3, 4)
    ]


@BOTH
async def test_a_step_function_is_repeated(policy: ah.RecoveryPolicy) -> None:
    """`run_step_fn` repeats its function under either policy: what of it is done, only the function knows."""
    attempts = 0

    async def step_fn(context: ah.session.StepContext) -> Any:
        nonlocal attempts
        attempts += 1
        return await context.run_with_hooks("train")

    hooks = [FaultInjectionHook({("after_run", 1): LOST})]
    async with ah.AsyncMonitoredSession(counting_graph(), hooks, recovery=policy) as session:
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

    async with ah.AsyncMonitoredSession(counting_graph(), [PhaseHook("after_run", lose)], recovery=RETURN) as session:
        await session.run_step_fn(step_fn)
        gc.collect()
        assert [one() for one in kept] == [None]


async def test_other_errors_after_the_commit_are_raised() -> None:
    """An error from which the policy does not recover is raised, whatever was committed."""
    error = ValueError("wrong")
    hooks = [FaultInjectionHook({("after_run", 1): error})]
    with pytest.raises(ValueError, match="wrong") as caught:
        async with ah.AsyncMonitoredSession(counting_graph(), hooks, recovery=RETURN) as session:
            await session.run("train")
    assert caught.value is error
    assert session.global_step.latest.step == 1


async def test_a_commit_of_an_epoch_that_has_ended_is_repeated() -> None:
    """The step store was reset meanwhile, to a later step: the commit belongs to the steps before the reset."""
    runs, store = 0, ah.MemoryStepStore()

    async def step() -> dict[str, int]:
        nonlocal runs
        runs += 1
        return {"loss": runs}

    async def lose(*_: object) -> None:
        if runs == 1:
            raise LOST

    async def reset(*_: object) -> None:
        if runs == 1:
            await store.reset(5)

    hooks = [PhaseHook("after_run", lose), PhaseHook("after_create_session", reset)]
    async with ah.AsyncMonitoredSession(step, hooks, global_step=store, recovery=RETURN) as session:
        assert await session.run("loss") == 2
