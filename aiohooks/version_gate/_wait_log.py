"""A log of waits that take long: one line a minute, whatever their number."""

from __future__ import annotations

import logging
from collections.abc import Callable

from aiohooks._aio.clock import Clock, TimerHandle

_logger = logging.getLogger("aiohooks.version_gate")

_PERIOD_SECS = 60.0


class WaitLog:
    """Logs a line for every minute that the oldest of the waits has lasted; a wait that ends earlier logs nothing."""

    __slots__ = ("_clock", "_describe", "_logged_at", "_since", "_timer")

    def __init__(self, clock: Clock, describe: Callable[[], str]) -> None:
        """Start with no waits; `describe()` names the waiters, and whom they wait for."""
        self._clock = clock
        self._describe = describe
        self._since: dict[object, float] = {}  # by wait, the oldest first
        self._timer: TimerHandle | None = None
        self._logged_at = 0.0

    def begin(self, wait: object) -> None:
        """Note that a wait begins."""
        self._since[wait] = self._clock.now()
        if self._timer is None:
            self._timer = self._clock.call_later(_PERIOD_SECS, self._on_timer)

    def end(self, wait: object) -> None:
        """Note that it has ended."""
        del self._since[wait]
        if not self._since and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        now, oldest = self._clock.now(), next(iter(self._since.values()))
        rest = max(oldest, self._logged_at) + _PERIOD_SECS - now
        if rest <= 0:
            _logger.info("%s, for %.0f s now", self._describe(), now - oldest)
            self._logged_at, rest = now, _PERIOD_SECS
        self._timer = self._clock.call_later(rest, self._on_timer)
