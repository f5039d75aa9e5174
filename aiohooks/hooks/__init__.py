"""The built-in hooks, one file per family. They know the hook interface and the coordinator, never the session."""

from aiohooks.hooks.blocking import BlockingHook as BlockingHook
from aiohooks.hooks.feed_fn import FeedFnHook as FeedFnHook
from aiohooks.hooks.final_ops import FinalOpsHook as FinalOpsHook
from aiohooks.hooks.global_step_waiter import GlobalStepWaiterHook as GlobalStepWaiterHook
from aiohooks.hooks.logging import LoggingHook as LoggingHook
from aiohooks.hooks.nan import NanHook as NanHook
from aiohooks.hooks.step_counter import StepCounterHook as StepCounterHook
from aiohooks.hooks.stop_at_step import StopAtStepHook as StopAtStepHook
