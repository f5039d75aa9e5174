"""Makes the wait-for graph of the tasks and threads that exist now. It records nothing beforehand.

For reports, as in `_why.tasks`: no decision depends on the findings.
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
    written_frame,
)
from aiohooks.errors import printable

_Future: Any = asyncio.Future
_first_seen: WeakKeyDictionary[Task, tuple[ref[Any], float]] = WeakKeyDictionary()
"""The future that each task awaits, and when that was found first.

asyncio does not record when a wait began.
"""


def wait_graph(
    loops: Mapping[asyncio.AbstractEventLoop, int],
    sessions: Iterable[Awaited] = (),
    interrupted: Frame | None = None,
) -> WaitGraph:
    """Return the wait-for graph of all tasks of these loops, and of sessions.

    Of a loop of another thread it has the function that runs at this moment.

    Args:
        loops: the event loops, each with its thread.
        sessions: the descriptions of sessions.
        interrupted: the frame that a signal has interrupted, if a signal handler asks.
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
        self.tasks = [*itertools.chain.from_iterable(map(asyncio.all_tasks, loops))]
        self._stacks = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        self._running: dict[Task | None, Frames] = {}
        """What loops run, by the task; under None, code that belongs to no task."""
        for loop, thread in loops.items():
            # In this thread, this code itself runs.
            is_own = thread == threading.get_ident()
            frames = loop_frames(interrupted if is_own else self._stacks.get(thread))
            if frames:
                self._running[asyncio.current_task(loop)] = frames
        self._nodes: dict[str, dict[str, Any]] = {}
        self._edges: dict[tuple[str, str], Needs] = {}
        self._keys: list[object] = []  # kept, so that their ids stay unique
        self._new_tasks: list[Task] = []
        self._entries: defaultdict[Task | None, list[Entry]] = defaultdict(list)
        for entry in entries():
            self._entries[entry.task].append(entry)

    def build(self, things: Iterable[object]) -> WaitGraph:
        """Return the graph of `things`, and of all that they wait for, directly or not."""
        self._add(things)
        if None in self._running:
            self._add_running(self._running[None])
        # To expand a task may add further tasks.
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
        """Return the id of the node with a key, and whether it is new.

        The key is a text, or the object that the node stands for.
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
        # Any of one node is this node.
        if needs == "any" and len(awaited) == 1:
            needs = "all"
        for node in awaited:
            self._edges.setdefault((waiter, node), needs)

    def _place(self, node: str, frames: Frames) -> None:
        """Note the line at which a node waits."""
        frame = written_frame(frames)
        if frame is not None:
            code = frame.f_code
            fields = self._nodes[node]
            fields.setdefault("function", code.co_qualname)
            fields.setdefault("where", f"{code.co_filename}:{frame.f_lineno}")

    # -- things that are waited for

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
            elif asyncio.isfuture(thing) or isinstance(thing, concurrent.futures.Future):
                sources = sources_of(thing, self._stacks)
                nodes += self._add(sources)
        return nodes

    def _add_awaited(self, awaited: Awaited) -> str:
        name = printable(awaited.name)
        if is_task(awaited.key) and not awaited.key.done():
            # The call stands for its task.
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
                # It waits for its next run, which another task may make as well: no deadlock. A
                # task that makes a run waits for the session.
                self._edges.update(((node, target), "any") for target in targets)
        return node

    def _add_task(self, task: Task) -> str:
        kind = "task"
        if _is_internal(task):
            kind = HIDDEN
        name = f"task {task.get_name()!r}"
        node, is_new = self._add_node(task, kind, name)
        if is_new:
            self._new_tasks.append(task)
        return node

    def _add_thread(self, thread: threading.Thread) -> str:
        name = f"thread {thread.name!r}"
        node, is_new = self._add_node(thread, "thread", name)
        if is_new:
            frames = frames_of(self._stacks.get(thread.ident or 0))
            self._place(node, frames)
            self._add_end(node, frames, None)
        return node

    def _add_running(self, frames: Frames) -> str:
        """Add the function that blocks an event loop."""
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
        """Add the wait of a task: its entries in the registry, then the end of its awaits."""
        node = _node_id(task)
        links = links_of(task)
        frames = frames_of_links(links)
        running = self._running.get(task)
        if running is not None:
            # The function that runs has the line.
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
        """Note for how long a task has awaited a future, if it was found to do so before."""
        awaited, since = _first_seen.get(task, (None, 0.0))
        if awaited is None or awaited() is not future:
            _first_seen[task] = (ref(future), monotonic())
        else:
            self._nodes[node].setdefault("secs", monotonic() - since)

    def _add_entries(
        self,
        node: str,
        task: Task,
        frames: Frames,
    ) -> str | None:
        """Add the entries of a task in the registry, each as awaited by the one around it.

        Return the innermost node, whose own wait is to be found in the frames, or None if the
        entries say all.
        """
        waits: list[Awaited] = []
        for entry in self._entries[task]:
            awaited = entry.awaited()
            if awaited is not None:
                waits.append(awaited)
        # A task that makes a run waits for its session, and the session for the rest.
        waits.sort(key=lambda wait: wait.kind != "session")
        for awaited in waits:
            if awaited.kind == "calls":
                self._connect(node, self._add(awaited.by()), awaited.needs)
                return None
            target = self._add_awaited(awaited)
            self._connect(node, [target])
            if awaited.ends:
                return None
            if awaited.kind == "session":
                # The session stands for the task.
                self._place(target, frames)
                fields = self._nodes[node]
                if fields["kind"] == "task":
                    fields["kind"] = HIDDEN
            node = target
        return node

    def _add_end(
        self,
        node: str,
        frames: Frames,
        end: object,
    ) -> None:
        """Add the end of a chain of awaits: tasks, the setter of its future, or a function."""
        group, needs = group_of(frames)
        targets = self._add(group) or self._add([end])
        if not targets:
            function = called_function(frames, self._holders)
            targets = self._add([function])
        self._connect(node, targets, needs)

    @functools.cached_property
    def _holders(self) -> Holders:
        return holders_among(self.tasks)


def _node_id(key: object) -> str:
    return key if isinstance(key, str) else str(id(key))


def _is_internal(task: Task) -> bool:
    """Return whether a task runs a private function of this library, or a thread for it."""
    if task.get_name().startswith("thread of "):
        return True
    code: types.CodeType | None = getattr(task.get_coro(), "cr_code", None)
    if code is None or not code.co_filename.startswith(PACKAGE):
        return False
    return code.co_name.startswith("_")
