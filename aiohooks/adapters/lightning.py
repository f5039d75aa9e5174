"""Lightning: the callbacks of a Trainer as a hook of a session, and hooks in `trainer.fit`.

callbacks = LightningCallbacks(L.Trainer(callbacks=[MyCallback()]), module, ["loss"])
async with AsyncMonitoredSession(step, [callbacks, *hooks]) as session: ...

with HooksForLightning(hooks) as callback:
    L.Trainer(callbacks=[callback]).fit(module, loader)
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# The package is not where types are checked.
from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from aiohooks._validate import check_instance
from aiohooks.adapters._callbacks import CallbacksHook, HooksInLoop
from aiohooks.errors import missing_extra
from aiohooks.hooks._observing import Values

try:
    import lightning.fabric.utilities.apply_func as _apply_func
    import lightning.pytorch as _pytorch
except ImportError as _missing:
    raise missing_extra("aiohooks.adapters.lightning", "lightning") from _missing

__all__ = ["HooksForLightning", "LightningCallbacks"]

_pl: Any = _pytorch
_convert_to_tensors: Any = _apply_func.convert_to_tensors
_FITTING: Any = _pl.trainer.states.TrainerFn.FITTING
_NEVER_CALLED = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")

if TYPE_CHECKING:
    _Callback = object
else:
    _Callback = _pl.Callback


class LightningCallbacks(CallbacksHook):
    """The callbacks of a Lightning Trainer as a hook; see `CallbacksHook`. `trainer.should_stop` stops the session.

    The Trainer does not run: it is what its callbacks get, with the session's step, epoch and metrics, and with the module. Its
    loggers get the `values`, every `log_every_n_steps`, and what callbacks, and the module in the session's step, log with
    `self.log`. Its loaders and its limits know nothing of the session. A result of an evaluation begins and ends a validation
    without batches; backward passes and steps of optimizers are the session's step, for which no callback is called. The states
    of the callbacks are saved in the checkpoints of the session.
    """

    def __init__(
        self,
        trainer: Any,
        module: Any,
        values: Values | None = None,
        *,
        optimizers: Iterable[Any] = (),
        steps_per_epoch: int | None = None,
        thread: bool = False,
    ) -> None:
        """Create the hook.

        Args:
            trainer: a Trainer with the callbacks, which is used for nothing else.
            module: the `LightningModule` that they get.
            values: a mapping from a tag to a fetch, or several nodes or names: `outputs` and, as tensors,
                `trainer.callback_metrics`, beside `run_context.metrics`.
            optimizers: its `trainer.optimizers`: `ModelCheckpoint` saves their states.
            steps_per_epoch: how many steps are an epoch; left out, the whole training is one.
            thread: call them in a worker thread, because they block.
        """
        super().__init__(values, steps_per_epoch, thread)
        check_instance(trainer, _pl.Trainer, "trainer")
        check_instance(module, _pl.LightningModule, "module")
        self.trainer: Any = trainer
        self.module: Any = module
        self._optimizers = list(optimizers)

    def _reset(self) -> None:
        super()._reset()
        self._restored: Mapping[str, Any] = {}

    def _state(self) -> dict[str, Any]:
        return {one.state_key: state for one in self.trainer.callbacks if (state := one.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the callbacks their states: at a restart after their `setup`, as in Lightning."""
        self._restored = state
        if self._coord is not None:
            self._load_states()

    def _load_states(self) -> None:
        for callback in self.trainer.callbacks:
            if callback.state_key in self._restored:
                callback.load_state_dict(copy.deepcopy(self._restored[callback.state_key]))
        self._restored = {}

    def _has_asked_to_stop(self) -> bool:
        return bool(self.trainer.should_stop)

    def _call_all(self, method: str, *args: Any, callbacks: Iterable[Any] | None = None) -> None:
        self.module._current_fx_name = method  # what `self.log` belongs to
        self._call_each(self.trainer.callbacks if callbacks is None else callbacks, method, self.trainer, self.module, *args)
        self.module._current_fx_name = None

    def _set_step(self, step: int) -> None:
        self._epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = step

    def _set_metrics(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Set the metrics that callbacks look at, and return those for loggers."""
        values = {name: value for name, value in metrics.items() if not isinstance(value, str)}
        tensors: dict[str, Any] = _convert_to_tensors(values, "cpu")
        self.trainer.callback_metrics.update({name: tensor.to(self.module.device) for name, tensor in tensors.items()})
        return {name: tensor for name, tensor in tensors.items() if tensor.numel() == 1}

    def _train_begin(self, step: int) -> None:
        self.trainer.strategy.connect(self.module)
        self.trainer.optimizers = self._optimizers
        self.module.trainer = self.trainer
        self._epoch_loop: Any = self.trainer.fit_loop.epoch_loop
        self._logger: Any = self.trainer._logger_connector
        self.trainer.state.fn = _FITTING
        self.trainer.training = True
        self.trainer.should_stop = False
        self._logger.reset_results()
        self._logger.reset_metrics()
        self.trainer._callback_connector._attach_model_logging_functions()
        self._set_step(step)
        self._epoch_loop._batches_that_stepped = step
        if self._steps_per_epoch is not None:
            self.trainer.fit_loop.max_batches = self._steps_per_epoch
            self.trainer.fit_loop.epoch_progress.current.completed = step // self._steps_per_epoch
        for callback, name in itertools.product(self.trainer.callbacks, _NEVER_CALLED):
            if getattr(getattr(callback, name), "__func__", None) is not getattr(_pl.Callback, name):
                self._warn_once(f"{name} of {type(callback).__name__} is not called, as it is about the inside of a step")
        self._call_all("setup", _FITTING)
        self._load_states()
        self._call_all("on_fit_start")
        self._call_all("on_train_start")

    def _epoch_begin(self, epoch: int) -> None:
        if self._logger._first_loop_iter is not None:  # a recovery begins the epoch again
            self._logger.reset_results()
        self.trainer.fit_loop.epoch_progress.current.completed = epoch
        self._call_all("on_train_epoch_start")
        if self.trainer.accumulate_grad_batches != 1:  # by the Trainer, or a callback that has changed it
            self._warn_once("accumulate_grad_batches has no effect in a session; accumulate in its step")

    def _step_begin(self, step: int, index: int, batch: Any) -> None:
        self._batch = batch, index
        self._set_step(step)
        self._epoch_loop._batches_that_stepped = step
        progress = self._epoch_loop.batch_progress
        progress.total.ready, progress.current.ready = step + 1, index + 1
        progress.is_last_batch = index + 1 == self._steps_per_epoch
        self._logger.on_batch_start(batch)
        self._call_all("on_train_batch_start", batch, index)
        self.module._current_fx_name = "training_step"  # which the session's step may call

    def _step_end(self, step: int, logs: dict[str, Any]) -> None:
        self._set_step(step + 1)
        logged = self._set_metrics(logs)
        self._call_all("on_train_batch_end", logs, *self._batch)
        self._logger.on_batch_end()
        if self._logger.should_update_logs:
            self._logger.log_metrics({**self._logger.metrics["log"], **logged})

    def _pass_results(self) -> None:
        super()._pass_results()
        self._epoch_loop._batches_that_stepped = self.trainer.global_step

    def _evaluated(self, result: Mapping[str, Any]) -> None:
        self.trainer.validating = True
        self._call_all("on_validation_start")
        self._call_all("on_validation_epoch_start")
        logged = self._set_metrics(result)
        self._call_all("on_validation_epoch_end")
        self._call_all("on_validation_end")
        self._logger.log_metrics({**self._logger.metrics["log"], **logged})
        self.trainer.training = True

    def _epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self._logger.epoch_end_reached()
        monitoring = _pl.callbacks.EarlyStopping, _pl.callbacks.Checkpoint  # are called last, as in Lightning
        callbacks = sorted(self.trainer.callbacks, key=lambda one: isinstance(one, monitoring))
        self._call_all("on_train_epoch_end", callbacks=callbacks)
        self._logger.on_epoch_end()
        self._epoch_loop._batches_that_stepped -= 1  # what is logged of an epoch has the step of its last batch
        self._logger.update_train_epoch_metrics()
        self._epoch_loop._batches_that_stepped += 1
        self.trainer.fit_loop.epoch_progress.current.completed = epoch + 1

    def _train_end(self, logs: dict[str, Any]) -> None:
        self._call_all("on_train_end")
        self._call_all("on_fit_end")
        self._call_all("teardown", _FITTING)
        self._finalize("success")

    def _train_failed(self, error: BaseException) -> None:
        self._call_all("on_exception", error)
        self._finalize("failed")

    def _finalize(self, status: str) -> None:
        for logger in self.trainer.loggers:
            logger.finalize(status)

    def __repr__(self) -> str:
        return f"LightningCallbacks({self.trainer.callbacks!r})"


class HooksForLightning(HooksInLoop, _Callback):
    """Hooks as a callback of a Lightning Trainer; see `HooksInLoop`. A run is a batch of the training.

    They fetch the keys of `outputs` and of `trainer.callback_metrics`, which are tensors.
    """

    _stop_flag = "should_stop"

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the session, at the batch at which the training starts."""
        self._train(trainer.fit_loop.total_batch_idx + 1, trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin a run."""
        self._begin_step(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End the run."""
        of_step = outputs if isinstance(outputs, Mapping) else {}
        self._end_step({**trainer.callback_metrics, **of_step}, trainer)
