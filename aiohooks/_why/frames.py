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
from typing import Any

from aiohooks._why.tasks import Task, coroutine_of, links_of

_EXITS = ("__aexit__", "__exit__")
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
            held = [owner]
            if type(owner).__module__ == "contextlib":
                # A function decorated with `contextmanager` or `asynccontextmanager`.
                held += itertools.chain.from_iterable(_blocks_of(getattr(owner, "gen", None)))
            blocks.append(held)
    return blocks
