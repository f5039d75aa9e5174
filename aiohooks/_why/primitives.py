"""What the coroutines of asyncio and anyio wait for: locks, queues, timers, tasks, connections."""

from __future__ import annotations

import asyncio
import asyncio.subprocess
import time
from asyncio import locks, taskgroups
from collections.abc import Callable
from typing import Any

import anyio
import anyio.abc
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from aiohooks._core.clock import secs_text
from aiohooks._core.reports import Awaited, Needs
from aiohooks._why.processes import process_state
from aiohooks._why.tasks import Frame, Frames, Task

_NO_HOLDER = "its holder is not known: no task is in a `with` block of it"
Holders = Callable[[object], list[Task]]
"""Returns the tasks that are in a `with` block of an object."""


def primitive_wait(
    frame: Frame,
    inner: Frames,
    holders_of: Holders,
) -> Awaited | None:
    """Return what a coroutine waits for, given the `inner` frames of its chain of awaits."""
    method = frame.f_code.co_name
    owner: Any = frame.f_locals.get("self")
    if method == "wait" and inner and inner[0].f_code.co_name == "acquire":
        # A condition that was notified waits for its lock.
        return None
    return (
        _holdable(owner, method, holders_of)
        or _stateful(owner, method)
        or _group_wait(frame, owner, method)
        or _outside_wait(frame, owner, method)
    )


def class_name(owner: object) -> str:
    """Return the class of an object, with the package that it comes from: `asyncio.Lock`."""
    kind = type(owner)
    package, _, _ = str(kind.__module__).partition(".")
    return f"{package}.{kind.__qualname__}"


def _holdable(
    owner: Any,
    method: str,
    holders_of: Holders,
) -> Awaited | None:
    """Return a lock or the like, which waits for the tasks that hold it."""
    places: float | None = 1
    detail = "held"
    match owner, method:
        case ((asyncio.Lock() | anyio.Lock()), "acquire"):
            kind = "lock"
        case ((asyncio.Semaphore() | anyio.Semaphore()), "acquire"):
            kind = "semaphore"
            # asyncio has no public way to the number of places.
            places = getattr(owner, "_bound_value", None)
            detail = f"{places} of {places} in use"
            if places is None:
                detail = "none free"
        case anyio.CapacityLimiter(), ("acquire" | "acquire_on_behalf_of"):
            kind = "limiter"
            places = owner.total_tokens
            detail = f"{owner.borrowed_tokens} of {places:g} in use"
        case _:
            return None
    holders = holders_of(owner)
    needs: Needs = "perhaps"
    if len(holders) == places:
        needs = "any"
    return Awaited(
        kind,
        class_name(owner),
        detail,
        by=lambda: holders,
        key=f"{id(owner)}.{method}",
        needs=needs,
        not_found=_NO_HOLDER,
    )


def _stateful(owner: Any, method: str) -> Awaited | None:
    """Return a queue, an event or the like, for which no holder is known."""
    name = class_name(owner)
    key = f"{id(owner)}.{method}"
    match owner, method:
        case asyncio.Queue(), "put":
            state = ("queue", f"full, {owner.qsize()} of {owner.maxsize}")
        case asyncio.Queue(), "get":
            state = ("queue", "empty")
        case asyncio.Queue(), "join":
            count = owner.qsize()
            state = ("queue", f"{count} in it, task_done was not called for every item")
        case ((asyncio.Event() | anyio.Event()), "wait"):
            state = ("event", "not set")
        case ((locks.Condition() | anyio.Condition()), "wait"):
            state = ("condition", "not notified")
        case asyncio.Barrier(), "wait":
            state = ("barrier", f"{owner.n_waiting} of {owner.parties} have arrived")
        case MemoryObjectSendStream(), "send":
            state = ("stream", "full")
        case MemoryObjectReceiveStream(), "receive":
            state = ("stream", "empty")
        case _:
            return None
    kind, detail = state
    return Awaited(
        kind,
        name,
        detail,
        key=key,
    )


def _group_wait(
    frame: Frame,
    owner: Any,
    method: str,
) -> Awaited | None:
    """Return the tasks, futures or threads for which a coroutine waits."""
    variables = frame.f_locals
    needs: Needs = "all"
    match owner, method:
        case _, "_wait" if frame.f_code.co_filename.endswith("tasks.py"):  # of `asyncio.wait`
            awaited = variables.get("fs")
            if variables.get("return_when") != asyncio.ALL_COMPLETED:
                needs = "any"
        case _, "_wait_for_one" if hasattr(owner, "_todo"):  # of `as_completed`, from 3.13 on
            awaited = owner._todo
            needs = "any"
        case _, "wait_for" if asyncio.isfuture(variables.get("fut")):  # before Python 3.12
            awaited = [variables["fut"]]
        case ((taskgroups.TaskGroup() | anyio.abc.TaskGroup()), "__aexit__"):
            # Neither has a public list of its tasks.
            awaited = getattr(owner, "_tasks", None)
        case _, "run_sync_in_worker_thread" if "worker" in variables:  # of `anyio.to_thread`
            awaited = [variables["worker"]]
        case _:
            return None
    targets = list(awaited or ())
    return Awaited("calls", "", by=lambda: targets, needs=needs)


def _outside_wait(
    frame: Frame,
    owner: Any,
    method: str,
) -> Awaited | None:
    """Return the timer, the connection or the process for which a coroutine waits."""
    key = f"{id(owner)}.{method}"
    match owner, method:
        case _, "sleep" if hasattr(frame.f_locals.get("h"), "when"):
            left = frame.f_locals["h"].when() - time.monotonic()
            detail = f"{secs_text(left)} left"
            if left <= 0:
                detail = f"ended {secs_text(-left)} ago"
            return Awaited("timer", "asyncio.sleep", detail)
        case asyncio.subprocess.Process(), ("wait" | "communicate"):
            state = process_state(owner.pid) or ""
            return Awaited(
                "process",
                f"process {owner.pid}",
                state,
                key=key,
            )
        case (asyncio.StreamReader(), "_wait_for_data") | (anyio.abc.SocketStream(), "receive"):
            return Awaited("connection", f"data from {_peer(owner)}", key=key)
        case (asyncio.StreamWriter(), "drain") | (anyio.abc.SocketStream(), "send"):
            return Awaited("connection", f"{_peer(owner)} to read what was sent", key=key)
        case asyncio.AbstractEventLoop(), _ if method.startswith("sock_"):
            connection = frame.f_locals.get("sock")
            return Awaited("connection", f"{method} of {connection!r}")
        case _:
            return None


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
