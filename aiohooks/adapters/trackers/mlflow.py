"""MLflow as a tracker. The slim package `mlflow-skinny` is enough.

A run of MLflow is a training with its metrics, and an experiment is a group of such runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiohooks.errors import missing_extra

try:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, RunTag
except ImportError as _missing:
    raise missing_extra("aiohooks.adapters.trackers.mlflow", "mlflow") from _missing

__all__ = ["MLflowTracker"]

_STEP_TAG = "aiohooks.step"


class MLflowTracker:
    """A run of MLflow. It continues the run of its name in the experiment, or creates both.

    The run has the tag `aiohooks.step`, its last step. MLflow removes no metrics, so existing steps
    are not sent again. At the end the run is `FINISHED`, `FAILED`, or after a cancellation
    `KILLED`.
    """

    def __init__(
        self,
        experiment: str,
        run_name: str,
        *,
        tracking_uri: str | None = None,
    ) -> None:
        """Create the tracker. It connects when it is used.

        Args:
            experiment: the name of the experiment.
            run_name: the name of the run, one for each training, without quotes.
            tracking_uri: a server or a folder, by default as MLflow is configured.
        """
        self.experiment: str = experiment
        self.run_name: str = run_name
        self.run_id: str | None = None
        """The id of the run, once the tracker has connected."""
        self._uri = tracking_uri
        # The client, or None while the tracker is not connected.
        self._client: MlflowClient | None = None
        # The last step that the run of MLflow has, or -1 if it has none.
        self._last_step = -1
        # Whether `start` has marked the run of MLflow as running.
        self._is_running = False

    def start(self, step: int) -> int:
        """Mark the run as running, and return its last step."""
        client, run_id = self._connect()
        client.update_run(run_id, status="RUNNING")
        self._is_running = True
        return max(step, self._last_step)

    def log_metrics(
        self,
        metrics: Mapping[str, float],
        step: int,
        time: float,
    ) -> None:
        """Log the metrics in one request."""
        client, run_id = self._connect()
        last_step = max(step, self._last_step)
        milliseconds = round(time * 1000)
        client.log_batch(
            run_id,
            metrics=[
                Metric(
                    name,
                    value,
                    milliseconds,
                    step,
                )
                for name, value in metrics.items()
            ],
            tags=[RunTag(_STEP_TAG, str(last_step))],
        )
        self._last_step = last_step

    def close(self, error: BaseException | None) -> None:
        """Mark the run as ended, if `start` has marked it as running."""
        if self._is_running and self._client is not None and self.run_id is not None:
            status = "FAILED"
            if error is None:
                status = "FINISHED"
            elif isinstance(error, (asyncio.CancelledError, KeyboardInterrupt)):
                status = "KILLED"
            self._client.set_terminated(self.run_id, status)
        self._client = None
        self._is_running = False

    def _connect(self) -> tuple[MlflowClient, str]:
        """Return the client and the id of the run. Find or create the run, if not connected."""
        if self._client is None or self.run_id is None:
            client = MlflowClient(self._uri)
            experiment = client.get_experiment_by_name(self.experiment)
            if experiment is None:
                experiment_id = client.create_experiment(self.experiment)
            else:
                experiment_id = experiment.experiment_id
            # The newest run of this name, if there is one.
            runs = client.search_runs(
                [experiment_id],
                f"attributes.run_name = '{self.run_name}'",
                max_results=1,
                order_by=["attributes.start_time DESC"],
            )
            run = runs[0] if runs else client.create_run(experiment_id, run_name=self.run_name)
            self._last_step = int(run.data.tags.get(_STEP_TAG, -1))
            self.run_id = run.info.run_id
            self._client = client
        return self._client, self.run_id

    def __repr__(self) -> str:
        return f"MLflowTracker({self.experiment!r}, {self.run_name!r})"
