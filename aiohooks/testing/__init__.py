"""Helpers for tests of hooks and stores: a clock set by hand, hooks that record or fail, checks for hooks, leaks and stores."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiohooks.testing.clock import ManualClock
    from aiohooks.testing.hook_suite import check_hook, hook_checks
    from aiohooks.testing.hooks import FaultInjectionHook, RecordingHook
    from aiohooks.testing.leaks import no_leaks
    from aiohooks.testing.step_store import check_step_store, step_store_checks

__all__ = [
    "FaultInjectionHook",
    "ManualClock",
    "RecordingHook",
    "check_hook",
    "check_step_store",
    "hook_checks",
    "no_leaks",
    "step_store_checks",
]

_MODULE_OF = {
    "FaultInjectionHook": "hooks",
    "ManualClock": "clock",
    "RecordingHook": "hooks",
    "check_hook": "hook_suite",
    "check_step_store": "step_store",
    "hook_checks": "hook_suite",
    "no_leaks": "leaks",
    "step_store_checks": "step_store",
}


if not TYPE_CHECKING:  # or type checkers would take any name for one that exists

    def __getattr__(name: str) -> Any:
        """Import what is used for the first time: pytest loads this package with the plugin, also where it is not used."""
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        public = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        public.__module__ = __name__
        globals()[name] = public
        return public


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
