"""Time as everything here sees it: a clock that tests can replace.

Whatever needs the time takes `current_clock()` when it is made or started and asks that one from then on. It is the
running event loop's clock unless a context says otherwise (`aiohooks.testing.ManualClock`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol


class TimerHandle(Protocol):
    """A call that is still to come, and can be called off."""

    def cancel(self) -> Any:
        """Calls it off; harmless when it was made already."""
        ...


class Clock(Protocol):
    """What tells the time and calls back later."""

    def now(self) -> float:
        """Seconds since some moment in the past; never runs backwards."""
        ...

    def call_later(self, secs: float, callback: Callable[[], object]) -> TimerHandle:
        """Calls `callback()` from the event loop, `secs` seconds from now."""
        ...


class LoopClock:
    """The running event loop's clock.

    The loop is looked up at each call, so that a clock may be taken before there is a loop.
    """

    __slots__ = ()

    def now(self) -> float:
        """The running loop's time."""
        return asyncio.get_running_loop().time()

    def call_later(self, secs: float, callback: Callable[[], object]) -> TimerHandle:
        """The running loop's `call_later`."""
        return asyncio.get_running_loop().call_later(secs, callback)

    def __repr__(self) -> str:
        return "<LoopClock>"


_current: ContextVar[Clock] = ContextVar("aiohooks_clock", default=LoopClock())  # noqa: B039 - it has no state


def current_clock() -> Clock:
    """The clock of this context: the event loop's, unless a test has set another."""
    return _current.get()


def quick_now() -> Callable[[], float]:
    """The current clock's `now`, for who asks often: the running loop is not looked up each time."""
    clock = current_clock()
    return asyncio.get_running_loop().time if isinstance(clock, LoopClock) else clock.now


def set_current_clock(clock: Clock) -> Callable[[], None]:
    """Makes `clock` the current one of this context; the result puts back what was there before."""
    token = _current.set(clock)
    return lambda: _current.reset(token)


def wake(waiter: asyncio.Future[None]) -> None:
    """Set the waiter's result, unless it is done."""
    if not waiter.done():
        waiter.set_result(None)


def wake_after(waiter: asyncio.Future[None], secs: float, clock: Clock | None = None) -> TimerHandle:
    """Wake `waiter` in `secs` seconds; cancel the handle when the wait is over."""
    return (clock or current_clock()).call_later(secs, lambda: wake(waiter))


async def sleep(secs: float, clock: Clock | None = None) -> None:
    """Wait `secs` seconds on the clock, the current one if None: a pause that tests can turn by hand."""
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    timer = wake_after(waiter, secs, clock)
    try:
        await waiter
    finally:
        timer.cancel()
