"""Stopping at a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohooks._errors import InvalidArgumentError
from aiohooks._hook import SessionRunContext, SessionRunHook, SessionRunValues

if TYPE_CHECKING:
    from aiohooks._coordinator import Coordinator
    from aiohooks._session import Session


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
