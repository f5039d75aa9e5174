"""The registry of locks, threads and connections that need care when the process forks."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from typing import Protocol


class ForkAware(Protocol):
    """An object that belongs to the process that made it."""

    def after_fork(self) -> None:
        """Drop references to the parent's resources without using them, in the forked child."""


_objects: weakref.WeakSet[ForkAware] = weakref.WeakSet()
_locks: list[threading.Lock] = []


def call_after_fork(obj: ForkAware) -> None:
    """Call `obj.after_fork()` in each forked child, for as long as `obj` lives."""
    _objects.add(obj)


def hold_during_fork(lock: threading.Lock) -> None:
    """Acquire `lock` before each fork, and release it in parent and child.

    So no child starts in the middle of a locked block.
    """
    _locks.append(lock)


def _before_fork() -> None:
    for lock in _locks:
        lock.acquire()


def _release_locks() -> None:
    for lock in _locks:
        lock.release()


def _in_child() -> None:
    _release_locks()
    for obj in tuple(_objects):
        try:
            obj.after_fork()
        except Exception as error:
            # The other objects are still notified.
            sys.excepthook(type(error), error, error.__traceback__)


# Some systems cannot fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_release_locks,
        after_in_child=_in_child,
    )
