"""The line that says what is being waited for, once a minute."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from aiohooks._clock import Clock, TimerHandle
from aiohooks.stores._mark import Mark

logger = logging.getLogger("aiohooks.stores")

_PERIOD_SECS = 60.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """What the line tells."""

    run: str
    wanted: int
    waiters: int
    seen: Mark
    publishers: str


class ProgressLog:
    """Logs once a minute for as long as somebody waits; costs nothing where nobody does."""

    __slots__ = ("_clock", "_describe", "_mark", "_since", "_timer")

    def __init__(self, clock: Clock, describe: Callable[[], Waiting]) -> None:
        """`describe` is called for each line."""
        self._clock = clock
        self._describe = describe
        self._timer: TimerHandle | None = None
        self._mark = Mark(0, 0)
        self._since = 0.0

    def keep(self, going: bool, mark: Mark) -> None:
        """Starts it when somebody begins to wait, ends it when nobody is left."""
        if going == (self._timer is not None):
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        else:
            self._begin(mark)

    def _begin(self, mark: Mark) -> None:
        self._mark = mark
        self._since = self._clock.now()
        self._timer = self._clock.call_later(_PERIOD_SECS, self._log)

    def _log(self) -> None:
        waiting = self._describe()
        elapsed = self._clock.now() - self._since
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
        self._begin(waiting.seen)
