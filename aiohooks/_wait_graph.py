"""The wait-for graph: which task, call, lock, queue, step or thread waits for which, with the lines of the user's code.

`WaitGraph` is plain data, which processes can exchange. `wait_graph` makes it of what exists at that moment: nothing is noted
while a program runs. For reports, as in `_diagnostics`: nothing is decided by what is found here.

    WaitNode, WaitEdge   what waits or is waited for; who waits for what
    WaitGraph            all of them, as text and as JSON; its deadlocks
    wait_graph           of event loops, of one task, or of something that is waited for
"""

from __future__ import annotations

import ast
import asyncio
import concurrent.futures
import contextlib
import dataclasses
import gc
import inspect
import itertools
import json
import linecache
import os
import queue
import re
import sys
import threading
import time
import types
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import anyio
import anyio.abc

from aiohooks._diagnostics import PACKAGE, Awaited, AwaitedCall, Waiting, coroutine_of, follow, is_library, is_loop, is_task, process_state
from aiohooks.errors import printable

_MOST_LINKS, _MOST_LINES, _MOST_TASKS = 100, 30, 10_000
_IN_SHORT = 100
"""How many tasks are searched for a note of an error: others may end with an error in the same tick."""


@dataclasses.dataclass(frozen=True, slots=True)
class WaitNode:
    """What waits, or is waited for.

    Attributes:
        id: the same in all processes of a run, of what several of them know.
        kind: "session", "hook", "task", "thread", "lock", "queue", "step", "process" and so on.
        name: what it is.
        detail: its state.
        function: the function of the user's code that waits.
        where: the line at which it waits, as `file:line`.
        secs: for how long it has waited, or lasted; None if that is not known.
        process: the id of the process that has reported it.
    """

    id: str
    kind: str
    name: str
    detail: str = ""
    function: str | None = None
    where: str | None = None
    secs: float | None = None
    process: int = 0

    def __str__(self) -> str:
        text = self.name + (f" ({self.detail})" if self.detail else "")
        if self.where is not None:
            function = "" if self.function is None or self.function in self.name else f"{self.function} at "
            text += f", {function}{_relative(self.where)}"
        return text if self.secs is None else f"{text}, {self.secs:.3g} s"


class WaitEdge(NamedTuple):
    """One that waits, and what it waits for; not `certain` if others could end the wait as well, as far as is known."""

    waiter: str
    awaited: str
    certain: bool


