"""Lightning: what its callbacks see in a session, beside what they see in `fit`, and what hooks see of a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.loggers.logger import Logger

import aiohooks as ah
from aiohooks.adapters.lightning import HooksForLightning, LightningCallbacks
from aiohooks.testing import RecordingHook
from tests.adapters.callbacks.loops import LightningModule, evaluating, lightning_trainer, loader, losses, run_steps

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])


def of_batch_end(trainer: Any, outputs: Any, batch: Any, index: int) -> list[Any]:
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return [float(outputs["loss"]), batch, index, metrics]


DETAILS: dict[str, Callable[..., Iterable[Any]]] = {
    "setup": lambda trainer, stage: [str(stage)],
    "on_fit_start": lambda trainer: [],
    "on_train_start": lambda trainer: [trainer.should_stop],
    "on_train_epoch_start": lambda trainer: [],
    "on_train_batch_start": lambda trainer, batch, index: [batch, index],
    "on_train_batch_end": of_batch_end,
    "on_validation_start": lambda trainer: [trainer.validating],
    "on_validation_epoch_start": lambda trainer: [],
    "on_validation_epoch_end": lambda trainer: [trainer.callback_metrics["accuracy"].item()],
    "on_validation_end": lambda trainer: [trainer.callback_metrics["accuracy"].item()],
    "on_train_epoch_end": lambda trainer: [],
    "on_train_end": lambda trainer: [trainer.validating],
    "on_fit_end": lambda trainer: [],
    "teardown": lambda trainer, stage: [str(stage)],
    "on_exception": lambda trainer, error: [error],
}
"""What is recorded of each call, beside step and epoch."""


class Recording(Callback):  # type: ignore[misc]
    """Records its calls; stops after a number of batches."""

    def __init__(self, stop_after: int = 100) -> None:
        self.record: list[Any] = []
        self.left = stop_after
        for method in DETAILS:
            setattr(self, method, partial(self.note, method))

    def note(self, method: str, trainer: Any, module: Any, *args: Any, **keywords: Any) -> None:
        assert trainer.lightning_module is module.trainer.lightning_module is module
        self.record.append((method, trainer.global_step, trainer.current_epoch, *DETAILS[method](trainer, *args, **keywords)))
        if method == "on_train_batch_end":
            self.left -= 1
            trainer.should_stop = trainer.should_stop or not self.left


@pytest.mark.parametrize("stop_after", [100, 4, 5])
async def test_a_callback_sees_what_it_sees_in_fit(stop_after: int) -> None:
    """Calls, steps, epochs, batches, outputs and metrics are the same, also when it stops in the middle of an epoch."""
    in_fit, in_session = Recording(stop_after), Recording(stop_after)
    lightning_trainer([in_fit], max_epochs=3, limit_train_batches=2).fit(LightningModule(), loader(2))
    step = losses()

    async def fed(batch: Any) -> Any:
        values = await step()
        return {"loss": torch.tensor(values["loss"])}

    hook = LightningCallbacks(lightning_trainer([in_session]), LightningModule(), ["loss"], steps_per_epoch=2)
    session = await run_steps(fed, hook, feeds=list(loader(2)) * 3)
    assert in_session.record == in_fit.record
    assert session.global_step.latest.step == min(stop_after, 6)


class Logs(Logger):  # type: ignore[misc]
    """Keeps what it gets."""

    name = version = "logs"

    def __init__(self) -> None:
        super().__init__()
        self.record: list[Any] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.record.append((step, {name: pytest.approx(float(value)) for name, value in metrics.items()}))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is asked for these."""

    def finalize(self, status: str) -> None:
        self.record.append(status)


class LoggingModule(LightningModule):
    """Logs once more in its step, by step and by epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("twice", 2.0 * batch_idx, on_step=True, on_epoch=True, batch_size=1)
        return super().training_step(batch, batch_idx)


class LogsItself(Callback):  # type: ignore[misc]
    """Logs by itself and by the module, once by step and once by epoch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.log("batches", float(trainer.fit_loop.total_batch_idx))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        assert trainer._results.batch is None, "no batch is kept between two steps"
        pl_module.log("epochs", float(trainer.current_epoch))


@pytest.mark.parametrize("every", [1, 2, 3])
async def test_loggers_get_what_they_get_in_fit(every: int) -> None:
    """Of the module, of callbacks, and of Lightning's own: the same metrics at the same steps, as often as the Trainer says."""

    def trainer() -> Any:
        options = {"logger": Logs(), "log_every_n_steps": every, "max_epochs": 3}
        return lightning_trainer([LearningRateMonitor(), LogsItself()], **options)

    in_fit, in_session, module = trainer(), trainer(), LoggingModule()
    in_fit.fit(LoggingModule(), loader(4))
    optimizer = module.configure_optimizers()

    async def step(batch: Any) -> dict[str, Any]:
        return {"loss": module.training_step(batch, int(batch))}

    hook = LightningCallbacks(in_session, module, optimizers=[optimizer], steps_per_epoch=4)
    await run_steps(step, hook, feeds=list(loader(4)) * 3)
    assert in_session.logger.record == in_fit.logger.record
    assert in_session.logger.record[-1] == "success"
    assert in_session.callback_metrics.keys() == in_fit.callback_metrics.keys()


