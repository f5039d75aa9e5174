"""Starting late: waiting until others have brought the global step so far."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from aiohooks._validate import check_secs
from aiohooks.errors import InvalidArgumentError
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunHook

if TYPE_CHECKING:
    from aiohooks.graph.session import Session
    from aiohooks.session.coordinator import Coordinator

_logger = logging.getLogger("aiohooks.hooks")


class GlobalStepWaiterHook(SessionRunHook):
    """Delays the first run until the global step reaches `wait_until_step`.

    It starts workers one after the other, for example with `wait_until_step=int(K * log(task_id + 1))` where task 0 is the
    chief. The wait is an awaited event; it ends as well when a stop is asked for, when a background task fails, and when
    nobody is left who could bring the step so far. Once released it never waits again, also after a recovery.
    """

    def __init__(self, wait_until_step: int, *, timeout: float | None = None) -> None:
        """Takes the step.

        Args:
            wait_until_step: the step to wait for; 0 does not wait.
            timeout: seconds after which the wait gives up, None for no limit.

        Raises:
            InvalidArgumentError: a negative step or timeout, or something that is not a number.
        """
        step: object = wait_until_step
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise InvalidArgumentError(f"wait_until_step is {step!r}; give a whole number, 0 for no wait")
        check_secs(timeout, "timeout", optional=True, positive=True)
        self.wait_until_step = wait_until_step
        self._timeout = timeout
        self._coord: Coordinator | None = None
        self.started_at: int | None = None
        """The step that was seen when the wait was over; None before."""

    async def begin(self) -> None:
        """Forgets that it was released in an earlier session."""
        self.started_at = None

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Keeps the coordinator, whose stop ends the wait."""
        self._coord = coord

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Waits, in the first run.

        Raises:
            StopRequestedError: a stop came first; a clean end. `PublisherFinishedError` if everybody else has finished.
            PublisherFailedError: who should have brought the step so far failed.
            StepTimeoutError: the step was not reached in time.
        """
        if self.started_at is not None or self._coord is None:
            return None
        store = run_context.session.global_step
        seen = store.latest.step
        if seen < self.wait_until_step:
            _logger.info("waiting for global step %d before starting, now at %d", self.wait_until_step, seen)
            seen = await self._coord.until(store.wait_for(self.wait_until_step, timeout=self._timeout))
        self.started_at = seen
        return None

    def __repr__(self) -> str:
        return f"GlobalStepWaiterHook({self.wait_until_step})"
