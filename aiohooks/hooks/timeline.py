"""Recording what runs concurrently in a session: the timeline of its last steps, or of a window of them."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import ClassVar, NamedTuple

from aiohooks._aio.clock import current_clock, monotonic_now
from aiohooks._aio.contexts import current_run
from aiohooks._aio.observers import Kind, Observer
from aiohooks._validate import check_choice, check_instance, checked_int, checked_path
from aiohooks.errors import InvalidArgumentError, is_clean_end, safe_repr
from aiohooks.graph.session import Session
from aiohooks.hooks._lanes import Bar, Lane, Lanes, write_trace
from aiohooks.hooks._observing import BackgroundWriter, OnWriteError
from aiohooks.hooks.every import Every, EveryTimer, ResettingHook
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import SessionRunArgs, SessionRunContext

_LANES: dict[str, str] = {
    "step": "steps",
    "feed": "feeds",
    "prefetch": "feeds taken ahead",
    "operation": "{}",
    "hook": "{}",
    "background": "{} in the background",
    "save": "checkpoint writes",
    "wait": "waits",
    "recovery": "recoveries",
}
"""The names of the lanes by kind, from top to bottom; `{}` is the name of the hook or operation."""
_CALLS = ("hook", "operation")
"""The kinds of which it is known when they suspend."""
_MAX_LANES = 200
_MAX_MARKS = 1000
_MAX_ERROR = 200


class TimelineHook(ResettingHook):
    """Records when each part of a session was active, as lanes: what is concurrent, pending, or blocks the event loop.

    There are lanes for the steps, the feeds, each operation, each hook and its background calls, the writes of checkpoints, waits
    that a stop ends (`coord.until`, `session.until`, turns of tasks that run the same session) and recoveries. A lane that is
    busy gets a second one. The file is a trace that https://ui.perfetto.dev and chrome://tracing open. A service
    shows the last steps on its page.

    Register it first, so that it sees the `end` and `close` of the others. Hooks with a lower order are not recorded.
    """

    order: ClassVar[int] = -1000

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        every: Every | None = None,
        window_steps: int = 100,
        max_captures: int | None = None,
        max_events: int = 20_000,
        on_write_error: OnWriteError = "log",
    ) -> None:
        """Create the hook.

        Args:
            path: the file, written when a window is complete, and at the end. `{step}` in it is replaced by the first step of
                the window; without it a window replaces the one before. None to keep the last steps in memory, for a service.
            every: when a window begins. None for one window of the last steps, written when the session is closed, however it
                ended.
            window_steps: how many runs a window has, repeated attempts included.
            max_captures: how many windows of a session to record, with `every`; None for no limit.
            max_events: how many activities to keep at most; the oldest are dropped and counted.
            on_write_error: `"log"` logs a failed write and continues, `"raise"` raises it in the next run at the latest.

        Raises:
            InvalidArgumentError: an argument is invalid.
        """
        check_instance(every, Every, "every", optional=True)
        window_steps = checked_int(window_steps, "window_steps", 1)
        max_captures = checked_int(max_captures, "max_captures", 1, optional=True)
        max_events = checked_int(max_events, "max_events", 1)
        check_choice(on_write_error, "on_write_error", "raise", "log")
        self.path: str | None = None if path is None else checked_path(path, "path")
        if every is not None and self.path is None:
            raise InvalidArgumentError("every is given, and path is None; give the file to write, or leave `every` out")
        self._every = every
        self._window_steps = window_steps
        self._max_captures = max_captures
        self._max_events = max_events
        self._on_write_error: OnWriteError = on_write_error
        self._observers: list[Observer] | None = None
        self._reset()

    def _reset(self) -> None:
        self._recorder = _Recorder(self._window_steps, self._max_events, self._every is None, self._put)
        self._timer: EveryTimer | None = None if self._every is None else self._every.timer()
        self._windows = 0
        self._writing = False
        self._writer: BackgroundWriter[Lanes] = BackgroundWriter(
            self._write, what=str(self.path), max_queue=1, on_write_error=self._on_write_error
        )
        self.captures: list[str] = []
        """The files that this session has written."""

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Begin to observe the session, and count from the step at which it starts."""
        if self._observers is None:
            status = coord.status()
            self._recorder.title = (None if status is None else status.name) or "session"
            self._observers = coord.observers
            self._observers.append(self._recorder)
            if self._timer is None:
                self._recorder.begin_window()
        if self._timer is not None:
            self._timer.resume(session.global_step.latest.step, current_clock().now())

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Observe the run if it is part of a window; raise the error of a failed write."""
        self._writer.raise_failure()
        recorder = self._recorder
        if not recorder.recording and self._is_due(run_context.global_step):
            recorder.begin_window()
            self._windows += 1
        if recorder.recording and (scope := current_run()) is not None:
            recorder.attempt_began(run_context.global_step, run_context.attempt)
            scope.observers += (recorder,)
        return None

    def _is_due(self, step: int) -> bool:
        now = current_clock().now()
        if self._timer is None or not self._timer.due(step, now):
            return False
        self._timer.mark(step, now)
        # While a file is written no window begins: a slow disk costs windows, and does not delay the run.
        return not self._writing and (self._max_captures is None or self._windows < self._max_captures)

    def _put(self, captured: Lanes) -> None:
        """Pass a complete window to the thread that writes."""
        if captured.lanes and self.path is not None:
            self._writing = True
            self._writer.add(captured)

    def _write(self, captured: list[Lanes]) -> None:
        """Called in the thread."""
        for lanes in captured:
            path = str(self.path).replace("{step}", str(lanes.first_step))
            try:
                write_trace(path, lanes)
            finally:
                self._writing = False
            if path not in self.captures:
                self.captures.append(path)

    def lanes(self, steps: int | None = None) -> Lanes:
        """Return what is recorded, or the last `steps` of it: `lanes`, each with its `name`, `kind` and `bars`."""
        return self._recorder.lanes(steps)

    async def close(self, exc: BaseException | None) -> None:
        """Write what is recorded, also an incomplete window, and wait until it is written."""
        if self._observers is not None:
            self._observers.remove(self._recorder)
            self._observers = None
        if self._recorder.recording:
            self._recorder.end_window()
        await self._writer.aclose()

    def __repr__(self) -> str:
        every = "" if self._every is None else f", every={self._every}"
        return f"TimelineHook({self.path!r}{every}, window_steps={self._window_steps})"


class _Row:
    """A lane while it is recorded; it has one activity at a time."""

    __slots__ = ("busy", "kind", "name", "number")

    def __init__(self, kind: str, name: str, number: int | None) -> None:
        self.kind: str = kind
        self.name: str = name
        self.number: int | None = number
        """Its place among the lanes; None for what is dropped (too many lanes), and for the hook's own calls, without a name."""
        self.busy: _Active | None = None


