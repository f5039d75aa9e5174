"""Which runs an observing hook looks at; decided with the real step, not with a guess."""

from __future__ import annotations

import itertools
import math
import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

from aiohooks._aio.clock import Clock, current_clock
from aiohooks.errors import InvalidArgumentError, NotReadyError


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """When something is due, by whichever of its units comes first.

    A boundary that is passed over is not missed: a step that jumps over one, or over several, makes it due once.

    Attributes:
        steps: due when a multiple of this, counted from `after`, is reached or passed.
        secs: due when so many seconds have gone by since the last time.
        at: due when one of these steps is reached or passed; positive, in rising order.
        after: nothing is due at this step or before it.
    """

    steps: int | None = None
    secs: float | None = None
    at: Sequence[int] = ()
    after: int = 0

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # the way into a frozen value
        if self.steps is not None:
            set_field(self, "steps", _whole(self.steps, 1, "steps", "a whole number of steps, at least 1"))
        if self.secs is not None and not _is_duration(self.secs):
            raise InvalidArgumentError(f"Every(secs={self.secs!r}): give a positive, finite number of seconds")
        set_field(self, "at", _rising(self.at))
        set_field(self, "after", _whole(self.after, 0, "after", "a step, at least 0"))
        if self.steps is None and self.secs is None and not self.at:
            raise InvalidArgumentError("Every() is never due: give steps=, secs= or at=, or several of them")

    def timer(self) -> EveryTimer:
        """A timer that keeps track of the last time; each thing that is done needs one of its own."""
        return EveryTimer(self)


class EveryTimer:
    """Keeps track of when an `Every` was last due. The step and the time are the caller's: `clock.now()`, as a rule."""

    __slots__ = ("_at", "_last_now", "_last_step", "every")

    def __init__(self, every: Every) -> None:
        """Makes a timer that has not been started."""
        self.every: Every = every
        self._at = tuple(every.at)
        self._last_step: int | None = None
        self._last_now = 0.0

    def start(self, step: int, now: float) -> None:
        """Counts from here; once more after a recovery, where the step may have gone back."""
        self._last_step, self._last_now = step, now

    def due(self, step: int, now: float) -> bool:
        """Whether it is due at this step and time; asking changes nothing."""
        last = self._last_step
        if last is None:
            raise _not_started(self)
        every = self.every
        if step <= every.after:
            return False
        if every.steps is not None:
            boundaries = (step - every.after) // every.steps
            if boundaries > max(0, (last - every.after) // every.steps):
                return True
        if every.secs is not None and now - self._last_now >= every.secs:
            return True
        first = max(last, every.after)
        return any(first < boundary <= step for boundary in self._at)

    def mark(self, step: int, now: float) -> tuple[float, int]:
        """Notes that it was done at this step and time.

        Returns:
            The seconds and the steps since the last time, or since the start.
        """
        last = self._last_step
        if last is None:
            raise _not_started(self)
        elapsed = now - self._last_now, step - last
        self.start(step, now)
        return elapsed

    def __repr__(self) -> str:
        state = "not started" if self._last_step is None else f"last at step {self._last_step}"
        return f"<EveryTimer of {self.every}, {state}>"


def _not_started(timer: EveryTimer) -> NotReadyError:
    return NotReadyError(f"{timer!r}: call start(step, now) first, it says where to count from")


def _whole(value: SupportsIndex, least: int, name: str, wanted: str) -> int:
    if not isinstance(value, bool):
        try:
            number = operator.index(value)
        except TypeError:
            pass  # a float, a string: said below
        else:
            if number >= least:
                return number
    raise InvalidArgumentError(f"Every({name}={value!r}): give {wanted}")


def _is_duration(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _rising(at: Sequence[int]) -> tuple[int, ...]:
    try:
        steps = tuple(at)
    except TypeError:
        raise InvalidArgumentError(f"Every(at={at!r}): give a sequence of steps, like at=(10, 50)") from None
    steps = tuple(_whole(step, 1, "at", "whole steps, at least 1") for step in steps)
    if any(later <= earlier for earlier, later in itertools.pairwise(steps)):
        raise InvalidArgumentError(f"Every(at={steps!r}): give the steps in rising order, each once")
    return steps


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
