"""Where tasks are suspended: the chain of awaits of each, what it waits for, and at which line; and
what blocks the event loop.

For reports: no call is ended and no cancel is attributed by what is found here.

`asyncio.Task.get_stack` shows only the outermost coroutine; here the innermost one counts.
"""

from __future__ import annotations

import abc
import asyncio
import gc
import inspect
import logging
import os
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeGuard, cast

import anyio

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""The folder of this library."""
_WHY = PACKAGE + "_why"
_STDLIB = os.path.dirname(os.__file__) + os.sep
_ANYIO = os.path.dirname(anyio.__file__) + os.sep
_MOST_FRAMES = 100
_LOOP_FILES = (os.path.join("asyncio", "base_events.py"), os.path.join("asyncio", "runners.py"))
# Only the name of `_run_once` shows where the frames of asyncio's loop end. If asyncio renames it,
# a report has one frame more.
_LOOP_FUNCTIONS = ("_run_once", "run", "run_until_complete", "run_forever")
_BLOCKED_SECS = 0.5
"""How long a block is that is warned of at least; one of twice that time always is."""
logger = logging.getLogger("aiohooks")
Frames = tuple[types.FrameType, ...]
Needs = Literal["all", "any", "perhaps"]


class Awaited(NamedTuple):
    """Something with a name that is waited for.

    Attributes:
        kind: "step", "lock", "session" and so on; "calls" is no thing of its own, and stands for
            the calls in `by`, of `key`.
        name: what it is.
        detail: its state.
        by: returns what it waits for itself: tasks, futures, threads, calls, other such things.
        key: the identity of the node: the thing itself, or a text that is the same wherever it is
            known; of a call that runs in a task of its own, that task.
        secs: for how long it has been waited for, or has lasted.
        needs: whether it waits for "all" of those in `by`, for "any" one, or "perhaps" for some, as
            far as is known.
        ends: whether it ends the chain of awaits; otherwise the rest of the chain is what it waits
            for.
        not_found: what to say if `by` is a search that may find nothing.
    """

    kind: str
    name: str
    detail: str = ""
    by: Callable[[], Iterable[Any]] = tuple
    key: object = None
    secs: float | None = None
    needs: Needs = "all"
    ends: bool = True
    not_found: str | None = None


class Waiting(abc.ABC):
    """Has methods that wait for something with a name, or for tasks that they do not await
    themselves, and says for what.
    """

    __slots__ = ()

    @abc.abstractmethod
    def awaited_by(
        self, method: str, arguments: Mapping[str, Any]
    ) -> Awaited | asyncio.Task[Any] | None:
        """Return what a call of one of its coroutine methods waits for: a task that is not done, or
        more; None if not known.
        """


class TaskWait(NamedTuple):
    """The chain of awaits of a task: its frames, outermost first, and what it waits for, if that
    has a name.
    """

    frames: tuple[types.FrameType, ...]
    awaits: str | None

    @property
    def where(self) -> str | None:
        """The line in the user's own code, and the innermost one."""
        return user_location(self.frames)


def task_wait(task: asyncio.Task[Any]) -> TaskWait:
    """Return where a task of this loop waits; of the running task only the outermost function is
    known.
    """
    frames: list[types.FrameType] = []
    awaits: str | None = None
    links = links_of(coroutine_of(task))
    while len(frames) < _MOST_FRAMES and (link := next(links, None)) is not None:
        frame, awaitable = link
        if frame is None:
            awaits = awaits or _task_name(awaitable)
            continue
        frames.append(frame)
        awaited: Any = awaited_in(frame)
        if isinstance(awaited, Awaited):
            is_calls = awaited.kind == "calls"
            awaits = awaited.name if awaited.ends and not is_calls else awaits
            awaited = next((call.key for call in awaited.by()), None) if is_calls else None
        if awaited is not None:
            links = links_of(coroutine_of(awaited))
    return TaskWait(tuple(frames), awaits)


def coroutine_of(task: asyncio.Task[Any]) -> Any:
    """Return the coroutine of a task; None if it has ended."""
    # Not of a task that has ended: Python 3.12.1 crashes in `get_coro` of one that ended while it
    # was started eagerly.
    return None if task.done() else task.get_coro()


def describe_awaitable(awaitable: object) -> str:
    """Return what something will wait for that is about to be awaited."""
    frame = awaitable.cr_frame if inspect.iscoroutine(awaitable) else None
    awaited = None if frame is None else awaited_in(frame)
    name = awaited.name if isinstance(awaited, Awaited) else _task_name(awaitable)
    if isinstance(awaitable, types.CoroutineType):
        return name or awaitable.__qualname__
    return name or type(awaitable).__qualname__


