"""Ends of waits that others cause: time limits, shielded cleanup and threads, seen by their caller."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys

import pytest

from aiohooks._aio.cancel import CancelScope, TimeLimit, shielded, wait_done
from aiohooks.testing import ManualClock
from tests.support.waiting import forever, ticks

pytestmark = pytest.mark.every_python


async def test_a_time_limit_in_cleanup_after_a_cancel(clock: ManualClock) -> None:
    """In a task that has been cancelled already, the time limit is told from that cancel."""

    async def cleanup() -> None:
        try:
            await forever()
        finally:
            with TimeLimit(5.0, "closing"):
                await forever()

    task = asyncio.create_task(cleanup())
    await ticks()
    task.cancel()
    await ticks()
    clock.advance(5)
    with pytest.raises(TimeoutError, match=r"closing took longer than 5\.0 s"):
        await task
    assert task.cancelling() == 1


async def test_a_scope_returns_the_cancel_from_outside() -> None:
    """It is the one with which the block ends; or a new one if the block ends with something else; none is ever lost."""
    ends: list[BaseException | None] = []

    async def block(raised: BaseException | None) -> None:
        scope = CancelScope(asyncio.current_task())  # type: ignore[arg-type]
        try:
            try:
                await forever()
            except asyncio.CancelledError as cancelled:
                if raised is None:
                    raise
                raise raised from cancelled
        except BaseException as error:
            ends.append(error)
            ends.append(scope.uncancel(error))

    error = ValueError("of the block")
    for raised in (None, error):
        task = asyncio.create_task(block(raised))
        await ticks()
        task.cancel()
        await task
    assert isinstance(ends[0], asyncio.CancelledError)
    assert ends[1] is ends[0]
    assert ends[2] is error
    assert isinstance(ends[3], asyncio.CancelledError)


async def test_a_scope_that_is_left_in_time_cancels_nothing() -> None:
    """A cancel that was requested by the block itself, and that the block did not wait for, is dropped with the block."""
    task = asyncio.current_task()
    assert task is not None
    scope = CancelScope(task)
    scope.cancel("too late")
    assert scope.uncancel() is None
    await ticks()
    assert task.cancelling() == 0


async def test_shielded_cleanup_is_finished_in_spite_of_several_cancels(clock: ManualClock) -> None:
    """The caller is cancelled again and again, and leaves when the cleanup has ended, with its error in the context."""
    released = asyncio.Event()
    cancels: list[str] = []

    async def cleanup() -> None:
        await released.wait()
        raise OSError("of the cleanup")

    waiting = shielded(cleanup(), grace_secs=9, what="cleanup", on_cancel=lambda: cancels.append("noticed"))
    task = asyncio.create_task(waiting)
    for _ in range(3):
        await ticks()
        task.cancel()
    await ticks()
    assert not task.done()
    released.set()
    with pytest.raises(asyncio.CancelledError) as raised:
        await task
    assert isinstance(raised.value.__context__, OSError)
    assert cancels == ["noticed"]


@pytest.mark.may_leak
async def test_shielded_cleanup_that_ignores_everything(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    """It is cancelled after the grace period and left running after another, with a warning; its late error is not lost."""
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

    task = asyncio.create_task(shielded(cleanup(), grace_secs=9, what="the cleanup"))
    await ticks()
    task.cancel()
    await ticks()
    clock.advance(8)
    await ticks()
    assert events == []
    clock.advance(1)
    await ticks()
    assert events == ["cancelled"]
    assert not task.done()
    clock.advance(9)
    with pytest.raises(asyncio.CancelledError):
        await task
    (record,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert record.getMessage() == "the cleanup still runs 9 s after its cancellation; continuing without it"
    released.set()
    await ticks()
    gc.collect()
    await ticks()
    assert events == ["cancelled", "ends"]
    assert lost == []


async def test_waiting_for_tasks_leaves_nothing_with_them(clock: ManualClock) -> None:
    """`wait_done` says whether all are done, and cancels none; what it had registered is gone, also after a cancel."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    assert await wait_done([], 5)
    assert await wait_done([done], 5)
    waits = [asyncio.create_task(wait_done([done, future], secs)) for secs in (5, 7, None, None)]
    await ticks()
    clock.advance(5)
    await ticks()
    assert [wait.done() for wait in waits] == [True, False, False, False]
    assert waits[0].result() is False
    waits[2].cancel()
    await ticks()
    assert waits[2].cancelled()
    future.set_result(None)
    assert await waits[1] is await waits[3] is True


async def test_a_wait_that_is_over_keeps_nothing() -> None:
    """A future that many wait for in turn, as for the end of a long task, does not collect what they have left behind."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    references: set[int] = set()
    for _ in range(3):
        assert not await wait_done([future], 0)
        references.add(sys.getrefcount(future))
    assert len(references) == 1
