"""The monitored session: a loop of steps with hooks around each, recovery, and an end that is
always complete.

`AsyncMonitoredSession` and the types of its arguments are in `aiohooks`; this package exports the
types of its results. Read `monitored.py` first: it has one run on one screen. Each of these imports
only from those above it:

    status          the status of a session, as a value and as text
    events          SessionEvents: how the hooks of a session meet
    coordinator     Coordinator: background tasks, their failures, the stop, the drain and the pause
    turns           one run at a time, and a turn for the event loop between runs
    hook            SessionRunHook, and the arguments and results of its methods
    creators        the sources of a session; Scaffold, and how raw sessions are created and
                    restored
    merging         the requests of the caller and the hooks merged, the results split
    hook_set        HookSet: the hooks checked, sorted and called
    feeds           the feeds of the loops: taken ahead, set back by a recovery
    recovery        RecoveryPolicy, its history and the root cause: decisions, nothing waits
    signals         SIGINT and SIGTERM as a drain or a stop
    lifecycle       Lifecycle: opens, recovers and closes; owns the raw session
    steps           StepContext and the loop over `session.steps`
    why             why a process waits, asked from inside, by a signal or from outside
    monitored       AsyncMonitoredSession
    program         aiohooks.run: a program's main coroutine
"""

from typing import TYPE_CHECKING

from aiohooks.session.events import Event, SessionEvents, session_events
from aiohooks.session.status import Activity, EffectStatus, SessionStatus
from aiohooks.session.steps import StepContext, Steps

if TYPE_CHECKING:
    from aiohooks._why.graph import WaitEdge, WaitGraph, WaitNode

__all__ = [
    "Activity",
    "EffectStatus",
    "Event",
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
    EffectStatus,
    Event,
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
        __name__, {"aiohooks._why.graph": ("WaitEdge", "WaitGraph", "WaitNode")}
    )
    del lazy_names
