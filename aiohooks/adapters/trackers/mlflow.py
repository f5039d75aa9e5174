"""MLflow as a tracker: the one module that imports it; the slim package `mlflow-skinny` is
enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiohooks.errors import InvalidArgumentError, missing_extra

try:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, RunTag
except ImportError as _missing:
    raise missing_extra("aiohooks.adapters.trackers.mlflow", "mlflow") from _missing

__all__ = ["MLflowTracker"]

_STEP_TAG = "aiohooks.step"


class MLflowTracker:
    """A run of MLflow. It continues the run of its name in the experiment, or creates both.

    The run has the tag `aiohooks.step`, its last step. MLflow removes no metrics: steps that are
    there are not sent again. At the end the run is `FINISHED`, `FAILED`, or after a cancellation
    `KILLED`.
    """

    def __init__(self, experiment: str, run_name: str, *, tracking_uri: str | None = None) -> None:
        """Create the tracker; it connects when it is used.

        Args:
            experiment: the name of the experiment.
            run_name: the name of the run, one for each training.
            tracking_uri: a server or a folder; by default the one that MLflow is configured for.

        Raises:
            InvalidArgumentError: a name is empty or has a quote.
        """
        for what, name in (("experiment", experiment), ("run_name", run_name)):
            if not isinstance(name, str) or not name or {"'", '"', "`"} & set(name):
                raise InvalidArgumentError(
                    f"{what} is {name!r}; give a non-empty str without quotes"
                )
        self.experiment: str = experiment
        self.run_name: str = run_name
        self.run_id: str | None = None
        """The id of the run, when it is known."""
        self._uri = tracking_uri
        self._client: MlflowClient | None = None
        self._last = -1
        self._started = False

    def start(self, step: int) -> int:
        """Mark the run as running, and return its last step."""
        client, run_id = self._connect()
        client.update_run(run_id, status="RUNNING")
        self._started = True
        return max(step, self._last)

    def log_metrics(self, metrics: Mapping[str, float], step: int, time: float) -> None:
        """Log the metrics in one request."""
        client, run_id = self._connect()
        last = max(step, self._last)
        stamp = round(time * 1000)
        found = [Metric(tag, value, stamp, step) for tag, value in metrics.items()]
        client.log_batch(run_id, metrics=found, tags=[RunTag(_STEP_TAG, str(last))])
        self._last = last

    def close(self, error: BaseException | None) -> None:
        """Mark the run as ended, if `start` has marked it as running."""
        if self._started and self._client is not None and self.run_id is not None:
            killed = isinstance(error, (asyncio.CancelledError, KeyboardInterrupt))
            self._client.set_terminated(
                self.run_id, "FINISHED" if error is None else "KILLED" if killed else "FAILED"
            )
        self._client, self._started = None, False

    def _connect(self) -> tuple[MlflowClient, str]:
        if self._client is None or self.run_id is None:
            client = MlflowClient(self._uri)
            experiment = client.get_experiment_by_name(self.experiment)
            folder = (
                client.create_experiment(self.experiment)
                if experiment is None
                else experiment.experiment_id
            )
            newest = ["attributes.start_time DESC"]
            runs = client.search_runs(
                [folder], f"attributes.run_name = '{self.run_name}'", max_results=1, order_by=newest
            )
            run = runs[0] if runs else client.create_run(folder, run_name=self.run_name)
            self._last = int(run.data.tags.get(_STEP_TAG, -1))
            self._client, self.run_id = client, run.info.run_id
        return self._client, self.run_id

    def __repr__(self) -> str:
        return f"MLflowTracker({self.experiment!r}, {self.run_name!r})"
