"""Async hooks called concurrently, and a session: a loop of steps with a hook for all around it.

The loop, as `AsyncMonitoredSession` runs it:

    for hook in hooks: await hook.begin()                       # may add to the graph
    session = await creator.create_session()
    await concurrently(hook.after_create_session(session, coord))
    while not should_stop():
        requests = await concurrently(hook.before_run(run_context))  # fetches and feeds to add
        values = await session.run(merged fetches, merged feeds)
        await concurrently(hook.after_run(run_context, its own values))
        # after a recoverable error: close the session, create a new one, call
        # after_create_session, and repeat the run
    for hook in hooks: await hook.end(session)                  # on a clean end only
    await session.aclose()
    for hook in reversed(hooks): await hook.close(error)        # always

`concurrently` makes the calls that cannot wait one after another, and the others at the same time,
each in a task of its own.

The packages, each of which imports only from those above it:

    errors          the error tree, and which errors are a clean end
    _core           clock, tasks and contexts of calls: what asyncio lacks
    _why            why something waits: the wait-for graph
    dispatch        registering hooks, and calling several as one
    stores          step stores: memory, local files, Redis, Ray
    version_gate    bounded staleness: work is admitted a few versions ahead
    checkpoint      the saver, its policies and the format on disk
    graph           graphs, fetches, variables, the raw session
    session         the monitored session; `session/monitored.py` has one run on one screen
    hooks           the built-in hooks
    training        the usual session of a training job
    distributed     launchers of chiefs and workers
    adapters        bridges to other software
    testing         helpers for people who write hooks and stores

`aiohooks` itself has 40 names: dispatch, the session with the arguments and the hooks of most
loops, and the errors that steps raise. Every other public name is in its package:
`aiohooks.hooks.WatchdogHook`. The docstring of each package lists its modules.
`docs/design/architecture.md` walks through a run.
"""

import sys
from typing import TYPE_CHECKING

from aiohooks import errors as errors
from aiohooks.errors import (
    AbortedError,
    AiohooksError,
    OutOfRangeError,
    StopRequestedError,
    UnavailableError,
)

if TYPE_CHECKING:
    from aiohooks import checkpoint as checkpoint
    from aiohooks import dispatch as dispatch
    from aiohooks import distributed as distributed
    from aiohooks import graph as graph
    from aiohooks import hooks as hooks
    from aiohooks import session as session
    from aiohooks import stores as stores
    from aiohooks import testing as testing
    from aiohooks import training as training
    from aiohooks import version_gate as version_gate
    from aiohooks._core.waits import Backoff
    from aiohooks.dispatch.group import HookGroup, compose, compose_functions
    from aiohooks.dispatch.hook import configure, in_order
    from aiohooks.dispatch.points import chain, point, wrap
    from aiohooks.graph.graph import Graph, Variables, in_thread
    from aiohooks.graph.session import Session
    from aiohooks.hooks import (
        CheckpointSaverHook,
        LoggingHook,
        NanHook,
        StopAtStepHook,
        hook,
    )
    from aiohooks.hooks.every import Every
    from aiohooks.session.coordinator import Coordinator
    from aiohooks.session.creators import (
        ChiefSessionCreator,
        RecoveryPolicy,
        Scaffold,
        WorkerSessionCreator,
    )
    from aiohooks.session.hook import (
        SessionRunArgs,
        SessionRunContext,
        SessionRunHook,
        SessionRunValues,
        effect,
    )
    from aiohooks.session.monitored import AsyncMonitoredSession
    from aiohooks.session.run import run
    from aiohooks.session.signals import SignalPolicy
    from aiohooks.stores import MemoryStepStore, StepStore, open_step_store

__version__ = "0.1.0"

__all__ = [
    "AbortedError",
    "AiohooksError",
    "AsyncMonitoredSession",
    "Backoff",
    "CheckpointSaverHook",
    "ChiefSessionCreator",
    "Coordinator",
    "Every",
    "Graph",
    "HookGroup",
    "LoggingHook",
    "MemoryStepStore",
    "NanHook",
    "OutOfRangeError",
    "RecoveryPolicy",
    "Scaffold",
    "Session",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "SignalPolicy",
    "StepStore",
    "StopAtStepHook",
    "StopRequestedError",
    "UnavailableError",
    "Variables",
    "WorkerSessionCreator",
    "chain",
    "compose",
    "compose_functions",
    "configure",
    "effect",
    "hook",
    "in_order",
    "in_thread",
    "open_step_store",
    "point",
    "run",
    "wrap",
]

if not TYPE_CHECKING:
    from aiohooks._core.lazy import lazy_names

    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            # All names that none of the next modules has.
            "aiohooks.hooks": __all__,
            "aiohooks._core.waits": ("Backoff",),
            "aiohooks.dispatch.group": ("HookGroup", "compose", "compose_functions"),
            "aiohooks.dispatch.hook": ("configure", "in_order"),
            "aiohooks.dispatch.points": ("chain", "point", "wrap"),
            "aiohooks.graph.graph": ("Graph", "Variables", "in_thread"),
            "aiohooks.graph.session": ("Session",),
            "aiohooks.hooks.every": ("Every",),
            "aiohooks.session.coordinator": ("Coordinator",),
            "aiohooks.session.creators": (
                "ChiefSessionCreator",
                "RecoveryPolicy",
                "Scaffold",
                "WorkerSessionCreator",
            ),
            "aiohooks.session.hook": (
                "SessionRunArgs",
                "SessionRunContext",
                "SessionRunHook",
                "SessionRunValues",
                "effect",
            ),
            "aiohooks.session.monitored": ("AsyncMonitoredSession",),
            "aiohooks.session.run": ("run",),
            "aiohooks.session.signals": ("SignalPolicy",),
            "aiohooks.stores": ("MemoryStepStore", "StepStore", "open_step_store"),
        },
        packages=(
            "checkpoint",
            "dispatch",
            "distributed",
            "graph",
            "hooks",
            "session",
            "stores",
            "testing",
            "training",
            "version_gate",
        ),
        elsewhere=(
            "aiohooks.errors",
            "aiohooks.hooks",
            "aiohooks.session",
            "aiohooks.dispatch",
            "aiohooks.graph",
            "aiohooks.stores",
            "aiohooks.checkpoint",
            "aiohooks.version_gate",
            "aiohooks.training",
            "aiohooks.testing",
            "aiohooks.distributed",
            "aiohooks.distributed.local",
            "aiohooks.distributed.ray",
            "aiohooks.stores.local",
            "aiohooks.stores.redis",
            "aiohooks.stores.ray",
            "aiohooks.adapters.asgi",
            "aiohooks.adapters.prometheus",
            "aiohooks.adapters.opentelemetry",
            "aiohooks.adapters.trackers",
        ),
    )
    if "_pytest" not in sys.modules:
        # Dispatch is often used first in a coroutine, where its import would block the event loop.
        # So it is imported here, but not under pytest, which loads a plugin of this package at each
        # start, in every project.
        from aiohooks import dispatch as dispatch
    del lazy_names
