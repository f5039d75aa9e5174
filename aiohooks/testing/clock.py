"""A clock whose time only moves when a test moves it."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import heapq
from collections.abc import Callable
from typing import Self

from aiohooks._core.clock import set_current_clock
from aiohooks._core.validate import is_finite
from aiohooks.errors import InvalidArgumentError, safe_repr


class ManualClock:
    """A clock whose time you move by hand.

    `with ManualClock() as clock:` makes it the current clock for objects that you create, and tasks
    that you start, inside the block. `clock.advance(secs)` moves the time and makes the calls that
    are due:

        with ManualClock() as clock:
            steps = MemoryStepStore()
            waiting = asyncio.create_task(steps.wait_for(5, timeout=60))
            await asyncio.sleep(0)
            clock.advance(60)           # the wait ends with StepTimeoutError
    """

    def __init__(self, now: float = 0.0) -> None:
        """Start at the time `now`, in seconds."""
        self._now = now
        # A heap: the first timer is due first.
        self._timers: list[_Timer] = []
        # The number of timers that were ever made.
        self._count = 0
        # For each block that has been entered, the function that restores the clock before it.
        self._restore: list[Callable[[], None]] = []

    def now(self) -> float:
        """Return the time, in seconds."""
        return self._now

    def call_later(self, secs: float, callback: Callable[[], object]) -> _Timer:
        """Call `callback()`, in a copy of the current context, when the time has moved by
        `secs`.
        """
        # Timers of the same time are called in the order in which they were made.
        self._count += 1
        in_context = functools.partial(contextvars.copy_context().run, callback)
        when = self._now + max(0.0, secs)
        timer = _Timer(when, self._count, in_context)
        heapq.heappush(self._timers, timer)
        return timer

    def advance(self, secs: float) -> None:
        """Move the time by `secs` and make the calls that become due, in order, each at its own
        time.

        Tasks that become runnable run when you next await. If a callback fails, you get its error,
        and the next `advance` makes the later calls.
        """
        if not is_finite(secs) or secs < 0:
            raise InvalidArgumentError(
                f"advance({safe_repr(secs)}): time only moves forward, give seconds >= 0"
            )
        end = self._now + secs
        while self._timers and self._timers[0].when <= end:
            timer = heapq.heappop(self._timers)
            call = timer.call
            timer.call = None
            if call is not None:
                # An earlier callback may have moved the time beyond this timer.
                self._now = max(self._now, timer.when)
                call()
        self._now = max(self._now, end)

    @property
    def pending(self) -> int:
        """The number of calls that are still to be made."""
        return sum(timer.call is not None for timer in self._timers)

    def __enter__(self) -> Self:
        self._restore.append(set_current_clock(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._restore.pop()()

    def __repr__(self) -> str:
        return f"<ManualClock at {self._now} s, {self.pending} pending>"


@dataclasses.dataclass(order=True, slots=True)
class _Timer:
    """A scheduled call. `call` is None when the call was made or cancelled.

    Timers are ordered by time and then by number.
    """

    when: float
    number: int
    call: Callable[[], object] | None = dataclasses.field(compare=False)

    def cancel(self) -> None:
        self.call = None
