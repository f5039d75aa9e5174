"""The bases of hooks that fetch values in due runs, and of hooks that write them in a thread.

due       a run is due when the hook's `Every` selects it: the hook then works with its values
fetched   the values of a run were requested in `before_run`, when it was expected to be due
tag       the name of one value in a line, a file or a tracker
record    the values of one due run by tag, with its step and its time
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, cast

from aiohooks._core.clock import Clock, current_clock
from aiohooks._core.queue import ThreadQueue
from aiohooks._core.validate import check_callable, check_instance, is_coroutine_function
from aiohooks._core.waits import to_thread
from aiohooks.dispatch.calls import only_if
from aiohooks.errors import InvalidArgumentError, InvalidHookError, add_note, safe_repr
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

    A hook must choose its fetches before the run, but the step that the run commits is known only
    afterwards. So `should_fetch` assumes that the run advances the step as far as the previous run
    did, and `mark_if_due` goes by the committed step. If the assumption was wrong, either the
    values were fetched for nothing, or they were not fetched in a due run. In the second case the
    timer stays due, so that the next run is used instead.
    """

    __slots__ = ("_advance", "_clock", "_committed", "_first", "_is_fetched", "_timer", "_unix")

    def __init__(
        self,
        every: Every,
        *,
        first: bool,
    ) -> None:
        """Begin to decide. A hook makes this object in `begin`, where the clock is the session's.

        Args:
            every: when a run is due.
            first: whether the first run is due as well, whatever its step.
        """
        self._timer: EveryTimer = every.timer()
        self._clock: Clock = current_clock()
        # Whether the next run is due because it is the first one.
        self._first = first
        # The step that the last run has committed (None before `start`), and by how many steps that
        # run has advanced it.
        self._committed: int | None = None
        self._advance = 1
        # Whether `should_fetch` has returned true for the current run.
        self._is_fetched = False
        # The Unix time at which the session's clock was 0. The first `start` sets it.
        self._unix: float

    def start(self, step: int) -> bool:
        """Count from `step` in a new session, and after a recovery that moved the step back to it.
        Return whether it is one of these: a recovery that kept the step changes nothing.
        """
        if self._committed is None:
            # A checkpoint may have restored the state of the timer. `resume` keeps that state, and
            # `start` would discard it.
            self._timer.resume(step)
            self._unix = time.time() - self._clock.now()
        elif step < self._committed:
            self._timer.start(step)
        else:
            return False
        self._committed = step
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the state with which a resumed run takes the same runs as an uninterrupted one."""
        return {**self._timer.state_dict(), "first": self._first, "leap": self._advance}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this state. A recovery ignores it, because this object counts already."""
        # The state has no step if it was saved before the timer was started.
        if "step" in state and self._committed is None:
            self._timer.load_state_dict(state)
            self._first = bool(state["first"])
            self._advance = int(state["leap"])

    def time(self) -> float:
        """Return the Unix time. It advances with the session's clock, so it never goes backwards
        within a session, although the system's time may be set.
        """
        return self._unix + self._clock.now()

    def should_fetch(self, next_step: int) -> bool:
        """Return whether to fetch in the coming run, and note it for `is_due`.

        The session gives the step that the run commits if it advances the step by one.
        """
        expected_step = next_step - 1 + self._advance
        self._is_fetched = self._first or self._timer.due(expected_step)
        return self._is_fetched

    def mark_if_due(self, step: int) -> bool:
        """Note the step that a run has committed. If the run is due and its values were fetched,
        mark it as done and return true.
        """
        self.note_step(step)
        if not self.is_due(step):
            return False
        self._first = False
        self._is_fetched = False
        self._timer.mark(step)
        return True

    def note_step(self, step: int) -> None:
        """Note the step that a run has committed."""
        if self._committed is not None and step > self._committed:
            self._advance = step - self._committed
        self._committed = step

    def is_due(self, step: int) -> bool:
        """Return whether the run that has committed `step` is due, and its values were fetched."""
        return self._is_fetched and (self._first or self._timer.due(step))


