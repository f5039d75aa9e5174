"""TensorBoard's event files as a tracker.

`SummarySaverHook` writes them too, and makes the session wait for the disk.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from aiohooks._core.validate import checked_path
from aiohooks.hooks._observing import Record
from aiohooks.hooks._tensorboard import EventFile

__all__ = ["TensorBoardTracker"]


class TensorBoardTracker:
    """Event files in a directory. When a run is set back to a step, TensorBoard drops the steps
    after it.
    """

    def __init__(self, output_dir: str | os.PathLike[str]) -> None:
        """Create the tracker. `output_dir` is created if it is missing."""
        self.output_dir: str = checked_path(output_dir, "output_dir")
        self._file = EventFile(self.output_dir)

    def start(self, step: int) -> int:
        """Note the step in the file, which drops later steps."""
        self._file.open_at(step)
        return step

    def log_metrics(
        self,
        metrics: Mapping[str, float],
        step: int,
        time: float,
    ) -> None:
        """Write the metrics, and sync the file."""
        self._file.write([Record(step, time, metrics)])

    def close(self, error: BaseException | None) -> None:
        """Close the file."""
        self._file.close()

    def __repr__(self) -> str:
        return f"TensorBoardTracker({self.output_dir!r})"
