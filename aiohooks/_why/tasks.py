"""Where tasks and threads are suspended: the chain of awaits of a task, the stack of a thread.

`BlockedLoopWatch` reports what blocks the event loop.

This is for reports: no call is ended and no cancel is attributed because of it. There are two
exceptions, in `session/coordinator.py`, as asyncio does not tell which tasks wait for a queue.
The end of a session does not give its whole grace period to tasks that wait for queues, and a drain
lets producers put what they wait to put, before it cancels them.

`asyncio.Task.get_stack` shows only the outermost coroutine. Here the innermost one counts.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import types
from collections import deque
from collections.abc import Awaitable, Callable, Container
from time import perf_counter
from typing import Any, NamedTuple, TypeGuard, cast

import anyio

from aiohooks._core.activity import Awaited, entries

PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""The folder of this library."""
_INSTALLED = f"-packages{os.sep}"  # "site-", or "dist-" of a Linux distribution
_LIBRARIES = (PACKAGE, os.path.dirname(anyio.__file__) + os.sep, "<")
_STDLIB = os.path.dirname(os.__file__) + os.sep
_MAX_FRAMES = 100
# The functions behind which a loop's callbacks begin. uvloop has no frames, and asyncio's runner
# calls it. If asyncio renames its private one, a report has a few frames more.
_LOOP_FUNCTIONS = ("BaseEventLoop._run_once", "Runner.run")
_LINK_TYPES: tuple[Any, ...] = (
    types.CoroutineType,
    types.AsyncGeneratorType,
    types.GeneratorType,
    Awaitable,
)
Frame = types.FrameType
Frames = tuple[Frame, ...]
Task = asyncio.Task[Any]


class TaskWait(NamedTuple):
    """The chain of awaits of a task, and the name of its target.

    The frames begin with the outermost. Not everything has a name. `kind` is that of an entry of
    the registry of activity.
    """

    frames: Frames
    awaits: str | None
    kind: str | None

    @property
    def where(self) -> str | None:
        """The line in the user's own code, and the innermost line."""
        return user_location(self.frames)


def task_wait(task: Task) -> TaskWait:
    """Return where a task of this loop waits.

    For the running task, only the outermost function is known.
    """
    frames: Frames = ()
    while True:
        links = links_of(task)
        frames += frames_of_links(links)
        wait = _entered_wait(task)
        if wait is None:
            awaits = None
            if links and is_task(links[-1][1]):
                awaits = describe_awaitable(links[-1][1])
            return TaskWait(frames, awaits, None)
        if wait.kind != "calls":
            return TaskWait(frames, wait.name, wait.kind)
        inner = _first_task(wait)
        # Tasks that wait for one another have no end.
        if inner is None or len(frames) > _MAX_FRAMES:
            return TaskWait(frames, None, None)
        task = inner


def _entered_wait(task: Task) -> Awaited | None:
    """Return the outermost wait of a task in the registry inside of which there is no other."""
    for entry in entries():
        if entry.task is task:
            awaited = entry.awaited()
            if awaited is not None and awaited.ends:
                return awaited
    return None


def _first_task(calls: Awaited) -> Task | None:
    """Return the task of the first call that has not ended."""
    for call in calls.by():
        task = call
        if isinstance(call, Awaited):
            task = call.key
        if is_task(task) and not task.done():
            return task
    return None


def describe_awaitable(awaitable: object) -> str:
    """Return the name of an awaitable before it is awaited: of its task, function or class."""
    if is_task(awaitable):
        return f"task {awaitable.get_name()!r}"
    qualname: str = getattr(awaitable, "__qualname__", type(awaitable).__qualname__)
    return qualname


def describe_suspension(task: Task) -> str:
    """Return the target and the line of a task's wait, as a note for the error that ends it."""
    wait = task_wait(task)
    where = f"at {wait.where or 'its beginning'}"
    if wait.awaits is not None:
        where = f"waiting for {wait.awaits}, {where}"
    return f"when its time was up it was {where}"


def is_task(awaitable: object) -> TypeGuard[Task]:
    """Return whether an object is a task, also of a class that a task factory of the loop uses."""
    return asyncio.isfuture(awaitable) and hasattr(awaitable, "get_coro")


# -- chains of awaits

Link = tuple[Frame | None, Any]
"""The frame and the awaitable of a link of a chain of awaits."""


def links_of(task: Task) -> list[Link]:
    """Return the links of a task's chain of awaits, the outermost first.

    The last link may be a future. A task that has ended has no links.
    """
    links: list[Link] = []
    # Python 3.12.1 crashes in `get_coro` of a task that ended while it was started eagerly.
    link: Any = None if task.done() else task.get_coro()
    while link is not None and len(links) < _MAX_FRAMES:
        if asyncio.isfuture(link):
            links.append((None, link))
            break
        frame, inner = _follow(link)
        links.append((frame, link))
        link = inner
    return links


