"""Bounded queues: order, places, failures, the end; a thread that works, and what is withdrawn."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import aiohooks as ah
from aiohooks._core.queue import Queue, ThreadQueue
from aiohooks.errors import WrongLoopError
from aiohooks.testing import ManualClock
from tests.support.waiting import parked, ticks, until_true

pytestmark = pytest.mark.every_python


class Letters(Queue[str]):
    """Begins no work: the test ends it."""

    def __init__(self, max_pending: int) -> None:
        super().__init__("letters", max_pending)

    def begin(self, item: str) -> None:
        pass

    def end_first(self, error: BaseException | None = None) -> None:
        self.ended([self.items[0]], error)


class Numbers(ThreadQueue[int]):
    """Waits for a gate before each batch; negative numbers fail."""

    def __init__(self, max_pending: int = 3, max_batch: int = 100) -> None:
        super().__init__("numbers", max_pending, max_batch)
        self.gate = threading.Semaphore(0)
        self.is_working = False
        self.worked: list[Any] = []
        self.reported: list[Any] = []

    def work(self, items: list[int]) -> None:
        self.is_working = True
        self.gate.acquire()
        self.worked.append(items)
        if min(items) < 0:
            raise SystemExit(items[0])

    def ended(self, items: list[int], error: BaseException | None) -> None:
        self.reported.append(items if error is None else (items, repr(error)))
        super().ended(items, None)

    def close_worker(self) -> None:
        self.worked.append("closed")


async def finished(queue: Numbers) -> list[Any]:
    """Let the queue do all, and return what was reported."""
    queue.gate.release(99)
    await queue.finish()
    queue.join()
    assert queue.worked[-1] == "closed"
    return queue.reported


async def test_places_are_given_in_order() -> None:
    """A full queue makes callers wait, and a caller that comes later gets no place before them,
    also if there is one by then; a place that was meant for a cancelled caller is given on.
    """
    queue = Letters(2)
    assert queue.put_nowait("a")
    assert queue.put_nowait("b")
    assert not queue.put_nowait("c")
    puts = [await parked(queue.put(letter)) for letter in "cde"]
    queue.end_first()
    assert not queue.put_nowait("f")
    puts[0].cancel()
    await ticks()
    assert [*queue.items] == ["b", "d"]
    queue.end_first()
    queue.end_first()
    await asyncio.gather(*puts, return_exceptions=True)
    assert [*queue.items] == ["e"]


async def test_a_long_wait_is_logged(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    """A wait for a place after a second, and then at most once a minute, whoever waits; a wait for
    the end of all work as well. A short wait is not logged.
    """
    queue = Letters(2)
    queue.add("a")
    queue.add("b")
    first = await parked(queue.put("c"))
    clock.advance(0.9)
    assert caplog.messages == []
    clock.advance(0.1)
    full = "the letters: 2 items are pending, of at most 2"
    assert caplog.messages == [f"a caller has waited 1 s for {full}"]
    second = await parked(queue.put("d"))
    queue.end_first()
    await first
    clock.advance(59.9)
    assert len(caplog.messages) == 1
    clock.advance(0.1)
    assert caplog.messages[1:] == [f"a caller has waited 60 s for {full}"]
    queue.end_first()
    await second
    draining = await parked(queue.drain())
    clock.advance(1)
    assert caplog.messages[2:] == [f"a caller has waited 1 s for {full}"]
    queue.end_first()
    queue.end_first()
    await draining
    clock.advance(600)
    assert len(caplog.messages) == 3


async def test_a_stop_ends_the_wait_for_a_place() -> None:
    """In a run of a session: the item is added all the same, and so are items that come later."""
    queue = Letters(1)

    async def step() -> None:
        for letter in "abc":
            await queue.put(letter)

    async with ah.AsyncMonitoredSession(step) as session:
        run = await parked(session.run("global_step"))
        await ticks(20)
        assert [*queue.items] == ["a"]
        session.request_stop("enough")
        await run
    assert [*queue.items] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("max_batch", "batches"), [(100, [[1], [2, -3]]), (1, [[1], [2], [-3]]), (2, [[1], [2, -3]])]
)
async def test_items_are_done_in_order(max_batch: int, batches: list[list[int]]) -> None:
    """All that wait together, or so many; a failure ends nothing."""
    queue = Numbers(max_batch=max_batch)
    queue.add(1)
    await until_true(lambda: queue.is_working)
    queue.add(2)
    queue.add(-3)
    assert [*queue.items] == [1, 2, -3]
    expected = [
        (batch, f"SystemExit({batch[0]})") if min(batch) < 0 else batch for batch in batches
    ]
    assert await finished(queue) == expected
    assert not queue.items


async def test_a_queue_without_items_has_no_thread() -> None:
    """It is finished immediately."""
    queue = Numbers()
    assert queue.finish().done()
    queue.join()
    assert (queue.withdraw(), queue.worked) == ([], [])


@pytest.mark.parametrize("all_items", [False, True])
async def test_what_is_withdrawn_is_not_reported(all_items: bool) -> None:
    """It is what waits; what is being done is reported, unless it was removed."""
    queue = Numbers(max_batch=1)
    queue.add(1)
    queue.add(2)
    await until_true(lambda: queue.is_working)
    assert queue.withdraw() == [2]
    if all_items:
        queue.items.clear()
    assert await finished(queue) == ([] if all_items else [[1]])


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
    assert queue.worked == [[1], [2], "closed"]


def test_a_thread_reports_to_one_loop() -> None:
    """In another loop, a wait for its items would never end: it is an error."""
    queue = Numbers()

    async def add_and_drain() -> None:
        queue.gate.release()
        queue.add(1)
        await queue.drain()

    asyncio.run(add_and_drain())
    for wait in (add_and_drain, queue.drain):
        with pytest.raises(WrongLoopError, match="numbers is used in another event loop"):
            asyncio.run(wait())

    async def finish() -> None:
        queue.finish()

    asyncio.run(finish())
    queue.join()


async def test_nothing_is_queued_after_the_end() -> None:
    """Nothing would work it off, and a drain would wait indefinitely."""
    queue = Numbers()
    queue.finish()
    with pytest.raises(RuntimeError, match=r"^the numbers has been finished$"):
        queue.add(1)
    await queue.drain()
