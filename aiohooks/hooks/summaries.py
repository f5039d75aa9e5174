"""Numbers for TensorBoard."""

from __future__ import annotations

import os
from typing import ClassVar

from aiohooks._core.validate import checked_path
from aiohooks.hooks._observing import Values, checked_numbers
from aiohooks.hooks._writing import Record, RecordSink, WritingHook
from aiohooks.hooks.every import Every


class SummarySaverHook(WritingHook):
    """Writes numbers as event files for TensorBoard: at the first run, then on each crossing of
    `every`.

    TensorFlow is not needed. Files are written in a thread, never in the event loop. A session that
    starts at a step records that in the file, so that TensorBoard drops the later steps that an
    earlier session wrote.

    A hook of your own adds its numbers to `run_context.metrics`, which a `TrackerHook` with a
    `TensorBoardTracker` writes.
    """

    _first: ClassVar[bool] = True

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        values: Values,
        *,
        every: Every = Every(steps=100),
        max_queue: int = 1000,
    ) -> None:
        """Create the hook.

        Args:
            output_dir: the directory of the files; created if missing.
            values: a mapping from a tag to a fetch, or several nodes or names, whose names are the
                tags.
            every: when to write.
            max_queue: how many records may be unwritten before the run waits.

        Raises:
            InvalidArgumentError: an argument is invalid.
            ImportError: tensorboardX is not installed.
        """
        # An extra, imported here to fail now, and not after hours of training.
        from aiohooks.hooks import _tensorboard

        self.output_dir: str = checked_path(output_dir, "output_dir")
        self._tensorboard = _tensorboard
        super().__init__(values, every, max_queue)

    def _new_sink(self) -> tuple[RecordSink, str]:
        return self._tensorboard.EventFile(self.output_dir), f"the summaries in {self.output_dir}"

    def _checked(self, record: Record) -> Record:
        return record._replace(values=checked_numbers(record.values))

    def __repr__(self) -> str:
        return f"SummarySaverHook({self.output_dir!r}, {list(self._values)}, every={self._every})"
