"""Waits that end with the tasks on which they depend: `until(..., producer=)`, and loops over a queue."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

import aiohooks as ah
from tests.support.checks import refused
from tests.support.waiting import fail, forever, ticks

pytestmark = pytest.mark.every_python


async def count(batch: int) -> dict[str, int]:
    """Return the batch: a step."""
    return {"seen": batch}


async def put(queue: asyncio.Queue[int], number: int) -> None:
    """Put so many items into the queue, and finish."""
    for item in range(number):
        await queue.put(item)


# -- until


@pytest.mark.parametrize("ended", [False, True], ids=["meanwhile", "before"])
async def test_a_wait_ends_when_its_producer_has_finished(ended: bool) -> None:
    """Everything that the producer has put is taken; then the wait ends with an error that is a clean end and names it."""
    coord, queue = ah.Coordinator(), asyncio.Queue[int](0 if ended else 1)
    producer = coord.start_soon(put, queue, 5)
    if ended:
        await asyncio.wait([producer])
    taken: list[int] = []
    with refused(ah.errors.ProducerFinishedError, "producer 'put' has finished"):
        while True:
            taken.append(await coord.until(queue.get(), producer=producer))
    assert taken == [0, 1, 2, 3, 4]
    assert not coord.should_stop()


async def test_a_wait_ends_when_the_last_of_its_producers_has_ended() -> None:
    """While one of several producers is active the wait continues; the error says how each has ended."""
    coord, queue = ah.Coordinator(), asyncio.Queue[int]()
    first, second = coord.start_soon(ticks, name="a"), coord.start_soon(forever, name="b")
    wait = asyncio.create_task(coord.until(queue.get(), producer=[first, second]))
    await ticks(20)
    assert not wait.done()
    second.cancel()
    with refused(ah.errors.ProducerFinishedError, "producer 'a' has finished, producer 'b' was cancelled"):
        await wait


async def test_a_failed_producer_ends_the_wait_with_its_error() -> None:
    """The error of a producer is raised, the same object: of a task of the coordinator, and of any other task."""
    queue = asyncio.Queue[int]()
    for is_own in (True, False):
        coord, error = ah.Coordinator(), OSError("disk")
        producer = coord.start_soon(fail, error) if is_own else asyncio.create_task(fail(error))
        with pytest.raises(OSError, match="disk") as caught:
            await coord.until(queue.get(), producer=producer)
        assert caught.value is error


async def test_a_clean_end_of_a_producer_ends_the_wait_cleanly() -> None:
    """A producer that ends with a clean-end error is like one that has finished; that of a coordinator is a stop of all."""
    coord, queue = ah.Coordinator(), asyncio.Queue[int]()
    with refused(ah.errors.ProducerFinishedError, "producer 'reader' has ended: OutOfRangeError('no more')"):
        await coord.until(queue.get(), producer=asyncio.create_task(fail(ah.OutOfRangeError("no more")), name="reader"))
    assert not coord.should_stop()
    with refused(ah.StopRequestedError, "background task 'reader' ended: OutOfRangeError('no more')"):
        await coord.until(queue.get(), producer=coord.start_soon(fail, ah.OutOfRangeError("no more"), name="reader"))


async def test_what_a_producer_leaves_reaches_the_wait() -> None:
    """A waiter that is notified through a condition, or by a callback of the loop, gets what its producer has left."""
    coord = ah.Coordinator()
    loop, items, condition = asyncio.get_running_loop(), list[int](), asyncio.Condition()
    queue = asyncio.Queue[int]()

    async def take() -> int:
        async with condition:
            await condition.wait_for(lambda: items)
            return items.pop()

    async def produce() -> None:
        async with condition:
            items.append(1)
            condition.notify_all()
        loop.call_soon(queue.put_nowait, 2)

    waits = [
        asyncio.create_task(coord.until(awaitable, producer=producer))
        for producer in [coord.start_soon(produce)]
        for awaitable in (take(), queue.get())
    ]
    assert await asyncio.gather(*waits) == [1, 2]


async def test_a_wait_that_is_done_in_time_leaves_nothing() -> None:
    """A wait that is done before its producer ends is over: the producer's end does not cancel the task."""
    coord, queue = ah.Coordinator(), asyncio.Queue[int]()
    producer = coord.start_soon(put, queue, 1)
    assert await coord.until(queue.get(), producer=producer) == 0
    await ticks(20)
    assert producer.done()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.parametrize("producer", [[], 5, [5], "reader"], ids=repr)
