"""Registering hooks, and calling a group of hooks as one."""

from aiohooks.dispatch.hook import HookRegistration as HookRegistration

__all__ = ["HookRegistration"]

HookRegistration.__module__ = __name__
