"""Background tasks, the stop, the drain before it, the pause and the first error, shared by
everything inside a session.

    Requests          the stop, the drain and the pause of one session, and the waits that they end
    RequestMethods    the methods by which a session and its coordinators are stopped, drained and
                      paused
    TasksOwner        what the coordinators of one session share: its tasks and their failures
    Coordinator       starts and ends tasks, and begins waits; usable alone
    SessionWait       a wait that a stop ends, and perhaps a drain or the end of its producers

A session has one coordinator for its lifetime, the lasting one, and one for each raw session. A
task that was started with the first is lasting: it lives through recoveries. A task of the second
ends with its raw session. The docstring of the package defines owner, owed, deliver and others.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from typing import Any, TypeAlias, TypeVar, TypeVarTuple
from weakref import WeakSet

from aiohooks._core.activity import (
    Awaited,
    Observer,
    RunScope,
    active,
    current_scope,
    leave_run,
    logger,
    wait_log,
)
from aiohooks._core.calls import Wait, close_unawaited
from aiohooks._core.clock import (
    NO_TIMER,
    TimerHandle,
    current_clock,
    wait_until_woken,
    wake,
)
from aiohooks._core.validate import InitRequired, check_callable, check_instance, check_secs
from aiohooks._core.waits import (
    DEFAULT_GRACE_SECS,
    current_task,
    leave_behind,
    new_task,
    running_loop,
)
from aiohooks._why.tasks import Task, describe_awaitable, is_task, links_of, task_wait
from aiohooks.errors import (
    InvalidArgumentError,
    NestedRunError,
    ProducerFinishedError,
    SessionClosedError,
    StopRequestedError,
    WrongLoopError,
    add_note,
    add_origin,
    flattened,
    is_clean_end,
    raise_unchanged,
    safe_repr,
)
from aiohooks.session.creators import NEVER, RecoveryPolicy
from aiohooks.session.status import (
    EffectRecorder,
    SessionEvents,
    SessionStatus,
    background_activities,
)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Producer: TypeAlias = Task | Iterable[Task]
"""The task that a wait depends on, or several."""
Producers: TypeAlias = tuple[Task, ...]

_FIRST_CHECK_SECS = 0.05
"""How long after a stop it is first checked whether all remaining tasks wait for queues. The pause
before each further check is twice as long.
"""
_background_of: contextvars.ContextVar[tuple[Coordinator, ...]] = contextvars.ContextVar(
    "aiohooks_background", default=()
)
"""The coordinators whose background tasks have started the current code, the innermost last. Tasks
inherit them with the context, so they are known in tasks that a background task has started, too.
"""


class Requests:
    """The stop, the drain before it and the pause of one session, and the waits that these end.

    A stop and a drain have two parts. `record_...` notes the request immediately, in any thread or
    signal handler, so that `should_stop` shows it. `begin_...` then ends the waits, in the loop.
    """

    def __init__(self) -> None:
        self.label: str = "coordinator"
        """The name of the session for messages."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop of the session, from its first use in a loop on (`Coordinator.bind`)."""
        self.stopped: bool = False
        """Whether a stop was requested, or the session has ended."""
        self.stop_reason: str | None = None
        self.drain_reason: str | None = None
        self.pause_reason: str | None = None
        self.waits: dict[SessionWait[Any], None] = {}
        """The waits in progress, in the order of their beginnings."""
        self.waiters: dict[asyncio.Future[None], Callable[[], bool]] = {}
        """Futures that wait until a condition on the requests or the tasks holds, by future."""
        self._is_draining = False
        """Whether `begin_drain` has ended the waits."""
        self._drain_timer: TimerHandle = NO_TIMER
        """Requests a stop when the drain takes too long."""

    # -- the stop

    def request_stop(self, reason: str | None = None) -> None:
        """Request a stop, from any thread. The first reason is kept."""
        check_instance(reason, str, "reason", optional=True)
        if not self.stopped:
            self.record_stop(reason)
            self.call_in_loop(self.begin_stop)
        elif self.stop_reason is None:
            # The session has ended normally, without a reason. This one is the first.
            self.stop_reason = reason

    def record_stop(self, reason: str | None) -> None:
        """Record a stop, from any thread or signal handler.

        The waits continue until `begin_stop` or `end_waits` is called in the loop.
        """
        # Set the reason first: another thread that sees the stop then also sees its reason.
        self.stop_reason = self.stop_reason or reason or "a stop was requested"
        self.stopped = True

    def record_end(self, reason: str | None = None) -> None:
        """Record why the session ends, without stopping anything yet.

        If a stop was requested, its reason stays. Otherwise it is that of a drain, or else
        `reason`.
        """
        self.stop_reason = self.stop_reason or self.drain_reason or reason

    def begin_stop(self) -> None:
        """Log the reason of the stop, and end the waits.

        A failure that stops the session does not come here: it is raised, so it is not logged.
        """
        logger.info("%s: stopping: %s", self.label, self.stop_reason)
        self.end_waits()

    def end_waits(self) -> None:
        """End the waits with the error of the stop."""
        self._drain_timer.cancel()
        self.wake_waiters()
        for wait in tuple(self.waits):
            wait.end(self.stop_error())

    def stop_error(self) -> StopRequestedError:
        """Return the error that a stop, a drain or the end of the session raises in a wait."""
        return StopRequestedError(self.stop_reason or self.drain_reason or "the session has ended")

    # -- the drain

    def request_drain(self, reason: str | None) -> None:
        """Request a drain, from any thread; the first reason is kept."""
        check_instance(reason, str, "reason", optional=True)
        if not self.stopped:
            self.record_drain(reason)
            self.call_in_loop(self.begin_drain)

    def record_drain(self, reason: str | None) -> None:
        """Record a drain, from any thread or signal handler. The waits continue until `begin_drain`
        is called in the loop.
        """
        self.drain_reason = self.drain_reason or reason or "a drain was requested"

    def limit_drain(self, secs: float) -> None:
        """Request a stop when the drain has taken `secs` from now. The first limit is kept."""
        if self.stopped or self._drain_timer is not NO_TIMER:
            return
        reason = f"{self.drain_reason}, and the drain took longer than {secs} s"
        stop_session = functools.partial(self.request_stop, reason)
        self._drain_timer = current_clock().call_later(secs, stop_session)

    def begin_drain(self) -> None:
        """If a drain was requested, and has not begun: end a pause, and the waits that a drain
        ends.
        """
        if self.drain_reason is None or self.stopped or self._is_draining:
            return
        self._is_draining = True
        logger.info("%s: draining: %s", self.label, self.drain_reason)
        self.resume()
        self.wake_waiters()
        # For these waits, a drain is the stop.
        for wait in tuple(self.waits):
            if wait.ends_at_drain:
                wait.end(self.stop_error())

    # -- the pause

    def pause(self, reason: str | None) -> None:
        """Begin a pause, from any thread. The first reason is kept."""
        check_instance(reason, str, "reason", optional=True)
        if self.pause_reason is None:
            self.pause_reason = reason or "a pause was requested"
            self.call_in_loop(self._pause_changed)

    def resume(self) -> None:
        """End the pause, if there is one, from any thread."""
        if self.pause_reason is not None:
            self.pause_reason = None
            self.call_in_loop(self._pause_changed)

    def _pause_changed(self) -> None:
        change = "resumed"
        if self.pause_reason is not None:
            change = f"paused: {self.pause_reason}"
        logger.info("%s: %s", self.label, change)
        self.wake_waiters()

    # -- the loop

    def call_in_loop(self, callback: Callable[[], None]) -> None:
        """Call `callback` in the loop: immediately from a task of this loop, otherwise soon.

        This is safe in any thread and signal handler.
        """
        loop = self.loop
        if loop is None:
            # There is no wait to end: every wait sets the loop first (`bind`), and then checks the
            # requests.
            return
        if loop is running_loop() and asyncio.current_task() is not None:
            callback()
        elif not loop.is_closed():
            # The caller is in another thread, or a signal handler. That may have interrupted the
            # loop while it waits for events, and only the thread-safe method ends this wait.
            loop.call_soon_threadsafe(callback)

    def wake_waiters(self) -> None:
        """Wake the waiters whose conditions hold."""
        for waiter, condition in self.waiters.items():
            if condition():
                wake(waiter)


