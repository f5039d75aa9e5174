"""Calling several hooks as one, with or without a session.

hook        registrations of hooks: order, time limit, error handling, background calls
points      a method of an interface, the arguments of its calls, and its mode: how the results of
            several hooks become one
interface   hook interfaces: the methods of a class that hooks can implement, and checks of hooks
calls       the calls of one method, in groups of hooks of one order: calls that cannot wait are
            made one after another, the others run concurrently
background  calls that are queued and run alongside the code that follows
answers     the calls of a method for all its hooks, and their one result
composite   the object that stands for the hooks of a group
group       HookGroup, compose and compose_functions: one object that stands for several hooks
"""

from aiohooks.dispatch.calls import HookStatus
from aiohooks.dispatch.group import ComposedFunctions, HookGroup, compose, compose_functions
from aiohooks.dispatch.hook import Hook, HookRegistration, configure, in_order
from aiohooks.dispatch.points import chain, end_chain, point, wrap

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
    "end_chain",
    "in_order",
    "point",
    "wrap",
]

for _name in __all__:
    if _name != "ComposedFunctions":
        globals()[_name].__module__ = __name__
