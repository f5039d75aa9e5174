"""Keeping a session alive: creating it, and replacing it when a recoverable error came out of it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import cast

from aiohooks._aio.backoff import Backoff
from aiohooks._aio.cancel import shielded
from aiohooks._validate import check_instance
from aiohooks.errors import (
    AbortedError,
    InvalidArgumentError,
    SessionClosedError,
    StoreRefusedError,
    UnavailableError,
    is_clean_end,
)
from aiohooks.graph.session import Session
from aiohooks.session._hooks import HookSet, after_create_session
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.creators import SessionCreator, restore_hooks
from aiohooks.stores.base import StepStore


@dataclasses.dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """Which errors are recovered from, and when to give up.

    Args:
        on: types of errors after which the session is replaced and the run repeated.
        max_attempts: recoveries in a row without a completed run between them.
        backoff: the pauses before them.
        no_progress_limit: how often the same step may fail, also with earlier steps completed between.
    """

    on: tuple[type[BaseException], ...] = (AbortedError, UnavailableError)
    max_attempts: int = dataclasses.field(default=10, kw_only=True)
    backoff: Backoff = dataclasses.field(default=Backoff(), kw_only=True)
    no_progress_limit: int = dataclasses.field(default=3, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("max_attempts", "no_progress_limit"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InvalidArgumentError(f"{name} is {value!r}; give a whole number, 0 for never")
        check_instance(self.backoff, Backoff, "backoff")
        on: object = self.on
        if not isinstance(on, tuple) or not all(isinstance(one, type) and issubclass(one, Exception) for one in on):  # pyright: ignore[reportUnknownVariableType]
            raise InvalidArgumentError(f"on is {on!r}; give a tuple of exception classes (cancellation is never recovered)")

    def recovers(self, error: BaseException) -> bool:
        """Whether a session recovers from `error`; from a group if each is recoverable or a clean end, and one recoverable."""
        if isinstance(error, BaseExceptionGroup):
            group = cast("BaseExceptionGroup[BaseException]", error)
            return all(self.recovers(one) or is_clean_end(one) for one in group.exceptions) and any(
                self.recovers(one) for one in group.exceptions
            )
        return isinstance(error, self.on)


NEVER = RecoveryPolicy((), max_attempts=0)
"""The policy of a session that never recovers."""


class RecoveryHistory:
    """What has failed since the last progress, and whether that is enough."""

    def __init__(self, policy: RecoveryPolicy) -> None:
        """Starts empty."""
        self._policy = policy
        self.total: int = 0
        """Recoveries so far."""
        self._in_a_row: list[str] = []
        self._failed_step: int | None = None
        self._failures_of_step = 0

    def failed(self, error: BaseException, step: int | None) -> str | None:
        """Takes up a failure of the run of `step` (None: of a creation); returns why to give up, or None to go on."""
        where = "creating a session" if step is None else f"the run of step {step}"
        self._in_a_row.append(f"{where}: {error!r}")
        if step is not None:
            if self._failed_step is not None and step <= self._failed_step:
                self._failures_of_step += 1
            else:
                self._failed_step, self._failures_of_step = step, 1
            if self._failures_of_step > self._policy.no_progress_limit:
                limit = self._policy.no_progress_limit
                return f"step {self._failed_step} failed {self._failures_of_step} times (no_progress_limit={limit})"
        if len(self._in_a_row) > self._policy.max_attempts:
            return f"{self._policy.max_attempts} attempts are used up"
        self.total += 1
        return None

    def completed(self, step: int) -> None:
        """Takes up a completed run of `step`."""
        if self._in_a_row:
            self._in_a_row.clear()
        if self._failed_step is not None and step >= self._failed_step:
            self._failed_step = None

    def pause_secs(self) -> float:
        """The pause before the next attempt."""
        return self._policy.backoff.pause_secs(len(self._in_a_row))

    def notes(self, why: str) -> list[str]:
        """The history, for the error that is raised."""
        return [f"recovery gave up: {why}; what failed, oldest first:", *(f"  {line}" for line in self._in_a_row[-20:])]


_logger = logging.getLogger("aiohooks")


class Recoverable:
    """The session of the moment and its coordinator, and how both are replaced.

    The monitored session's own coordinator, `root`, lives through recoveries; `coord` is new with each session.
    """

    def __init__(self, creator: SessionCreator, hooks: HookSet, policy: RecoveryPolicy, grace_secs: float) -> None:
        """Makes one without a session."""
        self.root: Coordinator = Coordinator()
        self.coord: Coordinator = self.root
        self.session: Session | None = None
        self.store: StepStore | None = None
        """The step store of the sessions so far; all have the same."""
        self.given_up: BaseException | None = None
        """What recovery gave up with; nothing works any more then."""
        self.history: RecoveryHistory = RecoveryHistory(policy)
        self.creator: SessionCreator = creator
        self._hooks = hooks
        self._policy = policy
        self._grace_secs = grace_secs

    async def created_session(self) -> Session:
        """The session of the moment; a new one if a recovery was cut off before it had made one."""
        if self.session is None:
            await self._create()
        if self.session is None:
            raise SessionClosedError("the session was closed while it was created")
        return self.session

    async def create(self) -> None:
        """Makes the first session, as often as the policy says.

        Raises:
            BaseException: any error that is not recovered from, and the last one when the attempts are used up.
        """
        try:
            await self._create()
        except BaseException as error:
            # A password or an address that is wrong from the start is no outage; later on it may be one, of a server that moves.
            if isinstance(error, StoreRefusedError) or not self._policy.recovers(error):
                raise
            await self.recover(error, None)

    def root_cause(self, error: BaseException) -> BaseException:
        """What to go by when `error` came out of a run: a background task's failure may be what is behind it."""
        failures = [*self.coord.errors, *self.root.errors]
        if not failures or failures[0] is error or is_clean_end(error):
            return error
        cause = failures[0]
        if isinstance(error, asyncio.CancelledError):
            return cause
        if self._policy.recovers(cause) or self._policy.recovers(error):
            cause.add_note(f"the run failed with it: {error!r}")
            return cause
        error.add_note(f"a background task had failed before: {cause!r}")
        return error

    def recovers(self, error: BaseException) -> bool:
        """Whether `recover` is worth calling; what failed in a task of the whole session cannot be started again."""
        return self._policy.recovers(error) and error not in self.root.errors

    async def recover(self, error: BaseException, step: int | None) -> None:
        """Replaces the session after `error`, which came out of the run of `step` or, if None, of a creation.

        Raises:
            BaseException: the last error, with the history as notes, when the policy gives up; any that is not recovered.
        """
        while True:
            why = self.history.failed(error, step)
            if why is not None:
                self.given_up = error
                for note in self.history.notes(why):
                    error.add_note(note)
                await self.drop()
                raise error
            _logger.warning("recovering from %r", error)
            await self.drop()
            await self._pause(self.history.pause_secs())
            try:
                await self._create()
            except BaseException as again:
                if not self._policy.recovers(again):
                    # After a clean end `end` gets the new session; any other error has left it half announced.
                    if not is_clean_end(again):
                        self.given_up = again
                    raise
                error, step = again, None
            else:
                return

    async def _create(self) -> None:
        session = await self.creator.create_session()
        made: object = session
        if not all(hasattr(made, name) for name in ("run", "aclose", "graph", "global_step")):
            raise InvalidArgumentError(f"{self.creator!r} created {made!r}; a SessionCreator returns a Session")
        if session.graph is not self.creator.graph:
            raise InvalidArgumentError(f"{self.creator!r} created a session of another graph than its own `graph`")
        self.session = session
        self.store = session.global_step
        self.coord = Coordinator(parent=self.root, survives=self._policy.recovers)
        if isinstance(made, Session):
            made.stateful_hooks = self._hooks.stateful
            restore_hooks(made)
        await after_create_session(self._hooks, session, self.coord)

    async def drop(self) -> None:
        """Ends the session's tasks at once and closes it; its errors are only logged, there is another one to report."""
        session, self.session = self.session, None
        if session is not None:
            coord = self.coord
            await shielded(self._drop(session, coord), grace_secs=self._grace_secs, what="closing a session")

    async def _drop(self, session: Session, coord: Coordinator) -> None:
        coord.retire()
        await coord.wind_down(0, self._grace_secs)
        try:
            await session.aclose()
        except Exception as error:
            _logger.warning("closing a session failed", exc_info=error)

    async def _pause(self, secs: float) -> None:
        if secs > 0 and not self.root.should_stop():
            await self.root.wait_for_stop(secs)