class _Active:
    """One activity, an `Observation`."""

    __slots__ = ("began", "ended_at", "error", "held_until", "name", "recorder", "row")

    def __init__(self, recorder: _Recorder, row: _Row, name: str) -> None:
        self.recorder: _Recorder = recorder
        self.row: _Row = row
        self.name: str = name
        self.began: float = recorder.now()
        self.held_until: float | None = None
        self.ended_at: float | None = None
        self.error: str | None = None

    def suspended(self) -> None:
        self.held_until = self.recorder.now()

    def ended(self, error: BaseException | None) -> None:
        self.row.busy = None
        if self.recorder.recording:
            self.ended_at = self.recorder.now()
            if error is not None and not is_clean_end(error):
                self.error = safe_repr(error)[:_MAX_ERROR]
            self.recorder.keep(self)

    def bar(self, origin: float) -> Bar:
        """Return the part of it after `origin`, as a bar."""
        began = max(self.began, origin)
        held_until = self.ended_at if self.held_until is None and self.row.kind in _CALLS else self.held_until
        return Bar(
            self.name,
            began - origin,
            None if self.ended_at is None else self.ended_at - began,
            None if held_until is None else max(0.0, held_until - began),
            self.error,
        )


class _Step(NamedTuple):
    number: int
    began: float
    dropped: int
    """How many activities had been dropped when it began."""


