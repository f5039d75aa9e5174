"""Which runs an observing hook looks at; decided with the real step, not with a guess."""

from __future__ import annotations

import time

from aiohooks._clock import Clock, current_clock
from aiohooks._every import Every, EveryTimer


class Sampling:
    """The runs of one session that are due by an `Every`, with the first one or without.

    What is fetched must be known before the run, the step that it leads to only afterwards. So `ask` says whether to fetch,
    going by how far the last steps went, and `take` whether the run was due indeed. A wrong guess costs a fetch, or takes
    the next run instead.
    """

    __slots__ = ("_asked", "_clock", "_first", "_last", "_leap", "_offset", "_timer")

    def __init__(self, every: Every, *, first: bool) -> None:
        """Made in `begin`, of the context's clock; with `first` the first run is due whatever its step."""
        self._clock: Clock = current_clock()
        self._timer: EveryTimer = every.timer()
        self._first = first
        self._last: int | None = None
        self._leap = 1
        self._asked = False
        self._offset: float | None = None

    def start(self, step: int) -> bool:
        """Counts from this step, once, and once more if a recovery took the step back; returns whether it counts anew."""
        anew = self._last is None or step < self._last
        if anew:
            self._timer.start(step, self._clock.now())
            self._last = step
        return anew

    def time(self) -> float:
        """Seconds since 1970; they pass as the context's clock does, so within a session never backwards."""
        now = self._clock.now()
        if self._offset is None:
            self._offset = time.time() - now
        return self._offset + now

    def ask(self, next_step: int) -> bool:
        """Whether to fetch for the run that is about to lead to `next_step`, if it moves the step by one."""
        self._asked = self._first or self._timer.due(next_step - 1 + self._leap, self._clock.now())
        return self._asked

    def take(self, step: int) -> bool:
        """Whether the run that led to `step` is to be looked at; it counts as done then."""
        if self._last is not None and step > self._last:
            self._leap = step - self._last
        self._last = step
        if not self._asked:
            return False
        now = self._clock.now()
        if not (self._first or self._timer.due(step, now)):
            return False
        self._first = self._asked = False
        self._timer.mark(step, now)
        return True