def _follow(link: Any) -> Link:
    """Return the frame of a link of the chain, and the next link."""
    kind = cast("Any", type(link))
    if kind is types.CoroutineType:
        return link.cr_frame, link.cr_await
    if kind is types.AsyncGeneratorType:
        return link.ag_frame, link.ag_await
    frame = None
    if kind is types.GeneratorType:
        frame = link.gi_frame
        if link.gi_yieldfrom is not None:
            return frame, link.gi_yieldfrom
    # Iterators of futures, steps of async generators and the like have no attribute for what they
    # wrap, and show it to the garbage collector alone. So do generators that resume a coroutine
    # themselves.
    referents: list[Any] = gc.get_referents(link)
    for link_type in _LINK_TYPES:
        for referent in referents:
            if isinstance(referent, link_type):
                return frame, referent
    return frame, None


def frames_of_links(links: list[Link]) -> Frames:
    """Return the frames of a chain of awaits."""
    return tuple(frame for frame, _ in links if frame is not None)


# -- frames


def user_location(frames: Frames) -> str | None:
    """Return the line of `written_frame`, and the innermost line of all.

    `frames` begins with the outermost.
    """
    if not frames:
        return None
    innermost = location(frames[-1])
    written = written_frame(frames)
    if written in (None, frames[-1]):
        return innermost
    return f"{location(written)}, in {innermost}"


def written_frame(frames: Frames) -> Frame | None:
    """Return the innermost frame of the user's own code, or else of an installed package."""
    written = [frame for frame in frames if not is_library(frame)]
    own = [frame for frame in written if is_users(frame)]
    return next(reversed(own or written), None)


def is_users(frame: Frame) -> bool:
    """Return whether a frame is of the user's own code, and of no package."""
    return not is_library(frame) and _INSTALLED not in frame.f_code.co_filename


def is_library(frame: Frame) -> bool:
    """Return whether a frame is of this library, of anyio or of Python's standard library."""
    file = frame.f_code.co_filename
    if file.startswith(_LIBRARIES):
        return True
    return file.startswith(_STDLIB) and _INSTALLED not in file


def location(frame: Frame) -> str:
    """Return the function and the line of a frame."""
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"


def frames_of(
    innermost: Frame | None,
    callers: Container[str] = (),
) -> Frames:
    """Return the frames of a thread up to those functions, the outermost first."""
    frames: deque[Frame] = deque()
    frame = innermost
    while frame is not None and frame.f_code.co_qualname not in callers:
        frames.appendleft(frame)
        frame = frame.f_back
    return tuple(frames)


def loop_frames(innermost: Frame | None) -> Frames:
    """Return the frames that the event loop of a thread runs, the outermost first.

    There are none if the loop waits for events.
    """
    frames = frames_of(innermost, _LOOP_FUNCTIONS)
    if frames and frames[0].f_code.co_name == "select":
        return ()
    return frames


# -- blocked event loops


class BlockedLoopWatch(threading.Thread):
    """A thread that pings the event loop every `secs` seconds, and reports a block.

    The loop is blocked if no answer comes within `secs`. A loop that only waits is not woken, and
    never reported. A block shorter than `secs` is not noticed, and a block twice as long always is.
    The time is real time, not that of the current clock.
    """

    def __init__(
        self,
        secs: float,
        on_blocked: Callable[[Frames, float], object],
    ) -> None:
        """Create a watch of the running loop, in its thread.

        `on_blocked` is called in the watching thread, once for each block. Its arguments are the
        frames that the loop is running, the outermost first, and the seconds without an answer.
        """
        super().__init__(name="blocked loop watch", daemon=True)
        self._secs = secs
        self._on_blocked = on_blocked
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._answered = threading.Event()
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Stop the thread, and block until it has ended."""
        self._stopped.set()
        self._answered.set()
        if self.ident is not None:
            self.join()

    def run(self) -> None:
        """Watch the loop. Called in the thread."""
        while not self._stopped.wait(self._secs) and not self._loop.is_closed():
            if not self._frames():
                continue
            self._answered.clear()
            if self._stopped.is_set():
                # `stop` set the event just before it was cleared. A loop that joins this thread
                # would not answer.
                return
            asked_at = perf_counter()
            try:
                self._loop.call_soon_threadsafe(self._answered.set)
            except RuntimeError:
                # The loop has been closed meanwhile.
                return
            if self._answered.wait(self._secs):
                continue
            frames = self._frames()
            if frames:
                self._on_blocked(frames, perf_counter() - asked_at)
            while not self._answered.wait(self._secs) and not self._loop.is_closed():
                # It is the same block, which has been reported.
                pass

    def _frames(self) -> Frames:
        """Return the frames that the loop is running, the outermost first, or none if it waits."""
        if not self._loop.is_running():
            return ()
        stacks = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        return loop_frames(stacks.get(self._loop_thread))
