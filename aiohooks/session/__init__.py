"""The monitored session: a loop of steps with hooks around each, recovery, and an end that is
always complete.

`AsyncMonitoredSession` and the types of its arguments are in `aiohooks`. This package exports a
session without recovery, the base class of creators, and the types of results. Read `monitored.py`
first: it has one run on one screen. Each of these modules imports only from those above it:

    status          the status of a session, as a value and as text; SessionEvents
    creators        the sources of a session; Scaffold, how raw sessions are created and restored;
                    RecoveryPolicy
    coordinator     Coordinator: starts and ends background tasks; TasksOwner: what coordinators
                    share; Requests: the stop, the drain and the pause
    hook            SessionRunHook, and the arguments and results of its methods; HookSet: the hooks
                    checked, sorted and called, their requests merged
    feeds           the feeds of the loops: prefetched, and set back by a recovery
    signals         SIGINT and SIGTERM as a drain or a stop
    lifecycle       Lifecycle: opens, recovers and closes; owns the raw session
    why             why a process waits, asked from inside, by a signal or from outside
    monitored       AsyncMonitoredSession, StepContext and the loop over `session.steps`
    run             aiohooks.run: a program's main coroutine

The words of these modules, where each is used in this sense alone:

    raw session     the session that runs the graph and calls no hooks; each recovery replaces it
    phase           "new", "opening", "open", "closing", "closed": a session has them in this order
    run             one call of `run`; it consists of attempts, of which usually the first succeeds
    attempt         `before_run` of the hooks, the operations, `after_run`; each recovery makes the
                    run repeat it
    commit          the moment of an attempt at which its variables and its step are stored; the
                    attempt may still fail afterwards, in `after_run`, and is committed all the same
    turn            the right to run: one task has it, and the others get it one after another
    loop turn       a few iterations of the event loop in which other tasks proceed
    scope           `RunScope`: marks the context of an attempt, or of the end of the session, so
                    that code and tasks started there know what they are part of
    wait            an await that the session can end early: `RunWaits` for those of the current
                    run, `SessionWait` for those in `until`
    request         a stop (end soon), a drain (finish accepted work, then stop) or a pause (start
                    no run until it is resumed): `Requests`
    owner           of a coordinator: the `Lifecycle` whose background tasks it starts
    lasting         of a task, a wait or a coordinator: it belongs to the whole session, so it lives
                    through recoveries; otherwise it ends with its raw session (`is_lasting`)
    failure         the error of a background task, unless it is a clean end
    owed            a failure that the session still has to raise to a caller
    deliver         raise a failure to code outside of the session's own tasks, so that it is not
                    owed any more
    give up         stop recovering: the policy allows no further recovery, or the session has
                    failed; `gave_up` keeps the error, and no run can begin from then on
    clean end       an error such as `StopRequestedError`, which ends the session without a failure
    chief, worker   the one process of a run of several that initializes the variables and leads
                    (the time in which it does is its term), and a process that waits for it
"""

from typing import TYPE_CHECKING

from aiohooks._core.waits import Event
from aiohooks.session.creators import SessionCreator
from aiohooks.session.monitored import AsyncSingularMonitoredSession, StepContext, Steps
from aiohooks.session.status import (
    Activity,
    EffectStatus,
    SessionEvents,
    SessionStatus,
    session_events,
)

if TYPE_CHECKING:
    from aiohooks._why.graph import WaitEdge, WaitGraph, WaitNode

__all__ = [
    "Activity",
    "AsyncSingularMonitoredSession",
    "EffectStatus",
    "Event",
    "SessionCreator",
    "SessionEvents",
    "SessionStatus",
    "StepContext",
    "Steps",
    "WaitEdge",
    "WaitGraph",
    "WaitNode",
    "session_events",
]

for _public in (
    Activity,
    AsyncSingularMonitoredSession,
    EffectStatus,
    Event,
    SessionCreator,
    SessionEvents,
    SessionStatus,
    StepContext,
    Steps,
    session_events,
):
    _public.__module__ = __name__

if not TYPE_CHECKING:
    from aiohooks._core.lazy import lazy_names

    __getattr__, __dir__ = lazy_names(
        __name__,
        {"aiohooks._why.graph": ("WaitEdge", "WaitGraph", "WaitNode")},
        elsewhere=("aiohooks",),
    )
    del lazy_names