class _Recorder:
    """Collects the activities of a window: an observer of the session."""

    def __init__(self, window_steps: int, max_events: int, rolls: bool, on_captured: Callable[[Lanes], None]) -> None:
        """With `rolls` the window has no end, and keeps the last steps."""
        self.now: Callable[[], float] = monotonic_now()
        self.title: str = "session"
        self.recording: bool = False
        self._captured = Lanes(())  # the latest complete window
        self._on_captured = on_captured
        self._window_steps = window_steps
        self._max_events = max_events
        self._rolls = rolls
        self._rows: dict[tuple[str, str], list[_Row]] = {}
        self._calls: dict[str, dict[str, tuple[list[_Row], str]]] = {kind: {} for kind in _LANES}
        """The lanes of what is called again and again, and its name there, by kind and full name."""
        self._row_count = 0
        self._attempt: _Active | None = None
        self._clear(0.0)

    def _clear(self, origin: float) -> None:
        self._origin = origin
        self._unix_time = time.time()
        self._done: deque[_Active] = deque()
        self._marks: deque[tuple[float, str]] = deque(maxlen=_MAX_MARKS)
        self._steps: deque[_Step] = deque()
        self._dropped = self._dropped_before = 0

    def begin_window(self) -> None:
        """Begin to record."""
        self._clear(self.now())
        self.recording = True

    def end_window(self) -> None:
        """Capture what is recorded, and record no more."""
        self._captured = self.lanes()
        self.recording = False
        self._clear(0.0)
        self._on_captured(self._captured)

    def started(self, kind: Kind, what: str) -> _Active:
        if kind == "recovery" and self.recording:
            self._marks.append((self.now(), what))
        return self._start(kind, what)

    def _start(self, kind: str, what: str) -> _Active:
        rows, name = self._calls[kind].get(what) or self._place(kind, what)
        row = rows[0] if rows and rows[0].busy is None else self._free_row(kind, rows, what)
        active = row.busy = _Active(self, row, name)
        return active

    def _place(self, kind: str, what: str) -> tuple[list[_Row], str]:
        """Return the lanes of an activity, and its name there."""
        owner, name = "", what
        if kind in ("hook", "background"):
            owner, _, name = what.rpartition(".")
            if owner.partition("#")[0] == TimelineHook.__name__:  # the hook itself is not shown
                return [_Row(kind, "", None)], name
        elif kind == "operation":
            owner = what
        rows = self._rows.setdefault((kind, owner), [])
        if owner:  # others may have a new name each time
            self._calls[kind][what] = rows, name
        return rows, name

    def _free_row(self, kind: str, rows: list[_Row], what: str) -> _Row:
        """Return a lane that is not busy, a new one if need be."""
        free = next((one for one in rows if one.busy is None), None)
        if free is not None:
            return free
        if self._row_count >= _MAX_LANES:
            return _Row(kind, what, None)
        name = _LANES[kind].format(what if kind == "operation" else what.rpartition(".")[0])
        row = _Row(kind, name if not rows else f"{name} ({len(rows) + 1})", self._row_count)
        rows.append(row)
        self._row_count += 1
        return row

    def keep(self, active: _Active) -> None:
        """Keep an activity that has ended."""
        if active.row.number is None:
            self._dropped += bool(active.row.name)
            return
        if len(self._done) >= self._max_events:
            self._done.popleft()
            self._dropped += 1
        self._done.append(active)

    def attempt_began(self, step: int, attempt: int) -> None:
        """Begin a step; those of a session are never concurrent."""
        self._attempt = self._start("step", f"step {step}" if attempt == 1 else f"step {step}, attempt {attempt}")
        self._steps.append(_Step(step, self._attempt.began, self._dropped))

    def attempt_ended(self, error: BaseException | None) -> None:
        if self._attempt is not None:
            self._attempt.ended(error)
            self._attempt = None
        if len(self._steps) < self._window_steps:
            return
        if not self._rolls:
            self.end_window()
        elif len(self._steps) > self._window_steps:
            self._steps.popleft()
            first = self._steps[0]
            self._unix_time += first.began - self._origin
            self._origin, self._dropped_before = first.began, first.dropped
            while self._done and (self._done[0].ended_at or 0.0) <= self._origin:
                self._done.popleft()

    def lanes(self, steps: int | None = None) -> Lanes:
        """Return what is recorded, or the last `steps` of it."""
        if not self.recording:
            return self._captured.last_steps(steps)
        first, origin = None, self._origin
        done: Iterable[_Active] = self._done
        if steps is not None and len(self._steps) > steps:
            first = self._steps[-steps]
            origin = first.began
            done = reversed(list(itertools.takewhile(lambda one: (one.ended_at or 0.0) > origin, reversed(self._done))))
        active = [row.busy for rows in self._rows.values() for row in rows if row.busy is not None]
        bars: dict[_Row, list[Bar]] = {}
        for one in itertools.chain(done, active):
            bars.setdefault(one.row, []).append(one.bar(origin))
        kinds = list(_LANES)
        rows = sorted(bars, key=lambda row: (kinds.index(row.kind), row.number or 0))
        return Lanes(
            tuple(Lane(row.name, row.kind, tuple(bars[row])) for row in rows),
            self.title,
            tuple((at - origin, name) for at, name in self._marks if at >= origin),
            self._dropped - self._dropped_before,
            self._unix_time + origin - self._origin,
            first.number if first is not None else self._steps[0].number if self._steps else 0,
        )
