"""The reports of a session: `SessionStatus`, which has its current activities as a value and as
text, and `SessionEvents`, which hooks emit and subscribe to without knowing one another.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias
from weakref import WeakKeyDictionary

from aiohooks._core.activity import entries
from aiohooks._core.clock import secs_text
from aiohooks._core.waits import Event
from aiohooks._why.tasks import task_wait
from aiohooks.dispatch.calls import HookStatus
from aiohooks.dispatch.hook import Hook
from aiohooks.errors import safe_repr
from aiohooks.stores._protocol import StoreStatistics

if TYPE_CHECKING:
    from pathlib import Path

WHY_VARIABLE = "AIOHOOKS_WHY"
"""The environment variable that lets the processes of a program be asked why they wait."""
RUN_LOOPS: WeakKeyDictionary[asyncio.AbstractEventLoop, int] = WeakKeyDictionary()
"""The event loops of `aiohooks.run`, each with its thread. The answer to that question has them."""
AnySession: TypeAlias = Any
"""A `Lifecycle`. The type cannot be imported, because its module imports this one."""
_PHASE_ACTIVITIES = {"opening": "creating the session", "open": "the session's block"}


class EffectStatus(NamedTuple):
    """The effects of one kind that an `EffectsHook` delivers.

    Attributes:
        kind: the kind.
        pending: how many are not delivered yet.
        unsaved: how many of these wait for a durable checkpoint.
    """

    kind: str
    pending: int
    unsaved: int


class EffectRecorder(Protocol):
    """The part of an `EffectsHook` that a session uses."""

    def record(self, attempt: Any, kind: str, payload: Any, recorder: str | None, /) -> None:
        """Record an effect. `attempt` is the `SessionRunContext` of the attempt that has it."""
        ...

    def status(self) -> tuple[EffectStatus, ...]:
        """Return how many effects of each kind are not delivered yet."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Activity:
    """A current activity of a session: a call of a hook, an operation, a run, a background task.

    Attributes:
        what: hook, method and step; or the operation, or the task.
        secs: how long it has been active, or None if its start was not timed.
        awaits: the target of its wait, if that has a name: a step of a store, another task.
        where: the line at which it waits.
        hook: the hook that was called.
        task: the task in which it runs.
        kind: the kind of its wait, such as "step", or else its own, such as "hook".
    """

    what: str
    secs: float | None = None
    awaits: str | None = None
    where: str | None = None
    hook: Hook | None = dataclasses.field(default=None, repr=False)
    task: asyncio.Task[Any] | None = dataclasses.field(default=None, repr=False)
    kind: str = ""

    def __str__(self) -> str:
        parts = [self.what + for_secs(self.secs)]
        if self.awaits is not None:
            parts.append(f"waiting for {self.awaits}")
        if self.where is not None:
            parts.append(f"at {self.where}")
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True, slots=True)
class SessionStatus:
    """A session at one moment. `str()` of it is text for a log.

    Attributes:
        state: "new", "opening", "open", "closing" or "closed".
        global_step: the latest step known here, or None before there is a session.
        runs: number of runs begun.
        running: whether a run is in progress.
        queued: number of tasks that wait for their turn to run.
        stop_reason: why a stop was requested, or which exception ended the block cleanly, or None
            if neither happened.
        recoveries: number of times the session was replaced.
        failure: the first failure, as text, or None if there is none.
        name: the session's name.
        summary: its step, its run or state and since when, and its requests.
        doing: the current activities, each with what it waits for.
        background: the background tasks.
        steps: statistics of its step store: waiters, latest step, publishers.
        feeds_unused: how many elements of feeds were read and not used, so far.
        pause_reason: why the session is paused, or None if it is not.
        drain_reason: why the session drains, or drained before its stop, or None if no drain was
            requested.
        hooks: the status of each hook: failures, dropped calls, and whether it is disabled.
        effects: how many effects an `EffectsHook` has not delivered yet, by kind.
    """

    state: str
    global_step: int | None
    runs: int
    running: bool
    queued: int
    stop_reason: str | None
    recoveries: int
    failure: str | None
    name: str | None = None
    summary: str = ""
    doing: tuple[Activity, ...] = ()
    background: tuple[Activity, ...] = ()
    steps: StoreStatistics | None = None
    feeds_unused: int = 0
    pause_reason: str | None = None
    drain_reason: str | None = None
    hooks: tuple[HookStatus, ...] = ()
    effects: tuple[EffectStatus, ...] = ()

    def __str__(self) -> str:
        name = "session" if self.name is None else f"session {self.name}"
        lines: list[object] = [f"{name}: {self.summary}", *self.doing, *self.background]
        further = {
            "waiting for their turn to run": self.queued,
            "elements of feeds taken and not used": self.feeds_unused,
            "recoveries": self.recoveries,
            "failed": self.failure,
        }
        lines += [f"{label}: {value}" for label, value in further.items() if value]
        lines += [hook for hook in self.hooks if hook.failures or hook.dropped or hook.pending]
        lines += [kind for kind in self.effects if kind.pending]
        return "\n  ".join(map(str, lines))


def for_secs(secs: float | None) -> str:
    """Return a duration for the end of a description, or no text if it is not known."""
    return "" if secs is None else f" for {secs_text(secs)}"


