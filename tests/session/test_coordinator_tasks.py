"""The tasks of a coordinator: how they end, how their errors are reported, and waits for them."""

from __future__ import annotations

import asyncio
import logging

import pytest

import aiohooks as ah
from aiohooks.session.coordinator import owner_of
from aiohooks.testing import ManualClock
from tests.support.waiting import fail, forever, ticks

pytestmark = pytest.mark.every_python


# -- tasks


async def test_tasks_have_names_and_results() -> None:
    """`start_soon` passes the arguments on, names the task after the function or `name=`, and returns it."""
    coord = ah.Coordinator()

    async def add(first: int, second: int) -> int:
        return first + second

    one, two = coord.start_soon(add, 1, 2), coord.start_soon(add, 3, 4, name="adder")
    assert [task.get_name() for task in (one, two)] == ["add", "adder"]
    assert repr(coord) == "<Coordinator running, tasks: add, adder>"
    assert await asyncio.gather(one, two) == [3, 7]
    await coord.join()
    assert coord.joined
    assert repr(coord) == "<Coordinator running, tasks: none>"


async def test_a_cancelled_task_is_no_failure() -> None:
    """Cancelling a task is no failure."""
    coord = ah.Coordinator()
    task = coord.start_soon(forever)
    await ticks()
    task.cancel()
    await coord.join()
    assert (coord.should_stop(), coord.errors) == (False, [])


async def test_a_stop_does_not_interrupt_the_cleanup_of_a_cancelled_task() -> None:
    """The task has one reason to end, and its wait in `until` has none more."""
    coord = ah.Coordinator()
    cleaning, cleaned = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        try:
            await forever()
        finally:
            cleaning.set()
            await ticks()
            cleaned.set()

    coord.start_soon(coord.until, wait())
    await ticks()
    owner_of(coord).cancel_tasks("the session closes")
    await cleaning.wait()
    coord.request_stop("enough")
    await coord.join()
    assert cleaned.is_set()


async def test_more_errors_may_mean_a_stop() -> None:
    """`clean_stop_exception_types` are errors of tasks that mean a plain stop; subclasses too."""
    coord = ah.Coordinator((LookupError,))
    coord.start_soon(fail, KeyError("done"))
    coord.start_soon(fail, OSError("not this one"))
    with pytest.raises(OSError, match="not this one"):
        await coord.join()
    assert coord.stop_reason == "background task 'fail' ended: KeyError('done')"
    assert repr(coord.errors) == "[OSError('not this one')]"


async def test_no_error_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    """The first error is raised; later ones are noted on it and logged."""
    coord = ah.Coordinator()
    errors = [OSError("first"), ValueError("second"), KeyError("third")]
    for number, error in enumerate(errors):
        coord.start_soon(fail, error, name=f"task {number}")
    with pytest.raises(OSError, match="first") as caught:
        await coord.join()
    assert coord.errors == errors
    assert caught.value.__notes__ == [
        "raised by background task 'task 0'",
        "then background task 'task 1' failed: ValueError('second')",
        "then background task 'task 2' failed: KeyError('third')",
    ]
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]


# -- join


async def test_join_waits_for_all_tasks() -> None:
    """Without a stop `join` waits for the tasks, also for those that tasks start."""
    coord = ah.Coordinator()
    done: list[str] = []

    async def second() -> None:
        await ticks()
        done.append("second")

    async def first() -> None:
        await ticks()
        coord.start_soon(second)
        done.append("first")

    coord.start_soon(first)
    await coord.join()
    assert done == ["first", "second"]


async def test_join_gives_tasks_the_grace_period() -> None:
    """After a stop tasks have the grace period to end; then they are cancelled."""
    with ManualClock() as clock:
        coord = ah.Coordinator()
        ended: list[str] = []

        async def tidies() -> None:
            await coord.wait_for_stop()
            ended.append("tidied up")

        coord.start_soon(tidies)
        endless = coord.start_soon(forever)
        joining = asyncio.create_task(coord.join(stop_grace_period_secs=30))
        await ticks()
        coord.request_stop()
        await ticks(10)
        assert ended == ["tidied up"]
        clock.advance(29.9)
        await ticks(10)
        assert not endless.done()
        clock.advance(0.1)
        await joining
        assert endless.cancelled()
        assert clock.pending == 0


async def test_a_task_that_ignores_its_cancellation_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """A task that ignores its cancellation for the grace period is named in a warning, and `join` returns without it."""
    with ManualClock() as clock:
        coord = ah.Coordinator()
        let_go = asyncio.Event()

        async def stubborn() -> None:
            while not let_go.is_set():
                try:
                    await let_go.wait()
                except asyncio.CancelledError:
                    continue

        task = coord.start_soon(stubborn, name="stubborn one")
        coord.request_stop()
        joining = asyncio.create_task(coord.join(stop_grace_period_secs=5))
        for _ in range(2):
            await ticks(10)
            assert not joining.done()
            clock.advance(5)
        await joining
        let_go.set()
        await task
    *_, record = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(
        "coordinator, joining: still active 5 s after their cancellation: background task 'stubborn one', at test_a_task_that_"
    )


async def test_a_cancelled_join_leaves_the_tasks() -> None:
    """Cancelling `join` is no stop: tasks keep running, and it can be called again."""
    coord = ah.Coordinator()
    task = coord.start_soon(forever)
    joining = asyncio.create_task(coord.join())
    await ticks()
    joining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await joining
    assert not task.done()
    coord.request_stop()
    await coord.join(0)
    assert task.cancelled()


@pytest.mark.parametrize("stop", [False, True])
async def test_a_coordinator_is_used_again_after_join(stop: bool) -> None:
    """It starts tasks and joins them as before, also where a stop had cancelled those that were left."""
    coord = ah.Coordinator()
    for _ in range(2):
        task = coord.start_soon(forever if stop else ticks)
        if stop:
            coord.request_stop()
        await coord.join(0)
        assert task.cancelled() is stop
        coord.clear_stop()


async def test_an_error_reported_after_join_is_raised() -> None:
    """After `join` no waiter is left to see an error, so reporting one raises it; one that means a stop does not."""
    coord = ah.Coordinator()
    await coord.join()
    coord.request_stop(ah.OutOfRangeError("end"))
    with pytest.raises(OSError, match="late"):
        coord.request_stop(OSError("late"))


async def test_stop_on_exception() -> None:
    """An error in the block is reported as a task's would be and ends there; a BaseException passes."""
    coord = ah.Coordinator()
    with coord.stop_on_exception():
        pass
    assert not coord.should_stop()
    with coord.stop_on_exception():
        raise OSError("inside")
    assert repr(coord.errors) == "[OSError('inside')]"
    with pytest.raises(OSError, match="inside"):
        await coord.join()
    passing: tuple[BaseException, ...] = (asyncio.CancelledError(), KeyboardInterrupt(), SystemExit())
    for error in passing:
        with pytest.raises(type(error)), coord.stop_on_exception():
            raise error