@dataclasses.dataclass(frozen=True, slots=True)
class WaitGraph:
    """Who waits for whom at one moment, of one process or of several; `str()` of it has a line for each chain of waits.

    Attributes:
        nodes: all that waits or is waited for.
        edges: who waits for what.
        notes: what could not be asked, and why.
    """

    nodes: tuple[WaitNode, ...]
    edges: tuple[WaitEdge, ...]
    notes: tuple[str, ...] = ()

    @property
    def deadlocks(self) -> tuple[tuple[WaitNode, ...], ...]:
        """The cycles, each of which only an end from outside can resolve."""
        after = self._after(certain=True)
        nodes = {node.id: node for node in self.nodes}
        found: list[tuple[WaitNode, ...]] = []
        done: set[str] = set()
        for root in after:
            path: dict[str, Iterator[str]] = {}
            ahead: list[str] = [root]
            while ahead:
                node = ahead.pop()
                if node in path:
                    cycle = [*path]
                    found.append(tuple(nodes[one] for one in cycle[cycle.index(node) :]))
                elif node not in done:
                    done.add(node)
                    path[node] = iter(after.get(node, ()))
                while path:  # the next branch of the innermost that has one
                    last = next(reversed(path))
                    if (branch := next(path[last], None)) is not None:
                        ahead.append(branch)
                        break
                    del path[last]
        return tuple(found)

    def chains(self) -> list[tuple[WaitNode, ...]]:
        """Return the paths from what no other waits for to what waits for no other; sessions first."""
        after, nodes = self._after(), {node.id: node for node in self.nodes}
        awaited = {edge.awaited for edge in self.edges}
        kinds = {"session": 0, "hook": 1, "task": 2}
        ordered = sorted(nodes, key=lambda one: (one in awaited, kinds.get(nodes[one].kind, 3)))
        seen: set[str] = set()
        chains: list[tuple[WaitNode, ...]] = []
        for root in ordered:
            ahead: list[tuple[str, ...]] = [] if root in seen else [(root,)]
            while ahead:
                path = ahead.pop()
                further = () if path[-1] in seen else after.get(path[-1], ())
                seen.add(path[-1])
                ahead += [(*path, one) for one in reversed(further)]
                if not further:
                    chains.append(tuple(nodes[one] for one in path))
        return chains

    def lines(self) -> list[str]:
        """Return the deadlocks, and the other chains of waits, as text."""
        lines = [f"deadlock: {' <- '.join(map(str, (*cycle, cycle[0])))}" for cycle in self.deadlocks]
        chains = [chain for chain in map(_shortened, self.chains()) if len(chain) > 1 or chain[0].function is not None]
        for chain in chains[:_MOST_LINES]:
            lines.append(str(chain[0]) if len(chain) == 1 else f"{chain[0]} waits for {' <- '.join(map(str, chain[1:]))}")
        if len(chains) > _MOST_LINES:
            lines.append(f"and {len(chains) - _MOST_LINES} more; to_json() has all")
        return [*lines, *self.notes] or ["nothing waits"]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def to_json(self) -> str:
        """Return the graph, its deadlocks and its text as JSON."""
        deadlocks = [[node.id for node in cycle] for cycle in self.deadlocks]
        return json.dumps({**dataclasses.asdict(self), "deadlocks": deadlocks, "lines": self.lines()})

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the graph that `to_json` was called for."""
        given = json.loads(text)
        nodes, edges = (WaitNode(**one) for one in given["nodes"]), (WaitEdge(*one) for one in given["edges"])
        return cls(tuple(nodes), tuple(edges), tuple(given["notes"]))

    @classmethod
    def join(cls, graphs: Iterable[WaitGraph]) -> Self:
        """Return the graph of several processes: what one of them waits for, and another one has, is connected."""
        nodes: dict[str, WaitNode] = {}
        graphs = list(graphs)
        for node in itertools.chain.from_iterable(one.nodes for one in graphs):
            if node.id not in nodes or nodes[node.id].kind == "process":  # which another one has seen from outside
                nodes[node.id] = node
        edges = dict.fromkeys(edge for one in graphs for edge in one.edges)
        return cls(tuple(nodes.values()), tuple(edges), tuple(note for one in graphs for note in one.notes))

    def _after(self, *, certain: bool = False) -> dict[str, list[str]]:
        after: dict[str, list[str]] = {}
        for edge in self.edges:
            if edge.certain or not certain:
                after.setdefault(edge.waiter, []).append(edge.awaited)
        return after


def _shortened(chain: tuple[WaitNode, ...]) -> tuple[WaitNode, ...]:
    """Leave out the task of a session, and a session that only has a task that says more."""
    return chain[1:] if len(chain) > 1 and chain[0].kind == "task" and chain[1].kind == "session" else chain


def _relative(where: str) -> str:
    here = os.getcwd() + os.sep
    return where.removeprefix(here)


def wait_graph(
    loops: Iterable[asyncio.AbstractEventLoop] = (),
    *,
    also: Iterable[object] = (),
    blocked: Mapping[asyncio.AbstractEventLoop, types.FrameType | None] | None = None,
) -> WaitGraph:
    """Return the wait-for graph of all tasks of the loops, and of what else is given.

    Args:
        loops: the loops: of this thread, or that do not run meanwhile.
        also: what else to show.
        blocked: loops that cannot run now, each with what its thread runs.
    """
    return _Builder([*loops], blocked or {}).build(also)


def why(*waited_for: object) -> str:
    """Return in one line what these tasks wait for, or what these things depend on; for the notes of errors."""
    graph = _Builder([asyncio.get_running_loop()], {}, _IN_SHORT).build(waited_for, only=True)
    return "; ".join(graph.lines()[:3])


class _Builder:
    """Makes one graph. What has been looked at is kept until then, so that ids stay unique."""

    def __init__(
        self,
        loops: list[asyncio.AbstractEventLoop],
        blocked: Mapping[asyncio.AbstractEventLoop, types.FrameType | None],
        most: int = _MOST_TASKS,
    ) -> None:
        self._blocked = blocked
        self._process = os.getpid()
        self._all = [*itertools.islice(itertools.chain.from_iterable(map(asyncio.all_tasks, loops)), most)]
        self._running = {asyncio.current_task(loop): frame for loop, frame in blocked.items()}
        self._stacks: dict[int, types.FrameType] = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        self._ids: dict[object, str] = {}
        self._kept: list[object] = []
        self._nodes: dict[str, WaitNode] = {}
        self._edges: dict[tuple[str, str], bool] = {}
        self._ahead: deque[Callable[[], None]] = deque()
        self._searches: deque[Callable[[], None]] = deque()

    def build(self, also: Iterable[object], *, only: bool = False) -> WaitGraph:
        for one in also:
            self._targets(one)
        for task in () if only else self._all:
            self._add_task(task)
        while self._ahead or self._searches:
            (self._ahead or self._searches).popleft()()
        return WaitGraph(tuple(self._nodes.values()), tuple(WaitEdge(*ids, certain) for ids, certain in self._edges.items()))

    # -- nodes and edges

    def _add(self, key: object, kind: str, name: str, **more: Any) -> tuple[str, bool]:
        """Return the id of a node, and whether it is new."""
        key = key if isinstance(key, (str, tuple)) else (self._kept.append(key), id(key))[1]
        node = self._ids.get(key)
        if node is not None:
            return node, False
        node = self._ids[key] = key if isinstance(key, str) else f"{self._process}/{len(self._ids)}"
        self._nodes[node] = WaitNode(node, kind, name, process=self._process, **more)
        return node, True

    def _change(self, node: str, **changes: Any) -> None:
        self._nodes[node] = dataclasses.replace(self._nodes[node], **changes)

    def _connect(self, waiter: str, awaited: Iterable[str], *, any_of: bool = False) -> bool:
        ids = [one for one in awaited if one != waiter or not any_of]
        for one in ids:
            self._edges[waiter, one] = self._edges.get((waiter, one), False) or not any_of or len(ids) == 1
        return bool(ids)

    def _targets(self, thing: Any) -> list[str]:
        """Return the nodes of something that is waited for."""
        if isinstance(thing, Awaited):
            return [self._add_awaited(thing)]
        if isinstance(thing, AwaitedCall):
            node = self._add_task(thing.task)
            self._change(node, kind=thing.kind, name=printable(thing.name), secs=thing.secs)
            return [node]
        if is_task(thing):
            return [] if thing.done() else [self._add_task(thing)]
        if isinstance(thing, threading.Thread):
            return [] if thing.ident is None else [self._add_thread(thing.ident)]
        if isinstance(thing, concurrent.futures.Future):
            return self._of_executor(thing)  # pyright: ignore[reportUnknownArgumentType]
        return self._of_future(thing) if asyncio.isfuture(thing) else []

    def _add_awaited(self, one: Awaited) -> str:
        more: dict[str, Any] = {"detail": printable(one.detail), "secs": one.secs}
        node, is_new = self._add(one if one.key is None else one.key, one.kind, printable(one.name), **more)
        if (by := one.by) is not None and is_new:

            def connect() -> None:
                if one.kind == "session" and any(waiter == node for waiter, _ in self._edges):
                    return  # it is in a run; otherwise it waits for what its block does
                found = self._connect(node, itertools.chain.from_iterable(map(self._targets, by())), any_of=one.any_of)
                if not found and one.not_found:
                    self._change(node, detail=", ".join(filter(None, (self._nodes[node].detail, one.not_found))))

            (self._ahead if one.not_found is None else self._searches).append(connect)
        return node

    def _add_task(self, task: asyncio.Task[Any]) -> str:
        node, is_new = self._add(task, "task", f"task {printable(task.get_name())!r}")
        if is_new:
            self._ahead.append(lambda: self._expand_task(task, node))
        return node

    # -- chains of awaits

    def _expand_task(self, task: asyncio.Task[Any], node: str) -> None:
        if task in self._running:
            frames = _frames(self._running[task], in_loop=True)
            node, complete = self._walk(node, frames)
            self._change(node, detail="runs; the event loop waits for it")
            if not complete:
                self._expand_running(node, frames)
            return
        links = [*_links(coroutine_of(task))]
        node, complete = self._walk(node, [frame for frame, _ in links if frame is not None])
        end = links[-1][1] if links else None
        if not complete and asyncio.isfuture(end):
            self._connect(node, self._of_future(end))
        if (capture := getattr(asyncio, "capture_call_graph", None)) is not None:  # Python 3.14: its own record of the waiters
            for waiter in capture(task).awaited_by:
                if is_task(waiter.future):
                    self._connect(self._add_task(waiter.future), [self._ids[id(task)]])

    def _walk(self, node: str, frames: Sequence[types.FrameType]) -> tuple[str, bool]:
        """Add what has a name in a chain of awaits; return the last node, and whether the end of the chain is known."""
        part: list[types.FrameType] = []
        for frame in frames:
            part.append(frame)
            if (awaited := _awaited_by(frame, part, self)) is None:
                continue
            self._place(node, part)
            if isinstance(awaited, Awaited) and awaited.kind == "calls":
                if isinstance(awaited.key, Awaited):
                    node, _ = self._joined(node, awaited.key)
                for call in () if awaited.by is None else awaited.by():
                    self._connect(node, self._targets(call))
                return node, True
            node, is_end = self._joined(node, awaited)
            if is_end:
                return node, True
            part = []
        self._place(node, part)
        return node, False

    def _joined(self, node: str, awaited: Any) -> tuple[str, bool]:
        targets = self._targets(awaited)
        self._connect(node, targets)
        if isinstance(awaited, Awaited) and not awaited.ends:
            return targets[0], False
        return node, True

    def _place(self, node: str, frames: Sequence[types.FrameType]) -> None:
        """Note the line of a node: the innermost of the user's own, or else of all, which has no function then."""
        if not frames or self._nodes[node].where is not None:
            return
        own = next((frame for frame in reversed(frames) if not is_library(frame)), None)
        at = own or frames[-1]
        function = None if own is None else own.f_code.co_qualname.removeprefix("<locals>.")
        self._change(node, function=function, where=f"{at.f_code.co_filename}:{at.f_lineno}")

    def _of_future(self, future: Any) -> list[str]:
        """Return what sets a future that is no task, as far as that can be seen."""
        if is_task(future):
            return self._targets(future)
        found = [*(getattr(future, "_children", None) or ())]  # of `asyncio.gather`
        for callback, _ in getattr(future, "_callbacks", None) or ():
            # `shield` and `wrap_future` have the other future in a closure.
            cells = getattr(callback, "__closure__", None) or ()
            contents = [cell.cell_contents for cell in cells if cell != types.CellType()]
            found += [one for one in contents if isinstance(one, (asyncio.Future, concurrent.futures.Future)) and one is not future]
        return [*itertools.chain.from_iterable(self._targets(one) for one in found if not one.done())]

    # -- holders and users of what tasks wait for

    def holders(self, thing: object) -> list[asyncio.Task[Any] | threading.Thread]:
        """Return the tasks and threads that are in a `with` block of something."""
        found: list[Any] = [task for task, held in self._held if any(one is thing for one in held)]
        owner = re.search(r"owner=(\d+)", repr(thing)) if isinstance(thing, type(threading.RLock())) else None
        for thread in threading.enumerate():
            if owner is not None:
                is_held = thread.ident == int(owner[1])
            else:
                is_held = isinstance(thing, _THREAD_LOCKS) and any(
                    one is thing for frame in _frames(self._stacks.get(thread.ident or 0)) for one in _entered(frame)
                )
            if is_held:
                found.append(thread)
        return found

    @property
    def _held(self) -> list[tuple[asyncio.Task[Any], list[Any]]]:
        found = self.__dict__.get("_held_once")
        if found is None:
            found = self.__dict__["_held_once"] = [(task, _held_by(task)) for task in self._all]
        held: list[tuple[asyncio.Task[Any], list[Any]]] = found
        return held

    def users(self, thing: object, key: object) -> Iterator[asyncio.Task[Any]]:
        """Return the tasks that have something in a variable, or in an attribute of one, and do not wait for its node."""
        ahead, waiting = [self._ids[key]], set[str]()
        while ahead:
            waiting.add(node := ahead.pop())
            ahead += [waiter for waiter, awaited in self._edges if awaited == node and waiter not in waiting]
        for task in self._all:
            if self._ids.get(id(task)) not in waiting and not task.done() and _refers(task, thing):
                yield task

    # -- threads

    def _add_thread(self, ident: int) -> str:
        thread = next((one for one in threading.enumerate() if one.ident == ident), None)
        name = f"thread {printable('unknown' if thread is None else thread.name)!r}"
        node, is_new = self._add(("thread", ident), "thread", name)
        if is_new:
            frames = _frames(self._stacks.get(ident))
            detail = "" if thread is None or thread.native_id is None else _kernel_state(thread.native_id)
            self._change(node, detail=detail)
            self._ahead.append(lambda: self._expand_running(node, frames))
        return node

    def _expand_running(self, node: str, frames: Sequence[types.FrameType]) -> None:
        """Add what code that runs in a thread, or blocks it, waits for."""
        self._place(node, frames)
        if (awaited := _thread_wait(frames, self)) is not None:
            self._connect(node, self._targets(awaited))

    def _of_executor(self, future: concurrent.futures.Future[Any]) -> list[str]:
        """Return the thread that has the call of a future of an executor; or the task that `run_coroutine_threadsafe` made."""
        busy: list[str] = []
        for ident, innermost in self._stacks.items():
            for frame in _frames(innermost):
                if frame.f_code.co_name == "run" and isinstance(work := frame.f_locals.get("self"), _WORK_ITEM):
                    node = self._add_thread(ident)
                    if work.future is future:
                        return [node]
                    busy.append(node)
        callbacks = [one.__closure__ or () for one in getattr(future, "_done_callbacks", ()) if hasattr(one, "__closure__")]
        tasks = [cell.cell_contents for cells in callbacks for cell in cells if is_task(cell.cell_contents)]
        if tasks or not busy:
            return [*itertools.chain.from_iterable(map(self._targets, tasks))]
        node, _ = self._add(("pool", id(future)), "pool", "a free thread of the executor", detail=f"{len(busy)} are busy")
        self._connect(node, busy, any_of=True)
        return [node]


