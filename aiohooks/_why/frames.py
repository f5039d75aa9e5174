"""The objects whose `with` blocks a suspended task is in, such as the locks that it holds.

Before Python 3.13 a frame keeps the values that its variables had when they were read. So the
variables of user code are not read: coroutines that are suspended show the exits of their blocks to
the garbage collector.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import types
from asyncio import locks
from typing import Any

import anyio

from aiohooks._why.tasks import Task, coroutine_of, is_library, links_of

_EXITS = ("__aexit__", "__exit__")
_CONDITIONS = (locks.Condition, anyio.Condition)
_METHODS = (types.MethodType, types.BuiltinMethodType)


def held_by(task: Task) -> list[Any]:
    """Return the objects whose `with` blocks a suspended task is in."""
    held: list[Any] = []
    links = [*links_of(coroutine_of(task)), (None, None)]
    for (frame, coroutine), (inner, _) in itertools.pairwise(links):
        if frame is None:
            continue
        blocks = _blocks_of(coroutine)
        is_entering = inner is not None and inner.f_code.co_name == "__aenter__"
        if is_entering and blocks:
            blocks.pop()
        for block in blocks:
            held += block
        if frame.f_code.co_name == "wait" and is_library(frame):
            condition: Any = frame.f_locals.get("self")
            if isinstance(condition, _CONDITIONS):
                # It is released until it is notified.
                lock = _lock_of(condition)
                released = (id(condition), id(lock))
                held = [owner for owner in held if id(owner) not in released]
    return held


def _blocks_of(coroutine: object) -> list[list[Any]]:
    """Return a list for each `with` block of a coroutine: its object, and those that this holds."""
    blocks: list[list[Any]] = []
    referents: list[Any] = gc.get_referents(coroutine)
    for referent, following in itertools.pairwise([*referents, None]):
        if inspect.isasyncgen(referent):
            blocks += _blocks_of(referent)
            continue
        if isinstance(referent, _METHODS):
            owner = referent.__self__
        elif isinstance(referent, types.FunctionType):
            # From Python 3.14 on, the object is behind its function.
            owner = following
        else:
            continue
        if referent.__name__ in _EXITS:
            blocks.append([owner, *_held_through(owner)])
    return blocks


def _held_through(owner: Any) -> list[Any]:
    """Return the objects that are held because the block of `owner` is entered."""
    held: list[Any] = []
    if isinstance(owner, _CONDITIONS):
        held.append(_lock_of(owner))
    elif type(owner).__module__ == "contextlib":
        # A function decorated with `contextmanager` or `asynccontextmanager`, or a stack.
        for block in _blocks_of(getattr(owner, "gen", None)):
            held += block
        for _, callback in getattr(owner, "_exit_callbacks", ()):
            if isinstance(callback, types.MethodType):
                held.append(callback.__self__)
    return held


def _lock_of(condition: Any) -> object:
    # Neither asyncio nor anyio has a public way to the lock of a condition.
    return getattr(condition, "_lock", None)
