"""The bases of hooks that fetch values in due runs, and of hooks that write them in a thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, cast

from aiohooks._core.cancel import to_thread
from aiohooks._core.clock import Clock, current_clock
from aiohooks._core.queue import ThreadQueue
from aiohooks._core.validate import check_instance
from aiohooks.dispatch.calls import only_if
from aiohooks.errors import InvalidArgumentError, add_note
from aiohooks.graph.graph import Node
from aiohooks.graph.session import Session
from aiohooks.hooks.every import Every, EveryTimer, ScheduledHook
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunValues
from aiohooks.session.status import session_events

T = TypeVar("T")

logger = logging.getLogger("aiohooks.hooks")


class Sampling:
    """Decides which runs of one session are due by an `Every`, optionally including the first run.

    Fetches are chosen before the run, but the step it commits is known only afterwards.
    `should_fetch` assumes that the run moves the step as far as the last one did. `mark_if_due`
    then goes by the committed step. A wrong guess costs a fetch, or takes the next run instead.
    """

    __slots__ = ("_asked", "_clock", "_first", "_last", "_leap", "_offset", "_timer")

    def __init__(self, every: Every, *, first: bool) -> None:
        """Create one in `begin`: it keeps the current clock. With `first` the first run is due
        whatever its step.
        """
        self._clock: Clock = current_clock()
        self._timer: EveryTimer = every.timer()
        self._first = first
        self._last: int | None = None
        self._leap = 1
        self._asked = False
        self._offset: float | None = None

    def start(self, step: int) -> bool:
        """Start to count at `step` if necessary, and return whether it was.

        It is necessary at the first call, and after a recovery that moved the step back.
        """
        now = self._clock.now()
        if self._last is None:
            # The timer may have its state from a checkpoint, which `start` would discard.
            self._timer.resume(step, now)
        elif step < self._last:
            self._timer.start(step, now)
        else:
            return False
        self._last = step
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the state with which a resumed run takes the same runs as an uninterrupted one."""
        return {**self._timer.state_dict(), "first": self._first, "leap": self._leap}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this state, except in a recovery, where it counts already."""
        if "step" in state and self._last is None:
            self._timer.load_state_dict(state)
            self._first = bool(state["first"])
            self._leap = int(state["leap"])

    def time(self) -> float:
        """Return Unix time that advances with the session's clock, so it never runs backwards
        within a session.
        """
        now = self._clock.now()
        if self._offset is None:
            self._offset = time.time() - now
        return self._offset + now

    def should_fetch(self, next_step: int) -> bool:
        """Return whether to fetch for the coming run, which commits `next_step` if it moves the
        step by one.
        """
        self._asked = self._first or self._timer.due(next_step - 1 + self._leap, self._clock.now())
        return self._asked

    def mark_if_due(self, step: int) -> bool:
        """Return whether the run that committed `step` was asked for and due. If so, mark it as
        done.
        """
        self.note_step(step)
        if not self.is_due(step):
            return False
        self._first = self._asked = False
        self._timer.mark(step, self._clock.now())
        return True

    def note_step(self, step: int) -> None:
        """Note the step that a run has committed."""
        if self._last is not None and step > self._last:
            self._leap = step - self._last
        self._last = step

    def is_due(self, step: int) -> bool:
        """Return whether the run that committed `step` was asked for and is due."""
        return self._asked and (self._first or self._timer.due(step, self._clock.now()))


class FetchingHook(ScheduledHook):
    """Fetches in the runs that are due, and passes the values to `_observe`; without an `every` in
    none.
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


Values = Mapping[str, Any] | Iterable[Any]
"""A mapping from a tag to a fetch, or several nodes or names, whose names are the tags."""


def checked_values(values: object, *, may_be_empty: bool = False) -> dict[str, Any]:
    """Return the fetches by tag. Raise `InvalidArgumentError` if they or a tag are invalid, or
    there are none.
    """
    if isinstance(values, str):
        raise InvalidArgumentError(
            f"values is the str {values!r}; give a mapping or a list: [{values!r}]",
        )
    if values is None:
        fetches: dict[str, Any] = {}
    elif isinstance(values, Mapping):
        fetches = dict(values)  # pyright: ignore[reportUnknownArgumentType]
    elif isinstance(values, Iterable):
        items: list[Any] = list(values)  # pyright: ignore[reportUnknownArgumentType]
        fetches = {item.name if isinstance(item, Node) else item: item for item in items}
    else:
        raise InvalidArgumentError(
            f"values is {values!r}; give a mapping from a tag to what to fetch, or a list",
        )
    for tag in cast("Iterable[object]", fetches):
        if not isinstance(tag, str) or not tag:
            raise InvalidArgumentError(
                f"values has the tag {tag!r}; give a mapping from a non-empty str to what to fetch",
            )
    if not fetches and not may_be_empty:
        raise InvalidArgumentError("values is empty; give a mapping from a tag to what to fetch")
    return fetches


