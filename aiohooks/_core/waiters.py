"""Futures by threshold: the waits for a number that grows."""

from __future__ import annotations

import asyncio
import heapq
from typing import Generic, TypeVar

T = TypeVar("T")
ANY_CHANGE = 0
"""The threshold of waits that end with the next number, whichever it is."""
_SPARE = 64
"""How many more thresholds without a future than with one the heap may hold."""


def resolve(future: asyncio.Future[T], result: T) -> None:
    """Set the result of a future, unless it is done."""
    if not future.done():
        future.set_result(result)


class ThresholdWaiters(Generic[T]):
    """Futures by threshold, and a heap of the thresholds.

    Parking, discarding and waking cost O(log n) for a threshold and O(1) for each further future
    under it. Reading the lowest threshold costs nothing.
    """

    __slots__ = ("_buckets", "_heap", "_none", "count", "lowest")

    def __init__(self, none: int) -> None:
        """`none` is the lowest threshold while there is no future: above all others."""
        self._buckets: dict[int, dict[asyncio.Future[int | T], None]] = {}
        self._heap: list[int] = []
        self._none = none
        self.count: int = 0
        """The number of parked futures."""
        self.lowest: int = none
        """The lowest threshold with a future."""

    def count_above(self, threshold: int) -> int:
        """Return the number of futures that are not at this one, the lowest of all thresholds."""
        return self.count - len(self._buckets.get(threshold, ()))

    def lowest_above(self, threshold: int) -> int | None:
        """Return the lowest threshold above this one; for reports, it looks at all of them."""
        return min((found for found in self._buckets if found > threshold), default=None)

    def park(self, threshold: int, future: asyncio.Future[int | T]) -> None:
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
            elif len(self._heap) > 2 * len(self._buckets) + _SPARE:
                # A threshold without futures stays in the heap until it is the lowest.
                self._heap = list(self._buckets)
                heapq.heapify(self._heap)
        return True

    def wake(self, number: int) -> None:
        """End the waits for `number` and below with the result `number`."""
        heap, buckets = self._heap, self._buckets
        while heap and heap[0] <= number:
            threshold = heapq.heappop(heap)
            bucket = buckets.pop(threshold, None)
            if bucket is None:  # `discard` leaves the threshold in the heap
                continue
            self.count -= len(bucket)
            for future in bucket:
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
        heap, buckets = self._heap, self._buckets
        while heap and heap[0] not in buckets:
            heapq.heappop(heap)
        self.lowest = heap[0] if heap else self._none
