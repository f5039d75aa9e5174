"""Helpers for tests: a clock set by hand, hooks that record or fail, exploration, checks for hooks,
leaks and stores.
"""

from aiohooks.testing.clock import ManualClock
from aiohooks.testing.exploration import (
    ExplorationError,
    Explored,
    always,
    choose,
    explore,
    may_happen,
    unreliable,
)
from aiohooks.testing.hook_suite import FaultInjectionHook, RecordingHook, check_hook, hook_checks
from aiohooks.testing.leaks import no_leaks
from aiohooks.testing.step_store import check_step_store, step_store_checks

__all__ = [
    "ExplorationError",
    "Explored",
    "FaultInjectionHook",
    "ManualClock",
    "RecordingHook",
    "always",
    "check_hook",
    "check_step_store",
    "choose",
    "explore",
    "hook_checks",
    "may_happen",
    "no_leaks",
    "step_store_checks",
    "unreliable",
]