async def test_loggers_get_values_and_results() -> None:
    """At the step to which they belong, beside the epoch; a session that fails says so."""
    logger, error = Logs(), LookupError("a step")
    trainer = lightning_trainer([], logger=logger, log_every_n_steps=2)
    hook = LightningCallbacks(trainer, LightningModule(), ["loss"], steps_per_epoch=4)

    async def fail() -> None:
        async with ah.AsyncMonitoredSession(losses(), [hook], global_step=ah.MemoryStepStore(4)) as session:
            await session.run(())
            hook.report(6, {"accuracy": 0.5})
            await session.run(())
            raise error

    with pytest.raises(LookupError):
        await fail()
    assert logger.record == [(5, {"loss": 0.5, "epoch": 1}), (5, {"accuracy": 0.5, "epoch": 1}), "failed"]


async def test_what_has_no_effect_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Methods about the inside of a step, of a class or a lambda, and batches to accumulate."""

    class Clips(Callback):  # type: ignore[misc]
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            raise AssertionError

    callbacks = [Clips(), LambdaCallback(on_after_backward=print), GradientAccumulationScheduler({0: 2})]
    hook = LightningCallbacks(lightning_trainer(callbacks), LightningModule(), steps_per_epoch=1)
    await run_steps(losses(), hook, ah.StopAtStepHook(last_step=3))
    assert [record.message.split()[1:4] for record in caplog.records if record.name == "aiohooks.adapters"] == [
        ["on_before_optimizer_step", "of", "Clips"],
        ["on_after_backward", "of", "LambdaCallback"],
        ["accumulate_grad_batches", "has", "no"],
    ]


async def test_a_result_is_a_validation() -> None:
    """It begins and ends as the validation of `fit`, which has batches as well, and the epoch ends after it."""

    class Validated(LightningModule):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("accuracy", 0.5)

    in_fit, in_session = Recording(), Recording()
    fitting = lightning_trainer([in_fit], num_sanity_val_steps=0)
    fitting.fit(Validated(), loader(2), loader(1))
    hook = LightningCallbacks(lightning_trainer([in_session]), LightningModule(), ["loss"], steps_per_epoch=2)

    async def step() -> dict[str, torch.Tensor]:
        return {name: torch.tensor(value) for name, value in (await values()).items()}

    values = losses()
    evaluator = evaluating(hook, "accuracy", 0.5)
    await run_steps(step, evaluator, hook, ah.StopAtStepHook(last_step=2))
    assert [one for one in in_session.record if "batch" not in one[0]] == [one for one in in_fit.record if "batch" not in one[0]]
    assert len([one for one in in_fit.record if one[0].startswith("on_validation")]) == 4


async def test_callbacks_of_lightning_do_what_they_do_in_fit(tmp_path: Path) -> None:
    """`EarlyStopping` stops by what an evaluation reports, and `ModelCheckpoint` keeps the best epoch, with the optimizer."""
    stopping = EarlyStopping("val_accuracy", patience=2, mode="max")
    saving = ModelCheckpoint(tmp_path, monitor="val_accuracy", mode="max", save_on_train_epoch_end=True)
    module = LightningModule()
    trainer = lightning_trainer([stopping, saving], enable_checkpointing=True)
    optimizer = torch.optim.SGD(module.parameters(), 0.25)
    hook = LightningCallbacks(trainer, module, ["loss"], optimizers=[optimizer], steps_per_epoch=2)
    evaluator = evaluating(hook, "val_accuracy", 0.5, 0.9, 0.8, 0.7, 0.6)
    session = await run_steps(losses(), evaluator, hook)
    assert session.global_step.latest.step == 8
    assert session.stop_reason == "EarlyStopping has requested it"
    saved: Any = torch.load(saving.best_model_path, weights_only=False)
    assert (saved["epoch"], saved["global_step"]) == (1, 4)
    assert saved["optimizer_states"][0]["param_groups"][0]["lr"] == 0.25
    assert saved["state_dict"] == module.state_dict()


@pytest.mark.parametrize("has_begun", [True, False])
async def test_a_failure_is_passed_on(has_begun: bool) -> None:
    """`on_exception` gets the error, and `teardown` is not called, as in Lightning; before the training nothing is."""
    recording, error = Recording(), LookupError("a step")

    async def fail() -> None:
        raise error

    failing = [] if has_begun else [ah.LambdaHook(begin=fail)]
    with pytest.raises(LookupError):
        await run_steps(fail, LightningCallbacks(lightning_trainer([recording]), LightningModule()), *failing)
    assert [one[0] for one in recording.record[-2:]] == (["on_train_batch_start", "on_exception"] if has_begun else [])
    assert [one[-1] for one in recording.record[-1:]] == [error] * has_begun


async def test_a_step_begins_at_the_step_of_the_session() -> None:
    """Also where another worker has made steps since the last one."""
    recording, store = Recording(), ah.MemoryStepStore()
    hook = LightningCallbacks(lightning_trainer([recording]), LightningModule(), ["loss"])
    async with ah.AsyncMonitoredSession(losses(), [hook], global_step=store) as session:
        await session.run(())
        await store.advance(3)
        await session.run(())
    assert [one[1] for one in recording.record if one[0] == "on_train_batch_start"] == [0, 4]


def test_hooks_fetch_what_the_module_logs() -> None:
    """Beside the loss, what `self.log` got under another name."""

    class Module(LightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log("rows", 7.0)
            return super().training_step(batch, batch_idx)

    hook = RecordingHook(fetches=["rows", "loss"])
    with HooksForLightning([hook]) as callback:
        lightning_trainer([callback]).fit(Module(), loader(1))
    assert [value.item() for value in hook.results[0]] == [7, 1]
