"""A gate for a session's own step: it may be a few versions ahead of the published one, then it
waits.
"""

from __future__ import annotations

from aiohooks._core.clock import Clock, current_clock
from aiohooks._core.validate import check_instance, check_secs
from aiohooks.dispatch.calls import only_if
from aiohooks.errors import InvalidArgumentError, StepResetError
from aiohooks.graph.session import Session
from aiohooks.hooks._observing import logger
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from aiohooks.stores import Position, StepStore
from aiohooks.stores._protocol import checked_step


class VersionGateHook(SessionRunHook):
    """Let a run begin only while the session's step is at most `max_lag` versions ahead of the
    published one.

    For a session that ships one item a step to a trainer that makes a version of each: run n
    (counted from 0) waits until version n - max_lag is published. The wait also ends with a stop,
    when a background task fails, and when no publisher is left.

    Step and version are taken as they are at the first run. When the versions get ahead of the
    step, because it went back in a recovery or began anew, or when they are reset, the two count as
    equal from then on. So neither lets runs get further ahead. Sessions that share one step each
    count the steps of all.

    If a trainer makes each version of the items of several sessions, share a `VersionGate` among
    them instead: the places of a session that ends are free for the others.
    """

    def __init__(self, versions: StepStore, *, max_lag: int, timeout: float | None = None) -> None:
        """Set the bound.

        Args:
            versions: counts the published versions; not the session's own step.
            max_lag: how many versions ahead a run may begin.
            timeout: the time limit of a wait in seconds, None for no limit.
        """
        check_instance(versions, StepStore, "versions")
        check_secs(timeout, "timeout", optional=True, positive=True)
        self.versions: StepStore = versions
        self.max_lag: int = checked_step(max_lag, "max_lag")
        self._timeout = timeout
        self._reset()

    def _reset(self) -> None:
        self._clock: Clock = current_clock()
        self._coord: Coordinator | None = None
        # Added to the step to compare it with the versions.
        self._offset = 0
        # The versions at the last comparison, and when the last run began.
        self._seen: Position | None = None
        self._began: Position | None = None
        self.ahead: int | None = None
        """How many versions ahead the current or last run began; None before the first."""
        self.lag: int | None = None
        """How many versions were published during the last run; None before the first, and if they
        were reset in it.
        """
        self.waits: int = 0
        """How many runs have had to wait so far."""
        self.waited_secs: float = 0.0
        """The sum of those waits that are over."""

    async def begin(self) -> None:
        """Forget an earlier session."""
        self._reset()

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Keep the coordinator, whose stop ends the waits.

        Raises:
            InvalidArgumentError: the versions are the session's own step.
        """
        if session.global_step is self.versions:
            raise InvalidArgumentError(
                f"{self!r}: this is the session's own step, never ahead of itself; give the store"
                " of the publisher"
            )
        self._coord = coord

    @only_if("_is_too_far_ahead")
    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Wait while the run would be too far ahead.

        Raises:
            StopRequestedError: a stop was requested; a clean end.
            PublisherFinishedError: no publisher is left, the last one finished; a clean end.
            PublisherFailedError: no publisher is left, the last one failed.
            StepTimeoutError: the version was not published in time.
        """
        if self._is_too_far_ahead(run_context):
            began = self._clock.now()
            self.waits += 1
            try:
                await self._wait_published(run_context.global_step, began)
            finally:
                self.waited_secs += self._clock.now() - began
        return None

    def _is_too_far_ahead(self, run_context: SessionRunContext) -> bool:
        """Return whether the run has to wait for a version; if not, note that it begins."""
        step = run_context.global_step
        if self.versions.latest.step < self._wanted_version(step):
            return True
        self._note_begin(step)
        return False

    def _wanted_version(self, step: int) -> int:
        """Return the version that the run of a step needs, by the current step and version."""
        runs_before = step - 1
        latest = self.versions.latest
        behind = latest.step - runs_before
        was_reset = self._seen is not None and latest.epoch != self._seen.epoch
        if was_reset or behind > self._offset:
            self._offset = behind
        self._seen = latest
        return runs_before + self._offset - self.max_lag

    def _note_begin(self, step: int) -> None:
        self._began = self.versions.latest
        self.ahead = step - 1 + self._offset - self._began.step

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Count the versions that were published during the run."""
        latest = self.versions.latest
        if self._began is not None:
            self.lag = None
            if latest.epoch == self._began.epoch:
                self.lag = latest.step - self._began.step

    async def _wait_published(self, step: int, began: float) -> None:
        """Wait for the version that a run needs, also when a reset makes it another one."""
        while True:
            wanted = self._wanted_version(step)
            latest = self.versions.latest
            if latest.step >= wanted:
                break
            logger.info("step %d waits for version %d, now at %d", step, wanted, latest.step)
            secs = None
            if self._timeout is not None:
                secs = max(0.0, began + self._timeout - self._clock.now())
            try:
                await self._wait_for_version(wanted, latest.epoch, secs)
            except StepResetError as reset:
                logger.info("%s: the step counts as equal to the version from now on", reset)
        self._note_begin(step)

    async def _wait_for_version(self, wanted: int, epoch: int, secs: float | None) -> None:
        """Wait for a version of this epoch; do not wait after a reset."""

        async def wait() -> None:
            # A task may begin later than it was made.
            if self.versions.latest.epoch == epoch:
                await self.versions.wait_for(wanted, timeout=secs, on_reset="raise")

        if self._coord is None:
            await wait()
        else:
            await self._coord.until(wait())

    def __repr__(self) -> str:
        return (
            f"VersionGateHook({self.versions.run!r} at version {self.versions.latest.step},"
            f" max_lag={self.max_lag})"
        )
