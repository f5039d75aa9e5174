"""Weights & Biases as a tracker: the one module that imports it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohooks.errors import missing_extra

try:
    import wandb
except ImportError as _missing:
    raise missing_extra("aiohooks.adapters.trackers.wandb", "wandb") from _missing

__all__ = ["WandbTracker"]

_STEP_KEY = "global_step"


class WandbTracker:
    """A run of Weights & Biases, whose metrics are drawn over `global_step`.

    A training that may be resumed has `id="..."` and `resume="allow"`: the run then continues after
    its last step. Nothing of a run is removed: steps that are there are not sent again. In offline
    mode another process does not know what is there.
    """

    def __init__(self, **options: Any) -> None:
        """Create the tracker; `options` are the arguments of `wandb.init`, which is called when it
        is used.
        """
        self.run: wandb.Run | None = None
        """The run, when it is open."""
        self._options = options
        self._id: str | None = None
        self._last = -1

    def start(self, step: int) -> int:
        """Open the run, and return its last step."""
        self._open()
        return max(step, self._last)

    def log_metrics(self, metrics: Mapping[str, float], step: int, time: float) -> None:
        """Log the metrics; the package sends them in its own process."""
        self._open().log({**metrics, _STEP_KEY: step, "_timestamp": time})
        self._last = max(step, self._last)

    def close(self, error: BaseException | None) -> None:
        """Finish the run; after an error it counts as failed."""
        run, self.run = self.run, None
        if run is not None:
            run.finish(exit_code=0 if error is None else 1)

    def _open(self) -> wandb.Run:
        if self.run is None:
            run = wandb.init(**self._options)
            run.define_metric(_STEP_KEY, hidden=True, summary="max")
            run.define_metric("*", step_metric=_STEP_KEY)
            summary: Any = run.summary
            found = summary.get(_STEP_KEY)
            if run.id != self._id:
                self._id, self._last = run.id, -1
            if found is not None:
                self._last = max(self._last, int(found["max"]))
            self.run = run
        return self.run

    def __repr__(self) -> str:
        return f"WandbTracker({self._options.get('project')!r})"
