"""The coordinator alone: the stop, and waits that end with it or with the first error."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.session.coordinator import owner_of
from aiohooks.testing import ManualClock
from tests.support.checks import refused
from tests.support.waiting import fail, forever, ticks

pytestmark = pytest.mark.every_python


# -- the stop


async def test_the_first_reason_is_kept() -> None:
    """A stop is recorded immediately, with its first reason; asking again changes nothing."""
    coord = ah.Coordinator()
    assert (coord.should_stop(), coord.stop_reason) == (False, None)
    coord.request_stop("first")
    coord.request_stop("second")
    assert (coord.should_stop(), coord.stop_reason) == (True, "first")


async def test_a_stop_without_a_reason_has_one() -> None:
    """`stop_reason` is never None after a stop."""
    coord = ah.Coordinator()
    coord.request_stop()
    assert coord.stop_reason == "a stop was requested"


def test_a_reason_is_a_text_or_an_error() -> None:
    """Anything else is refused, and no stop is requested."""
    coord = ah.Coordinator()
    with refused(ah.errors.InvalidArgumentError, "reason is 5"):
        coord.request_stop(5)  # type: ignore[arg-type]
    assert not coord.should_stop()


async def test_waiting_for_the_stop() -> None:
    """`wait_for_stop` is woken by the stop and returns True; immediately if the stop came before."""
    coord = ah.Coordinator()
    waiting = asyncio.create_task(coord.wait_for_stop())
    await ticks()
    assert not waiting.done()
    coord.request_stop()
    assert await waiting
    assert await coord.wait_for_stop(0)


async def test_waiting_for_the_stop_ends_in_time() -> None:
    """After exactly its timeout it returns False if no stop came, and leaves no timer."""
    with ManualClock() as clock:
        coord = ah.Coordinator()
        waiting = asyncio.create_task(coord.wait_for_stop(10))
        await ticks()
        clock.advance(9.999)
        await ticks()
        assert not waiting.done()
        clock.advance(0.001)
        assert await waiting is False
        stopped = asyncio.create_task(coord.wait_for_stop(10))
        await ticks()
        coord.request_stop()
        assert await stopped
        assert clock.pending == 0


async def test_a_stop_can_be_cleared() -> None:
    """`clear_stop` forgets the stop, its reason and the errors; the coordinator is as new, with its tasks."""
    coord = ah.Coordinator()
    task = coord.start_soon(forever)
    coord.request_stop(OSError("lost"))
    coord.clear_stop()
    assert (coord.should_stop(), coord.stop_reason, coord.errors, coord.joined) == (False, None, [], False)
    coord.request_stop("again")
    await coord.join(0)
    assert coord.stop_reason == "again"
    assert task.cancelled()


async def test_a_sessions_stop_can_be_cleared_where_it_was_asked_for() -> None:
    """A stop requested of a session's coordinator is the session's, and `clear_stop` clears it there."""

    async def step() -> None: ...

    async with ah.AsyncMonitoredSession(step) as session:
        session.coord.request_stop("too early")
        assert session.should_stop()
        session.coord.clear_stop()
        assert (session.should_stop(), session.stop_reason) == (False, None)
        await session.run("step")


# -- until


async def test_until_gives_the_result() -> None:
    """Without a stop `until` returns what the coroutine, task or future returns, or raises what it raises."""
    coord = ah.Coordinator()
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_result, 3)
    assert await coord.until(asyncio.sleep(0, 1)) == 1
    assert await coord.until(asyncio.create_task(asyncio.sleep(0, 2))) == 2
    assert await coord.until(future) == 3
    assert await coord.until(future) == 3
    with pytest.raises(OSError, match="own"):
        await coord.until(fail(OSError("own")))
    with pytest.raises(OSError, match="own"):
        await coord.until(asyncio.create_task(fail(OSError("own"))))


async def test_a_stop_ends_until() -> None:
    """A stop ends the wait with StopRequestedError; a coroutine is cancelled, a task or future is left alone."""
    coord = ah.Coordinator()
    cancelled: list[str] = []

    async def notes() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            cancelled.append("coroutine")
            raise

    task = asyncio.create_task(forever())
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waits = [asyncio.create_task(coord.until(one)) for one in (notes(), task, future)]
    await ticks()
    coord.request_stop("enough")
    for wait in waits:
        with refused(ah.StopRequestedError, "enough"):
            await wait
    assert cancelled == ["coroutine"]
    assert not task.done()
    assert not future.done()
    task.cancel()
    await asyncio.wait([task])


async def test_until_after_the_stop_does_not_begin() -> None:
    """After a stop `until` raises immediately: a coroutine is closed without being started, a task is left running."""
    coord = ah.Coordinator()
    coord.request_stop("before")
    started: list[int] = []

    async def start() -> None:
        started.append(1)

    with refused(ah.StopRequestedError, "before"):
        await coord.until(start())
    task = asyncio.create_task(asyncio.sleep(0, 5))
    with refused(ah.StopRequestedError, "before"):
        await coord.until(task)
    assert await task == 5
    assert started == []


async def test_a_failed_task_ends_until() -> None:
    """A wait ends with the error of the background task that failed, the same object, also later."""
    coord = ah.Coordinator()
    error = OSError("the producer died")
    waits = [asyncio.create_task(coord.until(asyncio.Event().wait())) for _ in range(3)]
    coord.start_soon(fail, error)
    for wait in [*waits, coord.until(forever())]:
        with pytest.raises(OSError, match="the producer died") as caught:
            await wait
        assert caught.value is error
    assert coord.should_stop()
    assert coord.stop_reason == f"background task 'fail' failed: {error!r}"


async def test_a_cancelled_until_is_cancelled() -> None:
    """Cancelling the waiting task cancels the coroutine, leaves a future alone, and is no stop."""
    coord = ah.Coordinator()
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    for awaitable in (forever(), future):
        wait = asyncio.create_task(coord.until(awaitable))
        await ticks()
        wait.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wait
    assert not future.cancelled()
    assert not coord.should_stop()


async def test_an_error_that_follows_the_stop_is_raised() -> None:
    """A coroutine may answer the cancel of its wait with an error of its own; nothing is left of the cancel."""
    coord = ah.Coordinator()

    async def fails_when_cancelled() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            raise OSError("not yet") from None

    wait, task = coord.until(fails_when_cancelled()), asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_soon(coord.request_stop)
    with pytest.raises(OSError, match="not yet"):
        await wait
    assert task.cancelling() == 0


async def test_a_result_that_comes_with_the_stop_is_not_lost() -> None:
    """If the awaitable is done in the tick of the stop, either its result counts or the stop; never both."""
    coord = ah.Coordinator()
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    wait = asyncio.create_task(coord.until(future))
    await ticks()
    future.set_result(5)
    coord.request_stop("now")
    result = (await asyncio.gather(wait, return_exceptions=True))[0]
    assert result == 5 or isinstance(result, ah.StopRequestedError)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


# -- threads


async def test_a_thread_wakes_every_wait() -> None:
    """A stop from another thread ends `wait_for_stop`, `until` and `join` in the loop."""
    coord = ah.Coordinator()
    coord.start_soon(coord.wait_for_stop)
    waits: list[asyncio.Task[Any]] = [
        asyncio.create_task(coord.wait_for_stop()),
        asyncio.create_task(coord.until(forever())),
        asyncio.create_task(coord.join()),
    ]
    await ticks()
    await asyncio.to_thread(coord.request_stop, "from the thread")
    await asyncio.wait(waits)
    assert waits[0].result() is True
    assert isinstance(waits[1].exception(), ah.StopRequestedError)
    assert waits[2].result() is None


async def test_a_thread_may_stop_a_coordinator_before_its_first_use() -> None:
    """A stop that another thread requested before the coordinator was used is recorded."""
    coord = ah.Coordinator()
    await asyncio.to_thread(coord.request_stop, "early")
    assert await coord.wait_for_stop()
    assert repr(coord) == "<Coordinator stopping: early, tasks: none>"


async def test_a_stop_of_a_thread_is_not_missed_by_the_first_wait() -> None:
    """A stop that another thread requests while the first wait begins, at any point of it, ends that wait."""

    def stopped(when: str) -> ah.Coordinator:
        """Return one that another thread stops before, or after, the coordinator knows its loop."""
        coord = ah.Coordinator()
        owner: Any = owner_of(coord)
        bind = owner.bind

        def stop_from_thread() -> None:
            thread = threading.Thread(target=coord.request_stop, args=("from the thread",))
            thread.start()
            thread.join()

        def bind_and_stop() -> None:
            for step in (stop_from_thread, bind) if when == "before" else (bind, stop_from_thread):
                step()

        owner.bind = bind_and_stop
        return coord

    for when in ("before", "after"):
        assert await stopped(when).wait_for_stop()
        with refused(ah.StopRequestedError, "from the thread"):
            await stopped(when).until(forever())


async def test_a_coordinator_stays_in_its_loop() -> None:
    """Tasks and waits belong to the loop in which it was first used."""
    coord = ah.Coordinator()
    assert await coord.until(asyncio.sleep(0, 1)) == 1

    async def start_task() -> None:
        coord.start_soon(ticks)

    uses: list[Callable[[], Coroutine[Any, Any, Any]]] = [
        coord.wait_for_stop,
        coord.join,
        lambda: coord.until(asyncio.Event().wait()),
        start_task,
    ]
    for use in uses:
        with refused(ah.errors.WrongLoopError, "outside its own event loop", "request_stop"):
            await asyncio.to_thread(asyncio.run, use())


@pytest.mark.parametrize("waits", [True, False])
async def test_what_ends_in_spite_of_the_stop_has_a_result(waits: bool) -> None:
    """`until` returns it, and the task of the caller is not cancelled later."""
    coord = ah.Coordinator()

    async def ends() -> int:
        coord.request_stop("enough")
        if waits:
            with contextlib.suppress(asyncio.CancelledError):
                await forever()
        return 5

    assert await coord.until(ends()) == 5
    await ticks()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
