"""One loop of each framework: `loop(hooks, steps, step)` makes `steps` steps, which call `step(number)`, with hooks in it.

The loss of a step is one divided by its number; a session has the same steps by `losses`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import lightning
import numpy as np
import torch
import transformers
from ignite.engine import Engine

import aiohooks as ah
from aiohooks.adapters.ignite import HooksForIgnite
from aiohooks.adapters.keras import HooksForKeras
from aiohooks.adapters.lightning import HooksForLightning
from aiohooks.adapters.transformers import HooksForTrainer
from aiohooks.hooks import Evaluation

Loop = Callable[..., None]
Step = Callable[[int], object]


class _Numbered:
    """Calls `step` with the numbers from 1 on."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.number = 0

    def loss(self) -> float:
        self.number += 1
        self.step(self.number)
        return 1 / self.number


def losses() -> Any:
    """Make a step of a session."""
    number = 0

    async def step() -> dict[str, float]:
        nonlocal number
        number += 1
        return {"loss": 1 / number}

    return step


async def run_steps(step: Any, *hooks: Any, feeds: Any = None, **options: Any) -> ah.AsyncMonitoredSession:
    """Make the steps of a session until it stops, and return it."""
    async with ah.AsyncMonitoredSession(step, hooks, **options) as session:
        async for _ in session.steps(feeds=feeds):
            pass
    return session


def do_nothing(number: int) -> None:
    """Make a step of which only the loss is seen."""


class KerasModel(keras.Model):  # type: ignore[misc]
    """A model whose step computes nothing."""

    def __init__(self, step: Step = do_nothing) -> None:
        super().__init__()
        self.numbered = _Numbered(step)
        self.compile(optimizer="sgd")

    @property
    def metrics(self) -> list[Any]:
        return []  # the logs of an epoch are those of its last step then

    def call(self, x: Any) -> Any:
        return x

    def train_step(self, data: Any) -> dict[str, float]:
        return {"loss": self.numbered.loss()}


def fit_keras(model: Any, callbacks: Iterable[Any], steps: int, epochs: int = 1) -> None:
    """Make `steps` steps in each epoch."""
    x = np.zeros((steps, 1), np.float32)
    model.fit(x, x, batch_size=1, epochs=epochs, verbose=0, callbacks=list(callbacks))


def keras_loop(hooks: Iterable[Any], steps: int, step: Step = do_nothing) -> None:
    """`keras.Model.fit`."""
    with HooksForKeras(hooks) as callback:
        fit_keras(KerasModel(step), [callback], steps)


class LightningModule(lightning.LightningModule):  # type: ignore[misc]
    """A module of one weight, whose step computes nothing of it."""

    def __init__(self, step: Step = do_nothing) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.numbered = _Numbered(step)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.weight * 0 + self.numbered.loss()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def lightning_trainer(callbacks: Iterable[Any], **options: Any) -> lightning.Trainer:
    """Make a Trainer that shows and writes nothing."""
    quiet = ("enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    options = {**dict.fromkeys(quiet, False), "logger": False, "accelerator": "cpu", "max_epochs": 1, **options}
    return lightning.Trainer(callbacks=list(callbacks), **options)


def loader(steps: int) -> Any:
    """Make a loader of so many batches."""
    rows: Any = torch.arange(float(steps))
    return torch.utils.data.DataLoader(rows)


def lightning_loop(hooks: Iterable[Any], steps: int, step: Step = do_nothing) -> None:
    """`lightning.Trainer.fit`."""
    with HooksForLightning(hooks) as callback:
        lightning_trainer([callback]).fit(LightningModule(step), loader(steps))


def ignite_engine(step: Step = do_nothing) -> Any:
    """Make an engine."""
    numbered = _Numbered(step)
    return Engine(lambda engine, batch: {"loss": numbered.loss()})


def ignite_loop(hooks: Iterable[Any], steps: int, step: Step = do_nothing) -> None:
    """`ignite.engine.Engine.run`."""
    engine = ignite_engine(step)
    with HooksForIgnite(engine, hooks):
        engine.run(range(steps))


class TrainerModel(torch.nn.Module):
    """A module of one weight, whose step computes nothing of it."""

    def __init__(self, step: Step = do_nothing) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.numbered = _Numbered(step)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.weight * 0 + self.numbered.loss()}


def trainer_arguments(**options: Any) -> transformers.TrainingArguments:
    """Make arguments of a Trainer that shows and writes nothing, and logs every step."""
    options = {"logging_steps": 1, "save_strategy": "no", "num_train_epochs": 1, **options}
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "per_device_train_batch_size": 1}
    return transformers.TrainingArguments(output_dir="trainer", **quiet, **options)


def train_trainer(
    model: torch.nn.Module, callbacks: Iterable[Any], steps: int, resume: str | None = None, **options: Any
) -> None:
    """Make `steps` steps in each epoch."""
    rows: Any = [{"x": torch.tensor(float(row))} for row in range(steps)]
    trainer = transformers.Trainer(model, trainer_arguments(**options), train_dataset=rows, callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=resume)


def transformers_loop(hooks: Iterable[Any], steps: int, step: Step = do_nothing) -> None:
    """`transformers.Trainer.train`."""
    with HooksForTrainer(hooks) as callback:
        train_trainer(TrainerModel(step), [callback], steps)


LOOPS = (keras_loop, lightning_loop, ignite_loop, transformers_loop)


def evaluating(hook: Any, name: str, *results: float, every: int = 2) -> ah.EvaluatorHook:
    """Make a hook that evaluates in every second step, with these results one after the other, and passes them on."""
    left = iter(results)

    async def evaluate(evaluation: Evaluation) -> dict[str, float]:
        return {name: next(left)}

    return ah.EvaluatorHook(evaluate, every=ah.Every(steps=every), on_result=hook.report)


class StepsHook(ah.SessionRunHook):
    """Notes the steps at which the session begins and is after each run."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
        self.steps.append(session.global_step.latest.step)

    async def after_run(self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
        self.steps.append(run_context.global_step)
