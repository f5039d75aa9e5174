"""What the functions of asyncio, anyio and threading wait for: locks, queues, timers, tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from aiohooks._core.activity import Awaited, Needs
from aiohooks._core.clock import secs_text
from aiohooks._why.processes import process_state
from aiohooks._why.tasks import Frame, Frames, Task

Holders = Callable[[object], list[Task]]
"""Returns the tasks that are in a `with` block of an object."""
_PACKAGES = ("anyio", "asyncio", "concurrent", "queue", "threading")
"""The packages of the functions below: others have functions of the same names."""
_NO_HOLDER = "its holder is not known: no task is in a `with` block of it"
_HELD = {
    "Lock.acquire": "lock",
    "LockAdapter.acquire": "lock",
    "Semaphore.acquire": "semaphore",
    "SemaphoreAdapter.acquire": "semaphore",
    "CapacityLimiter.acquire": "limiter",
    "CapacityLimiter.acquire_on_behalf_of": "limiter",
    "CapacityLimiterAdapter.acquire": "limiter",
    "CapacityLimiterAdapter.acquire_on_behalf_of": "limiter",
}
"""The kinds of the objects that tasks hold, by the functions that wait for them."""
_STATES = {
    "Queue.put": ("queue", "full, {0.maxsize} of {0.maxsize}"),
    "Queue.get": ("queue", "empty"),
    "Queue.join": ("queue", "{size} in it, task_done was not called for every item"),
    "Event.wait": ("event", "not set"),
    "Condition.wait": ("condition", "not notified"),
    "Barrier.wait": ("barrier", "{0.n_waiting} of {0.parties} have arrived"),
    "MemoryObjectSendStream.send": ("stream", "full"),
    "MemoryObjectReceiveStream.receive": ("stream", "empty"),
}
"""The kinds of the other objects and their states, by the functions that wait for them."""


def primitive_wait(
    frame: Frame,
    inner: Frames,
    holders_of: Holders,
) -> Awaited | None:
    """Return what a function of a library waits for, given the frames that it has called."""
    if _package(frame.f_globals.get("__name__")) not in _PACKAGES:
        return None
    function = frame.f_code.co_qualname
    variables = frame.f_locals
    owner = variables.get("self")
    if function in _HELD:
        return _held(function, owner, holders_of)
    if function in _STATES:
        if inner and inner[0].f_code.co_name == "acquire":
            # A condition that was notified waits for its lock.
            return None
        kind, detail = _STATES[function]
        return Awaited(
            kind,
            class_name(owner),
            detail.format(owner, size=_size(owner)),
            key=f"{id(owner)}.{function}",
        )
    return _group(function, variables) or _outside(function, variables)


def class_name(owner: object) -> str:
    """Return the class of an object, with the package that it comes from: `asyncio.Lock`."""
    kind = type(owner)
    return f"{_package(kind.__module__)}.{kind.__qualname__}"


def _package(module: object) -> str:
    """Return the package of the name of a module."""
    package, _, _ = str(module).partition(".")
    return package


def _size(owner: Any) -> int:
    """Return how many items are in a queue; 0 for other objects."""
    if isinstance(owner, asyncio.Queue):
        return owner.qsize()
    # `qsize` of a queue of threads takes a lock, which the code that a signal has interrupted may
    # hold.
    return len(getattr(owner, "queue", ()))


def _held(
    function: str,
    owner: Any,
    holders_of: Holders,
) -> Awaited:
    """Return a lock or the like, which waits for the tasks that hold it."""
    kind = _HELD[function]
    places: float | None = 1
    detail = "held"
    if kind == "semaphore":
        # asyncio has no public way to the number of places.
        places = getattr(owner, "_bound_value", None)
        detail = "none free"
        if places is not None:
            detail = f"{places} of {places} in use"
    elif kind == "limiter":
        places = owner.total_tokens
        detail = f"{owner.borrowed_tokens} of {places:g} in use"
    holders = holders_of(owner)
    needs: Needs = "perhaps"
    if len(holders) == places:
        needs = "any"
    if not holders:
        detail = f"{detail}, {_NO_HOLDER}"
    return Awaited(
        kind,
        class_name(owner),
        detail,
        by=lambda: holders,
        key=f"{id(owner)}.{kind}",
        needs=needs,
    )


def _group(function: str, variables: dict[str, Any]) -> Awaited | None:
    """Return the tasks, futures or threads for which a function waits."""
    owner = variables.get("self")
    needs: Needs = "all"
    match function:
        case "_wait":  # of `asyncio.wait`
            awaited = variables.get("fs")
            if variables.get("return_when") != asyncio.ALL_COMPLETED:
                needs = "any"
        case "_AsCompletedIterator._wait_for_one":  # from Python 3.13 on
            awaited = getattr(owner, "_todo", None)
            needs = "any"
        case "wait_for" if asyncio.isfuture(variables.get("fut")):  # before Python 3.12
            awaited = [variables["fut"]]
        case "TaskGroup.__aexit__":
            # Neither asyncio's nor anyio's has a public list of its tasks.
            awaited = getattr(owner, "_tasks", None)
        case "AsyncIOBackend.run_sync_in_worker_thread" if "worker" in variables:
            awaited = [variables["worker"]]
        case "Thread.join" | "Future.result" | "Future.exception":
            awaited = [owner]
        case _:
            return None
    targets = list(awaited or ())
    return Awaited("calls", "", by=lambda: targets, needs=needs)


def _outside(function: str, variables: dict[str, Any]) -> Awaited | None:
    """Return the timer, the connection or the process for which a coroutine waits."""
    owner: Any = variables.get("self")
    kind = "connection"
    detail = ""
    match function:
        case "sleep" if hasattr(variables.get("h"), "when"):
            kind = "timer"
            name = "asyncio.sleep"
            left = variables["h"].when() - time.monotonic()
            detail = f"{secs_text(left)} left"
            if left <= 0:
                detail = f"ended {secs_text(-left)} ago"
            owner = variables["h"]
        case "Process.wait" | "Process.communicate":
            kind = "process"
            name = f"process {owner.pid}"
            detail = process_state(owner.pid) or ""
        case "StreamReader._wait_for_data" | "SocketStream.receive" | "UNIXSocketStream.receive":
            name = f"data from {_peer(owner)}"
        case "StreamWriter.drain" | "SocketStream.send" | "UNIXSocketStream.send":
            name = f"{_peer(owner)} to read what was sent"
        case _ if ".sock_" in function and "sock" in variables:
            owner = variables["sock"]
            _, _, method = function.rpartition(".")
            name = f"{method} of {owner!r}"
        case _:
            return None
    return Awaited(
        kind,
        name,
        detail,
        key=f"{id(owner)}.{function}",
    )


def _peer(stream: Any) -> str:
    """Return the other end of a stream."""
    # A reader has no public way to its transport.
    transport = getattr(stream, "_transport", None)
    if transport is None:
        return "a connection"
    peer = transport.get_extra_info("peername")
    if isinstance(peer, tuple):
        return f"{peer[0]}:{peer[1]}"
    if not peer and transport.get_extra_info("pipe"):
        return "a pipe"
    return str(peer or "a connection")
