"""Clocks: the event loop's, and the manual one of tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar

import pytest

from aiohooks._core.clock import Clock, current_clock, sleep
from aiohooks.errors import InvalidArgumentError
from aiohooks.testing.clock import ManualClock
from tests.support.waiting import ticks

# -- the loop's clock


async def test_loop_clock_calls_back() -> None:
    """The loop makes a scheduled call, unless the call was cancelled."""
    clock = current_clock()
    made: list[str] = []
    done = asyncio.Event()
    clock.call_later(0, lambda: made.append("no")).cancel()
    clock.call_later(0, lambda: (made.append("yes"), done.set()))
    await done.wait()
    assert made == ["yes"]


async def test_sleep_waits_on_the_clock_that_it_is_given() -> None:
    """By default on the current one; a sleep that is cancelled leaves no timer."""
    given = ManualClock()
    with ManualClock() as current:
        sleeps = [
            asyncio.create_task(sleep(5)),
            asyncio.create_task(sleep(5, given)),
            asyncio.create_task(sleep(5)),
        ]
        await ticks()
        sleeps[2].cancel()
        await ticks()
        assert current.pending == 1
        current.advance(5)
        await ticks()
        assert [task.done() for task in sleeps] == [True, False, True]
        given.advance(4)
        await ticks()
        assert not sleeps[1].done()
        given.advance(1)
        await sleeps[1]
    assert sleeps[2].cancelled()


# -- the manual clock


def recorder(calls: list[tuple[str, float]], clock: Clock) -> Callable[[str], Callable[[], None]]:
    """Make callbacks that record their name and the time."""
    return lambda name: lambda: calls.append((name, clock.now()))


def test_manual_clock_moves_only_by_advance() -> None:
    """Its time is the one it was given, and moves only by `advance`."""
    clock = ManualClock(5.0)
    assert clock.now() == clock.now() == 5.0
    clock.advance(2.5)
    clock.advance(0)
    assert clock.now() == 7.5


def test_manual_clock_calls_in_order_each_at_its_time() -> None:
    """Calls are made by due time, then in the order they were scheduled; each sees its own time."""
    clock = ManualClock()
    calls: list[tuple[str, float]] = []
    call = recorder(calls, clock)
    clock.call_later(3, call("third"))
    clock.call_later(1, call("first"))
    clock.call_later(2, call("second"))
    clock.call_later(1, call("first, too"))
    clock.call_later(9, call("later"))
    clock.call_later(-1, call("immediately"))
    clock.advance(3)
    assert calls == [
        ("immediately", 0),
        ("first", 1),
        ("first, too", 1),
        ("second", 2),
        ("third", 3),
    ]
    assert (clock.now(), clock.pending) == (3, 1)


def test_manual_clock_cancel() -> None:
    """A cancelled call is not made, even if a callback of the same time cancels it; once made, it
    is too late.
    """
    clock = ManualClock()
    calls: list[tuple[str, float]] = []
    call = recorder(calls, clock)
    off = clock.call_later(1, call("off"))
    first = clock.call_later(2, lambda: (call("first")(), second.cancel()))
    second = clock.call_later(2, call("second"))
    off.cancel()
    off.cancel()
    assert clock.pending == 2
    clock.advance(5)
    first.cancel()
    assert (calls, clock.pending) == ([("first", 2)], 0)


def test_manual_clock_keeps_the_context_of_the_call() -> None:
    """A callback sees the context variables as they were when the call was scheduled, as on a
    loop.
    """
    variable = ContextVar("variable", default="none")
    clock = ManualClock()
    seen: list[str] = []
    token = variable.set("then")
    clock.call_later(1, lambda: seen.append(variable.get()))
    variable.reset(token)
    clock.advance(1)
    assert seen == ["then"]


def test_manual_clock_raises_a_callbacks_error() -> None:
    """An error of a callback comes out of `advance`; the next `advance` continues from there."""
    clock = ManualClock()
    calls: list[tuple[str, float]] = []

    def fail() -> None:
        raise ValueError("broken")

    clock.call_later(1, fail)
    clock.call_later(2, recorder(calls, clock)("after"))
    with pytest.raises(ValueError, match="broken"):
        clock.advance(5)
    assert (clock.now(), calls) == (1, [])
    clock.advance(1)
    assert calls == [("after", 2)]


def test_manual_clock_is_current_inside_its_block() -> None:
    """It is the current clock inside `with`, the innermost one wins, and the previous one comes
    back.
    """
    outside = current_clock()
    with ManualClock() as outer:
        assert current_clock() is outer
        with ManualClock() as inner, inner:
            assert current_clock() is inner
        assert current_clock() is outer
    assert current_clock() is outside


@pytest.mark.parametrize("secs", [-1, float("nan"), float("inf")])
def test_manual_clock_refuses_to_run_backwards(secs: float) -> None:
    """Time moves forward, by a number."""
    clock = ManualClock()
    with pytest.raises(InvalidArgumentError, match="time only moves forward"):
        clock.advance(secs)
    assert clock.now() == 0
    assert repr(clock) == "<ManualClock at 0.0 s, 0 pending>"
