"""The functions of asyncio, anyio and threading in which tasks and threads wait, by their names."""

from __future__ import annotations

import asyncio
import itertools
from asyncio.subprocess import Process
from collections.abc import Callable
from typing import Any

from aiohooks._core.activity import Awaited, Needs
from aiohooks._why.processes import process_state
from aiohooks._why.tasks import Frame, Frames, Task, is_installed, is_library, is_of_aiohooks

Holders = Callable[[object], list[Task]]
_OUTER = ("__aenter__", "_bootstrap", "_bootstrap_inner", "run", "_worker")
"""Functions that say less than the one that they have called."""
_NO_HOLDER = "its holder is not known: no task is in a `with` block of it"


def called_function(frames: Frames, holders_of: Holders) -> Awaited | None:
    """Return the function of a package or a library that the innermost code of a user has called.

    Args:
        frames: the chain of awaits of a task, or the stack of a thread.
        holders_of: returns the tasks that are in a `with` block of an object, or of any object of a
            package, which is given by its name.
    """
    called = _innermost(frames, lambda frame: is_library(frame) or is_installed(frame))
    primitive = _library_function(frames, holders_of)
    if not called or called == frames or is_library(called[0]):
        return primitive
    # A pool of connections, for example: the tasks that use its connections are in its blocks.
    package, name = _names_of(called[0])
    holders = holders_of(package)
    if holders:
        return Awaited("function", name, by=lambda: holders, needs="perhaps")
    return Awaited("function", name, by=lambda: [primitive])


def _innermost(frames: Frames, includes: Callable[[Frame], bool]) -> Frames:
    """Return the frames at the end that are all included."""
    reversed_frames = itertools.takewhile(includes, reversed(frames))
    return tuple(reversed_frames)[::-1]


def _names_of(frame: Frame) -> tuple[str, str]:
    """Return the package of a function, and its own name with that."""
    package, _, _ = str(frame.f_globals.get("__name__")).partition(".")
    return package, f"{package}.{frame.f_code.co_qualname}"


def _library_function(frames: Frames, holders_of: Holders) -> Awaited | None:
    """Return the function of asyncio, anyio or threading that other code has called."""
    called = _innermost(
        frames, lambda frame: is_library(frame) and not is_of_aiohooks(frame.f_code)
    )
    while len(called) > 1 and called[0].f_code.co_name in _OUTER:
        called = called[1:]
    if not called:
        return None
    _, name = _names_of(called[0])
    # Variables are only read in functions of libraries, never in the user's own code.
    owner = called[0].f_locals.get("self")
    if owner is None:
        return Awaited("function", name)
    if isinstance(owner, Process):
        return Awaited("process", f"process {owner.pid}", process_state(owner.pid) or "")
    key = f"{id(owner)}.{name}"
    if not name.endswith(".acquire"):
        return Awaited("function", name, key=key)
    holders = holders_of(owner)
    detail = "" if holders else _NO_HOLDER
    needs: Needs = "all" if "Lock" in name else "perhaps"
    return Awaited("lock", name, detail, by=lambda: holders, key=key, needs=needs)


def awaited_group(frames: Frames) -> tuple[list[Any], Needs]:
    """Return the tasks, futures or threads that a function of a library waits for together."""
    for frame in frames:
        if not is_library(frame):
            continue
        variables = frame.f_locals
        owner = variables.get("self")
        match frame.f_code.co_qualname:
            case "_wait" if variables.get("return_when") == asyncio.ALL_COMPLETED:
                return [*variables["fs"]], "all"
            case "_wait" if "return_when" in variables:
                return [*variables["fs"]], "any"
            case "_AsCompletedIterator._wait_for_one":  # from Python 3.13 on
                return [*getattr(owner, "_todo", ())], "any"
            case "wait_for" if asyncio.isfuture(variables.get("fut")):  # before Python 3.12
                return [variables["fut"]], "all"
            case "TaskGroup.__aexit__":
                # Neither asyncio's nor anyio's has a public list of its tasks.
                return [*getattr(owner, "_tasks", ())], "all"
            case "Thread.join" | "Future.result" | "Future.exception":
                return [owner], "all"
            case "AsyncIOBackend.run_sync_in_worker_thread" if "worker" in variables:
                return [variables["worker"]], "all"
            case _:
                pass
    return [], "all"
