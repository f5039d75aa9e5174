"""Logging what a long wait is for, so that a program does not wait in silence."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from aiohooks._aio.clock import TimerHandle, current_clock

_logger = logging.getLogger("aiohooks")
_NOTICE_SECS = 1.0


class LongWaitLog:
    """`with LongWaitLog(...): await ...` logs a warning after a second, and again when the wait is for something else."""

    __slots__ = ("_began", "_clock", "_logged", "_timer", "_waits_for", "_what")

    def __init__(self, what: str, waits_for: Callable[[], Mapping[object, str]]) -> None:
        """Start nothing yet.

        Args:
            what: the beginning of the message: the waiter, and the occasion.
            waits_for: returns what is waited for now, each with a description.
        """
        self._what = what
        self._waits_for = waits_for
        self._clock = current_clock()
        self._logged: set[object] = set()
        self._timer: TimerHandle | None = None

    def __enter__(self) -> None:
        self._began = self._clock.now()
        self._timer = self._clock.call_later(_NOTICE_SECS, self._look)

    def _look(self) -> None:
        self._timer = self._clock.call_later(_NOTICE_SECS, self._look)
        awaited = self._waits_for()
        if not self._logged.issuperset(awaited):
            self._logged.update(awaited)
            secs = self._clock.now() - self._began
            _logger.warning("%s: has waited %.3g s for %s", self._what, secs, "; ".join(awaited.values()))

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
