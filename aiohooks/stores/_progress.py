"""The line that says what is being waited for, once a minute."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from aiohooks._aio.clock import Clock, TimerHandle
from aiohooks.stores._position import Position

logger = logging.getLogger("aiohooks.stores")

_PERIOD_SECS = 60.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """What the line tells."""

    run: str
    wanted: int
    waiters: int
    seen: Position
    publishers: str


class ProgressLog:
    """Logs once a minute for as long as somebody waits; costs nothing where nobody does."""

    __slots__ = ("_clock", "_describe", "_last", "_mark", "_timer", "since")

    def __init__(self, clock: Clock, describe: Callable[[], Waiting]) -> None:
        """`describe` is called for each line."""
        self._clock = clock
        self._describe = describe
        self.since: float | None = None
        """When somebody began to wait, after a time when nobody did; None while nobody does."""
        self._timer: TimerHandle | None = None
        self._mark: Position = Position(0, 0)  # as of the last line, or else of the beginning
        self._last: float = 0.0  # when that was

    def begin(self, position: Position) -> None:
        """Somebody has begun to wait."""
        self.since = self._last = self._clock.now()
        self._mark = position
        if self._timer is None:
            self._timer = self._clock.call_later(_PERIOD_SECS, self._look)

    def pause(self) -> None:
        """Nobody waits in this moment. The timer is left: who was woken often waits again at once."""
        self.since = None

    def end(self) -> None:
        """Nobody waits any more."""
        self.since = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self.since is None:
            return
        rest = self._last + _PERIOD_SECS - self._clock.now()
        if rest <= 0:
            self._log()
            rest = _PERIOD_SECS
        self._timer = self._clock.call_later(rest, self._look)

    def _log(self) -> None:
        now = self._clock.now()
        waiting = self._describe()
        elapsed = now - self._last
        steps = waiting.seen.step - self._mark.step
        # Across a reset the difference says nothing.
        known = waiting.seen.epoch == self._mark.epoch and elapsed > 0
        logger.info(
            "run %s: waiting for step %d (%d waiters), seen step %d, %s, published by %s",
            waiting.run,
            waiting.wanted,
            waiting.waiters,
            waiting.seen.step,
            f"{steps / elapsed:.3g} steps/s" if known else "reset meanwhile",
            waiting.publishers,
        )
        self._last, self._mark = now, waiting.seen
