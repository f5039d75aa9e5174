"""Writing values for TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from aiohooks._aio.cancel import DEFAULT_GRACE_SECS, to_thread
from aiohooks._validate import check_callable, check_instance
from aiohooks.errors import InvalidArgumentError
from aiohooks.hooks._observing import (
    BackgroundWriter,
    OnWriteError,
    Values,
    WritingHook,
    check_writing,
    checked_path,
    checked_values,
    number,
)
from aiohooks.hooks.every import Every, Sampling
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunValues

if TYPE_CHECKING:
    from aiohooks.graph.session import Session
    from aiohooks.hooks._tensorboard import Scalars
    from aiohooks.session.coordinator import Coordinator


class SummarySaverHook(WritingHook):
    """Writes numbers as event files that TensorBoard shows: at the first run, then on each crossing of `every`.

    TensorFlow is not needed. Files are written in a thread, never in the event loop; a session that starts at a step says
    so in the file, and TensorBoard then drops what an earlier one had written of the steps behind it.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        values: Values | None = None,
        *,
        every: Every = Every(steps=100),  # noqa: B008 - frozen
        summary_fn: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
        max_queue: int = 1000,
        on_write_error: OnWriteError = "raise",
    ) -> None:
        """Takes where to write what, and when.

        Args:
            output_dir: the folder of the files; made if it is not there.
            values: a mapping from a tag to a fetch, or several nodes or names, which name themselves.
            every: when.
            summary_fn: makes a mapping from tags to numbers out of a dict of the fetched values, and this is written
                instead of them; called in the event loop.
            max_queue: how many records may be waiting for the disk; more wait for room.
            on_write_error: `"raise"` raises a failed write in the next run at the latest, `"log"` logs it and goes on.

        Raises:
            InvalidArgumentError: neither `values` nor `summary_fn`, or one of the arguments cannot be meant.
            ImportError: tensorboardX is not installed.
        """
        from aiohooks.hooks import _tensorboard  # an extra: now, and not after hours of training

        check_instance(every, Every, "every")
        check_callable(summary_fn, "summary_fn", optional=True)
        check_writing(max_queue, on_write_error)
        if values is None and summary_fn is None:
            raise InvalidArgumentError("nothing to write; give values={'tag': fetch}, summary_fn=, or both")
        self.output_dir: str = checked_path(output_dir, "output_dir")
        self._tensorboard = _tensorboard
        self._values = checked_values(values, may_be_empty=summary_fn is not None)
        self._args = SessionRunArgs(self._values)
        self._every = every
        self._summary_fn = summary_fn
        self._max_queue = max_queue
        self._on_write_error: OnWriteError = on_write_error
        self._writer: BackgroundWriter[Scalars] | None = None
        self._sampling = Sampling(every, first=True)
        self._restart: int | None = None

    async def begin(self) -> None:
        """Opens the file.

        Raises:
            OSError: the folder or the file cannot be made.
        """
        self._sampling = Sampling(self._every, first=True)
        self._restart = None
        self._writer = None
        file = self._tensorboard.EventFile(self.output_dir)
        self._close_file = file.close
        await to_thread(file.open, grace_secs=DEFAULT_GRACE_SECS)
        self._writer = BackgroundWriter(
            file.write, what=f"the summaries in {self.output_dir}", max_queue=self._max_queue, on_write_error=self._on_write_error
        )

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Counts from the step at which the session starts, and anew where a recovery took it back."""
        step = session.global_step.latest.step
        if self._sampling.start(step):
            self._restart = step + 1

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Hands them to the writer.

        Raises:
            InvalidArgumentError: a value is not one number.
        """
        step = run_context.global_step
        if self._writer is None or not self._sampling.take(step):
            return
        values: Mapping[str, Any] = run_values.results
        if self._summary_fn is not None:
            values = self._summary_fn(dict(values))
            if not isinstance(values, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InvalidArgumentError(f"summary_fn returned {values!r}; it must return a mapping from tags to numbers")
        numbers = {str(tag): float(number(value, str(tag))) for tag, value in values.items()}
        restart, self._restart = self._restart, None
        await self._writer.put(self._tensorboard.Scalars(step, self._sampling.time(), numbers, restart))

    def __repr__(self) -> str:
        return f"SummarySaverHook({self.output_dir!r}, {list(self._values)}, every={self._every})"
