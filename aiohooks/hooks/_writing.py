"""The base of hooks that write fetched values in a thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from aiohooks._core.cancel import to_thread
from aiohooks._core.queue import ThreadQueue
from aiohooks._core.validate import check_instance, checked_int
from aiohooks.dispatch.calls import only_if
from aiohooks.errors import add_note
from aiohooks.graph.session import Session
from aiohooks.hooks._observing import FetchingHook, Sampling, Values, checked_values
from aiohooks.hooks.every import Every
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunValues
from aiohooks.session.status import session_events

T = TypeVar("T")


class BackgroundWriter(ThreadQueue[T]):
    """Calls `write(records)` in a thread of its own, in order, with all records that are queued.

    A failed write loses its records. The next `check` or `put` raises the error.
    """

    def __init__(self, write: Callable[[list[T]], None], what: str, max_queue: int) -> None:
        """Create a writer; `what` names its target in messages.

        Raises:
            InvalidArgumentError: `max_queue` is invalid.
        """
        expected = "a whole number of records, at least 1"
        max_queue = checked_int(max_queue, "max_queue", 1, expected=expected)
        super().__init__(f"writer of {what}", max_queue)
        self._write = write
        self._what = what

    def work(self, items: list[T]) -> None:
        self._write(items)

    def failed(self, items: list[T], error: BaseException) -> None:
        if not self._failures:
            add_note(error, f"raised by the writer of {self._what}")
            super().failed(items, error)

    async def flush(self) -> None:
        """Wait until all records are written; raise the error of a failed write."""
        await self.drain()
        self.check()

    async def aclose(self) -> None:
        """Write what is queued and end the thread; raise an error that has not been raised yet."""
        if not self.finish().done():  # the thread was started
            await to_thread(self.join)
        self.check()


class Record(NamedTuple):
    """Values by tag, with their step and the Unix time."""

    step: int
    time: float
    values: Mapping[str, Any]


class RecordSink(Protocol):
    """Where a hook writes; called in a thread."""

    def open_at(self, step: int) -> None:
        """Open it to continue after `step`."""

    def write(self, records: list[Record]) -> None:
        """Append the records."""

    def close(self) -> None:
        """Close it; do nothing if it is closed."""


class WritingHook(FetchingHook):
    """Hands what a run that is due gives to a thread that writes it."""

    _timer: Sampling

    def __init__(
        self,
        values: Values,
        every: Every,
        max_queue: int,
    ) -> None:
        check_instance(every, Every, "every")
        self._max_queue = max_queue
        self._values = checked_values(values)
        super().__init__(self._values, every)

    def _reset(self) -> None:
        super()._reset()
        self._sink: RecordSink
        self._sink, what = self._new_sink()
        self._writer = BackgroundWriter[Record](self._sink.write, what, self._max_queue)

    def _new_sink(self) -> tuple[RecordSink, str]:
        """Return where this session writes, and its name for messages."""
        raise NotImplementedError

    def _checked(self, record: Record) -> Record:
        """Return what is written of a record; raise `InvalidArgumentError` if it cannot be."""
        raise NotImplementedError

    async def begin(self) -> None:
        """Prepare for a new session; the file is opened when the session has been created."""
        self._reset()
        session_events().saving.subscribe(self._finish_writes)

    async def _finish_writes(self, step: int, checkpoint_dir: Path) -> None:
        """Write all records before a save, so that a kill after it loses none of them."""
        await self._writer.drain()

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Open the file at the step at which the session starts, and again after a recovery that
        moved it back.
        """
        step = session.global_step.latest.step
        if self._timer.start(step):
            await self._writer.flush()
            await to_thread(self._sink.open_at, step)

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Raise the error of a failed write; fetch the values if this run is to be written."""
        self._writer.check()
        # Without an `await` of `super()`: with one, each run would need a task for it.
        return self._args_if_due(run_context)

    @only_if("_has_to_wait")
    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Queue the values if the run is to be written; wait while the queue is full.

        Raises:
            InvalidArgumentError: the values cannot be written.
        """
        record = self._due_record(run_context, run_values)
        if record is not None:
            await self._writer.put(record)

    def _has_to_wait(self, run_context: SessionRunContext, run_values: SessionRunValues) -> bool:
        """Return whether the run is to be written and the queue is full; if not, do what
        `after_run` does.
        """
        if self._writer.is_full and self._timer.is_due(run_context.global_step):
            return True
        record = self._due_record(run_context, run_values)
        if record is not None:
            self._writer.add(record)
        return False

    def _due_record(
        self,
        run_context: SessionRunContext,
        run_values: SessionRunValues,
    ) -> Record | None:
        """Return the record of a run, if it is to be written."""
        if not self._timer.mark_if_due(run_context.global_step):
            return None
        values: Mapping[str, Any] = run_values.results
        return self._checked(Record(run_context.global_step, self._timer.time(), values))

    async def end(self, session: Session) -> None:
        """Wait until all records are written; raise the error of a failed write."""
        await self._writer.flush()

    async def close(self, exc: BaseException | None) -> None:
        """Write the remaining records, and close the file."""
        try:
            await self._writer.aclose()
        finally:
            await to_thread(self._sink.close)
