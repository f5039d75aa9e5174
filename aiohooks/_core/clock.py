"""The clock, which tests can replace; timers and pauses.

    current_clock     the clock of this context
    call_later        makes a call after a delay
    wait_until_woken  awaits a future, with a time limit
    wake              ends such a wait: sets the result of the future
    sleep             pauses

An object that needs the time calls `current_clock()` when it is created or started, and keeps the
clock. It is the clock of the running event loop, unless the context has another one
(`aiohooks.testing.ManualClock`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol


class TimerHandle(Protocol):
    """A scheduled call."""

    def cancel(self) -> Any:
        """Cancel the call, unless it was already made."""


class _NoTimer:
    """The handle of a call that will never be made. It can be cancelled like any other."""

    def cancel(self) -> None: ...


NO_TIMER: TimerHandle = _NoTimer()
"""The handle of a call that will never be made."""


class Clock(Protocol):
    """The time, and calls after a delay."""

    def now(self) -> float:
        """Return the seconds since an arbitrary moment in the past; never decreases."""
        ...

    def call_later(
        self,
        secs: float,
        callback: Callable[[], object],
        /,
    ) -> TimerHandle:
        """Call `callback()` from the event loop after `secs` seconds."""
        ...


class LoopClock:
    """The clock of the running event loop.

    The running loop is looked up at each call, so a clock can be kept before there is a loop.
    """

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def call_later(
        self,
        secs: float,
        callback: Callable[[], object],
    ) -> TimerHandle:
        return asyncio.get_running_loop().call_later(secs, callback)


# A mutable default would be shared by all contexts; this one has no state.
_current: ContextVar[Clock] = ContextVar("aiohooks_clock", default=LoopClock())  # noqa: B039


def current_clock() -> Clock:
    """Return the clock of this context: the event loop's, unless a test has set another."""
    return _current.get()


def now_function() -> Callable[[], float]:
    """Return a function that returns the time of the current clock, for frequent calls.

    The function does not look up the running loop each time, so use it in the current loop alone.
    """
    clock = current_clock()
    if isinstance(clock, LoopClock):
        return asyncio.get_running_loop().time
    return clock.now


def monotonic_now() -> Callable[[], float]:
    """Return a function that returns the time, as `now_function` does.

    It is right also while code blocks the event loop.
    """
    clock = current_clock()
    if isinstance(clock, LoopClock):
        # The clock of uvloop stands still while the loop is blocked.
        return time.monotonic
    return clock.now


def set_current_clock(clock: Clock) -> Callable[[], None]:
    """Make `clock` the clock of this context. Return a function that restores the previous one."""
    token = _current.set(clock)
    return lambda: _current.reset(token)


def call_later(
    secs: float | None,
    callback: Callable[[], object],
    clock: Clock | None = None,
) -> TimerHandle:
    """Call `callback()` in `secs` seconds on `clock`, by default the current one.

    If `secs` is None, there is no call.
    """
    if secs is None:
        return NO_TIMER
    return (clock or current_clock()).call_later(secs, callback)


def wake(waiter: asyncio.Future[Any], result: Any = None) -> None:
    """Set the result of a future, unless it is done."""
    if not waiter.done():
        waiter.set_result(result)


async def wait_until_woken(
    waiter: asyncio.Future[None],
    secs: float | None,
    clock: Clock | None = None,
) -> None:
    """Wait until `wake(waiter)` is called, or for at most `secs` seconds, which raises nothing.

    If `secs` is None, there is no time limit. The time is that of `clock`, by default the current
    one.
    """
    timer = call_later(secs, lambda: wake(waiter), clock)
    try:
        await waiter
    finally:
        timer.cancel()


async def sleep(secs: float, clock: Clock | None = None) -> None:
    """Pause for `secs` seconds on `clock`, by default the current one, which tests control."""
    await wait_until_woken(asyncio.get_running_loop().create_future(), secs, clock)


def secs_text(secs: float) -> str:
    """Return seconds as text: `0.25 s`, `4130 s`.

    The text has three significant digits, but all digits of whole seconds from 999 on.
    """
    # From 999.5 on, `.3g` would write an exponent.
    return f"{secs:.3g} s" if secs < 999 else f"{secs:.0f} s"
