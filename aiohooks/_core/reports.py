"""The logger of the library, and how often it reports failures and waits.

logger      the logger
is_logged   whether a repeated failure is logged
WaitLog     reports of waits that take long
wait_log    a log of the waits inside of the library that take long
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from aiohooks._core.clock import NO_TIMER, current_clock, secs_text

logger = logging.getLogger("aiohooks")


def is_logged(count: int, more: int = 1) -> bool:
    """Return whether to log that there are `count` failures, of which `more` are new.

    The log has the first failure, the 10th, the 100th, ...
    """
    return count == more or len(str(count - more)) < len(str(count))


class WaitLog:
    """Reports when the oldest of several waits has lasted `secs`, but only every `pause_secs`.

    As a block, it is itself the only wait.
    """

    def __init__(
        self,
        secs: float,
        report: Callable[[float], object],
        pause_secs: float | None = None,
    ) -> None:
        """Start with no waits.

        Args:
            secs: after how many seconds a wait is reported.
            report: gets the seconds that the oldest wait has lasted.
            pause_secs: the pause between reports, of the same or other waits; by default `secs`.
        """
        self._secs = secs
        self._report = report
        self._pause_secs = secs if pause_secs is None else pause_secs
        self._clock = current_clock()
        self._since: dict[object, float] = {}  # by wait, the oldest first
        self._reported_at = -math.inf
        self._timer = NO_TIMER

    def begin(self, wait: object) -> None:
        """Note that a wait begins."""
        if not self._since:
            self._timer = self._clock.call_later(self._secs, self._check)
        self._since[wait] = self._clock.now()

    def end(self, wait: object) -> None:
        """Note that a wait has ended. A wait that has not begun is ignored."""
        self._since.pop(wait, None)
        if not self._since:
            self._timer.cancel()

    # `contextlib.contextmanager` would set the traceback of an error that the block raises, which
    # fails for a frozen dataclass.
    def __enter__(self) -> None:
        self.begin(self)

    def __exit__(self, *_: object) -> None:
        self.end(self)

    def _check(self) -> None:
        now = self._clock.now()
        oldest = next(iter(self._since.values()))
        secs_left = max(oldest + self._secs, self._reported_at + self._pause_secs) - now
        if secs_left <= 0:
            secs_left = self._pause_secs
            self._reported_at = now
            self._report(now - oldest)
        self._timer = self._clock.call_later(secs_left, self._check)


def wait_log(describe: Callable[[], str]) -> WaitLog:
    """Return a log of waits that may not end: after a second, and then once a minute.

    `describe` returns what the oldest wait is for, at the time of the report.
    """

    def report(secs: float) -> None:
        logger.warning("a caller has waited %s for %s", secs_text(secs), describe())

    return WaitLog(1.0, report, pause_secs=60.0)
