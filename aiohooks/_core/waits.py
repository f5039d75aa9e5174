"""Waits for others, which a stop ends while a session opens; a log of waits; pauses.

wait_for_others   a wait for another session or for an engine, while a session opens
WaitLog           a line a minute about all waits of a store or a gate
Backoff           pauses between attempts
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Generator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohooks._core.clock import NO_TIMER, Clock
from aiohooks._core.validate import check_secs

T = TypeVar("T")

_LINE_SECS = 60.0
_wait_or_stop: ContextVar[Callable[[Awaitable[Any]], Awaitable[Any]] | None] = ContextVar(
    "aiohooks_opening",
    default=None,
)


@contextlib.contextmanager
def opening_until(until: Callable[[Awaitable[Any]], Awaitable[Any]]) -> Generator[None]:
    """Let `wait_for_others` await with `until` in this block, so that a stop ends the wait."""
    token = _wait_or_stop.set(until)
    try:
        yield
    finally:
        _wait_or_stop.reset(token)


def wait_for_others(waiter: Awaitable[T]) -> Awaitable[T]:
    """Return a wait for something that only another process can bring about.

    Examples are the answer of an engine, and a new chief. If a session is being opened here, a stop
    of it ends the wait with `StopRequestedError`.
    """
    wait_or_stop = _wait_or_stop.get()
    return waiter if wait_or_stop is None else wait_or_stop(waiter)


class WaitLog:
    """Logs a line for every minute that the oldest of the waits has lasted."""

    __slots__ = ("_clock", "_describe", "_logged_at", "_logger", "_since", "_timer")

    def __init__(
        self,
        logger: logging.Logger,
        clock: Clock,
        describe: Callable[[], str],
    ) -> None:
        """Start with no waits.

        `describe()` names the waiters, and what they wait for. If the text is empty, nothing is
        logged.
        """
        self._logger = logger
        self._clock = clock
        self._describe = describe
        self._since: dict[object, float] = {}  # by wait, the oldest first
        self._timer = NO_TIMER
        self._logged_at = 0.0

    def begin(self, wait: object) -> float:
        """Note that a wait begins; return the time."""
        if not self._since:
            self._timer = self._clock.call_later(_LINE_SECS, self._on_timer)
        now = self._clock.now()
        self._since[wait] = now
        return now

    def end(self, wait: object) -> None:
        """Note that a wait has ended; harmless if it has not begun."""
        self._since.pop(wait, None)
        if not self._since:
            self._timer.cancel()

    def _on_timer(self) -> None:
        now = self._clock.now()
        oldest = next(iter(self._since.values()))
        secs_left = max(oldest, self._logged_at) + _LINE_SECS - now
        if secs_left <= 0:
            text = self._describe()
            if text:
                self._logger.info("%s, for %.0f s now", text, now - oldest)
            self._logged_at = now
            secs_left = _LINE_SECS
        self._timer = self._clock.call_later(secs_left, self._on_timer)


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
