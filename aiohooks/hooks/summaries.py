"""Numbers for TensorBoard: a hook that writes what can be fetched, and a writer for hooks of one's
own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from aiohooks._core.cancel import to_thread
from aiohooks._core.clock import Clock, current_clock
from aiohooks._core.validate import checked_path
from aiohooks.errors import InvalidArgumentError
from aiohooks.hooks._fetching import Convert, Record, RecordSink, WritingHook
from aiohooks.hooks._numbers import checked_numbers
from aiohooks.hooks._observing import BackgroundWriter, OnWriteError, Values
from aiohooks.hooks.every import Every


class SummaryWriter:
    """Writes numbers as event files for TensorBoard, in a thread: for hooks of one's own, and
    without a session.

    `async with SummaryWriter("runs/own") as writer: await writer.add(step, {"loss": 0.1})`. A hook
    opens it in `begin` and closes it in `close`. `SummarySaverHook` writes what can be fetched
    without a hook of one's own.

    Attributes:
        output_dir: the directory of the files.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        *,
        max_queue: int = 1000,
        on_write_error: OnWriteError = "raise",
    ) -> None:
        """Create the writer; the file is created by `open`, or else with the first numbers.

        Args:
            output_dir: the directory of the files; created if missing.
            max_queue: how many records may be unwritten before `add` waits.
            on_write_error: `"raise"` raises a failed write in the next `add` or `flush`, or in
                `aclose`; `"log"` logs the first one and continues.

        Raises:
            InvalidArgumentError: an argument is invalid.
            ImportError: tensorboardX is not installed.
        """
        from aiohooks.hooks import _tensorboard  # only who writes summaries needs the package

        self.output_dir: str = checked_path(output_dir, "output_dir")
        self._start_of = _tensorboard.start_of
        self._file = _tensorboard.EventFile(self.output_dir)
        self._writer: BackgroundWriter[Record] = BackgroundWriter(
            self._file.write,
            what=f"the summaries in {self.output_dir}",
            max_queue=max_queue,
            on_write_error=on_write_error,
        )
        self._closed = False
        self._clock: Clock = current_clock()
        self._time_offset = time.time() - self._clock.now()

    @property
    def lost(self) -> int:
        """How many records could not be written."""
        return self._writer.lost

    async def open(self) -> None:
        """Create the directory and the file now, so that an invalid one is an error before there is
        anything to lose.

        Raises:
            OSError: it cannot be created.
        """
        self._check_open()
        await to_thread(self._file.open)

    def restart(self, step: int) -> None:
        """Record that a session has started at `step`: TensorBoard drops its later steps.

        Call it in `after_create_session`, with `session.global_step.latest.step`.

        Raises:
            InvalidArgumentError: the writer is closed.
        """
        self._check_open()
        self._writer.add(self._start_of(step + 1, self._time_offset + self._clock.now()))

    async def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Queue the numbers of a step, by tag; wait only while the queue is full.

        Raises:
            InvalidArgumentError: a value is not a single number, or the writer is closed.
            OSError: an earlier write has failed.
        """
        self._check_open()
        numbers = checked_numbers(values)
        await self._writer.put(Record(step, self._time_offset + self._clock.now(), numbers))

    async def flush(self) -> None:
        """Wait until everything is written.

        Raises:
            OSError: a write has failed.
        """
        await self._writer.flush()

    async def aclose(self) -> None:
        """Write what is queued, and close the file; closing twice is harmless.

        Raises:
            OSError: a write has failed.
        """
        self._closed = True
        try:
            await self._writer.aclose()
        finally:
            await to_thread(self._file.close)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgumentError(f"{self!r} is closed; make another one")

    def __repr__(self) -> str:
        return f"SummaryWriter({self.output_dir!r})"


class SummarySaverHook(WritingHook):
    """Writes numbers as event files for TensorBoard: at the first run, then on each crossing of
    `every`.

    TensorFlow is not needed. Files are written in a thread, never in the event loop. A session that
    starts at a step records that in the file, so that TensorBoard drops the later steps that an
    earlier session wrote.
    """

    _convert_name: ClassVar[str] = "summary_fn"
    _first: ClassVar[bool] = True

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        values: Values | None = None,
        *,
        every: Every = Every(steps=100),
        summary_fn: Convert | None = None,
        max_queue: int = 1000,
        on_write_error: OnWriteError = "raise",
    ) -> None:
        """Create the hook.

        Args:
            output_dir: the directory of the files; created if missing.
            values: a mapping from a tag to a fetch, or several nodes or names, whose names are the
                tags.
            every: when to write.
            summary_fn: converts a dict of the fetched values to a mapping from tags to numbers,
                which is written instead of them; called in the event loop.
            max_queue: how many records may be unwritten before the run waits.
            on_write_error: `"raise"` raises a failed write in the next run at the latest, `"log"`
                logs it and continues.

        Raises:
            InvalidArgumentError: neither `values` nor `summary_fn`, or an argument is invalid.
            ImportError: tensorboardX is not installed.
        """
        from aiohooks.hooks import (
            _tensorboard,
        )  # imported here to fail now, and not after hours of training

        self.output_dir: str = checked_path(output_dir, "output_dir")
        self._tensorboard = _tensorboard
        super().__init__(values, every, summary_fn, max_queue, on_write_error)

    def _new_sink(self) -> tuple[RecordSink, str]:
        return self._tensorboard.EventFile(self.output_dir), f"the summaries in {self.output_dir}"

    def _checked(self, record: Record) -> Record:
        return record._replace(values=checked_numbers(record.values))

    def __repr__(self) -> str:
        return f"SummarySaverHook({self.output_dir!r}, {list(self._values)}, every={self._every})"
