"""Ends of waits that others cause: time limits, shielded cleanup and threads, seen by their
caller.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading

import pytest

from aiohooks._core.calls import limited
from aiohooks._core.waits import shielded, to_thread, wait_done
from aiohooks.testing import ManualClock
from tests.support.waiting import advance_clock, forever, parked, ticks

pytestmark = pytest.mark.every_python


async def test_a_time_limit_in_cleanup_after_a_cancel(clock: ManualClock) -> None:
    """In a task that has been cancelled already, the time limit is told from that cancel."""

    async def cleanup() -> None:
        try:
            await forever()
        finally:
            await limited(forever(), 5.0, "closing")

    task = await parked(cleanup(), 5)
    task.cancel()
    await ticks()
    clock.advance(5)
    with pytest.raises(TimeoutError, match=r"closing took longer than 5\.0 s"):
        await task
    assert task.cancelling() == 1


@pytest.mark.parametrize("cancelled", ["never", "before", "after"])
async def test_a_time_limit_waits_for_the_end(cancelled: str, clock: ManualClock) -> None:
    """What took too long has ended when TimeoutError is raised; a cancel of the caller is raised
    instead, whenever it came.
    """
    leave = asyncio.Event()
    ends = list[str]()

    async def slow() -> None:
        try:
            await forever()
        finally:
            await leave.wait()
            ends.append("slow")

    task = await parked(limited(slow(), 5.0, "closing"), 5)
    if cancelled == "before":
        task.cancel()
    await advance_clock(clock, 5)
    if cancelled == "after":
        task.cancel()
        await ticks()
    assert not task.done()
    leave.set()
    with pytest.raises(TimeoutError if cancelled == "never" else asyncio.CancelledError):
        await task
    assert (ends, clock.pending) == (["slow"], 0)


@pytest.mark.may_leak
async def test_shielded_cleanup_that_ignores_everything(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It is cancelled after the grace period and left running after another, with a warning; its
    late error is not lost.
    """
    released = asyncio.Event()
    lost: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
    events: list[str] = []

    async def cleanup() -> None:
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                events.append("cancelled")
        events.append("ends")
        raise OSError("late")

    task = await parked(shielded(cleanup(), grace_secs=9, what="the cleanup"), 5)
    task.cancel()
    await ticks()
    await advance_clock(clock, 8)
    assert events == []
    await advance_clock(clock, 1)
    assert events == ["cancelled"]
    assert not task.done()
    clock.advance(9)
    with pytest.raises(asyncio.CancelledError):
        await task
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert (
        record.getMessage()
        == "the cleanup still runs 9 s after its cancellation; continuing without it"
    )
    released.set()
    await ticks()
    gc.collect()
    await ticks()
    assert events == ["cancelled", "ends"]
    assert lost == []


async def test_waiting_for_tasks_leaves_nothing_with_them(clock: ManualClock) -> None:
    """`wait_done` says whether all are done, and cancels none; what it had registered is gone, also
    after a cancel.
    """
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    assert await wait_done([], 5)
    assert await wait_done([done], 5)
    waits = [asyncio.create_task(wait_done([done, future], secs)) for secs in (5, 7, None, None)]
    await ticks()
    await advance_clock(clock, 5)
    assert [wait.done() for wait in waits] == [True, False, False, False]
    assert waits[0].result() is False
    waits[2].cancel()
    await ticks()
    assert waits[2].cancelled()
    future.set_result(None)
    assert await waits[1] is await waits[3] is True


async def test_a_wait_that_is_over_keeps_nothing() -> None:
    """A future that many wait for in turn, as for the end of a long task, does not collect what
    they have left behind.
    """
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    references: set[int] = set()
    for _ in range(3):
        assert not await wait_done([future], 0)
        references.add(sys.getrefcount(future))
    assert len(references) == 1


async def test_a_blocked_loop_does_not_take_the_time_after_the_cancel(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The second grace period begins when the cleanup is cancelled, however late that is."""
    ends: list[str] = []

    async def cleanup() -> None:
        try:
            await forever()
        finally:
            await ticks()
            ends.append("cleaned up")

    task = await parked(shielded(cleanup(), grace_secs=1, what="the cleanup"), 5)
    task.cancel()
    await ticks()
    clock.advance(100)  # past both periods together
    await asyncio.wait([task])
    assert ends == ["cleaned up"]
    assert task.cancelled()
    assert caplog.messages == []


async def test_a_thread_that_outlives_its_cancelled_caller(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It cannot be stopped: after the grace period it is left running, with a warning."""
    begun, released = threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        released.wait()

    task = await parked(to_thread(block, grace_secs=9, what="the thread"), 5)
    await asyncio.to_thread(begun.wait)
    task.cancel()
    await ticks()
    await advance_clock(clock, 8)
    assert not task.done()
    clock.advance(1)
    with pytest.raises(asyncio.CancelledError):
        await task
    released.set()
    assert caplog.messages == [
        "the thread still runs 9 s after its cancellation; continuing without it"
    ]
