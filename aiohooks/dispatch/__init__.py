"""Calling several hooks as one, with or without a session.

hook        what a registration says: order, time limit, error handling, background calls
calls       calls in order groups: those that cannot wait in turn, the others concurrently
background  calls that are queued and run beside what follows
lifecycle   hook interfaces: the methods of a class that hooks can implement, and the checks of
            hooks
answers     one result of several hooks, for each kind of method
plain       plain functions where coroutine functions are called
composite   the object that stands for the hooks of a group
group       HookGroup and compose: one object that stands for several hooks; compose_functions
"""

from aiohooks.dispatch.calls import HookStatus
from aiohooks.dispatch.group import ComposedFunctions, HookGroup, compose, compose_functions
from aiohooks.dispatch.hook import Hook, HookRegistration, configure, in_order
from aiohooks.dispatch.lifecycle import chain, point, wrap

__all__ = [
    "ComposedFunctions",
    "Hook",
    "HookGroup",
    "HookRegistration",
    "HookStatus",
    "chain",
    "compose",
    "compose_functions",
    "configure",
    "in_order",
    "point",
    "wrap",
]

for _name in __all__:
    if _name != "ComposedFunctions":
        globals()[_name].__module__ = __name__
