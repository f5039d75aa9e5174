"""Keeping a loop near what is published: its step may be a few versions ahead, and then it waits."""

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
    """Lets a run begin only while the session's step is at most `max_lag` versions ahead of what is published.

    It is for the session that ships work, one item a step, to somebody else who makes a version of each: run n (counted from
    0) waits until version n - max_lag is published. The wait is an awaited event. It ends as well when a stop is asked for,
    when a background task fails, and when nobody is left who could publish that version.

    Both clocks are trusted as they stand at the first run. After that the gate never opens wide: where the versions come to
    be ahead of the step, because it went back in a recovery or was begun anew, or where they are reset, the two are taken to
    be equal from there on. Sessions that share one step each count the steps of all.
    """

    def __init__(self, versions: StepStore, *, max_lag: int, timeout: float | None = None) -> None:
        """Takes the versions and the bound.

        Args:
            versions: where the published versions are counted; not the session's own step.
            max_lag: how many versions ahead a run may begin.
            timeout: seconds after which a wait gives up, None for no limit.

        Raises:
            InvalidArgumentError: a value that cannot be meant.
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
        self._shift = 0  # what is added to the step, to compare it with the versions
        self._seen: Position | None = None
        self._began: Position | None = None
        self.ahead: int | None = None
        """How many versions ahead the run of the moment, or the last one, began; None before the first."""
        self.lag: int | None = None
        """How many versions were published during the last run; None before that, and if they were reset in it."""
        self.waits: int = 0
        """How many runs had to wait so far."""
        self.waited_secs: float = 0.0
        """The sum of those waits that are over."""

    async def begin(self) -> None:
        """Forgets an earlier session."""
        self._reset()

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Keeps the coordinator, whose stop ends the waits.

        Raises:
            InvalidArgumentError: the versions are the session's own step, which is never ahead of itself.
        """
        if session.global_step is self.versions:
            raise InvalidArgumentError(f"{self!r}: these are the session's own steps; give the store of who publishes")
        self._coord = coord

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Waits while the run would be too far ahead.

        Raises:
            StopRequestedError: a stop came first; a clean end. `PublisherFinishedError` if the publishers have finished.
            PublisherFailedError: who should have published the version failed.
            StepTimeoutError: it was not published in time.
        """
        done = run_context.global_step - 1
        wanted = self._wanted(done)
        if self.versions.latest.step < wanted:
            _logger.info("step %d waits for version %d, now at %d", done + 1, wanted, self.versions.latest.step)
            began = self._clock.now()
            self.waits += 1
            try:
                await self._published(done, began)
            finally:
                self.waited_secs += self._clock.now() - began
        self._began = self.versions.latest
        self.ahead = done + self._shift - self._began.step
        return None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Counts the versions that were published meanwhile."""
        if self._began is not None:
            latest = self.versions.latest
            self.lag = latest.step - self._began.step if latest.epoch == self._began.epoch else None

    async def _published(self, done: int, began: float) -> None:
        """Waits for the version that run `done` needs, also when a reset makes it another one."""
        while self.versions.latest.step < (wanted := self._wanted(done)):
            secs = None if self._timeout is None else max(0.0, began + self._timeout - self._clock.now())
            wait = self.versions.wait_for(wanted, timeout=secs, on_reset="raise")
            try:
                await (wait if self._coord is None else self._coord.until(wait))
            except StepResetError as reset:
                _logger.info("%s: the step counts as equal to the version from here on", reset)

    def _wanted(self, done: int) -> int:
        """The version that run `done` needs, after a look at where both clocks are."""
        latest = self.versions.latest
        behind = latest.step - done
        if self._seen is not None and latest.epoch != self._seen.epoch:
            self._shift = behind
        self._shift = max(self._shift, behind)
        self._seen = latest
        return done + self._shift - self.max_lag

    def __repr__(self) -> str:
        return f"VersionGateHook({self.versions.run!r} at version {self.versions.latest.step}, max_lag={self.max_lag})"