_WORK_ITEM: Any = concurrent.futures.thread._WorkItem  # type: ignore[attr-defined]  # pyright: ignore[reportPrivateUsage]
_THREAD_LOCKS = type(threading.Lock()), type(threading.RLock())
_EXITS = "__aexit__", "__exit__"


def _links(coro: Any) -> Generator[tuple[types.FrameType | None, Any]]:
    """Yield the chain of awaits: the frame and the awaitable of each link; the last one may be a future."""
    for _ in range(_MOST_LINKS):
        if coro is None:
            return
        if asyncio.isfuture(coro):
            yield None, coro
            return
        frame, inner = follow(coro)
        yield frame, coro
        coro = inner


def _frames(innermost: types.FrameType | None, *, in_loop: bool = False) -> list[types.FrameType]:
    """Return the frames of a thread, the outermost first; those of this module are left out, and so may be the loop's."""
    found: deque[types.FrameType] = deque()
    while innermost is not None and not (in_loop and is_loop(innermost)):
        if innermost.f_code.co_filename != __file__:
            found.appendleft(innermost)
        innermost = innermost.f_back
    return [*found]


def _awaited_by(frame: types.FrameType, outer: Sequence[types.FrameType], builder: _Builder) -> Any:
    """Return what a coroutine waits for, if its function is known."""
    code = frame.f_code
    if code.co_filename.startswith(PACKAGE):
        # Of this library's code, and Python's, only: before Python 3.13 a frame keeps what its variables were when asked for.
        if "self" in code.co_varnames[:1] and isinstance(owner := frame.f_locals.get("self"), Waiting):
            return owner.awaited_by(code.co_name, frame.f_locals)
        return None
    if len(outer) > 1 and outer[-2].f_code.co_name == "call_groups" and outer[-2].f_code.co_filename.startswith(PACKAGE):
        return Awaited("hook", code.co_qualname, ends=False)  # a method that cannot wait, and blocks
    if is_library(frame):
        return _primitive(frame, _expression(outer[:-1]), builder)
    return None


