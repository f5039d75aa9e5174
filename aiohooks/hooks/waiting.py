"""Delaying the first run until a global step is reached."""

from __future__ import annotations

from aiohooks._core.validate import check_secs, checked_int
from aiohooks.dispatch.calls import only_if
from aiohooks.graph.session import Session
from aiohooks.hooks._observing import logger
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunHook


class GlobalStepWaiterHook(SessionRunHook):
    """Delays the first run until the global step reaches `wait_until_step`.

    It starts workers one after the other, for example with `wait_until_step=int(K * log(task_id +
    1))` where task 0 is the chief. The hook waits for an event, and does not poll the step. The
    wait also ends when a stop is requested, when a background task fails, and when no publisher (a
    process that advances the step) is left that could reach the step. Once the wait is over, the
    hook never waits again in this session, not even after a recovery.
    """

    def __init__(
        self,
        wait_until_step: int,
        *,
        timeout: float | None = None,
    ) -> None:
        """Create the hook.

        Args:
            wait_until_step: the step to wait for. 0 does not wait.
            timeout: seconds after which the wait fails, None for no limit.

        Raises:
            InvalidArgumentError: `wait_until_step` is not a whole number of 0 or more, or `timeout`
                is not a positive number of seconds.
        """
        wait_until_step = checked_int(wait_until_step, "wait_until_step")
        check_secs(timeout, "timeout", optional=True, positive=True)
        self.wait_until_step = wait_until_step
        self._timeout = timeout
        self._coord: Coordinator | None = None
        self.started_at: int | None = None
        """The step at which the wait ended, or None before."""

    async def begin(self) -> None:
        """Forget the wait of an earlier session, so that the first run of this one waits."""
        self.started_at = None

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Keep the coordinator, whose stop ends the wait."""
        self._coord = coord

    @only_if("_is_first_run")
    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Wait, in the first run.

        Raises:
            StopRequestedError: a stop was requested, which is a clean end.
            PublisherFinishedError: all publishers of the step have finished before it. This is a
                clean end.
            PublisherFailedError: the publisher of the step failed.
            StepTimeoutError: the step was not reached in time.
        """
        # Also here, for a subclass that overrides `before_run`: `only_if` does not apply to it.
        if not self._is_first_run(run_context) or self._coord is None:
            return None
        store = run_context.session.global_step
        step = store.latest.step
        if step < self.wait_until_step:
            logger.info(
                "waiting for global step %d before starting, now at %d",
                self.wait_until_step,
                step,
            )
            step = await self._coord.until(
                store.wait_for(self.wait_until_step, timeout=self._timeout),
            )
        self.started_at = step
        return None

    def _is_first_run(self, run_context: SessionRunContext) -> bool:
        """Return whether the wait is still to come. If not, the session skips `before_run`."""
        return self.started_at is None

    def __repr__(self) -> str:
        return f"GlobalStepWaiterHook({self.wait_until_step})"
