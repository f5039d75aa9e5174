"""The status of a session: its current activities, as a value and as text."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from aiohooks.session.hook import SessionRunHook
from aiohooks.stores.base import StoreStatistics


@dataclasses.dataclass(frozen=True, slots=True)
class Activity:
    """A current activity of a session: a call of a hook, an operation, a run, a background task.

    Attributes:
        what: hook, method and step; or the operation, or the task.
        secs: how long it has been active; None if its start was not timed.
        awaits: what it waits for, if that has a name: a step of a store, another task.
        where: the line at which it waits.
        hook: the hook that was called.
        task: the task in which it runs.
    """

    what: str
    secs: float | None = None
    awaits: str | None = None
    where: str | None = None
    hook: SessionRunHook | None = dataclasses.field(default=None, repr=False)
    task: asyncio.Task[Any] | None = dataclasses.field(default=None, repr=False)

    def __str__(self) -> str:
        parts = [self.what + _for_secs(self.secs)]
        if self.awaits is not None:
            parts.append(f"waiting for {self.awaits}")
        if self.where is not None:
            parts.append(f"at {self.where}")
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True, slots=True)
class SessionStatus:
    """A session at one moment; `str()` of it is text for a log.

    Attributes:
        state: "new", "opening", "open", "closing" or "closed".
        global_step: the latest step known here; None before there is a session.
        runs: number of runs begun.
        running: whether a run is in progress.
        queued: number of tasks that wait for their turn to run.
        stop_reason: why a stop was requested; None if it was not.
        recoveries: number of times the session was replaced.
        failure: the first failure, as text; None if there is none.
        name: the session's name.
        state_secs: seconds in that state; None when it is new or closed.
        run_secs: seconds since the run first waited; None if there is no run, or nothing in it has waited yet.
        doing: the current activities, each with what it waits for.
        background: the background tasks.
        steps: statistics of its step store: waiters, latest step, publishers.
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
    state_secs: float | None = None
    run_secs: float | None = None
    doing: tuple[Activity, ...] = ()
    background: tuple[Activity, ...] = ()
    steps: StoreStatistics | None = None

    def __str__(self) -> str:
        name = "session" if self.name is None else f"session {self.name}"
        first = f"{name}: {self.state}{_for_secs(self.state_secs)}"
        if self.global_step is not None:
            first += f", at step {self.global_step}"
        if self.running:
            first += f", in run {self.runs}{_for_secs(self.run_secs)}"
        lines = [first, *map(str, self.doing), *map(str, self.background)]
        if self.queued:
            lines.append(f"waiting for their turn to run: {self.queued}")
        if self.steps is not None:
            lines.append(_steps(self.steps))
        if self.stop_reason is not None:
            lines.append(f"stop requested: {self.stop_reason}")
        if self.recoveries:
            lines.append(f"recovered: {self.recoveries} times")
        if self.failure is not None:
            lines.append(f"failed: {self.failure}")
        return "\n  ".join(lines)


def _for_secs(secs: float | None) -> str:
    return "" if secs is None else f" for {secs:.3g} s"


def _steps(steps: StoreStatistics) -> str:
    text = f"steps: last seen {steps.latest.step}, published by {', '.join(steps.publishers) or 'no publisher'}"
    if steps.waiting:
        waiters = f"{steps.waiting} waiter{'s' if steps.waiting > 1 else ''}{_for_secs(steps.waiting_secs)}"
        text += f"; {waiters}, the next one due at step {steps.wanted}"
    return text