def _primitive(frame: types.FrameType, name: str, builder: _Builder) -> Awaited | None:
    """Return what a coroutine of asyncio or anyio waits for."""
    method, at = frame.f_code.co_name, f"{os.getpid()}:{id(frame.f_locals.get('self'))}:{frame.f_code.co_name}"
    owner: Any = frame.f_locals.get("self")

    def used(kind: str, detail: str, what: str) -> Awaited:
        by = lambda: builder.users(owner, at)  # noqa: E731
        return Awaited(kind, f"{kind}{name}", detail, by, at, any_of=True, not_found=f"no task that could {what} was found")

    def held(kind: str, detail: str, lock: object, *, any_of: bool = False) -> Awaited:
        unknown = "its holder is not known: it was acquired without a `with` block"
        return Awaited(kind, f"{kind}{name}", detail, lambda: builder.holders(lock), at, any_of=any_of, not_found=unknown)

    match owner, method:
        case (asyncio.Lock() | anyio.Lock()), "acquire":
            return held("lock", "held", owner)
        case asyncio.Semaphore(), "acquire":
            bound = getattr(owner, "_bound_value", None)
            return held("semaphore", "none free" if bound is None else f"{bound} of {bound} in use", owner, any_of=True)
        case anyio.CapacityLimiter(), ("acquire" | "acquire_on_behalf_of"):
            return held("limiter", f"{owner.borrowed_tokens} of {owner.total_tokens:g} in use", owner, any_of=True)
        case asyncio.Queue(), "put":
            return used("queue", f"full, {owner.qsize()} of {owner.maxsize}", "take from it")
        case asyncio.Queue(), "get":
            return used("queue", "empty", "fill it")
        case asyncio.Queue(), "join":
            left = f"{owner._unfinished_tasks} without task_done, {owner.qsize()} of them still in it"
            return used("queue", left, "call task_done")
        case (asyncio.Event() | anyio.Event()), "wait":
            return used("event", "not set", "set it")
        case asyncio.Condition(), "wait":
            return used("condition", "not notified", "notify it")
        case asyncio.StreamReader(), "_wait_for_data":
            peer = owner._transport and owner._transport.get_extra_info("peername")
            return Awaited("connection", f"data from {_address(peer)}", key=at)
        case asyncio.subprocess.Process(), ("wait" | "communicate"):
            return Awaited("process", f"process {owner.pid}", process_state(owner.pid) or "", key=at)
        case _, "run_sync_in_worker_thread" if (worker := frame.f_locals.get("worker")) is not None:
            return Awaited("calls", "", by=lambda: [worker])
        case _, "sleep" if hasattr(timer := frame.f_locals.get("h"), "when"):
            return Awaited("timer", "asyncio.sleep", f"{timer.when() - time.monotonic():.3g} s left", key=("timer", id(timer)))
        case _, "_wait" if frame.f_code.co_filename.endswith("tasks.py"):
            return Awaited("calls", "", by=lambda: [one for one in frame.f_locals.get("fs", ()) if not one.done()])
        case asyncio.TaskGroup(), "__aexit__":
            return Awaited("calls", "", by=lambda: [*owner._tasks])
        case _:
            return None


