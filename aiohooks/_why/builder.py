"""Makes the wait-for graph of what exists at this moment: nothing is noted while a program runs.

For reports, as in `_why.tasks`: nothing is decided by what is found here.
"""

from __future__ import annotations

import asyncio
import asyncio.subprocess
import concurrent.futures
import dataclasses
import functools
import inspect
import itertools
import os
import queue
import re
import sys
import threading
import time
import types
from asyncio import locks, taskgroups
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import anyio
import anyio.abc
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from aiohooks._core.clock import secs_text
from aiohooks._core.reports import Awaited, Needs
from aiohooks._why.frames import attribute, entered, expression, held_by, position, value_of
from aiohooks._why.graph import WaitEdge, WaitGraph, WaitNode
from aiohooks._why.processes import process_state
from aiohooks._why.tasks import (
    PACKAGE,
    awaited_in,
    coroutine_of,
    frames_of,
    is_library,
    is_task,
    links_of,
)
from aiohooks.errors import printable

_MOST_TASKS, _MOST_DETAIL = 10_000, 1_000
_IN_SHORT = 100
"""How many tasks are searched for a note of an error: others may end with an error in the same
tick.
"""
_made: deque[float] = deque(maxlen=20)
"""When the last notes were made."""
_THREAD_LOCKS = type(threading.Lock()), type(threading.RLock())
_SOURCES = {
    "shield.<locals>._outer_done_callback": "inner",
    "_chain_future.<locals>._call_check_cancel": "source",
}
"""The variable of a callback that has what sets its future; others have the task that awaits that
(Python 3.14).
"""
_NO_HOLDER = "its holder is not known: no task is in a `with` block of it"
_INSTALLED = f"-packages{os.sep}"  # "site-", or "dist-" of a Linux distribution


def wait_graph(
    loops: Iterable[asyncio.AbstractEventLoop] = (),
    *,
    also: Iterable[object] = (),
    blocked: Mapping[asyncio.AbstractEventLoop, types.FrameType] = types.MappingProxyType({}),
) -> WaitGraph:
    """Return the wait-for graph of all tasks of these loops, and of what is `also` given.

    The loops are of this thread, or do not run meanwhile; those that cannot run are in `blocked`
    with what their threads run.
    """
    builder = _Builder(loops, blocked, _MOST_TASKS)
    return builder.build([*also, *builder.tasks])


def threads() -> list[threading.Thread]:
    """Return the threads."""
    # `threading.enumerate` takes a lock, which the code that a signal has interrupted may hold.
    return [*getattr(threading, "_active", {}).values()]


def why(*waited_for: object) -> str:
    """Return in one line what these tasks wait for, or what these things depend on; for the notes
    of errors.

    Of thousands that end together the first ones of each second have it.
    """
    now = time.monotonic()
    if len(_made) == _made.maxlen and now - _made[0] < 1.0:
        return ""
    _made.append(now)
    try:
        graph = _Builder([asyncio.get_running_loop()], {}, _IN_SHORT).build(waited_for)
        return "; ".join(graph.lines()[:3]) if graph.edges else ""
    except Exception as error:  # the error that is to have this note is raised all the same
        return f"what it waited for could not be found out: {error!r}"


