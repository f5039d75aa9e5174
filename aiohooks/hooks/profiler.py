"""Trace files of selected runs, for Perfetto and chrome://tracing.

A file is a JSON object of the Trace Event Format: a complete event ("X") for an activity that has
ended, with times in microseconds since the window began, an open event ("B") for an activity that
has not ended, and one thread for each track.

activity   something of the session that takes time: a step, a call of a hook, a wait, a save
window     the runs that one file shows, and all activities meanwhile
track      a row of the file, with activities of one kind and owner that follow one another
attempt    one try of a run: a recovery makes another one, which a window counts as a run
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TextIO

from aiohooks._core.activity import Observer, current_run
from aiohooks._core.clock import monotonic_now
from aiohooks._core.validate import check_instance, checked_int, checked_path
from aiohooks.errors import is_clean_end, safe_repr
from aiohooks.graph.session import Session
from aiohooks.hooks._observing import BackgroundWriter, Sampling, logger
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
"""The names of the tracks by the kind of their activities, from top to bottom. `{}` is the name of
the hook or operation.
"""
_KINDS = list(_TRACK_NAMES)
_CALLS = ("hook", "operation")
"""The kinds that report when they first suspend."""


class ProfilerHook(ScheduledHook):
    """Writes `timeline-<step>.json` for a window of runs on each crossing of `every`.

    The file shows when each part of the session was active: steps, feeds, operations, hooks and
    their background calls, checkpoint writes, waits that a stop ends, and recoveries. Each has a
    track of its own. Concurrent activities are on several tracks of the same name. An activity's
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
    ) -> None:
        """Create the hook.

        Args:
            output_dir: the directory of the files, created if missing.
            every: when a window begins. `Every(at=(100, 5000))` limits their number.
            window_steps: how many runs a window has, repeated attempts included.

        Raises:
            InvalidArgumentError: an argument is invalid.
        """
        check_instance(every, Every, "every")
        self.output_dir: str = checked_path(output_dir, "output_dir")
        self._every = every
        self._window_steps = checked_int(window_steps, "window_steps", 1)
        self._observers: list[Observer] | None = None
        self._reset()

    def _reset(self) -> None:
        self._now = monotonic_now()
        self._timer = Sampling(self._every, first=False)
        self._writer = BackgroundWriter[_Window](
            self._write,
            f"traces in {self.output_dir}",
            max_queue=1,
        )
        # Whether the next run is the first one, which is never recorded.
        self._is_first_run = True
        # The activities that have not ended, in the order of their starts. The dict is an ordered
        # set: its values mean nothing.
        self._active: dict[_Activity, None] = {}
        # The activity of the current attempt, and the window to which it belongs. Both are None
        # while nothing is recorded.
        self._attempt: _Activity | None = None
        self._window: _Window | None = None
        self.captures: list[str] = []
        """The files that this session has written."""

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Begin to observe the session, and count from the step at which it starts."""
        if self._observers is None:
            self._observers = coord.observers
            self._observers.append(self)
        self._timer.start(session.global_step.latest.step)

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Begin a window if it is due, and observe the run if it is part of a window."""
        step = run_context.global_step
        is_due = self._timer.should_fetch(step) and not self._is_first_run
        # No window begins while a file is being written, so a slow disk costs windows, and never
        # delays a run.
        if is_due and self._window is None and not self._writer.is_full:
            self._window = _Window(step, self._now(), list(self._active))
        # There is no current run if a test calls this method itself.
        scope = current_run()
        if self._window is not None and scope is not None:
            self._window.runs += 1
            name = f"step {step}"
            if run_context.attempt > 1:
                name += f", attempt {run_context.attempt}"
            self._attempt = self.started("step", name)
            scope.observers += (self,)
        return None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Note the committed step. Drop a window whose first run was not the expected one."""
        if self._is_first_run:
            # Note the step without a mark: if this run was due, the next one still is.
            self._is_first_run = False
            self._timer.note_step(run_context.global_step)
            return
        is_expected = self._timer.mark_if_due(run_context.global_step)
        if self._window is not None and self._window.runs == 1 and not is_expected:
            self._window = None

    async def close(self, exc: BaseException | None) -> None:
        """Write an incomplete window, and wait until all files are written."""
        if self._observers is not None:
            self._observers.remove(self)
            self._observers = None
        self._end_window()
        await self._writer.aclose()

    # -- the activities

    def started(self, kind: str, what: str) -> _Activity:
        """Called at the start of an activity: by the session, or for an attempt of a run."""
        activity = _Activity(kind, what, self._now, self._active)
        if self._window is not None:
            self._window.activities.append(activity)
        return activity

    def attempt_ended(self, error: BaseException | None) -> None:
        """Called at the end of an attempt of a run. The last run of a window ends the window."""
        if self._attempt is not None:
            self._attempt.ended(error)
            self._attempt = None
        if self._window is not None and self._window.runs >= self._window_steps:
            self._end_window()

    def _end_window(self) -> None:
        """End the window, if there is one, and let the thread write it."""
        window = self._window
        self._window = None
        if window is not None:
            window.open_activities = set(self._active)
            self._writer.add(window)

    def _write(self, windows: list[_Window]) -> None:
        """Write files, which appear only when they are complete. Called in the writer's thread."""
        for window in windows:
            path = os.path.join(self.output_dir, f"timeline-{window.step}.json")
            unfinished = f"{path}.{os.getpid()}.tmp"
            try:
                os.makedirs(self.output_dir, exist_ok=True)
                with open(unfinished, "w", encoding="utf-8") as file:
                    window.write(file)
                os.replace(unfinished, path)
            except OSError as error:
                logger.error("the trace %s cannot be written; continuing", path, exc_info=error)
                with contextlib.suppress(OSError):
                    os.unlink(unfinished)
            else:
                self.captures.append(path)
                logger.info("wrote the trace of %d runs: %s", window.runs, path)

    def __repr__(self) -> str:
        window = f"window_steps={self._window_steps}"
        return f"ProfilerHook({self.output_dir!r}, every={self._every}, {window})"


