"""Keras: its callbacks as a hook of a session, and hooks in `model.fit`.

callbacks = KerasCallbacks([keras.callbacks.CSVLogger("log.csv")], ["loss"], model=model, steps_per_epoch=100)
async with AsyncMonitoredSession(step, [callbacks, *hooks]) as session: ...

with HooksForKeras(hooks) as callback:
    model.fit(x, y, callbacks=[callback])
"""

# The package has no types.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from aiohooks._validate import checked_objects
from aiohooks.adapters._callbacks import CallbacksHook, HooksInLoop
from aiohooks.errors import missing_extra
from aiohooks.hooks._observing import Values

try:
    import keras
except ImportError as _missing:
    raise missing_extra("aiohooks.adapters.keras", "keras") from _missing

__all__ = ["HooksForKeras", "KerasCallbacks"]

_keras: Any = keras
if TYPE_CHECKING:
    _Callback = object
else:
    _Callback = keras.callbacks.Callback


class KerasCallbacks(CallbacksHook):
    """Keras callbacks as a hook; see `CallbacksHook`. A callback stops the session by `self.model.stop_training = True`.

    `logs` are the means of the `values` over the steps of the epoch so far, as in `fit`, where they are numbers. A result of an
    evaluation begins and ends a test without batches. Keras saves no states of callbacks, and neither does this; only the means
    are in the checkpoints of the session, so that an epoch that is resumed ends with those of all its steps.
    """

    def __init__(
        self,
        callbacks: Iterable[Any],
        values: Values | None = None,
        *,
        model: Any = None,
        steps_per_epoch: int | None = None,
        thread: bool = False,
    ) -> None:
        """Create the hook.

        Args:
            callbacks: objects of `keras.callbacks.Callback`.
            values: a mapping from a tag to a fetch, or several nodes or names: `logs`, beside `run_context.metrics`.
            model: their `self.model`; left out, an object that has `stop_training` and nothing else.
            steps_per_epoch: how many steps are an epoch; left out, the whole training is one.
            thread: call them in a worker thread, because they block.
        """
        super().__init__(values, steps_per_epoch, thread)
        self.model: Any = SimpleNamespace(stop_training=False) if model is None else model
        self._callbacks = checked_objects(callbacks, _keras.callbacks.Callback, "callbacks")
        self._validation: dict[str, Any] = {}

    def _reset(self) -> None:
        super()._reset()
        self._sums: dict[str, list[Any]] = {}
        self._summed_epoch = -1

    def _state(self) -> dict[str, Any]:
        return {"epoch": self._summed_epoch, "sums": {tag: [*sums] for tag, sums in self._sums.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue an epoch with the sums of its steps before."""
        self._summed_epoch, self._sums = state["epoch"], {tag: [*sums] for tag, sums in state["sums"].items()}

    def _means(self, values: Mapping[str, Any]) -> dict[str, Any]:
        for tag, value in values.items():
            if isinstance(value, int | float) or getattr(value, "ndim", None) == 0:
                count, total = self._sums.get(tag, (0, 0.0))
                self._sums[tag] = [count + 1, total + float(value)]
        return {tag: self._sums[tag][1] / self._sums[tag][0] if tag in self._sums else value for tag, value in values.items()}

    def _has_asked_to_stop(self) -> bool:
        return bool(self.model.stop_training)

    def _train_begin(self, step: int) -> None:
        self.model.stop_training = False
        self._validation = {}
        self._call_each(self._callbacks, "set_params", {"verbose": 0, "epochs": None, "steps": self._steps_per_epoch})
        self._call_each(self._callbacks, "set_model", self.model)
        self._call_each(self._callbacks, "on_train_begin", {})

    def _epoch_begin(self, epoch: int) -> None:
        if epoch != self._summed_epoch:
            self._summed_epoch, self._sums = epoch, {}
        self._call_each(self._callbacks, "on_epoch_begin", epoch, {})

    def _step_begin(self, step: int, index: int, batch: Any) -> None:
        self._index = index
        self._call_each(self._callbacks, "on_train_batch_begin", index, {})

    def _step_end(self, step: int, logs: dict[str, Any]) -> None:
        self._call_each(self._callbacks, "on_train_batch_end", self._index, logs)

    def _evaluated(self, result: Mapping[str, Any]) -> None:
        self._validation.update(result)
        self._call_each(self._callbacks, "on_test_begin", {})
        self._call_each(self._callbacks, "on_test_end", dict(result))

    def _epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        logs.update(self._validation)
        self._validation = {}
        self._call_each(self._callbacks, "on_epoch_end", epoch, logs)

    def _train_end(self, logs: dict[str, Any]) -> None:
        self._call_each(self._callbacks, "on_train_end", logs)

    def __repr__(self) -> str:
        return f"KerasCallbacks({self._callbacks!r})"


class HooksForKeras(HooksInLoop, _Callback):
    """Hooks as a callback of `keras.Model.fit`; see `HooksInLoop`. They fetch the `logs` of a batch.

    Of epochs, of evaluations and of the validation in `fit` they see nothing. With `steps_per_execution` a run is one execution.
    """

    if TYPE_CHECKING:
        model: Any
    _stop_flag = "stop_training"

    def on_train_begin(self, logs: Any = None) -> None:
        """Open the session, at the number of steps that the optimizer has made."""
        self._train(int(self.model.optimizer.iterations), self.model)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Begin a run."""
        self._begin_step(self.model)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """End the run."""
        self._end_step(logs or {}, self.model)