def _thread_wait(frames: Sequence[types.FrameType], builder: _Builder) -> Any:
    """Return what a thread waits for: a lock, a queue, another thread, a future."""
    inner = [*itertools.takewhile(is_library, reversed(frames))]
    name = _expression(frames)
    for frame in reversed(inner):
        owner: Any = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames[:1] else None
        match owner, frame.f_code.co_name:
            case threading.Thread(), ("join" | "_wait_for_tstate_lock"):
                return owner
            case concurrent.futures.Future(), ("result" | "exception"):
                return owner  # pyright: ignore[reportUnknownVariableType]
            case threading.Event(), "wait":
                return Awaited("event", f"threading.Event{name}", "not set", key=owner)
            case queue.Queue(), ("get" | "put" | "join"):
                return Awaited("queue", f"queue.Queue{name}", f"{owner.qsize()} of {owner.maxsize or 'any number'}", key=owner)
            case _:
                continue
    if inner or not frames:
        return None
    lock = _value(_position(frames[-1]), frames[-1])
    if isinstance(lock, _THREAD_LOCKS) and (not hasattr(lock, "locked") or lock.locked()):
        unknown = "its holder is not known: it was acquired without a `with` block"
        return Awaited("lock", f"lock{name}", "held", lambda: builder.holders(lock), lock, not_found=unknown)
    return None


