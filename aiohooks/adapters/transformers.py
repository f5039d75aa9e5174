"""Hugging Face's Trainer: its callbacks as a hook of a session, and hooks in `trainer.train`.

callbacks = TrainerCallbacks([MyCallback()], arguments, ["loss"], model=model)
async with AsyncMonitoredSession(step, [callbacks, *hooks]) as session: ...

with HooksForTrainer(hooks) as callback:
    Trainer(model, arguments, callbacks=[callback], ...).train()
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# The package is not where types are checked.
from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from aiohooks._validate import check_instance, checked_objects
from aiohooks.adapters._callbacks import CallbacksHook, HooksInLoop
from aiohooks.errors import InvalidArgumentError, missing_extra
from aiohooks.hooks._observing import Values

try:
    import transformers.trainer_callback as _trainer_callback
except ImportError as _missing:
    raise missing_extra("aiohooks.adapters.transformers", "transformers") from _missing

__all__ = ["HooksForTrainer", "TrainerCallbacks"]

_hf: Any = _trainer_callback

if TYPE_CHECKING:
    _TrainerCallback = object
else:
    _TrainerCallback = _hf.TrainerCallback


class TrainerCallbacks(CallbacksHook):
    """Callbacks of Hugging Face's Trainer as a hook; see `CallbacksHook`. `control.should_training_stop` stops the session.

    The session ends after `max_steps`, or `num_train_epochs` where `steps_per_epoch` is given; `logging_steps` may be a part of
    that. `on_log` is called when the arguments say so, with the values of that step, and with what is reported of an
    evaluation, which `on_evaluate` gets as well. Nothing here evaluates, saves or ends an epoch when a callback asks for it,
    which is logged: these are for hooks of the session. The `TrainerState` is saved in its checkpoints, with the states of
    callbacks that have one; these are restored if the arguments say so (`restore_callback_states_from_checkpoint`), as by a
    Trainer.
    """

    # As many arguments as a Trainer has for what it hands to its callbacks.
    def __init__(
        self,
        callbacks: Iterable[Any],
        args: Any,
        values: Values | None = None,
        *,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        steps_per_epoch: int | None = None,
        thread: bool = False,
    ) -> None:
        """Create the hook.

        Args:
            callbacks: objects of `TrainerCallback`.
            args: their `TrainingArguments`: when to log, and when to stop.
            values: a mapping from a tag to a fetch, or several nodes or names: the `logs`, beside `run_context.metrics`.
            model: their `model`.
            optimizer: their `optimizer`.
            lr_scheduler: their `lr_scheduler`.
            steps_per_epoch: how many steps are an epoch; left out, the whole training is one.
            thread: call them in a worker thread, because they block.

        Raises:
            InvalidArgumentError: no callbacks or arguments, or a part of a training whose length is unknown.
        """
        super().__init__(values, steps_per_epoch, thread)
        check_instance(args, _hf.TrainingArguments, "args")
        self._args = args
        epochs = math.inf if steps_per_epoch is None else args.num_train_epochs * steps_per_epoch
        self._max_steps: float = args.max_steps if args.max_steps > 0 else epochs if epochs == math.inf else math.ceil(epochs)
        for name in ("logging_steps", "eval_steps", "save_steps"):
            if self._max_steps == math.inf and 0 < (getattr(args, name) or 0) < 1:
                raise InvalidArgumentError(
                    f"{name} is {getattr(args, name)}, a part of an unknown length; give steps_per_epoch, or max_steps"
                )
        given = checked_objects(callbacks, _hf.TrainerCallback, "callbacks")
        self._handler: Any = _hf.CallbackHandler([_hf.DefaultFlowCallback(), *given], model, None, optimizer, lr_scheduler)
        self._call_all("on_init_end")

    def _reset(self) -> None:
        super()._reset()
        self.state: Any = _hf.TrainerState()
        """The `TrainerState` of the session, or of the last one."""
        self._control: Any = _hf.TrainerControl()

    def _state(self) -> dict[str, Any]:
        return dataclasses.asdict(dataclasses.replace(self.state, stateful_callbacks=self._stateful()))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a `TrainerState`."""
        self.state = _hf.TrainerState(**state)
        if self._args.restore_callback_states_from_checkpoint:
            saved: Mapping[str, Any] = self.state.stateful_callbacks
            states = {name: [*one] if isinstance(one, list) else [one] for name, one in saved.items()}
            for callback in self._stateful():
                if of_its_class := states.get(type(callback).__name__):
                    vars(callback).update(of_its_class.pop(0)["attributes"])

    def _stateful(self) -> list[Any]:
        return [one for one in self._handler.callbacks if isinstance(one, _hf.ExportableState)]

    def _has_asked_to_stop(self) -> bool:
        return bool(self._control.should_training_stop)

    def _call_all(self, event: str, **kwargs: Any) -> None:
        usual = dataclasses.replace(self._control)  # and what the arguments ask for, which is documented
        self._control = getattr(self._handler, event)(self._args, self.state, self._control, **kwargs)
        getattr(self._handler.callbacks[0], event)(self._args, self.state, usual)
        for request in ("should_epoch_stop", "should_evaluate", "should_save"):
            if getattr(self._control, request) and not getattr(usual, request):
                self._warn_once(f"control.{request} of a callback has no effect in a session, which has hooks for that")

    def _train_begin(self, step: int) -> None:
        self.state.global_step = step
        self.state.max_steps = self._max_steps
        if self._steps_per_epoch is not None:
            self.state.num_train_epochs = math.ceil(self._max_steps / self._steps_per_epoch)
        self.state.train_batch_size = self._args.train_batch_size
        self.state.compute_steps(self._args, self._max_steps)
        self._call_all("on_train_begin")
        if step >= self._max_steps:
            self._end_training()

    def _end_training(self) -> None:
        limit = "max_steps" if self._args.max_steps > 0 else "num_train_epochs"
        self._control.should_training_stop = True
        self._stopped_by = f"{limit}={getattr(self._args, limit)} of the TrainingArguments"

    def _epoch_begin(self, epoch: int) -> None:
        self.state.epoch = float(epoch)
        self._call_all("on_epoch_begin")

    def _step_begin(self, step: int, index: int, batch: Any) -> None:
        self.state.global_step = step
        self._call_all("on_step_begin")

    def _step_end(self, step: int, logs: dict[str, Any]) -> None:
        self.state.global_step = step + 1
        if self._steps_per_epoch is not None:
            self.state.epoch = (step + 1) / self._steps_per_epoch
        self._call_all("on_step_end")
        if self.state.global_step >= self._max_steps:
            self._end_training()
        if self._control.should_log:
            self._log(logs)

    def _log(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        logged = {**logs, "epoch": self.state.epoch}
        self.state.log_history.append({**logged, "step": self.state.global_step})
        self._call_all("on_log", logs=logged)
        return logged

    def _evaluated(self, result: Mapping[str, Any]) -> None:
        metrics = self._log(result)
        self._call_all("on_evaluate", metrics=metrics)
        name = self._args.metric_for_best_model or ""
        value = metrics.get(name if name.startswith("eval_") else f"eval_{name}")
        if value is not None:  # as a Trainer does after `on_evaluate`
            sign = 1 if self._args.greater_is_better else -1
            best = self.state.best_metric
            if sign * value > (-math.inf if best is None else sign * best):
                self.state.best_metric, self.state.best_global_step = value, self.state.global_step

    def _epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self._call_all("on_epoch_end")
        if self._control.should_log:
            self._log(logs)

    def _train_end(self, logs: dict[str, Any]) -> None:
        self._call_all("on_train_end")

    def __repr__(self) -> str:
        return f"TrainerCallbacks({self._handler.callbacks[1:]!r})"


class HooksForTrainer(HooksInLoop, _TrainerCallback):
    """Hooks as a callback of Hugging Face's Trainer; see `HooksInLoop`. A run is a step of the optimizer.

    They fetch what the Trainer logs (`loss`, `grad_norm`, `learning_rate`) in the steps that it logs: after every step with
    `logging_steps=1`. It knows no loss of a step besides.
    """

    _stop_flag = "should_training_stop"

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the session, at the step at which the training starts."""
        self._train(state.global_step, control)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a run."""
        self._end_step({}, control)  # see `on_train_end`
        self._begin_step(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the run, unless the Trainer will log this step."""
        if not control.should_log:
            self._end_step({}, control)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """End the run with the values that are logged."""
        if self._run is not None:
            self._end_step(logs or {}, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the last run, in a Trainer whose `log` calls no callbacks."""
        self._end_step({}, control)
