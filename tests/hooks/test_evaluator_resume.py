"""EvaluatorHook: evaluations that a recovery or restart lost are repeated, and none is made twice."""

from __future__ import annotations

from typing import Any

import pytest

import aiohooks as ah
from aiohooks.hooks.evaluator import EvaluatorHook
from aiohooks.testing import FaultInjectionHook
from tests.support.checks import refused
from tests.support.evaluations import GatedEvaluation, failing, results_of, total
from tests.support.hooks import RestoringHook
from tests.support.sessions import NO_BACKOFF, counting_graph, going_back
from tests.support.waiting import ticks

pytestmark = pytest.mark.every_python

both_modes = pytest.mark.parametrize("mode", ["inline", "background"])


@both_modes
@pytest.mark.parametrize("at_begin", [False, True])
async def test_a_lost_evaluation_is_repeated(mode: Any, at_begin: bool) -> None:
    """An error that the session recovers from repeats the evaluation on the values of its own step; none is made twice."""
    hook = EvaluatorHook(failing(None, ah.AbortedError("lost")), every=ah.Every(steps=2), mode=mode, at_begin=at_begin)
    async with ah.AsyncMonitoredSession(counting_graph(), [hook], recovery=NO_BACKOFF) as session:
        for _ in range(7):
            await session.run("train")
        await session.run("loss")
        assert session.status().recoveries == 1
        last = session.global_step.latest.step
        # A run whose `after_run` raised it is repeated after its commit; in the background the next `before_run` may raise it.
        assert last == 8 or (last == 7 and mode == "background")
    assert list(hook.results.items()) == [(step, step) for step in ([0] if at_begin else []) + [2, 4, 6, last]]


async def test_a_creation_that_fails_evaluates_again() -> None:
    """An evaluation before the first run that is lost is made once after the recovery."""
    hook = EvaluatorHook(failing(ah.AbortedError("lost")), every=ah.Every(steps=9), at_begin=True)
    async with ah.AsyncMonitoredSession(counting_graph(), [hook], recovery=NO_BACKOFF) as session:
        assert hook.results == {0: 0}
        assert session.status().recoveries == 1


async def test_an_active_evaluation_is_repeated_after_a_recovery() -> None:
    """An evaluation that is active while the session is replaced is cancelled, and repeated with the same values."""
    gate = GatedEvaluation()
    hook = EvaluatorHook(gate, every=ah.Every(steps=2), mode="background", max_pending=3)
    lost = FaultInjectionHook({("before_run", 6): ah.AbortedError("lost")})
    async with ah.AsyncMonitoredSession(counting_graph(), [hook, lost], recovery=NO_BACKOFF) as session:
        for _ in range(6):
            await session.run("train")
            await ticks()
        assert (gate.began, gate.cancelled, hook.pending) == ([2, 2], [2], (2, 4, 6))
        gate.release(9)
    assert list(hook.results.items()) == [(2, 2), (4, 4), (6, 6)]


async def test_evaluations_of_lost_steps_are_dropped() -> None:
    """Evaluations of lost steps are dropped, and due again when these steps are repeated."""
    gate = GatedEvaluation()
    hook = EvaluatorHook(gate, every=ah.Every(steps=2), mode="background", max_pending=3)
    async with going_back(hook, at=6, to=3) as session:
        for _ in range(6):
            await session.run("train")
        assert hook.pending == (2, 4)
        gate.release(9)
    assert list(hook.results) == [2, 4]


async def test_an_evaluation_with_a_logged_error_is_not_repeated() -> None:
    """An evaluation whose error was only logged is finished: a later, unrelated recovery does not repeat it."""
    hook = EvaluatorHook(failing(KeyError("mine")), every=ah.Every(steps=2))
    lost = FaultInjectionHook({("before_run", 4): ah.AbortedError("lost")})
    hooks = [ah.configure(hook, on_error="log"), ah.configure(lost)]
    async with ah.AsyncMonitoredSession(counting_graph(), hooks, recovery=NO_BACKOFF) as session:
        for _ in range(4):
            await session.run("train")
        assert session.status().recoveries == 1
    assert hook.results == {4: 4}


@pytest.mark.parametrize("unfinished", [False, True])
async def test_a_pending_evaluation_is_not_duplicated_by_the_saved_state(unfinished: bool) -> None:
    """An evaluation pending in memory is made once on its own values, even if the saved state has another one."""
    steps, gate = ah.MemoryStepStore(), GatedEvaluation()
    hook = EvaluatorHook(gate, every=ah.Every(steps=2), mode="background", max_pending=3, at_end=False)

    class Creator:
        graph = counting_graph()

        async def create_session(self) -> ah.Session:
            if steps.latest.step:
                await steps.reset(5)
                hook.load_state_dict({"evaluated_step": None, "timer": {"step": 2, "secs": 0.0}, "unfinished": unfinished})
            return ah.Session(self.graph, global_step=steps)

    lost = FaultInjectionHook({("before_run", 6): ah.AbortedError("lost")})
    async with ah.AsyncMonitoredSession(Creator(), [hook, lost], recovery=NO_BACKOFF) as session:
        for _ in range(5):
            await session.run("train")
        assert hook.pending == (2, 4)
        await session.run("loss")
        assert hook.pending == (2, 4)
        gate.release(9)
    assert gate.ended == [2, 4]


@both_modes
async def test_a_state_saved_before_the_hooks_turn(mode: Any) -> None:
    """A state that was saved at a boundary before this hook's turn counts from the previous boundary: it is due immediately."""
    hook = EvaluatorHook(total, every=ah.Every(steps=4), mode=mode, at_end=False)
    state = {"evaluated_step": 4, "timer": {"step": 4, "secs": 0.0}, "unfinished": False}
    assert [*await results_of(hook, 1, RestoringHook(hook, state), start=8)] == [8]


@both_modes
async def test_the_last_step_is_not_evaluated_again(mode: Any) -> None:
    """A finished run that is resumed without further runs is not evaluated again."""
    hook = EvaluatorHook(total, every=ah.Every(steps=4), mode=mode)
    state = {"evaluated_step": 10, "timer": {"step": 10, "secs": 0.0}, "unfinished": False}
    assert await results_of(hook, 0, RestoringHook(hook, state), start=10) == {}
    assert await results_of(hook, 0, start=10) == {10: 0}


def test_an_invalid_state_is_refused() -> None:
    """The state of another hook is refused, with the missing key."""
    with refused(ah.errors.InvalidArgumentError, "the state of an EvaluatorHook has no 'timer'"):
        EvaluatorHook(total, every=ah.Every(steps=1)).load_state_dict({"evaluated_step": 1})