def status_of(session: AnySession) -> SessionStatus:
    """Return the status of a session, without waiting."""
    requests = session.requests
    turns = session.turns
    store = session.store
    is_active = session.phase not in ("new", "closed")
    failure = session.gave_up or next(iter(session.errors), None)
    return SessionStatus(
        state=session.phase,
        global_step=None if store is None else store.latest.step,
        runs=turns.runs,
        running=turns.runner is not None,
        queued=turns.waiting,
        stop_reason=requests.stop_reason,
        recoveries=session.recoveries,
        failure=None if failure is None else safe_repr(failure),
        name=session.name,
        summary=summary_of(session),
        doing=tuple(_activities(session)) if is_active else (),
        background=tuple(background_activities(session.tasks)),
        steps=None if store is None else store.statistics(),
        feeds_unused=session.feeds.unused,
        pause_reason=requests.pause_reason,
        drain_reason=requests.drain_reason,
        hooks=tuple(hook.status() for hook in session.hooks.registered),
        effects=() if session.effects is None else session.effects.status(),
    )


def _activities(session: AnySession) -> list[Activity]:
    """Return the current activities of a session, as specifically as possible.

    The first of these that there are: the calls of hooks and operations for which the session
    waits; the run in progress; the body of its `async with` block; its opening or its end.
    """
    calls = _call_activities(session)
    if calls:
        return calls
    if session.entered_by is None:  # no task has entered the session yet
        return []
    turns = session.turns
    if turns.runner is not None:
        return [
            activity_of(f"run {turns.runs}", turns.runner, _since(session, session.run_waits.began))
        ]
    # The phases that the table does not name are parts of the end.
    what = _PHASE_ACTIVITIES.get(session.phase, "closing the session")
    kind = "block" if session.phase == "open" else "session"
    return [activity_of(what, session.entered_by, kind=kind)]


def _call_activities(session: AnySession) -> list[Activity]:
    """Return the calls of hooks and operations for which the session waits.

    Only its latest wait in the registry of activity counts: the earlier ones are around it.
    """
    waits = [entry for entry in entries() if entry.owner is session]
    if not waits:
        return []
    latest = waits[-1].awaited()
    if latest is None:
        return []
    calls: Iterable[Any] = latest.by()
    return [activity_of(call.name, call.key, call.secs, call.hook, call.kind) for call in calls]


def background_activities(tasks: Iterable[asyncio.Task[object]]) -> list[Activity]:
    """Return the activities of background tasks."""
    return [activity_of(f"background task {task.get_name()!r}", task) for task in tasks]


def activity_of(
    what: str,
    task: asyncio.Task[object],
    secs: float | None = None,
    hook: Hook | None = None,
    kind: str = "",
) -> Activity:
    """Return the activity `what` of a task, with the target and the line of its wait.

    Args:
        what: the name of the activity.
        task: the task.
        secs: how long the activity has lasted, or None if that is not known.
        hook: the hook that is called, if one is.
        kind: the kind of the activity, which is used if the wait has none.
    """
    wait = task_wait(task)
    return Activity(what, secs, wait.awaits, wait.where, hook, task, wait.kind or kind)


def summary_of(session: AnySession) -> str:
    """Return the step of a session, its run or phase, and its requests, in one line."""
    requests = session.requests
    parts: list[str] = []
    if session.store is not None:
        parts.append(f"step {session.store.latest.step}")
    if session.turns.runner is not None:
        parts.append(
            f"in run {session.turns.runs}{for_secs(_since(session, session.run_waits.began))}"
        )
    elif session.phase == "open" and session.turns.runs:
        parts.append("in its block")
    else:
        parts.append(f"{session.phase}{for_secs(_since(session, session.phase_began_at))}")
    if session.recovering_from is not None:
        parts.append(f"in recovery {session.recoveries} from {safe_repr(session.recovering_from)}")
    reasons = {
        "paused": requests.pause_reason,
        "draining": requests.drain_reason,
        "stopping": requests.stop_reason,
    }
    parts += [f"{label}: {reason}" for label, reason in reasons.items() if reason is not None]
    return ", ".join(parts)


def _since(session: AnySession, began: float | None) -> float | None:
    """Return the seconds since `began`, a time of the session's clock, or None without a time."""
    return None if began is None else max(0.0, session.run_waits.now() - began)


# -- events


class SessionEvents:
    """The events of one session: `session_events()` in `begin` of a hook, later `coord.events`.

    Recoveries do not change them, so a hook subscribes once, in `begin`. All callbacks are called
    in the event loop of the session. A path is that of the checkpoint's directory.

        async def begin(self):
            aiohooks.session.session_events().saved.subscribe(self.upload)

        async def upload(self, step, path): ...
    """

    def __init__(self) -> None:
        self.saving: Event[[int, Path]] = Event("saving")
        """`(step, checkpoint_dir)`: a hook takes the session's state when the callbacks have
        returned.
        """
        self.saved: Event[[int, Path]] = Event("saved")
        """`(step, path)`: the checkpoint of a step is durable. Training may have continued."""
        self.restored: Event[[int, Path]] = Event("restored")
        """`(step, path)`: a raw session has the state of a checkpoint, its hooks too. Called before
        `after_create_session`, at a resumed run and at each recovery.
        """
        self.evaluated: Event[[int, dict[str, float], bool]] = Event("evaluated")
        """`(step, metrics, is_extra)`: the numbers that an evaluation returned. An extra evaluation
        is one at the end that was not due: an uninterrupted run does not make it.
        """
        self.checkpoint_dirs: list[Path | None] = []
        """The directories in which hooks save this session. None is that of its creator. A hook
        that saves adds one in `begin`.
        """
        self.save_requests: int = 0
        """How often `request_save` was called. A hook that saves compares it with the last time."""

    def request_save(self) -> None:
        """Ask the hooks that save this session to save after the current run, or at the end."""
        self.save_requests += 1


opening_events: ContextVar[SessionEvents | None] = ContextVar("aiohooks_events", default=None)
"""The events of the session that is calling `begin` of its hooks, in the context of these calls."""


def session_events() -> SessionEvents:
    """Return the events of the session that calls `begin` of this hook.

    If no session does, as in a test that calls `begin` itself, return new events.
    """
    return opening_events.get() or SessionEvents()
