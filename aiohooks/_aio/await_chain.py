"""Where a task waits: the chain of its awaits, and what is at the end of it.

`asyncio.Task.get_stack` shows the outermost coroutine only; what one wants to know is the innermost.
"""

from __future__ import annotations

import asyncio
import gc
import os
import types
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = os.path.dirname(os.__file__) + os.sep
_MOST_FRAMES = 100


class Wait(NamedTuple):
    """The end of a chain of awaits: its frames, the outermost first, and the future that it waits for, if that is known."""

    frames: tuple[types.FrameType, ...]
    future: asyncio.Future[Any] | None

    @property
    def awaits(self) -> str | None:
        """What it waits for, in words, where it is something that has a name."""
        for frame in reversed(self.frames):
            if frame.f_code.co_name == "wait_for":
                # A step store, which this package must not import.
                owner, step = frame.f_locals.get("self"), frame.f_locals.get("step")
                describe = getattr(type(owner), "describe_wait", None)
                if describe is not None and step is not None:
                    return str(describe(owner, step))
        return f"task {self.future.get_name()!r}" if isinstance(self.future, asyncio.Task) else None

    @property
    def where(self) -> str | None:
        """The line of the user's own code at which it waits, and the innermost one."""
        return place(self.frames)


def wait_of(task: asyncio.Task[Any]) -> Wait:
    """Where a task of this loop waits; of one that is running now only its outermost function is known."""
    frames: list[types.FrameType] = []
    awaited: Any = task.get_coro()
    while awaited is not None and len(frames) < _MOST_FRAMES:
        if isinstance(awaited, asyncio.Future):
            return Wait(tuple(frames), awaited)
        frame, inner = _step(awaited)
        if frame is not None:
            frames.append(frame)
        awaited = inner
    return Wait(tuple(frames), None)


def standing(task: asyncio.Task[Any]) -> str:
    """What a task waits for, and at which line, for the note of an error that ends the wait."""
    wait = wait_of(task)
    awaits = "" if wait.awaits is None else f"waiting for {wait.awaits}, "
    return f"when its time was up it was {awaits}at {wait.where or 'its beginning'}"


def _step(awaited: Any) -> tuple[types.FrameType | None, Any]:
    """The frame of one link of the chain, and the next link."""
    kind = cast("Any", type(awaited))
    if kind is types.CoroutineType:
        return awaited.cr_frame, awaited.cr_await
    if kind is types.GeneratorType:
        frame, inner = awaited.gi_frame, awaited.gi_yieldfrom
        if inner is None and frame is not None:
            inner = frame.f_locals.get("coro")  # so those of this library call it that drive one by hand
        return frame, inner
    if kind is types.AsyncGeneratorType:
        return awaited.ag_frame, awaited.ag_await
    # Iterators of futures, steps of async generators and the like keep what they stand for to themselves.
    kinds: Any = asyncio.Future, types.CoroutineType, types.AsyncGeneratorType, types.GeneratorType
    referents: list[Any] = gc.get_referents(awaited)
    return None, next((one for one in referents if isinstance(one, kinds)), None)


def place(frames: Sequence[types.FrameType]) -> str | None:
    """The innermost frame that is the user's own, and the innermost of all; of frames with the outermost first."""
    if not frames:
        return None
    innermost = frames[-1]
    own = next((frame for frame in reversed(frames) if not _is_library(frame)), innermost)
    return named(innermost) if own is innermost else f"{named(own)}, in {named(innermost)}"


def _is_library(frame: types.FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith((_PACKAGE, "<")) or (file.startswith(_STDLIB) and "site-packages" not in file)


def named(frame: types.FrameType) -> str:
    """Function, file and line."""
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"


def dump(tasks: Iterable[asyncio.Task[Any]]) -> str:
    """The tasks with all their awaits, for a log."""
    lines: list[str] = []
    for task in tasks:
        wait = wait_of(task)
        lines.append(f"task {task.get_name()!r}" + (f", waiting for {wait.awaits}" if wait.awaits else ""))
        lines += [f"  {named(frame)}" for frame in wait.frames] or ["  has not begun, or is written in C"]
    return "\n".join(lines)
