"""Bases of the hooks that fetch values in the runs that are due, and of those that also write them
to a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from aiohooks._core.cancel import to_thread
from aiohooks._core.validate import check_instance
from aiohooks.dispatch.calls import only_if
from aiohooks.graph.session import Session
from aiohooks.hooks._observing import (
    BackgroundWriter,
    OnWriteError,
    Sampling,
    Values,
    checked_values,
)
from aiohooks.hooks.every import Every, ScheduledHook
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.events import session_events
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunValues


class FetchingHook(ScheduledHook):
    """Fetches in the runs that are due, and passes what it gets to `_observe`; without an `every`
    in none.
    """

    # Whether the first run is due whatever its step.
    _first: ClassVar[bool] = False

    def __init__(self, fetches: Any, every: Every | None) -> None:
        self._args = SessionRunArgs(fetches)
        self._every = every
        self._reset()

    def _reset(self) -> None:
        self._timer = None
        if self._every is not None:
            self._timer = Sampling(self._every, first=self._first)

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Count from the step at which the session starts, or to which a recovery moved it back."""
        if self._timer is not None:
            self._timer.start(session.global_step.latest.step)

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Fetch the values if this run is due."""
        return self._args_if_due(run_context)

    def _args_if_due(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        if self._timer is not None and self._timer.should_fetch(run_context.global_step):
            return self._args
        return None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Observe the values of a run that was due."""
        if self._timer is not None and self._timer.mark_if_due(run_context.global_step):
            self._observe(run_context.global_step, run_values.results)

    def _observe(self, step: int, values: Any) -> None:
        raise NotImplementedError


class Record(NamedTuple):
    """Values by tag, with their step and the Unix time."""

    step: int
    time: float
    values: Mapping[str, Any]

    def state(self) -> list[Any]:
        """Return the record for the state of a hook."""
        return [self.step, self.time, dict(self.values)]


def restored_records(state: Mapping[str, Any]) -> list[Record]:
    """Return the records that were pending when the state of a hook was saved."""
    return [
        Record(int(step), float(time), dict(values))
        for step, time, values in state.get("pending", ())
    ]


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
        on_write_error: OnWriteError,
    ) -> None:
        check_instance(every, Every, "every")
        self._max_queue = max_queue
        self._values = checked_values(values)
        self._on_write_error: OnWriteError = on_write_error
        super().__init__(self._values, every)

    def _reset(self) -> None:
        super()._reset()
        self._sink: RecordSink
        self._sink, what = self._new_sink()
        self._writer: BackgroundWriter[Record] = BackgroundWriter(
            self._sink.write,
            what=what,
            max_queue=self._max_queue,
            on_write_error=self._on_write_error,
        )

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
            self._writer.put_nowait(record)
        return False

    def _due_record(
        self, run_context: SessionRunContext, run_values: SessionRunValues
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
