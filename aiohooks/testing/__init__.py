"""Helpers for tests of hooks and stores: a clock set by hand, hooks that record or fail, checks for leaks, and for stores."""

from aiohooks.testing.clock import ManualClock
from aiohooks.testing.hooks import FaultInjectionHook, RecordingHook
from aiohooks.testing.leaks import no_leaks
from aiohooks.testing.step_store import check_step_store, step_store_checks

__all__ = ["FaultInjectionHook", "ManualClock", "RecordingHook", "check_step_store", "no_leaks", "step_store_checks"]

for _name in __all__:
    globals()[_name].__module__ = __name__
