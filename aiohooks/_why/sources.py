"""The end of a chain of awaits: a group of tasks, the setter of a future, a function, a holder.

A holder is a task that is in a `with` block of a lock or of another object.

asyncio and concurrent.futures have no public way to ask for these. So private attributes, and
variables of their functions, are read here. If a later Python changes a name, the reports have less
in them, and nothing fails.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import os
import threading
import types
from asyncio.subprocess import Process
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any

from aiohooks._core.activity import Awaited, Needs
from aiohooks._why.tasks import (
    PACKAGE,
    Frame,
    Frames,
    Task,
    frames_of,
    frames_of_links,
    is_library,
    is_users,
    links_of,
)

Stacks = Mapping[int, Frame]
"""The innermost frame of each thread, by its ID."""

# -- groups and futures

_GROUPS = {
    "_wait": "fs",  # asyncio.wait
    "wait_for": "fut",  # before Python 3.12
    "TaskGroup.__aexit__": "self._tasks",  # of asyncio and of anyio
    "AsyncIOBackend.run_sync_in_worker_thread": "worker",
    "Thread.join": "self",
    "Future.result": "self",
    "Future.exception": "self",
}
"""The functions of libraries that wait for tasks, futures or threads, each with the variable that
has these, or an attribute of it.
"""
_VARIABLES = {
    "shield.<locals>._outer_done_callback": "inner",
    "_chain_future.<locals>._call_check_cancel": "source",
}
"""The callbacks by which a future sets another one, each with the variable that has the other."""


def group_of(frames: Frames) -> tuple[list[Any], Needs]:
    """Return the tasks, futures or threads that a function of a library waits for together.

    The second result is whether it needs all or any of them. Without such a function in the frames,
    there are none.
    """
    for frame in filter(is_library, frames):
        path = _GROUPS.get(frame.f_code.co_qualname)
        if path is None:
            continue
        # "self._tasks" stands for the attribute `_tasks` of the variable `self`.
        name, _, attribute = path.partition(".")
        group = frame.f_locals.get(name)
        if attribute:
            group = getattr(group, attribute, None)
        if group is None:
            continue
        needs: Needs = "all"
        returns = frame.f_locals.get("return_when", asyncio.ALL_COMPLETED)
        if returns != asyncio.ALL_COMPLETED:
            needs = "any"
        # Some functions wait for a single task or thread.
        if not isinstance(group, set | list):
            group = [group]
        return [*group], needs
    return [], "all"


def sources_of(future: Any, stacks: Stacks) -> list[Any]:
    """Return the tasks, futures, thread or call that will set a future, as far as they are known.

    Args:
        future: a future of asyncio or of `concurrent.futures`. A future that is done has none.
        stacks: the frames of all threads.
    """
    if future.done():
        return []
    if asyncio.isfuture(future):
        # The future that `asyncio.gather` returns has the futures that it gathers.
        children = getattr(future, "_children", ())
        callbacks = getattr(future, "_callbacks", None) or ()
        return [
            *children,
            *_chained(callback for callback, _ in callbacks),
        ]
    # `run_coroutine_threadsafe` has a task in its callback. Any other future is that of a call in
    # an executor.
    return _chained(getattr(future, "_done_callbacks", ())) or [_call_of(future, stacks)]


def _chained(callbacks: Iterable[Any]) -> list[Any]:
    """Return the futures in the closures of the callbacks that `shield` and `wrap_future` add."""
    chained: list[Any] = []
    for callback in callbacks:
        if isinstance(callback, types.FunctionType) and callback.__qualname__ in _VARIABLES:
            variables = inspect.getclosurevars(callback).nonlocals
            name = _VARIABLES[callback.__qualname__]
            chained.append(variables[name])
    return chained


def _call_of(call: Any, stacks: Stacks) -> threading.Thread | Awaited:
    """Return the thread that makes a call of an executor, or else a description of the call.

    Args:
        call: the future of the call.
        stacks: the frames of all threads.
    """
    if not call.running():
        return Awaited(
            "call",
            "a call that has not begun",
            key=call,
        )
    for thread in threading.enumerate():
        for frame in filter(is_library, frames_of(stacks.get(thread.ident or 0))):
            # A thread of an executor is in `run` of a work item, which has the future of its call.
            work_item = frame.f_locals.get("self")
            if frame.f_code.co_name == "run" and getattr(work_item, "future", None) is call:
                return thread
    return Awaited(
        "call",
        "a call that no thread of this process runs",
        key=call,
    )


# -- functions

Holders = Mapping[object, Sequence[Task]]
"""The tasks that are in a `with` block of an object. The keys are the id of the object, for a lock,
and the name of its package, for the connections of a pool.
"""
_OUTER = ("__aenter__", "_bootstrap", "_bootstrap_inner", "run", "_worker")
"""Functions whose names say less than the function that they have called."""


def called_function(
    frames: Frames,
    holders: Holders,
) -> Awaited | None:
    """Return the function of a package or a library that the innermost code of a user has called.

    A library is this one, anyio or Python's standard library. Any other installed code is a
    package. Without such a function, this returns None.

    Args:
        frames: the chain of awaits of a task, or the stack of a thread.
        holders: the tasks that are in `with` blocks, by object and by package.
    """
    function = _library_function(frames, holders)
    foreign_frames = _frames_at_end(
        frames,
        lambda frame: not is_users(frame),
    )
    is_called_by_user = 0 < len(foreign_frames) < len(frames)
    if not is_called_by_user or is_library(foreign_frames[0]):
        return function
    # The user has called a package, such as a pool of connections.
    package, name = _names_of(foreign_frames[0])
    tasks = holders.get(package)
    if not tasks:
        return Awaited(
            "function",
            name,
            by=lambda: [function],
        )
    # Perhaps it waits for these tasks, which use a connection: they are in `with` blocks of objects
    # of the same package. All who wait in this function wait for the same, so its name is the key.
    return Awaited(
        "function",
        name,
        by=lambda: tasks,
        key=name,
        needs="perhaps",
    )


def _library_function(
    frames: Frames,
    holders: Holders,
) -> Awaited | None:
    """Return the function of asyncio, anyio or threading that other code has called.

    A lock is described with its holders, and a process with its state.
    """
    called = _frames_at_end(frames, _is_foreign_library)
    while len(called) > 1 and called[0].f_code.co_name in _OUTER:
        called = called[1:]
    if not called:
        return None
    _, name = _names_of(called[0])
    # Variables are only read in functions of libraries, never in the user's own code.
    owner = called[0].f_locals.get("self")
    if isinstance(owner, Process):
        return Awaited(
            "process",
            f"process {owner.pid}",
            process_state(owner.pid) or "",
        )
    key = f"{id(owner)}.{name}"
    if not name.endswith(".acquire"):
        return Awaited(
            "function",
            name,
            key=key,
        )
    tasks = holders.get(id(owner), ())
    detail = ""
    if not tasks:
        detail = "its holder is not known: no task is in a `with` block of it"
    # A lock has a single holder, so its waiter needs that. Of a semaphore, it is not known which
    # holder releases it first.
    needs: Needs = "perhaps"
    if "Lock" in name:
        needs = "all"
    return Awaited(
        "lock",
        name,
        detail,
        by=lambda: tasks,
        key=key,
        needs=needs,
    )


def _frames_at_end(frames: Frames, includes: Callable[[Frame], bool]) -> Frames:
    """Return the innermost frames, from the last one outwards as long as they are included."""
    return tuple(itertools.takewhile(includes, reversed(frames)))[::-1]


def _is_foreign_library(frame: Frame) -> bool:
    """Return whether a frame is of anyio or Python's standard library, and not of this library."""
    return is_library(frame) and not frame.f_code.co_filename.startswith(PACKAGE)


