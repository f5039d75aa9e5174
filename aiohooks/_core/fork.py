"""The registry of locks, threads and connections that need care when the process forks."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from typing import Protocol

_CAN_FORK = hasattr(os, "register_at_fork")
"""Whether this system can fork."""


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

    So no child starts in the middle of a locked block. `after_fork` is called under the lock.
    """
    if _CAN_FORK:
        os.register_at_fork(
            before=lock.acquire,
            after_in_parent=lock.release,
            after_in_child=lock.release,
        )


def _notify_child() -> None:
    for obj in tuple(_objects):
        try:
            obj.after_fork()
        except Exception as error:
            # The other objects are still notified.
            sys.excepthook(type(error), error, error.__traceback__)


if _CAN_FORK:
    # Before the locks are released, as the functions of a child are called in the order in which
    # they were registered.
    os.register_at_fork(after_in_child=_notify_child)