class _Builder:
    """Makes one graph. What has been looked at is kept until then, so that ids stay unique."""

    def __init__(
        self,
        loops: Iterable[asyncio.AbstractEventLoop],
        blocked: Mapping[asyncio.AbstractEventLoop, types.FrameType],
        most: int,
    ) -> None:
        self._loops, self._most = loops, most
        self._running = {asyncio.current_task(loop): frame for loop, frame in blocked.items()}
        self._stacks = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        self._ids: dict[object, str] = {}  # by their keys
        self._kept: list[object] = []
        self._nodes: dict[str, WaitNode] = {}
        self._edges: dict[tuple[str, str], Needs] = {}
        self._ahead: deque[Callable[[], object]] = deque()
        self._searches: deque[Callable[[], object]] = deque()

    @functools.cached_property
    def tasks(self) -> list[asyncio.Task[Any]]:
        return [
            *itertools.islice(
                itertools.chain.from_iterable(map(asyncio.all_tasks, self._loops)), self._most
            )
        ]

    def build(self, things: Iterable[object]) -> WaitGraph:
        self._targets_of(things)
        while self._ahead or self._searches:
            (self._ahead or self._searches).popleft()()
        self._merge_tasks_of_sessions()
        return WaitGraph(
            tuple(self._nodes.values()),
            tuple(WaitEdge(*ids, needs) for ids, needs in self._edges.items()),
        )

    def _merge_tasks_of_sessions(self) -> None:
        """Let a session stand for the task that runs it, if nothing waits for that task."""
        awaited = {one for _, one in self._edges}
        for waiter, session in [*self._edges]:
            task = self._nodes[waiter]
            if (
                task.kind == "task"
                and self._nodes[session].kind == "session"
                and waiter not in awaited
            ):
                self._change(session, function=task.function, where=task.where)
                del self._nodes[waiter], self._edges[waiter, session]

    # -- nodes and edges

    def _add(
        self,
        key: object,
        kind: str,
        name: str,
        expand: Callable[[str], object],
        *,
        is_search: bool = False,
        **more: Any,
    ) -> str:
        """Return the id of a node; one that is new is expanded later, by a search when the rest is
        known.
        """
        if not isinstance(key, str):
            self._kept.append(key)
            key = id(key)
        if key not in self._ids:
            node = self._ids[key] = key if isinstance(key, str) else str(len(self._ids))
            self._nodes[node] = WaitNode(node, kind, name, **more)
            (self._searches if is_search else self._ahead).append(lambda: expand(node))
        return self._ids[key]

    def _change(self, node: str, **changes: Any) -> None:
        self._nodes[node] = dataclasses.replace(self._nodes[node], **changes)

    def _connect(self, waiter: str, awaited: Iterable[str], needs: Needs = "all") -> bool:
        ids = [*awaited]
        if (
            needs == "any" and len(ids) == 1 and self._nodes[waiter].kind != "session"
        ):  # which other tasks may run
            needs = "all"
        for one in ids:
            self._edges.setdefault((waiter, one), needs)
        return bool(ids)

    def _targets(self, thing: Any) -> list[str]:
        """Return the nodes of something that is waited for."""
        if isinstance(thing, Awaited):
            return [self._add_awaited(thing)]
        if isinstance(thing, threading.Thread):
            return [] if thing.ident is None else [self._add_thread(thing.ident)]
        if isinstance(thing, concurrent.futures.Future):
            return self._of_executor(thing)  # pyright: ignore[reportUnknownArgumentType]
        if not asyncio.isfuture(thing) or thing.done():
            return []
        if is_task(thing):
            return [self._add_task(thing)]
        # What sets a future that is no task; asyncio has no public way to ask for that.
        found = [*(getattr(thing, "_children", None) or ())]  # of `asyncio.gather`
        found += _sources(callback for callback, _ in getattr(thing, "_callbacks", None) or ())
        return self._targets_of(found)

    def _targets_of(self, things: Iterable[Any]) -> list[str]:
        return [*itertools.chain.from_iterable(map(self._targets, things))]

    def _add_awaited(self, one: Awaited) -> str:
        if is_task(one.key):
            node = self._add_task(one.key)
            self._change(node, kind=one.kind, name=printable(one.name), secs=one.secs)
            return node

        def connect(node: str) -> None:
            if one.kind == "session" and any(waiter == node for waiter, _ in self._edges):
                return  # it is in a run; otherwise it waits for what its block does
            found = self._connect(node, self._targets_of(one.by()), one.needs)
            if not found and one.not_found:
                self._change(
                    node, detail=", ".join(filter(None, (self._nodes[node].detail, one.not_found)))
                )

        key, detail = one if one.key is None else one.key, printable(one.detail, _MOST_DETAIL)
        more: dict[str, Any] = {
            "detail": detail,
            "secs": one.secs,
            "is_search": one.not_found is not None,
        }
        return self._add(key, one.kind, printable(one.name), connect, **more)

    def _add_task(self, task: asyncio.Task[Any]) -> str:
        code = getattr(coroutine_of(task), "cr_code", None)
        is_internal = (
            code is not None
            and code.co_filename.startswith(PACKAGE)
            and code.co_name.startswith("_")
        )
        kind = "internal task" if is_internal else "task"
        return self._add(
            task,
            kind,
            f"task {printable(task.get_name())!r}",
            lambda node: self._expand_task(task, node),
        )

    # -- chains of awaits

    def _expand_task(self, task: asyncio.Task[Any], node: str) -> None:
        if task in self._running:
            frames = frames_of(self._running[task], in_loop=True)
            node, complete = self._walk(node, frames)
            self._change(node, detail="runs; the event loop waits for it")
            if not complete:
                self._expand_running(node, frames)
            return
        links = [*links_of(coroutine_of(task))]
        node, complete = self._walk(node, [frame for frame, _ in links if frame is not None])
        if links and not complete:
            self._connect(node, self._targets(links[-1][1]))

    def _walk(self, node: str, frames: Sequence[types.FrameType]) -> tuple[str, bool]:
        """Add what has a name in a chain of awaits; return the last node, and whether the end of
        the chain is known.
        """
        part: list[types.FrameType] = []
        for frame in frames:
            part.append(frame)
            if (awaited := _awaited_by(frame, part, self)) is None:
                continue
            self._place(node, part[:-1] or part)
            if isinstance(awaited, Awaited) and awaited.kind == "calls":
                if isinstance(awaited.key, Awaited):
                    session = self._add_awaited(awaited.key)
                    self._connect(node, [session])
                    node = session
                self._connect(node, self._targets_of(awaited.by()), awaited.needs)
                return node, True
            targets = self._targets(awaited)
            self._connect(node, targets)
            if not isinstance(awaited, Awaited) or awaited.ends:
                return node, True
            node, part = targets[0], [frame]
        self._place(node, part)
        return node, False

    def _place(self, node: str, frames: Sequence[types.FrameType]) -> None:
        """Note the line of a node: the innermost of the user's own, or of what is installed; or of
        all, without a function.
        """
        if not frames or self._nodes[node].where is not None:
            return
        others = [frame for frame in reversed(frames) if not is_library(frame)]
        at = next(
            (frame for frame in others if _INSTALLED not in frame.f_code.co_filename),
            (*others, frames[-1])[0],
        )
        function = at.f_code.co_qualname if others else None
        self._change(node, function=function, where=f"{at.f_code.co_filename}:{at.f_lineno}")

    # -- holders of what tasks wait for

    def holders(self, thing: object) -> list[asyncio.Task[Any] | threading.Thread]:
        """Return the tasks and threads that are in a `with` block of something."""
        found: list[Any] = [*self._held.get(id(thing), ())]
        owner = (
            re.search(r"owner=(\d+)", repr(thing)) if isinstance(thing, _THREAD_LOCKS) else None
        )  # of an RLock
        for thread in threads() if isinstance(thing, _THREAD_LOCKS) else ():
            held = (
                one
                for frame in frames_of(self._stacks.get(thread.ident or 0))
                for one in entered(frame)
            )
            if (
                any(one is thing for one in held)
                if owner is None
                else thread.ident == int(owner[1])
            ):
                found.append(thread)
        return found

    @functools.cached_property
    def _held(self) -> dict[int, list[asyncio.Task[Any]]]:
        """The tasks that hold something, by its id."""
        found: dict[int, list[asyncio.Task[Any]]] = {}
        for task in self.tasks:
            for one in held_by(task):
                found.setdefault(id(one), []).append(task)
        return found

    # -- threads

    def _add_thread(self, ident: int) -> str:
        thread = next((one for one in threads() if one.ident == ident), None)
        name = f"thread {printable('unknown' if thread is None else thread.name)!r}"
        frames = frames_of(self._stacks.get(ident))
        return self._add(
            f"thread {ident}",
            "thread",
            name,
            lambda node: self._expand_running(node, frames),
        )

    def _expand_running(self, node: str, frames: Sequence[types.FrameType]) -> None:
        """Add what code that runs in a thread, or blocks it, waits for."""
        self._place(node, frames)
        if (awaited := _thread_wait(frames, self)) is not None:
            self._connect(node, self._targets(awaited))

    def _of_executor(self, future: concurrent.futures.Future[Any]) -> list[str]:
        """Return the thread that has the call of a future of an executor; or the task that
        `run_coroutine_threadsafe` made.
        """
        if id(future) in self._called:
            return [self._add_thread(self._called[id(future)])]
        # A future has no public list of its callbacks.
        if sources := _sources(getattr(future, "_done_callbacks", ())):
            return self._targets_of(sources)
        if future.running() or future.done():
            return []
        return [self._add_awaited(Awaited("call", "a call that has not begun", key=future))]

    @functools.cached_property
    def _called(self) -> dict[int, int]:
        """The threads that have calls of executors, by the ids of the futures of these."""
        called: dict[int, int] = {}
        for ident, innermost in self._stacks.items():
            for frame in frames_of(innermost):
                if frame.f_code.co_name == "run" and is_library(frame):
                    future: Any = getattr(
                        frame.f_locals.get("self"), "future", None
                    )  # of an item of work
                    if isinstance(future, concurrent.futures.Future):
                        called[id(future)] = ident  # pyright: ignore[reportUnknownArgumentType]
        return called


