"""Helpers for tests: a clock set by hand, hooks that record or fail, exploration, checks for hooks,
leaks and stores.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohooks.testing._network import simulated_network
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
    from aiohooks.testing.hook_suite import check_hook, hook_checks
    from aiohooks.testing.hooks import FaultInjectionHook, RecordingHook
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
    "simulated_network",
    "step_store_checks",
    "unreliable",
]

if not TYPE_CHECKING:  # pytest loads this package with the plugin, also where no test asks for it
    from aiohooks._core.lazy import lazy_names

    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "aiohooks.testing.exploration": __all__,  # what is not named below
            "aiohooks.testing._network": ("simulated_network",),
            "aiohooks.testing.clock": ("ManualClock",),
            "aiohooks.testing.hook_suite": ("check_hook", "hook_checks"),
            "aiohooks.testing.hooks": ("FaultInjectionHook", "RecordingHook"),
            "aiohooks.testing.leaks": ("no_leaks",),
            "aiohooks.testing.step_store": ("check_step_store", "step_store_checks"),
        },
    )
    del lazy_names