# -- what the code of a frame has


def _position(frame: types.FrameType) -> ast.expr | None:
    """Return the expression that a frame evaluates now: of a call, what is called; of a `with` statement, its object."""
    if frame.f_lasti < 0:
        return None
    line, last, column, end = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    if line is None or last is None or column is None or end is None:
        return None
    lines = [text.encode() for text in linecache.getlines(frame.f_code.co_filename, frame.f_globals)[line - 1 : last]]
    if not lines:
        return None
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][column:]
    lines[0] = lines[0].lstrip()
    with contextlib.suppress(SyntaxError, ValueError):
        node: Any = ast.parse(b"".join(lines)).body[0]
        if isinstance(node, (ast.With, ast.AsyncWith)) and len(node.items) == 1:
            node = node.items[0].context_expr
        node = node.value if isinstance(node, ast.Expr) else node
        node = node.value if isinstance(node, ast.Await) else node
        node = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else node
        return node if isinstance(node, ast.expr) else None
    return None


def _expression(frames: Sequence[types.FrameType]) -> str:
    """Return the name under which the innermost of the user's own functions knows what it waits for."""
    own = next((frame for frame in reversed(frames) if not is_library(frame)), None)
    node = None if own is None else _position(own)
    return "" if not isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)) else f" `{ast.unparse(node)}`"


