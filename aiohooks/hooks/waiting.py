"""Delaying runs: the first until a global step is reached, each until its version is published."""

from __future__ import annotations

from aiohooks._core.validate import check_secs, checked_int
from aiohooks.dispatch.calls import only_if
from aiohooks.errors import InvalidArgumentError
from aiohooks.graph.session import Session
from aiohooks.hooks._observing import logger
from aiohooks.hooks.every import ResettingHook
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from aiohooks.stores import StepStore
from aiohooks.version_gate import Ticket, VersionGate


class GlobalStepWaiterHook(SessionRunHook):
    """Delays the first run until the global step reaches `wait_until_step`.

    It starts workers one after the other, for example with `wait_until_step=int(K * log(task_id +
    1))` where task 0 is the chief. The wait is an awaited event. It also ends when a stop is
    requested, when a background task fails, and when no publisher is left that could reach the
    step. Once the wait is over it never waits again, not even after a recovery.
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
            InvalidArgumentError: not a step, 0 or more, or not a timeout.
        """
        wait_until_step = checked_int(
            wait_until_step,
            "wait_until_step",
            expected="a whole number, 0 for no wait",
        )
        check_secs(timeout, "timeout", optional=True, positive=True)
        self.wait_until_step = wait_until_step
        self._timeout = timeout
        self._coord: Coordinator | None = None
        self.started_at: int | None = None
        """The step at which the wait ended, or None before."""

    async def begin(self) -> None:
        """Wait again in a new session."""
        self.started_at = None

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Keep the coordinator, whose stop ends the wait."""
        self._coord = coord

    @only_if("_is_first_run")
    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Wait, in the first run.

        Raises:
            StopRequestedError: a stop was requested, which is a clean end.
            PublisherFinishedError: no publisher is left, as all have finished. This is a clean end.
            PublisherFailedError: the publisher of the step failed.
            StepTimeoutError: the step was not reached in time.
        """
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
        return self.started_at is None

    def __repr__(self) -> str:
        return f"GlobalStepWaiterHook({self.wait_until_step})"


class VersionGateHook(ResettingHook):
    """Lets a run begin only while the session is at most `max_lag` versions ahead of the published
    one.

    For a session that ships one item a step to a trainer that makes a version of each: the runs
    have a `VersionGate`, in which a run that is committed has shipped its item. A run that is
    repeated counts once. The wait also ends with a stop, when a background task fails, and when no
    publisher is left.

    At the start, as many items are not used yet as the step is ahead of the version. A reset of the
    versions frees all places.

    If a trainer makes each version of the items of several sessions, share a `VersionGate` among
    them instead: the places of a session that ends are free for the others.
    """

    def __init__(
        self,
        versions: StepStore,
        *,
        max_lag: int,
        timeout: float | None = None,
    ) -> None:
        """Set the bound.

        Args:
            versions: counts the published versions, not the session's own step.
            max_lag: how many versions ahead a run may begin.
            timeout: the time limit of a wait in seconds, None for no limit.
        """
        check_secs(timeout, "timeout", optional=True, positive=True)
        self.versions: StepStore = versions
        self.max_lag: int = max_lag
        self._timeout = timeout
        self._reset()

    def _reset(self) -> None:
        self.gate: VersionGate = VersionGate(self.versions, max_lag=self.max_lag)
        """The gate of this session. Its `statistics` count the waits."""
        self._coord: Coordinator | None = None
        # The ticket of the run that is not committed yet.
        self._ticket: Ticket | None = None
        self.ahead: int | None = None
        """How many versions ahead the current or last run began, or None before the first."""
        self.lag: int | None = None
        """How many versions were published during the last run, None before the first, and if they
        were reset in it.
        """

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Keep the coordinator, whose stop ends the waits. Count the items that are not used yet.

        Raises:
            InvalidArgumentError: the versions are the session's own step.
        """
        if session.global_step is self.versions:
            raise InvalidArgumentError(
                f"{self!r}: this is the session's own step, never ahead of itself; give the store"
                " of the publisher",
            )
        is_first = self._coord is None
        self._coord = coord
        if is_first:
            unused = session.global_step.latest.step - self.versions.latest.step
            for _ in range(min(unused, self.max_lag + 1)):
                self._lacks_ticket()
                self._ship()

    @only_if("_lacks_ticket")
    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Wait while the run would be too far ahead.

        Raises:
            StopRequestedError: a stop was requested, which is a clean end.
            PublisherFinishedError: no publisher is left, as all have finished. This is a clean end.
            PublisherFailedError: no publisher is left, the last one failed.
            StepTimeoutError: there was no room in time.
        """
        if self._lacks_ticket():
            until = None if self._coord is None else self._coord.until
            async with self.gate.admit(timeout=self._timeout, until=until) as ticket:
                self._keep_ticket(ticket.hand_off())
        return None

    def _lacks_ticket(self, run_context: SessionRunContext | None = None) -> bool:
        """Return whether a run has to wait for a ticket. If not, it has one."""
        if self._ticket is None:
            ticket = self.gate.admit_nowait()
            if ticket is not None:
                self._keep_ticket(ticket)
        return self._ticket is None

    def _keep_ticket(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self.ahead = ticket.step - ticket.version

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Ship the item of the run, and count the versions that were published meanwhile."""
        self._ship()

    def _ship(self) -> None:
        ticket = self._ticket
        self._ticket = None
        if ticket is not None:
            ticket.ship()
            self.lag = None
            if ticket.state != "invalidated":
                self.lag = ticket.lag

    async def close(self, exc: BaseException | None) -> None:
        """Free the place of a run that was not committed."""
        if self._ticket is not None:
            self._ticket.drop()
            self._ticket = None

    def __repr__(self) -> str:
        return (
            f"VersionGateHook({self.versions.run!r} at version {self.versions.latest.step},"
            f" max_lag={self.max_lag})"
        )