def checked_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers by tag. Raise `InvalidArgumentError` for anything else."""
    numbers: dict[str, float] = {}
    for tag, value in values.items():
        number = scalar(value)
        if number is None:
            raise InvalidArgumentError(
                f"{str(tag)!r} is {describe_value(value)}; give one number, for example a mean or a"
                " norm of it",
            )
        numbers[str(tag)] = float(number)
    return numbers


def scalar(value: Any) -> int | float | None:
    """Return the number that an object of any library converts to, or None."""
    if isinstance(value, (str, bytes, complex)):
        return None
    try:
        has_item = callable(getattr(value, "item", None))
        number = value.item() if has_item else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        # torch raises RuntimeError.
        return None
    if isinstance(number, (int, float)):
        return number
    return None


def describe_value(value: Any) -> str:
    """Return a short text for messages: type and shape of an array, else the start of its repr."""
    shape = getattr(value, "shape", None)
    if shape is not None and shape != ():
        return f"a {type(value).__name__} of shape {tuple(shape)}"
    text = repr(value)
    if len(text) > 80:
        text = f"{text[:77]}..."
    return text


class BackgroundWriter(ThreadQueue[T]):
    """Calls `write(records)` in a thread of its own, in order, with all records that are queued.

    A failed write loses its records. The next `check` or `put` raises the error.
    """

    def __init__(
        self,
        write: Callable[[list[T]], None],
        what: str,
        max_queue: int,
    ) -> None:
        """Create a writer; `what` names its target in messages."""
        super().__init__(f"writer of {what}", max_queue)
        self._write = write
        self._what = what

    def work(self, items: list[T]) -> None:
        self._write(items)

    def failed(self, items: list[T], error: BaseException) -> None:
        if not self.failures:
            add_note(error, f"raised by the writer of {self._what}")
            super().failed(items, error)

    async def flush(self) -> None:
        """Wait until all records are written. Raise the error of a failed write."""
        await self.drain()
        self.check()

    async def aclose(self) -> None:
        """Write the queued records and end the thread. Raise an error not raised yet."""
        if not self.finish().done():  # the thread was started
            await to_thread(self.join)
        self.check()


class Record(NamedTuple):
    """Values by tag, with their step and the Unix time."""

    step: int
    time: float
    values: Mapping[str, Any]


class RecordSink(Protocol):
    """Where a hook writes, called in a thread."""

    def open_at(self, step: int) -> None:
        """Open it to continue after `step`."""

    def write(self, records: list[Record]) -> None:
        """Append the records."""

    def close(self) -> None:
        """Close it. Do nothing if it is closed."""


class WritingHook(FetchingHook):
    """Hands the values of due runs to a thread that writes them."""

    _timer: Sampling
    # How many records may be unwritten before a run waits.
    _max_queue: ClassVar[int] = 1000

    def __init__(
        self,
        values: Values,
        every: Every,
    ) -> None:
        check_instance(every, Every, "every")
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
        """Return the record in its written form. Raise `InvalidArgumentError` if it cannot be."""
        raise NotImplementedError

    async def begin(self) -> None:
        """Prepare for a new session. The file is opened when the session has been created."""
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
        """Raise the error of a failed write. Fetch the values if this run is to be written."""
        self._writer.check()
        # Without an `await` of `super()`: with one, each run would need a task for it.
        return self._args_if_due(run_context)

    @only_if("_has_to_wait")
    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Queue the values if the run is to be written. Wait while the queue is full.

        Raises:
            InvalidArgumentError: the values cannot be written.
        """
        record = self._due_record(run_context, run_values)
        if record is not None:
            await self._writer.put(record)

    def _has_to_wait(self, run_context: SessionRunContext, run_values: SessionRunValues) -> bool:
        """Return whether the run is to be written and the queue is full. If not, do what
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
        """Wait until all records are written. Raise the error of a failed write."""
        await self._writer.flush()

    async def close(self, exc: BaseException | None) -> None:
        """Write the remaining records, and close the file."""
        try:
            await self._writer.aclose()
        finally:
            await to_thread(self._sink.close)
