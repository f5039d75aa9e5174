"""The clock, which tests can replace.

An object that needs the time takes `current_clock()` when it is created or started and keeps it. It
is the running event loop's clock unless the context has another one
(`aiohooks.testing.ManualClock`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Generator
from contextvars import ContextVar
from typing import Any, Protocol


class TimerHandle(Protocol):
    """A scheduled call."""

    def cancel(self) -> Any:
        """Cancel the call; harmless if it was already made."""


class _NoTimer:
    __slots__ = ()

    def cancel(self) -> None: ...


NO_TIMER: TimerHandle = _NoTimer()
"""A call that will never be made."""


class Clock(Protocol):
    """The time, and calls after a delay."""

    def now(self) -> float:
        """Return the seconds since an arbitrary moment in the past; never decreases."""
        ...

    def call_later(self, secs: float, callback: Callable[[], object], /) -> TimerHandle:
        """Call `callback()` from the event loop after `secs` seconds."""
        ...


class LoopClock:
    """The running event loop's clock.

    The loop is looked up at each call, so a clock can be taken before there is a loop.
    """

    __slots__ = ()

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def call_later(self, secs: float, callback: Callable[[], object]) -> TimerHandle:
        return asyncio.get_running_loop().call_later(secs, callback)

    def __repr__(self) -> str:
        return "<LoopClock>"


# A mutable default would be shared by all contexts; this one has no state.
_current: ContextVar[Clock] = ContextVar("aiohooks_clock", default=LoopClock())  # noqa: B039


def current_clock() -> Clock:
    """Return the clock of this context: the event loop's, unless a test has set another."""
    return _current.get()


def quick_now() -> Callable[[], float]:
    """Return the current clock's `now` for frequent calls: it does not look up the running loop
    each time.
    """
    clock = current_clock()
    return asyncio.get_running_loop().time if isinstance(clock, LoopClock) else clock.now


def monotonic_now() -> Callable[[], float]:
    """Return the current clock's `now` for code that blocks the loop: the clock of uvloop stands
    still meanwhile.
    """
    clock = current_clock()
    return time.monotonic if isinstance(clock, LoopClock) else clock.now


def set_current_clock(clock: Clock) -> Callable[[], None]:
    """Make `clock` the clock of this context; return a function that restores the previous one."""
    token = _current.set(clock)
    return lambda: _current.reset(token)


def call_later(
    secs: float | None, callback: Callable[[], object], clock: Clock | None = None
) -> TimerHandle:
    """Call `callback()` in `secs` seconds on `clock`, by default the current one; None: never."""
    return NO_TIMER if secs is None else (clock or current_clock()).call_later(secs, callback)


def wake(waiter: asyncio.Future[None]) -> None:
    """Set the waiter's result, unless it is done."""
    if not waiter.done():
        waiter.set_result(None)


async def wait_woken(
    waiter: asyncio.Future[None], secs: float | None, clock: Clock | None = None
) -> None:
    """Await a waiter that is woken in `secs` seconds at the latest, on `clock`, by default the
    current one; None: no limit.
    """
    timer = call_later(secs, lambda: wake(waiter), clock)
    try:
        await waiter
    finally:
        timer.cancel()


class Waiters:
    """Those that wait until something happens; true while there are any."""

    def __init__(self) -> None:
        self._futures: dict[asyncio.Future[None], None] = {}

    def __bool__(self) -> bool:
        return bool(self._futures)

    @contextlib.contextmanager
    def added(self) -> Generator[asyncio.Future[None]]:
        """Add a waiter for the block, which awaits it."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures[waiter] = None
        try:
            yield waiter
        finally:
            del self._futures[waiter]

    async def wait(self, secs: float | None = None, clock: Clock | None = None) -> None:
        """Wait as `wait_woken` does."""
        with self.added() as waiter:
            await wait_woken(waiter, secs, clock)

    def wake(self) -> None:
        """Wake all."""
        for waiter in self._futures:
            wake(waiter)


async def sleep(secs: float, clock: Clock | None = None) -> None:
    """Wait `secs` seconds on `clock`, by default the current one: tests can control this pause."""
    await wait_woken(asyncio.get_running_loop().create_future(), secs, clock)
