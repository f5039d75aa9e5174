"""Weights & Biases as a tracker."""

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
    its last step. Nothing of a run is removed, so existing steps are not sent again. In offline
    mode another process cannot read the last step.
    """

    def __init__(self, **options: Any) -> None:
        """Create the tracker. When it is used, it calls `wandb.init` with the `options`."""
        self.run: wandb.Run | None = None
        """The run, when it is open."""
        self._options = options
        # The id of the run that was open last, and the last step that it has, or -1 if it has none.
        self._run_id: str | None = None
        self._last_step = -1

    def start(self, step: int) -> int:
        """Open the run, and return its last step."""
        self._open_run()
        return max(step, self._last_step)

    def log_metrics(
        self,
        metrics: Mapping[str, float],
        step: int,
        time: float,
    ) -> None:
        """Log the metrics. The package sends them in its own process."""
        run = self._open_run()
        run.log({**metrics, _STEP_KEY: step, "_timestamp": time})
        self._last_step = max(step, self._last_step)

    def close(self, error: BaseException | None) -> None:
        """Finish the run. After an error it counts as failed."""
        run = self.run
        self.run = None
        if run is not None:
            run.finish(exit_code=0 if error is None else 1)

    def _open_run(self) -> wandb.Run:
        """Return the open run. Open it, and read its last step, if none is open."""
        if self.run is not None:
            return self.run
        run = wandb.init(**self._options)
        run.define_metric(_STEP_KEY, hidden=True, summary="max")
        run.define_metric("*", step_metric=_STEP_KEY)
        # Without an id in the options, each call of `init` creates another run, without steps.
        if run.id != self._run_id:
            self._run_id = run.id
            self._last_step = -1
        summary: Any = run.summary
        last_step = summary.get(_STEP_KEY)
        if last_step is not None:
            self._last_step = max(self._last_step, int(last_step["max"]))
        self.run = run
        return run

    def __repr__(self) -> str:
        return f"WandbTracker({self._options.get('project')!r})"