class FetchingHook(ScheduledHook):
    """Base of hooks that fetch values in the runs that are due, and pass them to `_observe`.

    Without an `every`, no run is due, and `_timer` is None.
    """

    # Whether the first run of a session is due, whatever its step.
    _first: ClassVar[bool] = False

    def __init__(
        self,
        fetches: Any,
        every: Every | None,
    ) -> None:
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
        """Return the fetches for the coming run, or None if it is not due."""
        if self._timer is not None and self._timer.should_fetch(run_context.global_step):
            return self._args
        return None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Observe the values of a run that was due."""
        if self._timer is not None and self._timer.mark_if_due(run_context.global_step):
            self._observe(run_context.global_step, run_values.results)

    def _observe(self, step: int, result: Any) -> None:
        """Use the result of the fetches in the run that has committed `step`.

        The result has the shape of the fetches: one value, or a dict of values by tag.
        """
        raise NotImplementedError


def check_coroutine_function(function: object, what: str) -> None:
    """Raise `InvalidHookError` unless a function of the user is async. `what` names it."""
    check_callable(function, what)
    if not is_coroutine_function(function):
        raise InvalidHookError(
            f"{what} is {function!r}, not a coroutine function; write it as `async def`, or give"
            " aiohooks.in_thread(fn) for a function that blocks"
        )


Values = Mapping[str, Any] | Iterable[Any]
"""A mapping from a tag to a fetch, or several nodes or names, whose names are the tags."""


def checked_values(values: object, *, may_be_empty: bool = False) -> dict[str, Any]:
    """Return the fetches by tag. Raise `InvalidArgumentError` if they or a tag are invalid, or
    there are none.
    """
    if isinstance(values, str):
        raise InvalidArgumentError(
            f"values is the str {values!r}; give a mapping or a list: [{values!r}]"
        )
    if values is None:
        fetches: dict[str, Any] = {}
    elif isinstance(values, Mapping):
        fetches = dict(values)  # pyright: ignore[reportUnknownArgumentType]
    elif isinstance(values, Iterable):
        # The name of a node is its tag. A name that is given as text is fetch and tag.
        items: list[Any] = list(values)  # pyright: ignore[reportUnknownArgumentType]
        fetches = {item.name if isinstance(item, Node) else item: item for item in items}
    else:
        raise InvalidArgumentError(
            f"values is {values!r}; give a mapping from a tag to what to fetch, or a list"
        )
    for tag in cast("Iterable[object]", fetches):
        if not isinstance(tag, str) or not tag:
            raise InvalidArgumentError(
                f"values has the tag {tag!r}; give a mapping from a non-empty str to what to fetch"
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
                " norm of it"
            )
        numbers[str(tag)] = float(number)
    return numbers


def scalar(value: Any) -> int | float | None:
    """Return the number that an object of any library converts to, or None if there is none."""
    # `float` would convert text such as "1", which is not a number of a training.
    if isinstance(value, (str, bytes, complex)):
        return None
    number = value
    try:
        # Arrays and tensors have `item`. It fails unless they have exactly one element.
        if hasattr(value, "item"):
            number = value.item()
        elif not isinstance(value, int):
            number = float(value)
        # Only for its error: an int may be too large for a float.
        float(number)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        # A tensor of torch with several elements raises RuntimeError.
        return None
    # `item` of an array of texts or objects returns something else than a number.
    return number if isinstance(number, (int, float)) else None


def text_of(values: Mapping[str, Any]) -> str:
    """Return values by tag as text, with numbers of at most six digits."""
    parts: list[str] = []
    for tag, value in values.items():
        number = scalar(value)
        shown = value
        if isinstance(number, float):
            shown = f"{number:.6g}"
        parts.append(f"{tag} = {shown}")
    return ", ".join(parts)


def describe_value(value: Any) -> str:
    """Return a short text for messages: type and shape of an array, or else the repr."""
    shape = getattr(value, "shape", None)
    # The shape of an array with a single number and no dimensions is ().
    if shape is not None and shape != ():
        return f"a {type(value).__name__} of shape {tuple(shape)}"
    return safe_repr(value)


class BackgroundWriter(ThreadQueue[T]):
    """Calls `write(records)` in a thread of its own, in order, with all records that are queued.

    A failed write loses its records. The next `check` or `put` raises the error.
    """

    def __init__(
        self,
        write: Callable[[list[T]], None],
        target: str,
        max_queue: int,
    ) -> None:
        """Create a writer without a thread, which starts with the first record.

        Args:
            write: called in the thread.
            target: a name for messages, such as the path of the file.
            max_queue: how many records may be unwritten before the queue is full.
        """
        super().__init__(f"writer of {target}", max_queue)
        self._write = write

    def work(self, items: list[T]) -> None:
        self._write(items)

    def failed(self, items: list[T], error: BaseException) -> None:
        """Keep the error of a write. While it has not been raised, drop the errors of later writes:
        a full disk would otherwise collect one for each write.
        """
        if not self.failures:
            add_note(error, f"raised by the {self.name}")
            super().failed(items, error)

    async def flush(self) -> None:
        """Wait until all records are written. Raise the error of a failed write."""
        await self.drain()
        self.check()

    async def aclose(self) -> None:
        """Write the queued records and end the thread. Raise the error of a failed write."""
        # `finish` returns a future. It is done already if the thread was never started, or has
        # ended.
        if not self.finish().done():
            await to_thread(self.join)
        self.check()


class Record(NamedTuple):
    """Values by tag, with their step and the Unix time."""

    step: int
    time: float
    values: Mapping[str, Any]


class RecordFile(Protocol):
    """A file of records. Its methods are called in a thread, because they may block."""

    def open_at(self, step: int) -> None:
        """Open the file to continue after `step`: records of later steps in it are void."""

    def write(self, records: list[Record]) -> None:
        """Append the records."""

    def close(self) -> None:
        """Close the file, if it is open."""


class WritingHook(FetchingHook):
    """Base of hooks that hand the values of due runs to a thread, which writes them to a file.

    A subclass has `_new_file`, which returns the file, and `_checked`, which checks a record.
    """

    _timer: Sampling
    # How many records may be unwritten before a run has to wait.
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
        self._file: RecordFile
        self._file, target = self._new_file()
        self._writer = BackgroundWriter[Record](self._file.write, target, self._max_queue)

    def _new_file(self) -> tuple[RecordFile, str]:
        """Return the file of a session, not open yet, and its name for messages."""
        raise NotImplementedError

    def _checked(self, record: Record) -> Record:
        """Return the record with its values converted to what the file can hold.

        Raises:
            InvalidArgumentError: the file cannot hold a value.
        """
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
        moved the step back.
        """
        step = session.global_step.latest.step
        if self._timer.start(step):
            # After a recovery, the queue has records of the steps that are lost. They must be in
            # the file before the entry that declares them void.
            await self._writer.flush()
            await to_thread(self._file.open_at, step)

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Raise the error of a failed write. Fetch the values if this run is to be written."""
        self._writer.check()
        # Hot path: the session starts a task for a method whose code has an `await`, so this is not
        # `await super().before_run(...)`.
        return self._args_if_due(run_context)

    @only_if("_queue_or_defer")
    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Wait for a place in the queue, and queue the values of a due run.

        `_queue_or_defer`, which the session calls first, usually queues them without waiting. It
        returns true only if the queue is full, and the session then calls this.

        Raises:
            InvalidArgumentError: the values cannot be written.
        """
        record = self._due_record(run_context, run_values)
        if record is not None:
            await self._writer.put(record)

    def _queue_or_defer(
        self,
        run_context: SessionRunContext,
        run_values: SessionRunValues,
    ) -> bool:
        """Queue the values if the run is due and the queue has room, without a task and a wait.
        Return true if the record is left to `after_run`, because the queue is full.
        """
        if self._writer.is_full and self._timer.is_due(run_context.global_step):
            # Nothing is marked yet: `after_run` finds the run due again.
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
        """Return the record of a due run, and mark the run as done. Return None for other runs."""
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
            await to_thread(self._file.close)
