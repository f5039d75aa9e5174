"""Waits for others, for events and for numbers; pauses.

wait_for_others    a wait for another session or for an engine; a stop ends it while a session opens
until_stop         a wait in a run, which a stop of its session ends
Waiters            waits for the next event
ThresholdWaiters   waits for a number that grows
Backoff            pauses between attempts
"""

from __future__ import annotations

import asyncio
import bisect
import random
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from aiohooks._core.activity import RunScope, assigned
from aiohooks._core.clock import Clock, wait_woken, wake
from aiohooks._core.validate import check_secs

T = TypeVar("T")

ANY_CHANGE = 0
"""The threshold of waits that end with the next number, whatever it is."""

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


def until_stop(waiter: Awaitable[T], run: RunScope | None) -> Awaitable[T]:
    """Return a wait that ends with the waiter, or with a stop of the run's session."""
    if run is None or run.session is None:
        return waiter
    return run.session.until(waiter)


class Waiters:
    """The waiters for an event. The object is true while there are any."""

    def __init__(self) -> None:
        self._futures: dict[asyncio.Future[None], None] = {}

    def __bool__(self) -> bool:
        return bool(self._futures)

    async def wait(self, secs: float | None = None, clock: Clock | None = None) -> None:
        """Wait until `wake`, or for `secs` on `clock`, by default the current one."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures[waiter] = None
        try:
            await wait_woken(waiter, secs, clock)
        finally:
            del self._futures[waiter]

    def wake(self) -> None:
        """Wake all waiters."""
        for waiter in self._futures:
            wake(waiter)


Waiter: TypeAlias = "asyncio.Future[int | T]"
"""A future that gets a number, or another result."""


class ThresholdWaiters(Generic[T]):
    """Futures by threshold.

    Parking, discarding and waking compare O(log n) thresholds, and none for a further future under
    the same one. Reading the lowest threshold costs nothing.
    """

    def __init__(self, none: int) -> None:
        """Make an empty collection. `none`, above all thresholds, is its lowest threshold then."""
        self._futures: dict[int, dict[Waiter[T], None]] = {}
        self._thresholds: list[int] = [none]
        """The thresholds with a future, sorted, and `none` at the end: it is never empty."""
        self.count: int = 0
        """The number of parked futures."""
        self.lowest: int = none
        """The lowest threshold with a future."""

    def count_above(self, threshold: int) -> int:
        """Return the number of futures above the lowest threshold of all."""
        return self.count - len(self._futures.get(threshold, ()))

    def lowest_above(self, threshold: int) -> int | None:
        """Return the lowest threshold above this one."""
        place = bisect.bisect_right(self._thresholds, threshold)
        lowest = self._thresholds[place]
        return lowest if lowest in self._futures else None

    def park(self, threshold: int, future: Waiter[T]) -> None:
        """Add a future."""
        self.count += 1
        futures = self._futures.get(threshold)
        if futures is not None:
            futures[future] = None
            return
        self._futures[threshold] = {future: None}
        bisect.insort(self._thresholds, threshold)
        self.lowest = self._thresholds[0]

    def discard(self, threshold: int, future: Waiter[T]) -> bool:
        """Remove a future. Return whether it was still parked at its threshold."""
        parked = self._futures.get(threshold)
        if parked is None or future not in parked:
            return False
        self.count -= 1
        del parked[future]
        if not parked:
            del self._futures[threshold]
            index = bisect.bisect_left(self._thresholds, threshold)
            del self._thresholds[index]
            self.lowest = self._thresholds[0]
        return True

    def wake(self, number: int) -> None:
        """End the waits for `number` and below with the result `number`."""
        if self.lowest > number:
            return
        reached = bisect.bisect_right(self._thresholds, number)
        for threshold in self._thresholds[:reached]:
            futures = self._futures.pop(threshold)
            self.count -= len(futures)
            for future in futures:
                # Not by `wake` of the clock: many may wait, and the call would cost a third more.
                if not future.done():
                    future.set_result(number)
        del self._thresholds[:reached]
        self.lowest = self._thresholds[0]

    def pop_all(self) -> list[tuple[int, Waiter[T]]]:
        """Remove and return all futures with their thresholds, the lowest first."""
        popped = [
            (threshold, future)
            for threshold in self._thresholds[:-1]
            for future in self._futures[threshold]
        ]
        self._futures.clear()
        del self._thresholds[:-1]
        self.count = 0
        self.lowest = self._thresholds[0]
        return popped


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
