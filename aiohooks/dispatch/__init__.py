"""Registering hooks, and calling a group of hooks as one.

hook        Hook and configure: order, time limit, error handling
calls       calls in order groups: in turn while none suspends, overlapping from then on
"""

from aiohooks.dispatch.hook import HookRegistration

__all__ = ["HookRegistration"]

HookRegistration.__module__ = __name__