class RequestMethods(InitRequired, abc.ABC):
    """The methods of a session, and of its coordinators, by which it is stopped, drained and
    paused.
    """

    requests: Requests
    """The requests themselves: for the library."""

    @abc.abstractmethod
    def should_stop(self) -> bool:
        """Return whether a stop was requested."""

    @property
    def stop_reason(self) -> str | None:
        """Why a stop was requested, or else why the session ended: its failure, a drain, or the
        exception of a clean end.

        This is the first reason. It is None if you left the block without an exception and without
        a stop.
        """
        return self.requests.stop_reason

    def request_drain(self, reason: str | None = None) -> None:
        """Finish current work, start nothing new, and then stop. You may call this from any thread.

        - Loops over `session.steps` use the elements that are already prefetched or queued, and
          read no others. When all these loops have ended, a stop is requested.
        - A loop of your own continues. Check `should_drain()` in it.
        - Producers that do not check for a drain are cancelled, with a warning.
        - Waits in `until(..., drain=True)` and a pause end.
        - A background task that ends cleanly does not stop the others.

        The first reason is kept, and is the reason of the stop, too. After a stop this has no
        effect.
        """
        self.requests.request_drain(reason)

    def should_drain(self) -> bool:
        """Return whether to start nothing new: a drain or a stop was requested. This never waits or
        raises.
        """
        note_own_end_in_drain()
        return self.requests.drain_reason is not None or self.should_stop()

    @property
    def drain_reason(self) -> str | None:
        """Why the session drains, or drained before its stop, or None if no drain was requested."""
        return self.requests.drain_reason

    def pause(self, reason: str | None = None) -> None:
        """Start no run of the session until `resume`. A run in progress finishes. You may call this
        from any thread.

        The next run waits. Everything else continues: background tasks, the prefetching of feeds,
        the writes of checkpoints. In a pause, a further call keeps the first reason. A stop, a
        failed background task or the end of the session ends the pause.
        """
        self.requests.pause(reason)

    def resume(self) -> None:
        """End the pause, if there is one, from any thread."""
        self.requests.resume()

    @property
    def pause_reason(self) -> str | None:
        """Why the session is paused, or None if it is not."""
        return self.requests.pause_reason


@dataclasses.dataclass(slots=True)
class Failure:
    """The failure of a background task.

    Attributes:
        error: the error of the task.
        is_lasting: whether the task was to live through recoveries. No recovery can undo its
            failure. It undoes the failure of a raw session's task by replacing the raw session.
        is_owed: whether the session must still raise the error. It owes the first failure, and the
            first one from which it does not recover. The others are only logged.
    """

    error: BaseException
    is_lasting: bool
    is_owed: bool


