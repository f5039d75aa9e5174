"""The built-in hooks, one file per family.

They use the hook interface and the coordinator, and never the session.

stopping             stop at a step, at a time, or when a value no longer improves
waiting              wait for a global step
evaluator            evaluate during training, inline or in the background
checkpoint_saver     save checkpoints
effects              deliver messages and other actions of steps that can no longer be undone
logging              log values and the rate of steps; check for NaN
records              write JSON lines, and event files for TensorBoard
progress             show a progress bar
profiler, timing     write traces of selected runs; measure the hooks and the event loop
watchdog             report stalls
functions            make hooks of functions
blocking             make hooks of objects with plain methods
every                when a hook is due

A hook measures time by `current_clock()`, which a test can set by hand.
"""

from aiohooks._core.clock import Clock, current_clock
from aiohooks.hooks.blocking import BlockingHook
from aiohooks.hooks.checkpoint_saver import CheckpointSaverHook, CheckpointSaverListener
from aiohooks.hooks.effects import Effect, EffectsHook
from aiohooks.hooks.evaluator import Evaluation, EvaluatorHook
from aiohooks.hooks.every import Every, EveryTimer
from aiohooks.hooks.functions import FeedFnHook, FinalOpsHook, LambdaHook, hook
from aiohooks.hooks.logging import LoggingHook, NanHook, StepCounterHook
from aiohooks.hooks.profiler import ProfilerHook
from aiohooks.hooks.progress import ProgressHook
from aiohooks.hooks.records import JSONLinesHook, SummarySaverHook, read_records
from aiohooks.hooks.stopping import EarlyStoppingHook, StopAtStepHook, StopAtTimeHook
from aiohooks.hooks.timing import Blocker, HookTimes, HookTimingHook, PhaseTime
from aiohooks.hooks.waiting import GlobalStepWaiterHook
from aiohooks.hooks.watchdog import Stall, WatchdogHook

__all__ = [
    "Blocker",
    "BlockingHook",
    "CheckpointSaverHook",
    "CheckpointSaverListener",
    "Clock",
    "EarlyStoppingHook",
    "Effect",
    "EffectsHook",
    "Evaluation",
    "EvaluatorHook",
    "Every",
    "EveryTimer",
    "FeedFnHook",
    "FinalOpsHook",
    "GlobalStepWaiterHook",
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
    "WatchdogHook",
    "current_clock",
    "hook",
    "read_records",
]

for _name in __all__:
    globals()[_name].__module__ = __name__
