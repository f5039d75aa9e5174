"""Calling several hooks as one, with or without a session.

hook        what a registration says: order, time limit, error handling, background calls
calls       calls in order groups: those that cannot wait in turn, the others overlapping
background  calls that are queued and run beside what follows
lifecycle   the methods of a class that hooks can implement, and the checks of hooks
answers     one answer of several hooks, for each kind of method
group       HookGroup and compose: one object that stands for several hooks
"""

from aiohooks.dispatch.group import HookGroup, HookStatus, compose
from aiohooks.dispatch.hook import Hook, HookRegistration, configure, in_order
from aiohooks.dispatch.lifecycle import point

__all__ = ["Hook", "HookGroup", "HookRegistration", "HookStatus", "compose", "configure", "in_order", "point"]

for _each in (Hook, HookGroup, HookRegistration, HookStatus, compose, configure, in_order, point):
    _each.__module__ = __name__
del _each
