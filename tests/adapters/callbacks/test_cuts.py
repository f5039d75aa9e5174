"""A session with the callbacks of a framework that is cut anywhere, by a restart or a recovery, is one run all the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras
import pytest
from ignite.engine import Engine, Events
from ignite.handlers import EarlyStopping as IgniteStopping
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from transformers import EarlyStoppingCallback

import aiohooks as ah
from aiohooks.adapters.ignite import IgniteHandlers
from aiohooks.adapters.keras import KerasCallbacks
from aiohooks.adapters.lightning import LightningCallbacks
from aiohooks.adapters.transformers import TrainerCallbacks
from aiohooks.hooks import Evaluation
from aiohooks.testing import FaultInjectionHook
from tests.adapters.callbacks.loops import LightningModule, lightning_trainer, run_steps, trainer_arguments
from tests.support.sessions import NO_BACKOFF

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])


class Made(NamedTuple):
    """What one process has: hooks, what is tracked beside them, and what its callbacks have seen at the end."""

    hooks: list[ah.SessionRunHook]
    seen: Callable[[], dict[Any, Any]]
    tracked: Mapping[str, Any] = {}


def of_keras(folder: Path) -> Made:
    """The logs of each epoch. Keras saves no states by which a callback could stop in another process."""
    epochs: dict[Any, Any] = {}
    noting = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.update({epoch: dict(logs)}))
    return Made([KerasCallbacks([noting], ["loss"], steps_per_epoch=3), ah.StopAtStepHook(last_step=9)], lambda: epochs)


def of_lightning(folder: Path) -> Made:
    """The epoch, the best value and the best checkpoints."""
    stopping = EarlyStopping("loss", patience=2)
    saving = ModelCheckpoint(folder / "saved", monitor="loss", every_n_train_steps=2, save_top_k=2)
    trainer = lightning_trainer([stopping, saving], enable_checkpointing=True)

    def seen() -> dict[Any, Any]:
        best = sorted(Path(path).name for path in saving.best_k_models)
        return {"epoch": trainer.current_epoch, "best": float(stopping.best_score), "saved": best}

    return Made([LightningCallbacks(trainer, LightningModule(), ["loss"], steps_per_epoch=2)], seen)


def of_ignite(folder: Path) -> Made:
    """The epochs that were completed. The state of a handler is tracked."""
    engine, epochs = Engine(lambda engine, batch: None), dict[Any, Any]()
    stopping = IgniteStopping(2, lambda engine: -engine.state.output["loss"], engine)
    engine.add_event_handler(Events.EPOCH_COMPLETED, stopping)
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: epochs.update({engine.state.epoch: engine.state.iteration}))
    return Made([IgniteHandlers(engine, ["loss"], steps_per_epoch=2)], lambda: epochs, {"stopping": stopping})


def of_transformers(folder: Path) -> Made:
    """All logs, those of evaluations too, and the best value."""
    periods = {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 0.25, "num_train_epochs": 4}
    best = {"metric_for_best_model": "eval_loss", "greater_is_better": False, "restore_callback_states_from_checkpoint": True}
    hook = TrainerCallbacks([EarlyStoppingCallback(2)], trainer_arguments(**periods, **best), ["loss"], steps_per_epoch=4)

    async def evaluate(evaluation: Evaluation) -> dict[str, float]:
        return {"eval_loss": abs(evaluation.step - 4.0)}

    evaluator = ah.EvaluatorHook(evaluate, every=ah.Every(steps=2), on_result=hook.report)
    return Made([evaluator, hook], lambda: {"logs": hook.state.log_history, "best": hook.state.best_metric})


@pytest.mark.parametrize("by", ["restart", "recovery"])
@pytest.mark.parametrize("cut", range(1, 8))
@pytest.mark.parametrize("make", [of_keras, of_lightning, of_ignite, of_transformers])
async def test_a_run_that_is_cut_ends_where_a_whole_one_does(
    tmp_path: Path, make: Callable[[Path], Made], cut: int, by: str
) -> None:
    """After the same step, and its callbacks have seen the same."""

    async def train(folder: Path, *hooks: ah.SessionRunHook, every: int = 100) -> tuple[int, dict[Any, Any]]:
        made = make(folder)
        creator = ah.ChiefSessionCreator(step, scaffold=ah.Scaffold(tracked=made.tracked), checkpoint_dir=folder)
        saver = ah.CheckpointSaverHook(every=ah.Every(steps=every))
        session = await run_steps(creator, *made.hooks, saver, *hooks, recovery=NO_BACKOFF)
        return session.global_step.latest.step, made.seen()

    async def step(global_step: int) -> dict[str, float]:
        return {"loss": abs(global_step - 3.0)}

    whole = await train(tmp_path / "whole")
    assert whole[0] in (8, 9)
    if by == "restart":
        _, before = await train(tmp_path / "cut", ah.StopAtStepHook(last_step=cut))
        last, after = await train(tmp_path / "cut")
        assert (last, before | after) == whole
    else:
        loses_a_step = FaultInjectionHook({("before_run", cut): ah.AbortedError("lost")})
        assert await train(tmp_path / "cut", loses_a_step, every=1) == whole