class TasksOwner:
    """The owner of background tasks: all that the coordinators of one session share.

    It has the tasks, their failures and the requests, and decides what a failure ends. A session is
    the owner of its tasks, as a `Lifecycle`. The owner of a coordinator that is used alone is an
    object of this class itself: it makes no runs and never recovers.
    """

    grace_secs: float = DEFAULT_GRACE_SECS
    """How long cleanup may take, and how long tasks may continue after a stop."""
    effects: EffectRecorder | None = None
    """The hook that records and delivers the effects of the runs."""
    policy: RecoveryPolicy = NEVER
    """From which errors the session recovers."""

    def __init__(self, coordinator: Coordinator | None = None) -> None:
        """Begin without tasks. `coordinator` is the lasting coordinator, by default a new one."""
        self.requests: Requests = Requests()
        self.failures: list[Failure] = []
        """The failures so far, in the order of their occurrence. A recovery removes those that it
        undoes.
        """
        self.observers: list[Observer] = []
        """Notified of activities outside of the session's runs, and of all waits in `until`."""
        self.events: SessionEvents = SessionEvents()
        """The events by which the session's hooks meet."""
        self.tasks: dict[Task, Coordinator] = {}
        """The tasks that have not ended, each with the coordinator that has started it, in the
        order of their start.
        """
        self.cancelled_tasks: WeakSet[Task] = WeakSet()
        """The tasks that a coordinator has cancelled."""
        self.producers: WeakSet[Task] = WeakSet()
        """The tasks that waits in `until` have named as their producers."""
        self.closed: bool = False
        """Whether the session is ending: it neither replaces its raw session any more, nor lets the
        clean end of a task become the reason of its stop.
        """
        self.coordinator: Coordinator = coordinator or Coordinator.of(self)
        """The lasting coordinator: its tasks live through recoveries."""
        self.raw_coordinator: Coordinator = self.coordinator
        """The coordinator whose tasks end with the latest raw session. Before the first raw session
        it is the lasting coordinator.
        """

    def begin_raw_session(self) -> None:
        """Make the coordinator of a new raw session. Forget the failures of tasks of the previous
        raw session, which the new one undoes.
        """
        self.raw_coordinator = Coordinator.of(self)
        self.failures = [failure for failure in self.failures if failure.is_lasting]

    def start_recovery(self) -> None:
        """Start a task that recovers from the failure of a task, unless the session already
        recovers.
        """

    def log_wait_for_end(self) -> None:
        """After a second, log what the session waits for, unless it has closed by then."""

    def end_run(self, cause: BaseException, /) -> None:
        """End the run in progress, if there is one."""

    def end_run_of_failed_task(self, error: BaseException, /) -> None:
        """End the run in progress because a task has failed with `error`."""

    def status(self) -> SessionStatus | None:
        """Return the current activities."""
        return None

    def until(self, awaitable: Awaitable[T], /) -> Awaitable[T]:
        """Return a wait for an awaitable, for code of a hook, which a stop of the session ends."""
        return awaitable

    # -- the code that this is part of

    def starter(self) -> Coordinator | None:
        """Return the coordinator whose background task has started this code, directly or not.

        None means that the code is not part of any background task of this session.
        """
        for coordinator in reversed(_background_of.get()):
            if coordinator.owner is self:
                return coordinator
        return None

    def _scope(self) -> RunScope | None:
        """Return the scope of the attempt, or of the end, of this session in which this code was
        started. The attempt may have ended since.
        """
        owner: Any = self
        scope = current_scope.get()
        while scope is not None and scope.session is not owner:
            scope = scope.outer
        return scope

    def is_part_of_call(self) -> bool:
        """Return whether this code is part of a run in progress of the session, or of its end:
        usually it is code of a hook or an operation.
        """
        scope = self._scope()
        return scope is not None and scope.active

    def enter_raw_session(self) -> None:
        """Make the current context part of the raw session's tasks, for a background call of a
        hook.
        """
        _background_of.set((*_background_of.get(), self.raw_coordinator))

    # -- failures

    @property
    def errors(self) -> list[BaseException]:
        """The errors of the tasks that have failed so far, in the order of their occurrence."""
        return [failure.error for failure in self.failures]

    def failures_in(self, raised: BaseException | None) -> list[Failure]:
        """Return the failures whose error is `raised`, or a member of the group `raised`."""
        return [failure for failure in self.failures if _is_in(failure.error, raised)]

    def is_recoverable(self, error: BaseException) -> bool:
        """Return whether a new raw session can help against an error.

        It can if the policy lists the error. But it cannot start a lasting task again, so the
        failure of such a task is not recoverable.
        """
        if any(failure.is_lasting for failure in self.failures_in(error)):
            return False
        return self.policy.recovers(error)

    def root_cause(self, error: BaseException) -> BaseException:
        """Choose between the error of a run and the failure of a background task, which may be its
        cause.

        The first failure of a task is chosen if it or the error of the run is recoverable. If
        neither is, the error of the run is chosen: the code in the run may have raised it because
        of the failure. The other error becomes a note of the chosen one, or is logged.
        """
        if not self.errors or self.errors[0] is error or is_clean_end(error):
            return error
        chosen = self.errors[0]
        hidden = error
        note = f"the run failed with it: {safe_repr(hidden)}"
        if not self.is_recoverable(chosen) and not self.is_recoverable(error):
            chosen = error
            hidden = self.errors[0]
            note = f"a background task had failed before: {safe_repr(hidden)}"
        if not add_note(chosen, note):
            logger.error("%s: %s", self.requests.label, note, exc_info=hidden)
        return chosen

    @property
    def ending_failures(self) -> list[BaseException]:
        """The failures from which the session does not recover, in the order of occurrence."""
        return [failure for failure in self.errors if not self.is_recoverable(failure)]

    def record_error(self, error: BaseException, what: str, coordinator: Coordinator) -> None:
        """Record the error with which a task has ended: a clean end is a stop, and any other error
        a failure.

        Args:
            error: the error.
            what: the task and its end, for messages.
            coordinator: the coordinator of the task.
        """
        if self._is_recorded(error, is_lasting=coordinator.is_lasting):
            return
        requests = self.requests
        if is_clean_end(error):
            # A task that ends because its producers have ended leaves the stop to them.
            is_stop = not (coordinator.has_no_caller or is_end_of_producers(error))
            # At the end of the session, this must not become the reason of its stop.
            if is_stop and not self.closed:
                requests.request_stop(f"{what}: {safe_repr(error)}")
        elif coordinator.has_no_caller:
            reason = coordinator.ending_reason
            logger.error("%s: %s, after %s", requests.label, what, reason, exc_info=error)
        else:
            self._record_failure(error, what, is_lasting=coordinator.is_lasting)

    def _is_recorded(self, error: BaseException, *, is_lasting: bool) -> bool:
        """Return whether an error is recorded as a failure already.

        The same error may come several times: `until` raises the failure of a task in other tasks,
        which may fail with it. It counts once. But if a lasting task fails with the error of a task
        that does not last, as it does when it has made a recovery that gives up, the failure is
        recorded again, as lasting.

        Args:
            error: the error.
            is_lasting: whether the task that has failed with it now is lasting.
        """
        records = [failure for failure in self.failures if failure.error is error]
        if is_lasting:
            return any(failure.is_lasting for failure in records)
        return bool(records)

    def _record_failure(self, error: BaseException, what: str, *, is_lasting: bool) -> None:
        """Record a failure. It ends the waits and the run, and stops a session that does not
        recover from it.

        Only two failures end anything: the first one, and the first one from which the session does
        not recover. So another recoverable failure does not interrupt a recovery.
        """
        requests = self.requests
        description = f"{what}: {safe_repr(error)}"
        first = next(iter(self.errors), None)
        had_ended = bool(self.ending_failures)
        failure = Failure(error, is_lasting=is_lasting, is_owed=False)
        self.failures.append(failure)
        is_end = not self.is_recoverable(error)
        if is_end and not requests.stopped:
            requests.record_stop(description)
        if first is None or (is_end and not had_ended):
            failure.is_owed = True
            requests.call_in_loop(functools.partial(self._end_waits_and_run, error))
        # The session raises the first failure. A later one becomes a note of it, and is logged.
        # This comes after the waits have ended, because to log an error calls its own methods.
        if first is not None:
            add_note(first, f"then {description}")
            logger.error("%s: %s after another failure", requests.label, what, exc_info=error)

    def _end_waits_and_run(self, failure: BaseException) -> None:
        """End the waits and the run in progress because of a failure.

        If the session recovers from it, a lasting wait continues, and starts the recovery.
        """
        requests = self.requests
        # The tasks in `wait_for_stop` and the like check again what they wait for.
        requests.wake_waiters()
        recovers = self.is_recoverable(failure)
        for wait in tuple(requests.waits):
            if recovers and wait.is_lasting:
                # Further calls do nothing while a recovery is in progress.
                self.start_recovery()
            else:
                wait.end(failure)
        self.end_run_of_failed_task(failure)

    def note_delivery(self, error: BaseException) -> None:
        """Note that `error` is raised to the current code. If it is a failure of a background task,
        the session does not owe it any more.

        A failure is owed until it is raised to code outside of the session's own tasks, which can
        handle it. If the current code is part of a background task, the failure stays owed.
        """
        is_outside = self.starter() is None
        if is_outside:
            for failure in self.failures_in(error):
                failure.is_owed = False

    def note_delivery_outside(self, error: BaseException) -> None:
        """Do the same as `note_delivery`, unless the current code is part of a run or of the end of
        the session, such as a hook, or was started there: a failure stays owed then, too.
        """
        if self._scope() is None:
            self.note_delivery(error)

    def take_owed(self, primary: BaseException | None) -> list[BaseException]:
        """Return the errors that the session still owes at its end, and mark all as not owed.

        The errors from which it does not recover come first. Errors that `primary`, the error that
        the end raises, is or contains are left out.
        """
        owed: list[BaseException] = []
        for failure in self.failures:
            if failure.is_owed and not _is_in(failure.error, primary):
                owed.append(failure.error)
            failure.is_owed = False
        # False sorts first. The order of equal errors stays.
        return sorted(owed, key=self.is_recoverable)

    def owe_again(self, outcome: BaseException | None) -> None:
        """Owe the failures in `outcome` again if the current code, which has closed the session and
        gets this error, is itself a background task or a hook.

        Such code cannot handle it, so the session's block must raise the error, too.
        """
        if self.starter() is not None or self._scope() is not None:
            for failure in self.failures_in(outcome):
                failure.is_owed = True