def describe_suspension(task: asyncio.Task[Any]) -> str:
    """Return what a task waits for and at which line, as a note for the error that ends the
    wait.
    """
    wait = task_wait(task)
    awaits = "" if wait.awaits is None else f"waiting for {wait.awaits}, "
    return f"when its time was up it was {awaits}at {wait.where or 'its beginning'}"


def is_task(one: object) -> TypeGuard[asyncio.Task[Any]]:
    """Return whether an object is a task, of whichever class: a factory of the loop may make others
    than asyncio's.
    """
    return asyncio.isfuture(one) and hasattr(one, "get_coro")


def _task_name(awaited: object) -> str | None:
    return f"task {awaited.get_name()!r}" if is_task(awaited) else None


def awaited_in(frame: types.FrameType) -> Awaited | asyncio.Task[Any] | None:
    """Return what the call of a frame waits for, if it is one of a method of a `Waiting`."""
    code = frame.f_code
    # Of this library's code only: before Python 3.13 a frame keeps what its variables were when
    # they were asked for.
    if code.co_filename.startswith(PACKAGE) and "self" in code.co_varnames[:1]:
        arguments = frame.f_locals
        if isinstance(owner := arguments.get("self"), Waiting):
            return owner.awaited_by(code.co_name, arguments)
    return None


def links_of(link: Any) -> Generator[tuple[types.FrameType | None, Any]]:
    """Yield the chain of awaits from a coroutine on: the frame and the awaitable of each link; the
    last one may be a future.
    """
    for _ in range(_MOST_FRAMES):
        if link is None:
            return
        frame, inner = (None, None) if asyncio.isfuture(link) else _follow(link)
        yield frame, link
        link = inner


def _follow(link: Any) -> tuple[types.FrameType | None, Any]:
    """Return the frame of one link of the chain, and the next link."""
    kind = cast("Any", type(link))
    if kind is types.CoroutineType:
        return link.cr_frame, link.cr_await
    if kind is types.AsyncGeneratorType:
        return link.ag_frame, link.ag_await
    frame, inner = (
        (link.gi_frame, link.gi_yieldfrom) if kind is types.GeneratorType else (None, None)
    )
    if inner is None:
        # Iterators of futures, steps of async generators and the like have no attribute for what
        # they wrap, and show it to the garbage collector alone; so do generators that resume a
        # coroutine themselves.
        referents: list[Any] = gc.get_referents(link)
        kinds: tuple[Any, ...] = (
            types.CoroutineType,
            types.AsyncGeneratorType,
            types.GeneratorType,
            Awaitable,
        )
        inner = next((one for kind in kinds for one in referents if isinstance(one, kind)), None)
    return frame, inner


def user_location(frames: Sequence[types.FrameType]) -> str | None:
    """Return the innermost frame of the user's own code and the innermost of all; `frames` has the
    outermost first.
    """
    if not frames:
        return None
    innermost = frames[-1]
    own = next((frame for frame in reversed(frames) if not is_library(frame)), innermost)
    return location(innermost) if own is innermost else f"{location(own)}, in {location(innermost)}"


def secs_text(secs: float) -> str:
    """Return seconds as text, with three digits or all of them: `0.25 s`, `4130 s`."""
    return f"{secs:.3g} s" if secs < 999 else f"{secs:.0f} s"


def is_library(frame: types.FrameType) -> bool:
    """Return whether a frame is of this library, of anyio or of Python's own; these are not the
    user's.
    """
    file = frame.f_code.co_filename
    return file.startswith((PACKAGE, _ANYIO, "<")) or (
        file.startswith(_STDLIB) and "site-packages" not in file
    )


def location(frame: types.FrameType) -> str:
    """Return the function and the line of a frame."""
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"


def format_tasks(tasks: Iterable[asyncio.Task[Any]]) -> str:
    """Return the tasks with their chains of awaits, as text for a log."""
    lines: list[str] = []
    for task in tasks:
        wait = task_wait(task)
        lines.append(
            f"task {task.get_name()!r}" + (f", waiting for {wait.awaits}" if wait.awaits else "")
        )
        lines += [f"  {location(frame)}" for frame in wait.frames] or [
            "  has not begun, or is written in C"
        ]
    return "\n".join(lines)


_STATES = {
    "T": "stopped by a signal; SIGCONT continues it",
    "t": "stopped by a debugger",
    "Z": "ended, and not waited for",
}


def process_state(pid: int) -> str | None:
    """Return what the system says of a process of this machine that does not run; None if it
    can.
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


class BlockedLoopWatch(threading.Thread):
    """A thread that pings the event loop every `secs` seconds, and reports a block when no answer
    comes within `secs`.

    A loop that only waits is not woken, and never reported. A block shorter than `secs` is not
    noticed; one that lasts twice as long always is. The time is real time, not the current clock's.
    """

    def __init__(self, secs: float, on_blocked: Callable[[Frames, float], object]) -> None:
        """Create a watch of the running loop, in its thread.

        `on_blocked` is called in the watching thread, once for each block, with the frames that the
        loop is running, the outermost first, and for how long it has not answered; the watch ends
        when it returns True.
        """
        super().__init__(name="blocked loop watch", daemon=True)
        self._secs = secs
        self._on_blocked = on_blocked
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._answered = threading.Event()
        self._stopped = threading.Event()

    def stop(self, *, wait: bool = True) -> None:
        """Stop the thread, and block until it has ended, unless not to `wait`."""
        self._stopped.set()
        self._answered.set()
        if wait and self.ident is not None:
            self.join()

    def run(self) -> None:
        """Called in the thread."""
        while not self._stopped.wait(self._secs) and not self._loop.is_closed():
            if not self._frames():
                continue
            self._answered.clear()
            if self._stopped.is_set():
                # `stop` set the event just before it was cleared; a loop that joins this thread
                # would not answer
                return
            asked = time.perf_counter()
            try:
                self._loop.call_soon_threadsafe(self._answered.set)
            except RuntimeError:  # the loop has been closed meanwhile
                return
            if not self._answered.wait(self._secs):
                frames = self._frames()
                if frames and self._on_blocked(frames, time.perf_counter() - asked) is True:
                    return
                while not self._answered.wait(self._secs) and not self._loop.is_closed():
                    pass  # the same block, which has been reported

    def _frames(self) -> Frames:
        """Return the frames that the loop is running, the outermost first; none if it waits."""
        current_frames = sys._current_frames  # pyright: ignore[reportPrivateUsage]
        innermost = current_frames().get(self._loop_thread)
        frames = frames_of(innermost, in_loop=True) if self._loop.is_running() else ()
        waits = len(frames) == 1 and frames[0].f_code.co_name == "select"
        return () if waits else frames


def frames_of(innermost: types.FrameType | None, *, in_loop: bool = False) -> Frames:
    """Return the frames of a thread, the outermost first, without those that ask; with `in_loop`
    those that its loop runs.
    """
    frames: deque[types.FrameType] = deque()
    while innermost is not None and not (in_loop and _is_loop(innermost)):
        if not innermost.f_code.co_filename.startswith(_WHY):
            frames.appendleft(innermost)
        innermost = innermost.f_back
    return tuple(frames)


def _is_loop(frame: types.FrameType) -> bool:
    """Return whether this is a frame of the event loop; uvloop has none, but asyncio's runner calls
    it too.
    """
    return frame.f_code.co_name in _LOOP_FUNCTIONS and frame.f_code.co_filename.endswith(
        _LOOP_FILES
    )


_watches: dict[asyncio.AbstractEventLoop, tuple[BlockedLoopWatch, int]] = {}
"""Of each loop with open sessions, its watch, and how many sessions it has."""


def warn_if_blocked() -> Callable[[], None]:
    """Log, once, where the running loop is blocked for long, until the returned function is called;
    also by several sessions.
    """
    loop = asyncio.get_running_loop()
    watch, users = _watches.get(loop) or (BlockedLoopWatch(_BLOCKED_SECS, _warn_of_block), 0)
    if users == 0:
        watch.start()
    _watches[loop] = watch, users + 1

    def end() -> None:
        _, users = _watches[loop]
        if users > 1:
            _watches[loop] = watch, users - 1
        else:
            del _watches[loop]
            watch.stop(wait=False)

    return end


def _warn_of_block(frames: Frames, secs: float) -> bool:
    logger.warning(
        "the event loop has been blocked for %.1f s, at %s: nothing else can run meanwhile, no"
        " other hook, signal or time limit; await it, or call it in a thread: in_thread,"
        " BlockingHook, asyncio.to_thread (logged once; HookTimingHook finds more)",
        *(secs, user_location(frames)),
    )
    return True
