"""Where tasks are suspended: the awaits of each task, what it waits for, and at which line.

This is for reports: no call is ended and no cancel is attributed because of it. There are two
exceptions, in `session/coordinator.py`, as asyncio does not tell which tasks wait for a queue.
The end of a session does not give its whole grace period to tasks that wait for queues; and a drain
lets producers put what they wait to put, before it cancels them.

`asyncio.Task.get_stack` shows only the outermost coroutine; here the innermost one counts.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import threading
import types
from collections import deque
from collections.abc import Awaitable, Generator
from typing import Any, NamedTuple, TypeGuard, cast

import anyio

from aiohooks._core.activity import Awaited, entries_of

PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""The folder of this library."""
_WHY = PACKAGE + "_why"
_INSTALLED = f"-packages{os.sep}"  # "site-", or "dist-" of a Linux distribution
_STDLIB = os.path.dirname(os.__file__) + os.sep
_ANYIO = os.path.dirname(anyio.__file__) + os.sep
_MAX_FRAMES = 100
_LOOP_FILES = (
    os.path.join("asyncio", "base_events.py"),
    os.path.join("asyncio", "runners.py"),
)
# Only the name of `_run_once` shows where the frames of asyncio's loop end. If asyncio renames it,
# a report has one frame more.
_LOOP_FUNCTIONS = ("_run_once", "run", "run_until_complete", "run_forever")
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
    """The chain of awaits of a task, and the name of what the task waits for.

    The frames begin with the outermost. Not everything has a name; `kind` is that of an entry of
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
    frames: list[Frame] = []
    name: str | None = None
    kind: str | None = None
    following: Task | None = task
    while following is not None and len(frames) < _MAX_FRAMES:
        links = list(links_of(coroutine_of(following)))
        frames += [frame for frame, _ in links if frame is not None]
        waits = [entry.awaited() for entry in entries_of(following)]
        following = None
        for awaited in waits:
            if awaited is None:
                continue
            if awaited.kind == "calls":
                following = _first_task(awaited)
                break
            if awaited.ends:
                name = awaited.name
                kind = awaited.kind
                break
        else:
            name = _task_name(links[-1][1]) if links else None
    return TaskWait(tuple(frames), name, kind)


def _first_task(calls: Awaited) -> Task | None:
    """Return the task of the first call that has not ended."""
    for call in calls.by():
        task = call.key if isinstance(call, Awaited) else call
        if is_task(task) and not task.done():
            return task
    return None


def coroutine_of(task: Task) -> Any:
    """Return the coroutine of a task; None if the task has ended."""
    if task.done():
        # Python 3.12.1 crashes in `get_coro` of a task that ended while it was started eagerly.
        return None
    return task.get_coro()


def describe_awaitable(awaitable: object) -> str:
    """Return the name of an awaitable before it is awaited: of its task, function or class."""
    name = _task_name(awaitable)
    if inspect.iscoroutine(awaitable):
        name = awaitable.__qualname__
    return name or type(awaitable).__qualname__


def describe_suspension(task: Task) -> str:
    """Return what a task waits for, and at which line, as a note for the error that ends it."""
    wait = task_wait(task)
    awaits = ""
    if wait.awaits is not None:
        awaits = f"waiting for {wait.awaits}, "
    return f"when its time was up it was {awaits}at {wait.where or 'its beginning'}"


def is_task(awaitable: object) -> TypeGuard[Task]:
    """Return whether an object is a task, also of a class that a task factory of the loop uses."""
    return asyncio.isfuture(awaitable) and hasattr(awaitable, "get_coro")


def _task_name(awaitable: object) -> str | None:
    if is_task(awaitable):
        return f"task {awaitable.get_name()!r}"
    return None


def links_of(link: Any) -> Generator[tuple[Frame | None, Any]]:
    """Yield the frame and the awaitable of each link of a chain of awaits, from `link` on.

    The last link may be a future.
    """
    for _ in range(_MAX_FRAMES):
        if link is None:
            return
        if asyncio.isfuture(link):
            yield None, link
            return
        frame, inner = _follow(link)
        yield frame, link
        link = inner


def _follow(link: Any) -> tuple[Frame | None, Any]:
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


def user_location(frames: Frames) -> str | None:
    """Return the innermost line of the user's own code, and the innermost line of all.

    `frames` begins with the outermost.
    """
    if not frames:
        return None
    innermost = frames[-1]
    for frame in reversed(frames):
        if is_library(frame):
            continue
        if frame is innermost:
            break
        return f"{location(frame)}, in {location(innermost)}"
    return location(innermost)


def is_of_aiohooks(code: types.CodeType) -> bool:
    """Return whether a function is of this library."""
    return code.co_filename.startswith(PACKAGE)


def is_library(frame: Frame) -> bool:
    """Return whether a frame is of this library, of anyio or of Python's standard library."""
    file = frame.f_code.co_filename
    if file.startswith((PACKAGE, _ANYIO, "<")):
        return True
    return file.startswith(_STDLIB) and "site-packages" not in file


def is_installed(frame: Frame) -> bool:
    """Return whether a frame is of an installed package."""
    return _INSTALLED in frame.f_code.co_filename


def location(frame: Frame) -> str:
    """Return the function and the line of a frame."""
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"


# -- threads


def threads() -> list[threading.Thread]:
    """Return the threads of this process."""
    # `threading.enumerate` takes a lock, which the code that a signal has interrupted may hold.
    return [*getattr(threading, "_active", {}).values()]


def frames_of(
    innermost: Frame | None,
    *,
    in_loop: bool = False,
) -> Frames:
    """Return the frames of a thread, the outermost first, without those of this package.

    With `in_loop`, only the frames that the event loop of the thread runs.
    """
    frames: deque[Frame] = deque()
    frame = innermost
    while frame is not None:
        if in_loop and _is_loop(frame):
            break
        if not frame.f_code.co_filename.startswith(_WHY):
            frames.appendleft(frame)
        frame = frame.f_back
    return tuple(frames)


def _is_loop(frame: Frame) -> bool:
    """Return whether this is a frame of the event loop.

    uvloop has no frames, but asyncio's runner calls it too.
    """
    code = frame.f_code
    return code.co_name in _LOOP_FUNCTIONS and code.co_filename.endswith(_LOOP_FILES)
