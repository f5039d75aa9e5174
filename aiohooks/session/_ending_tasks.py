"""What the end of a session needs to find out about tasks: how long they are waited for, and
whether waiting makes sense.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from aiohooks._core.clock import NO_TIMER, current_clock, secs_text
from aiohooks._core.reports import logger
from aiohooks._why.tasks import links_of, task_wait

_NOTICE_SECS = 1.0
_Queue: Any = asyncio.Queue
_QUEUE_METHODS = frozenset({_Queue.put.__code__, _Queue.get.__code__, _Queue.join.__code__})


def queue_wait(task: asyncio.Task[Any]) -> object:
    """Return the future of a task that waits in a method of a queue, and else None.

    None in a `with` block, too: it may be a time limit, after which the task continues by itself.
    """
    from aiohooks._why.sources import held_by  # seldom needed

    found = _queue_method(task)
    if found is None or [*held_by(task)]:
        return None
    _, waiter = found
    if not asyncio.isfuture(waiter) or waiter.done():
        return None
    return waiter


def wait_to_put(task: asyncio.Task[Any]) -> tuple[object, object] | None:
    """Return the queue that a task waits to put into, and the future of this wait; else None."""
    found = _queue_method(task)
    if found is None:
        return None
    frame, waiter = found
    if frame.f_code is not _Queue.put.__code__:
        return None
    return frame.f_locals.get("self"), waiter


def _queue_method(task: asyncio.Task[Any]) -> tuple[FrameType, object] | None:
    """Return the frame of the queue's method that a task waits in, and what it awaits there."""
    frames = task_wait(task).frames
    if not frames or frames[-1].f_code not in _QUEUE_METHODS:
        return None
    _, waiter = links_of(task)[-1]
    return frames[-1], waiter


class LongWaitLog:
    """`with LongWaitLog(...): await ...` logs a warning when the wait has lasted a second.

    It logs another one when the wait is for something else.
    """

    __slots__ = ("_began", "_clock", "_logged", "_timer", "_waits_for", "_what")

    def __init__(self, what: str, waits_for: Callable[[], Mapping[object, str]]) -> None:
        """Prepare the log.

        Args:
            what: the beginning of the message: the waiter and the occasion.
            waits_for: returns the awaited things, with a description of each.
        """
        self._what = what
        self._waits_for = waits_for
        self._clock = current_clock()
        self._logged: set[object] = set()
        self._timer = NO_TIMER

    def __enter__(self) -> None:
        self._began = self._clock.now()
        self._timer = self._clock.call_later(_NOTICE_SECS, self._log_if_new)

    def _log_if_new(self) -> None:
        self._timer = self._clock.call_later(_NOTICE_SECS, self._log_if_new)
        awaited = self._waits_for()
        if self._logged.issuperset(awaited):
            return
        self._logged.update(awaited)
        secs = secs_text(self._clock.now() - self._began)
        descriptions = "; ".join(awaited.values())
        logger.warning("%s: has waited %s for %s", self._what, secs, descriptions)

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
