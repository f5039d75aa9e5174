"""One session from its opening to its end.

Read it downward. Each method calls the layer below it:

    open        `begin` of the hooks, the raw session, `after_create_session`
    run         its turn, and what becomes of an attempt that failed
    recover     close the failed raw session, pause, create another one
    close       `end` of the hooks, background tasks, the raw session, `close` of the hooks

`Turns` has the turns of its runs, and `EndErrors` decides which error of its end is raised.
`creators` has the policy and the history of recoveries, the coordinator the choice of the root
cause. `Coordinator.is_recoverable` is the one place that decides whether a new raw session can
help.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable
from threading import get_ident
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from aiohooks._core.activity import (
    ENTRIES,
    Awaited,
    RunScope,
    active,
    assigned,
    begin_run,
    current_run,
    current_scope,
    enter,
    logger,
    wait_log,
)
from aiohooks._core.calls import RunWaits, Wait, limited
from aiohooks._core.clock import (
    NO_TIMER,
    TimerHandle,
    call_later,
    current_clock,
    monotonic_now,
    quick_now,
    secs_text,
    sleep,
)
from aiohooks._core.waits import current_task, opening_until, shielded, shielded_task
from aiohooks.dispatch.hook import HookRegistration
from aiohooks.errors import (
    NestedRunError,
    RecoveryExhaustedError,
    SessionClosedError,
    StopRequestedError,
    StoreRefusedError,
    add_note,
    flattened,
    is_clean_end,
    raise_unchanged,
    safe_repr,
    set_context,
)
from aiohooks.graph.graph import Graph, held
from aiohooks.graph.session import GatheredRun, Monitor, Session, monitored_run
from aiohooks.session.coordinator import (
    Coordinator,
    Requests,
    TasksOwner,
)
from aiohooks.session.creators import (
    ChiefSessionCreator,
    RecoveryHistory,
    RecoveryPolicy,
    SessionCreator,
    WorkerSessionCreator,
    restore_hooks,
    warn_if_not_saved,
)
from aiohooks.session.feeds import FeedsWentBack, SessionFeeds
from aiohooks.session.hook import HookSet, SessionRunHook
from aiohooks.session.signals import StopOnSignal
from aiohooks.session.status import (
    SessionStatus,
    opening_events,
    status_of,
    summary_of,
)
from aiohooks.stores._protocol import Position
from aiohooks.stores.base import StepStore
from aiohooks.stores.publishers import Publisher

T = TypeVar("T")

OPEN_SESSIONS: WeakKeyDictionary[Lifecycle, None] = WeakKeyDictionary()
"""The sessions of this process that are being opened, are open, or are being closed, in the order
of their openings.
"""
_NOTICE_SECS = 1
"""After how long the log has what the end of a session waits for."""
_FLUSH_SECS = 5.0
"""How long to wait until other processes can know that this session has left."""
DEFAULT_YIELD_SECS = 0.005
"""After how long without a turn the event loop gets one before the next run, by default."""
_TURN_PASSES = 3
"""The passes of the loop that make one turn: it finds an event, calls the callback, and the task
that waited continues.
"""


class Lifecycle(TasksOwner):
    """Opens, runs, recovers and closes one monitored session.

    It owns the raw session. The coordinator of the whole session owns its tasks and requests. That
    of the raw session is new after each recovery.
    """

    def __init__(
        self,
        creator: SessionCreator,
        hooks: Iterable[SessionRunHook | HookRegistration],
        policy: RecoveryPolicy,
        grace_secs: float,
        yield_secs: float | None,
        name: str | None,
    ) -> None:
        """Start nothing."""
        self.name: str | None = name
        self.graph: Graph = creator.graph
        self.grace_secs = grace_secs
        self.phase: str = "new"
        """"new", "opening", "open", "closing" or "closed"."""
        self.thread: int = 0
        """The thread of the session's loop: cheaper to compare than the running loop."""
        self.policy = policy
        self.coordinator: Coordinator = Coordinator()
        """Its tasks live through recoveries."""
        self.coordinator.owner = self
        self.requests: Requests = self.coordinator.requests
        self.raw_coordinator: Coordinator = self.coordinator
        self.session: Session | None = None
        """The raw session."""
        self.store: StepStore | None = None
        """The step store of all raw sessions."""
        self.run_raw: GatheredRun
        """Makes a run of the raw session as part of a monitored run."""
        self.run_waits: RunWaits = RunWaits(owner=self)
        """The waits of the run in progress, whose end ends the run."""
        self.turns: Turns = Turns(self.run_waits, yield_secs)
        self.hooks: HookSet = HookSet(self.coordinator, hooks, self.graph)
        self.feeds: SessionFeeds = SessionFeeds(self.coordinator, self.run_waits)
        self.recoveries: int = 0
        self.recovering_from: BaseException | None = None
        self._recovery: asyncio.Task[None] | None = None
        """The task that recovers while others wait for something else than a run."""
        self._has_hurried = False
        """Whether an attempt was made without a pause, as a stop was requested."""
        self.gave_up: BaseException | None = None
        """The error with which recovery gave up, or the session has ended; no run can begin any
        more.
        """
        self.history: RecoveryHistory = RecoveryHistory(policy)
        self._creator = creator
        self._monitor = Monitor(
            grace_secs, lambda: self.hooks.stateful, self.feeds.state_of, self.hooks.drain_stateful
        )
        self._publisher: Publisher | None = None
        """The session's registration as a publisher of steps."""
        self.entered_by: asyncio.Task[Any] | None = None
        self.phase_began_at: float | None = None
        self._is_closed = asyncio.Event()
        self._end_log: TimerHandle = NO_TIMER
        """Logs what the session waits for, after a signal and when it closes."""
        self._at_end = contextlib.ExitStack()

    def _enter_phase(self, phase: str) -> None:
        self.phase = phase
        self.phase_began_at = current_clock().now()
        if phase == "closed":
            self._end_log.cancel()
            OPEN_SESSIONS.pop(self, None)
            ENTRIES.pop(id(self), None)
        elif phase == "opening":
            OPEN_SESSIONS[self] = None
            enter(self)

    # -- open

    async def open(self, signals: StopOnSignal | None) -> None:
        """Call `begin` of the hooks, create the raw session and give it to the hooks.

        Raises:
            BaseException: the error of a hook or of the creation, even an error that would end the
                block cleanly.
        """
        if self.phase != "new":
            raise SessionClosedError(
                f"this session is {self.phase}: sessions are single-use: make a new one"
            )
        self.entered_by = current_task()
        self.requests.label = f"session {self.name or self.entered_by.get_name()!r}"
        self.coordinator.bind()
        self.hooks.hold()
        self._enter_phase("opening")
        self.thread = get_ident()
        self.turns.now = monotonic_now()
        self.run_waits.now = quick_now()
        try:
            self._at_end.callback(self.hooks.release)
            if signals is not None:
                self._at_end.callback(signals.install())
            with self.graph.as_default():
                with assigned(opening_events, self.coordinator.events):
                    await self.hooks.begin()
                self._at_end.callback(held(self.graph))
                await self._create_first_session()
        except BaseException as error:
            await self._close_unopened(error)
        self._enter_phase("open")
        self.turns.set_loop_turn_due()

    def _register_publisher(self, store: StepStore | None) -> None:
        """Register as a publisher of steps: before the session is created, if its store is known,
        or right after it.
        """
        if self._publisher is None and isinstance(store, StepStore) and self.graph.trains:
            name = self.name or current_task().get_name()
            if self.name is None and not store.inline:
                # there is a Task-1 in each
                name += f" of process {os.getpid()} on {socket.gethostname()}"
            self._publisher = store.publisher(name)
            self._publisher.session = self.awaited

    async def _create_first_session(self) -> None:
        """Create the first raw session, with as many attempts as the policy allows."""
        store = getattr(self._creator, "global_step", None)
        is_worker = isinstance(self._creator, WorkerSessionCreator)
        if getattr(store, "inline", True) or not is_worker:
            # A worker that waits for a chief in another process publishes nothing yet.
            self._register_publisher(store)
        try:
            await self._create_session(ends_at_drain=True)
        except StoreRefusedError:
            # A wrong password or address at the start is no outage; later it may be one, of a
            # server that moves.
            raise
        except BaseException as error:
            if not self.coordinator.is_recoverable(error):
                raise
            await self._replace_session(error, None)
        self._register_publisher(self.store)
        if self.session is not None:
            warn_if_not_saved(self.session, self.graph)

    async def _create_session(self, *, ends_at_drain: bool = False) -> Session:
        """Create a raw session and give it to the hooks.

        Args:
            ends_at_drain: whether a drain ends the creator's waits for other processes.
        """
        with opening_until(functools.partial(self.coordinator.until, drain=ends_at_drain)):
            session = await self._creator.create_session()
        self.session = session
        self.run_raw = monitored_run(session, self._monitor)
        if self.coordinator.closed:
            # The creator has ignored the cancellation by which the session was closed.
            await self._close_raw_session("the session was closed")
            raise SessionClosedError("the session was closed while a raw session was created")
        self.store = session.global_step
        self.raw_coordinator = self.coordinator.for_raw_session()
        if session.restored is not None:
            restore_hooks(session, session.restored)
            checkpoint = session.restored.checkpoint
            await self.coordinator.events.restored.emit(checkpoint.step, checkpoint.path)
        # Before the hooks, which may fail: the elements in use come again in any case.
        self.feeds.note_new_session(session, self.recovering_from)
        await self.hooks.after_create_session(session, self.raw_coordinator)
        if session.finished is not None:
            self.coordinator.request_stop(str(session.finished))
        self.feeds.continue_reading()
        return session

    # -- run

    def begin_run(self) -> RunScope:
        """Begin a run: the turn is free, or was waited for. Raises like `_raise_if_unusable`."""
        if (
            self.phase != "open"
            or get_ident() != self.thread
            or self.gave_up is not None
            or self.requests.stopped
        ):
            self._raise_if_unusable()
        task = asyncio.current_task(self.requests.loop)
        # The caller runs in another loop of the same thread.
        if task is None:
            self.raise_if_not_entered()
            task = current_task()
        turns = self.turns
        # Not a method of the turns: it would cost each run a call.
        turns.taken = True
        turns.runner = task
        turns.runs += 1
        waits = self.run_waits
        waits.began = None
        scope = waits.scope = begin_run(self, self._publisher)
        scope.runner = id(task)
        return scope

    async def wait_for_turn(self) -> RunScope:
        """Begin a run that cannot begin now: let the loop have its turn, wait behind the runs of
        other tasks, and begin it.
        """
        turns = self.turns
        await self.give_loop_turn()
        if not turns.taken:
            return self.begin_run()
        self._raise_if_nested("run")
        self._raise_if_unusable()
        with active(
            "wait", "turn to run", self._awaited_turn, observers=self.coordinator.observers
        ):
            await turns.wait()
        try:
            await self.coordinator.wait_for_resume()
            return self.begin_run()
        except BaseException:
            turns.release()
            raise

    async def give_loop_turn(self) -> None:
        """Let the loop have a turn, if it is due, and wait for the end of a pause.

        Call it before a run begins: at its end a cancellation that arrives here would lose the
        result of a committed run. It raises a stop that was requested meanwhile, and the error of a
        background task that failed during a pause.
        """
        if (
            self.phase != "open"
            or get_ident() != self.thread
            or asyncio.get_running_loop() is not self.requests.loop
        ):
            # `begin_run` raises the error for what is wrong.
            return
        await self.turns.let_loop_turn()
        await self.coordinator.wait_for_resume()

    async def session_for_run(self) -> Session:
        """Return the raw session for a run. After a recovery that was cancelled, another one. Raise
        the failure of a task.
        """
        errors = self.raw_coordinator.errors
        if errors:
            raise errors[0]
        return self.session or await self._create_session_in_run()

    async def recover_if_needed(self) -> None:
        """Recover if a task of the raw session has failed, or there is none after a recovery that
        was cancelled, as the next run would before it begins.
        """
        errors = self.raw_coordinator.errors
        if self.session is not None and not (errors and self.coordinator.is_recoverable(errors[0])):
            return
        await self.repeat(lambda _: self.session_for_run())

    async def repeat(self, attempt: Callable[[RunScope], Awaitable[T]]) -> T:
        """Take a turn to run, and call `attempt` again after each recovery until it succeeds.

        A run of the session does the same, without this call.
        """
        scope = await self.wait_for_turn()
        try:
            while True:
                try:
                    return await attempt(scope)
                except BaseException as error:
                    await self.handle_failure(scope, error)
                scope = self.turns.begin_attempt(scope)
        finally:
            self.turns.end_run(scope)

    def start_recovery(self) -> None:
        """Start a task that recovers, for waits that a recovery does not end."""
        is_started = self._recovery is not None and not self._recovery.done()
        if self.phase == "open" and self.recovering_from is None and not is_started:
            self._recovery = self.coordinator.start_soon(self._recover_for_waits, name="recovery")

    def _recover_for_lasting_waits(self) -> None:
        """Let the waits for feeds, which nothing reads without a raw session, recover or fail: a
        recovery was cancelled, or has given up.
        """
        if any(wait.lasts for wait in self.requests.waits):
            self.start_recovery()

    async def _recover_for_waits(self) -> None:
        """Recover behind the run in progress, unless it recovers itself.

        A recovery that ends because the session ends has not failed.
        """
        try:
            await self.recover_if_needed()
        except (SessionClosedError, StopRequestedError):
            # The end of the session may have interrupted the recovery.
            if self.phase == "open":
                raise

    async def handle_failure(self, scope: RunScope, error: BaseException) -> bool:
        """Decide what becomes of a run that `error` ended. Every failed attempt comes through here.

        Args:
            scope: the scope of the attempt.
            error: the error that left it.

        Returns:
            Whether the run is complete, as it had been committed. Otherwise it is to be repeated.

        Raises:
            BaseException: what the run ends with: `error`, if the session does not recover from it;
                the failure of a background task that is behind it; the last error, with the history
                as notes, when the policy gives up.
        """
        coordinator = self.coordinator
        commit = self._commit_to_keep(scope)
        scope.end_attempt(error)
        cause = self.run_waits.cause
        self.run_waits.cause = None
        try:
            is_cancel = isinstance(error, (asyncio.CancelledError, FeedsWentBack))
            if is_cancel or (error is cause and not coordinator.failures_in(error)):
                # The caller, a signal, the end of the session or a restore has ended the run.
                raise_unchanged(error)
            error = coordinator.root_cause(error)
            if coordinator.is_recoverable(error):
                return await self._recover(error, commit)
            coordinator.note_delivery(error)
            if isinstance(error, StopRequestedError):
                # So that `stop_reason` has it too, if it is the first.
                self.requests.request_stop(str(error))
            raise_unchanged(error)
        finally:
            # The traceback of what is raised refers to this frame.
            del error, cause

    def _commit_to_keep(self, scope: RunScope) -> Position | None:
        """Return the position of the commit of a failed attempt, where its feeds are tracked: as
        each of their elements counts once, the run is not repeated.
        """
        session = self.session
        if session is None or scope.attempt is None:
            return None
        if not (scope.attempt.committed and self.feeds.uses_tracked_feeds(scope.runner)):
            return None
        return Position(session.global_step.latest.epoch, session.committed_step)

    def end_run(self, cause: BaseException) -> None:
        """End the run in progress, if there is one."""
        if self.turns.runner is not None:
            self.run_waits.end(cause)

    def end_failed_run(self, failure: BaseException) -> None:
        """End the run in progress because a task has failed.

        A recovery from that failure goes through, and so does one in which a task of the raw
        session fails that is being closed.
        """
        if failure is self.recovering_from:
            return
        is_lasting = any(other.lasts for other in self.coordinator.failures)
        if self.session is not None or is_lasting:
            self.end_run(failure)

    def until(self, awaitable: Awaitable[T]) -> Awaitable[T]:
        """Wrap something that code in a run awaits, so that a stop of the session ends the wait."""
        if self.phase != "open":
            return awaitable  # the hooks of a session that ends may wait in spite of its stop
        return self.raw_coordinator.wait_until_ended("a wait in a run", awaitable)

    # -- recover

    async def _recover(self, error: BaseException, commit: Position | None) -> bool:
        """Replace the raw session after `error`. Return whether the new one has the commit."""
        # There is no session after a recovery that was cancelled: a creation has failed.
        step = None
        if commit is not None:
            step = commit.step
        elif self.session is not None:
            step = self.session.global_step.latest.step + 1
        self.recovering_from = error
        what = f"recovery from {type(error).__name__}"
        try:
            with active("recovery", what, observers=self.coordinator.observers):
                await self._replace_session(error, step)
        except BaseException as raised:
            self.recovering_from = None
            self.coordinator.note_delivery(raised)
            self._recover_for_lasting_waits()
            raise
        finally:
            # The traceback of what is raised refers to this frame.
            del error
        self.recovering_from = None
        if commit is None or not self._has_commit(commit):
            return False
        self.feeds.keep_element_of_run()
        return True

    def _has_commit(self, commit: Position) -> bool:
        """Return whether the new raw session continues behind a commit of the previous session."""
        if self.session is None:
            return False
        if self.session.restored is not None:
            return self.session.restored.checkpoint.step >= commit.step
        latest = self.session.global_step.latest
        return latest.epoch == commit.epoch and latest.step >= commit.step

    async def _replace_session(self, error: BaseException, step: int | None) -> None:
        """Replace the raw session after `error` of the run of `step`. None means the error of a
        creation.

        What ends the run ends the recovery, too, except the failure of a task that hooks have
        started in the new session, if the policy lists it.
        """
        coordinator = self.coordinator
        try:
            while True:
                description = safe_repr(error)
                gives_up = self._begin_recovery(error, description, step)
                await self._close_raw_session(f"recovering from {description}")
                if gives_up:
                    raise_unchanged(error)
                await self._pause()
                # A task may have failed meanwhile, or beside the error that is recovered from.
                if coordinator.ending_failures:
                    raise_unchanged(coordinator.ending_failures[0])
                try:
                    await self._create_session_in_run()
                    return
                except BaseException as next_error:
                    self.run_waits.cause = None
                    if not coordinator.is_recoverable(next_error):
                        raise
                    error = next_error
                    step = None
        finally:
            # The traceback of what is raised refers to this frame.
            del error

    def _begin_recovery(self, error: BaseException, description: str, step: int | None) -> bool:
        """Count a failure of the session. Log that it recovers from `error`, or that it gives up,
        as its policy says. Return whether it gives up.
        """
        label = self.requests.label
        give_up_reason = self.history.failed(description, step)
        if give_up_reason is None:
            self.recoveries += 1
            logger.warning("%s: recovering from %s", label, description)
            return False
        logger.error("%s: recovery gave up: %s", label, give_up_reason, exc_info=error)
        self.gave_up = error
        for note in self.history.notes(give_up_reason):
            add_note(error, note)
        return True

    async def _pause(self) -> None:
        """Pause before the next attempt.

        A stop ends the pause, or the first one after it: one attempt is made without a pause. If
        that fails, too, the pauses give the missing service time to return.
        """
        secs = self.history.pause_secs()
        is_stopped = self.requests.stopped
        hurries = is_stopped and not self._has_hurried
        if secs > 0 and not hurries:
            pause = sleep(secs) if is_stopped else self.coordinator.wait_for_stop(secs)
            with active("recovery", "pause", functools.partial(self._awaited_pause, secs)):
                await Wait[Any]("a recovery", waits=self.run_waits).result_of(pause)
        self._has_hurried = self.requests.stopped

    async def _close_raw_session(self, reason: str) -> None:
        """Close the raw session, if there is one, after its tasks and background calls.

        Errors are only logged, because the session reports the error that has led here.
        """
        session = self.session
        if session is None:
            return
        # The step that the session has reached. A store that has lost its data shows less.
        reached = max(session.global_step.latest.step, session.committed_step)
        # Feeds without a state cannot give the elements of steps after the checkpoint again.
        self.feeds.note_loss(session, reached)
        self.session = None
        await shielded(
            self._end_raw_session(session, reason),
            grace_secs=self.grace_secs,
            what=f"closing the raw session of {self.requests.label}",
        )

    async def _end_raw_session(self, session: Session, reason: str) -> None:
        """End the background calls, the feeds and the tasks of a raw session, and close it."""
        coordinator = self.raw_coordinator
        label = self.requests.label
        # The background calls are calls for this session.
        if self.hooks.has_background:
            await self.hooks.background.finish(self.grace_secs)
        await self.feeds.stop_reading()
        coordinator.disown("its session was replaced")
        if coordinator.all_tasks:
            with wait_log(lambda: f"{label} to recover: {coordinator.descriptions()}"):
                await coordinator.end_tasks(0, self.grace_secs, reason)
        try:
            await session.aclose()
        except Exception as error:
            logger.warning("%s: closing its raw session failed", label, exc_info=error)

    async def _create_session_in_run(self) -> Session:
        """Create a session in a run: in a recovery, or after a cancelled recovery."""
        wait = Wait[Session]("creating a session", waits=self.run_waits)
        try:
            return await wait.result_of(self._create_session())
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                # It is half announced: the next run creates another.
                await self._close_raw_session("its creation was cancelled")
            elif not self.coordinator.is_recoverable(error) and not is_clean_end(error):
                # Half announced as well. After a clean end `end` gets the new session.
                self.gave_up = error
            self._recover_for_lasting_waits()
            raise

    # -- close

    async def close(self, error: BaseException | None) -> bool:
        """End the session after `error`, or none, left its block. Return whether the error is
        swallowed. Another caller waits for the end.
        """
        is_swallowed = error is not None and is_clean_end(error)
        primary = None if is_swallowed else error
        errors = EndErrors(self.requests.label, primary)
        if self.phase != "closed":
            self._raise_if_not_closable()
        if self.phase in ("closing", "closed"):
            await self._wait_until_closed(primary)
            # Code of the session's own tasks may have closed it, and got the failure of another.
            self._take_task_failures(errors)
            outcome = errors.outcome()
        else:
            reason = None
            if is_swallowed:
                reason = f"the block was left by {safe_repr(error)}"
                logger.info("%s: %s, which is a clean end", self.requests.label, reason)
            if primary is None:
                self.requests.record_end(reason)
            with self._closing():
                await self._end(errors)
                outcome = await self._close(errors)
                self._note_outcome(outcome)
        self.coordinator.owe_again(outcome)
        if outcome is None:
            return is_swallowed
        if outcome is error:
            return False
        raise_unchanged(outcome)

    async def _close_unopened(self, error: BaseException) -> None:
        """Close a session that could not be opened. Raise the error."""
        if is_clean_end(error):
            self.requests.record_end()
        with self._closing():
            outcome = await self._close(EndErrors(self.requests.label, error)) or error
            self._note_outcome(outcome)
        raise_unchanged(outcome)

    def _note_outcome(self, outcome: BaseException | None) -> None:
        """Keep the error with which the session has failed, for its status."""
        if isinstance(outcome, Exception) and not is_clean_end(outcome):
            self.gave_up = outcome

    async def _wait_until_closed(self, error: BaseException | None) -> None:
        """Wait until another task has ended the session.

        `error` is the error that has left the block, if any. It is kept if this wait is cancelled.
        """
        if self._is_closed.is_set():
            return
        label = self.requests.label
        try:
            await shielded(
                self._is_closed.wait(),
                grace_secs=self.grace_secs,
                what=f"the wait for the end of {label}",
            )
        except asyncio.CancelledError as cancelled:
            # The cancellation is raised in its place.
            EndErrors(label, error).keep(cancelled)
            raise

    @contextlib.contextmanager
    def _closing(self) -> Generator[None]:
        """The session is closing in this block, and closed afterwards, whatever happens."""
        outer = current_run()
        scope_before = current_scope.get()
        self._enter_phase("closing")
        # A run may wait for the end of the pause with its turn, for which the end of the session
        # would wait.
        self.requests.resume()
        # A hook that closes the session would deadlock.
        scope = begin_run(self, None if outer is None else outer.publisher)
        self.log_wait_for_end()
        try:
            yield
        finally:
            scope.active = False
            current_scope.set(scope_before)
            self._enter_phase("closed")
            self.entered_by = None
            self._is_closed.set()

    async def _end(self, errors: EndErrors) -> None:
        """Wait for the last run, and call `end` of the hooks after a clean end."""
        try:
            await self._wait_for_last_run(immediately=errors.primary is not None)
            self._take_task_failures(errors)
            if errors.primary is not None or self.gave_up is not None:
                return
            if self.session is None:
                logger.warning(
                    "%s: its last recovery was cancelled, so that it has no raw session: `end` of"
                    " the hooks is not called, and nothing is saved",
                    self.requests.label,
                )
                return
            await self.hooks.end(self.session, errors.others)
            errors.primary = errors.take_single("end")
            errors.gives_way = True
        except BaseException as raised:
            errors.primary = errors.outcome(raised)

    async def _wait_for_last_run(self, *, immediately: bool) -> None:
        """Wait for the run of another task. It may finish within the grace period, or is
        interrupted `immediately`.
        """
        if not self.turns.taken:
            return
        if immediately:
            self._interrupt_run()
        await shielded(
            self._take_last_turn(),
            grace_secs=self.grace_secs,
            what=f"the wait for the last run of {self.requests.label}",
            on_cancel=self._interrupt_run,
        )

    async def _take_last_turn(self) -> None:
        """Wait for the turn behind the last run. Interrupt the run after the grace period."""
        for _ in range(2):
            with contextlib.suppress(TimeoutError):
                return await limited(self.turns.wait(), self.grace_secs, "the last run")
            self._interrupt_run()
        what = "%s: run still active %s s after its cancellation; closing anyway"
        logger.warning(what, self.requests.label, self.grace_secs)

    def _interrupt_run(self) -> None:
        self.end_run(SessionClosedError("the session was closed during this run"))

    def _take_task_failures(self, errors: EndErrors) -> None:
        """Take the failures of background tasks that no caller has got. One becomes the primary
        error, unless the block has an error, which gets it as a note.
        """
        what = f"{self.requests.label}: a background task failed"
        for failure in self.coordinator.take_owed(errors.primary):
            primary = errors.primary
            is_recoverable = self.coordinator.is_recoverable(failure)
            if not is_recoverable and (primary is None or errors.gives_way):
                errors.put_first(failure)
            elif primary is not None:
                add_note(primary, f"a background task had failed: {safe_repr(failure)}")
                logger.error("%s", what, exc_info=failure)
            else:
                text = "%s, from which the next run would have recovered"
                logger.warning(text, what, exc_info=failure)

    async def _close(self, errors: EndErrors) -> BaseException | None:
        """End the tasks, close the session and the hooks, shielded and limited in time. Return the
        error of the session.
        """
        with self._at_end:
            while True:
                try:
                    closing = await shielded_task(
                        self._close_parts(errors),
                        grace_secs=self.grace_secs,
                        what=f"the end of {self.requests.label}",
                        on_cancel=self._cancel_tasks,
                    )
                except asyncio.CancelledError as cancelled:
                    outcome = errors.outcome(cancelled)
                    if outcome is cancelled:
                        raise
                    return outcome
                # If a third party has cancelled it, the rest is closed all the same.
                if not closing.cancelled():
                    closing.result()
                    return errors.outcome()

    async def _close_parts(self, errors: EndErrors) -> None:
        """Close the remaining parts: after a cancellation in the middle this is called again."""
        # An earlier call may have been cancelled.
        errors.cancel = None
        publisher = self._publisher
        self._publisher = None
        # First, as other sessions wait for steps that this one does not make any more.
        with _part(errors):
            if publisher is not None:
                publisher.close(errors.primary or self.gave_up)
        # Tasks use the raw session, and hooks use tasks, session and store until their `close`.
        with _part(errors):
            await self._end_tasks(errors)
        session = self.session
        self.session = None
        with _part(errors):
            if session is not None:
                await session.aclose()
        with _part(errors):
            await self.hooks.close(errors.primary or self.gave_up, errors.others)
        with _part(errors):
            if isinstance(self._creator, ChiefSessionCreator):
                await self._creator.aclose(grace_secs=self.grace_secs)
        with _part(errors):
            if self.store is not None:
                await self.store.flush(_FLUSH_SECS)
        # It took longer than the grace period after a cancellation.
        if self._is_closed.is_set():
            errors.log_late()
        if errors.cancel is not None:
            raise errors.cancel

    async def _end_tasks(self, errors: EndErrors) -> None:
        """End the background tasks: after an error immediately, else within the grace period."""
        coordinator = self.coordinator
        # The block may have caught the error with which recovery gave up.
        error = errors.primary or self.gave_up
        grace_secs = self.grace_secs
        if error is None:
            reason = f"the session has ended, and its grace period of {grace_secs} s is over"
            coordinator.close()
        else:
            grace_secs = 0
            reason = _reason(error)
            if isinstance(self._creator, ChiefSessionCreator):
                self._creator.fail_waiters(error)
            coordinator.close(reason)
        try:
            await coordinator.end_tasks(grace_secs, self.grace_secs, reason)
        finally:
            self._take_task_failures(errors)
            coordinator.disown("the session has ended")

    def log_wait_for_end(self) -> None:
        self._end_log.cancel()
        self._end_log = call_later(_NOTICE_SECS, self._log_wait_for_end)

    def _log_wait_for_end(self) -> None:
        what = "a caller has waited %s s for the end of %s"
        logger.warning(what, _NOTICE_SECS, self.status())

    def _cancel_tasks(self) -> None:
        self.coordinator.cancel_tasks("the session was cancelled while it was closed")

    # -- what the session can be used for

    def should_stop(self) -> bool:
        """Return whether a stop was requested, or the session is not open."""
        return self.requests.stopped or self.phase != "open" or self.gave_up is not None

    def raise_if_not_entered(self) -> None:
        """Raise if the session was never entered, or belongs to another loop."""
        if self.phase == "new":
            raise SessionClosedError("this session was not entered; use `async with`")
        self.coordinator.bind()

    def _raise_if_not_closable(self) -> None:
        """Raise if the session cannot be closed yet, or its end would wait for the caller."""
        self.raise_if_not_entered()
        if self.phase == "opening":
            raise SessionClosedError(
                "this session is still opening; raise an error in the hook to end it"
            )
        self._raise_if_nested("aclose")
        task = current_task()
        if task in self.coordinator.all_tasks:
            raise NestedRunError(
                f"aclose was called from the background task {task.get_name()!r} of the same"
                " session, which would deadlock; use request_stop to end the session"
            )

    def _raise_if_nested(self, method: str) -> None:
        """Raise if the caller is itself part of a run in progress of this session, or of its
        end.
        """
        if not self.coordinator.is_part_of_call():
            return
        where = "the end" if self.phase == "closing" else "a run"
        raise NestedRunError(
            f"{method} was called from inside {where} of the same session, which would deadlock; in"
            " a hook use run_context.session, and request_stop to end"
        )

    def _raise_if_unusable(self) -> None:
        """Raise if no run can begin now: the session is not open, or was stopped, has failed, or
        belongs to another loop.
        """
        self.raise_if_not_entered()
        is_hook = self.coordinator.is_part_of_call()
        if self.phase == "closing" and not is_hook:
            raise StopRequestedError("the session has ended")
        if self.phase != "open":
            how = "a hook runs the raw session that it was given" if is_hook else "make a new one"
            raise SessionClosedError(f"this session is {self.phase}; {how}")
        if self.gave_up is not None:
            raise RecoveryExhaustedError(
                f"recovery has given up on {self.gave_up!r}; leave the session's block"
            ) from self.gave_up
        if self.coordinator.ending_failures:
            self.coordinator.raise_requested_exception()
        if self.requests.stopped:
            raise StopRequestedError(self.requests.stop_reason)

    # -- what it is doing; `task`, `owner` and `awaited` are its entry in the registry of activity

    def status(self) -> SessionStatus:
        """Return the current activities; waits for nothing."""
        return status_of(self)

    @property
    def task(self) -> asyncio.Task[Any] | None:
        """The task that makes a run, which waits for the session then."""
        return self.turns.runner

    @property
    def owner(self) -> object:
        """No other session."""
        return None

    def awaited(self) -> Awaited:
        """Return the session for the wait-for graph.

        It waits for the task of its run, or between runs for the task of its block.
        """
        runner = self.turns.runner
        task = runner or self.entered_by
        tasks = [] if task is None else [task]
        return Awaited(
            "session",
            self.requests.label,
            summary_of(self),
            lambda: tasks,
            self if self._publisher is None else self._publisher.key,
            needs="any" if runner is None else "all",  # other tasks may run it
            ends=False,
        )

    def _awaited_turn(self) -> Awaited:
        return Awaited("turn", "its turn to run", by=lambda: [self.awaited()])

    def _awaited_pause(self, secs: float) -> Awaited:
        return Awaited(
            "recovery",
            f"the pause of {secs_text(secs)} before recovery {self.recoveries}",
            f"what failed, oldest first: {'; '.join(self.history.failures)}",
        )


