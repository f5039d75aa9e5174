"""The functions of asyncio, anyio and threading in which tasks and threads wait, by their names."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import Process
from collections.abc import Callable
from typing import Any

from aiohooks._core.activity import Awaited, Needs
from aiohooks._why.processes import process_state
from aiohooks._why.tasks import Frames, Task, is_library, is_of_aiohooks

_OUTER = ("__aenter__", "_bootstrap", "_bootstrap_inner", "run", "_worker")
"""Functions that say less than the one that they have called."""
_NO_HOLDER = "its holder is not known: no task is in a `with` block of it"


def called_function(
    frames: Frames,
    holders_of: Callable[[object], list[Task]],
) -> Awaited | None:
    """Return the function of a library that the code of a user or of this library has called.

    Args:
        frames: the chain of awaits of a task, or the stack of a thread.
        holders_of: returns the tasks that are in a `with` block of an object.
    """
    called: Frames = ()
    for frame in reversed(frames):
        if not is_library(frame) or is_of_aiohooks(frame.f_code):
            break
        called = (frame, *called)
    while len(called) > 1 and called[0].f_code.co_name in _OUTER:
        called = called[1:]
    if not called:
        return None
    function = called[0].f_code.co_qualname
    package, _, _ = str(called[0].f_globals.get("__name__")).partition(".")
    name = f"{package}.{function}"
    # Variables are only read in functions of libraries, never in the user's own code.
    owner = called[0].f_locals.get("self")
    if owner is None:
        return Awaited("function", name)
    if isinstance(owner, Process):
        return Awaited("process", f"process {owner.pid}", process_state(owner.pid) or "")
    key = f"{id(owner)}.{function}"
    if not function.endswith(".acquire"):
        return Awaited("function", name, key=key)
    holders = holders_of(owner)
    detail = "" if holders else _NO_HOLDER
    needs: Needs = "all" if "Lock" in function else "perhaps"
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
