"""Plays of the cancel sweep: evaluations, inline, in the background and in threads; and a watchdog over a session that stalls."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import aiohooks as ah
from tests.fuzz.playbook import Broken, fails, let_time_pass, scenario
from tests.fuzz.plays_of_checkpoints import PATIENCE_SECS
from tests.fuzz.stage import Stage

EVERY_STEP = ah.Every(steps=1)


async def train(stage: Stage, *hooks: ah.SessionRunHook, runs: int = 2) -> None:
    async with stage.open(hooks=[*stage.hooks, *hooks]) as session:
        for _ in range(runs):
            await stage.run(session)


def evaluator(stage: Stage, **options: Any) -> ah.EvaluatorHook:
    """One whose function does what the stage says, and looks whether it has the values of its step."""

    async def evaluate(evaluation: ah.hooks.Evaluation) -> dict[str, int]:
        label = "evaluation" if options.get("mode") == "background" else "evaluate"
        await stage.probe.watch(label, functools.partial(stage._perform, label, 1))
        weight: int = await evaluation.run("w")
        if weight != evaluation.step:
            stage.problem(f"the evaluation at step {evaluation.step} got the variable of step {weight}")
        return {"weight": weight}

    return ah.EvaluatorHook(evaluate, every=EVERY_STEP, **options)


def check_evaluated(stage: Stage, hook: ah.EvaluatorHook) -> None:
    """After a clean end: none was left out, not even one whose task was cancelled by others."""
    if list(hook.results) != list(range(1, stage.step + 1)):
        stage.problem(f"evaluated were {list(hook.results)}, of {stage.step} steps")
    if hook.pending:
        stage.problem(f"not evaluated: {hook.pending}")


@scenario("evaluations while the loop waits", hooks=1)
async def inline(stage: Stage) -> None:
    hook = evaluator(stage)
    await train(stage, hook)
    check_evaluated(stage, hook)


@scenario("evaluations in the background", hooks=1)
async def background(stage: Stage) -> None:
    hook = evaluator(stage, mode="background", max_pending=1 + stage.seed % 2)
    await train(stage, hook, runs=3)
    check_evaluated(stage, hook)


@scenario("an evaluation that fails", hooks=1, expect=Broken)
async def failing(stage: Stage) -> None:
    stage.acts["evaluate"] = stage.acts["evaluation"] = fails(Broken)
    await train(stage, evaluator(stage, mode="background" if stage.seed % 2 else "inline"))


@scenario("an evaluation that takes too long", hooks=1, manual=True, expect=ah.errors.HookTimeoutError)
async def too_long(stage: Stage) -> None:
    async def stuck(call: int) -> None:
        await asyncio.Event().wait()

    stage.acts["evaluate"] = stage.acts["evaluation"] = stuck
    let_time_pass(stage, 500, 1)
    await train(stage, evaluator(stage, mode="background" if stage.seed % 2 else "inline", timeout_secs=9))
    no_timers(stage)


@scenario("an evaluation in a thread", hooks=1, hang_secs=PATIENCE_SECS)
async def to_thread(stage: Stage) -> None:
    def evaluate(evaluation: ah.hooks.Evaluation) -> int:
        return evaluation.step

    hook = ah.EvaluatorHook(evaluate, every=EVERY_STEP, thread=True, mode="background" if stage.seed % 2 else "inline")
    await train(stage, hook)
    check_evaluated(stage, hook)


@scenario("an evaluation goes on after a recovery", hooks=1, creator=True, vanishing=True)
async def recovered(stage: Stage) -> None:
    stage.acts["train"] = fails(ah.AbortedError, at=2)
    hook = evaluator(stage, mode="background")
    await train(stage, hook)
    check_evaluated(stage, hook)


def no_timers(stage: Stage) -> None:
    """Whatever watched the time watches it no more."""
    if stage.clock.pending:
        stage.problem(f"I9: {stage.clock.pending} timers are left")


async def _watched(stage: Stage, hook: ah.WatchdogHook) -> None:
    """Everything takes longer than it may."""
    let_time_pass(stage, 300, 1)
    try:
        await train(stage, hook)
    finally:
        no_timers(stage)


@scenario("a watchdog reports", hooks=1, manual=True)
async def reported(stage: Stage) -> None:
    await _watched(stage, ah.WatchdogHook(0.5, wait_secs=0.5))


@scenario("a watchdog asks for a stop", hooks=1, manual=True, vanishing=True)
async def stopped(stage: Stage) -> None:
    await _watched(stage, ah.WatchdogHook(0.5, wait_secs=0.5, on_stall="stop"))


@scenario("a watchdog ends a run that stalls", hooks=1, manual=True, vanishing=True, expect=ah.errors.SessionStalledError)
async def broken_off(stage: Stage) -> None:
    async def stuck(call: int) -> None:
        await asyncio.Event().wait()

    stage.acts["right"] = stuck
    await _watched(stage, ah.WatchdogHook(20, on_stall="raise"))


@scenario("a watchdog with a thread", hooks=1, hang_secs=PATIENCE_SECS)
async def watched_loop(stage: Stage) -> None:
    await train(stage, ah.WatchdogHook(60, blocked_secs=60))
