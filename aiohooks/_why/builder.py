"""Makes the wait-for graph of the tasks and threads that exist now. It records nothing beforehand.

For reports, as in `_why.tasks`: nothing is decided by what is found here.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import inspect
import itertools
import os
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aiohooks._core.reports import Awaited, Needs
from aiohooks._why.frames import held_by
from aiohooks._why.graph import WaitEdge, WaitGraph, WaitNode
from aiohooks._why.primitives import primitive_wait
from aiohooks._why.tasks import (
    PACKAGE,
    awaited_in,
    coroutine_of,
    frames_of,
    is_library,
    is_task,
    links_of,
)
from aiohooks._why.threads import thread_of_call, thread_wait, threads
from aiohooks.errors import printable

_MAX_DETAIL = 1000
_MAX_TASKS_OF_NOTE = 100
"""How many tasks are searched for the note of an error.

Others may end with an error in the same tick.
"""
_note_times: deque[float] = deque(maxlen=20)
_SOURCES = {
    "shield.<locals>._outer_done_callback": "inner",
    "_chain_future.<locals>._call_check_cancel": "source",
}
"""The variable of a callback of a future that has the future by which that is set."""
_INLINE = ("call_groups", "_call_here")
"""The functions that call methods that cannot wait in the task of the caller."""
_INSTALLED = f"-packages{os.sep}"  # "site-", or "dist-" of a Linux distribution


def wait_graph(
    loops: Iterable[asyncio.AbstractEventLoop] = (),
    *,
    also: Iterable[object] = (),
    blocked: Mapping[asyncio.AbstractEventLoop, types.FrameType] = types.MappingProxyType({}),
) -> WaitGraph:
    """Return the wait-for graph of all tasks of these loops, and of the objects in `also`.

    The loops belong to this thread, or do not run meanwhile. `blocked` has the innermost frames of
    loops that cannot run.
    """
    builder = _Builder(loops, blocked)
    return builder.build([*also, *builder.tasks])


def why(*waiting: object) -> str:
    """Return in one line what tasks or other objects wait for, as a note for an error.

    If thousands of errors are raised together, the first of each second have the note.
    """
    now = time.monotonic()
    if len(_note_times) == _note_times.maxlen and now - _note_times[0] < 1.0:
        return ""
    _note_times.append(now)
    try:
        builder = _Builder([asyncio.get_running_loop()], {}, _MAX_TASKS_OF_NOTE)
        graph = builder.build(waiting)
        if not graph.edges:
            return ""
        return "; ".join(graph.lines()[:3])
    except Exception as error:
        # The error that is to have this note is raised all the same.
        return f"what it waited for could not be found out: {error!r}"


class _Builder:
    """Makes a graph."""

    def __init__(
        self,
        loops: Iterable[asyncio.AbstractEventLoop],
        blocked: Mapping[asyncio.AbstractEventLoop, types.FrameType],
        max_tasks: int | None = None,
    ) -> None:
        tasks = itertools.chain.from_iterable(asyncio.all_tasks(loop) for loop in loops)
        self.tasks = list(itertools.islice(tasks, max_tasks))
        self._running = {asyncio.current_task(loop): frame for loop, frame in blocked.items()}
        self._stacks = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        self._nodes: dict[str, WaitNode] = {}
        self._edges: dict[tuple[str, str], Needs] = {}
        self._new_tasks: deque[tuple[asyncio.Task[Any], str]] = deque()
        self._sessions: dict[str, tuple[list[str], Needs]] = {}
        """The tasks of each session, and whether it needs all of them."""
        self._session_tasks: set[str] = set()
        """The tasks that wait for calls of a session."""
        self._ids: dict[int, str] = {}
        self._keys: list[object] = []  # kept, so that their ids stay unique

    def build(self, things: Iterable[object]) -> WaitGraph:
        """Return the graph of tasks and other objects that wait."""
        self._targets_of(things)
        while self._new_tasks:
            task, node = self._new_tasks.popleft()
            self._expand_task(task, node)
        busy = {waiter for waiter, _ in self._edges}
        for session, (tasks, needs) in self._sessions.items():
            if session not in busy:
                # It waits for no calls, so it waits for the code in its block.
                self._connect(session, tasks, needs)
        # A session stands for the task that makes its calls, if no other waits for that.
        hidden = self._session_tasks.difference(awaited for _, awaited in self._edges)
        nodes = [node for node in self._nodes.values() if node.id not in hidden]
        edges = [
            WaitEdge(waiter, awaited, needs)
            for (waiter, awaited), needs in self._edges.items()
            if waiter not in hidden
        ]
        return WaitGraph(tuple(nodes), tuple(edges))

    # -- nodes and edges

    def _id_of(self, key: object) -> str:
        """Return the id of the node with a key, which is a text or any object."""
        if isinstance(key, str):
            return key
        if id(key) not in self._ids:
            self._keys.append(key)
            self._ids[id(key)] = str(len(self._keys))
        return self._ids[id(key)]

    def _change(self, node: str, **changes: Any) -> None:
        self._nodes[node] = dataclasses.replace(self._nodes[node], **changes)

    def _connect(self, waiter: str, awaited: Sequence[str], needs: Needs = "all") -> None:
        # A session waits for its task or for any other that runs it.
        if needs == "any" and len(awaited) == 1 and waiter not in self._sessions:
            needs = "all"
        for node in awaited:
            self._edges.setdefault((waiter, node), needs)

    def _targets_of(self, things: Iterable[object]) -> list[str]:
        """Return the nodes of objects that are waited for."""
        return list(itertools.chain.from_iterable(self._targets(thing) for thing in things))

    def _targets(self, thing: Any) -> list[str]:
        if isinstance(thing, Awaited):
            return [self._add_awaited(thing)]
        if isinstance(thing, threading.Thread):
            return self._add_thread(thing.ident)
        if isinstance(thing, concurrent.futures.Future):
            return self._targets_of_call(thing)  # pyright: ignore[reportUnknownArgumentType]
        if not asyncio.isfuture(thing) or thing.done():
            return []
        if is_task(thing):
            return [self._add_task(thing)]
        # asyncio has no public way to ask what sets a future: the members of a `gather`, or the
        # future of which this is a copy.
        callbacks = [callback for callback, _ in getattr(thing, "_callbacks", None) or ()]
        return self._targets_of([*(getattr(thing, "_children", None) or ()), *_sources(callbacks)])

    def _targets_of_call(self, call: concurrent.futures.Future[Any]) -> list[str]:
        """Return the task or the thread that makes a call."""
        # A future has no public list of its callbacks.
        tasks = _sources(getattr(call, "_done_callbacks", ()))
        if tasks:  # of `run_coroutine_threadsafe`
            return self._targets_of(tasks)
        if call.done():
            return []
        if call.running():
            return self._add_thread(thread_of_call(call, self._stacks))
        return [self._add_awaited(Awaited("call", "a call that has not begun", key=call))]

    def _add_awaited(self, awaited: Awaited) -> str:
        name = printable(awaited.name)
        if is_task(awaited.key):
            node = self._add_task(awaited.key)
            self._change(node, kind=awaited.kind, name=name, secs=awaited.secs)
            return node
        node = self._id_of(awaited if awaited.key is None else awaited.key)
        if node in self._nodes:
            return node
        detail = printable(awaited.detail, _MAX_DETAIL)
        self._nodes[node] = WaitNode(node, awaited.kind, name, detail, secs=awaited.secs)
        targets = self._targets_of(awaited.by())
        if awaited.kind == "session":
            self._sessions[node] = (targets, awaited.needs)
            return node
        self._connect(node, targets, awaited.needs)
        if not targets and awaited.not_found:
            self._change(node, detail=f"{detail}, {awaited.not_found}")
        return node

    def _add_task(self, task: asyncio.Task[Any]) -> str:
        node = self._id_of(task)
        if node not in self._nodes:
            kind = "task"
            if _is_internal(task):
                kind = "internal task"
            name = f"task {printable(task.get_name())!r}"
            self._nodes[node] = WaitNode(node, kind, name)
            self._new_tasks.append((task, node))
        return node

    def _add_thread(self, ident: int | None) -> list[str]:
        """Return the node of a thread; none if it has not begun, or is not known."""
        if ident is None:
            return []
        node = f"thread {ident}"
        if node not in self._nodes:
            names = [thread.name for thread in threads() if thread.ident == ident]
            name = printable(next(iter(names), "unknown"))
            self._nodes[node] = WaitNode(node, "thread", f"thread {name!r}")
            self._expand_code(node, frames_of(self._stacks.get(ident)))
        return [node]

    def _place(self, node: str, frames: Sequence[types.FrameType]) -> None:
        """Note the line at which a node waits: the innermost of the user's own.

        Without such a line, that of an installed package or, without a function, of a library.
        """
        if not frames or self._nodes[node].where is not None:
            return
        written = [frame for frame in frames if not is_library(frame)]
        own = [frame for frame in written if _INSTALLED not in frame.f_code.co_filename]
        frame = (own or written or frames)[-1]
        function = None
        if written:
            function = frame.f_code.co_qualname
        self._change(node, function=function, where=f"{frame.f_code.co_filename}:{frame.f_lineno}")

    # -- code that waits

    def _expand_task(self, task: asyncio.Task[Any], node: str) -> None:
        """Add what a task waits for."""
        if task in self._running:
            frames = frames_of(self._running[task], in_loop=True)
            waiter = self._follow(node, frames)
            if waiter is not None:
                self._expand_code(waiter, frames)
            self._change(waiter or node, detail="runs; the event loop waits for it")
            return
        links = list(links_of(coroutine_of(task)))
        waiter = self._follow(node, [frame for frame, _ in links if frame is not None])
        if links and waiter is not None:
            self._connect(waiter, self._targets(links[-1][1]))

    def _expand_code(self, node: str, frames: Sequence[types.FrameType]) -> None:
        """Add what code that runs in a thread waits for."""
        self._place(node, frames)
        self._connect(node, self._targets(thread_wait(frames)))

    def _follow(self, node: str, frames: Sequence[types.FrameType]) -> str | None:
        """Add the named waits in a chain of awaits.

        Return the last node, or None if what it waits for has been added.
        """
        begin = 0
        for index in range(len(frames)):
            awaited = self._awaited_at(frames, index)
            if awaited is None:
                continue
            callers = frames[begin:index] or [frames[index]]
            self._place(node, callers)
            if not isinstance(awaited, Awaited):
                self._connect(node, self._targets(awaited))
                return None
            if awaited.kind == "calls":
                if isinstance(awaited.key, Awaited):
                    self._session_tasks.add(node)
                    session = self._add_awaited(awaited.key)
                    self._place(session, callers)
                    self._connect(node, [session])
                    node = session
                self._connect(node, self._targets_of(awaited.by()), awaited.needs)
                return None
            target = self._add_awaited(awaited)
            self._connect(node, [target])
            if awaited.ends:
                return None
            node = target
            begin = index
        self._place(node, frames[begin:])
        return node

    def _awaited_at(self, frames: Sequence[types.FrameType], index: int) -> Any:
        """Return what the function of a frame waits for, if it is known."""
        frame = frames[index]
        if frame.f_code.co_filename.startswith(PACKAGE):
            return awaited_in(frame)
        if index and _calls_inline(frames[index - 1].f_code):
            # A method that cannot wait, and blocks.
            return Awaited("hook", frame.f_code.co_qualname, ends=False)
        if is_library(frame):
            # Only of libraries, as the variables of user code are not read: see `awaited_in`.
            return primitive_wait(frame, frames[index + 1 :], self._holders_of)
        return None

    def _holders_of(self, owner: object) -> list[asyncio.Task[Any]]:
        """Return the tasks that are in a `with` block of an object."""
        return self._holders.get(id(owner), [])

    @functools.cached_property
    def _holders(self) -> dict[int, list[asyncio.Task[Any]]]:
        """The tasks that hold an object, by its id."""
        holders: dict[int, list[asyncio.Task[Any]]] = {}
        for task in self.tasks:
            for owner in held_by(task):
                holders.setdefault(id(owner), []).append(task)
        return holders


def _is_internal(task: asyncio.Task[Any]) -> bool:
    """Return whether a task runs a private function of this library."""
    code: types.CodeType | None = getattr(coroutine_of(task), "cr_code", None)
    if code is None or not code.co_filename.startswith(PACKAGE):
        return False
    return code.co_name.startswith("_")


def _calls_inline(code: types.CodeType) -> bool:
    """Return whether a function of this library calls methods of hooks itself."""
    return code.co_name in _INLINE and code.co_filename.startswith(PACKAGE)


def _sources(callbacks: Iterable[Any]) -> list[Any]:
    """Return the futures that set the future which has these callbacks.

    `shield` and `wrap_future` have them in closures. The futures that it sets itself have other
    callbacks.
    """
    sources: list[Any] = []
    for callback in callbacks:
        if isinstance(callback, types.FunctionType) and callback.__qualname__ in _SOURCES:
            variable = _SOURCES[callback.__qualname__]
            sources.append(inspect.getclosurevars(callback).nonlocals[variable])
    return sources
