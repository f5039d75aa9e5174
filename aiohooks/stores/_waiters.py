"""Waiters parked under the step they wait for."""

from __future__ import annotations

import asyncio
import heapq

from aiohooks._errors import AiohooksError
from aiohooks.stores._mark import MAX_STEP

# What a wait ends with is a result, also when it is an error: a future with an exception that nobody comes to fetch,
# because its task was cancelled in the same tick, would be reported as never retrieved.
Waiter = asyncio.Future[int | AiohooksError]

NOBODY = MAX_STEP + 1
"""The lowest threshold where nobody waits."""

_SPARE = 64  # thresholds without a waiter that the heap may hold beside as many as have one


class Waiters:
    """Futures by threshold, and a heap of the thresholds.

    Parking, discarding and waking cost O(log n) for a threshold and O(1) for one waiter more under it; asking for the
    lowest costs nothing. A threshold whose waiters were all discarded stays in the heap for a while, but never more of
    these than there are live ones, plus a few.
    """

    __slots__ = ("_buckets", "_heap", "count", "lowest")

    def __init__(self) -> None:
        """Nobody waits."""
        self._buckets: dict[int, dict[Waiter, None]] = {}
        self._heap: list[int] = []
        self.count = 0
        """How many are parked."""
        self.lowest = NOBODY
        """The lowest threshold with a waiter."""

    @property
    def thresholds(self) -> int:
        """How many different thresholds are waited for."""
        return len(self._buckets)

    @property
    def heap_size(self) -> int:
        """How many thresholds the heap holds, live or not."""
        return len(self._heap)

    def park(self, threshold: int, waiter: Waiter) -> None:
        """Takes in one waiter."""
        self.count += 1
        bucket = self._buckets.get(threshold)
        if bucket is not None:
            bucket[waiter] = None
            return
        self._buckets[threshold] = {waiter: None}
        heapq.heappush(self._heap, threshold)
        if threshold < self.lowest:
            self.lowest = threshold

    def discard(self, threshold: int, waiter: Waiter) -> bool:
        """Forgets one waiter, and says whether it was still here."""
        bucket = self._buckets.get(threshold)
        if bucket is None or waiter not in bucket:
            return False
        self.count -= 1
        del bucket[waiter]
        if not bucket:
            del self._buckets[threshold]
            if threshold == self.lowest:
                self._find_lowest()
            elif len(self._heap) > 2 * len(self._buckets) + _SPARE:
                self._heap = list(self._buckets)
                heapq.heapify(self._heap)
        return True

    def wake(self, step: int) -> None:
        """Ends the waits for `step` and below; they return `step`."""
        heap, buckets = self._heap, self._buckets
        while heap and heap[0] <= step:
            bucket = buckets.pop(heapq.heappop(heap), None)
            if bucket is not None:
                self.count -= len(bucket)
                for waiter in bucket:
                    if not waiter.done():
                        waiter.set_result(step)
        self._find_lowest()

    def take_all(self) -> list[tuple[int, Waiter]]:
        """Hands out all waiters with their thresholds, the lowest first, and is empty then."""
        taken = [(threshold, waiter) for threshold in sorted(self._buckets) for waiter in self._buckets[threshold]]
        self._buckets.clear()
        self._heap.clear()
        self.count = 0
        self.lowest = NOBODY
        return taken

    def _find_lowest(self) -> None:
        heap, buckets = self._heap, self._buckets
        while heap and heap[0] not in buckets:
            heapq.heappop(heap)
        self.lowest = heap[0] if heap else NOBODY
