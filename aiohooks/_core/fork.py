"""The registry of locks, threads and connections that need care when the process forks.

A forked child has copies of the parent's locks, held or not, and of its connections, but only the
thread that has forked.

    call_after_fork    lets an object drop the parent's resources in the child
    hold_during_fork   lets no child start in the middle of a locked block
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from typing import Protocol

_CAN_FORK = hasattr(os, "register_at_fork")
"""Whether this system can fork (Windows cannot)."""


class ForkAware(Protocol):
    """An object that belongs to the process that made it."""

    def after_fork(self) -> None:
        """Drop references to the parent's resources without using them, in the forked child."""


_objects: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def call_after_fork(obj: ForkAware) -> None:
    """Call `obj.after_fork()` in each forked child, for as long as `obj` lives."""
    _objects.add(obj)


def hold_during_fork(lock: threading.Lock) -> None:
    """Acquire `lock` before each fork, and release it in parent and child.

    Another thread may hold the lock for a while. Without this, a child that is forked then would
    have a lock that nothing releases. `after_fork` is called while the lock is held.
    """
    if _CAN_FORK:
        os.register_at_fork(
            before=lock.acquire,
            after_in_parent=lock.release,
            after_in_child=lock.release,
        )


def _notify_child() -> None:
    """Call `after_fork` of all objects."""
    # A tuple of strong references, as the set may change when an object is freed.
    for obj in tuple(_objects):
        try:
            obj.after_fork()
        except Exception as error:
            # The error is only reported, so that the other objects are notified, too.
            sys.excepthook(type(error), error, error.__traceback__)


if _CAN_FORK:
    # Functions for the child are called in the order of their registration. This one is registered
    # when the module is imported, before any lock, so it is called before the locks are released.
    os.register_at_fork(after_in_child=_notify_child)
