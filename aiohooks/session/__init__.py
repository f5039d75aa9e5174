"""The monitored session: a loop of steps with hooks around each, recovery, and an end that is
always complete.

`AsyncMonitoredSession` and the types of its arguments are in `aiohooks`. This package exports a
session without recovery, the base class of creators, and the types of results. Read `monitored.py`
first: it has one run on one screen. Each of these imports only from those above it:

    status          the status of a session, as a value and as text; SessionEvents
    creators        the sources of a session; Scaffold, how raw sessions are created and restored;
                    RecoveryPolicy and its history
    coordinator     Coordinator: background tasks, their failures, the stop, the drain and the pause
    hook            SessionRunHook, and the arguments and results of its methods; HookSet: the hooks
                    checked, sorted and called, their requests merged
    feeds           the feeds of the loops: taken ahead, set back by a recovery
    signals         SIGINT and SIGTERM as a drain or a stop
    lifecycle       Lifecycle: opens, recovers and closes; owns the raw session
    why             why a process waits, asked from inside, by a signal or from outside
    monitored       AsyncMonitoredSession, StepContext and the loop over `session.steps`
    run             aiohooks.run: a program's main coroutine
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
