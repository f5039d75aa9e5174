"""A gate for a session's own step: it may be a few versions ahead of the published one, then it waits."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from aiohooks._aio.clock import Clock, current_clock
from aiohooks._validate import check_instance, check_secs
from aiohooks.errors import InvalidArgumentError, StepResetError
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues
from aiohooks.stores import Position, StepStore
from aiohooks.stores._protocol import checked_step

if TYPE_CHECKING:
    from aiohooks.graph.session import Session
    from aiohooks.session.coordinator import Coordinator

_logger = logging.getLogger("aiohooks.hooks")


class VersionGateHook(SessionRunHook):
    """Let a run begin only while the session's step is at most `max_lag` versions ahead of the published one.

    For a session that ships one item a step to a trainer that makes a version of each: run n (counted from 0) waits until
    version n - max_lag is published. The wait also ends with a stop, when a background task fails, and when no publisher is left.

    Step and version are taken as they are at the first run. When the versions get ahead of the step, because it went back in a
    recovery or began anew, or when they are reset, the two count as equal from then on. So neither lets runs get further ahead.
    Sessions that share one step each count the steps of all.
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
        self._offset = 0  # added to the step to compare it with the versions
        self._seen: Position | None = None
        self._began: Position | None = None
        self.ahead: int | None = None
        """How many versions ahead the current or last run began; None before the first."""
        self.lag: int | None = None
        """How many versions were published during the last run; None before the first, and if they were reset in it."""
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
                f"{self!r}: this is the session's own step, never ahead of itself; give the store of the publisher"
            )
        self._coord = coord

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Wait while the run would be too far ahead.

        Raises:
            StopRequestedError: a stop was requested; a clean end.
            PublisherFinishedError: no publisher is left, the last one finished; a clean end.
            PublisherFailedError: no publisher is left, the last one failed.
            StepTimeoutError: the version was not published in time.
        """
        done = run_context.global_step - 1
        wanted = self._wanted_version(done)
        if self.versions.latest.step < wanted:
            _logger.info("step %d waits for version %d, now at %d", done + 1, wanted, self.versions.latest.step)
            began = self._clock.now()
            self.waits += 1
            try:
                await self._wait_published(done, began)
            finally:
                self.waited_secs += self._clock.now() - began
        self._began = self.versions.latest
        self.ahead = done + self._offset - self._began.step
        return None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Count the versions that were published during the run."""
        if self._began is not None:
            latest = self.versions.latest
            self.lag = latest.step - self._began.step if latest.epoch == self._began.epoch else None

    async def _wait_published(self, done: int, began: float) -> None:
        """Wait for the version that run `done` needs, also when a reset makes it another one."""
        while self.versions.latest.step < (wanted := self._wanted_version(done)):
            secs = None if self._timeout is None else max(0.0, began + self._timeout - self._clock.now())
            wait = self.versions.wait_for(wanted, timeout=secs, on_reset="raise")
            try:
                await (wait if self._coord is None else self._coord.until(wait))
            except StepResetError as reset:
                _logger.info("%s: the step counts as equal to the version from now on", reset)

    def _wanted_version(self, done: int) -> int:
        """Return the version that run `done` needs, by the current step and version."""
        latest = self.versions.latest
        behind = latest.step - done
        if self._seen is not None and latest.epoch != self._seen.epoch:
            self._offset = behind
        self._offset = max(self._offset, behind)
        self._seen = latest
        return done + self._offset - self.max_lag

    def __repr__(self) -> str:
        return f"VersionGateHook({self.versions.run!r} at version {self.versions.latest.step}, max_lag={self.max_lag})"
