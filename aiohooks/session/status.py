"""What a session is doing, as a value and as text."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from aiohooks.session.hook import SessionRunHook
from aiohooks.stores.base import StoreStatistics


@dataclasses.dataclass(frozen=True, slots=True)
class Activity:
    """Something that goes on in a session: a call of a hook, an operation, a run, a background task.

    Attributes:
        what: who it is: hook, method and step; or the operation, or the task.
        secs: how long it has been going on; None where nobody has looked at the clock.
        awaits: what it waits for, where that has a name: a step of a store, another task.
        where: at which line it waits.
        hook: the hook whose call it is.
        task: the task in which it runs.
    """

    what: str
    secs: float | None = None
    awaits: str | None = None
    where: str | None = None
    hook: SessionRunHook | None = dataclasses.field(default=None, repr=False)
    task: asyncio.Task[Any] | None = dataclasses.field(default=None, repr=False)

    def __str__(self) -> str:
        told = [self.what + _lasting(self.secs)]
        if self.awaits is not None:
            told.append(f"waiting for {self.awaits}")
        if self.where is not None:
            told.append(f"at {self.where}")
        return ", ".join(told)


@dataclasses.dataclass(frozen=True, slots=True)
class SessionStatus:
    """A session at one moment; `str()` of it is what a person wants to read in a log.

    Attributes:
        state: "new", "opening", "open", "closing" or "closed".
        global_step: the step, as far as it is known here; None before there is a session.
        runs: how many runs have begun.
        running: whether one goes on.
        queued: how many tasks wait for their turn to run.
        stop_reason: why a stop was asked for; None if it was not.
        recoveries: how often the session was replaced.
        failure: what failed, as text; None if nothing has.
        name: what the session is called.
        state_secs: how long it has been in that state; None when it is new or closed.
        run_secs: how long the run has been going on; None where none goes on, or nothing in it has waited yet.
        doing: what goes on, each with what it waits for.
        background: the background tasks.
        steps: its step store: who waits for which step, what was last seen, who publishes.
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
        first = f"{name}: {self.state}{_lasting(self.state_secs)}"
        if self.global_step is not None:
            first += f", at step {self.global_step}"
        if self.running:
            first += f", in run {self.runs}{_lasting(self.run_secs)}"
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


def _lasting(secs: float | None) -> str:
    return "" if secs is None else f" for {secs:.3g} s"


def _steps(steps: StoreStatistics) -> str:
    text = f"steps: last seen {steps.latest.step}, published by {', '.join(steps.publishers) or 'nobody'}"
    if steps.waiting:
        waiters = f"{steps.waiting} waiter{'s' if steps.waiting > 1 else ''}{_lasting(steps.waiting_secs)}"
        text += f"; {waiters}, the next one due at step {steps.wanted}"
    return text