def _awaited_by(frame: types.FrameType, outer: Sequence[types.FrameType], builder: _Builder) -> Any:
    """Return what a coroutine waits for, if its function is known."""
    code = frame.f_code
    if code.co_filename.startswith(PACKAGE):
        return awaited_in(frame)
    if (
        len(outer) > 1
        and outer[-2].f_code.co_name in ("call_groups", "_call_here")
        and outer[-2].f_code.co_filename.startswith(PACKAGE)
    ):
        return Awaited(
            "hook", code.co_qualname, ends=False
        )  # a method that cannot wait, and blocks
    if is_library(
        frame
    ):  # of the user's own code the variables are not asked for: see `awaited_in`
        return _primitive(frame, outer, builder)
    return None


def _primitive(
    frame: types.FrameType, outer: Sequence[types.FrameType], builder: _Builder
) -> Awaited | None:
    """Return what a coroutine of asyncio or anyio waits for."""
    owner: Any = frame.f_locals.get("self")
    method = frame.f_code.co_name
    at = f"{id(owner)}.{method}"
    name = expression(outer, owner)

    def held(kind: str, detail: str, places: float | None) -> Awaited:
        holders = builder.holders(owner)
        needs: Needs = "any" if len(holders) == places else "perhaps"
        return Awaited(
            kind, f"{kind}{name}", detail, lambda: holders, at, needs=needs, not_found=_NO_HOLDER
        )

    def without_holder(kind: str, detail: str) -> Awaited:
        return Awaited(kind, f"{kind}{name}", detail, key=at)

    match owner, method:
        case ((asyncio.Lock() | anyio.Lock()), "acquire"):
            return held("lock", "held", 1)
        case ((asyncio.Semaphore() | anyio.Semaphore()), "acquire"):
            bound = getattr(
                owner, "_bound_value", None
            )  # asyncio does not say how many places there are
            return held(
                "semaphore", "none free" if bound is None else f"{bound} of {bound} in use", bound
            )
        case anyio.CapacityLimiter(), ("acquire" | "acquire_on_behalf_of"):
            return held(
                "limiter",
                f"{owner.borrowed_tokens} of {owner.total_tokens:g} in use",
                owner.total_tokens,
            )
        case asyncio.Queue(), "put":
            return without_holder("queue", f"full, {owner.qsize()} of {owner.maxsize}")
        case asyncio.Queue(), "get":
            return without_holder("queue", "empty")
        case asyncio.Queue(), "join":
            return without_holder(
                "queue", f"{owner.qsize()} in it, task_done was not called for every item"
            )
        case ((asyncio.Event() | anyio.Event()), "wait"):
            return without_holder("event", "not set")
        case ((locks.Condition() | anyio.Condition()), "wait") if _is_waiter(
            frame, owner
        ):  # or it wants its lock again
            return without_holder("condition", "not notified")
        case asyncio.Barrier(), "wait":
            return without_holder("barrier", f"{owner.n_waiting} of {owner.parties} have arrived")
        case MemoryObjectSendStream(), "send":
            return without_holder("stream", "full")
        case MemoryObjectReceiveStream(), "receive":
            return without_holder("stream", "empty")
        case (asyncio.StreamReader(), "_wait_for_data") | (anyio.abc.SocketStream(), "receive"):
            return Awaited("connection", f"data from {_peer(owner)}", key=at)
        case (asyncio.StreamWriter(), "drain") | (anyio.abc.SocketStream(), "send"):
            return Awaited("connection", f"{_peer(owner)} to read what was sent", key=at)
        case asyncio.AbstractEventLoop(), _ if (
            method.startswith("sock_") and (sock := frame.f_locals.get("sock")) is not None
        ):
            return Awaited("connection", f"{method} of {sock!r}", key=at)
        case asyncio.subprocess.Process(), ("wait" | "communicate"):
            return Awaited(
                "process", f"process {owner.pid}", process_state(owner.pid) or "", key=at
            )
        case _, "run_sync_in_worker_thread" if (worker := frame.f_locals.get("worker")) is not None:
            return Awaited("calls", "", by=lambda: [worker])
        case _, "sleep" if (when := getattr(frame.f_locals.get("h"), "when", None)) is not None:
            left = when() - time.monotonic()
            return Awaited(
                "timer",
                "asyncio.sleep",
                f"{secs_text(left)} left" if left > 0 else f"ended {secs_text(-left)} ago",
            )
        case _, "_wait" if frame.f_code.co_filename.endswith("tasks.py"):
            needs: Needs = (
                "all" if frame.f_locals.get("return_when") == asyncio.ALL_COMPLETED else "any"
            )
            return Awaited("calls", "", by=lambda: [*frame.f_locals.get("fs", ())], needs=needs)
        case _, "_wait_for_one" if todo := getattr(
            owner, "_todo", ()
        ):  # of `as_completed`, since Python 3.13
            return Awaited("calls", "", by=lambda: [*todo], needs="any")
        case _, "wait_for" if asyncio.isfuture(
            inner := frame.f_locals.get("fut")
        ):  # before Python 3.12
            return Awaited("calls", "", by=lambda: [inner])
        case ((taskgroups.TaskGroup() | anyio.abc.TaskGroup()), "__aexit__"):
            # Neither has a public list of its tasks.
            return Awaited("calls", "", by=lambda: [*getattr(owner, "_tasks", ())])
        case _:
            return None


