"""A queue that a thread works off: order, batches, room, the end, and what is taken back."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from aiohooks._core.thread_queue import ThreadQueue
from tests.support.waiting import parked, ticks, until_true

pytestmark = pytest.mark.every_python


class Numbers(ThreadQueue[int]):
    """Waits for a gate before each batch; negative numbers fail."""

    def __init__(self, max_queue: int = 3, max_batch: int | None = None) -> None:
        super().__init__("numbers", max_queue, max_batch)
        self.gate, self.reporting, self.may_report = (
            threading.Semaphore(0),
            threading.Event(),
            threading.Event(),
        )
        self.may_report.set()
        self.record: list[Any] = []

    def work(self, items: list[int]) -> None:
        self.gate.acquire()
        if min(items) < 0:
            raise SystemExit(items[0])

    def done(self, items: list[int], error: BaseException | None) -> None:
        self.reporting.set()
        self.may_report.wait()
        self.record.append(items if error is None else (items, repr(error)))

    def ended(self) -> None:
        self.record.append("ended")


async def finished(queue: Numbers) -> list[Any]:
    """Let the queue do all, and return its record."""
    queue.gate.release(99)
    await queue.finish()
    queue.join()
    return queue.record


@pytest.mark.parametrize(
    ("max_batch", "batches"), [(None, [[1], [2, -3]]), (1, [[1], [2], [-3]]), (2, [[1], [2, -3]])]
)
async def test_items_are_done_in_order(max_batch: int | None, batches: list[list[int]]) -> None:
    """All that wait together, or so many; a failure ends nothing."""
    queue = Numbers(max_batch=max_batch)
    queue.add(1)
    await until_true(lambda: queue.pending() == [1] and not queue._waiting)
    queue.add(2)
    queue.add(-3)
    assert queue.pending() == [1, 2, -3]
    expected = [(one, f"SystemExit({one[0]})") if min(one) < 0 else one for one in batches]
    assert await finished(queue) == [*expected, "ended"]
    assert queue.pending() == []


async def test_room_and_what_waits_for_it() -> None:
    """The queue is full with what is not done, also what is being done; nothing keeps an item out
    that is added all the same.
    """
    queue = Numbers(max_queue=2, max_batch=1)
    await queue.wait_for_room()
    queue.add(1)
    assert not queue.is_full
    queue.add(2)
    assert queue.is_full
    waiting, draining = await parked(queue.wait_for_room()), await parked(queue.drain())
    await ticks()
    assert not waiting.done()
    queue.gate.release()
    await waiting
    assert (queue.record, queue.is_full, draining.done()) == ([[1]], False, False)
    queue.change(lambda waiting: waiting.extend([3, 4]))
    queue.gate.release(3)
    await draining
    assert await finished(queue) == [[1], [2], [3], [4], "ended"]
    await queue.drain()


async def test_a_queue_without_items_has_no_thread() -> None:
    """It is finished immediately."""
    queue = Numbers()
    assert queue.finish().done()
    queue.join()
    assert (queue.take_back(), queue.record) == ([], [])


@pytest.mark.parametrize("reporting", [False, True])
async def test_what_is_taken_back_is_not_reported(reporting: bool) -> None:
    """Also what is being done; a report that is under way is waited for, and its items are done."""
    queue = Numbers(max_batch=1)
    queue.add(1)
    queue.add(2)
    await until_true(lambda: len(queue._waiting) == 1)
    if reporting:
        queue.may_report.clear()
        queue.gate.release()
        await asyncio.to_thread(queue.reporting.wait)
    taking = await parked(asyncio.to_thread(queue.take_back), 50)
    assert not (reporting and taking.done())
    queue.may_report.set()
    assert await taking == ([2] if reporting else [1, 2])
    assert await finished(queue) == ([[1], "ended"] if reporting else ["ended"])


def test_a_loop_that_was_closed_is_not_woken() -> None:
    """The thread does what is left all the same."""
    queue = Numbers(max_batch=1)

    async def leave() -> None:
        queue.add(1)
        queue.add(2)
        queue.finish()
        await parked(queue.drain())

    asyncio.run(leave())
    queue.gate.release(2)
    queue.join()
    assert queue.record == [[1], [2], "ended"]


async def test_nothing_is_queued_after_the_end() -> None:
    """Nothing would work it off, and a drain would wait indefinitely."""
    queue = Numbers()
    queue.finish()
    with pytest.raises(RuntimeError, match=r"^the numbers has been finished$"):
        queue.add(1)
    await queue.drain()


async def test_a_report_is_made_when_the_queue_does_not_wait() -> None:
    """What logs it may wait for the event loop, which uses the queue; a drain waits for the report,
    and room does not.
    """

    class Reporting(Numbers):
        def done(self, items: list[int], error: BaseException | None) -> Any:
            return lambda: asyncio.run_coroutine_threadsafe(self.use(items), loop).result()

        async def use(self, items: list[int]) -> None:
            draining = await parked(self.drain())
            await self.wait_for_room()
            self.record.append((items, self.left))
            assert not draining.done()

    loop, queue = asyncio.get_running_loop(), Reporting(max_queue=1, max_batch=1)
    queue.add(1)
    queue.gate.release()
    await queue.drain()
    assert queue.record == [([1], 0)]
    assert await finished(queue) == [([1], 0), "ended"]
