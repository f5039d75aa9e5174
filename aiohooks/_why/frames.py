"""The objects whose `with` blocks a suspended task is in, such as the locks that it holds.

Before Python 3.13 a frame keeps the values that its variables had when they were read. So the
variables of user code are not read: coroutines that are suspended show the exits of their blocks to
the garbage collector.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import types
from asyncio import locks
from typing import Any

import anyio

from aiohooks._why.tasks import coroutine_of, is_library, links_of

_EXITS = ("__aexit__", "__exit__")
_CONDITIONS = (locks.Condition, anyio.Condition)
# From Python 3.14 on a coroutine keeps the function and, behind it, the object.
_FUNCTIONS = (types.MethodType, types.BuiltinMethodType, types.FunctionType)


def held_by(task: asyncio.Task[Any]) -> list[Any]:
    """Return the objects whose `with` blocks a suspended task is in."""
    held: list[Any] = []
    links = [(frame, link) for frame, link in links_of(coroutine_of(task)) if frame is not None]
    for (frame, coroutine), inner in itertools.zip_longest(links, links[1:]):
        blocks = _blocks_of(coroutine)
        if blocks and inner is not None and getattr(inner[1], "__name__", "") == "__aenter__":
            blocks.pop()  # the task still waits to enter it
        held += itertools.chain.from_iterable(blocks)
        if frame.f_code.co_name == "wait" and is_library(frame):
            condition: Any = frame.f_locals.get("self")
            if isinstance(condition, _CONDITIONS):
                released = (id(condition), id(_lock_of(condition)))
                held = [owner for owner in held if id(owner) not in released]
    return held


def _blocks_of(coroutine: object) -> list[list[Any]]:
    """Return a list for each `with` block of a coroutine: its object, and those that this holds."""
    blocks: list[list[Any]] = []
    referents: list[Any] = gc.get_referents(coroutine)
    for referent, following in itertools.zip_longest(referents, referents[1:]):
        if inspect.isasyncgen(referent):
            blocks += _blocks_of(referent)
        elif isinstance(referent, _FUNCTIONS) and referent.__name__ in _EXITS:
            owner: Any = following
            if not isinstance(referent, types.FunctionType):
                owner = referent.__self__
            blocks.append([owner, *_held_through(owner)])
    return blocks


def _held_through(owner: Any) -> list[Any]:
    """Return the objects that are held because the block of `owner` is entered."""
    if isinstance(owner, _CONDITIONS):
        return [_lock_of(owner)]
    if type(owner).__module__ != "contextlib":
        return []
    # A function that was decorated with `contextmanager` or `asynccontextmanager`, or a stack.
    held = list(itertools.chain.from_iterable(_blocks_of(getattr(owner, "gen", None))))
    for _, callback in getattr(owner, "_exit_callbacks", ()):
        if isinstance(callback, types.MethodType):
            held.append(callback.__self__)
    return held


def _lock_of(condition: Any) -> object:
    # Neither asyncio nor anyio has a public way to the lock of a condition.
    return getattr(condition, "_lock", None)
