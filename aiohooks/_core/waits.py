"""Waits for others, which a stop ends while a session opens; a log of long waits; pauses.

wait_for_others   a wait for another session or for an engine, while a session opens
WaitLog           reports of waits that take long
Backoff           pauses between attempts
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from aiohooks._core.clock import NO_TIMER, current_clock
from aiohooks._core.scope import assigned
from aiohooks._core.validate import check_secs

T = TypeVar("T")

Until: TypeAlias = Callable[[Awaitable[Any]], Awaitable[Any]]
"""Awaits something, and may end the wait earlier: `Coordinator.until`."""
_until: ContextVar[Until | None] = ContextVar("aiohooks_opening", default=None)
"""The `until` of the session that is being opened in this context."""


def opening_until(until: Until) -> assigned[Until | None]:
    """Let `wait_for_others` await with `until` in this block, so that a stop ends the wait."""
    return assigned(_until, until)


def wait_for_others(waiter: Awaitable[T]) -> Awaitable[T]:
    """Return a wait for something that only another process can bring about.

    Examples are the answer of an engine, and a new chief. If a session is being opened here, a stop
    of it ends the wait with `StopRequestedError`.
    """
    until = _until.get()
    return waiter if until is None else until(waiter)


class WaitLog:
    """Reports when the oldest of several waits has lasted `secs`, and again after each `secs`."""

    def __init__(self, secs: float, report: Callable[[float], object]) -> None:
        """Start with no waits. `report` gets the seconds that the oldest wait has lasted."""
        self._secs = secs
        self._report = report
        self._clock = current_clock()
        self._since: dict[object, float] = {}  # by wait, the oldest first
        self._reported_at = 0.0
        self._timer = NO_TIMER

    def begin(self, wait: object) -> None:
        """Note that a wait begins."""
        if not self._since:
            self._timer = self._clock.call_later(self._secs, self._check)
        self._since[wait] = self._clock.now()

    def end(self, wait: object) -> None:
        """Note that a wait has ended; harmless if it has not begun."""
        self._since.pop(wait, None)
        if not self._since:
            self._timer.cancel()

    def _check(self) -> None:
        now = self._clock.now()
        oldest = next(iter(self._since.values()))
        secs_left = max(oldest, self._reported_at) + self._secs - now
        if secs_left <= 0:
            secs_left = self._secs
            self._reported_at = now
            self._report(now - oldest)
        self._timer = self._clock.call_later(secs_left, self._check)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff: pauses that double from `initial_secs` up to `max_secs`.

    With `jitter`, a pause is a random part of this. A pause of 0 is valid.
    """

    initial_secs: float = 0.1
    max_secs: float = 30.0
    jitter: bool = True

    def __post_init__(self) -> None:
        check_secs(self.initial_secs, "initial_secs")
        check_secs(self.max_secs, "max_secs")

    def pause_secs(self, attempt: int) -> float:
        """Return the seconds to wait before attempt number `attempt`, counted from 1."""
        # The exponent is bounded, or a long series of attempts would overflow the float.
        longest = min(self.max_secs, self.initial_secs * 2.0 ** min(attempt - 1, 1000))
        return random.uniform(0, longest) if self.jitter else longest
