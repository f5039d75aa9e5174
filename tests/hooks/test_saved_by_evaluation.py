"""CheckpointSaverHook and evaluations: which checkpoints are kept by them, and what is said when
nothing is saved or judged.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.checkpoint import KeepBest
from tests.support.saving_sessions import on_disk, state_at
from tests.support.sessions import make_runs, use_up

pytestmark = pytest.mark.every_python

EVERY_TWO = ah.Every(steps=2)


async def step() -> dict[str, float]:
    return {"loss": 1.0}


async def score(evaluation: ah.hooks.Evaluation) -> dict[str, Any]:
    """Return the best score at step 4, and what is no number."""
    return {"score": abs(evaluation.step - 4), "name": "x"}


async def train(saver: Any, hooks: list[Any], steps: int) -> None:
    hooks = [*hooks, ah.StopAtStepHook(last_step=steps)]
    async with ah.AsyncMonitoredSession(
        ah.ChiefSessionCreator(step, checkpoint_dir=saver), hooks
    ) as session:
        await use_up(session.steps("loss"))


async def test_a_checkpoint_is_judged_when_its_evaluation_is_there(tmp_path: Path) -> None:
    """A checkpoint that was saved before its evaluation gets its numbers later; the next save waits
    for them.
    """
    gate = asyncio.Event()

    async def evaluate(evaluation: ah.hooks.Evaluation) -> dict[str, float]:
        await gate.wait()
        return {"score": evaluation.step}

    evaluator = ah.hooks.EvaluatorHook(evaluate, every=EVERY_TWO, mode="background")
    async with ah.checkpoint.Saver(tmp_path, keep=KeepBest(1, "score")) as saver:
        saving = ah.CheckpointSaverHook(every=EVERY_TWO, background=False)
        creator = ah.ChiefSessionCreator(step, checkpoint_dir=saver)
        async with ah.AsyncMonitoredSession(creator, [evaluator, saving]) as session:
            await make_runs(session, 2, "loss")
            assert [
                (checkpoint.step, dict(checkpoint.metrics))
                for checkpoint in await saver.checkpoints()
            ] == [(2, {})]
            gate.set()
            await make_runs(session, 2, "loss")
            found = {
                checkpoint.step: dict(checkpoint.metrics)
                for checkpoint in await saver.checkpoints()
            }
            assert found[2] == {"score": 2}


async def test_what_keepbest_cannot_judge_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A metric that no checkpoint has is named in one warning, with what to do."""
    async with ah.checkpoint.Saver(tmp_path, keep=KeepBest(1, "score")) as saver:
        await train(saver, [ah.CheckpointSaverHook(every=ah.Every(steps=1))], 6)
    (warning,) = caplog.messages
    assert "no checkpoint has the metric 'score'" in warning
    assert "EvaluatorHook" in warning


@pytest.mark.parametrize(
    ("hooks", "options", "warned"),
    [([], {}, True), ([], {"read_only": True}, False), ([ah.CheckpointSaverHook()], {}, False)],
)
async def test_a_directory_in_which_nothing_is_saved(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    hooks: list[Any],
    options: dict[str, Any],
    warned: bool,
) -> None:
    """A session that only restores from its directory says so, once, unless it is to only read."""
    async with ah.checkpoint.Saver(tmp_path, **options) as saver:
        await train(saver, hooks, 3)
    assert ["no checkpoint will be saved" in text for text in caplog.messages] == [True] * warned


async def test_a_state_that_not_all_hooks_have_seen_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With `save_on_error`, a step whose `after_run` failed is saved, and a warning says what may
    be missing.
    """

    async def fail(context: ah.SessionRunContext, values: object) -> None:
        if context.global_step == 3:
            raise ValueError("mine")

    hooks = [
        ah.CheckpointSaverHook(every=ah.Every(steps=10), save_on_error=True),
        ah.hook("after_run")(fail),
    ]
    with pytest.raises(ValueError, match="mine"):
        await train(tmp_path, hooks, 5)
    assert "step 3 is saved, and after_run of this step has not ended for all hooks" in caplog.text
    assert (await on_disk(tmp_path))[-1] == 3


async def test_hooks_that_keep_time_are_numbered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Several hooks of a class that keep only when they were due need no names; a new one is no
    warning.
    """
    for count in (2, 3):
        logs = [ah.LoggingHook(["loss"], every=ah.Every(secs=60)) for _ in range(count)]
        await train(tmp_path, [*logs, ah.CheckpointSaverHook()], 2 * count)
    assert (await state_at(tmp_path))["hooks"].keys() == {
        "LoggingHook",
        "LoggingHook#2",
        "LoggingHook#3",
        "CheckpointSaverHook",
    }
    assert caplog.messages == []
