"""Hugging Face's Trainer: what its callbacks see in a session, beside what they see in `train`, and what hooks see in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import EarlyStoppingCallback, TrainerCallback

import aiohooks as ah
from aiohooks.adapters.transformers import HooksForTrainer, TrainerCallbacks
from aiohooks.hooks import Evaluation
from aiohooks.testing import RecordingHook
from tests.adapters.callbacks.loops import StepsHook, TrainerModel, losses, train_trainer, trainer_arguments

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])

EVENTS = ("init_end", "train_begin", "epoch_begin", "step_begin", "step_end", "log", "epoch_end", "train_end")


class Recording(TrainerCallback):  # type: ignore[misc]
    """Records its calls, except for what only a Trainer logs; stops after a number of steps."""

    def __init__(self, stop_after: int = 100) -> None:
        self.record: list[Any] = []
        self.stop_after = stop_after
        for event in EVENTS:
            setattr(self, f"on_{event}", self.noting(event))

    def noting(self, event: str) -> Any:
        def note(args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            assert "model" in kwargs
            if logs is None or "loss" in logs:
                control_now = control.should_log, control.should_training_stop
                self.record.append((event, state.global_step, state.epoch, logs and logs["loss"], control_now))
            if event == "step_end" and state.global_step == self.stop_after:
                control.should_training_stop = True

        return note


@pytest.mark.parametrize(
    ("stop_after", "options"),
    [
        (100, {}),
        (4, {}),
        (5, {}),
        (100, {"max_steps": 5}),
        (100, {"logging_steps": 2, "logging_first_step": True}),
        (100, {"logging_strategy": "epoch"}),
    ],
)
async def test_a_callback_sees_what_it_sees_in_train(stop_after: int, options: dict[str, Any]) -> None:
    """Calls, state and control are the same, also when it or the arguments stop the training, and whenever they log."""
    in_train, in_session = Recording(stop_after), Recording(stop_after)
    train_trainer(TrainerModel(), [in_train], 2, **{"num_train_epochs": 3, **options})
    hook = TrainerCallbacks([in_session], trainer_arguments(**options), ["loss"], steps_per_epoch=2)
    async with ah.AsyncMonitoredSession(losses(), [hook, ah.StopAtStepHook(last_step=6)]) as session:
        async for _ in session.steps():
            pass
    if options.get("logging_steps", 1) == 1 and "logging_strategy" not in options:
        assert [one[:4] for one in in_session.record] == [(*one[:3], one[3] and pytest.approx(one[3])) for one in in_train.record]
    else:  # a Trainer logs means of the steps since it logged
        assert [one[:3] for one in in_session.record] == [one[:3] for one in in_train.record]
    assert session.global_step.latest.step == min(stop_after, options.get("max_steps", 6))


async def test_callbacks_of_transformers_do_what_they_do_in_train() -> None:
    """`EarlyStoppingCallback` stops by what an evaluation reports."""
    losses_of_evaluation = iter([0.5, 0.3, 0.4, 0.6, 0.7])

    async def evaluate(evaluation: Evaluation) -> dict[str, float]:
        return {"eval_loss": next(losses_of_evaluation)}

    class Best(TrainerCallback):  # type: ignore[misc]
        """Keeps the best metric, as a Trainer does before it saves."""

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
            state.best_metric = min(state.best_metric or 1.0, metrics["eval_loss"])

    options = {"metric_for_best_model": "eval_loss", "greater_is_better": False, "eval_strategy": "steps", "eval_steps": 2}
    arguments = trainer_arguments(**options, load_best_model_at_end=False)
    hook = TrainerCallbacks([EarlyStoppingCallback(early_stopping_patience=2), Best()], arguments, ["loss"])
    evaluator = ah.EvaluatorHook(evaluate, every=ah.Every(steps=2), on_result=hook.report)
    async with ah.AsyncMonitoredSession(losses(), [evaluator, hook]) as session:
        async for _ in session.steps():
            pass
    assert session.global_step.latest.step == 8
    assert session.stop_reason == "a callback of TrainerCallbacks has requested it"


def test_hooks_fetch_in_the_steps_that_are_logged() -> None:
    """With `logging_steps=2` a hook that fetches in every second step finds the loss."""
    history = ah.HistoryHook(["loss", "learning_rate"], every=ah.Every(steps=2))
    with HooksForTrainer([history]) as callback:
        train_trainer(TrainerModel(), [callback], 4, logging_steps=2)
    assert history.steps == [2, 4]
    assert history.values["loss"] == pytest.approx([(1 + 1 / 2) / 2, (1 / 3 + 1 / 4) / 2])


def test_a_trainer_may_log_without_callbacks() -> None:
    """Where `log` calls none, a step ends when the next one begins."""

    class Quiet(transformers.Trainer):  # type: ignore[misc]
        def log(self, *args: Any, **kwargs: Any) -> None:
            pass

    rows: Any = [{"x": torch.tensor(float(row))} for row in range(3)]
    steps = StepsHook()
    with HooksForTrainer([steps]) as callback:
        Quiet(TrainerModel(), trainer_arguments(), train_dataset=rows, callbacks=[callback]).train()
    assert steps.steps == [0, 1, 2, 3]


def test_a_step_of_several_batches_is_one_run() -> None:
    """A run is a step of the optimizer."""
    made, steps = list[int](), StepsHook()
    with HooksForTrainer([steps]) as callback:
        train_trainer(TrainerModel(made.append), [callback], 4, gradient_accumulation_steps=2)
    assert made == [1, 2, 3, 4]
    assert steps.steps == [0, 1, 2]


def test_hooks_continue_with_a_training_that_continues() -> None:
    """A session in a `train` that restores a checkpoint begins at its step."""
    train_trainer(TrainerModel(), [], 3, save_strategy="steps", save_steps=2)
    steps, hook = StepsHook(), RecordingHook()
    with HooksForTrainer([steps, hook]) as callback:
        train_trainer(TrainerModel(), [callback], 3, resume="trainer/checkpoint-2")
    assert steps.steps == [2, 3]
