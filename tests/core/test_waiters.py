"""Waits by threshold: the lowest one that is left."""

from __future__ import annotations

import asyncio

import pytest

from aiohooks._core.waits import ThresholdWaiters

pytestmark = pytest.mark.every_python


async def test_the_lowest_threshold_is_that_of_a_wait_that_is_left() -> None:
    """Also after the wait for the lowest one has been discarded, and after all have."""
    loop = asyncio.get_running_loop()
    waiters: ThresholdWaiters[int] = ThresholdWaiters(none=100)
    futures = {threshold: loop.create_future() for threshold in (3, 5, 7)}
    for threshold, future in futures.items():
        waiters.park(threshold, future)
    assert (waiters.lowest, waiters.lowest_above(3), waiters.lowest_above(7)) == (3, 5, None)
    assert waiters.discard(3, futures[3])
    assert waiters.lowest == 5
    assert not waiters.discard(3, futures[3])
    waiters.wake(5)
    assert (await futures[5], waiters.lowest, waiters.count) == (5, 7, 1)
    assert waiters.discard(7, futures[7])
    assert (waiters.lowest, waiters.count) == (100, 0)
