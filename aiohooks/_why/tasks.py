"""Where tasks and threads are suspended: the chain of awaits of a task, the stack of a thread.

`BlockedLoopWatch` reports what blocks the event loop.

This module is for reports: the library ends no call, and attributes no cancel, because of it. There
is one exception, `_queue_wait` in `session/coordinator.py`, as asyncio does not show which tasks
wait for a queue: the end of a session does not give its whole grace period to such tasks.

`asyncio.Task.get_stack` shows only the outermost coroutine. These functions find the innermost.
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
# Packages are installed in "site-packages", or in "dist-packages" of a Linux distribution.
_INSTALLED = f"-packages{os.sep}"
# The beginnings of file names. Code that Python has generated has a name such as "<string>".
_LIBRARIES = (PACKAGE, os.path.dirname(anyio.__file__) + os.sep, "<")
_STDLIB = os.path.dirname(os.__file__) + os.sep
_MAX_FRAMES = 100
# The function of asyncio that calls a loop's callbacks. uvloop has no frames of its own, so behind
# it the caller of the loop is found. If asyncio renames its private function, a report has a few
# frames more.
_LOOP_FUNCTIONS = ("BaseEventLoop._run_once", "Runner.run")
# The types of the next link of a chain, for a link that has no attribute for it.
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
    """The wait of a task.

    Attributes:
        frames: the frames of its chain of awaits, the outermost first.
        awaits: the name of the target at the end, or None if that has no name.
        kind: the kind of the wait in the registry of activity, or None if it is not there.
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

    The frames lead from the task to the code that waits. If the task waits for calls that this
    library makes in tasks of their own, they continue with the task of the first such call. For the
    running task, only the outermost function is known.
    """
    frames: Frames = ()
    while True:
        links = links_of(task)
        frames += frames_of_links(links)
        wait = _entered_wait(task)
        if wait is None:
            # The registry has no wait of this task. A task that it awaits is named, and not
            # followed.
            name = None
            if links:
                _, awaited = links[-1]
                name = describe_awaitable(awaited) if is_task(awaited) else None
            return TaskWait(frames, awaits=name, kind=None)
        if wait.kind != "calls":
            return TaskWait(frames, awaits=wait.name, kind=wait.kind)
        called_task = _first_task(wait)
        # The limit is for tasks that wait for one another: their chain has no end.
        if called_task is None or len(frames) > _MAX_FRAMES:
            return TaskWait(frames, awaits=None, kind=None)
        task = called_task


def _entered_wait(task: Task) -> Awaited | None:
    """Return the outermost wait of a task in the registry that is its whole wait, or None.

    Nothing inside of such a wait needs to be reported (`Awaited.ends`).
    """
    for entry in entries():
        if entry.task is task:
            awaited = entry.awaited()
            if awaited is not None and awaited.ends:
                return awaited
    return None


def _first_task(calls: Awaited) -> Task | None:
    """Return the task of the first call that has not ended, or None."""
    for call in calls.by():
        task = call
        if isinstance(call, Awaited):
            task = call.key
        if is_task(task) and not task.done():
            return task
    return None


def describe_awaitable(awaitable: object) -> str:
    """Return the name of an awaitable that is not awaited yet: of its task, function or class."""
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
    """Return whether an object is a task.

    A task factory of the loop may make tasks of a class that is not derived from `asyncio.Task`, so
    this checks for a future with the method `get_coro`.
    """
    return asyncio.isfuture(awaitable) and hasattr(awaitable, "get_coro")


# -- chains of awaits

Link = tuple[Frame | None, Any]
"""A link of a chain of awaits: its frame, or None if it has none, and the awaitable itself."""


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
    """Return the frame of an awaitable in a chain, and the next awaitable. Both may be None."""
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
    # Some objects wrap an awaitable and have no attribute for it: iterators of futures, steps of
    # async generators, generators that resume a coroutine themselves. Only the garbage collector
    # shows to which awaitable they refer.
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
    """Return the line at which the user's code waits, and the innermost line if it differs.

    An example is "main (app.py:12), in sleep (asyncio/tasks.py:649)".

    Args:
        frames: the frames, the outermost first. Without frames, the result is None.
    """
    if not frames:
        return None
    innermost = location(frames[-1])
    user_frame = user_code_frame(frames)
    if user_frame in (None, frames[-1]):
        return innermost
    return f"{location(user_frame)}, in {innermost}"


def user_code_frame(frames: Frames) -> Frame | None:
    """Return the innermost frame of the user's own code, or else of a package, or else None."""
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
    """Return the frames of a thread, the outermost first.

    Args:
        innermost: the current frame of the thread. None has no frames.
        callers: the names of functions whose frames, and those of their callers, are left out.
    """
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
                # The loop waits for events. It is not blocked, and is not woken.
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
                # This is still the same block, which has been reported.
                pass

    def _frames(self) -> Frames:
        """Return the frames that the loop is running, the outermost first, or none if it waits."""
        if not self._loop.is_running():
            return ()
        stacks = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        return loop_frames(stacks.get(self._loop_thread))
