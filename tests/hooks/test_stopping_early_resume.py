"""EarlyStoppingHook: the state that it keeps over a restart and through a recovery."""

from __future__ import annotations

from typing import Any

import pytest

import aiohooks as ah
from aiohooks.hooks.stopping import EarlyStoppingHook
from aiohooks.testing import FaultInjectionHook
from tests.support.checks import refused
from tests.support.evaluations import giving, stopped_at
from tests.support.hooks import PhaseHook, RestoringHook
from tests.support.sessions import NO_BACKOFF, counting_graph

pytestmark = pytest.mark.every_python


async def resumed(first: EarlyStoppingHook, values: list[Any], second: EarlyStoppingHook, more: list[Any]) -> int | None:
    """Return where the second part stops, counted in the steps of both."""
    await stopped_at(values, first)

    async with ah.AsyncMonitoredSession(
        giving(more), [second, RestoringHook(second, first.state_dict())], global_step=ah.MemoryStepStore(len(values))
    ) as session:
        while not session.should_stop() and session.global_step.latest.step < len(values) + len(more):
            await session.run("step")
    return session.global_step.latest.step if second.reason else None


@pytest.mark.parametrize(("stay", "at"), [(False, 5), (True, 3)])
async def test_a_resumed_run_that_had_stopped(stay: bool, at: int) -> None:
    """It continues with all its patience, compared with the best so far; with `stay_stopped` it ends before the first run."""
    first, second = (EarlyStoppingHook("loss", patience=2, stay_stopped=stay) for _ in range(2))
    assert await resumed(first, [1, 2, 2], second, [2, 2, 2, 2]) == at
    assert second.best == 1.0
    assert second.best_step == 1
    assert second.reason is not None
    assert (second.reason == first.reason) == stay


@pytest.mark.parametrize("other", [{"monitor": "accuracy"}, {"mode": "max"}])
async def test_the_state_of_another_value_is_ignored(other: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """The best of another value, or by another mode, is not compared with; a warning says so."""
    hook = EarlyStoppingHook("loss", patience=2)
    await stopped_at([1, 2], hook)
    second = EarlyStoppingHook(**{"monitor": "loss", "patience": 2, **other})
    await second.begin()
    second.load_state_dict(hook.state_dict())
    assert second.best is None
    assert "early stopping starts its counts again" in caplog.text
    with refused(ah.errors.InvalidArgumentError, "the state of an EarlyStoppingHook has no", "best_step"):
        second.load_state_dict({"best": 1})


async def test_a_recovery_keeps_the_counts() -> None:
    """If there is no checkpoint to restore, the counts continue through a recovery; no observation is made twice."""
    hook = EarlyStoppingHook("loss", patience=3)
    lost = FaultInjectionHook({("before_run", 3): ah.AbortedError("lost")})
    async with ah.AsyncMonitoredSession(giving([1, 2, 2, 2, 2]), [hook, lost], recovery=NO_BACKOFF) as session:
        while not session.should_stop():
            await session.run("step")
        assert session.status().recoveries == 1
    assert session.global_step.latest.step == 4


async def test_steps_after_a_recovery_are_observed_again() -> None:
    """After a recovery that moved the step back, the repeated steps are due again, with the restored state."""
    steps = ah.MemoryStepStore()
    hook = EarlyStoppingHook("loss", patience=3, every=ah.Every(steps=2))
    saved: dict[str, Any] = {}
    seen: list[tuple[int, int]] = []

    async def note(context: ah.SessionRunContext, values: object) -> None:
        seen.append((context.global_step, hook.waited))
        if context.global_step == 3:
            saved.update(hook.state_dict())

    class Creator:
        graph = counting_graph()

        async def create_session(self) -> ah.Session:
            if steps.latest.step:
                await steps.reset(3)
                hook.load_state_dict(saved)
            return ah.Session(self.graph, global_step=steps)

    lost = FaultInjectionHook({("before_run", 7): ah.AbortedError("lost")})
    hooks: list[Any] = [hook, ah.configure(PhaseHook("after_run", note), order=1), lost]
    async with ah.AsyncMonitoredSession(Creator(), hooks, recovery=NO_BACKOFF) as session:
        while not session.should_stop():
            await session.run("train")
    assert seen == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 2), (4, 1), (5, 1), (6, 2), (7, 2), (8, 3)]


async def test_the_reason_survives_a_recovery() -> None:
    """Once it has requested a stop, its reason is kept, whatever state a recovery restores."""
    hook = EarlyStoppingHook(stopping_threshold=1)
    async with ah.AsyncMonitoredSession(counting_graph(), [hook]) as session:
        before = hook.state_dict()
        hook.report(1, 0.5)
        hook.load_state_dict(before)
        assert hook.reason == session.stop_reason is not None
