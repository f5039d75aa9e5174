"""Stopping at a time."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from aiohooks._aio.clock import Clock, TimerHandle, current_clock
from aiohooks._validate import check_callable, check_mapping, check_secs
from aiohooks.errors import InvalidArgumentError, StopRequestedError
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues

if TYPE_CHECKING:
    from aiohooks.graph.session import Session
    from aiohooks.session.coordinator import Coordinator


class StopAtStepHook(SessionRunHook):
    """Requests a stop when the global step has been reached; if it is reached at the start already, before the first run.

    With `num_steps` the last step is that many behind the one at which the session is first created; a recovery does not
    move it.
    """

    def __init__(self, *, num_steps: int | None = None, last_step: int | None = None) -> None:
        """Takes one of the two.

        Args:
            num_steps: how many steps to run.
            last_step: the global step after which to stop.

        Raises:
            InvalidArgumentError: neither or both are given, or one is negative or not a whole number.
        """
        if num_steps is None and last_step is None:
            raise InvalidArgumentError("one of num_steps or last_step must be given")
        if num_steps is not None and last_step is not None:
            raise InvalidArgumentError(f"only one of num_steps ({num_steps}) or last_step ({last_step}) can be given")
        value: object = last_step if num_steps is None else num_steps
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidArgumentError(f"{value!r} is not a number of steps; give a whole number, 0 or more")
        self._num_steps = num_steps
        self._given = last_step
        self._last_step: int | None = None

    @property
    def last_step(self) -> int | None:
        """The step after which it stops; with `num_steps` known when the session has been created."""
        return self._last_step if self._given is None else self._given

    async def begin(self) -> None:
        """Forgets the last step of an earlier session."""
        self._last_step = None

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Works out the last step, and stops if it is reached already."""
        step = (await session.global_step.value()).step
        if self._num_steps is not None and self._last_step is None:
            self._last_step = step + self._num_steps
        if self.last_step is not None and step >= self.last_step:
            coord.request_stop(f"step {step} is at or behind the last step, {self.last_step}")

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Stops at the last step; a run that went beyond it stops too."""
        last = self.last_step
        if last is not None and run_context.global_step >= last:
            run_context.request_stop(f"step {run_context.global_step} reached the last step, {last}")

    def __repr__(self) -> str:
        return f"StopAtStepHook(num_steps={self._num_steps}, last_step={self.last_step})"


class StopAtTimeHook(SessionRunHook):
    """Requests a stop when so much time has passed, or at a moment of the calendar.

    No run begins after that moment. The run that goes on at that moment finishes, but a wait inside it (for a step, for
    the next feed) ends at once. Seconds are counted from `begin` by the current clock, and a recovery does not start them
    anew.
    """

    def __init__(
        self,
        *,
        secs: float | None = None,
        deadline: datetime.datetime | float | None = None,
        margin_secs: float = 0.0,
        keep_elapsed: bool = False,
        wall_time: Callable[[], float] = time.time,
        name: str | None = None,
    ) -> None:
        """Takes one of `secs` and `deadline`.

        Args:
            secs: how long to run.
            deadline: the moment to stop at: a datetime that knows its time zone, or seconds since 1970 (Unix time). The
                calendar is asked once, in `begin`; from then on the clock counts the seconds that are left.
            margin_secs: how much earlier to stop, so that the last run and what follows it (a save) end in time.
            keep_elapsed: whether the time of a run that is resumed counts too: `secs` is then for all of its parts.
            wall_time: tells the calendar's time, as `time.time` does.
            name: what its state is called in checkpoints; needed where a session has several of these.

        Raises:
            InvalidArgumentError: neither or both are given, or one cannot be meant.
        """
        if (secs is None) == (deadline is None):
            raise InvalidArgumentError(f"secs is {secs!r} and deadline is {deadline!r}; give one of them")
        check_secs(secs, "secs", optional=True)
        check_secs(margin_secs, "margin_secs")
        check_callable(wall_time, "wall_time")
        if keep_elapsed and secs is None:
            raise InvalidArgumentError("keep_elapsed is for secs=; a deadline stays where it is when a run is resumed")
        self._secs = secs
        self._deadline = None if deadline is None else _unix_time(deadline)
        self._margin_secs = margin_secs
        self._keep_elapsed = keep_elapsed
        self._wall_time = wall_time
        self.name: str = name or ""
        self._reset()

    def _reset(self) -> None:
        self._clock: Clock = current_clock()
        self._began: float | None = None
        self._allowed_secs = 0.0
        self._earlier_secs = 0.0
        self._coord: Coordinator | None = None
        self._timer: TimerHandle | None = None

    @property
    def elapsed_secs(self) -> float:
        """The seconds from `begin` to now, or to the end; with `keep_elapsed` also those of the runs before."""
        return self._earlier_secs + (0.0 if self._began is None else self._clock.now() - self._began)

    @property
    def remaining_secs(self) -> float:
        """The seconds that are left until the stop, the margin taken off; 0.0 when the time is up, and before `begin`."""
        return max(0.0, self._allowed_secs - self.elapsed_secs)

    async def begin(self) -> None:
        """Starts to count."""
        self._reset()
        self._began = self._clock.now()
        total = self._secs if self._deadline is None else self._deadline - self._wall_time()
        self._allowed_secs = (total or 0.0) - self._margin_secs

    def state_dict(self) -> dict[str, Any]:
        """The time that was used."""
        return {"elapsed_secs": self.elapsed_secs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from the time of the run that is resumed, if it is to be kept; nothing is taken back by a recovery.

        Raises:
            InvalidArgumentError: it is not the state of such a hook.
        """
        check_mapping(state, "state", optional=False)
        elapsed = state.get("elapsed_secs")
        check_secs(elapsed, "elapsed_secs in the state of a StopAtTimeHook")
        if self._keep_elapsed and self._coord is None:  # later on, this session's own time is what counts
            self._earlier_secs = float(elapsed or 0.0)

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Sets the timer; stops before the first run if the time is up already."""
        self._coord = coord
        if self._is_over():
            coord.request_stop(self._reason())
        elif self._timer is None:
            self._timer = self._clock.call_later(self.remaining_secs, self._stop)

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Refuses a run that would begin too late, where the event loop was too busy for the timer.

        Raises:
            StopRequestedError: the time is up; a clean end.
        """
        if self._is_over():
            run_context.request_stop(self._reason())
            raise StopRequestedError(self._reason())
        return None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Stops if the time was up in this run."""
        if self._is_over():
            run_context.request_stop(self._reason())

    async def close(self, exc: BaseException | None) -> None:
        """Calls the timer off, and stops counting."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._earlier_secs, self._began = self.elapsed_secs, None

    def _is_over(self) -> bool:
        return self._began is not None and self.elapsed_secs >= self._allowed_secs

    def _stop(self) -> None:
        assert self._coord is not None
        self._coord.request_stop(self._reason())

    def _reason(self) -> str:
        margin = f", less a margin of {self._margin_secs:g} s" if self._margin_secs else ""
        if self._deadline is None:
            return f"the time is up: {self._secs:g} s{margin}"
        try:
            moment = datetime.datetime.fromtimestamp(self._deadline, datetime.UTC).isoformat(" ", "seconds")
        except (OverflowError, ValueError, OSError):  # too far away for a calendar
            moment = f"{self._deadline:g} s since 1970"
        return f"the deadline is reached: {moment}{margin}"

    def __repr__(self) -> str:
        given = f"secs={self._secs}" if self._deadline is None else f"deadline={self._deadline}"
        return f"StopAtTimeHook({given}, margin_secs={self._margin_secs})"


def _unix_time(deadline: object) -> float:
    if isinstance(deadline, datetime.datetime):
        if deadline.utcoffset() is None:
            raise InvalidArgumentError(
                f"deadline is {deadline!r}, which has no time zone; give one: deadline.astimezone(), or tzinfo=timezone.utc"
            )
        return deadline.timestamp()
    if isinstance(deadline, bool) or not isinstance(deadline, (int, float)) or not math.isfinite(deadline):
        raise InvalidArgumentError(f"deadline is {deadline!r}; give a datetime with a time zone, or seconds since 1970")
    return float(deadline)