def _is_waiter(frame: types.FrameType, condition: object) -> bool:
    # A condition does not say publicly which calls wait to be notified.
    return frame.f_locals.get("fut", frame.f_locals.get("event")) in (
        attribute(condition, "_waiters") or ()
    )


def _thread_wait(frames: Sequence[types.FrameType], builder: _Builder) -> Any:
    """Return what a thread waits for: a lock, a queue, another thread, a future."""
    inner = [*itertools.takewhile(is_library, reversed(frames))]
    for frame in reversed(inner):
        owner: Any = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames[:1] else None
        match owner, frame.f_code.co_name:
            case threading.Thread(), ("join" | "_wait_for_tstate_lock"):
                return owner
            case concurrent.futures.Future(), ("result" | "exception"):
                return owner  # pyright: ignore[reportUnknownVariableType]
            case threading.Event(), "wait":
                return Awaited(
                    "event", f"threading.Event{expression(frames, owner)}", "not set", key=owner
                )
            case queue.Queue(), ("get" | "put" | "join"):
                used: queue.Queue[Any] = owner  # pyright: ignore[reportUnknownVariableType]
                name, detail = (
                    f"queue.Queue{expression(frames, used)}",
                    f"{used.qsize()} of {used.maxsize or 'any number'}",
                )
                return Awaited("queue", name, detail, key=used)
            case _:
                continue
    if inner or not frames:
        return None
    lock: Any = value_of(position(frames[-1]), frames[-1])
    if isinstance(lock, _THREAD_LOCKS) and "unlocked" not in repr(lock):
        return Awaited(
            "lock",
            f"lock{expression(frames, lock)}",
            "held",
            lambda: builder.holders(lock),
            lock,
            not_found=_NO_HOLDER,
        )
    return None


def _sources(callbacks: Iterable[Any]) -> list[Any]:
    """Return the futures that set the one with these callbacks, which `shield` and `wrap_future`
    have in a closure.

    Not those that it sets: the other way round these have callbacks, too.
    """
    known = (
        one
        for one in callbacks
        if isinstance(one, types.FunctionType) and one.__qualname__ in _SOURCES
    )
    return [inspect.getclosurevars(one).nonlocals[_SOURCES[one.__qualname__]] for one in known]


def _peer(stream: Any) -> str:
    """Return the other end of a stream."""
    transport: Any = getattr(stream, "_transport", None)  # a reader has no public one
    peer: Any = None
    if transport is not None:
        peer = transport.get_extra_info("peername") or (
            transport.get_extra_info("pipe") and "a pipe"
        )
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else str(peer or "a connection")