class Turns:
    """The turns of the runs of one session, which come in the order in which they were asked for,
    and whose turn it is.

    Unlike with `asyncio.Lock`, taking a turn without waiting costs two attribute accesses
    (`taken`), and the number of waiters is known.
    """

    def __init__(self, waits: RunWaits, yield_secs: float | None) -> None:
        self.taken: bool = False
        """Whether a task has the turn. Set it to take a turn that is free."""
        self.runs: int = 0
        """The number of runs begun."""
        self.runner: asyncio.Task[Any] | None = None
        """The task of the run in progress."""
        self.now: Callable[[], float] = time.monotonic
        """The clock of `loop_turn_due`."""
        self.loop_turn_due: float = math.inf
        """The time from which the event loop has to have a turn before the next run."""
        self._waits = waits
        self._waiters: deque[asyncio.Future[None]] = deque()
        # With None or 0 the loop gets no turns between runs.
        self._yield_secs = yield_secs or math.inf

    async def wait(self) -> None:
        """Wait for the turn, and have it then."""
        if not self.taken:
            self.taken = True
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release()  # the turn came together with the cancellation: pass it on
            elif waiter in self._waiters:  # or passed over already
                self._waiters.remove(waiter)
            raise

    def release(self) -> None:
        """Pass the turn on to the next waiter, or free it."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self.taken = False

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def begin_attempt(self, failed: RunScope) -> RunScope:
        """Begin the next attempt of a run. Code that outlives the failed one is no part of it."""
        failed.active = False
        current_scope.set(failed.outer)
        scope = self._waits.scope = begin_run(failed.session, failed.publisher)
        scope.runner = failed.runner
        scope.committed = failed.committed
        return scope

    def end_run(self, scope: RunScope) -> None:
        """End the run, and let the next run begin."""
        self.runner = None
        self._waits.cause = None
        scope.active = False
        # Tasks that were started in the run have its scope, and must not keep its feeds alive.
        scope.attempt = None
        current_scope.set(scope.outer)
        if self._waiters:
            self.release()
        else:
            self.taken = False  # a call fewer in each run
        # Last: observers get a scope that has ended.
        if scope.observers:
            scope.end_attempt()

    # -- the turns of the event loop

    async def let_loop_turn(self) -> None:
        """Let the loop have a turn, if it is due."""
        if self.now() > self.loop_turn_due:
            for _ in range(_TURN_PASSES):
                await asyncio.sleep(0)
            self.set_loop_turn_due()

    def set_loop_turn_due(self) -> None:
        """Let the next turn be due when the time for it is over."""
        self.loop_turn_due = self.now() + self._yield_secs


class EndErrors:
    """The errors of the end of a session: which is raised, and what becomes of the others.

    KeyboardInterrupt and SystemExit win; then a cancellation of the caller; then the error of the
    block or of a background task; then those of `end`, then those of `close`. One that means a
    clean end is raised only if there is no failure. The others are logged, and are notes or the
    context of the one that is raised.
    """

    def __init__(self, label: str, primary: BaseException | None) -> None:
        """Begin with the error with which the block was left, if it is no clean end."""
        self.primary: BaseException | None = primary
        self.gives_way: bool = primary is not None and is_clean_end(primary)
        """Whether the failure of a background task is raised instead of the primary error: that is
        one of `end`, or a clean end of the opening, which code around the session may swallow.
        """
        self.others: list[BaseException] = []
        """The errors of hooks, tasks and parts."""
        self.cancel: asyncio.CancelledError | None = None
        """The latest cancellation of the closing itself, which other code has made."""
        self._label = label

    def take_single(self, phase: str) -> BaseException | None:
        """Return the errors of hooks as one error, and forget them."""
        errors = list(self.others)
        self.others.clear()
        if len(errors) > 1:
            return BaseExceptionGroup(f"{len(errors)} failures in {phase}", flattened(errors))
        return errors[0] if errors else None

    def put_first(self, failure: BaseException) -> None:
        """Make the failure of a background task the primary error."""
        if self.primary is not None:
            self.others.insert(0, self.primary)
        self.primary = failure
        self.gives_way = False

    def outcome(self, raised: BaseException | None = None) -> BaseException | None:
        """Return the error that is raised in the end. Note the others on it, and log them.

        Args:
            raised: the interruption of the end, usually a cancellation of the caller.
        """
        outcome = self._chosen(raised)
        if outcome is None:
            return self.take_single("close")
        self.keep(outcome)
        for error in self.others:
            if error is not outcome:
                add_note(outcome, f"and then: {safe_repr(error)}")
                what = "%s: closing failed after %s"
                logger.error(what, self._label, safe_repr(outcome), exc_info=error)
        self.others.clear()
        return outcome

    def _chosen(self, raised: BaseException | None) -> BaseException | None:
        """Choose the error that wins, or None if there are at most errors of `close`."""
        for error in (raised, self.primary, *self.others):
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                return error
        if raised is not None or self.primary is None:
            return raised
        if is_clean_end(self.primary):
            # Code around the session may swallow it, and the failure of a `close` with it.
            failures = (error for error in self.others if not is_clean_end(error))
            return next(failures, self.primary)
        return self.primary

    def keep(self, raised: BaseException) -> None:
        """Log the primary error if `raised` is raised instead, and make it the context of that."""
        error = self.primary
        if error is None or error is raised:
            return
        is_cancel = isinstance(error, asyncio.CancelledError)
        # Code around this session gets a cancellation as well, and knows of it.
        if not is_cancel:
            logger.error(
                "%s: %s, and then %s",
                self._label,
                _reason(error),
                safe_repr(raised),
                exc_info=error,
            )
        if raised.__context__ is None:
            set_context(raised, error)
        elif raised.__context__ is not error and not is_cancel:
            add_note(raised, f"before that, {_reason(error)}")

    def log_late(self) -> None:
        """Log the errors of a closing that others do not wait for any more."""
        for error in self.others:
            what = "%s: closing failed, after the session had ended"
            logger.error(what, self._label, exc_info=error)


@contextlib.contextmanager
def _part(errors: EndErrors) -> Generator[None]:
    """Close a part of the session in this block, and keep its error for the end."""
    try:
        yield
    except asyncio.CancelledError as cancel:
        errors.cancel = cancel
    except BaseException as error:
        errors.others.append(error)


def _reason(error: BaseException) -> str:
    """Return the reason of the stop that follows an error."""
    if isinstance(error, asyncio.CancelledError):
        return "the session was cancelled"
    return f"the session failed: {safe_repr(error)}"
