"""The built-in hooks, one file per family.

They use the hook interface and the coordinator, and never the session.

stopping             stop at a step, at a time, or when a value no longer improves
global_step_waiter   wait before the first run until the global step is reached
version_gate         wait while the step is too far ahead of the published versions
evaluator            evaluate during training, inline or in the background
checkpoint_saver     save checkpoints
logging              log values and the rate of steps; check for NaN
records              write CSV, JSON lines, or TensorBoard's event files
history              keep values in memory; plot them
progress             show a progress bar, or lines
profiler, timing     profile selected runs; measure the hooks and the event loop
watchdog             report stalls
functions            make hooks of functions or of objects with plain methods
every                when a hook is due
"""

from aiohooks.hooks.checkpoint_saver import CheckpointSaverHook as CheckpointSaverHook
from aiohooks.hooks.checkpoint_saver import CheckpointSaverListener as CheckpointSaverListener
from aiohooks.hooks.evaluator import Evaluation as Evaluation
from aiohooks.hooks.evaluator import EvaluatorHook as EvaluatorHook
from aiohooks.hooks.every import Every as Every
from aiohooks.hooks.every import EveryTimer as EveryTimer
from aiohooks.hooks.functions import BlockingHook as BlockingHook
from aiohooks.hooks.functions import FeedFnHook as FeedFnHook
from aiohooks.hooks.functions import FinalOpsHook as FinalOpsHook
from aiohooks.hooks.functions import LambdaHook as LambdaHook
from aiohooks.hooks.functions import hook as hook
from aiohooks.hooks.global_step_waiter import GlobalStepWaiterHook as GlobalStepWaiterHook
from aiohooks.hooks.history import HistoryHook as HistoryHook
from aiohooks.hooks.logging import LoggingHook as LoggingHook
from aiohooks.hooks.logging import NanHook as NanHook
from aiohooks.hooks.logging import StepCounterHook as StepCounterHook
from aiohooks.hooks.profiler import ProfilerHook as ProfilerHook
from aiohooks.hooks.progress import ProgressHook as ProgressHook
from aiohooks.hooks.records import CSVHook as CSVHook
from aiohooks.hooks.records import JSONLinesHook as JSONLinesHook
from aiohooks.hooks.records import SummarySaverHook as SummarySaverHook
from aiohooks.hooks.stopping import EarlyStoppingHook as EarlyStoppingHook
from aiohooks.hooks.stopping import StopAtStepHook as StopAtStepHook
from aiohooks.hooks.stopping import StopAtTimeHook as StopAtTimeHook
from aiohooks.hooks.timing import Blocker as Blocker
from aiohooks.hooks.timing import HookTimes as HookTimes
from aiohooks.hooks.timing import HookTimingHook as HookTimingHook
from aiohooks.hooks.timing import PhaseTime as PhaseTime
from aiohooks.hooks.version_gate import VersionGateHook as VersionGateHook
from aiohooks.hooks.watchdog import Stall as Stall
from aiohooks.hooks.watchdog import WatchdogHook as WatchdogHook

__all__ = [
    "Blocker",
    "BlockingHook",
    "CSVHook",
    "CheckpointSaverHook",
    "CheckpointSaverListener",
    "EarlyStoppingHook",
    "Evaluation",
    "EvaluatorHook",
    "Every",
    "EveryTimer",
    "FeedFnHook",
    "FinalOpsHook",
    "GlobalStepWaiterHook",
    "HistoryHook",
    "HookTimes",
    "HookTimingHook",
    "JSONLinesHook",
    "LambdaHook",
    "LoggingHook",
    "NanHook",
    "PhaseTime",
    "ProfilerHook",
    "ProgressHook",
    "Stall",
    "StepCounterHook",
    "StopAtStepHook",
    "StopAtTimeHook",
    "SummarySaverHook",
    "VersionGateHook",
    "WatchdogHook",
    "hook",
]

for _name in __all__:
    globals()[_name].__module__ = __name__
del _name
