"""Makes the wait-for graph of the tasks and threads that exist now. It records nothing beforehand.

The graph is only for reports, as in `_why.tasks`: no decision of the library depends on it.

A node stands for an object that waits or is waited for. Its key is the object, or a text, and its
id is made of the key, so that the same object is one node. An edge is a wait of one node for
another.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import itertools
import sys
import threading
import types
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary, ref

from aiohooks._core.activity import (
    Awaited,
    Entry,
    Needs,
    entries,
)
from aiohooks._why.graph import HIDDEN, WaitEdge, WaitGraph, WaitNode
from aiohooks._why.sources import (
    Holders,
    called_function,
    group_of,
    holders_among,
    sources_of,
)
from aiohooks._why.tasks import (
    PACKAGE,
    Frame,
    Frames,
    Task,
    frames_of,
    frames_of_links,
    is_task,
    links_of,
    loop_frames,
    user_code_frame,
)
from aiohooks.errors import printable

_Future: Any = asyncio.Future
_first_seen: WeakKeyDictionary[Task, tuple[ref[Any], float]] = WeakKeyDictionary()
"""The future that each task awaits, and when a graph had this wait first.

asyncio does not record when a wait began, so the time since then is shown instead.
"""


def wait_graph(
    loops: Mapping[asyncio.AbstractEventLoop, int],
    sessions: Iterable[Awaited] = (),
    interrupted: Frame | None = None,
) -> WaitGraph:
    """Return the wait-for graph of all tasks of these loops, and of sessions.

    If a loop is running a function now, in another thread, the graph has that as well.

    Args:
        loops: the event loops, each with its thread.
        sessions: the descriptions of sessions.
        interrupted: if a signal handler asks, the frame that its signal has interrupted.
    """
    builder = _Builder(loops, interrupted)
    return builder.build([*sessions, *builder.tasks])


class _Builder:
    """Makes a graph: a walk from tasks and other objects over everything that they wait for."""

    def __init__(
        self,
        loops: Mapping[asyncio.AbstractEventLoop, int],
        interrupted: Frame | None,
    ) -> None:
        """Look at all threads, tasks and entries of the registry, as they are now."""
        self.tasks = [*itertools.chain.from_iterable(map(asyncio.all_tasks, loops))]
        self._stacks = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        self._running: dict[Task | None, Frames] = {}
        """The frames that loops are running, by their task, or by None for code of no task."""
        for loop, thread in loops.items():
            # In the current thread, these are the frames of this code itself. A signal handler
            # gives the frames that its signal has interrupted.
            is_own = thread == threading.get_ident()
            frames = loop_frames(interrupted if is_own else self._stacks.get(thread))
            if frames:
                self._running[asyncio.current_task(loop)] = frames
        # The fields of each node by its id, and the need of each edge by the ids of its nodes.
        self._nodes: dict[str, dict[str, Any]] = {}
        self._edges: dict[tuple[str, str], Needs] = {}
        # The keys are kept alive, so that no other object gets the same id.
        self._keys: list[object] = []
        # Tasks that have a node, and whose own waits are not added yet.
        self._new_tasks: list[Task] = []
        self._entries: defaultdict[Task | None, list[Entry]] = defaultdict(list)
        for entry in entries():
            self._entries[entry.task].append(entry)

    def build(self, things: Iterable[object]) -> WaitGraph:
        """Return the graph of `things`, and of all that they wait for, directly or not."""
        self._add(things)
        if None in self._running:
            self._add_running(self._running[None])
        # The waits of a task may lead to further new tasks.
        while self._new_tasks:
            self._expand_task(self._new_tasks.pop())
        nodes = [WaitNode(node_id, **fields) for node_id, fields in self._nodes.items()]
        edges = [WaitEdge(*ids, needs) for ids, needs in self._edges.items()]
        return WaitGraph(tuple(nodes), tuple(edges))

    # -- nodes and edges

    def _add_node(
        self,
        key: object,
        kind: str,
        name: str,
        **fields: Any,
    ) -> tuple[str, bool]:
        """Add a node, unless there is one with the same key.

        Args:
            key: the object that the node stands for, or a text.
            kind: its kind, as in `WaitNode`.
            name: its name.
            fields: other fields of `WaitNode`.

        Returns:
            The id of the node, and whether it is new.
        """
        node = _node_id(key)
        is_new = node not in self._nodes
        if is_new:
            self._keys.append(key)
            self._nodes[node] = {"kind": kind, "name": name, **fields}
        return node, is_new

    def _connect(
        self,
        waiter: str,
        awaited: Sequence[str],
        needs: Needs = "all",
    ) -> None:
        """Add an edge from the waiter to each awaited node, unless there is one already."""
        # The waiter that needs any of a single node needs this node.
        if needs == "any" and len(awaited) == 1:
            needs = "all"
        for node in awaited:
            self._edges.setdefault((waiter, node), needs)

    def _place(self, node: str, frames: Frames) -> None:
        """Note the function and the line at which a node waits, if they are not known yet."""
        frame = user_code_frame(frames)
        if frame is not None:
            code = frame.f_code
            fields = self._nodes[node]
            fields.setdefault("function", code.co_qualname)
            fields.setdefault("where", f"{code.co_filename}:{frame.f_lineno}")

    # -- things that are waited for

    def _add(self, things: Iterable[Any]) -> list[str]:
        """Add the nodes of objects that are waited for, and return their ids.

        A future has no node of its own: the things that set it stand for it. Tasks that have ended,
        and objects of other types, are left out.
        """
        nodes: list[str] = []
        for thing in things:
            if isinstance(thing, Awaited):
                nodes.append(self._add_awaited(thing))
            elif isinstance(thing, threading.Thread):
                nodes.append(self._add_thread(thing))
            elif is_task(thing):
                if not thing.done():
                    nodes.append(self._add_task(thing))
            elif asyncio.isfuture(thing) or isinstance(thing, concurrent.futures.Future):
                sources = sources_of(thing, self._stacks)
                nodes += self._add(sources)
        return nodes

    def _add_awaited(self, awaited: Awaited) -> str:
        """Add the node of a described thing, and the edges to the things that it waits for."""
        name = printable(awaited.name)
        if is_task(awaited.key) and not awaited.key.done():
            # It is a call that runs in a task of its own. One node has both, with the name of the
            # call.
            node = self._add_task(awaited.key)
            self._nodes[node].update(
                kind=awaited.kind,
                name=name,
                secs=awaited.secs,
            )
            return node
        key = awaited.key
        if key is None:
            key = awaited
        node, is_new = self._add_node(
            key,
            awaited.kind,
            name,
            detail=awaited.detail,
            secs=awaited.secs,
        )
        if is_new:
            targets = self._add(awaited.by())
            if awaited.kind != "session":
                self._connect(node, targets, awaited.needs)
            elif awaited.needs == "any":
                # Between runs, the session waits for its next run, which any task may make. So the
                # edge stays "any", even to a single task, and is no part of a deadlock. During a
                # run the task that makes it waits for the session: `_add_entries` adds this edge.
                self._edges.update(((node, target), "any") for target in targets)
        return node

    def _add_task(self, task: Task) -> str:
        """Add the node of a task. `build` adds its waits later."""
        kind = "task"
        if _is_internal(task):
            kind = HIDDEN
        name = f"task {task.get_name()!r}"
        node, is_new = self._add_node(task, kind, name)
        if is_new:
            self._new_tasks.append(task)
        return node

    def _add_thread(self, thread: threading.Thread) -> str:
        """Add the node of a thread, and its wait."""
        name = f"thread {thread.name!r}"
        node, is_new = self._add_node(thread, "thread", name)
        if is_new:
            frames = frames_of(self._stacks.get(thread.ident or 0))
            self._place(node, frames)
            self._add_end(node, frames, None)
        return node

    def _add_running(self, frames: Frames) -> str:
        """Add the node of the code that an event loop is running, by the frames of that code."""
        node, _ = self._add_node(
            frames,
            "call",
            "code",
            detail="runs; the event loop waits for it",
        )
        self._place(node, frames)
        fields = self._nodes[node]
        fields["name"] = fields.get("function", "code")
        self._add_end(node, frames, None)
        return node

    # -- chains of awaits

    def _expand_task(self, task: Task) -> None:
        """Add the wait of a task.

        It is a path over the task's entries in the registry, from the outermost to the innermost.
        At its end is the code that the loop is running, or the end of the task's chain of awaits.
        """
        node = _node_id(task)
        links = links_of(task)
        frames = frames_of_links(links)
        running = self._running.get(task)
        if running is not None:
            # The node of the code that runs shows the line, so the task does not.
            frames = ()
        self._place(node, frames)
        innermost = self._add_entries(node, task, frames)
        if innermost is None:
            return
        if running is not None:
            self._connect(innermost, [self._add_running(running)])
            return
        end = links[-1][1] if links else None
        if innermost == node and isinstance(end, _Future):
            self._time(node, task, end)
        self._add_end(innermost, frames, end)

    def _time(
        self,
        node: str,
        task: Task,
        future: Any,
    ) -> None:
        """Note for how long a task has awaited a future, if an earlier graph had the same wait."""
        seen_future, since = _first_seen.get(task, (None, 0.0))
        if seen_future is None or seen_future() is not future:
            _first_seen[task] = (ref(future), monotonic())
        else:
            self._nodes[node].setdefault("secs", monotonic() - since)

    def _add_entries(
        self,
        node: str,
        task: Task,
        frames: Frames,
    ) -> str | None:
        """Add a node for each wait of a task that is in the registry.

        They are a chain from the outermost to the innermost: each node waits for the next one.

        Args:
            node: the node of the task.
            task: the task.
            frames: the frames of its chain of awaits.

        Returns:
            The innermost node, whose own wait the frames show, or None if the waits in the registry
            are the whole wait.
        """
        waits: list[Awaited] = []
        for entry in self._entries[task]:
            awaited = entry.awaited()
            if awaited is not None:
                waits.append(awaited)
        # If the task makes a run, put its session first. The order of the others stays.
        waits.sort(key=lambda wait: wait.kind != "session")
        innermost = node
        for awaited in waits:
            if awaited.kind == "calls":
                # The group of calls has no node: the task waits for the calls themselves.
                self._connect(innermost, self._add(awaited.by()), awaited.needs)
                return None
            target = self._add_awaited(awaited)
            self._connect(innermost, [target])
            if awaited.ends:
                return None
            if awaited.kind == "session":
                # In the text of the graph, the session stands for the task that makes its run.
                self._place(target, frames)
                self._hide_task(innermost)
            innermost = target
        return innermost

    def _hide_task(self, node: str) -> None:
        """Leave the node of a task out of the text of the graph."""
        fields = self._nodes[node]
        # A task that runs a call has the kind of the call, and stays in the text.
        if fields["kind"] == "task":
            fields["kind"] = HIDDEN

    def _add_end(
        self,
        node: str,
        frames: Frames,
        end: object,
    ) -> None:
        """Add the targets at the end of a chain of awaits, and the edges from `node` to them.

        These are the tasks that a function of a library waits for together; or else the things that
        set the future `end`; or else the function of a library that was called.
        """
        group, needs = group_of(frames)
        targets = self._add(group) or self._add([end])
        if not targets:
            function = called_function(frames, self._holders)
            targets = self._add([function])
        self._connect(node, targets, needs)

    @functools.cached_property
    def _holders(self) -> Holders:
        """The tasks that are in `with` blocks. To find them takes long, and is seldom needed."""
        return holders_among(self.tasks)


def _node_id(key: object) -> str:
    """Return the id of the node with a key: a text itself, or the id of an object."""
    return key if isinstance(key, str) else str(id(key))


def _is_internal(task: Task) -> bool:
    """Return whether a task belongs to this library.

    It does if it runs a private function of the library, or waits for a thread of it.
    """
    if task.get_name().startswith("thread of "):
        return True
    code: types.CodeType | None = getattr(task.get_coro(), "cr_code", None)
    if code is None or not code.co_filename.startswith(PACKAGE):
        return False
    return code.co_name.startswith("_")
