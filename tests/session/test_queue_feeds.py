"""Feeds out of a queue: batches, what is counted as done, the end by a shutdown; nothing that was accepted stays behind."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.errors import notes_of
from aiohooks.testing import ManualClock
from tests.support.checks import refused
from tests.support.hooks import PhaseHook
from tests.support.sessions import NO_BACKOFF
from tests.support.waiting import parked, ticks, until_true

pytestmark = pytest.mark.every_python


def filled(*elements: Any) -> asyncio.Queue[Any]:
    """Return a queue of elements."""
    queue = asyncio.Queue[Any]()
    for one in elements:
        queue.put_nowait(one)
    return queue


async def same(batch: Any) -> Any:
    return batch


async def finished() -> None:
    """A producer that has nothing to produce."""


@pytest.mark.parametrize(("batch", "sizes"), [(1, [1] * 7), (3, [3, 3, 1]), (7, [7]), (20, [7])])
@pytest.mark.parametrize("max_wait_secs", [None, 0, 5])
async def test_batches_are_lists_of_up_to_so_many(batch: int, sizes: list[int], max_wait_secs: float | None) -> None:
    """In order; the last one has what is left."""
    async with ah.AsyncMonitoredSession(same) as session:
        producer = session.start_soon(finished)
        options: Any = {"feeds": filled(*range(7)), "producer": producer, "batch": batch, "max_wait_secs": max_wait_secs}
        batches = [one async for one in session.steps("same", **options)]
    assert [len(one) for one in batches] == sizes
    assert [element for one in batches for element in one] == [*range(7)]


async def test_the_first_element_waits_for_the_others_only_so_long(clock: ManualClock) -> None:
    """The time begins with the first element; 0 waits for none, None for all."""
    queue = filled()
    async with ah.AsyncMonitoredSession(same) as session:
        next_one = await parked(anext(session.steps("same", feeds=queue, batch=3, max_wait_secs=2)))
        clock.advance(100)
        queue.put_nowait(1)
        await ticks()
        clock.advance(1.5)
        queue.put_nowait(2)
        await ticks()
        assert not next_one.done()
        clock.advance(0.5)
        assert await next_one == [1, 2]
        first, whole = (session.steps("same", feeds=queue, batch=2, max_wait_secs=secs) for secs in (0, None))
        queue.put_nowait(3)
        assert await anext(first) == [3]
        queue.put_nowait(4)
        next_one = await parked(anext(whole))
        clock.advance(1000)
        await ticks()
        assert not next_one.done()
        queue.put_nowait(5)
        assert await next_one == [4, 5]


async def test_a_stop_and_a_cancel_keep_a_part_of_a_batch() -> None:
    """What was taken out of the queue is unused, and the next loop begins with it."""
    queue = filled(1, 2)
    async with ah.AsyncMonitoredSession(same) as session:
        steps = session.steps("same", feeds=queue, batch=3)
        waiting = await parked(anext(steps))
        waiting.cancel()
        await asyncio.wait([waiting])
        assert steps.unused == [1, 2]
        queue.put_nowait(3)
        assert await anext(steps) == [1, 2, 3]
        queue.put_nowait(4)
        ending = await parked(anext(steps, None))
        session.request_stop("enough")
        assert await ending is None
    assert steps.unused == [4]


@pytest.mark.parametrize("batch", [None, 2])
async def test_an_element_is_done_when_its_step_is(batch: int | None) -> None:
    """`queue.join()` waits for the steps: not for an element that was only taken, nor for one whose run has failed."""
    queue, held = filled(1, 2), asyncio.Event()

    async def step(batch: Any) -> None:
        await held.wait()
        if batch in (2, [1, 2]) and not failed:
            failed.append(batch)
            raise OSError("not yet")

    failed: list[Any] = []
    async with ah.AsyncMonitoredSession(step) as session:
        steps = session.steps(feeds=queue, batch=batch)
        joining = asyncio.create_task(queue.join())
        running = await parked(anext(steps))
        held.set()
        if batch is None:
            await running
            running = asyncio.ensure_future(anext(steps))
        with pytest.raises(OSError, match="not yet"):
            await running
        await ticks()
        assert not joining.done()
        assert steps.unused == ([2] if batch is None else [1, 2])
        await anext(steps)
        await joining


async def test_an_element_is_done_once_after_a_recovery() -> None:
    """A repeated run counts once."""
    queue, errors = filled(1, 2), [ah.UnavailableError("away"), ah.UnavailableError("again")]

    async def fail(*_: object) -> None:
        if errors:
            raise errors.pop()

    async with ah.AsyncMonitoredSession(same, [PhaseHook("before_run", fail)], recovery=NO_BACKOFF) as session:
        producer = session.start_soon(finished)
        assert [one async for one in session.steps("same", feeds=queue, producer=producer)] == [1, 2]
        await queue.join()


async def test_a_program_that_counts_what_is_done_as_well_is_an_error() -> None:
    """The error of the queue says who has counted already."""
    queue = filled(1)

    async def step(one: int) -> None:
        queue.task_done()

    with pytest.raises(ValueError, match="called too many times") as raised:
        async with ah.AsyncMonitoredSession(step) as session:
            await anext(session.steps(feeds=queue))
    assert "the session calls task_done of its queue" in str(notes_of(raised.value))


@pytest.mark.skipif(sys.version_info < (3, 13), reason="queues have a shutdown since 3.13")
@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("when", ["before", "during"])
async def test_the_shutdown_of_the_queue_is_its_end(batch: int | None, when: str) -> None:
    """What is in it is used first; the same error of anything else is a failure."""
    queue: Any = filled(1, 2, 3)

    async def use() -> None:
        async for one in session.steps("same", feeds=queue, batch=batch):
            used.extend([one] if batch is None else one)

    used: list[int] = []
    async with ah.AsyncMonitoredSession(same) as session:
        if when == "before":
            queue.shutdown()
        loop = asyncio.ensure_future(use())
        await until_true(lambda: queue.empty())
        queue.shutdown()
        await loop
        await queue.join()
    assert used == [1, 2, 3]
    assert session.stop_reason is None
    with pytest.raises(asyncio.QueueShutDown):  # type: ignore[attr-defined,unused-ignore]
        async with ah.AsyncMonitoredSession(same) as session:
            await session.until(queue.get())


async def test_a_generator_that_has_ended_is_refused() -> None:
    """It would give no element, and the loop would end without a word."""

    async def numbers() -> AsyncIterator[int]:
        yield 1

    async with ah.AsyncMonitoredSession(same) as session:
        for feeds in (numbers(), (one for one in (1,))):
            assert [one async for one in session.steps("same", feeds=feeds)] == [1]
            with refused(ah.errors.InvalidArgumentError, "which has ended", "make a new one"):
                session.steps("same", feeds=feeds)
