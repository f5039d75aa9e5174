"""The built-in hooks, one file per family. They know the hook interface and the coordinator, never the session."""

from aiohooks.hooks._evaluation import Evaluation as Evaluation
from aiohooks.hooks._watchdog import Blocker as Blocker
from aiohooks.hooks.blocking import BlockingHook as BlockingHook
from aiohooks.hooks.checkpoint_saver import CheckpointSaverHook as CheckpointSaverHook
from aiohooks.hooks.checkpoint_saver import CheckpointSaverListener as CheckpointSaverListener
from aiohooks.hooks.early_stopping import EarlyStoppingHook as EarlyStoppingHook
from aiohooks.hooks.evaluator import EvaluatorHook as EvaluatorHook
from aiohooks.hooks.feed_fn import FeedFnHook as FeedFnHook
from aiohooks.hooks.final_ops import FinalOpsHook as FinalOpsHook
from aiohooks.hooks.functions import LambdaHook as LambdaHook
from aiohooks.hooks.functions import hook as hook
from aiohooks.hooks.global_step_waiter import GlobalStepWaiterHook as GlobalStepWaiterHook
from aiohooks.hooks.history import HistoryHook as HistoryHook
from aiohooks.hooks.hook_timing import HookTimes as HookTimes
from aiohooks.hooks.hook_timing import HookTimingHook as HookTimingHook
from aiohooks.hooks.hook_timing import PhaseTime as PhaseTime
from aiohooks.hooks.logging import LoggingHook as LoggingHook
from aiohooks.hooks.nan import NanHook as NanHook
from aiohooks.hooks.profiler import ProfilerHook as ProfilerHook
from aiohooks.hooks.progress import ProgressHook as ProgressHook
from aiohooks.hooks.records import CSVHook as CSVHook
from aiohooks.hooks.records import JSONLinesHook as JSONLinesHook
from aiohooks.hooks.step_counter import StepCounterHook as StepCounterHook
from aiohooks.hooks.stop_at_step import StopAtStepHook as StopAtStepHook
from aiohooks.hooks.stop_at_time import StopAtTimeHook as StopAtTimeHook
from aiohooks.hooks.summary_saver import SummarySaverHook as SummarySaverHook