def _value(node: ast.expr | None, frame: types.FrameType) -> Any:
    """Return the value of a name or an attribute in a frame; no code of users is called for it."""
    if isinstance(node, ast.Name):
        scopes = frame.f_locals, frame.f_globals
        return next((scope[node.id] for scope in scopes if node.id in scope), None)
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, frame)
        found = inspect.getattr_static(owner, node.attr, None)
        return found.__get__(owner) if isinstance(found, types.MemberDescriptorType) else found
    return None


def _entered(frame: types.FrameType) -> list[Any]:
    """Return the objects whose `with` blocks a frame that runs is in."""
    if is_library(frame):
        return []
    with contextlib.suppress(SyntaxError, ValueError):
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
        blocks = [one for one in ast.walk(tree) if isinstance(one, ast.With)]
        inside = [one for one in blocks if one.body[0].lineno <= frame.f_lineno <= (one.end_lineno or 0)]
        return [_value(item.context_expr, frame) for one in inside for item in one.items]
    return []


def _held_by(task: asyncio.Task[Any]) -> list[Any]:
    """Return the objects whose `with` blocks a suspended task is in: its coroutines keep their exits on the stack."""
    held: list[Any] = []
    links = [coro for frame, coro in _links(coroutine_of(task)) if frame is not None]
    for number, coro in enumerate(links):
        entered = _exits(coro)
        if entered and number + 1 < len(links) and getattr(links[number + 1], "__name__", "") == "__aenter__":
            entered.pop()  # it waits for this one
        held += entered
    return held


def _exits(referrer: object) -> list[Any]:
    found: list[Any] = []
    referents = gc.get_referents(referrer)
    for number, one in enumerate(referents):
        owner = getattr(one, "__self__", None) if getattr(one, "__name__", None) in _EXITS else None
        if owner is None and isinstance(one, types.FunctionType) and one.__name__ in _EXITS:  # Python 3.14: and then its object
            owner = next(iter(referents[number + 1 :]), None)
        if owner is None:
            continue
        found.append(owner)
        if isinstance(owner, asyncio.Condition):
            found.append(owner._lock)  # type: ignore[attr-defined]  # pyright: ignore
        if isinstance(inner := getattr(owner, "gen", None), (types.GeneratorType, types.AsyncGeneratorType)):
            found[-1:] = [*_exits(inner), owner]  # pyright: ignore[reportUnknownArgumentType]
        if isinstance(owner, (contextlib.ExitStack, contextlib.AsyncExitStack)):
            callbacks = [callback for _, callback in owner._exit_callbacks]  # type: ignore[union-attr]  # pyright: ignore
            found[-1:] = [*(getattr(one, "__self__", None) for one in callbacks), owner]  # pyright: ignore
    return found


def _refers(task: asyncio.Task[Any], thing: object) -> bool:
    """Return whether a coroutine of a task has something in a variable, in an attribute of one, or in one of that."""
    for frame, coro in _links(coroutine_of(task)):
        ahead = gc.get_referents(coro) if frame is not None else []
        for _ in range(3):
            owners = [getattr(one, "__self__", one) for one in ahead]
            if any(one is thing for one in owners):
                return True
            ahead = [value for one in owners if isinstance(each := getattr(one, "__dict__", None), dict) for value in each.values()]
    return False


# -- what the system knows


def _address(peer: object) -> str:
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) and len(peer) > 1 else str(peer or "a connection")


def _kernel_state(thread: int) -> str:
    """Return what the kernel says of a thread of this process that it does not let go on, such as for a disk."""
    with contextlib.suppress(OSError, IndexError):
        if Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0] == "D":
            return "in the kernel, which waits for a disk or a file system"
    return ""
