"""Taking the status of a session from its parts."""

from __future__ import annotations

import asyncio

from aiohooks._aio.await_chain import task_wait
from aiohooks.dispatch.group import HookCaller
from aiohooks.session._hooks import HookSet
from aiohooks.session._run_lock import RunLock
from aiohooks.session.hook import SessionRunHook
from aiohooks.session.recovery import SessionSupervisor
from aiohooks.session.status import Activity, SessionStatus


def session_status(run_lock: RunLock, supervisor: SessionSupervisor, hooks: HookSet, name: str | None) -> SessionStatus:
    """Return the status of the monitored session that has these parts; waits for nothing."""
    failure = supervisor.recovery_error or next(iter([*supervisor.coord.errors, *supervisor.root.errors]), None)
    caller = run_lock.caller
    now = None if caller.now is None or run_lock.state == "closed" else caller.now()
    coords = dict.fromkeys([supervisor.root, supervisor.coord])
    return SessionStatus(
        state=run_lock.state,
        global_step=None if supervisor.store is None else supervisor.store.latest.step,
        runs=run_lock.runs,
        running=run_lock.runner is not None,
        queued=run_lock.turns.waiting,
        stop_reason=supervisor.root.stop_reason,
        recoveries=supervisor.history.total,
        failure=None if failure is None else repr(failure),
        name=name,
        state_secs=_elapsed(run_lock.since, now),
        run_secs=_elapsed(caller.began, now) if run_lock.runner is not None else None,
        doing=() if now is None else tuple(_activities(run_lock, hooks, now)),
        background=tuple(_activity(f"background task {task.get_name()!r}", task) for coord in coords for task in coord.tasks),
        steps=None if supervisor.store is None else supervisor.store.statistics(),
    )


def _activities(run_lock: RunLock, hooks: HookSet, now: float) -> list[Activity]:
    """Return the most specific current activities: calls and operations; else the run, the block or the session itself."""
    if hooks.caller is not None and (calls := _calls(hooks.caller, now)):
        return calls
    runner, owner = run_lock.runner, run_lock.owner
    if runner is not None:
        run = _activity(f"run {run_lock.runs}", runner, _elapsed(run_lock.caller.began, now))
        return _calls(run_lock.caller, now) or [run]
    if owner is None:
        return []
    what = {"opening": "creating the session", "open": "the session's block"}.get(run_lock.state, "closing the session")
    return [_activity(what, owner)]


def _calls(caller: HookCaller, now: float) -> list[Activity]:
    if caller.overlap is None:
        return []
    secs, calls_hooks = _elapsed(caller.suspended, now), caller.batch is caller
    return [
        _activity(what, task, secs, caller.hook(number) if calls_hooks else None)
        for number, what, task in caller.overlap.unfinished
    ]


def _activity(what: str, task: asyncio.Task[object], secs: float | None = None, hook: SessionRunHook | None = None) -> Activity:
    wait = task_wait(task)
    return Activity(what, secs, wait.awaits, wait.where, hook, task)


def _elapsed(since: float | None, now: float | None) -> float | None:
    return None if since is None or now is None else max(0.0, now - since)
