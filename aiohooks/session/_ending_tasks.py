"""What the end of a session needs to find out about tasks: how long they are waited for, and
whether waiting makes sense.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator, Mapping
from types import FrameType
from typing import Any

from aiohooks._core.clock import current_clock, secs_text
from aiohooks._core.reports import logger
from aiohooks._why.tasks import coroutine_of, links_of, task_wait

_NOTICE_SECS = 1.0
_Queue: Any = asyncio.Queue
_QUEUE_METHODS = frozenset({_Queue.put.__code__, _Queue.get.__code__, _Queue.join.__code__})


def queue_wait(task: asyncio.Task[Any]) -> object:
    """Return the future of a task that waits in a method of a queue, and else None.

    None in a `with` block, too: it may be a time limit, after which the task continues by itself.
    """
    from aiohooks._why.frames import held_by  # seldom needed

    _, waiter = _innermost(task)
    if asyncio.isfuture(waiter) and not waiter.done() and not held_by(task):
        return waiter
    return None


def wait_to_put(task: asyncio.Task[Any]) -> tuple[object, object] | None:
    """Return the queue that a task waits to put into, and the future of this wait; else None."""
    frame, waiter = _innermost(task)
    if frame is None or frame.f_code is not _Queue.put.__code__:
        return None
    return frame.f_locals.get("self"), waiter


def _innermost(task: asyncio.Task[Any]) -> tuple[FrameType | None, object]:
    """Return the frame of the queue's method that a task waits in, and what it awaits there."""
    frames = task_wait(task).frames
    if not frames or frames[-1].f_code not in _QUEUE_METHODS:
        return None, None
    _, waiter = [*links_of(coroutine_of(task))][-1]
    return frames[-1], waiter


@contextlib.contextmanager
def long_wait_logged(waiter: str, waits_for: Callable[[], Mapping[object, str]]) -> Generator[None]:
    """Log a warning when the block has lasted a second, and again when it waits for something else.

    Args:
        waiter: the beginning of the message: the waiter and the occasion.
        waits_for: returns the awaited things, with a description of each.
    """
    clock = current_clock()
    began = clock.now()
    logged: set[object] = set()

    def log_if_new() -> None:
        nonlocal timer
        timer = clock.call_later(_NOTICE_SECS, log_if_new)
        awaited = waits_for()
        if not logged.issuperset(awaited):
            logged.update(awaited)
            secs = secs_text(clock.now() - began)
            descriptions = "; ".join(awaited.values())
            logger.warning("%s: has waited %s for %s", waiter, secs, descriptions)

    timer = clock.call_later(_NOTICE_SECS, log_if_new)
    try:
        yield
    finally:
        timer.cancel()
