"""Futures of waits: for the next event, and for a number that grows."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import Generator
from typing import Generic, TypeVar

from aiohooks._core.clock import Clock, wait_woken, wake

T = TypeVar("T")
ANY_CHANGE = 0
"""The threshold of waits that end with the next number, whatever it is."""
_MAX_EMPTY_THRESHOLDS = 64
"""How many more thresholds may be empty than have a future, before the heap is rebuilt."""


class Waiters:
    """The waiters for an event. The object is true while there are any."""

    def __init__(self) -> None:
        self._futures: dict[asyncio.Future[None], None] = {}

    def __bool__(self) -> bool:
        return bool(self._futures)

    @contextlib.contextmanager
    def added(self) -> Generator[asyncio.Future[None]]:
        """Add a waiter for the block, which awaits it."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures[waiter] = None
        try:
            yield waiter
        finally:
            del self._futures[waiter]

    async def wait(self, secs: float | None = None, clock: Clock | None = None) -> None:
        """Wait until `wake`, or for `secs` on `clock`, by default the current one."""
        with self.added() as waiter:
            await wait_woken(waiter, secs, clock)

    def wake(self) -> None:
        """Wake all waiters."""
        for waiter in self._futures:
            wake(waiter)


class ThresholdWaiters(Generic[T]):
    """Futures by threshold, and a heap of the thresholds.

    Parking, discarding and waking cost O(log n) for a threshold, and O(1) for each further future
    under it. Reading the lowest threshold costs nothing.
    """

    __slots__ = ("_buckets", "_heap", "_none", "count", "lowest")

    def __init__(self, none: int) -> None:
        """Make an empty collection. `none`, above all thresholds, is its lowest threshold then."""
        self._buckets: dict[int, dict[asyncio.Future[int | T], None]] = {}
        # It has all thresholds with a future, and empty ones that were not the lowest.
        self._heap: list[int] = []
        self._none = none
        self.count: int = 0
        """The number of parked futures."""
        self.lowest: int = none
        """The lowest threshold with a future."""

    def count_above(self, threshold: int) -> int:
        """Return the number of futures above the lowest threshold of all."""
        return self.count - len(self._buckets.get(threshold, ()))

    def lowest_above(self, threshold: int) -> int | None:
        """Return the lowest threshold above this one. It looks at all thresholds, for reports."""
        above = (candidate for candidate in self._buckets if candidate > threshold)
        return min(above, default=None)

    def park(self, threshold: int, future: asyncio.Future[int | T]) -> None:
        """Add a future."""
        self.count += 1
        bucket = self._buckets.get(threshold)
        if bucket is not None:
            bucket[future] = None
            return
        self._buckets[threshold] = {future: None}
        heapq.heappush(self._heap, threshold)
        if threshold < self.lowest:
            self.lowest = threshold

    def discard(self, threshold: int, future: asyncio.Future[int | T]) -> bool:
        """Remove a future, and return whether it was still here."""
        bucket = self._buckets.get(threshold)
        if bucket is None or future not in bucket:
            return False
        self.count -= 1
        del bucket[future]
        if not bucket:
            del self._buckets[threshold]
            if threshold == self.lowest:
                self._find_lowest()
            elif len(self._heap) > 2 * len(self._buckets) + _MAX_EMPTY_THRESHOLDS:
                self._heap = list(self._buckets)
                heapq.heapify(self._heap)
        return True

    def wake(self, number: int) -> None:
        """End the waits for `number` and below with the result `number`."""
        heap = self._heap
        while heap and heap[0] <= number:
            threshold = heapq.heappop(heap)
            for future in self._buckets.pop(threshold, ()):
                self.count -= 1
                if not future.done():
                    future.set_result(number)
        self._find_lowest()

    def pop_all(self) -> list[tuple[int, asyncio.Future[int | T]]]:
        """Remove and return all futures with their thresholds, the lowest first."""
        popped = [
            (threshold, future)
            for threshold in sorted(self._buckets)
            for future in self._buckets[threshold]
        ]
        self._buckets.clear()
        self._heap.clear()
        self.count = 0
        self.lowest = self._none
        return popped

    def _find_lowest(self) -> None:
        heap = self._heap
        while heap and heap[0] not in self._buckets:
            heapq.heappop(heap)
        self.lowest = heap[0] if heap else self._none
