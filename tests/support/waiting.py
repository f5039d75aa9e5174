"""Coroutines that wait, and coroutines that are run step by step; without sleeping."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import aiohooks as ah
from aiohooks.testing import ManualClock

T = TypeVar("T")

HANG_SECS = 180
"""A guard against hanging, not a measurement: what takes longer hangs, also on a machine that is
slow, or busy with much else.
"""


async def ticks(count: int = 5) -> None:
    """Let the other tasks of the loop run, so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def suspend(*_: object) -> None:
    """Suspend once, whatever the arguments: also a phase of a hook."""
    await asyncio.sleep(0)


async def until_true(condition: Callable[[], object]) -> None:
    """Let the other tasks, and threads, run until the condition holds; if it never does, the test's
    time limit ends this.
    """
    while not condition():  # noqa: ASYNC110 - a condition of any kind, for which no event is set
        await asyncio.sleep(0)


async def advance_clock(clock: ManualClock, secs: float, count: int = 5) -> None:
    """Advance the clock, and let the other tasks run, so many times."""
    clock.advance(secs)
    await ticks(count)


async def pass_time(clock: ManualClock, secs: float) -> None:
    """Let time pass in which all that is due is done."""
    for _ in range(round(secs * 2)):
        await advance_clock(clock, 0.5, 40)


async def parked(
    coro: Coroutine[Any, Any, T], count: int = 1, name: str | None = None
) -> asyncio.Task[T]:
    """Start the coroutine as a task, and return that when it has come to its first suspension, or
    after so many turns.
    """
    task = asyncio.create_task(coro, name=name)
    await ticks(count)
    return task


async def cancel_and_wait(task: asyncio.Task[Any]) -> bool:
    """Cancel the task, and wait until it has ended; return whether it was cancelled."""
    task.cancel()
    await asyncio.wait([task])
    return task.cancelled()


async def parked_wait(store: ah.StepStore, step: int) -> asyncio.Task[int]:
    """Start a task that waits for the step, and return it when it is parked; opening the store may
    take I/O.
    """
    before = store.statistics().waiting
    task = asyncio.create_task(store.wait_for(step))
    while store.statistics().waiting <= before:  # noqa: ASYNC110 - a store has no event for this
        await asyncio.sleep(0)
    return task


def cancels_left() -> int:
    """Return how many cancels of this task have not been dealt with."""
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


def result_without_suspending(coro: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that must not suspend."""
    try:
        coro.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    coro.close()
    raise AssertionError("it suspended")


async def forever(*_: object) -> None:
    """Wait until cancelled."""
    await asyncio.Event().wait()


class Gate:
    """An event to wait for, which can be cleared again, with a line of its own in a stack."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    async def pass_through(self, *_: object) -> None:
        await self.opened.wait()


async def uncancellable(released: asyncio.Event) -> None:
    """Wait for the event, whatever is cancelled."""
    while not released.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await released.wait()


class Uncancellable:
    """Waits until it is `released`, and counts the cancels that it swallows; raises `error`, if
    that is given, at its end.
    """

    def __init__(self, error: BaseException | None = None) -> None:
        self.waiting = asyncio.Event()
        self.released = asyncio.Event()
        self.cancels = 0
        self.task: asyncio.Task[Any] | None = None
        """The task in which it has ended."""
        self._error = error

    async def wait(self, *_: object) -> None:
        """Wait, whatever is cancelled."""
        self.waiting.set()
        while not self.released.is_set():
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                self.cancels += 1
        self.task = asyncio.current_task()
        if self._error is not None:
            raise self._error

    async def release(self) -> None:
        """Let it end, and wait until everything has seen that."""
        self.released.set()
        await until_true(lambda: self.task is not None)
        await ticks()


async def fail(error: BaseException) -> None:
    """Suspend, then raise the error."""
    await asyncio.sleep(0)
    raise error


def raises_after(count: int, error: BaseException) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Make a coroutine function, which takes any arguments, that suspends so often, then raises the
    error.
    """

    async def call(*_: object) -> None:
        await ticks(count)
        raise error

    return call


async def elapse(secs: float) -> None:
    """Wait on the current clock."""
    passed = asyncio.get_running_loop().create_future()
    ah.hooks.current_clock().call_later(secs, lambda: passed.done() or passed.set_result(None))
    await passed
