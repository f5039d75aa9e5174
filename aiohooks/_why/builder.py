"""Makes the wait-for graph of the tasks and threads that exist now. It records nothing beforehand.

For reports, as in `_why.tasks`: nothing is decided by what is found here.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import itertools
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aiohooks._core.activity import Awaited, Entry, Needs, entries
from aiohooks._why.frames import held_by
from aiohooks._why.futures import sources_of
from aiohooks._why.graph import WaitEdge, WaitGraph, WaitNode
from aiohooks._why.primitives import awaited_group, called_function
from aiohooks._why.tasks import (
    Frame,
    Frames,
    Task,
    coroutine_of,
    frames_of,
    is_installed,
    is_library,
    is_of_aiohooks,
    is_task,
    links_of,
)
from aiohooks.errors import printable

_MAX_DETAIL = 1000
_MAX_TASKS_OF_NOTE = 100
"""How many tasks are searched for the note of an error.

Others may end with an error in the same tick.
"""
_note_times: deque[float] = deque(maxlen=20)
BlockedLoops = Mapping[asyncio.AbstractEventLoop, Frame]
"""The innermost frame of each event loop that cannot run."""


def wait_graph(
    loops: Iterable[asyncio.AbstractEventLoop] = (),
    *,
    also: Iterable[object] = (),
    blocked: BlockedLoops | None = None,
) -> WaitGraph:
    """Return the wait-for graph of all tasks of these loops, and of the objects in `also`.

    The loops belong to this thread, or do not run meanwhile.
    """
    builder = _Builder(loops, blocked or {})
    return builder.build([*also, *builder.tasks])


def why(*waiting: object) -> str:
    """Return in one line what tasks or other objects wait for, as a note for an error.

    If thousands of errors are raised together, the first of each second have the note.
    """
    now = time.monotonic()
    is_full = len(_note_times) == _note_times.maxlen
    if is_full and now < _note_times[0] + 1.0:
        return ""
    _note_times.append(now)
    try:
        loop = asyncio.get_running_loop()
        builder = _Builder([loop], {}, _MAX_TASKS_OF_NOTE)
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
        blocked: BlockedLoops,
        max_tasks: int | None = None,
    ) -> None:
        tasks = itertools.chain.from_iterable(map(asyncio.all_tasks, loops))
        self.tasks = list(itertools.islice(tasks, max_tasks))
        self._running: dict[Task | None, Frame] = {}
        for loop, frame in blocked.items():
            self._running[asyncio.current_task(loop)] = frame
        self._stacks = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        self._nodes: dict[str, WaitNode] = {}
        self._edges: dict[tuple[str, str], Needs] = {}
        self._keys: list[object] = []  # kept, so that their ids stay unique
        self._new_tasks: list[Task] = []
        self._entries: dict[Task | None, list[Entry]] = {}
        for entry in entries():
            self._entries.setdefault(entry.task, []).append(entry)
        self._sessions: dict[str, tuple[list[str], Needs]] = {}
        """The tasks of each session, and whether it needs all of them."""
        self._session_edges: list[tuple[str, str]] = []
        """The task that waits for calls of a session, and the session."""

    def build(self, things: Iterable[object]) -> WaitGraph:
        """Return the graph of tasks and other objects that wait."""
        self._add(things)
        while self._new_tasks:
            self._expand_task(self._new_tasks.pop())
        busy = {waiter for waiter, _ in self._edges}
        for session, (tasks, needs) in self._sessions.items():
            # A session whose calls are known waits for these. Otherwise it waits for its block.
            if session not in busy:
                self._connect(session, tasks, needs)
        awaited = {node for _, node in self._edges}
        for task, session in self._session_edges:
            # The session stands for the task, if no other waits for that.
            if task not in awaited:
                node = self._nodes.pop(task)
                del self._edges[task, session]
                self._change(session, function=node.function, where=node.where)
        nodes = self._nodes.values()
        edges = (WaitEdge(*ids, needs) for ids, needs in self._edges.items())
        return WaitGraph(tuple(nodes), tuple(edges))

    # -- nodes and edges

    def _id_of(self, key: object) -> str:
        """Return the id of the node with a key, which is a text or any object."""
        if isinstance(key, str):
            return key
        self._keys.append(key)
        return str(id(key))

    def _change(self, node: str, **changes: Any) -> None:
        self._nodes[node] = dataclasses.replace(self._nodes[node], **changes)

    def _connect(
        self,
        waiter: str,
        awaited: Sequence[str],
        needs: Needs = "all",
    ) -> None:
        is_only = len(awaited) == 1
        # A session needs any task that runs it, also those that are not known here.
        if is_only and needs == "any" and waiter not in self._sessions:
            needs = "all"
        for node in awaited:
            self._edges.setdefault((waiter, node), needs)

    def _add(self, things: Iterable[Any]) -> list[str]:
        """Return the nodes of objects that are waited for."""
        nodes: list[str] = []
        for thing in things:
            if isinstance(thing, Awaited):
                nodes.append(self._add_awaited(thing))
            elif isinstance(thing, threading.Thread):
                nodes.append(self._add_thread(thing))
            elif is_task(thing):
                if not thing.done():
                    nodes.append(self._add_task(thing))
            elif isinstance(thing, concurrent.futures.Future) or asyncio.isfuture(thing):
                nodes += self._add(sources_of(thing, self._stacks))
        return nodes

    def _add_awaited(self, awaited: Awaited) -> str:
        name = printable(awaited.name)
        if is_task(awaited.key):
            node = self._add_task(awaited.key)
            self._change(
                node,
                kind=awaited.kind,
                name=name,
                secs=awaited.secs,
            )
            return node
        key = awaited.key
        if key is None:
            key = awaited
        node = self._id_of(key)
        if node in self._nodes:
            return node
        detail = printable(awaited.detail, _MAX_DETAIL)
        self._nodes[node] = WaitNode(
            node,
            awaited.kind,
            name,
            detail,
            secs=awaited.secs,
        )
        targets = self._add(awaited.by())
        if awaited.kind == "session":
            self._sessions[node] = (targets, awaited.needs)
            return node
        self._connect(node, targets, awaited.needs)
        return node

    def _add_task(self, task: Task) -> str:
        node = self._id_of(task)
        if node not in self._nodes:
            kind = "task"
            if _is_internal(task):
                kind = "internal task"
            name = printable(task.get_name())
            self._nodes[node] = WaitNode(node, kind, f"task {name!r}")
            self._new_tasks.append(task)
        return node

    def _add_thread(self, thread: threading.Thread) -> str:
        node = f"thread {thread.ident}"
        if node not in self._nodes:
            name = printable(thread.name)
            self._nodes[node] = WaitNode(node, "thread", f"thread {name!r}")
            frames = frames_of(self._stacks.get(thread.ident or 0))
            self._place(node, frames)
            self._add_end(node, frames, None)
        return node

    def _place(self, node: str, frames: Frames) -> None:
        """Note the line at which a node waits: the innermost of the user's own.

        Without such a line, that of an installed package or, without a function, of a library.
        """
        if self._nodes[node].where is not None:
            return
        if not frames:
            return
        frame = frames[-1]
        written = [frame for frame in frames if not is_library(frame)]
        if written:
            own = [frame for frame in written if not is_installed(frame)]
            frame = (own or written)[-1]
            self._change(node, function=frame.f_code.co_qualname)
        self._change(node, where=f"{frame.f_code.co_filename}:{frame.f_lineno}")

    # -- chains of awaits

    def _expand_task(self, task: Task) -> None:
        """Add what a task waits for: its entries in the registry, then the end of its awaits."""
        node = self._id_of(task)
        links = list(links_of(coroutine_of(task)))
        frames = tuple(frame for frame, _ in links if frame is not None)
        running = self._running.get(task)
        if running is None:
            self._place(node, frames)
        descriptions = [entry.awaited() for entry in self._entries.get(task, ())]
        for awaited in sorted(filter(None, descriptions), key=_is_inside_session):
            if awaited.kind == "calls":
                self._connect(node, self._add(awaited.by()), awaited.needs)
                return
            target = self._add_awaited(awaited)
            self._connect(node, [target])
            if awaited.kind == "session":
                self._session_edges.append((node, target))
            elif awaited.ends:
                return
            node = target
        if running is not None:
            frames = frames_of(running, in_loop=True)
            node = self._add_running(node, frames)
        self._add_end(node, frames, links[-1][1] if links else None)

    def _add_running(self, node: str, frames: Frames) -> str:
        """Add the function that blocks the event loop, and return its node."""
        function = Awaited("call", "code", "runs; the event loop waits for it", key=frames)
        target = self._add_awaited(function)
        self._place(target, frames)
        name = self._nodes[target].function
        if name is not None:
            self._change(target, name=name)
        self._connect(node, [target])
        return target

    def _add_end(self, node: str, frames: Frames, end: object) -> None:
        """Add what a chain of awaits ends with: tasks, what sets its future, or a function."""
        group, needs = awaited_group(frames)
        targets = self._add(group) or self._add([end])
        if not targets:
            function = called_function(frames, self._holders_of)
            targets = self._add([] if function is None else [function])
        self._connect(node, targets, needs)

    def _holders_of(self, owner: object) -> list[Task]:
        return self._holders.get(owner if isinstance(owner, str) else id(owner), [])

    @functools.cached_property
    def _holders(self) -> dict[object, list[Task]]:
        """The tasks that are in a `with` block of an object, by its id and by its package."""
        holders: dict[object, list[Task]] = {}
        for task in self.tasks:
            for owner in held_by(task):
                package, _, _ = type(owner).__module__.partition(".")
                for key in (id(owner), package):
                    holders.setdefault(key, []).append(task)
        return holders


def _is_inside_session(awaited: Awaited) -> bool:
    """Order descriptions: a task that makes a run waits for its session, and that for the rest."""
    return awaited.kind != "session"


def _is_internal(task: Task) -> bool:
    """Return whether a task runs a private function of this library."""
    code: types.CodeType | None = getattr(coroutine_of(task), "cr_code", None)
    if code is None or not is_of_aiohooks(code):
        return False
    return code.co_name.startswith("_")
