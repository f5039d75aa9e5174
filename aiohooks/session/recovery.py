"""Recovery: which errors are recovered from, when to give up, and the supervisor that replaces the
raw session.

`recover` is what an error of a run goes through, from top to bottom.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, cast

from aiohooks._core.calls import RunWaits, Wait
from aiohooks._core.cancel import shielded
from aiohooks._core.clock import secs_text
from aiohooks._core.observers import observing
from aiohooks._core.reports import Awaited, Waiting, logger
from aiohooks._core.validate import check_choice, check_instance, checked_int
from aiohooks._core.waits import Backoff, opening_until
from aiohooks.errors import (
    AbortedError,
    FeedsLostError,
    InvalidArgumentError,
    SessionClosedError,
    StopRequestedError,
    StoreRefusedError,
    UnavailableError,
    add_note,
    is_clean_end,
    raise_unchanged,
    safe_repr,
)
from aiohooks.graph.session import GatheredRun, Monitor, Session, monitored_run
from aiohooks.session._hooks import HookSet
from aiohooks.session._state import SessionState, end_tasks
from aiohooks.session.coordinator import Coordinator, coordinator_of
from aiohooks.session.creators import ChiefSessionCreator, SessionCreator, restore_hooks
from aiohooks.session.feeds import FeedsWentBack, SessionFeeds
from aiohooks.stores._protocol import Position


@dataclasses.dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """Which errors a session recovers from, and when it gives up.

    Args:
        on: types of errors after which the session is replaced and the run repeated.
        max_attempts: recoveries in a row without a completed run between them.
        backoff: the pauses before them.
        no_progress_limit: how often the same step may fail, also with earlier steps completed
            between.
        after_commit: what to do after the recovery if the run had been committed, because
            `after_run` of a hook failed or a background task did meanwhile. "repeat", the default:
            the run is repeated and counts as another step, as in TensorFlow. "return": `run`
            returns the values, so that no step and no feed counts twice; unless the new session was
            restored from before the commit. `run_step_fn` repeats its function in either case. A
            loop whose feeds are tracked repeats no committed run: each of their elements counts
            once.
        restore: "checkpoint", the default: a chief with a checkpoint directory goes back to the
            newest checkpoint. "memory": it continues with the variables, which a failed run leaves
            as they were, and goes back only when the program is started again. A warning names the
            tracked objects, which may have been changed in part.
        on_lost_feeds: what to do when going back has undone steps with feeds that do not come
            again: those that are not tracked in the `Scaffold`, or have no state. "log", the
            default: a warning says how many steps are gone. "raise": `FeedsLostError` ends the
            session.
    """

    on: tuple[type[BaseException], ...] = (AbortedError, UnavailableError)
    max_attempts: int = dataclasses.field(default=10, kw_only=True)
    backoff: Backoff = dataclasses.field(default=Backoff(), kw_only=True)
    no_progress_limit: int = dataclasses.field(default=3, kw_only=True)
    after_commit: Literal["repeat", "return"] = dataclasses.field(default="repeat", kw_only=True)
    restore: Literal["checkpoint", "memory"] = dataclasses.field(default="checkpoint", kw_only=True)
    on_lost_feeds: Literal["log", "raise"] = dataclasses.field(default="log", kw_only=True)

    def __post_init__(self) -> None:
        for name in ("max_attempts", "no_progress_limit"):
            object.__setattr__(
                self,
                name,
                checked_int(getattr(self, name), name, expected="a whole number, 0 for never"),
            )
        check_instance(self.backoff, Backoff, "backoff")
        check_choice(self.after_commit, "after_commit", "repeat", "return")
        check_choice(self.restore, "restore", "checkpoint", "memory")
        check_choice(self.on_lost_feeds, "on_lost_feeds", "log", "raise")
        on: object = self.on
        if not isinstance(on, tuple) or not all(
            isinstance(one, type) and issubclass(one, Exception) for one in on
        ):  # pyright: ignore[reportUnknownVariableType]
            raise InvalidArgumentError(
                f"on is {on!r}; give a tuple of exception classes (cancellation is never recovered)"
            )

    def recovers(self, error: BaseException) -> bool:
        """Return whether a session recovers from `error`.

        A group is recovered from if each member is recoverable or a clean end, and at least one is
        recoverable.
        """
        if isinstance(error, BaseExceptionGroup):
            group = cast("BaseExceptionGroup[BaseException]", error)
            return all(self.recovers(one) or is_clean_end(one) for one in group.exceptions) and any(
                self.recovers(one) for one in group.exceptions
            )
        return isinstance(error, self.on) and not isinstance(error, FeedsLostError)


NEVER = RecoveryPolicy((), max_attempts=0)
"""The policy of a session that never recovers."""


class CommittedRun(NamedTuple):
    """A run that failed after it had been committed: what `run` would have returned, and the step,
    in its epoch.
    """

    result: Any
    position: Position


class RecoveryHistory:
    """The failures since the last progress, and whether to give up."""

    def __init__(self, policy: RecoveryPolicy) -> None:
        self._policy = policy
        self._in_a_row: list[str] = []
        self._failed_steps: list[int] = []
        """The steps whose runs failed, since the first of them, or a later one, was completed."""

    def failed(self, error: BaseException, step: int | None) -> str | None:
        """Record a failure of the run of `step` (None: of a creation); return why to give up, or
        None to continue.
        """
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

    @property
    def failures(self) -> list[str]:
        """The last failures since a run was completed, oldest first."""
        return self._in_a_row[-20:]

    def notes(self, why: str) -> list[str]:
        """Return the history, for the error that is raised."""
        return [
            f"recovery gave up: {why}; what failed, oldest first:",
            *(f"  {line}" for line in self.failures),
        ]


class SessionSupervisor(Waiting):
    """Creates the raw session and its coordinator, and replaces both in a recovery.

    The monitored session's own coordinator, `root`, lives through recoveries; `coord` is new with
    each session.
    """

    def __init__(
        self,
        root: Coordinator,
        creator: SessionCreator,
        hooks: HookSet,
        policy: RecoveryPolicy,
        feeds: SessionFeeds,
    ) -> None:
        self._root = root
        self.coord: Coordinator = root
        self.state: SessionState = feeds.state
        self.state.is_recoverable = policy.recovers
        self.run: GatheredRun
        """Makes a run of the raw session as part of what a monitored run awaits."""
        self._feeds = feeds
        self.history: RecoveryHistory = RecoveryHistory(policy)
        self.committed: CommittedRun | None = None
        """The run in progress, if it failed after it had been committed."""
        self.creator: SessionCreator = creator
        if isinstance(creator, ChiefSessionCreator):
            creator.restores_again = policy.restore == "checkpoint"
        self._hooks = hooks
        self._policy = policy
        self._monitor = Monitor(
            self.state.grace_secs, hooks.stateful, feeds.state_of, hooks.drain_stateful
        )

    def awaited_by(self, method: str, arguments: Mapping[str, Any]) -> Awaited | None:
        if method != "_close_failed_session" or "pause" not in arguments:
            return None
        failed = "; ".join(self.history.failures)
        name = (
            f"the pause of {secs_text(arguments['pause'])} before recovery {self.state.recoveries}"
        )
        return Awaited("recovery", name, f"what failed, oldest first: {failed}")

    # -- the error of a run: raise it, or recover

    def note_commit(self, session: Session, result: Any) -> None:
        """Note that a run is failing after it had been committed, for a policy that returns its
        result.
        """
        uses_tracked = self._feeds.uses_tracked_feeds(self.state.runner)
        if self._policy.after_commit == "return" or uses_tracked:
            epoch = session.global_step.latest.epoch
            self.committed = CommittedRun(result, Position(epoch, session.committed_step))

    async def recover(self, error: BaseException) -> CommittedRun | None:
        """Replace the session after `error` came out of a run.

        Returns:
            The run, if it had been committed and its result is to be returned; None if it is to be
            repeated.

        Raises:
            BaseException: what the run ends with: `error`, if it is not recovered from; the failure
                of a background task that is behind it; the last error, with the history as notes,
                when the policy gives up.
        """
        state, waits = self.state, self.state.waits
        committed, self.committed = self.committed, None
        try:
            if waits.scope is not None:
                waits.scope.end_attempt(error)
            cause = waits.cause
            waits.reset()
            is_failure = any(error is one for one in state.failures())
            if isinstance(error, (asyncio.CancelledError, FeedsWentBack)) or (
                error is cause and not is_failure
            ):
                raise_unchanged(
                    error
                )  # the caller was cancelled, or the run was ended by a signal or with its session
            error = self._root_cause(error)
            if not state.recovers(error):
                state.mark_raised(error)
                if isinstance(error, StopRequestedError):
                    state.request_stop(
                        str(error)
                    )  # so that `stop_reason` says it too, if it is the first
                state.name_session(error)
                raise_unchanged(error)
            step = None if state.session is None else state.session.global_step.latest.step + 1
            state.recovering_from = error
            with observing(state.observers, "recovery", f"recovery from {type(error).__name__}"):
                await self._replace(
                    error, step if committed is None else committed.position.step, waits
                )
            if committed is None or not self._has_commit(committed.position):
                return None
            self._feeds.keep_element_of_run()
            return committed
        finally:
            del error  # the traceback of what is raised has this frame
            cause = state.recovering_from = None

    def _root_cause(self, error: BaseException) -> BaseException:
        """Choose the error to act on: the failure of a background task may be behind the one that
        came out of a run.
        """
        failures = self.state.failures()
        if not failures or failures[0] is error or is_clean_end(error):
            return error
        chosen, hidden = failures[0], error
        note = f"the run failed with it: {safe_repr(hidden)}"
        if not self._policy.recovers(chosen) and not self._policy.recovers(hidden):
            chosen, hidden = hidden, chosen
            note = f"a background task had failed before: {safe_repr(hidden)}"
        if not add_note(chosen, note):
            logger.error("%s: %s", self.state.label, note, exc_info=hidden)
        return chosen

    async def _replace(
        self, error: BaseException, step: int | None, waits: RunWaits | None
    ) -> None:
        """Replace the session after `error` of the run of `step`; None means the error of a
        creation.

        What ends the run of `waits` ends the recovery, too, except the failure of a task that hooks
        have started in the new session, if the policy lists it.
        """
        try:
            while True:
                why = self._decide(error, step)
                await Wait[None]("a recovery", waits=waits).result_of(
                    self._close_failed_session(error, why)
                )
                # A task may have failed meanwhile, or beside the one that is recovered from.
                for failure in self.state.failures():
                    if not self.state.recovers(failure):
                        raise_unchanged(failure)
                try:
                    await self._new_session(waits)
                    return
                except BaseException as again:
                    if waits is not None:
                        waits.reset()
                    if not self.state.recovers(again):
                        raise
                    error, step = again, None
        except BaseException as raised:
            self.state.mark_raised(raised)
            self._feeds.end_waits_without_session()
            raise
        finally:
            del error  # the traceback of what is raised has this frame

    def _decide(self, error: BaseException, step: int | None) -> str | None:
        """Say that the session recovers from `error`, before anything can end that; or return why
        it does not.
        """
        why = self.history.failed(error, step)
        if why is None:
            self.state.recoveries += 1
            logger.warning("%s: recovering from %s", self.state.label, safe_repr(error))
            return None
        self.state.recovery_error = error
        for note in self.history.notes(why):
            add_note(error, note)
        self.state.name_session(error)
        return why

    async def _close_failed_session(self, error: BaseException, why: str | None) -> None:
        """Close the session after `error` and wait for the time of the next attempt; or raise
        `error`, if it gives up.
        """
        state = self.state
        try:
            await self._close_session(
                f"{'recovering from' if why is None else 'recovery gave up:'} {safe_repr(error)}"
            )
            if why is not None:
                raise error
        except asyncio.CancelledError:
            if why is not None:
                logger.error("%s: recovery gave up: %s", state.label, why, exc_info=error)
            raise
        finally:
            del error
        pause = self.history.pause_secs()
        if pause > 0 and not state.stopped:
            await state.whole.wait_for(state.whole.should_stop, pause)

    async def _close_session(self, why: str) -> None:
        """Cancel the session's tasks and close it. Errors are only logged: another one is being
        reported.
        """
        state, owner = self.state, self.state.current
        session = state.session
        if session is None:
            return
        # The store may have lost steps that the session has made.
        reached = max(session.global_step.latest.step, session.committed_step)
        self._feeds.note_loss(session, reached)
        state.session = None

        async def close() -> None:
            await self._hooks.background.finish(
                self.state.grace_secs
            )  # they are calls for this session
            await self._feeds.stop_reading()
            owner.close()
            owner.disown("its session was replaced")
            await end_tasks([owner], 0, self.state.grace_secs, why, f"{state.label}, recovering")
            try:
                await session.aclose()
            except Exception as error:
                logger.warning("%s: closing its raw session failed", state.label, exc_info=error)

        await shielded(
            close(),
            grace_secs=self.state.grace_secs,
            what=f"closing the raw session of {state.label}",
        )

    def _has_commit(self, committed: Position) -> bool:
        """Return whether the new session continues behind a commit of an earlier one."""
        session = self.state.session
        if session is None:
            return False
        restored = getattr(session, "restored", None)  # a session of another class may have none
        if restored is not None:
            return bool(restored.checkpoint.step >= committed.step)
        latest = session.global_step.latest
        return latest.epoch == committed.epoch and latest.step >= committed.step

    # -- creating

    async def create(self) -> None:
        """Create the first session, with as many attempts as the policy allows."""
        try:
            await self._create(in_drain=False)
        except BaseException as error:
            # A wrong password or address at the start is no outage; later it may be one, of a
            # server that moves.
            if isinstance(error, StoreRefusedError) or not self._policy.recovers(error):
                raise
            await self._replace(error, None, None)

    async def session_of_run(self, waits: RunWaits | None) -> Session:
        """Return the session for a run; after a recovery that was cancelled, another one. Raise the
        failure of a task.
        """
        if self.state.current.errors:
            raise self.state.current.errors[0]
        session = self.state.session
        if session is not None:
            return session
        try:
            return await self._new_session(waits)
        except BaseException:
            self._feeds.end_waits_without_session()
            raise

    async def _new_session(self, waits: RunWaits | None) -> Session:
        """Create a session in a run: in a recovery, or after one that was cancelled."""
        try:
            return await Wait[Session]("creating a session", waits=waits).result_of(self._create())
        except asyncio.CancelledError:
            await self._close_session(
                "its creation was cancelled"
            )  # it is half announced: the next run creates another
            raise
        except BaseException as error:
            # After a clean end `end` gets the new session; any other error has left it half
            # announced.
            if not self.state.recovers(error) and not is_clean_end(error):
                self.state.recovery_error = error
            raise

    async def _create(self, *, in_drain: bool = True) -> Session:
        """Create a session and give it to the hooks; in a run (`in_drain`) a drain lets it wait for
        others.
        """
        with opening_until(functools.partial(self._root.until, drain=not in_drain)):
            session = await self.creator.create_session()
        created: object = session
        if not all(hasattr(created, name) for name in ("run", "aclose", "graph", "global_step")):
            raise InvalidArgumentError(
                f"{self.creator!r} created {created!r}; a SessionCreator returns a Session"
            )
        if session.graph is not self.creator.graph:
            raise InvalidArgumentError(
                f"{self.creator!r} created a session of another graph than its own `graph`"
            )
        self.state.session, self.run = session, monitored_run(session, self._monitor)
        await self._check_open()
        self.state.store = session.global_step
        self.coord = coordinator_of(self.state)
        if isinstance(created, Session):
            restore_hooks(created)
            # Before a hook can fail: what is in use comes again.
            self._feeds.note_new_session(created, self._policy.on_lost_feeds)
        await self._hooks.after_create_session(session, self.coord)
        await self._check_open()
        if isinstance(created, Session) and created.finished is not None:
            self.coord.request_stop(str(created.finished))
        self._feeds.continue_reading()
        return session

    async def _check_open(self) -> None:
        """Raise if the monitored session was closed meanwhile, because what creates a session
        ignored its cancellation.
        """
        if self.state.whole.closed:
            await self._close_session("the session was closed")
            raise SessionClosedError("the session was closed while a raw session was created")
