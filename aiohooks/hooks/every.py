"""When a hook is due: every so many steps or seconds, or at given steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from aiohooks._core.clock import quick_now
from aiohooks._core.validate import check_secs, checked_int
from aiohooks.errors import InvalidArgumentError, NotReadyError
from aiohooks.session.hook import SessionRunHook


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """When a hook is due: after a number of steps or seconds, or at given steps, whichever comes
    first.

    A step that jumps past a boundary, or several, still counts, once.

    Attributes:
        steps: due when a multiple of this is reached or passed.
        secs: due when this many seconds have passed since the last time.
        at: due when one of these steps is reached or passed, each 1 or more.
    """

    steps: int | None = None
    secs: float | None = None
    at: Sequence[int] = ()

    def __post_init__(self) -> None:
        # The instance is frozen.
        set_field = object.__setattr__
        if self.steps is not None:
            steps = checked_int(
                self.steps,
                "steps of Every",
                1,
                expected="a whole number of steps, at least 1",
            )
            set_field(self, "steps", steps)
        if self.secs is not None:
            check_secs(self.secs, "secs of Every", positive=True)
        set_field(self, "at", _checked_steps(self.at))
        if self.steps is None and self.secs is None and not self.at:
            raise InvalidArgumentError(
                "Every() is never due: give steps=, secs= or at=, or several of them",
            )

    def timer(self) -> EveryTimer:
        """Return a new timer for this schedule. Each hook that uses the schedule needs its own."""
        return EveryTimer(self)


class EveryTimer:
    """Keeps track of when an `Every` was last due, for your own hooks. `Every.timer` creates it.

    Create a timer in `begin`, call `resume` in `after_create_session`, and in `after_run`, if it is
    `due`, do the work and `mark` it. The time is that of the session's clock. If your hook passes
    on the timer's `state_dict` and `load_state_dict`, a resumed run is due at the same steps as an
    uninterrupted run.
    """

    __slots__ = ("_last_step", "_last_time", "_now", "every")

    def __init__(self, every: Every) -> None:
        self.every: Every = every
        # The session's clock, set by the first `start`.
        self._now: Callable[[], float]
        self._last_step: int | None = None
        self._last_time = 0.0

    @property
    def last_step(self) -> int | None:
        """The step from which it counts, or None before `start`."""
        return self._last_step

    def start(self, step: int) -> None:
        """Count from this step and from now."""
        if self._last_step is None:
            self._now = quick_now()
        self._last_step = step
        self._last_time = self._now()

    def resume(self, step: int) -> None:
        """Start, or continue after a recovery, which may have moved the global step back to
        `step`.
        """
        if self._last_step is None:
            self.start(step)
        else:
            self._last_step = min(step, self._last_step)

    def due(self, step: int) -> bool:
        """Return whether it is due at this step and now, and change nothing."""
        last = self._checked_last_step()
        every = self.every
        if every.steps is not None and step // every.steps > last // every.steps:
            return True
        if every.secs is not None and self._now() - self._last_time >= every.secs:
            return True
        return bisect_right(every.at, step) > bisect_right(every.at, last)

    def mark(self, step: int) -> tuple[float, int]:
        """Record that it was done at this step and now.

        Returns:
            The seconds and the steps since the last time, or since the start.
        """
        steps = step - self._checked_last_step()
        last_time = self._last_time
        self.start(step)
        return self._last_time - last_time, steps

    def _checked_last_step(self) -> int:
        """Return the step from which it counts. Raise if it was not started."""
        if self._last_step is None:
            raise NotReadyError(f"{self!r}: call start(step) first, which says where to count from")
        return self._last_step

    def state_dict(self) -> dict[str, Any]:
        """Return the step from which it counts, and the seconds since then."""
        if self._last_step is None:
            return {}
        return {"step": self._last_step, "secs": self._now() - self._last_time}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this state, except in a recovery, where it counts already."""
        if state and self._last_step is None:
            self.start(int(state["step"]))
            self._last_time -= float(state["secs"])

    def __repr__(self) -> str:
        state = "not started"
        if self._last_step is not None:
            state = f"last at step {self._last_step}"
        return f"<EveryTimer of {self.every}, {state}>"


class ScheduledHook(SessionRunHook):
    """Base of hooks that keep nothing of an earlier session, and whose state in checkpoints is when
    they were last due.
    """

    # Checkpoints number several hooks of a class, instead of requiring names: a state that is only
    # a time is harmless to another hook of the class.
    _numbered_state: ClassVar[bool] = True
    # An `EveryTimer` or a `Sampling`, or None for a hook that is never due.
    _timer: Any

    def _reset(self) -> None:
        """Set the attributes of a new session."""

    async def begin(self) -> None:
        """Reset the state of an earlier session."""
        self._reset()

    def state_dict(self) -> dict[str, Any]:
        """Return when it was last due."""
        return {} if self._timer is None else dict(self._timer.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Be due when an uninterrupted run would be."""
        if self._timer is not None:
            self._timer.load_state_dict(state)


def _checked_steps(at: Sequence[int]) -> tuple[int, ...]:
    """Return the steps of `at` in order."""
    try:
        steps = tuple(at)
    except TypeError:
        raise InvalidArgumentError(
            f"at of Every is {at!r}; give a sequence of steps, like at=(10, 50)",
        ) from None
    checked = {
        checked_int(step, "a step in at of Every", 1, expected="whole steps, at least 1")
        for step in steps
    }
    return tuple(sorted(checked))
