"""Helpers of the hooks that observe a session: due runs, fetched values, the rate of steps, a
thread that writes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any, Literal, TypeVar, cast

from aiohooks._core.cancel import to_thread
from aiohooks._core.clock import Clock, current_clock
from aiohooks._core.queue import ThreadQueue
from aiohooks._core.validate import check_choice, checked_int
from aiohooks.errors import InvalidArgumentError, add_note
from aiohooks.graph.graph import Node
from aiohooks.hooks.every import Every, EveryTimer
from aiohooks.stores._protocol import Position

logger = logging.getLogger("aiohooks.hooks")
T = TypeVar("T")
_RATE_WINDOW_SECS = 10.0
_RATE_INTERVAL_SECS = 0.2


class Sampling:
    """Decides which runs of one session are due by an `Every`, optionally including the first run.

    Fetches are chosen before the run, but the step it commits is known only afterwards.
    `should_fetch` assumes that the run moves the step as far as the last one did; `mark_if_due`
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

    @property
    def started(self) -> bool:
        """Whether `start` has been called."""
        return self._last is not None

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
        """Return what a resumed run needs to take the runs that an uninterrupted one takes."""
        return {**self._timer.state_dict(), "first": self._first, "leap": self._leap}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this state; not in a recovery, where it counts already."""
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
        """Return whether the run that committed `step` was asked for and due; if so, mark it as
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


class StepRate:
    """Steps per second over the last seconds, taken from the reports: nothing is measured between
    them.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Position]] = deque()
        self._rate: float | None = None

    def update(self, now: float, position: Position) -> float | None:
        """Return the current rate, or None until there are two measurements."""
        seen = self._seen
        # Steps before and after a reset have no difference.
        if seen and seen[-1][1].epoch != position.epoch:
            seen.clear()
        if not seen or now - seen[-1][0] >= _RATE_INTERVAL_SECS:
            seen.append((now, position))
            while len(seen) > 2 and now - seen[1][0] >= _RATE_WINDOW_SECS:
                seen.popleft()
            first_time, first = seen[0]
            self._rate = None
            if now > first_time:
                self._rate = (position.step - first.step) / (now - first_time)
        return self._rate


Values = Mapping[str, Any] | Iterable[Any]
"""A mapping from a tag to a fetch, or several nodes or names, whose names are the tags."""


def checked_values(values: object, *, may_be_empty: bool = False) -> dict[str, Any]:
    """Return the fetches by tag; raise `InvalidArgumentError` if they or a tag are invalid, or
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


def is_terminal(file: IO[str] | None) -> bool:
    """Return whether a file is an open terminal."""
    try:
        return file is not None and file.isatty()
    except (AttributeError, ValueError):  # not a real file, or a closed one
        return False


def write_whole(path: str, write: Callable[[str], object]) -> None:
    """Call `write(temporary_path)`, and rename its file to `path`, which therefore appears only
    when it is complete.
    """
    unfinished = f"{path}.{os.getpid()}.tmp"
    try:
        write(unfinished)
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)
        raise


OnWriteError = Literal["raise", "log"]
"""How a failed write is reported: `"raise"` raises it in the next run at the latest, `"log"` logs
the first one.
"""


class BackgroundWriter(ThreadQueue[T]):
    """Calls `write(records)` in a thread of its own, in order, with all records that are queued.

    A failed write loses its records, which are counted.
    """

    def __init__(
        self,
        write: Callable[[list[T]], None],
        *,
        what: str,
        max_queue: int,
        on_write_error: OnWriteError,
    ) -> None:
        """Create a writer; `what` names its target in messages.

        Raises:
            InvalidArgumentError: `max_queue` or `on_write_error` is invalid.
        """
        check_choice(on_write_error, "on_write_error", "raise", "log")
        expected = "a whole number of records, at least 1"
        max_queue = checked_int(max_queue, "max_queue", 1, expected=expected)
        super().__init__(f"writer of {what}", max_queue)
        self.lost = 0
        """How many records could not be written."""
        self._write = write
        self._what = what
        self._raises = on_write_error == "raise"

    def work(self, items: list[T]) -> None:
        self._write(items)

    def failed(self, items: list[T], error: BaseException) -> None:
        is_first = self.lost == 0
        self.lost += len(items)
        if not self._raises:
            if is_first:
                message = "%s cannot be written; continuing without these records"
                logger.error(message, self._what, exc_info=error)
        elif not self._failures:
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
        if self.lost and not self._raises:
            logger.warning("%s: %d records were lost to failed writes", self._what, self.lost)
        self.check()
