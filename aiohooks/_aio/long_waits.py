"""Logging what a long wait is for, so that a program does not wait in silence."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from aiohooks._aio.clock import Clock, TimerHandle, current_clock

_logger = logging.getLogger("aiohooks")
_NOTICE_SECS = 1.0
_LINE_SECS = 60.0


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


class WaitLog:
    """Logs a line for every minute that the oldest of the waits has lasted; a wait that ends earlier logs nothing."""

    __slots__ = ("_clock", "_describe", "_logged_at", "_logger", "_since", "_timer")

    def __init__(self, logger: logging.Logger, clock: Clock, describe: Callable[[], str]) -> None:
        """Start with no waits; `describe()` names the waiters, and whom they wait for; empty: there is nothing to log."""
        self._logger = logger
        self._clock = clock
        self._describe = describe
        self._since: dict[object, float] = {}  # by wait, the oldest first
        self._timer: TimerHandle | None = None
        self._logged_at = 0.0

    def begin(self, wait: object) -> float:
        """Note that a wait begins; return when."""
        self._since[wait] = now = self._clock.now()
        if self._timer is None:
            self._timer = self._clock.call_later(_LINE_SECS, self._on_timer)
        return now

    def end(self, wait: object) -> None:
        """Note that it has ended; harmless if it had not begun."""
        self._since.pop(wait, None)
        if not self._since and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        now, oldest = self._clock.now(), next(iter(self._since.values()))
        rest = max(oldest, self._logged_at) + _LINE_SECS - now
        if rest <= 0:
            if text := self._describe():
                self._logger.info("%s, for %.0f s now", text, now - oldest)
            self._logged_at, rest = now, _LINE_SECS
        self._timer = self._clock.call_later(rest, self._on_timer)
