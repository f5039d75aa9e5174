"""Waits by threshold, and the reports of waits that last."""

from __future__ import annotations

import asyncio

import pytest

from aiohooks._core.reports import WaitLog
from aiohooks._core.waits import ThresholdWaiters
from aiohooks.testing import ManualClock

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


def test_a_wait_is_reported_once_a_minute(clock: ManualClock) -> None:
    """Also if the oldest wait has ended, and a younger one had begun before the last line."""
    reports: list[float] = []
    log = WaitLog(60, reports.append)
    log.begin("first")
    clock.advance(30)
    log.begin("second")
    clock.advance(30)
    assert reports == [60]
    log.end("first")
    clock.advance(59)
    assert reports == [60]
    clock.advance(1)
    assert reports == [60, 90]
    log.end("second")
    clock.advance(600)
    assert reports == [60, 90]
    log.begin("third")
    clock.advance(60)
    log.end("third")
    clock.advance(60)
    assert reports == [60, 90, 60]
