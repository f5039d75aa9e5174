"""Hugging Face's Trainer: what its callbacks see in a session, beside what they see in `train`, and what hooks see in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import EarlyStoppingCallback, TrainerCallback

import aiohooks as ah
from aiohooks.adapters.transformers import HooksForTrainer, TrainerCallbacks
from tests.adapters.callbacks.loops import (
    StepsHook,
    TrainerModel,
    evaluating,
    losses,
    run_steps,
    train_trainer,
    trainer_arguments,
)
from tests.support.checks import refused

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
        (100, {"num_train_epochs": 2}),
        (100, {"num_train_epochs": 1.5, "logging_steps": 0.34}),
        (100, {"max_steps": 4, "logging_steps": 0.5}),
    ],
)
async def test_a_callback_sees_what_it_sees_in_train(stop_after: int, options: dict[str, Any]) -> None:
    """Calls, state and control are the same, also when it or the arguments stop the training, and whenever they log."""
    in_train, in_session = Recording(stop_after), Recording(stop_after)
    options = {"num_train_epochs": 3, **options}
    train_trainer(TrainerModel(), [in_train], 2, **options)
    hook = TrainerCallbacks([in_session], trainer_arguments(**options), ["loss"], steps_per_epoch=2)
    session = await run_steps(losses(), hook)
    if options.get("logging_steps", 1) == 1 and "logging_strategy" not in options:
        assert [one[:4] for one in in_session.record] == [(*one[:3], one[3] and pytest.approx(one[3])) for one in in_train.record]
    else:  # a Trainer logs means of the steps since it logged
        assert [one[:3] for one in in_session.record] == [one[:3] for one in in_train.record]
    last = options.get("max_steps", 2 * options["num_train_epochs"])
    assert session.global_step.latest.step == min(stop_after, last)
    if stop_after > last:
        limit = "max_steps" if "max_steps" in options else "num_train_epochs"
        assert session.stop_reason == f"{limit}={options[limit]} of the TrainingArguments has requested it"
    assert hook.state.max_steps == last


EVALUATING = {"metric_for_best_model": "eval_loss", "greater_is_better": False, "eval_strategy": "steps", "eval_steps": 2}


class Evaluations(TrainerCallback):  # type: ignore[misc]
    """Records the results of evaluations, wherever they are passed on."""

    def __init__(self) -> None:
        self.record: list[Any] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "eval_loss" in logs:
            last = state.log_history[-1]
            self.record.append(("log", logs["eval_loss"], logs["epoch"], last["step"], last["eval_loss"], state.best_metric))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.record.append(("evaluate", metrics["eval_loss"], metrics["epoch"], state.global_step, state.best_metric))


async def test_a_result_is_passed_on_as_in_train() -> None:
    """It is logged, given to `on_evaluate`, and kept if it is the best one, in this order."""
    in_train, in_session = Evaluations(), Evaluations()
    losses_of_evaluation = [0.5, 0.3, 0.4]

    class Evaluated(transformers.Trainer):  # type: ignore[misc]
        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            output = super().evaluation_loop(*args, **kwargs)
            output.metrics["eval_loss"] = losses_of_evaluation[self.state.global_step // 2 - 1]
            return output

    rows: Any = [{"x": torch.tensor(float(row))} for row in range(6)]
    Evaluated(
        TrainerModel(), trainer_arguments(**EVALUATING), train_dataset=rows, eval_dataset=rows[:1], callbacks=[in_train]
    ).train()
    hook = TrainerCallbacks([in_session], trainer_arguments(**EVALUATING), ["loss"], steps_per_epoch=6)
    evaluator = evaluating(hook, "eval_loss", *losses_of_evaluation)
    await run_steps(losses(), evaluator, hook, ah.StopAtStepHook(last_step=6))
    assert in_session.record == in_train.record
    assert len(in_train.record) == 6
    assert (hook.state.best_metric, hook.state.best_global_step) == (0.3, 4)


async def test_callbacks_of_transformers_do_what_they_do_in_train() -> None:
    """`EarlyStoppingCallback` stops by what an evaluation reports."""
    hook = TrainerCallbacks([EarlyStoppingCallback(early_stopping_patience=2)], trainer_arguments(**EVALUATING), ["loss"])
    session = await run_steps(losses(), evaluating(hook, "eval_loss", 0.5, 0.3, 0.4, 0.6, 0.7), hook)
    assert session.global_step.latest.step == 8
    assert session.stop_reason == "a callback of TrainerCallbacks has requested it"


@pytest.mark.parametrize("of_callbacks", [True, False])
async def test_a_resumed_session_continues_with_its_state(tmp_path: Path, of_callbacks: bool) -> None:
    """A checkpoint has the logs and the best metric, and what callbacks counted, which is restored if the arguments say so."""
    arguments = trainer_arguments(**EVALUATING, restore_callback_states_from_checkpoint=of_callbacks)
    results = [0.3, 0.5, 0.6, 0.7, 0.8]

    async def train(hook: TrainerCallbacks, results: list[float], last_step: int) -> int:
        creator = ah.ChiefSessionCreator(losses(), checkpoint_dir=tmp_path)
        saver, stop = ah.CheckpointSaverHook(), ah.StopAtStepHook(last_step=last_step)
        evaluator = evaluating(hook, "eval_loss", *results)
        session = await run_steps(creator, evaluator, hook, saver, stop)
        return session.global_step.latest.step

    first, second = (
        TrainerCallbacks([EarlyStoppingCallback(patience) for patience in (3, 5)], arguments, ["loss"]) for _ in range(2)
    )
    assert await train(first, results[:2], 4) == 4
    assert await train(second, results[2:], 10) == (8 if of_callbacks else 10)
    assert [one["step"] for one in second.state.log_history if "eval_loss" not in one][:6] == [1, 2, 3, 4, 5, 6]
    assert (second.state.best_metric, second.state.best_global_step) == (0.3, 2)


async def test_a_training_that_is_over_makes_no_step() -> None:
    """A session that resumes at its end stops before its first run."""
    over = TrainerCallbacks([], trainer_arguments(max_steps=8))
    async with ah.AsyncMonitoredSession(losses(), [over], global_step=ah.MemoryStepStore(8)) as session:
        assert session.should_stop()


@pytest.mark.parametrize("option", ["logging_steps", "eval_steps", "save_steps"])
def test_a_part_of_an_unknown_length_is_refused(option: str) -> None:
    """When the hook is made, with what to give."""
    with refused(ah.errors.InvalidArgumentError, f"{option} is 0.25", "give steps_per_epoch, or max_steps"):
        TrainerCallbacks([], trainer_arguments(**{option: 0.25}))


async def test_what_a_callback_asks_for_in_vain_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Not what the arguments ask for; and callbacks get the optimizer and the scheduler that the hook was given."""
    given: list[Any] = []

    class Asks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            given.append((kwargs["optimizer"], kwargs["lr_scheduler"]))
            control.should_epoch_stop = control.should_save = True

    arguments = trainer_arguments(eval_strategy="steps", eval_steps=1, max_steps=3)
    hook = TrainerCallbacks([Asks()], arguments, optimizer="optimizer", lr_scheduler="scheduler")
    await run_steps(losses(), hook)
    logged = [record.message for record in caplog.records if "has no effect in a session" in record.message]
    assert [message.split()[1] for message in logged] == ["control.should_epoch_stop", "control.should_save"]
    assert given == [("optimizer", "scheduler")] * 3


async def test_a_step_begins_at_the_step_of_the_session() -> None:
    """Also where another worker has made steps since the last one."""
    steps: list[int] = []

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.append(state.global_step)

    store = ah.MemoryStepStore()
    hook = TrainerCallbacks([Steps()], trainer_arguments())
    async with ah.AsyncMonitoredSession(losses(), [hook], global_step=store) as session:
        await session.run(())
        await store.advance(3)
        await session.run(())
    assert steps == [0, 4]


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
