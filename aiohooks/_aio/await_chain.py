"""The chain of awaits of a suspended task: what it waits for, and at which line.

`asyncio.Task.get_stack` shows only the outermost coroutine; here the innermost one counts.
"""

from __future__ import annotations

import asyncio
import gc
import os
import types
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""The folder of this library."""
_STDLIB = os.path.dirname(os.__file__) + os.sep
_MOST_FRAMES = 100


class TaskWait(NamedTuple):
    """The chain of awaits of a task: its frames, outermost first, and the future at its end, if known."""

    frames: tuple[types.FrameType, ...]
    future: asyncio.Future[Any] | None

    @property
    def awaits(self) -> str | None:
        """What the task waits for, if it has a name."""
        for frame in reversed(self.frames):
            if frame.f_code.co_name == "wait_for":
                # A step store, which this package must not import.
                owner, step = frame.f_locals.get("self"), frame.f_locals.get("step")
                describe = getattr(type(cast("object", owner)), "describe_wait", None)
                if describe is not None and step is not None:
                    return str(describe(owner, step))
        return f"task {self.future.get_name()!r}" if isinstance(self.future, asyncio.Task) else None

    @property
    def where(self) -> str | None:
        """The line in the user's own code, and the innermost one."""
        return user_location(self.frames)


def task_wait(task: asyncio.Task[Any]) -> TaskWait:
    """Return where a task of this loop waits; of the running task only the outermost function is known."""
    frames: list[types.FrameType] = []
    # Not of a task that has ended: Python 3.12.1 crashes in `get_coro` of one that ended while it was started eagerly.
    awaited: Any = None if task.done() else task.get_coro()
    while awaited is not None and len(frames) < _MOST_FRAMES:
        if isinstance(awaited, asyncio.Future):
            inner_task = _watched_task(frames)
            if inner_task is None:
                return TaskWait(tuple(frames), awaited)
            awaited = inner_task.get_coro()
        frame, inner = _link(awaited)
        if frame is not None:
            frames.append(frame)
        awaited = inner
    return TaskWait(tuple(frames), None)


def describe_awaitable(awaitable: object) -> str:
    """Return what something will wait for that is about to be awaited."""
    if isinstance(awaitable, asyncio.Task):
        return f"task {awaitable.get_name()!r}"
    if isinstance(awaitable, types.CoroutineType):
        frames = () if awaitable.cr_frame is None else (awaitable.cr_frame,)
        return TaskWait(frames, None).awaits or awaitable.__qualname__
    return type(awaitable).__qualname__


def describe_suspension(task: asyncio.Task[Any]) -> str:
    """Return what a task waits for and at which line, as a note for the error that ends the wait."""
    wait = task_wait(task)
    awaits = "" if wait.awaits is None else f"waiting for {wait.awaits}, "
    return f"when its time was up it was {awaits}at {wait.where or 'its beginning'}"


def _watched_task(frames: Sequence[types.FrameType]) -> asyncio.Task[Any] | None:
    """Return the task for which the innermost frames wait without awaiting it: what such code calls `watched_task`."""
    for frame in frames[-2:]:
        task: asyncio.Task[Any] | None = frame.f_locals.get("watched_task")
        if task is not None and not task.done():
            return task
    return None


def _link(awaited: Any) -> tuple[types.FrameType | None, Any]:
    """Return the frame of one link of the chain, and the next link."""
    kind = cast("Any", type(awaited))
    if kind is types.CoroutineType:
        return awaited.cr_frame, awaited.cr_await
    if kind is types.GeneratorType:
        frame, inner = awaited.gi_frame, awaited.gi_yieldfrom
        if inner is None and frame is not None:
            inner = frame.f_locals.get("coro")  # what `drive` in `cancel_watch.py` calls the coroutine that it resumes
        return frame, inner
    if kind is types.AsyncGeneratorType:
        return awaited.ag_frame, awaited.ag_await
    # Iterators of futures, steps of async generators and the like show what they wrap to the garbage collector alone.
    kinds: Any = asyncio.Future, types.CoroutineType, types.AsyncGeneratorType, types.GeneratorType
    referents: list[Any] = gc.get_referents(awaited)
    return None, next((one for one in referents if isinstance(one, kinds)), None)


def user_location(frames: Sequence[types.FrameType]) -> str | None:
    """Return the innermost frame of the user's own code and the innermost of all; `frames` has the outermost first."""
    if not frames:
        return None
    innermost = frames[-1]
    own = next((frame for frame in reversed(frames) if not _is_library(frame)), innermost)
    return _location(innermost) if own is innermost else f"{_location(own)}, in {_location(innermost)}"


def _is_library(frame: types.FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith((PACKAGE, "<")) or (file.startswith(_STDLIB) and "site-packages" not in file)


def _location(frame: types.FrameType) -> str:
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"


def format_tasks(tasks: Iterable[asyncio.Task[Any]]) -> str:
    """Return the tasks with their chains of awaits, as text for a log."""
    lines: list[str] = []
    for task in tasks:
        wait = task_wait(task)
        lines.append(f"task {task.get_name()!r}" + (f", waiting for {wait.awaits}" if wait.awaits else ""))
        lines += [f"  {_location(frame)}" for frame in wait.frames] or ["  has not begun, or is written in C"]
    return "\n".join(lines)