class Coordinator(RequestMethods):
    """Coordinates tasks that stop together. Every session has a coordinator, and you can use your
    own.

    A stop takes effect immediately, keeps its first reason, and is never withdrawn. A task that
    fails also requests a stop, and its error ends every wait in `until`. A clean-end error
    (`OutOfRangeError`, ...) is only a stop.

    A session has a new coordinator after each recovery. A stop that you request from it stops the
    whole session. The previous coordinator starts no more tasks, and its waits continue as waits of
    the session.
    """

    def __init__(self) -> None:
        """Start without tasks, not stopped."""
        self._belong_to(TasksOwner(self))

    @classmethod
    def of(cls, owner: TasksOwner) -> Coordinator:
        """Return a new coordinator of an owner: for the library."""
        coordinator = cls.__new__(cls)
        coordinator._belong_to(owner)
        return coordinator

    def _belong_to(self, owner: TasksOwner) -> None:
        """Set the attributes: the owner, three of its parts, and the state of this coordinator."""
        self.owner: TasksOwner = owner
        self.requests: Requests = owner.requests
        self.observers: list[Observer] = owner.observers
        self.events: SessionEvents = owner.events
        self.joined: bool = False
        """Whether a `join` has completed."""
        self._ending_reason: str | None = None
        """Why this coordinator starts no task any more, or None while it does."""
        self._is_disowned = False
        """Whether `disown` was called: it starts no task, and its errors are only logged."""

    @property
    def is_lasting(self) -> bool:
        """Whether this is the lasting coordinator, whose tasks live through recoveries."""
        return self is self.owner.coordinator

    # -- the stop

    def request_stop(self, reason: str | BaseException | None = None) -> None:
        """Request a stop. The first reason is kept. You may call this from any thread or signal
        handler, any number of times.

        Args:
            reason: a text, or an error, which counts as the failure of a task.

        Raises:
            BaseException: the error itself, if `join` has returned already, so that the error is
                not lost.
        """
        if not isinstance(reason, BaseException):
            self.requests.request_stop(reason)
        elif self.joined and not is_clean_end(reason):
            raise reason
        else:
            self.owner.record_error(reason, "reported", self)

    def should_stop(self) -> bool:
        """Return whether a stop was requested, or the raw session was replaced, so that its tasks
        end. This never waits or raises.
        """
        return self.requests.stopped or self._is_disowned

    async def wait_for_stop(self, timeout: float | None = None) -> bool:
        """Wait until a stop is requested, for at most `timeout` seconds. Return whether it was."""
        return await self._wait_for(self.should_stop, timeout)

    # -- the drain

    def end_producers(self, producers: Producers) -> None:
        """In a drain, cancel these producers and those of all waits in `until`, except producers
        that end by themselves.
        """
        for task in {*producers, *self.owner.producers}.difference(_ending_in_drains):
            if task.done():
                continue
            # From now on the task ends in any case: a further call must not cancel it again.
            _ending_in_drains.add(task)
            logger.warning(
                "%s: the drain cancels the producer %r; an element that it holds is lost: let it"
                " wait for the next one with until(..., drain=True)",
                self.requests.label,
                task.get_name(),
            )
            task.cancel(f"a drain ends this producer: {self.drain_reason}")

    # -- the pause

    async def wait_for_resume(self) -> None:
        """Wait until the session is not paused.

        Each run does this before it begins. Call it in a task that prepares data, so that the task
        pauses as well.

        Raises:
            StopRequestedError: a stop was requested, which is a clean end of a session.
            BaseException: the error of a background task that has failed, from which the session
                does not recover.
        """

        def description() -> Awaited:
            return Awaited("pause", "the end of the pause", self.pause_reason or "")

        # Another pause may begin before this task continues.
        while self.pause_reason is not None:
            end_of_pause = self._wait_for(lambda: self.pause_reason is None)
            # Reports show the wait (`active`). A stop ends it, and so does the failure of a task,
            # unless the session recovers from that (`is_lasting`).
            with active("wait", "end of the pause", description, observers=self.observers):
                await self.wait_until_ended("the end of the pause", end_of_pause, is_lasting=True)

    # -- waits

    async def until(
        self, awaitable: Awaitable[T], *, producer: Producer | None = None, drain: bool = False
    ) -> T:
        """Await something. A stop or the failure of a background task also ends the wait.

        If the wait ends early, a coroutine is cancelled, but not a task or future that you passed
        in. As in asyncio, a result that arrives together with your cancellation is lost.
        `session.steps(feeds=queue)` loses no element of a queue.

        In a task that outlives recoveries, such as a generator of feeds, a failure from which the
        session recovers does not end the wait.

        Args:
            awaitable: a coroutine, a task or a future.
            producer: the task, or the tasks, that the awaitable depends on. When all of them have
                ended and their last elements are used, the wait ends. Pass only the wait, such as
                `queue.get()`, because a coroutine that does more work after it would be
                interrupted. If the wait may outlive a recovery, so must its producers: start them
                with `session.start_soon`, not with a hook's `coord`.
            drain: whether a drain also ends the wait. Use it for a wait that starts new work, such
                as for the next message of a source.

        Returns:
            The result of the awaitable.

        Raises:
            StopRequestedError: a stop, or with `drain=True` a drain, was requested before or during
                the wait. This is a clean end of a session.
            ProducerFinishedError: the producers have finished or were cancelled. This is also a
                clean end.
            BaseException: the error of the background task or producer that failed, as the same
                object.
        """
        try:
            producers = self.checked_producers(producer)
        except Exception:
            close_unawaited(awaitable)
            raise
        if producers:
            self.owner.producers.update(producers)
        if drain or producers:
            note_own_end_in_drain()
        # A wait of a lasting task is lasting, but not a wait inside of a run, which a recovery
        # repeats.
        is_lasting_task = self.owner.starter() is self.owner.coordinator
        is_lasting = is_lasting_task and not self.owner.is_part_of_call()
        name = describe_awaitable(awaitable) if self.observers else ""
        with active("wait", name, observers=self.observers):
            return await self.wait_until_ended(
                "what `until` awaits",
                awaitable,
                producers,
                drain=drain,
                is_lasting=is_lasting,
            )

    async def wait_until_ended(
        self,
        what: str,
        awaitable: Awaitable[T],
        producers: Producers | None = None,
        *,
        drain: bool = False,
        is_lasting: bool = False,
    ) -> T:
        """Await something like `until`, without notifying the observers.

        Args:
            what: the name of the wait.
            awaitable: a coroutine, a task or a future.
            producers: the tasks that the wait depends on, from `checked_producers`. None means that
                it depends on none, and `()` that all of them have ended.
            drain: whether a drain ends the wait.
            is_lasting: whether the wait is lasting: a failure from which the session recovers does
                not end it, but starts the recovery.

        Raises:
            BaseException: the errors that `until` raises.
        """
        wait = SessionWait[T](what, producers, ends_at_drain=drain, is_lasting=is_lasting)
        try:
            self.bind()
            self._raise_if_ended(drain=drain, is_lasting=is_lasting)
            self.requests.waits[wait] = None
            wait.watch_producers()
            return await wait.result_of(awaitable)
        except BaseException as raised:
            close_unawaited(awaitable)
            self.owner.note_delivery_outside(raised)
            raise
        finally:
            wait.forget_producers()
            self.requests.waits.pop(wait, None)

    def _raise_if_ended(self, *, drain: bool, is_lasting: bool) -> None:
        """Raise if a wait must not begin, for the reason that would end the wait.

        The reason is the failure of a task, or else a stop, or, if `drain`, a drain. A lasting wait
        may begin in spite of a recoverable failure, from which this starts the recovery.
        """
        owner = self.owner
        if owner.failures:
            is_recoverable = not owner.ending_failures
            # If the raw session was closed, a recovery in progress replaces it because of the
            # failure. The waits in that recovery must begin all the same.
            is_recovering = owner.raw_coordinator.has_no_caller
            if is_recoverable and is_lasting:
                owner.start_recovery()
            elif not (is_recoverable and is_recovering):
                self.raise_requested_exception()
        starter = owner.starter()
        if starter is not None and starter._is_disowned and not starter.is_lasting:
            raise StopRequestedError(f"this task should have ended: {starter._ending_reason}")
        if self.requests.stopped or (drain and self.drain_reason is not None):
            raise_unchanged(self.requests.stop_error())

    def checked_producers(self, producer: Producer | None) -> Producers | None:
        """Check the producers of a wait that the current code begins, and return them as a tuple.

        None, for a wait that depends on no producer, stays None.

        Raises:
            InvalidArgumentError: a producer is no task, or is a task that a recovery ends, while
                the wait may continue.
        """
        if producer is None:
            return None
        given: Any = producer
        is_several = isinstance(producer, Iterable) and not is_task(producer)
        producers: Producers = tuple(given) if is_several else (given,)
        owner = self.owner
        lasting = owner.coordinator
        # Code in the session's block, or in a lasting task. A recovery does not end it.
        is_lasting_code = owner.starter() in (None, lasting) and not owner.is_part_of_call()
        # A session whose policy lists no errors never recovers.
        outlasts_recoveries = bool(owner.policy.on) and is_lasting_code
        for task in producers:
            if not is_task(task):
                close_unawaited(task)
                raise InvalidArgumentError(
                    f"producer is {safe_repr(given)}; give the task that session.start_soon"
                    " returned, or a list of tasks"
                )
            if outlasts_recoveries and owner.tasks.get(task, lasting) is not lasting:
                raise InvalidArgumentError(
                    f"producer is task {task.get_name()!r} of a hook's coordinator: a recovery ends"
                    " it, and not this wait; start the producer with session.start_soon"
                )
        return producers

    async def _wait_for(self, condition: Callable[[], bool], secs: float | None = None) -> bool:
        """Wait until `condition()` holds, for at most `secs`, and return whether it holds.

        The condition may only depend on the requests and the tasks: `Requests.wake_waiters` checks
        it when these change.
        """
        check_secs(secs, "timeout", optional=True)
        self.bind()
        if condition():
            return True
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.requests.waiters[waiter] = condition
        try:
            await wait_until_woken(waiter, secs)
        finally:
            del self.requests.waiters[waiter]
        return condition()

    def bind(self) -> None:
        """Bind the session to the running loop at its first use. Later, check that it is this loop.

        Raises:
            WrongLoopError: the session belongs to another loop, or no loop is running.
        """
        requests = self.requests
        loop = running_loop()
        if loop is None or loop is not (requests.loop or loop):
            raise WrongLoopError(
                f"{self!r} is used outside its own event loop; call only should_stop, request_stop,"
                " request_drain, pause and resume there"
            )
        if requests.loop is None:
            requests.loop = loop
            # A drain or a stop that was requested before there was a loop takes effect now.
            requests.begin_drain()
            if requests.stopped:
                requests.begin_stop()

    def status(self) -> SessionStatus | None:
        """Return the current activities of the session, or None if this coordinator is used without
        one.
        """
        return self.owner.status()

    # -- background tasks

    def start_soon(
        self, fn: Callable[[*Ts], Coroutine[Any, Any, T]], *args: *Ts, name: str | None = None
    ) -> asyncio.Task[T]:
        """Start `fn(*args)` as a task that this coordinator owns.

        If the task fails, waits end, and in a session the current `run` is cancelled and raises the
        error. A cancelled task does not count as failed.

        Returns:
            The task.

        Raises:
            SessionClosedError: the tasks are being cancelled, or the session has ended or was
                replaced. Until then, even during the grace period, you can start tasks, which end
                with the others.
        """
        check_callable(fn, "start_soon's function")
        self.bind()
        if self.ending_reason is not None:
            raise SessionClosedError(f"no task can be started any more: {self.ending_reason}")
        # The task gets a copy of the current context, in which it is part of this coordinator, but
        # not of the run in which it was started.
        context = contextvars.copy_context()
        context.run(leave_run)
        context.run(_background_of.set, (*_background_of.get(), self))
        coro: Any = context.run(fn, *args)
        task: asyncio.Task[T] = new_task(coro, name or getattr(fn, "__name__", None), context)
        self.owner.tasks[task] = self
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: Task) -> None:
        """Forget a task that has ended, and record its error. The task calls this."""
        del self.owner.tasks[task]
        # The waiters for tasks check all tasks. With thousands of tasks that would take long for
        # each of them, so only the end of this coordinator's last task wakes the waiters.
        if self not in self.owner.tasks.values():
            self.requests.wake_waiters()
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._is_expected_in_drain(error):
            add_origin(error, f"background task {task.get_name()!r}")
            how = "ended" if is_clean_end(error) else "failed"
            what = f"background task {task.get_name()!r} {how}"
            self.owner.record_error(error, what, self)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The background tasks that have not ended, in the order of their start."""
        return tuple(task for task, starter in self.owner.tasks.items() if starter is self)

    @property
    def all_tasks(self) -> list[Task]:
        """The tasks of this coordinator. The lasting coordinator has those of the raw sessions as
        well.
        """
        if self.is_lasting:
            return list(self.owner.tasks)
        return list(self.tasks)

    async def join(self, stop_grace_period_secs: float = DEFAULT_GRACE_SECS) -> None:
        """Wait until all tasks have ended, or until the grace period after a stop has passed.

        Tasks that still run are then cancelled. Warnings name the tasks that still run a second
        after the stop, and those that ignore their cancellation.

        Raises:
            NestedRunError: called from one of the tasks, so it would wait for itself.
            BaseException: the first failure of a task.
        """
        check_secs(stop_grace_period_secs, "stop_grace_period_secs")
        self.bind()
        task = current_task()
        if task in self.tasks:
            raise NestedRunError(
                f"join was called from the background task {task.get_name()!r}, which it waits for;"
                " to wait for the end there, use wait_for_stop"
            )
        await self._wait_for(lambda: not self.tasks or self.should_stop())
        try:
            with wait_log(lambda: f"{self.requests.label} to join {self.descriptions()}"):
                # Without a stop, no task is left, and this does nothing.
                await self.end_tasks(
                    stop_grace_secs=stop_grace_period_secs,
                    cancel_grace_secs=stop_grace_period_secs,
                    reason=f"a stop was requested: {self.stop_reason}",
                )
        finally:
            # `end_tasks` has set `_ending_reason`, so that no task can be started. Allow it again,
            # unless the session has ended or has replaced this coordinator.
            if not (self.owner.closed or self.has_no_caller):
                self._ending_reason = None
        self.joined = True
        self.raise_requested_exception()

    async def end_tasks(
        self,
        stop_grace_secs: float,
        cancel_grace_secs: float,
        reason: str,
    ) -> None:
        """Wait until all tasks have ended. Cancel the tasks that take too long.

        Tasks that these tasks start meanwhile are included.

        Args:
            stop_grace_secs: how long to wait before the tasks are cancelled; 0 cancels them
                immediately.
            cancel_grace_secs: how long to wait for cancelled tasks. After that they are left
                behind, with a warning.
            reason: the message of the cancellation.
        """
        if not self.all_tasks:
            return
        await self._wait_for_tasks(stop_grace_secs)
        self.cancel_tasks(reason)
        if not await self._wait_for(self._is_idle, cancel_grace_secs):
            leave_behind(self.all_tasks)
            logger.warning(
                "%s: still active %s s after their cancellation: %s",
                self.requests.label,
                cancel_grace_secs,
                self.descriptions(),
            )

    async def _wait_for_tasks(self, secs: float) -> None:
        """Wait for all tasks, for at most `secs`, or until the remaining tasks are stuck at queues.
        The caller then cancels the tasks that are left.

        They are stuck if each of them waits for a queue, in the same wait as at the check before:
        none of them can wake another, and no code outside of them has woken any between the checks.
        """
        now = current_clock().now
        ends_at = now() + secs
        pause_secs = _FIRST_CHECK_SECS
        waits_before: dict[Task, object] = {}
        # Each pause begins after the check before it, not at a fixed time: if the loop is blocked
        # for long, tasks still have a whole pause in which to use their queues.
        while (secs_left := ends_at - now()) > 0:
            if await self._wait_for(self._is_idle, min(pause_secs, secs_left)):
                return
            pause_secs *= 2
            waits = {task: _queue_wait(task) for task in self.all_tasks}
            # None stands for a task that does not wait for a queue.
            if None not in waits.values() and waits == waits_before:
                logger.info(
                    "%s: cancelled early, because no other task uses their queues: %s",
                    self.requests.label,
                    self.descriptions(),
                )
                return
            waits_before = waits

    def _is_idle(self) -> bool:
        return not self.all_tasks

    def descriptions(self) -> str:
        """Return what the tasks do."""
        return "; ".join(map(str, background_activities(self.all_tasks)))

    def cancel_tasks(self, reason: str) -> None:
        """Cancel all tasks that were not cancelled before. No task can be started from now on."""
        self._ending_reason = self._ending_reason or reason
        for task in self.all_tasks:
            if task not in self.owner.cancelled_tasks:
                self.owner.cancelled_tasks.add(task)
                task.cancel(reason)

    def close(self, failure: str | None = None) -> None:
        """Stop all tasks of a session that ends: end their waits, and let `should_stop` be true.

        `failure` is the reason of a session that has failed: its tasks are cancelled immediately.
        It becomes the reason of the stop, unless there is one already.
        """
        self.owner.closed = True
        requests = self.requests
        if failure is not None:
            self.cancel_tasks(failure)
            requests.stop_reason = requests.stop_reason or failure
        # If there is no reason of a stop, that of a drain becomes it.
        requests.record_end()
        requests.stopped = True
        requests.call_in_loop(requests.end_waits)

    def disown(self, reason: str) -> None:
        """From now on, only log the errors of the tasks, as no caller gets them any more, and
        start no further task. `reason` says why, in messages.

        A recovery does this with the coordinator of the raw session that it closes, and the end of
        the session with the lasting coordinator.
        """
        self._is_disowned = True
        self._ending_reason = self._ending_reason or reason
        # For a coordinator that is disowned, `should_stop` is true.
        self.requests.wake_waiters()

    @property
    def has_no_caller(self) -> bool:
        """Whether this coordinator or the lasting one is disowned."""
        return self._is_disowned or self.owner.coordinator._is_disowned

    @property
    def ending_reason(self) -> str | None:
        """Why no task can be started any more, or None while tasks can be started."""
        return self._ending_reason or self.owner.coordinator._ending_reason

    # -- failures

    @property
    def errors(self) -> list[BaseException]:
        """The errors of the tasks that have failed so far, in the order of their occurrence."""
        return self.owner.errors

    def raise_requested_exception(self) -> None:
        """Raise the first failure that ends the session, or else the first one, if there is one."""
        if self.errors:
            # No failure is kept in a variable: the error's traceback refers to this frame, so there
            # would be a cycle.
            self.owner.note_delivery_outside((self.owner.ending_failures or self.errors)[0])
            raise_unchanged((self.owner.ending_failures or self.errors)[0])

    @contextlib.contextmanager
    def stop_on_exception(self) -> Generator[None]:
        """Catch an error of the block, and request a stop with it, as if a task had failed. `join`
        raises it later.

        A cancellation, `KeyboardInterrupt` and the like propagate.
        """
        try:
            yield
        except Exception as error:
            # In a drain, tasks end with such errors when they have finished their work. This is no
            # reason to stop the others.
            if not self._is_expected_in_drain(error):
                self.request_stop(error)

    def _is_expected_in_drain(self, error: BaseException) -> bool:
        """Return whether `error` is a clean end, and the session is draining."""
        return self.drain_reason is not None and is_clean_end(error)

    def __repr__(self) -> str:
        doing = "running"
        if self.should_stop():
            doing = f"stopping: {self.stop_reason}"
        elif self.drain_reason is not None:
            doing = f"draining: {self.drain_reason}"
        names = ", ".join(task.get_name() for task in self.tasks)
        return f"<Coordinator {doing}, tasks: {names or 'none'}>"


def _is_in(error: BaseException, raised: BaseException | None) -> bool:
    """Return whether `raised` is the object `error`, or a group that contains it at any depth."""
    if raised is error:
        return True
    if not isinstance(raised, BaseExceptionGroup):
        return False
    group: Any = raised  # pyright: ignore[reportUnknownVariableType]
    return any(_is_in(error, member) for member in group.exceptions)


# -- the producers of a wait: tasks without which it would never end

_ending_in_drains: WeakSet[Task] = WeakSet()
"""The tasks that end by themselves in a drain: they check for one, or depend on producers."""
_MOST_PASSES = 5
"""How many iterations of the loop a wait still has when its producers have ended. It needs several
to get their last elements: a notified waiter may have to wake another one, or to take a lock.
"""


def note_own_end_in_drain() -> None:
    """Note that the current task ends by itself in a drain."""
    task = None if running_loop() is None else asyncio.current_task()
    if task is not None:
        _ending_in_drains.add(task)


class SessionWait(Wait[T]):
    """A wait that a stop, the failure of a task, or the end of its producers ends.

    When the producers have ended, the wait has a few iterations of the loop to get the elements
    that they have left.
    """

    __slots__ = ("_producers", "_unfinished", "ends_at_drain", "is_lasting")

    def __init__(
        self,
        what: str,
        producers: Producers | None,
        *,
        ends_at_drain: bool,
        is_lasting: bool,
    ) -> None:
        """Prepare the wait. Without producers (None) it depends on none. With `()` all of them have
        ended already.
        """
        super().__init__(what)
        self.ends_at_drain: bool = ends_at_drain
        self.is_lasting: bool = is_lasting
        """Whether the wait belongs to code that lives through recoveries. The failure of a task
        from which the session recovers does not end it, but starts the recovery.
        """
        self._producers = producers
        self._unfinished = {producer for producer in producers or () if not producer.done()}

    def watch_producers(self) -> None:
        """End the wait when all producers have ended, until `forget_producers`."""
        for producer in self._unfinished:
            producer.add_done_callback(self._note_end)
        if self._producers is not None and not self._unfinished:
            self._end_after(_MOST_PASSES)

    def forget_producers(self) -> None:
        """Remove the callbacks of `watch_producers`."""
        for producer in self._unfinished:
            producer.remove_done_callback(self._note_end)

    def _note_end(self, producer: Task) -> None:
        """Note that a producer has ended. The last one ends the wait."""
        self._unfinished.discard(producer)
        if not self._unfinished:
            self._end_after(_MOST_PASSES)

    def _end_after(self, passes: int) -> None:
        """End the wait after `passes` iterations of the loop."""
        if passes:
            asyncio.get_running_loop().call_soon(self._end_after, passes - 1)
        else:
            # This has no effect if the wait is over by now.
            self.end(_end_of(self._producers or ()))


def _end_of(producers: Producers) -> BaseException:
    """Return the error with which the end of these producers ends a wait: the failure of one of
    them, or else a clean end.
    """
    for producer in producers:
        error = None if producer.cancelled() else producer.exception()
        if error is not None and not is_clean_end(error):
            return error
    names = ", ".join(repr(producer.get_name()) for producer in producers)
    return ProducerFinishedError(f"ended, or cancelled: producer {names}")


def is_end_of_producers(error: BaseException) -> bool:
    """Return whether the error says that producers have ended.

    A task that ends with it has finished its work, because it has used all that they produced. So
    this is no reason to stop the session, unlike another clean end.
    """
    return all(isinstance(member, ProducerFinishedError) for member in flattened([error]))


# -- tasks that wait for queues

_Queue: Any = asyncio.Queue
_QUEUE_METHODS = frozenset({_Queue.put.__code__, _Queue.get.__code__, _Queue.join.__code__})


def _queue_wait(task: Task) -> object:
    """Return the future of a task that waits in a method of an `asyncio.Queue`, and for any other
    task None.

    It is also None if the task is in a `with` block, as that may be a time limit, after which the
    task continues by itself.
    """
    from aiohooks._why.sources import held_by  # seldom needed

    frames = task_wait(task).frames
    if not frames or frames[-1].f_code not in _QUEUE_METHODS or [*held_by(task)]:
        return None
    _, waiter = links_of(task)[-1]
    is_waiting = asyncio.isfuture(waiter) and not waiter.done()
    return waiter if is_waiting else None