async def test_a_producer_is_a_task(producer: Any) -> None:
    """Anything else is refused, and a coroutine that was to be awaited is closed."""
    with refused(ah.errors.InvalidArgumentError, f"producer is {producer!r}", "what start_soon returns"):
        await ah.Coordinator().until(forever(), producer=producer)


# -- steps


async def test_a_loop_over_a_queue_ends_at_a_stop() -> None:
    """Without a producer a loop over a queue waits for the next item until a stop is requested."""
    queue = asyncio.Queue[int]()
    async with ah.AsyncMonitoredSession(count, [ah.StopAtStepHook(last_step=3)]) as session:
        await put(queue, 10)
        assert [one async for one in session.steps("seen", feeds=queue)] == [0, 1, 2]
        assert queue.qsize() == 7
    async with ah.AsyncMonitoredSession(count) as session:
        session.start_soon(ticks).add_done_callback(lambda _: session.request_stop("enough"))
        assert [one async for one in session.steps("seen", feeds=asyncio.Queue())] == []


@pytest.mark.parametrize("grouped", [False, True], ids=["error", "group"])
@pytest.mark.parametrize("converters", [1, 2])
async def test_nothing_in_a_pipeline_is_lost_at_its_end(converters: int, grouped: bool) -> None:
    """A stage that ends with its producer has finished: it is no stop, and all that it has put into the next queue is used."""
    raw, ready = asyncio.Queue[int](2), asyncio.Queue[int](5)
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

    async with ah.AsyncMonitoredSession(count) as session:
        reader = session.start_soon(put, raw, 5)
        stage = [session.start_soon(convert, reader) for _ in range(converters)]
        await asyncio.wait(stage)  # it has ended before its items are used
        steps = session.steps("seen", feeds=ready, producer=[reader, *stage])
        assert sorted([seen async for seen in steps]) == [0, 1, 2, 3, 4]
        assert not session.should_stop()
        with refused(ah.errors.ProducerFinishedError, "producer 'convert' has finished"):
            await session.until(ready.get(), producer=stage[0])
    assert [str(error) for error in raised] == ["producer 'put' has finished"] * converters


async def test_a_generator_waits_for_its_producer() -> None:
    """An async generator waits with `until`; what it does with an item that it has taken is not cut off."""
    queue = asyncio.Queue[int](2)

    async def feeds() -> Any:
        while True:
            item = await session.until(queue.get(), producer=producer)
            await ticks(20)
            yield item

    async with ah.AsyncMonitoredSession(count) as session:
        producer = session.start_soon(put, queue, 5)
        assert [one async for one in session.steps("seen", feeds=feeds())] == [0, 1, 2, 3, 4]


async def test_a_producer_needs_a_queue() -> None:
    """`producer=` beside a generator is refused: its own work would be cut off; the message says what to write instead."""

    async def feeds() -> Any:
        yield 1

    async with ah.AsyncMonitoredSession(count) as session:
        with refused(ah.errors.InvalidArgumentError, "feeds is <async_generator", "session.until(queue.get(), producer=...)"):
            session.steps("seen", feeds=feeds(), producer=session.start_soon(ticks))


async def test_waits_that_are_over_are_forgotten_by_their_producer() -> None:
    """A producer that lives long does not keep what its consumers waited with."""
    coord, queue = ah.Coordinator(), asyncio.Queue[int]()
    producer = coord.start_soon(forever)
    for number in range(3):
        wait = asyncio.create_task(coord.until(queue.get(), producer=producer))
        await ticks()
        queue.put_nowait(number)
        assert await wait == number
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one).__name__ == "EndOfProducers"]
    producer.cancel()
    await asyncio.wait([producer])


async def test_a_cancel_from_outside_wins_over_a_stop_of_the_same_tick() -> None:
    """The caller of `until` gets its cancel, and not the stop."""
    coord = ah.Coordinator()
    wait = asyncio.create_task(coord.until(forever()))
    await ticks()
    coord.request_stop("enough")
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait
