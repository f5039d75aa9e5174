"""Looking at a session: its status, put together from its parts."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohooks._aio.await_chain import task_wait
from aiohooks._aio.gather import FanOut
from aiohooks.session._hooks import HookSet, Tier
from aiohooks.session._run_lock import RunGate
from aiohooks.session.hook import SessionRunHook
from aiohooks.session.recovery import Recoverable
from aiohooks.session.status import Activity, SessionStatus


def status_of(gate: RunGate, life: Recoverable, hooks: HookSet, fan: FanOut, name: str | None) -> SessionStatus:
    """Takes it from the parts of a monitored session; waits for nothing."""
    failure = life.given_up or next(iter([*life.coord.errors, *life.root.errors]), None)
    now = None if fan.now is None or gate.state == "closed" else fan.now()
    coords = dict.fromkeys([life.root, life.coord])
    return SessionStatus(
        state=gate.state,
        global_step=None if life.store is None else life.store.latest.step,
        runs=gate.runs,
        running=gate.running,
        queued=gate.turns.waiting,
        stop_reason=life.root.stop_reason,
        recoveries=life.history.total,
        failure=None if failure is None else repr(failure),
        name=name,
        state_secs=_secs(gate.since, now),
        run_secs=_secs(fan.began, now) if gate.running else None,
        doing=() if now is None else tuple(_doing(gate, hooks, fan, now)),
        background=tuple(_activity(f"background task {task.get_name()!r}", task) for coord in coords for task in coord.tasks),
        steps=None if life.store is None else life.store.statistics(),
    )


def _doing(gate: RunGate, hooks: HookSet, fan: FanOut, now: float) -> list[Activity]:
    """What goes on: the calls of hooks and the operations; where there are none, the run, the body or the session itself."""
    if hooks.calling is not None:
        what, registration, since, task = hooks.calling
        return [_activity(what, task, _secs(since, now), registration.hook)]
    runner, owner = gate.runner, gate.owner
    if runner is not None:
        return _pieces(fan, now) or [_activity(f"run {gate.runs}", runner, _secs(fan.began, now))]
    if gate.state == "opening" and hooks.opening is not None and (opening := _pieces(hooks.opening, now)):
        return opening
    if owner is None:
        return []
    what = {"opening": "creating the session", "open": "the session's block"}.get(gate.state, "closing the session")
    return [_activity(what, owner)]


def _pieces(fan: FanOut, now: float) -> list[Activity]:
    if fan.crew is None or fan.piece is None:
        return []
    tier = fan.piece[1]
    return [
        _activity(what, task, _secs(fan.since, now), tier.registrations[number].hook if isinstance(tier, Tier) else None)
        for number, what, task in fan.crew.unfinished
    ]


def _activity(what: str, task: asyncio.Task[Any], secs: float | None = None, hook: SessionRunHook | None = None) -> Activity:
    wait = task_wait(task)
    return Activity(what, secs, wait.awaits, wait.where, hook, task)


def _secs(since: float | None, now: float | None) -> float | None:
    return None if since is None or now is None else max(0.0, now - since)
