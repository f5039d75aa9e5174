"""An asyncio-native monitored session: a loop of steps, and everything around the step is a hook.

The loop, as `AsyncMonitoredSession` runs it:

    for hook in hooks: await hook.begin()                       # may add to the graph
    session = await creator.create_session()
    await together(hook.after_create_session(session, coord))
    while not should_stop():
        requests = await together(hook.before_run(run_context)) # fetches and feeds to add
        values = await session.run(joined fetches, joined feeds)
        await together(hook.after_run(run_context, its own values))
        # an error that means "try again": close the session, make a new one, tell the hooks, run again
    for hook in hooks: await hook.end(session)                  # on a clean end only
    await session.aclose()
    for hook in reversed(hooks): await hook.close(error)        # always

`together` awaits one after the other while none suspends, and overlaps them from then on.
"""

from aiohooks._clock import Clock as Clock
from aiohooks._clock import current_clock as current_clock
from aiohooks._coordinator import Coordinator as Coordinator
from aiohooks._errors import AbortedError as AbortedError
from aiohooks._errors import AiohooksError as AiohooksError
from aiohooks._errors import CheckpointBusyError as CheckpointBusyError
from aiohooks._errors import CheckpointError as CheckpointError
from aiohooks._errors import CheckpointMismatchError as CheckpointMismatchError
from aiohooks._errors import CorruptCheckpointError as CorruptCheckpointError
from aiohooks._errors import FeedConflictError as FeedConflictError
from aiohooks._errors import FetchError as FetchError
from aiohooks._errors import GraphError as GraphError
from aiohooks._errors import GraphFinalizedError as GraphFinalizedError
from aiohooks._errors import HookCancelledError as HookCancelledError
from aiohooks._errors import HookTimeoutError as HookTimeoutError
from aiohooks._errors import InvalidArgumentError as InvalidArgumentError
from aiohooks._errors import InvalidHookError as InvalidHookError
from aiohooks._errors import NanLossDuringTrainingError as NanLossDuringTrainingError
from aiohooks._errors import NestedRunError as NestedRunError
from aiohooks._errors import NotReadyError as NotReadyError
from aiohooks._errors import OutOfRangeError as OutOfRangeError
from aiohooks._errors import PublisherFailedError as PublisherFailedError
from aiohooks._errors import PublisherFinishedError as PublisherFinishedError
from aiohooks._errors import RecoveryExhaustedError as RecoveryExhaustedError
from aiohooks._errors import SessionClosedError as SessionClosedError
from aiohooks._errors import SessionNotReadyError as SessionNotReadyError
from aiohooks._errors import SessionStalledError as SessionStalledError
from aiohooks._errors import StaleReignError as StaleReignError
from aiohooks._errors import StepResetError as StepResetError
from aiohooks._errors import StepTimeoutError as StepTimeoutError
from aiohooks._errors import StopRequestedError as StopRequestedError
from aiohooks._errors import StoreClosedError as StoreClosedError
from aiohooks._errors import StoreDamagedError as StoreDamagedError
from aiohooks._errors import StoreRefusedError as StoreRefusedError
from aiohooks._errors import StoreUnavailableError as StoreUnavailableError
from aiohooks._errors import TaskDiedError as TaskDiedError
from aiohooks._errors import UnavailableError as UnavailableError
from aiohooks._errors import WrongLoopError as WrongLoopError
from aiohooks._every import Every as Every
from aiohooks._every import EveryTimer as EveryTimer
from aiohooks._graph import Graph as Graph
from aiohooks._graph import Operation as Operation
from aiohooks._graph import Placeholder as Placeholder
from aiohooks._graph import Variable as Variable
from aiohooks._graph import get_default_graph as get_default_graph
from aiohooks._hook import HookRegistration as HookRegistration
from aiohooks._hook import SessionRunArgs as SessionRunArgs
from aiohooks._hook import SessionRunContext as SessionRunContext
from aiohooks._hook import SessionRunHook as SessionRunHook
from aiohooks._hook import SessionRunValues as SessionRunValues
from aiohooks._hook import configure as configure
from aiohooks._monitored_session import AsyncMonitoredSession as AsyncMonitoredSession
from aiohooks._recovery import Backoff as Backoff
from aiohooks._recovery import RecoveryPolicy as RecoveryPolicy
from aiohooks._run import run as run
from aiohooks._session import Session as Session
from aiohooks._session_creator import ChiefSessionCreator as ChiefSessionCreator
from aiohooks._session_creator import Scaffold as Scaffold
from aiohooks._session_creator import SessionCreator as SessionCreator
from aiohooks._session_creator import WorkerSessionCreator as WorkerSessionCreator
from aiohooks._signals import SignalPolicy as SignalPolicy
from aiohooks._singular_session import AsyncSingularMonitoredSession as AsyncSingularMonitoredSession
from aiohooks._stateful import Stateful as Stateful
from aiohooks._status import Activity as Activity
from aiohooks._status import SessionStatus as SessionStatus
from aiohooks._step_context import StepContext as StepContext
from aiohooks._steps import Steps as Steps
from aiohooks._training import monitored_training_session as monitored_training_session
from aiohooks._variables import Variables as Variables
from aiohooks.checkpoint import Checkpoint as Checkpoint
from aiohooks.checkpoint import KeepBest as KeepBest
from aiohooks.checkpoint import KeepEvery as KeepEvery
from aiohooks.checkpoint import KeepNewest as KeepNewest
from aiohooks.checkpoint import KeepPolicy as KeepPolicy
from aiohooks.checkpoint import Restored as Restored
from aiohooks.checkpoint import Saver as Saver
from aiohooks.hooks import Blocker as Blocker
from aiohooks.hooks import BlockingHook as BlockingHook
from aiohooks.hooks import CheckpointSaverHook as CheckpointSaverHook
from aiohooks.hooks import CheckpointSaverListener as CheckpointSaverListener
from aiohooks.hooks import CSVHook as CSVHook
from aiohooks.hooks import EarlyStoppingHook as EarlyStoppingHook
from aiohooks.hooks import Evaluation as Evaluation
from aiohooks.hooks import EvaluatorHook as EvaluatorHook
from aiohooks.hooks import FeedFnHook as FeedFnHook
from aiohooks.hooks import FinalOpsHook as FinalOpsHook
from aiohooks.hooks import GlobalStepWaiterHook as GlobalStepWaiterHook
from aiohooks.hooks import HistoryHook as HistoryHook
from aiohooks.hooks import HookTimes as HookTimes
from aiohooks.hooks import HookTimingHook as HookTimingHook
from aiohooks.hooks import JSONLinesHook as JSONLinesHook
from aiohooks.hooks import LambdaHook as LambdaHook
from aiohooks.hooks import LoggingHook as LoggingHook
from aiohooks.hooks import NanHook as NanHook
from aiohooks.hooks import PhaseTime as PhaseTime
from aiohooks.hooks import ProfilerHook as ProfilerHook
from aiohooks.hooks import ProgressHook as ProgressHook
from aiohooks.hooks import Stall as Stall
from aiohooks.hooks import StepCounterHook as StepCounterHook
from aiohooks.hooks import StopAtStepHook as StopAtStepHook
from aiohooks.hooks import StopAtTimeHook as StopAtTimeHook
from aiohooks.hooks import SummarySaverHook as SummarySaverHook
from aiohooks.hooks import VersionGateHook as VersionGateHook
from aiohooks.hooks import WatchdogHook as WatchdogHook
from aiohooks.hooks import hook as hook
from aiohooks.stores import Mark as Mark
from aiohooks.stores import MemoryStepStore as MemoryStepStore
from aiohooks.stores import Reign as Reign
from aiohooks.stores import StepStore as StepStore
from aiohooks.stores import open_step_store as open_step_store
from aiohooks.version_gate import Ticket as Ticket
from aiohooks.version_gate import VersionGate as VersionGate

__all__ = [
    "AbortedError",
    "Activity",
    "AiohooksError",
    "AsyncMonitoredSession",
    "AsyncSingularMonitoredSession",
    "Backoff",
    "Blocker",
    "BlockingHook",
    "CSVHook",
    "Checkpoint",
    "CheckpointBusyError",
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointSaverHook",
    "CheckpointSaverListener",
    "ChiefSessionCreator",
    "Clock",
    "Coordinator",
    "CorruptCheckpointError",
    "EarlyStoppingHook",
    "Evaluation",
    "EvaluatorHook",
    "Every",
    "EveryTimer",
    "FeedConflictError",
    "FeedFnHook",
    "FetchError",
    "FinalOpsHook",
    "GlobalStepWaiterHook",
    "Graph",
    "GraphError",
    "GraphFinalizedError",
    "HistoryHook",
    "HookCancelledError",
    "HookRegistration",
    "HookTimeoutError",
    "HookTimes",
    "HookTimingHook",
    "InvalidArgumentError",
    "InvalidHookError",
    "JSONLinesHook",
    "KeepBest",
    "KeepEvery",
    "KeepNewest",
    "KeepPolicy",
    "LambdaHook",
    "LoggingHook",
    "Mark",
    "MemoryStepStore",
    "NanHook",
    "NanLossDuringTrainingError",
    "NestedRunError",
    "NotReadyError",
    "Operation",
    "OutOfRangeError",
    "PhaseTime",
    "Placeholder",
    "ProfilerHook",
    "ProgressHook",
    "PublisherFailedError",
    "PublisherFinishedError",
    "RecoveryExhaustedError",
    "RecoveryPolicy",
    "Reign",
    "Restored",
    "Saver",
    "Scaffold",
    "Session",
    "SessionClosedError",
    "SessionCreator",
    "SessionNotReadyError",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "SessionStalledError",
    "SessionStatus",
    "SignalPolicy",
    "StaleReignError",
    "Stall",
    "Stateful",
    "StepContext",
    "StepCounterHook",
    "StepResetError",
    "StepStore",
    "StepTimeoutError",
    "Steps",
    "StopAtStepHook",
    "StopAtTimeHook",
    "StopRequestedError",
    "StoreClosedError",
    "StoreDamagedError",
    "StoreRefusedError",
    "StoreUnavailableError",
    "SummarySaverHook",
    "TaskDiedError",
    "Ticket",
    "UnavailableError",
    "Variable",
    "Variables",
    "VersionGate",
    "VersionGateHook",
    "WatchdogHook",
    "WorkerSessionCreator",
    "WrongLoopError",
    "configure",
    "current_clock",
    "get_default_graph",
    "hook",
    "monitored_training_session",
    "open_step_store",
    "run",
]


def _show_public_path() -> None:
    """Makes tracebacks and docs say `aiohooks.Graph`, not the private module."""
    for name in __all__:
        globals()[name].__module__ = __name__


_show_public_path()
del _show_public_path
