"""Calling hooks: how one is registered, and how a group of them is called as one."""

from aiohooks.dispatch.hook import HookRegistration as HookRegistration

__all__ = ["HookRegistration"]

HookRegistration.__module__ = __name__
