"""Feeds out of a queue: what is counted as done, the end by producers or a shutdown;
nothing accepted stays behind.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

import aiohooks as ah
from tests.support.checks import invalid, refused
from tests.support.sessions import do_nothing, put, same, use_up
from tests.support.waiting import parked, ticks, until_true

pytestmark = pytest.mark.every_python


def filled(*elements: Any) -> asyncio.Queue[Any]:
    """Return a queue of elements."""
    queue = asyncio.Queue[Any]()
    for element in elements:
        queue.put_nowait(element)
    return queue


async def test_an_element_is_done_when_its_step_is() -> None:
    """`queue.join()` waits for the steps: not for an element that was only taken, nor for one whose
    run has failed.
    """
    queue = filled(1, 2)
    held = asyncio.Event()
    failed = list[Any]()

    async def step(number: int) -> None:
        await held.wait()
        if number == 2 and not failed:
            failed.append(number)
            raise OSError("not yet")

    async with ah.AsyncMonitoredSession(step) as session:
        steps = session.steps(feeds=queue)
        joining = asyncio.create_task(queue.join())
        running = await parked(anext(steps))
        held.set()
        await running
        with pytest.raises(OSError, match="not yet"):
            await anext(steps)
        await ticks()
        assert not joining.done()
        assert steps.unused == [2]
        await anext(steps)
        await joining


@pytest.mark.skipif(sys.version_info < (3, 13), reason="queues have a shutdown since 3.13")
@pytest.mark.parametrize("when", ["before", "during"])
async def test_the_shutdown_of_the_queue_is_its_end(when: str) -> None:
    """What is in it is used first; the same error of anything else is a failure."""
    queue = filled(1, 2, 3)
    used = list[Any]()
    async with ah.AsyncMonitoredSession(same) as session:
        if when == "before":
            queue.shutdown()  # type: ignore[attr-defined,unused-ignore]
        loop = asyncio.ensure_future(use_up(session.steps("same", feeds=queue), used))
        await until_true(lambda: queue.empty())
        queue.shutdown()  # type: ignore[attr-defined,unused-ignore]
        await loop
        await queue.join()
    assert used == [1, 2, 3]
    assert session.stop_reason is None
    with pytest.raises(asyncio.QueueShutDown):  # type: ignore[attr-defined,unused-ignore]
        async with ah.AsyncMonitoredSession(same) as session:
            await session.until(queue.get())


# -- producers


@pytest.mark.parametrize("make", [lambda: 5, lambda: put, lambda: [put], lambda: do_nothing()])
async def test_a_producer_is_a_task(make: Any) -> None:
    """Anything else, such as the function, is refused with its value, before any wait. Coroutines
    are closed.
    """
    async with ah.AsyncMonitoredSession(same) as session:
        producer = make()
        says = f"producer is {producer!r}", "give the task that session.start_soon returned"
        with invalid(*says):
            session.steps("same", feeds=asyncio.Queue[int](), producer=producer)
        with invalid("producer is "):
            await session.coord.until(asyncio.sleep(0), producer=make())


@pytest.mark.parametrize("grouped", [False, True], ids=["error", "group"])
@pytest.mark.parametrize("converters", [1, 2])
async def test_nothing_in_a_pipeline_is_lost_at_its_end(converters: int, grouped: bool) -> None:
    """A stage that ends with its producer has finished: it is no stop, and all that it has put into
    the next queue is used.
    """
    raw = asyncio.Queue[int](2)
    ready = asyncio.Queue[int](5)
    raised: list[BaseException] = []

    async def convert(reader: asyncio.Task[None]) -> None:
        while True:
            try:
                item = await session.until(raw.get(), producer=reader)
            except ah.errors.ProducerFinishedError as error:
                raised.append(error)
                raise (ExceptionGroup("stage", [error]) if grouped else error) from None
            await ticks(item)  # a later item overtakes
            await ready.put(item)

    async with ah.AsyncMonitoredSession(same) as session:
        reader = session.start_soon(put, raw, 5)
        stage = [session.start_soon(convert, reader) for _ in range(converters)]
        await asyncio.wait(stage)  # it has ended before its items are used
        steps = session.steps("same", feeds=ready, producer=[reader, *stage])
        assert sorted([seen async for seen in steps]) == [0, 1, 2, 3, 4]
        assert not session.should_stop()
        with refused(ah.errors.ProducerFinishedError, "producer 'convert'"):
            await session.until(ready.get(), producer=stage[0])
    assert [str(error) for error in raised] == ["ended, or cancelled: producer 'put'"] * converters