class _Activity:
    """One activity, an `Observation`."""

    def __init__(
        self,
        kind: str,
        what: str,
        now: Callable[[], float],
        active: dict[_Activity, None],
    ) -> None:
        """Begin an activity. It is in `active` until it ends."""
        self.kind: str = kind
        self.owner: str = ""
        self.name: str = what
        # A call of a hook is named "HookName.method".
        if kind in ("hook", "background"):
            self.owner, _, self.name = what.rpartition(".")
        elif kind == "operation":
            self.owner = what
        self.began: float = now()
        # When the activity first waited, and so stopped blocking the event loop. None if it has not
        # waited, or is of a kind that does not report that.
        self.held_until: float | None = None
        self.ended_at: float = math.inf
        self.error: str | None = None
        self._now = now
        self._active = active
        active[self] = None

    def suspended(self) -> None:
        self.held_until = self._now()

    def ended(self, error: BaseException | None) -> None:
        del self._active[self]
        self.ended_at = self._now()
        if error is not None and not is_clean_end(error):
            self.error = safe_repr(error)

    def event(
        self,
        window: _Window,
        track: int,
    ) -> dict[str, Any]:
        """Return the part of this activity that lies in a window, as a trace event on a track."""
        began = max(self.began, window.began)
        has_ended = self not in window.open_activities
        event: dict[str, Any] = {
            "ph": "X" if has_ended else "B",
            "name": self.name,
            "cat": self.kind,
            "pid": 1,
            "tid": track,
            "ts": _microseconds(began - window.began),
            "args": {},
        }
        if has_ended:
            event["dur"] = _microseconds(self.ended_at - began)
        held_until = self.held_until
        if held_until is None and has_ended and self.kind in _CALLS:
            # A call that never suspended held the loop until it ended.
            held_until = self.ended_at
        if held_until is not None:
            event["args"]["held_us"] = _microseconds(max(0.0, held_until - began))
        if has_ended and self.error is not None:
            event["args"]["error"] = self.error
        return event


class _Window:
    """The runs that one file shows: when they began, and the activities meanwhile."""

    def __init__(
        self,
        step: int,
        began: float,
        activities: list[_Activity],
    ) -> None:
        self.step = step
        """The step that the first run is to commit."""
        self.runs = 0
        self.began = began
        self.activities = activities
        """The activities during the window, in the order of their starts."""
        self.open_activities: set[_Activity] = set()
        """The activities that had not ended when the window ended."""
        self._unix_time = time.time()

    def write(self, file: TextIO) -> None:
        """Write the trace to an open file."""
        data = json.dumps({"unix_time": self._unix_time})
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {data}, "traceEvents": [\n')
        file.write(json.dumps(_metadata("process_name", 0, name="session")))
        # Events are encoded one at a time, because the encoder holds the interpreter's lock until
        # it returns, and would block the event loop.
        for event in self._events():
            file.write(",\n" + json.dumps(event))
        file.write("\n]}\n")

    def _events(self) -> Iterator[dict[str, Any]]:
        """Yield the events. Each activity is on the first track of its kind and owner that is free
        when it begins. Two events that describe a new track come before its first activity.
        """
        # By the number of a track: its kind and owner, and when its last activity has ended.
        tracks: list[tuple[str, str]] = []
        ends: list[float] = []
        for activity in self.activities:
            owner = (activity.kind, activity.owner)
            for number, track in enumerate(tracks):
                if track == owner and ends[number] <= activity.began:
                    break
            else:
                # No track of this kind and owner is free, so there is another one. The numbers in
                # the file begin at 1.
                number = len(tracks)
                tracks.append(owner)
                ends.append(0.0)
                name = _TRACK_NAMES[activity.kind].format(activity.owner)
                yield _metadata("thread_name", number + 1, name=name)
                sort_index = _KINDS.index(activity.kind)
                yield _metadata("thread_sort_index", number + 1, sort_index=sort_index)
            ends[number] = activity.ended_at
            if activity in self.open_activities:
                ends[number] = math.inf
            yield activity.event(self, number + 1)


def _metadata(
    kind: str,
    track: int,
    **arguments: object,
) -> dict[str, Any]:
    """Return an event that describes a track, or the process."""
    return {"ph": "M", "name": kind, "pid": 1, "tid": track, "args": arguments}


def _microseconds(secs: float) -> float:
    return round(secs * 1e6, 3)
