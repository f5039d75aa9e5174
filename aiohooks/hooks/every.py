"""When a hook is due: every so many steps or seconds, or at given steps.

every   the schedule, which is the same for all sessions
timer   the schedule in one session: it counts steps and seconds from when the hook was last marked
due     the schedule has been reached since then
mark    note that the hook has done its work, and count from here
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from aiohooks._core.clock import now_function
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
        # The instance is frozen, so that its own `__setattr__` raises.
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
                "Every() is never due: give steps=, secs= or at=, or several of them"
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
        # Reads the session's clock. The first `start` sets it.
        self._now: Callable[[], float]
        # The step and the time of the last mark, or of the start.
        self._last_step: int | None = None
        self._last_time = 0.0

    @property
    def last_step(self) -> int | None:
        """The step from which the timer counts, or None before `start`."""
        return self._last_step

    def start(self, step: int) -> None:
        """Count from this step and from now."""
        if self._last_step is None:
            self._now = now_function()
        self._last_step = step
        self._last_time = self._now()

    def resume(self, step: int) -> None:
        """Start, or continue after a recovery, which may have moved the global step back to
        `step`.
        """
        if self._last_step is None:
            self.start(step)
        else:
            # Steps that are lost are run again, so they must not count as done.
            self._last_step = min(step, self._last_step)

    def due(self, step: int) -> bool:
        """Return whether the hook is due at this step and now, and change nothing."""
        last = self._checked_last_step()
        every = self.every
        # A multiple of `every.steps` lies after the last step, and not after this one.
        if every.steps is not None and step // every.steps > last // every.steps:
            return True
        if every.secs is not None and self._now() - self._last_time >= every.secs:
            return True
        # More of the given steps are reached now than at the last step.
        return bisect_right(every.at, step) > bisect_right(every.at, last)

    def mark(self, step: int) -> tuple[float, int]:
        """Record that the hook has done its work at this step and now, and count from here.

        Returns:
            The seconds and the steps since the last time, or since the start.
        """
        steps = step - self._checked_last_step()
        last_time = self._last_time
        self.start(step)
        return self._last_time - last_time, steps

    def _checked_last_step(self) -> int:
        """Return the step from which the timer counts.

        Raises:
            NotReadyError: the timer was not started.
        """
        if self._last_step is None:
            raise NotReadyError(f"{self!r}: call start(step) first, which says where to count from")
        return self._last_step

    def state_dict(self) -> dict[str, Any]:
        """Return the step from which the timer counts, and the seconds since then.

        The state of a timer that was not started is empty.
        """
        if self._last_step is None:
            return {}
        return {"step": self._last_step, "secs": self._now() - self._last_time}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this state. In a recovery, ignore it, because the timer counts already."""
        if state and self._last_step is None:
            self.start(int(state["step"]))
            # As if the timer had been marked so many seconds ago.
            self._last_time -= float(state["secs"])

    def __repr__(self) -> str:
        state = "not started"
        if self._last_step is not None:
            state = f"last at step {self._last_step}"
        return f"<EveryTimer of {self.every}, {state}>"


class ScheduledHook(SessionRunHook):
    """Base of hooks that keep nothing of an earlier session, and whose state in checkpoints is when
    they were last due.

    A subclass sets `_timer` in `_reset`.
    """

    # Other stateful hooks of one class need different names, by which a checkpoint keeps their
    # states. Scheduled hooks are numbered instead: if the program changes their order, a hook only
    # gets the time of another one, which does no harm.
    _numbered_state: ClassVar[bool] = True
    # An `EveryTimer` or a `Sampling`, or None for a hook that is never due. The type is `Any`,
    # because type checkers reject a union that each subclass narrows to the type that it uses.
    _timer: Any

    def _reset(self) -> None:
        """Set the attributes of a new session."""

    async def begin(self) -> None:
        """Reset the state of an earlier session."""
        self._reset()

    def state_dict(self) -> dict[str, Any]:
        """Return when the hook was last due."""
        return {} if self._timer is None else dict(self._timer.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this state, so that the hook is due when an uninterrupted run would be."""
        if self._timer is not None:
            self._timer.load_state_dict(state)


def _checked_steps(at: Sequence[int]) -> tuple[int, ...]:
    """Return the steps of `at`, in order and each once.

    Raises:
        InvalidArgumentError: `at` is not a sequence of whole steps of at least 1.
    """
    try:
        steps = tuple(at)
    except TypeError:
        raise InvalidArgumentError(
            f"at of Every is {at!r}; give a sequence of steps, like at=(10, 50)"
        ) from None
    checked = {
        checked_int(step, "a step in at of Every", 1, expected="whole steps, at least 1")
        for step in steps
    }
    return tuple(sorted(checked))
