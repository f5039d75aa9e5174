"""Waits of a session that is opened, waits by threshold or for tasks, and pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from aiohooks._core.waits import (
    Backoff,
    Event,
    ThresholdWaiters,
    opening_until,
    wait_done,
    wait_for_others,
)
from aiohooks.testing import ManualClock
from tests.support.waiting import parked

pytestmark = pytest.mark.every_python


async def test_a_wait_for_others_is_given_to_the_session_that_is_opened() -> None:
    """Only while it is opened: before and after that, it is an ordinary wait."""
    waits: list[Awaitable[Any]] = []

    async def until(awaitable: Awaitable[Any]) -> Any:
        waits.append(awaitable)
        return await awaitable

    assert await wait_for_others(asyncio.sleep(0, 4)) == 4
    with opening_until(until):
        assert await wait_for_others(asyncio.sleep(0, 5)) == 5
    assert await wait_for_others(asyncio.sleep(0, 6)) == 6
    assert len(waits) == 1


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


def test_pauses_double_up_to_the_longest() -> None:
    """The first attempt waits for `initial_secs`; a long series of attempts stays at `max_secs`."""
    backoff = Backoff(0.5, 5.0, jitter=False)
    assert [backoff.pause_secs(attempt) for attempt in (1, 2, 3, 4, 5, 10**6)] == [
        0.5,
        1.0,
        2.0,
        4.0,
        5.0,
        5.0,
    ]


def test_a_random_part_of_each_pause() -> None:
    """With `jitter`, pauses differ and none is longer than without."""
    backoff = Backoff(1.0, 4.0)
    pauses = [backoff.pause_secs(3) for _ in range(50)]
    assert len(set(pauses)) > 1
    assert all(0 <= pause <= 4 for pause in pauses)
    assert Backoff(0, 0).pause_secs(1) == 0


async def test_what_is_done_when_the_time_is_up_is_done() -> None:
    """Also if the callbacks of the future have not been called yet."""
    with ManualClock() as clock:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = await parked(wait_done([future], 1))
        clock.advance(1)
        future.set_result(None)
        assert await waiting


async def test_an_event_that_is_closed_calls_no_further_callback() -> None:
    """The coroutine that emits it is closed while it awaits a callback, as at the end of a loop."""
    called: list[str] = []
    event = Event[[]]("saved")

    async def wait() -> None:
        called.append("wait")
        await asyncio.sleep(0)

    event.subscribe(wait)
    event.subscribe(lambda: called.append("later"))
    emitting = event.emit()
    emitting.send(None)
    emitting.close()
    assert called == ["wait"]
