"""Scenarios with evaluations, inline and in the background; and with a watchdog over a
session that stalls.
"""

from __future__ import annotations

import functools
from typing import Any

import aiohooks as ah
from aiohooks._core.activity import RunOwner
from tests.fuzz.explored.fixture import EVERY_STEP, Broken, Fixture, fails, scenario
from tests.fuzz.explored.harness import Probe
from tests.support.waiting import forever


async def train(fixture: Fixture, hook: ah.SessionRunHook, runs: int = 2) -> None:
    await fixture.train(hooks=[*fixture.hooks, hook], runs=runs)


class WatchedEvaluator(ah.hooks.EvaluatorHook):
    """An evaluator whose worker is cancelled too, not only the task of the evaluation."""

    probe: Probe

    def _reset(self) -> None:
        super()._reset()
        work = self._queue._work

        async def watched_work(session: RunOwner) -> None:
            await self.probe.watch("worker", work, session)

        self._queue._work = watched_work  # type: ignore[method-assign]


def evaluator(fixture: Fixture, **options: Any) -> WatchedEvaluator:
    """Make an evaluator whose function performs the fixture's action, and checks that it gets the
    values of its step.
    """
    action = "evaluation" if options.get("mode") == "background" else "evaluate"

    async def evaluate(evaluation: ah.hooks.Evaluation) -> dict[str, int]:
        await fixture.probe.watch("evaluate", functools.partial(fixture.perform_action, action, 1))
        weight: int = await evaluation.run("w")
        if weight != evaluation.step:
            fixture.add_violation(
                f"the evaluation at step {evaluation.step} got the variable of step {weight}"
            )
        return {"weight": weight}

    hook = WatchedEvaluator(evaluate, every=EVERY_STEP, **options)
    hook.probe = fixture.probe
    return hook


def check_every_step_evaluated(fixture: Fixture, hook: ah.hooks.EvaluatorHook) -> None:
    """Check after a clean end that no evaluation was left out, not even one whose task was
    cancelled by others.
    """
    if list(hook.results) != list(range(1, fixture.step + 1)):
        fixture.add_violation(f"evaluated were {list(hook.results)}, of {fixture.step} steps")
    if hook.pending:
        fixture.add_violation(f"not evaluated: {hook.pending}")


@scenario("evaluations while the loop waits", hooks=1)
async def inline(fixture: Fixture) -> None:
    hook = evaluator(fixture)
    await train(fixture, hook)
    check_every_step_evaluated(fixture, hook)


@scenario("evaluations in the background", hooks=1)
async def background(fixture: Fixture) -> None:
    hook = evaluator(fixture, mode="background", max_pending=1 + fixture.seed % 2)
    await train(fixture, hook, runs=3)
    check_every_step_evaluated(fixture, hook)


@scenario("an evaluation that fails", hooks=1, expect=Broken)
async def failing(fixture: Fixture) -> None:
    fixture.actions["evaluate"] = fixture.actions["evaluation"] = fails(Broken)
    await train(fixture, evaluator(fixture, mode="background" if fixture.seed % 2 else "inline"))


@scenario("an evaluation continues after a recovery", hooks=1, creator=True, vanishing=True)
async def recovered(fixture: Fixture) -> None:
    fixture.actions["train"] = fails(ah.AbortedError, at=2)
    hook = evaluator(fixture, mode="background")
    await train(fixture, hook)
    check_every_step_evaluated(fixture, hook)


async def _watched(fixture: Fixture, hook: ah.hooks.WatchdogHook) -> None:
    """Train while everything exceeds its limits."""
    fixture.pause_secs = 1
    await train(fixture, hook)


@scenario("a watchdog reports", hooks=1)
async def reported(fixture: Fixture) -> None:
    await _watched(fixture, ah.hooks.WatchdogHook(0.5, wait_secs=0.5))


@scenario("a watchdog asks for a stop", hooks=1, vanishing=True)
async def stopped(fixture: Fixture) -> None:
    await _watched(fixture, ah.hooks.WatchdogHook(0.5, wait_secs=0.5, on_stall="stop"))


@scenario(
    "a watchdog ends a run that stalls",
    hooks=1,
    vanishing=True,
    expect=ah.errors.SessionStalledError,
)
async def broken_off(fixture: Fixture) -> None:
    fixture.actions["right"] = forever
    await _watched(fixture, ah.hooks.WatchdogHook(20, on_stall="raise"))