def _names_of(frame: Frame) -> tuple[str, str]:
    """Return the name of the package of a function, and the function's full name."""
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package, f"{package}.{frame.f_code.co_qualname}"


# -- holders

_EXITS = ("__aexit__", "__exit__")
_FUNCTIONS = (types.MethodType, types.BuiltinMethodType, types.FunctionType)


def holders_among(tasks: Iterable[Task]) -> Holders:
    """Return the tasks that are in a `with` block, by the objects of the blocks."""
    holders: dict[object, list[Task]] = {}
    for task in tasks:
        for owner in held_by(task):
            package = type(owner).__module__.partition(".")[0]
            for key in (id(owner), package):
                holders.setdefault(key, []).append(task)
    return holders


def held_by(task: Task) -> Iterator[Any]:
    """Yield the objects whose `with` blocks a suspended task is in."""
    links = [link for link in links_of(task) if link[0] is not None]
    if not links:
        return
    # The function that each link has called is the next link. The last one has called none.
    called: list[Frame | None] = [*frames_of_links(links[1:]), None]
    for (_, link), function in zip(links, called, strict=True):
        owners = _entered_by(link)
        if function is not None and function.f_code.co_name == "__aenter__":
            # The innermost block of this link is still being entered.
            del owners[-1:]
        while owners:
            owner = owners.pop()
            yield owner
            if type(owner).__module__ == "contextlib":
                # It is a function decorated with `contextmanager` or `asynccontextmanager`, whose
                # generator may be in further blocks.
                owners += _entered_by(getattr(owner, "gen", None))


def _entered_by(suspended: object) -> list[Any]:
    """Return the objects whose `with` blocks a coroutine or a generator is in.

    In a block, Python keeps the object's `__exit__` or `__aexit__`, and the garbage collector shows
    it among the objects to which the coroutine refers. The variables of user code are not read,
    because before Python 3.13 a frame keeps the values that they had then.
    """
    owners: list[Any] = []
    referents: list[Any] = gc.get_referents(suspended)
    for referent, following in itertools.pairwise([*referents, None]):
        if inspect.isasyncgen(referent):
            owners += _entered_by(referent)
        elif isinstance(referent, _FUNCTIONS) and referent.__name__ in _EXITS:
            # From Python 3.14 on, this is a plain function, and the object is the next referent.
            owners.append(getattr(referent, "__self__", following))
    return owners


# -- processes

_STATES = {
    "T": "stopped by a signal; SIGCONT continues it",
    "t": "stopped by a debugger",
    "Z": "ended, and not waited for",
}


def process_state(pid: int) -> str | None:
    """Return why the system does not let a process run, or None if the process can run.

    It is also None on a system that does not show this.
    """
    if not os.path.isdir("/proc/self"):
        return None
    try:
        with open(f"/proc/{pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "does not exist any more"
    except (OSError, IndexError):
        return None
    return _STATES.get(state)
