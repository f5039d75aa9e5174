"""Recovery: which errors are recovered from, when to give up, and the supervisor that replaces the raw session."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import weakref
from typing import TYPE_CHECKING, Any, Literal, cast

from aiohooks._aio.backoff import Backoff
from aiohooks._aio.cancel import shielded
from aiohooks._aio.observers import observing
from aiohooks._aio.opening import opening_until
from aiohooks._aio.overlap import Wait
from aiohooks._validate import check_choice, check_instance, check_int
from aiohooks.errors import (
    AbortedError,
    InvalidArgumentError,
    SessionClosedError,
    StopRequestedError,
    StoreRefusedError,
    UnavailableError,
    add_note,
    is_clean_end,
    notes_of,
    raise_unchanged,
    safe_repr,
)
from aiohooks.graph.session import GatheredRun, Session, gathered_run
from aiohooks.session._hooks import HookSet
from aiohooks.session.coordinator import Coordinator, end_tasks
from aiohooks.session.creators import SessionCreator, restore_hooks
from aiohooks.stores._protocol import Position
from aiohooks.stores.base import StepStore

if TYPE_CHECKING:
    from aiohooks._aio.overlap import RunWaits
    from aiohooks.checkpoint.stateful import Stateful
    from aiohooks.session._run_lock import RunLock
    from aiohooks.session.feeds import FeedsAhead
    from aiohooks.session.steps import Loop

_logger = logging.getLogger("aiohooks")
_CREATING = "creating a session"


@dataclasses.dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """Which errors a session recovers from, and when it gives up.

    Args:
        on: types of errors after which the session is replaced and the run repeated.
        max_attempts: recoveries in a row without a completed run between them.
        backoff: the pauses before them.
        no_progress_limit: how often the same step may fail, also with earlier steps completed between.
        after_commit: what to do after the recovery if the run had been committed, because `after_run` of a hook failed or a
            background task did meanwhile. "repeat", the default: the run is repeated and counts as another step, as in
            TensorFlow. "return": `run` returns the values, so that no step and no feed counts twice; unless the new session
            was restored from before the commit. `run_step_fn` repeats its function in either case.
    """

    on: tuple[type[BaseException], ...] = (AbortedError, UnavailableError)
    max_attempts: int = dataclasses.field(default=10, kw_only=True)
    backoff: Backoff = dataclasses.field(default=Backoff(), kw_only=True)
    no_progress_limit: int = dataclasses.field(default=3, kw_only=True)
    after_commit: Literal["repeat", "return"] = dataclasses.field(default="repeat", kw_only=True)

    def __post_init__(self) -> None:
        for name in ("max_attempts", "no_progress_limit"):
            check_int(getattr(self, name), name, expected="a whole number, 0 for never")
        check_instance(self.backoff, Backoff, "backoff")
        check_choice(self.after_commit, "after_commit", "repeat", "return")
        on: object = self.on
        if not isinstance(on, tuple) or not all(isinstance(one, type) and issubclass(one, Exception) for one in on):  # pyright: ignore[reportUnknownVariableType]
            raise InvalidArgumentError(f"on is {on!r}; give a tuple of exception classes (cancellation is never recovered)")

    def recovers(self, error: BaseException) -> bool:
        """Return whether a session recovers from `error`.

        A group is recovered from if each member is recoverable or a clean end, and at least one is recoverable.
        """
        if isinstance(error, BaseExceptionGroup):
            group = cast("BaseExceptionGroup[BaseException]", error)
            return all(self.recovers(one) or is_clean_end(one) for one in group.exceptions) and any(
                self.recovers(one) for one in group.exceptions
            )
        return isinstance(error, self.on)


NEVER = RecoveryPolicy((), max_attempts=0)
"""The policy of a session that never recovers."""


@dataclasses.dataclass(frozen=True, slots=True)
class CommittedRun:
    """A run that failed after it had been committed."""

    result: Any
    """What `run` would have returned."""
    position: Position
    """The step that it committed, in its epoch."""


class RecoveryHistory:
    """The failures since the last progress, and whether to give up."""

    def __init__(self, policy: RecoveryPolicy) -> None:
        self._policy = policy
        self.total: int = 0
        """Recoveries so far."""
        self._in_a_row: list[str] = []
        self._failed_steps: list[int] = []
        """The steps whose runs failed, since the first of them, or a later one, was completed."""

    def failed(self, error: BaseException, step: int | None) -> str | None:
        """Record a failure of the run of `step` (None: of a creation); return why to give up, or None to continue."""
        where = "creating a session" if step is None else f"the run of step {step}"
        self._in_a_row.append(f"{where}: {safe_repr(error)}")
        if step is not None:
            failed = self._failed_steps
            if failed and step > failed[0]:
                failed.clear()
            failed.append(step)
            if len(failed) > (limit := self._policy.no_progress_limit):
                return f"step {failed[0]} failed {len(failed)} times (no_progress_limit={limit})"
        if len(self._in_a_row) > self._policy.max_attempts:
            return f"{self._policy.max_attempts} attempts are used up"
        self.total += 1
        return None

    def completed(self, step: int) -> None:
        """Record a completed run of `step`."""
        if self._in_a_row:
            self._in_a_row.clear()
        if self._failed_steps and step >= self._failed_steps[0]:
            self._failed_steps.clear()

    def pause_secs(self) -> float:
        """Return the pause before the next attempt."""
        return self._policy.backoff.pause_secs(len(self._in_a_row))

    def notes(self, why: str) -> list[str]:
        """Return the history, for the error that is raised."""
        return [f"recovery gave up: {why}; what failed, oldest first:", *(f"  {line}" for line in self._in_a_row[-20:])]


class SessionSupervisor:
    """Creates the raw session and its coordinator, and replaces both in a recovery.

    The monitored session's own coordinator, `root`, lives through recoveries; `coord` is new with each session.
    """

    def __init__(self, creator: SessionCreator, hooks: HookSet, policy: RecoveryPolicy, grace_secs: float) -> None:
        self.root: Coordinator = Coordinator()
        self.root.observers = hooks.observers
        self.coord: Coordinator = self.root
        self.name: str | None = None
        """The session's name, if it was given one."""
        self.session: Session | None = None
        self.run: GatheredRun
        """Makes a run of the session as part of what a monitored run awaits."""
        self.store: StepStore | None = None
        """The step store of the sessions so far; all have the same."""
        self.recovery_error: BaseException | None = None
        """The error with which recovery gave up; no run can begin any more."""
        self.recovering_from: BaseException | None = None
        """The error from which it recovers now."""
        self.feeds: list[FeedsAhead] = []
        """The feeds that are taken ahead."""
        self.loops: weakref.WeakSet[Loop] = weakref.WeakSet()
        """The loops of steps that have begun and not ended; one that was left is not referred to any more."""
        self.history: RecoveryHistory = RecoveryHistory(policy)
        self._committed: tuple[BaseException, CommittedRun] | None = None  # and the error that followed
        self.creator: SessionCreator = creator
        self._hooks = hooks
        self._policy = policy
        self.grace_secs: float = grace_secs
        """How long cleanup may take, and what does not end immediately."""

    async def create(self) -> None:
        """Create the first session, with as many attempts as the policy allows.

        Raises:
            BaseException: any error that is not recovered from, and the last one when the attempts are used up.
        """
        try:
            await self._create(in_drain=False)
        except BaseException as error:
            # A wrong password or address at the start is no outage; later it may be one, of a server that moves.
            if isinstance(error, StoreRefusedError) or not self._policy.recovers(error):
                raise
            await self._replace(error, None, None)

    async def missing_session(self, waits: RunWaits) -> Session:
        """Return a new session where there is none: a recovery was interrupted before it had created one."""
        return await Wait[Session](_CREATING, waits=waits).result_of(self._create())

    def failures(self) -> list[BaseException]:
        """Return the failures of the background tasks, first those of the current session."""
        return [*self.coord.errors, *self.root.errors]

    def recovers(self, error: BaseException) -> bool:
        """Return whether a new session can help: a failed task of the whole session cannot be started again."""
        return self._policy.recovers(error) and not self.root.failed_with(error)

    def name_session(self, error: BaseException) -> None:
        """Add the session's name, if it was given one, to an error that it raises; nothing to a cancellation or a clean end."""
        if self.name is None or isinstance(error, asyncio.CancelledError) or is_clean_end(error):
            return
        note = f"in session {self.name!r}"
        if note not in notes_of(error):
            add_note(error, note)

    def note_commit(self, session: Session, result: Any, error: BaseException) -> None:
        """Note that a run failed with `error` after it had been committed, for a policy that returns its result."""
        if self._policy.after_commit == "return":
            epoch = session.global_step.latest.epoch
            self._committed = error, CommittedRun(result, Position(epoch, session.committed_step))

    def forget_commit(self) -> None:
        """Forget a commit that is not returned."""
        self._committed = None

    def _take_committed(self, error: BaseException) -> CommittedRun | None:
        """Return the run that failed with `error` after it had been committed, if it did, and forget it."""
        noted, self._committed = self._committed, None
        return noted[1] if noted is not None and noted[0] is error else None

    async def recover(self, error: BaseException, run_lock: RunLock) -> CommittedRun | None:
        """Replace the session after `error` came out of a run.

        Returns:
            The run, if it had been committed and its result is to be returned; None if it is to be repeated.

        Raises:
            BaseException: what the run ends with: `error`, if it is not recovered from; the failure of a background task
                that is behind it; the last error, with the history as notes, when the policy gives up.
        """
        try:
            committed = self._take_committed(error)
            if run_lock.waits.scope is not None:
                run_lock.waits.scope.end_attempt(error)
            cause = run_lock.waits.cause
            run_lock.waits.reset()
            if isinstance(error, asyncio.CancelledError) or (error is cause and not any(error is one for one in self.failures())):
                raise_unchanged(error)  # the caller was cancelled, or the run was ended by a signal or with its session
            error = self._root_cause(error)
            if not self.recovers(error):
                self.coord.mark_raised(error)
                if isinstance(error, StopRequestedError):
                    self.root.request_stop(str(error))  # so that `stop_reason` says it too, if it is the first
                self.name_session(error)
                raise_unchanged(error)
            step = None if self.session is None else self.session.global_step.latest.step + 1
            self.recovering_from = error
            with observing(self.root.observers, "recovery", f"recovery from {type(error).__name__}"):
                await self._replace(error, step if committed is None else committed.position.step, run_lock.waits)
            return committed if committed is not None and self._has_commit(committed.position) else None
        finally:
            del error  # the traceback of what is raised has this frame
            cause = self.recovering_from = None

    def _has_commit(self, committed: Position) -> bool:
        """Return whether the new session continues behind a commit of an earlier one."""
        if self.session is None:
            return False
        restored = getattr(self.session, "restored", None)  # a session of another class may have none
        if restored is not None:
            return bool(restored.checkpoint.step >= committed.step)
        latest = self.session.global_step.latest
        return latest.epoch == committed.epoch and latest.step >= committed.step

    def _root_cause(self, error: BaseException) -> BaseException:
        """Choose the error to act on: the failure of a background task may be behind the one that came out of a run."""
        failures = self.failures()
        if not failures or failures[0] is error or is_clean_end(error):
            return error
        cause = failures[0]
        if self._policy.recovers(cause) or self._policy.recovers(error):
            self._note_hidden(cause, f"the run failed with it: {safe_repr(error)}", error)
            return cause
        self._note_hidden(error, f"a background task had failed before: {safe_repr(cause)}", cause)
        return error

    def _note_hidden(self, raised: BaseException, note: str, hidden: BaseException) -> None:
        """Note an error at the one that is raised in its place, or log it if that takes no notes."""
        if not add_note(raised, note):
            _logger.error("%s: %s", self.root.label, note, exc_info=hidden)

    async def _replace(self, error: BaseException, step: int | None, waits: RunWaits | None) -> None:
        """Replace the session after `error` of the run of `step`; None means the error of a creation.

        What ends the run of `waits` ends the recovery, too, except the failure of a task that hooks have started in the new
        session, if the policy lists it.
        """
        again: BaseException | None = None
        try:
            while True:
                try:
                    await Wait[None]("a recovery", waits=waits).result_of(self._close_failed_session(error, step))
                except BaseException as raised:
                    self.coord.mark_raised(raised)
                    raise
                try:
                    await Wait[Session](_CREATING, waits=waits).result_of(self._create())
                    return
                except BaseException as raised:
                    again = raised
                    self.coord.mark_raised(again)
                if waits is not None:
                    waits.reset()
                if not self.recovers(again):
                    # After a clean end `end` gets the new session; any other error has left it half announced.
                    if not is_clean_end(again):
                        self.recovery_error = again
                    raise_unchanged(again)
                error, step = again, None
        finally:
            del error, again  # the traceback of what is raised has this frame

    async def _close_failed_session(self, error: BaseException, step: int | None) -> None:
        """Close the session after `error` and wait for the time of the next attempt; raise `error` if there is none."""
        why = self.history.failed(error, step)
        if why is not None:
            self.recovery_error = error
            for note in self.history.notes(why):
                add_note(error, note)
            self.name_session(error)
            try:
                await self._close_session(f"recovery gave up: {safe_repr(error)}")
            except asyncio.CancelledError:
                _logger.error("%s: recovery gave up: %s", self.root.label, why, exc_info=error)
                raise
            try:
                raise error
            finally:
                del error
        what = f"recovering from {safe_repr(error)}"
        _logger.warning("%s: %s", self.root.label, what)
        await self._close_session(what)
        pause = self.history.pause_secs()
        if pause > 0 and not self.root.should_stop():
            await self.root.wait_for_stop(pause)

    async def _create(self, *, in_drain: bool = True) -> Session:
        """Create a session and give it to the hooks.

        Args:
            in_drain: whether a drain lets it wait for others, because a run is under way.

        Raises:
            SessionClosedError: the monitored session was closed meanwhile.
        """
        with opening_until(functools.partial(self.root.until, drain=not in_drain)):
            session = await self.creator.create_session()
        created: object = session
        if not all(hasattr(created, name) for name in ("run", "aclose", "graph", "global_step")):
            raise InvalidArgumentError(f"{self.creator!r} created {created!r}; a SessionCreator returns a Session")
        if session.graph is not self.creator.graph:
            raise InvalidArgumentError(f"{self.creator!r} created a session of another graph than its own `graph`")
        self.session, self.run = session, gathered_run(session)
        await self._check_open()
        self.store = session.global_step
        self.coord = Coordinator(parent=self.root, is_recoverable=self._policy.recovers)
        if isinstance(created, Session):
            created.stateful_hooks, created.drain_hooks = self._hooks.stateful, self._hooks.drain_stateful
            created.state_of = self._state_of
            created.inherit_grace_secs(self.grace_secs)
            restore_hooks(created)
        await self._hooks.after_create_session(session, self.coord)
        await self._check_open()
        restored = created.tracked.values() if isinstance(created, Session) and created.restored is not None else ()
        for feeds in self.feeds:
            feeds.continue_reading(restored)
        return session

    async def _check_open(self) -> None:
        """Raise if the monitored session was closed meanwhile, because what creates a session ignored its cancellation."""
        if self.root.closed:
            await self._close_session("the session was closed")
            raise SessionClosedError("the session was closed while a raw session was created")

    def _state_of(self, one: Stateful) -> Any:
        """Return the state of a tracked object: of feeds that are taken ahead, the one behind what was used."""
        known = next((feeds for feeds in self.feeds if feeds.knows_state_of(one)), None)
        return one.state_dict() if known is None else known.used_state

    async def _close_session(self, why: str) -> None:
        """Cancel the session's tasks and close it. Errors are only logged: another one is being reported."""
        session, self.session = self.session, None
        if session is None:
            return
        coord = self.coord

        async def close() -> None:
            await self._hooks.background.finish(self.grace_secs)  # they are calls for this session
            for feeds in tuple(self.feeds):
                await feeds.stop_reading()
            coord.close()
            coord.disown("its session was replaced")
            await end_tasks([coord], 0, self.grace_secs, why, f"{self.root.label}, recovering")
            try:
                await session.aclose()
            except Exception as error:
                _logger.warning("%s: closing its raw session failed", self.root.label, exc_info=error)

        await shielded(close(), grace_secs=self.grace_secs, what=f"closing the raw session of {self.root.label}")
