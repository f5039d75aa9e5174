"""The coordinator alone: the stop, waits that end with it, with the first error or with their
producers, the tasks and their errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock
from tests.support.checks import invalid, refused
from tests.support.waiting import (
    advance_clock,
    cancel_and_wait,
    fail,
    forever,
    parked,
    raises_after,
    ticks,
    uncancellable,
)

pytestmark = pytest.mark.every_python


# -- the stop


async def test_the_first_reason_is_kept() -> None:
    """A stop is recorded immediately, with its first reason, which is never None; anything but a
    text or an error is refused.
    """
    coord = ah.Coordinator()
    with invalid("reason is 5"):
        coord.request_stop(5)  # type: ignore[arg-type]
    assert (coord.should_stop(), coord.stop_reason) == (False, None)
    coord.request_stop()
    coord.request_stop("second")
    assert (coord.should_stop(), coord.stop_reason) == (True, "a stop was requested")


async def test_waiting_for_the_stop(clock: ManualClock) -> None:
    """It is woken by the stop, immediately if that came before, and returns False after exactly its
    timeout; no timer is left.
    """
    coord = ah.Coordinator()
    waiting = await parked(coord.wait_for_stop(10))
    stopped = await parked(coord.wait_for_stop())
    await advance_clock(clock, 9.999)
    assert not waiting.done()
    clock.advance(0.001)
    assert await waiting is False
    in_time = await parked(coord.wait_for_stop(10))
    coord.request_stop()
    assert [await stopped, await in_time, await coord.wait_for_stop(0)] == [True] * 3
    assert clock.pending == 0


# -- until


@pytest.mark.parametrize("how", ["stop", "cancel"])
async def test_what_ends_until(how: str) -> None:
    """A stop, or the caller's cancel, ends the wait; a coroutine is cancelled, a task or future is
    left alone.
    """
    coord = ah.Coordinator()
    cancelled = list[str]()

    async def notes() -> None:
        try:
            await forever()
        finally:
            cancelled.append("coroutine")

    task = asyncio.create_task(forever())
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waits = [await parked(coord.until(awaitable)) for awaitable in (notes(), task, future)]
    await ticks()
    for wait in waits:
        wait.cancel() if how == "cancel" else coord.request_stop("enough")
    await asyncio.wait(waits)
    ends = [
        asyncio.CancelledError if wait.cancelled() else type(wait.exception()) for wait in waits
    ]
    assert ends == [asyncio.CancelledError if how == "cancel" else ah.StopRequestedError] * 3
    assert (cancelled, task.done(), future.done(), coord.should_stop()) == (
        ["coroutine"],
        False,
        False,
        how == "stop",
    )
    await cancel_and_wait(task)


# -- threads and loops


@pytest.mark.parametrize(
    "when", ["before its first use", "before it knows its loop", "when it knows its loop"]
)
async def test_a_stop_of_a_thread_is_not_missed_by_the_first_wait(when: str) -> None:
    """A stop that another thread requests before, or while, the first wait begins, at any point of
    it, ends that wait.
    """

    def stopped() -> ah.Coordinator:
        coord = ah.Coordinator()
        bind = coord.bind

        def stop_from_thread() -> None:
            thread = threading.Thread(target=coord.request_stop, args=("from the thread",))
            thread.start()
            thread.join()

        def bind_and_stop() -> None:
            for step in (
                (stop_from_thread, bind)
                if when == "before it knows its loop"
                else (bind, stop_from_thread)
            ):
                step()

        if when == "before its first use":
            stop_from_thread()
        else:
            coord.bind = bind_and_stop  # type: ignore[method-assign]
        return coord

    assert await stopped().wait_for_stop()
    with refused(ah.StopRequestedError, "from the thread"):
        await stopped().until(forever())


async def test_a_coordinator_stays_in_its_loop() -> None:
    """Tasks and waits belong to the loop in which it was first used."""
    coord = ah.Coordinator()
    assert await coord.until(asyncio.sleep(0, 1)) == 1

    async def start_task() -> None:
        coord.start_soon(ticks)

    uses: list[Callable[[], Any]] = [
        coord.wait_for_stop,
        coord.join,
        lambda: coord.until(forever()),
        start_task,
    ]
    for use in uses:
        with refused(ah.errors.WrongLoopError, "outside its own event loop", "request_stop"):
            await asyncio.to_thread(asyncio.run, use())


# -- tasks


async def test_tasks_have_names_and_results() -> None:
    """`start_soon` passes the arguments on, names the task after the function or `name=`; a cancel
    is no failure.
    """
    coord = ah.Coordinator()

    async def add(first: int, second: int) -> int:
        return first + second

    unnamed = coord.start_soon(add, 1, 2)
    named = coord.start_soon(add, 3, 4, name="adder")
    assert repr(coord) == "<Coordinator running, tasks: add, adder>"
    assert await asyncio.gather(unnamed, named) == [3, 7]
    cancelled = coord.start_soon(forever)
    await ticks()
    cancelled.cancel()
    await coord.join()
    assert (coord.joined, coord.should_stop(), coord.errors) == (True, False, [])
    assert repr(coord) == "<Coordinator running, tasks: none>"


async def test_no_error_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    """The first error is raised; later ones, also those that compare equal to it, are noted on it
    and logged.
    """

    class EqualError(ValueError):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, EqualError)

        __hash__ = ValueError.__hash__

    coord = ah.Coordinator()
    errors = [EqualError("first"), EqualError("second"), KeyError("third")]
    for number, error in enumerate(errors):
        coord.start_soon(fail, error, name=f"task {number}")
    with pytest.raises(EqualError, match="first") as caught:
        await coord.join()
    assert [*map(id, coord.errors)] == [*map(id, errors)]
    assert caught.value.__notes__ == [
        "raised by background task 'task 0'",
        "then background task 'task 1' failed: EqualError('second')",
        "then background task 'task 2' failed: KeyError('third')",
    ]
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]


async def test_a_task_that_ignores_its_cancellation_is_named(
    caplog: pytest.LogCaptureFixture, clock: ManualClock
) -> None:
    """A task that ignores its cancellation for the grace period is named in a warning, and `join`
    returns without it.
    """
    coord = ah.Coordinator()
    released = asyncio.Event()
    task = coord.start_soon(uncancellable, released, name="stubborn one")
    coord.request_stop()
    joining = asyncio.create_task(coord.join(stop_grace_period_secs=5))
    for _ in range(2):
        await ticks(10)
        assert not joining.done()
        clock.advance(5)
    await joining
    released.set()
    await task
    what = (
        "coordinator: still active 5 s after their cancellation: background task 'stubborn"
        " one', at uncancellable"
    )
    assert (caplog.records[-1].levelname, what in caplog.messages[-1]) == ("WARNING", True)


async def test_a_cancelled_join_leaves_the_tasks() -> None:
    """Cancelling `join` is no stop: tasks keep running, and it can be called again."""
    coord = ah.Coordinator()
    task = coord.start_soon(forever)
    joining = await parked(coord.join())
    assert await cancel_and_wait(joining)
    assert not task.done()
    coord.request_stop()
    await coord.join(0)
    assert task.cancelled()


async def test_a_task_cannot_join_itself() -> None:
    """`join` in one of the tasks it waits for is refused."""
    coord = ah.Coordinator()
    coord.start_soon(coord.join)
    with refused(
        ah.errors.NestedRunError,
        "join was called from the background task 'join'",
        "use wait_for_stop",
    ):
        await coord.join()


# -- producers


async def test_a_wait_ends_when_the_last_of_its_producers_has_ended() -> None:
    """While one of several producers is active the wait continues; the error says how each has
    ended.
    """
    coord = ah.Coordinator()
    first = coord.start_soon(ticks, name="a")
    second = coord.start_soon(forever, name="b")
    wait = await parked(coord.until(forever(), producer=[first, second]), 20)
    assert not wait.done()
    second.cancel()
    with refused(ah.errors.ProducerFinishedError, "ended, or cancelled: producer 'a', 'b'"):
        await wait


@pytest.mark.parametrize("is_own", [True, False], ids=["own", "any other"])
@pytest.mark.parametrize("kind", [OSError, ah.OutOfRangeError])
async def test_a_producer_that_ends_with_an_error(kind: type[Exception], is_own: bool) -> None:
    """Its error is raised, the same object; a clean end is like having finished, and that of an own
    task is a stop of all.
    """
    coord = ah.Coordinator()
    error = kind("no more")
    producer = (
        coord.start_soon(fail, error, name="reader")
        if is_own
        else asyncio.create_task(fail(error), name="reader")
    )
    with pytest.raises((OSError, ah.StopRequestedError)) as caught:
        await coord.until(forever(), producer=producer)
    if isinstance(error, OSError):
        assert caught.value is error
    else:
        ended = "ended, or cancelled: producer 'reader'"
        if is_own:
            ended = f"background task 'reader' ended: {error!r}"
        assert str(caught.value) == ended
    assert coord.should_stop() is is_own


async def test_waits_that_are_over_are_forgotten_by_their_producer() -> None:
    """A producer that lives long does not keep what its consumers waited with."""
    coord = ah.Coordinator()
    queue = asyncio.Queue[int]()
    producer = coord.start_soon(forever)
    for number in range(3):
        wait = await parked(coord.until(queue.get(), producer=producer))
        queue.put_nowait(number)
        assert await wait == number
    gc.collect()
    assert not [held for held in gc.get_objects() if type(held).__name__ == "Wait"]
    await cancel_and_wait(producer)


# -- the drain and the pause


async def test_waits_during_a_drain() -> None:
    """One for something new ends, and none begins; others continue, and so does what waits for a
    stop.
    """
    coord = ah.Coordinator()
    gate = asyncio.Event()
    new = await parked(coord.until(forever(), drain=True))
    other = await parked(coord.until(gate.wait()))
    stop = await parked(coord.wait_for_stop())
    assert not coord.should_drain()
    coord.request_drain("enough")
    for wait in (new, coord.until(forever(), drain=True)):
        with pytest.raises(ah.StopRequestedError, match="enough"):
            await wait
    await ticks(20)
    assert (other.done(), stop.done()) == (False, False)
    assert (coord.should_drain(), coord.should_stop(), coord.drain_reason) == (
        True,
        False,
        "enough",
    )
    assert repr(coord) == "<Coordinator draining: enough, tasks: none>"
    gate.set()
    await other
    coord.request_stop("over")
    assert await stop
    assert repr(coord) == "<Coordinator stopping: over, tasks: none>"


@pytest.mark.parametrize("how", ["an error", "a wait", "a report"])
async def test_the_clean_end_of_a_task_in_a_drain_is_no_stop(how: str) -> None:
    """Otherwise the first producer that ends would stop those who finish what they have under way;
    a failure still does.
    """
    coord = ah.Coordinator()

    async def produce() -> None:
        if how == "an error":
            while not coord.should_drain():
                await ticks()
            raise ah.OutOfRangeError("no more data")
        with coord.stop_on_exception() if how == "a report" else contextlib.nullcontext():
            await coord.until(forever(), drain=True)

    task = coord.start_soon(produce)
    await ticks()
    coord.request_drain("enough")
    await asyncio.wait([task])
    await ticks()
    assert not coord.should_stop()
    coord.start_soon(raises_after(1, ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        await coord.join()


# -- TensorFlow's own tests (172-189 in the table)


async def fail_when_stopped(coord: ah.Coordinator, error: BaseException) -> None:
    """Wait for the stop, then fail."""
    await coord.wait_for_stop()
    raise error


# -- errors


@pytest.mark.parametrize("how", ["task", "request_stop", "stop_on_exception"])
async def test_join_raises_the_first_error(how: str) -> None:
    """The first error is raised by every `join` and by `raise_requested_exception`, the same
    object; a later one is noted.
    """
    coord = ah.Coordinator()
    first = OSError("first")
    second = OSError("second")
    coord.start_soon(coord.wait_for_stop)
    coord.start_soon(fail_when_stopped, coord, second)
    if how == "task":
        coord.start_soon(fail, first)
    elif how == "request_stop":
        coord.request_stop(first)
    else:
        with coord.stop_on_exception():
            raise first
    for _ in range(2):
        with pytest.raises(OSError, match="first") as caught:
            await coord.join()
        assert caught.value is first
    with pytest.raises(OSError, match="first"):
        coord.raise_requested_exception()
    assert coord.errors == [first, second]
    assert "second" in first.__notes__[-1]


@pytest.mark.parametrize("stopped", [False, True])
async def test_an_error_reported_after_the_join_is_raised_immediately(stopped: bool) -> None:
    """It would not be seen otherwise: it is raised where it is reported."""
    coord = ah.Coordinator()
    late = OSError("late")
    if stopped:
        coord.request_stop()
    await coord.join()
    with pytest.raises(OSError, match="late") as caught:
        coord.request_stop(late)
    assert caught.value is late
    with pytest.raises(OSError, match="late"), coord.stop_on_exception():
        raise late
    coord.request_stop("a plain stop is fine")
    coord.request_stop(ah.OutOfRangeError("and so is a clean end"))


@pytest.mark.parametrize(
    "kind", [asyncio.CancelledError, KeyboardInterrupt, SystemExit], ids=lambda kind: kind.__name__
)
async def test_stop_on_exception_swallows_errors_only(kind: type[BaseException]) -> None:
    """A cancellation, a KeyboardInterrupt and a SystemExit pass through the block as they are, and
    stop nothing.
    """
    coord = ah.Coordinator()
    with pytest.raises(kind), coord.stop_on_exception():
        raise kind
    assert not coord.should_stop()
