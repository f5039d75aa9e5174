"""Trace files of selected runs, for Perfetto and chrome://tracing.

A file is a JSON object of the Trace Event Format: a complete event ("X") for an activity that has
ended, with times in microseconds since the window began, an open event ("B") for one that has not,
and one thread for each track.
"""

from __future__ import annotations

import heapq
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, TextIO

from aiohooks._core.clock import monotonic_now
from aiohooks._core.observers import Observer
from aiohooks._core.scope import current_run
from aiohooks._core.validate import check_instance, checked_int, checked_path
from aiohooks.errors import is_clean_end, safe_repr
from aiohooks.graph.session import Session
from aiohooks.hooks._observing import BackgroundWriter, OnWriteError, Sampling, logger, write_whole
from aiohooks.hooks.every import Every, ScheduledHook
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunValues

_TRACK_NAMES: dict[str, str] = {
    "step": "steps",
    "feed": "feeds",
    "prefetch": "prefetched feeds",
    "operation": "{}",
    "hook": "{}",
    "background": "{} in the background",
    "save": "checkpoint writes",
    "wait": "waits",
    "recovery": "recoveries",
}
"""The names of the tracks by kind, from top to bottom; `{}` is the name of the hook or
operation.
"""
_KINDS = list(_TRACK_NAMES)
_CALLS = ("hook", "operation")
"""The kinds that report when they first suspend."""
_PROCESS = 1
_MAX_ERROR = 200


class ProfilerHook(ScheduledHook):
    """Writes `timeline-<step>.json` for a window of runs on each crossing of `every`.

    The file shows when each part of the session was active: steps, feeds, operations, hooks and
    their background calls, checkpoint writes, waits that a stop ends, and recoveries. Each has a
    track of its own; concurrent activities are on several tracks of the same name. An activity's
    `held_us` is how long it blocked the event loop before it first waited. Perfetto
    (https://ui.perfetto.dev) and chrome://tracing open the files.

    `<step>` is the step that the first run of the window commits. The first run of a session is
    never recorded, because it does one-time work. Like TensorFlow's `ProfilerHook`, it belongs
    first in the list of hooks: hooks with a lower `order` are not recorded.
    """

    order: ClassVar[int] = -1000

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        *,
        every: Every = Every(steps=1000),
        window_steps: int = 1,
        max_events: int = 20_000,
        on_write_error: OnWriteError = "log",
    ) -> None:
        """Create the hook.

        Args:
            output_dir: the directory of the files; created if missing.
            every: when a window begins; `Every(at=(100, 5000))` limits their number.
            window_steps: how many runs a window has, repeated attempts included.
            max_events: how many activities a file has at most; later ones are counted in its
                `otherData.dropped`.
            on_write_error: `"log"` logs a failed write and continues, `"raise"` raises it in the
                next run at the latest.

        Raises:
            InvalidArgumentError: an argument is invalid.
        """
        check_instance(every, Every, "every")
        self.output_dir: str = checked_path(output_dir, "output_dir")
        self._every = every
        self._window_steps = checked_int(window_steps, "window_steps", 1)
        self._max_events = checked_int(max_events, "max_events", 1)
        self._on_write_error: OnWriteError = on_write_error
        self._observers: list[Observer] | None = None
        self._reset()

    def _reset(self) -> None:
        self._timer = Sampling(self._every, first=False)
        self._recorder = _Recorder(self._window_steps, self._max_events, self._add_trace)
        self._writer: BackgroundWriter[_Trace] = BackgroundWriter(
            self._write,
            what=f"traces in {self.output_dir}",
            max_queue=1,
            on_write_error=self._on_write_error,
        )
        self._is_first_run = True
        self.captures: list[str] = []
        """The files that this session has written."""

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Begin to observe the session, and count from the step at which it starts."""
        if self._observers is None:
            status = coord.status()
            self._recorder.title = (status.name if status is not None else None) or "session"
            self._observers = coord.observers
            self._observers.append(self._recorder)
        self._timer.start(session.global_step.latest.step)

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Begin a window if it is due; raise the error of a failed write."""
        self._writer.check()
        step = run_context.global_step
        recorder = self._recorder
        is_due = self._timer.should_fetch(step) and not self._is_first_run
        # While a file is being written no window begins: a slow disk costs windows, and never
        # delays a run.
        if is_due and not recorder.is_recording and not self._writer.is_full:
            recorder.begin_window(step)
        scope = current_run()
        if recorder.is_recording and scope is not None:
            recorder.begin_attempt(step, run_context.attempt)
            scope.observers += (recorder,)
        return None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Note the committed step; drop a window whose first run was not the expected one."""
        if self._is_first_run:
            # If it was due, the next run is.
            self._is_first_run = False
            self._timer.note_step(run_context.global_step)
            return
        is_expected = self._timer.mark_if_due(run_context.global_step)
        if self._recorder.is_recording and self._recorder.run_count == 1 and not is_expected:
            self._recorder.drop_window()

    def _add_trace(self, trace: _Trace) -> None:
        """Pass a complete window to the thread that writes."""
        self._writer.add(trace)

    def _write(self, traces: list[_Trace]) -> None:
        """Write files; called in the writer's thread."""
        for trace in traces:
            path = os.path.join(self.output_dir, f"timeline-{trace.step}.json")
            _write_trace(path, trace)
            self.captures.append(path)
            logger.info("wrote the trace of %d runs: %s", trace.run_count, path)

    async def close(self, exc: BaseException | None) -> None:
        """Write an incomplete window, and wait until all files are written."""
        if self._observers is not None:
            self._observers.remove(self._recorder)
            self._observers = None
        if self._recorder.is_recording:
            self._recorder.end_window()
        await self._writer.aclose()

    def __repr__(self) -> str:
        window = f"window_steps={self._window_steps}"
        return f"ProfilerHook({self.output_dir!r}, every={self._every}, {window})"


class _Trace(NamedTuple):
    """A complete window.

    Attributes:
        step: the step that its first run was to commit.
        run_count: how many runs it has.
        title: the name of the session.
        unix_time: when it began.
        origin: the same by the clock of the activities.
        dropped: how many activities it lacks because there were too many.
        tracks: from top to bottom.
        ended: the activities that ended in it.
        open_events: those that had not ended, as trace events.
    """

    step: int
    run_count: int
    title: str
    unix_time: float
    dropped: int
    origin: float
    tracks: list[_Track]
    ended: list[_Activity]
    open_events: list[dict[str, Any]]


class _Track(NamedTuple):
    """A row of the trace, which shows one activity at a time.

    `idle_tracks` is the heap of the tracks of this owner that show nothing at the moment.
    """

    number: int
    kind: str
    owner: str
    idle_tracks: list[_Track]

    @property
    def name(self) -> str:
        return _TRACK_NAMES[self.kind].format(self.owner)


class _Activity:
    """One activity, an `Observation`."""

    __slots__ = ("began", "ended_at", "error", "held_until", "name", "recorder", "track")

    def __init__(self, recorder: _Recorder, track: _Track, name: str) -> None:
        self.recorder: _Recorder = recorder
        self.track: _Track = track
        self.name: str = name
        self.began: float = recorder.now()
        self.held_until: float | None = None
        self.ended_at: float | None = None
        self.error: str | None = None

    def suspended(self) -> None:
        self.held_until = self.recorder.now()

    def ended(self, error: BaseException | None) -> None:
        self.ended_at = self.recorder.now()
        if error is not None and not is_clean_end(error):
            self.error = safe_repr(error)[:_MAX_ERROR]
        self.recorder.end_activity(self)

    def event(self, origin: float) -> dict[str, Any]:
        """Return the part of it after `origin` as a trace event."""
        began = max(self.began, origin)
        event: dict[str, Any] = {
            "ph": "B",
            "name": self.name,
            "cat": self.track.kind,
            "pid": _PROCESS,
            "tid": self.track.number,
            "ts": _microseconds(began - origin),
        }
        if self.ended_at is not None:
            event["ph"] = "X"
            event["dur"] = _microseconds(self.ended_at - began)
        arguments = self._arguments(began)
        if arguments:
            event["args"] = arguments
        return event

    def _arguments(self, began: float) -> dict[str, Any]:
        """Return the arguments of the event in the trace file.

        They are how long it held the event loop since `began`, and its error, as far as known.
        """
        arguments: dict[str, Any] = {}
        held_until = self.held_until
        if held_until is None and self.track.kind in _CALLS:
            # A call that never suspended held the loop until it ended.
            held_until = self.ended_at
        if held_until is not None:
            arguments["held_us"] = _microseconds(max(0.0, held_until - began))
        if self.error is not None:
            arguments["error"] = self.error
        return arguments


class _Recorder:
    """Collects the activities of a window: an observer of the session and of its runs."""

    def __init__(
        self, window_steps: int, max_events: int, on_captured: Callable[[_Trace], None]
    ) -> None:
        self.now: Callable[[], float] = monotonic_now()
        self.title: str = "session"
        self.is_recording: bool = False
        self.run_count: int = 0
        self._window_steps = window_steps
        self._max_events = max_events
        self._on_captured = on_captured
        self._tracks: list[_Track] = []
        self._idle_tracks: dict[tuple[str, str], list[_Track]] = {}
        self._active: dict[_Activity, None] = {}
        self._attempt: _Activity | None = None
        self._step = 0
        self._origin = 0.0
        self._unix_time = 0.0
        self._dropped = 0
        self._ended: list[_Activity] = []

    def begin_window(self, step: int) -> None:
        """Begin to record; activities that have already begun count from now on."""
        self.is_recording = True
        self.run_count = 0
        self._step = step
        self._origin = self.now()
        self._unix_time = time.time()
        self._dropped = 0
        self._ended = []

    def end_window(self) -> None:
        """Pass on the activities of the window, and record no more."""
        self.is_recording = False
        tracks = sorted(self._tracks, key=lambda track: _KINDS.index(track.kind))
        trace = _Trace(
            self._step,
            self.run_count,
            self.title,
            self._unix_time,
            self._dropped,
            self._origin,
            tracks,
            self._ended,
            [activity.event(self._origin) for activity in self._active],
        )
        self._ended = []
        self._on_captured(trace)

    def drop_window(self) -> None:
        """Forget the window."""
        self.is_recording = False
        self._ended = []

    def started(self, kind: str, what: str) -> _Activity:
        """Called at the start of an activity: by the session, or for an attempt of a run."""
        owner = ""
        name = what
        if kind in ("hook", "background"):
            owner, _, name = what.rpartition(".")
        elif kind == "operation":
            owner = what
        idle_tracks = self._idle_tracks.setdefault((kind, owner), [])
        if idle_tracks:
            track = heapq.heappop(idle_tracks)
        else:
            track = _Track(len(self._tracks) + 1, kind, owner, idle_tracks)
            self._tracks.append(track)
        activity = _Activity(self, track, name)
        self._active[activity] = None
        return activity

    def end_activity(self, activity: _Activity) -> None:
        """Keep an activity that has ended, if there is a window with room for it."""
        heapq.heappush(activity.track.idle_tracks, activity.track)
        del self._active[activity]
        if not self.is_recording:
            return
        if len(self._ended) < self._max_events:
            self._ended.append(activity)
        else:
            self._dropped += 1

    def begin_attempt(self, step: int, attempt: int) -> None:
        """Begin a run or its repetition."""
        self.run_count += 1
        name = f"step {step}"
        if attempt > 1:
            name += f", attempt {attempt}"
        self._attempt = self.started("step", name)

    def attempt_ended(self, error: BaseException | None) -> None:
        """Called by the run at its end; the last one of a window ends that."""
        if self._attempt is not None:
            self._attempt.ended(error)
            self._attempt = None
        if self.is_recording and self.run_count >= self._window_steps:
            self.end_window()


def _write_trace(path: str, trace: _Trace) -> None:
    """Write a file, which appears only when it is complete."""
    os.makedirs(os.path.dirname(path), exist_ok=True)

    def write(unfinished: str) -> None:
        with open(unfinished, "w", encoding="utf-8") as file:
            _write_events(file, trace)

    write_whole(path, write)


def _write_events(file: TextIO, trace: _Trace) -> None:
    data = json.dumps({"unix_time": trace.unix_time, "dropped": trace.dropped})
    file.write(f'{{"displayTimeUnit": "ms", "otherData": {data}, "traceEvents": [\n')
    separator = ""
    # One event at a time: the encoder keeps the interpreter's lock until it returns.
    for event in _trace_events(trace):
        file.write(separator + json.dumps(event))
        separator = ",\n"
    file.write("\n]}\n")


def _trace_events(trace: _Trace) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", 0, name=trace.title)
    events = [activity.event(trace.origin) for activity in trace.ended] + trace.open_events
    used = {event["tid"] for event in events}
    for position, track in enumerate(trace.tracks):
        if track.number in used:
            yield _metadata("thread_name", track.number, name=track.name)
            yield _metadata("thread_sort_index", track.number, sort_index=position)
    yield from events


def _metadata(kind: str, number: int, **arguments: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": number, "args": arguments}


def _microseconds(secs: float) -> float:
    return round(secs * 1e6, 3)
