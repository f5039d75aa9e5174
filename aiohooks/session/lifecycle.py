"""One session from its opening to its end.

Read it downward. Each method calls the layer below it:

    open        call `begin` of the hooks, create the raw session, call `after_create_session`
    run         wait for the turn, and decide what follows an attempt that failed
    recover     close the failed raw session, pause, create another one
    close       call `end` of the hooks, end the background tasks, close the raw session, call
                `close` of the hooks

`Turns` has the turns of the session's runs, and `EndErrors` decides which error of its end is
raised. The module `creators` has the policy of recoveries. The base class `TasksOwner` chooses the
root cause of a failure, and its `is_recoverable` is the one place that decides whether a new raw
session can help. The docstring of the package defines the words: turn, scope, attempt, give up and
others.
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
    now_function,
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
    TasksOwner,
)
from aiohooks.session.creators import (
    ChiefSessionCreator,
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
"""If the end of a session takes longer than this, the log shows what the end waits for."""
_FLUSH_SECS = 5.0
"""How long the end waits for the step store to publish to other processes that this session has
left.
"""
_SHOWN_ATTEMPTS = 20
"""How many failed attempts, the latest, an error and a report show."""
DEFAULT_YIELD_SECS = 0.005
"""The default of `yield_secs`: when the event loop has had no loop turn for this long, it gets one
before the next run.
"""
_TURN_PASSES = 3
"""The iterations of the event loop that make one loop turn. In the first the loop finds an event,
in the second it calls the event's callback, in the third the task that waited for it continues.
"""


class Lifecycle(TasksOwner):
    """Opens, runs, recovers and closes one monitored session.

    It owns the raw session, and the background tasks of its two coordinators (`TasksOwner`).
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
        """Make the parts of the session. Only `open` starts anything."""
        super().__init__()
        self.name: str | None = name
        self.graph: Graph = creator.graph
        self.grace_secs = grace_secs
        self.phase: str = "new"
        """"new", "opening", "open", "closing" or "closed"."""
        self.thread: int = 0
        """The thread that runs the session's loop. Each run compares it with its own thread, which
        costs less than to look up the running loop.
        """
        self.policy = policy
        self.session: Session | None = None
        """The raw session. It is None before the first one, while it is being replaced, after a
        recovery that was cancelled, and at the end.
        """
        self.store: StepStore | None = None
        """The step store of all raw sessions."""
        self.run_raw: GatheredRun
        """Makes a run of the raw session as part of a monitored run."""
        self.run_waits: RunWaits = RunWaits(owner=self)
        """What the run in progress awaits. To end these waits is to end the run."""
        self.turns: Turns = Turns(self.run_waits, yield_secs)
        self.hooks: HookSet = HookSet(self, hooks, self.graph)
        self.feeds: SessionFeeds = SessionFeeds(self.coordinator, self.run_waits)
        self.recoveries: int = 0
        """The number of recoveries begun."""
        self.recovering_from: BaseException | None = None
        """The error from which the session is recovering now, if it is."""
        self._recovery: asyncio.Task[None] | None = None
        """The task that recovers on behalf of lasting waits. A run recovers in its own task."""
        self._has_hurried = False
        """Whether a stop has ended a pause of a recovery, or has let one be left out. It does so
        once: see `_pause`.
        """
        self.gave_up: BaseException | None = None
        """The error with which recovery gave up, or with which the session has failed. While there
        is one, no run can begin.
        """
        self._failed_attempts: list[str] = []
        """The attempts that failed since the last progress, as text, oldest first."""
        self._failed_step = 0
        """The highest step whose run has failed. Progress is to complete it, or a later one."""
        self._creator = creator
        self._monitor = Monitor(
            grace_secs, lambda: self.hooks.stateful, self.feeds.state_of, self.hooks.drain_stateful
        )
        self._publisher: Publisher | None = None
        """The session's registration as a publisher of steps."""
        self.entered_by: asyncio.Task[Any] | None = None
        """The task that has entered the session's block, until the session is closed."""
        self.phase_began_at: float | None = None
        """The time of the current clock at which the phase began. None stands for "new"."""
        self._is_closed = asyncio.Event()
        self._end_log: TimerHandle = NO_TIMER
        """The timer that logs what the session waits for, after a signal and when it closes."""
        self._at_end = contextlib.ExitStack()
        """What to undo when the session closes: it releases the hooks and the graph, and removes
        the signal handlers.
        """

    def _enter_phase(self, phase: str) -> None:
        """Begin a phase. From the opening to the end, reports of activity show the session."""
        self.phase = phase
        self.phase_began_at = current_clock().now()
        if phase == "closed":
            self._end_log.cancel()
            OPEN_SESSIONS.pop(self, None)
            # Remove the entry that `enter` has made in the registry of activity.
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
        self.run_waits.now = now_function()
        try:
            self._at_end.callback(self.hooks.release)
            if signals is not None:
                self._at_end.callback(signals.install())
            with self.graph.as_default():
                with assigned(opening_events, self.events):
                    await self.hooks.begin()
                self._at_end.callback(held(self.graph))
                await self._create_first_session()
        except BaseException as error:
            await self._close_unopened(error)
        self._enter_phase("open")
        self.turns.set_loop_turn_due()

    def _register_publisher(self, store: StepStore | None) -> None:
        """Register a session that trains as a publisher of steps, once its store is known.

        This is called before the raw session is created, when `store` may be None, and again after
        it. A registered session is not registered again.
        """
        if self._publisher is None and isinstance(store, StepStore) and self.graph.trains:
            name = self.name or current_task().get_name()
            if self.name is None and not store.inline:
                # Other processes use the same store, and each has a task of the name "Task-1".
                name += f" of process {os.getpid()} on {socket.gethostname()}"
            self._publisher = store.publisher(name)
            self._publisher.session = self.awaited

    async def _create_first_session(self) -> None:
        """Create the first raw session, with as many attempts as the policy allows."""
        store = getattr(self._creator, "global_step", None)
        is_worker = isinstance(self._creator, WorkerSessionCreator)
        if getattr(store, "inline", True) or not is_worker:
            # A worker of a chief in another process registers later: until the chief has
            # initialized the run, it publishes nothing.
            self._register_publisher(store)
        try:
            # A `Wait`, so that a CancelledError that a function of the scaffold has raised is an
            # error of the creation, and no cancellation of the caller.
            creating = self._create_session(ends_at_drain=True)
            await Wait[Session]("creating a session").result_of(creating)
        except StoreRefusedError:
            # At the start, the password or the address is wrong, and another attempt cannot help.
            # Only in a later recovery may it be an outage, of a server that moves.
            raise
        except BaseException as error:
            if not self.is_recoverable(error):
                raise
            await self._replace_session(error, None)
        self._register_publisher(self.store)
        if self.session is not None:
            warn_if_not_saved(self.session, self.graph)

    async def _create_session(self, *, ends_at_drain: bool = False) -> Session:
        """Create a raw session, and give it to the hooks and the feeds.

        Args:
            ends_at_drain: whether a drain ends the creator's waits for other processes. A stop does
                so in any case.
        """
        with opening_until(functools.partial(self.coordinator.until, drain=ends_at_drain)):
            session = await self._creator.create_session()
        self.session = session
        self.run_raw = monitored_run(session, self._monitor)
        if self.closed:
            # The session was closed while its creator worked, and the creator has ignored that its
            # task was cancelled.
            await self._close_raw_session("the session was closed")
            raise SessionClosedError("the session was closed while a raw session was created")
        self.store = session.global_step
        self.begin_raw_session()
        if session.restored is not None:
            restore_hooks(session, session.restored)
            checkpoint = session.restored.checkpoint
            await self.events.restored.emit(checkpoint.step, checkpoint.path)
        # The feeds are restored already, and give the elements in use again. Note this before the
        # hooks are called, because a hook may fail.
        self.feeds.note_new_session(session, self.recovering_from)
        await self.hooks.after_create_session(session, self.raw_coordinator)
        if session.finished is not None:
            self.coordinator.request_stop(str(session.finished))
        self.feeds.continue_reading()
        return session

    # -- run

    def begin_run(self) -> RunScope:
        """Begin a run in the current task, and take the turn, unless this task has waited for it.

        Only call this when the turn is free, or this task has it.

        Raises:
            BaseException: the reason why no run can begin, as in `_raise_if_unusable`.
        """
        if (
            self.phase != "open"
            or get_ident() != self.thread
            or self.gave_up is not None
            or self.requests.stopped
        ):
            self._raise_if_unusable()
        task = asyncio.current_task(self.requests.loop)
        if task is None:
            # The caller runs in another loop of the same thread, and this raises the error.
            self.raise_if_not_entered()
            task = current_task()
        if current_scope.get() is not None:
            # Also if the turn is free: code of a hook that runs between two runs, such as that of a
            # save, may be awaited by the next run.
            self._raise_if_nested("run")
        turns = self.turns
        # Hot path: a method of `turns` for these statements would cost each run a call.
        turns.taken = True
        turns.runner = task
        turns.runs += 1
        waits = self.run_waits
        waits.began = None
        scope = waits.scope = begin_run(self, self._publisher)
        scope.runner = id(task)
        return scope

    async def wait_for_turn(self) -> RunScope:
        """Wait until a run can begin, and begin it.

        The wait is for the loop turn, if one is due, for the runs of other tasks, and for the end
        of a pause.
        """
        turns = self.turns
        await self.give_loop_turn()
        if not turns.taken:
            return self.begin_run()
        self._raise_if_nested("run")
        self._raise_if_unusable()
        with active("wait", "turn to run", self._awaited_turn, observers=self.observers):
            await turns.wait()
        try:
            await self.coordinator.wait_for_resume()
            return self.begin_run()
        except BaseException:
            turns.release()
            raise

    async def give_loop_turn(self) -> None:
        """Let the event loop have a loop turn, if it is due, and wait for the end of a pause.

        Call it before a run begins. If the loop turn came after a run, a cancellation that arrives
        in it would lose the result of a committed run. During a pause, this raises a stop that is
        requested, and the error of a background task that fails.
        """
        if (
            self.phase != "open"
            or get_ident() != self.thread
            or asyncio.get_running_loop() is not self.requests.loop
        ):
            # `begin_run` raises the error.
            return
        await self.turns.let_loop_turn()
        await self.coordinator.wait_for_resume()

    async def session_for_run(self) -> Session:
        """Return the raw session for an attempt, and create one if there is none.

        There is none after a recovery that was cancelled.

        Raises:
            BaseException: the failure of a background task, or of the creation.
        """
        if self.failures:
            raise self.failures[0].error
        return self.session or await self._create_session_in_run()

    @property
    def _needs_recovery(self) -> bool:
        """Whether the next run would create a raw session before it begins: a task has failed, or
        a cancelled recovery has left no raw session.
        """
        if self.session is None:
            return True
        # The first failure counts: it ends the next run.
        return bool(self.failures) and self.is_recoverable(self.failures[0].error)

    async def recover_if_needed(self) -> None:
        """Recover as the next run would, for a caller that needs a raw session but makes no run."""
        if self._needs_recovery:
            # `session_for_run` creates a missing raw session, or raises the failure of the task.
            # From that failure `repeat` recovers, as from that of a run.
            await self.repeat(lambda _: self.session_for_run())

    async def repeat(self, attempt: Callable[[RunScope], Awaitable[T]]) -> T:
        """Take a turn to run, and call `attempt` again after each recovery until it succeeds.

        Unlike in `run` of the session, which has this loop as well, an attempt that fails is
        repeated even if it was committed.
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
        """Start a task that recovers on behalf of lasting waits, unless a recovery is in progress.

        The code in a lasting wait makes no run that would recover, such as a loop that waits for
        its next feed.
        """
        is_started = self._recovery is not None and not self._recovery.done()
        if self.phase == "open" and self.recovering_from is None and not is_started:
            self._recovery = self.coordinator.start_soon(
                self._recover_in_background, name="recovery"
            )

    async def _recover_in_background(self) -> None:
        """Recover for lasting waits, as a run would (`start_recovery`).

        If a run is in progress, this waits until it has ended. That run may have recovered by then.
        """
        try:
            await self.recover_if_needed()
        except (SessionClosedError, StopRequestedError):
            # The end of the session has interrupted the recovery: that is no failure of this task.
            if self.phase != "open":
                return
            raise

    async def handle_failure(self, scope: RunScope, error: BaseException) -> bool:
        """Recover from the error of an attempt, or raise the error with which its run ends.

        This is called for every failed attempt.

        Args:
            scope: the scope of the attempt.
            error: the error that left the attempt.

        Returns:
            True if the run is complete, because the attempt had been committed and the recovery has
            kept the commit. False if the caller has to make another attempt.

        Raises:
            BaseException: `error`, if the session does not recover from it; the failure of a
                background task that is the cause of `error`; or the last error, with the history as
                notes, when the policy gives up.
        """
        # This comes before `end_attempt`, which removes the attempt from its scope.
        commit = self._commit_to_keep(scope)
        scope.end_attempt(error)
        # The error by which other code has ended the run, if it has. The next attempt, or the
        # recovery, must not be ended by it again.
        cause = self.run_waits.cause
        self.run_waits.cause = None
        try:
            is_interruption = isinstance(error, (asyncio.CancelledError, FeedsWentBack))
            if is_interruption or (error is cause and not self.failures_in(error)):
                # The run has not failed. It was ended from outside: by its caller, a signal, the
                # end of the session, or a recovery that has restored its feeds.
                raise_unchanged(error)
            error = self.root_cause(error)
            if self.is_recoverable(error):
                return await self._recover(error, commit)
            self.note_delivery(error)
            if isinstance(error, StopRequestedError):
                # Code in the run has raised it without a request. Request the stop, so that
                # `stop_reason` has its text, unless there is an earlier reason.
                self.requests.request_stop(str(error))
            raise_unchanged(error)
        except BaseException:
            # A lasting wait outlives this run, whose recovery may have been cancelled or have given
            # up. Without a raw session nothing reads feeds, so a wait for the next feed would never
            # end. Another recovery succeeds, and reading continues, or its failure ends the wait.
            if self._needs_recovery and any(wait.is_lasting for wait in self.requests.waits):
                self.start_recovery()
            raise
        finally:
            # The traceback of the raised error refers to this frame. A reference back would be a
            # cycle, which only the garbage collector frees.
            del error, cause

    def _commit_to_keep(self, scope: RunScope) -> Position | None:
        """Return the position of the commit of a failed attempt, if its run must not be repeated.

        An attempt may fail after its commit, in `after_run` for example. If its element is from
        tracked feeds, another attempt would use the element twice, so a recovery keeps the commit.
        In any other case, this returns None.
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

    def end_run_of_failed_task(self, error: BaseException) -> None:
        """End the run in progress because a task has failed.

        Two failures do not end it: that from which the run is recovering, and, while the recovery
        has closed the old raw session, that of a task which ends with it anyway.

        Args:
            error: the error of the task, which is recorded in `failures`.
        """
        if error is self.recovering_from:
            return
        is_replacing_session = self.session is None
        is_lasting = any(failure.is_lasting for failure in self.failures_in(error))
        if is_lasting or not is_replacing_session:
            self.end_run(error)

    def until(self, awaitable: Awaitable[T], /) -> Awaitable[T]:
        """Return an awaitable for code in a run, which a stop of the session also ends."""
        if self.phase != "open":
            # When the session ends, its hooks may still wait, although it was stopped.
            return awaitable
        return self.raw_coordinator.wait_until_ended("a wait in a run", awaitable)

    # -- recover

    async def _recover(self, error: BaseException, commit: Position | None) -> bool:
        """Replace the raw session after the `error` of a run.

        Args:
            error: the root cause.
            commit: the position of a commit to keep, if there is one.

        Returns:
            Whether there is a commit to keep, and the new raw session has it.
        """
        # The step of the run that failed. It stays None if there is no raw session, after a
        # recovery that was cancelled: then the creation of a raw session has failed.
        step = None
        if commit is not None:
            step = commit.step
        elif self.session is not None:
            step = self.session.global_step.latest.step + 1
        self.recovering_from = error
        what = f"recovery from {type(error).__name__}"
        try:
            with active("recovery", what, observers=self.observers):
                await self._replace_session(error, step)
        except BaseException as raised:
            self.recovering_from = None
            self.note_delivery(raised)
            raise
        finally:
            # As in `handle_failure`: no cycle of the error and this frame.
            del error
        self.recovering_from = None
        if commit is None or not self._has_commit(commit):
            return False
        self.feeds.keep_element_of_run()
        return True

    def _has_commit(self, commit: Position) -> bool:
        """Return whether the state of the new raw session contains a commit of the previous one."""
        if self.session is None:
            return False
        if self.session.restored is not None:
            # Its state is that of a checkpoint, which may be older than the commit.
            return self.session.restored.checkpoint.step >= commit.step
        # It continues with the variables in memory. They have the commit unless the step was reset.
        latest = self.session.global_step.latest
        return latest.epoch == commit.epoch and latest.step >= commit.step

    async def _replace_session(self, error: BaseException, step: int | None) -> None:
        """Close the raw session and create another one, repeatedly until that succeeds.

        Whatever ends the run ends the recovery, too. The exception is a recoverable failure of a
        task that hooks have started in the new raw session: this is another failed attempt.

        Args:
            error: the error to recover from.
            step: the step of the run that raised the error, or None if the creation of a raw
                session did.

        Raises:
            BaseException: the error with which the recovery gives up, or that is not recoverable.
        """
        try:
            while True:
                description = safe_repr(error)
                gives_up = self._begin_recovery(error, description, step)
                await self._close_raw_session(f"recovering from {description}")
                if gives_up:
                    raise_unchanged(error)
                await self._pause()
                # A task of the whole session may have failed: during the pause, or together with
                # the error that is recovered from. No new raw session helps against that.
                if self.ending_failures:
                    raise_unchanged(self.ending_failures[0])
                try:
                    await self._create_session_in_run()
                    return
                except BaseException as next_error:
                    # If the failure of a new task has ended the creation, it must not end the next.
                    self.run_waits.cause = None
                    if not self.is_recoverable(next_error):
                        raise
                    error = next_error
                    step = None
        finally:
            # As in `handle_failure`: no cycle of the error and this frame.
            del error

    def _begin_recovery(self, error: BaseException, description: str, step: int | None) -> bool:
        """Count and log a failure, and return whether the session gives up recovering.

        It does if the policy allows no further attempt. Then `error` gets as notes what failed, and
        `gave_up` has the error from now on.

        Args:
            error: the error.
            description: its text for the log and the notes.
            step: the step of the failed run, or None for a failed creation.
        """
        where = "creating a session"
        if step is not None:
            where = f"the run of step {step}"
            self._failed_step = max(step, self._failed_step)
        self._failed_attempts.append(f"{where}: {description}")
        label = self.requests.label
        limit = self.policy.max_attempts
        if len(self._failed_attempts) <= limit:
            self.recoveries += 1
            logger.warning("%s: recovering from %s", label, description)
            return False
        reason = f"{limit} attempts are used up"
        logger.error("%s: recovery gave up: %s", label, reason, exc_info=error)
        self.gave_up = error
        add_note(error, f"recovery gave up: {reason}; what failed, oldest first:")
        for failed_attempt in self._failed_attempts[-_SHOWN_ATTEMPTS:]:
            add_note(error, f"  {failed_attempt}")
        return True

    def note_progress(self, step: int) -> None:
        """Note that the run of `step` is complete. If this is progress, forget what has failed."""
        if step >= self._failed_step:
            self._failed_attempts.clear()
            self._failed_step = 0

    async def _pause(self) -> None:
        """Pause before the next attempt to create a raw session, as long as the policy says.

        So that a stopped session ends soon, a stop ends the current pause, or else the next pause
        is left out. This happens once: if the attempt after it fails, too, further pauses are made
        in full, and give the missing service time to return.
        """
        secs = self.policy.backoff.pause_secs(len(self._failed_attempts))
        is_stopped = self.requests.stopped
        hurries = is_stopped and not self._has_hurried
        if secs > 0 and not hurries:
            # After a stop, `wait_for_stop` would return immediately.
            pause = sleep(secs) if is_stopped else self.coordinator.wait_for_stop(secs)
            with active("recovery", "pause", functools.partial(self._awaited_pause, secs)):
                await Wait[Any]("a recovery", waits=self.run_waits).result_of(pause)
        self._has_hurried = self.requests.stopped

    async def _close_raw_session(self, reason: str) -> None:
        """Close the raw session, if there is one, after its tasks and background calls.

        Errors of the closing are only logged, because the session reports the error for which it
        is closed.
        """
        session = self.session
        if session is None:
            return
        # A store that has lost its data shows a lower step than the session has committed.
        reached_step = max(session.global_step.latest.step, session.committed_step)
        # A recovery may go back to an earlier checkpoint. The feeds then report how many steps are
        # undone, and whether their elements are lost.
        self.feeds.note_loss(session, reached_step)
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
        # Background calls of `after_run` still use this raw session.
        try:
            if self.hooks.has_background:
                await self.hooks.background.finish(self.grace_secs)
            await self.feeds.stop_reading()
        finally:
            # If a cancellation has ended one of these waits, this raw session is replaced, too.
            coordinator.disown("its session was replaced")
        if coordinator.all_tasks:
            with wait_log(lambda: f"{label} to recover: {coordinator.descriptions()}"):
                await coordinator.end_tasks(0, self.grace_secs, reason)
        try:
            await session.aclose()
        except Exception as error:
            logger.warning("%s: closing its raw session failed", label, exc_info=error)

    async def _create_session_in_run(self) -> Session:
        """Create a raw session on behalf of a run. If the run is ended, so is the creation.

        A run needs a new raw session during a recovery. After a recovery that was cancelled, the
        next run needs it before it begins.
        """
        wait = Wait[Session]("creating a session", waits=self.run_waits)
        try:
            return await wait.result_of(self._create_session())
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                # Perhaps only some hooks have got the new raw session, so no run can use it. Close
                # it: the next run creates another one.
                await self._close_raw_session("its creation was cancelled")
            elif not self.is_recoverable(error) and not is_clean_end(error):
                # Again only some hooks may have got it, and another attempt cannot help: let no
                # run begin. After a clean end, the raw session stays open for `end` of the hooks.
                self.gave_up = error
            raise

    # -- close

    async def close(self, error: BaseException | None) -> bool:
        """End the session, or wait until another caller has ended it.

        Args:
            error: the error that left the session's block, if there is one.

        Returns:
            Whether the block swallows the error: it does so with a clean end, unless the end of the
            session has an error of its own.

        Raises:
            BaseException: the error of the end, as `EndErrors` chooses it.
        """
        is_swallowed = error is not None and is_clean_end(error)
        primary = None if is_swallowed else error
        errors = EndErrors(self.requests.label, primary)
        if self.phase != "closed":
            self._raise_if_not_closable()
        if self.phase in ("closing", "closed"):
            await self._wait_until_closed(primary)
            # If a background task has closed the session, it has got the failures of other tasks.
            # They are still owed (`owe_again`), and this caller gets them.
            self._take_task_failures(errors)
            outcome = errors.settle()
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
        self.owe_again(outcome)
        if outcome is None:
            return is_swallowed
        if outcome is error:
            return False
        raise_unchanged(outcome)

    async def _close_unopened(self, error: BaseException) -> None:
        """Close a session that could not be opened. Raise `error`, or the error of the end that
        comes before it.
        """
        if is_clean_end(error):
            self.requests.record_end()
        with self._closing():
            outcome = await self._close(EndErrors(self.requests.label, error)) or error
            self._note_outcome(outcome)
        raise_unchanged(outcome)

    def _note_outcome(self, outcome: BaseException | None) -> None:
        """Keep the error of a session that has ended with a failure: its status shows it."""
        if isinstance(outcome, Exception) and not is_clean_end(outcome):
            self.gave_up = outcome

    async def _wait_until_closed(self, error: BaseException | None) -> None:
        """Wait until another task has ended the session.

        `error` is the error that has left the block, if any. If this wait is cancelled, the
        cancellation is raised instead of it, and it is logged.
        """
        if self.phase == "closed":
            return
        label = self.requests.label
        try:
            await shielded(
                self._is_closed.wait(),
                grace_secs=self.grace_secs,
                what=f"the wait for the end of {label}",
            )
        except asyncio.CancelledError as cancelled:
            EndErrors(label, error).keep_primary(cancelled)
            raise

    @contextlib.contextmanager
    def _closing(self) -> Generator[None]:
        """Let the session be closing in this block, and closed after it, whatever happens."""
        outer = current_run()
        scope_before = current_scope.get()
        self._enter_phase("closing")
        # A paused run may have the turn, for which the end of the session waits. So end the pause.
        self.requests.resume()
        # With a scope, the hooks that the end calls are known as parts of it: a hook that closes
        # the session gets an error instead of a deadlock.
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
        """Wait for the last run, and call `end` of the hooks after a clean end.

        No error leaves this. `errors` keeps them, so that the session is closed in any case.
        """
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
            errors.primary = errors.take_others("end")
            errors.gives_way = True
        except BaseException as raised:
            errors.primary = errors.settle(raised)

    async def _wait_for_last_run(self, *, immediately: bool) -> None:
        """Wait for the run in progress in another task, if there is one.

        Args:
            immediately: whether to interrupt the run first. Otherwise it may finish within the
                grace period.
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
        """Take the turn after the last run, so that no other run can begin. Interrupt the run after
        the grace period.
        """
        # The run has the grace period to finish, and the same time again to end when it is
        # interrupted.
        for _ in range(2):
            with contextlib.suppress(TimeoutError):
                return await limited(self.turns.wait(), self.grace_secs, "the last run")
            self._interrupt_run()
        what = "%s: run still active %s s after its cancellation; closing anyway"
        logger.warning(what, self.requests.label, self.grace_secs)

    def _interrupt_run(self) -> None:
        """End the run in progress because of the end of the session."""
        self.end_run(SessionClosedError("the session was closed during this run"))

    def _take_task_failures(self, errors: EndErrors) -> None:
        """Take the failures of background tasks that the session still owes.

        The first failure that ends the session becomes the primary error, if there is none that
        comes before it. The other failures are logged, and are notes of the primary error.
        """
        what = f"{self.requests.label}: a background task failed"
        for failure in self.take_owed(errors.primary):
            primary = errors.primary
            is_recoverable = self.is_recoverable(failure)
            if not is_recoverable and (primary is None or errors.gives_way):
                errors.put_first(failure)
            elif primary is not None:
                add_note(primary, f"a background task had failed: {safe_repr(failure)}")
                logger.error("%s", what, exc_info=failure)
            else:
                text = "%s, from which the next run would have recovered"
                logger.warning(text, what, exc_info=failure)

    async def _close(self, errors: EndErrors) -> BaseException | None:
        """Close all parts of the session in a task that is shielded from cancellation, and limited
        in time.

        Returns:
            The error that the end of the session raises, or None.

        Raises:
            CancelledError: the caller was cancelled, and no other error comes before that.
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
                    outcome = errors.settle(cancelled)
                    if outcome is cancelled:
                        raise
                    return outcome
                # If other code has cancelled the task, close the remaining parts in another one.
                if not closing.cancelled():
                    closing.result()
                    return errors.settle()

    async def _close_parts(self, errors: EndErrors) -> None:
        """Close every part that is not closed yet, even if another part fails.

        If other code cancels the task of this call, `_close` makes another call. No publisher and
        no raw session is closed twice: they are removed from this object before. The other parts
        may be closed again.
        """
        # Forget the cancellation of an earlier call.
        errors.cancel = None
        publisher = self._publisher
        self._publisher = None
        # The publisher comes first: other sessions wait for steps that this one no longer makes.
        with _collecting(errors):
            if publisher is not None:
                publisher.close(errors.primary or self.gave_up)
        # Tasks use the raw session, and hooks use tasks, session and store until their `close`.
        with _collecting(errors):
            await self._end_tasks(errors)
        session = self.session
        self.session = None
        with _collecting(errors):
            if session is not None:
                await session.aclose()
        with _collecting(errors):
            await self.hooks.close(errors.primary or self.gave_up, errors.others)
        with _collecting(errors):
            if isinstance(self._creator, ChiefSessionCreator):
                await self._creator.aclose(grace_secs=self.grace_secs)
        with _collecting(errors):
            if self.store is not None:
                await self.store.flush(_FLUSH_SECS)
        # The session counts as closed already if its caller was cancelled, and has waited no longer
        # than the grace period. No one gets these errors any more.
        if self.phase == "closed":
            errors.log_late()
        if errors.cancel is not None:
            raise errors.cancel

    async def _end_tasks(self, errors: EndErrors) -> None:
        """End the background tasks: immediately after an error, otherwise when the grace period is
        over. Take their failures.
        """
        coordinator = self.coordinator
        # If the block has caught the error with which recovery gave up, there is no primary error,
        # and yet the session has failed.
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
        """Raise if the session cannot be closed yet, or if its end would wait for the caller, which
        is part of a run or a background task of it.
        """
        self.raise_if_not_entered()
        if self.phase == "opening":
            raise SessionClosedError(
                "this session is still opening; raise an error in the hook to end it"
            )
        self._raise_if_nested("aclose")
        task = current_task()
        if task in self.tasks:
            raise NestedRunError(
                f"aclose was called from the background task {task.get_name()!r} of the same"
                " session, which would deadlock; use request_stop to end the session"
            )

    def _raise_if_nested(self, method: str) -> None:
        """Raise if the caller is part of a run in progress, or of the end, of this session: it
        would wait for itself.
        """
        if not self.is_part_of_call():
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
        is_hook = self.is_part_of_call()
        if self.phase == "closing" and not is_hook:
            raise StopRequestedError("the session has ended")
        if self.phase != "open":
            how = "a hook runs the raw session that it was given" if is_hook else "make a new one"
            raise SessionClosedError(f"this session is {self.phase}; {how}")
        if self.gave_up is not None:
            raise RecoveryExhaustedError(
                f"recovery has given up on {self.gave_up!r}; leave the session's block"
            ) from self.gave_up
        if self.ending_failures:
            self.coordinator.raise_requested_exception()
        if self.requests.stopped:
            raise StopRequestedError(self.requests.stop_reason)

    # -- what it is doing; `task`, `owner` and `awaited` are its entry in the registry of activity

    def status(self) -> SessionStatus:
        """Return the current activities; waits for nothing."""
        return status_of(self)

    @property
    def task(self) -> asyncio.Task[Any] | None:
        """The task that makes the current run. In the registry, it waits for the session."""
        return self.turns.runner

    @property
    def owner(self) -> object:
        """The session that this entry belongs to: none, as it is a session itself."""
        return None

    def awaited(self) -> Awaited:
        """Return the session for the wait-for graph.

        During a run it waits for the task that makes the run. Between runs it waits for the next
        run, which the task of its block may make, or any other task.
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
            needs="any" if runner is None else "all",
            ends=False,
        )

    def _awaited_turn(self) -> Awaited:
        return Awaited("turn", "its turn to run", by=lambda: [self.awaited()])

    def _awaited_pause(self, secs: float) -> Awaited:
        return Awaited(
            "recovery",
            f"the pause of {secs_text(secs)} before recovery {self.recoveries}",
            f"what failed, oldest first: {'; '.join(self._failed_attempts[-_SHOWN_ATTEMPTS:])}",
        )


class Turns:
    """The turns of one session: its runs begin one after another, in the order of their calls.

    This is a lock. Unlike with `asyncio.Lock`, taking a turn without waiting costs two attribute
    accesses (`taken`), and the number of waiters is known.

    It also decides when the event loop gets a loop turn between two runs.
    """

    def __init__(self, waits: RunWaits, yield_secs: float | None) -> None:
        self.taken: bool = False
        """Whether a task has the turn. To take a turn that is free, set this."""
        self.runs: int = 0
        """The number of runs begun."""
        self.runner: asyncio.Task[Any] | None = None
        """The task of the run in progress."""
        self.now: Callable[[], float] = time.monotonic
        """The clock of `loop_turn_due`."""
        self.loop_turn_due: float = math.inf
        """The time of `now` from which the event loop gets a loop turn before the next run."""
        self._waits = waits
        """The waits of the run in progress, which have the scope of its current attempt."""
        self._waiters: deque[asyncio.Future[None]] = deque()
        """The runs that wait for their turn. The turn passes to the first by its result."""
        # With None or 0 the loop gets no loop turns between runs.
        self._yield_secs = yield_secs or math.inf

    async def wait(self) -> None:
        """Wait for the turn, and take it."""
        if not self.taken:
            self.taken = True
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                # The turn has arrived together with the cancellation: pass it on.
                self.release()
            elif waiter in self._waiters:
                # Otherwise `release` has already removed it, because its future was cancelled.
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
        """The number of runs that wait for their turn."""
        return len(self._waiters)

    def begin_attempt(self, failed: RunScope) -> RunScope:
        """Begin the next attempt of a run, and return its scope.

        The scope is a new one. Tasks that were started in the failed attempt, and outlive it, keep
        the old scope, so they are no part of the next attempt.
        """
        failed.active = False
        # `begin_run` takes the scope that is set here for that around the new one.
        current_scope.set(failed.outer)
        scope = begin_run(failed.session, failed.publisher)
        scope.runner = failed.runner
        scope.committed = failed.committed
        self._waits.scope = scope
        return scope

    def end_run(self, scope: RunScope) -> None:
        """End the run, whose latest attempt has `scope`, and let the next run begin."""
        self.runner = None
        self._waits.cause = None
        scope.active = False
        # Tasks that were started in the run keep its scope, which must not keep its feeds alive.
        scope.attempt = None
        current_scope.set(scope.outer)
        if self._waiters:
            self.release()
        else:
            # Hot path: `release` would do the same, and cost each run a call.
            self.taken = False
        # The observers come last, so that they get a scope that has ended.
        if scope.observers:
            scope.end_attempt()

    # -- the turns of the event loop

    async def let_loop_turn(self) -> None:
        """Let the event loop have a loop turn, if it is due."""
        if self.now() > self.loop_turn_due:
            for _ in range(_TURN_PASSES):
                await asyncio.sleep(0)
            self.set_loop_turn_due()

    def set_loop_turn_due(self) -> None:
        """Set the time at which the next loop turn is due, counted from now."""
        self.loop_turn_due = self.now() + self._yield_secs


class EndErrors:
    """The errors of the end of a session, of which it raises one.

    The order is: KeyboardInterrupt or SystemExit, a cancellation of the caller, the error of the
    block or of a background task, the errors of `end`, the errors of `close`. An error that means a
    clean end is raised only if there is no failure. The other errors are logged, and become notes
    or the context of the raised error.
    """

    def __init__(self, label: str, primary: BaseException | None) -> None:
        """Begin with the error of the block or of the opening, or with None after a clean end."""
        self.primary: BaseException | None = primary
        """The error to raise, unless another one comes before it."""
        self.gives_way: bool = primary is not None and is_clean_end(primary)
        """Whether the failure of a background task comes before the primary error. It does if the
        primary error is from `end`, or is a clean-end error of the opening, which code around the
        session may swallow.
        """
        self.others: list[BaseException] = []
        """The errors of hooks, tasks and parts, besides the primary error."""
        self.cancel: asyncio.CancelledError | None = None
        """The cancellation of the task that closes the session, by other code, if there was one."""
        self._label = label

    def take_others(self, phase: str) -> BaseException | None:
        """Remove the errors besides the primary one, and return them as one error, or None.

        Several errors become a group. `phase` is "end" or "close", for its message.
        """
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

    def settle(self, raised: BaseException | None = None) -> BaseException | None:
        """Choose the error to raise, and return it, or None. Log the other errors, and add them to
        it as notes.

        Args:
            raised: the error that has interrupted the end of the session, usually a cancellation of
                the caller.
        """
        chosen = self._chosen(raised)
        if chosen is None:
            # There are only errors of `close`, if any. They are raised together.
            return self.take_others("close")
        self.keep_primary(chosen)
        for error in self.others:
            if error is not chosen:
                add_note(chosen, f"and then: {safe_repr(error)}")
                what = "%s: closing failed after %s"
                logger.error(what, self._label, safe_repr(chosen), exc_info=error)
        self.others.clear()
        return chosen

    def _chosen(self, raised: BaseException | None) -> BaseException | None:
        """Return the error to raise, or None if there are only errors of `close`.

        The order is that of the class: an error that ends the program, what has interrupted the end
        (`raised`), the primary error.
        """
        for error in (raised, self.primary, *self.others):
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                return error
        if raised is not None:
            return raised
        if self.primary is None:
            return None
        if is_clean_end(self.primary):
            # Code around the session may swallow a clean end, and the failure of a `close` would
            # be lost with it. So such a failure is raised instead.
            failures = (error for error in self.others if not is_clean_end(error))
            return next(failures, self.primary)
        return self.primary

    def keep_primary(self, raised: BaseException) -> None:
        """Keep the primary error if `raised` is raised instead of it.

        It is logged, and becomes the context of `raised`, or a note if that has another context.
        """
        error = self.primary
        if error is None or error is raised:
            return
        is_cancel = isinstance(error, asyncio.CancelledError)
        # A cancellation is not logged: code around this session is cancelled as well, and knows.
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
        """Log the errors of a closing for which no caller waits any more."""
        for error in self.others:
            what = "%s: closing failed, after the session had ended"
            logger.error(what, self._label, exc_info=error)


@contextlib.contextmanager
def _collecting(errors: EndErrors) -> Generator[None]:
    """Add an error of this block, which closes a part of the session, to `errors`, so that the next
    part is closed as well.
    """
    try:
        yield
    except asyncio.CancelledError as cancel:
        errors.cancel = cancel
    except BaseException as error:
        errors.others.append(error)


def _reason(error: BaseException) -> str:
    """Return the reason of the stop by which an error ends the background tasks."""
    if isinstance(error, asyncio.CancelledError):
        return "the session was cancelled"
    return f"the session failed: {safe_repr(error)}"
