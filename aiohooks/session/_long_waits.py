"""A warning about a wait that takes long."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiohooks._core.clock import NO_TIMER, current_clock, secs_text
from aiohooks._core.reports import logger

_NOTICE_SECS = 1.0


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
