"""Background tasks, the stop, the drain before it, the pause and the first error, shared by
everything inside a session.

    Requests          the stop, the drain and the pause of one session, and the waits that they end
    RequestMethods    the methods of these that a session and its coordinators have in common
    Coordinator       background tasks and their failures; usable alone
    SessionWait       a wait that a stop ends, and perhaps a drain or the end of its producers
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import contextvars
import copy
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
    wait_woken,
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

_FIRST_LOOK_SECS = 0.05
"""When to look first, after a stop, whether all remaining tasks wait for queues. The pause before
each further look is twice as long.
"""
_background_of: contextvars.ContextVar[tuple[Coordinator, ...]] = contextvars.ContextVar(
    "aiohooks_background", default=()
)
"""The coordinators of whose tasks the current code is part, also in a task of its own."""


class Requests:
    """The stop, the drain before it and the pause of one session, and the waits that these end.

    A request is recorded immediately, in any thread or signal handler, and takes effect in the
    loop.
    """

    def __init__(self) -> None:
        self.label: str = "coordinator"
        """The name of the session for messages."""
        self.loop: asyncio.AbstractEventLoop | None = None
        self.stopped: bool = False
        """Whether a stop was requested, or the session has ended."""
        self.stop_reason: str | None = None
        self.drain_reason: str | None = None
        self.pause_reason: str | None = None
        self.waits: dict[SessionWait[Any], None] = {}
        """The waits in progress, in the order of their beginnings."""
        self.waiters: dict[asyncio.Future[None], Callable[[], bool]] = {}
        """The waiters for a change of a request, or of the tasks, each with its condition."""
        self._is_draining = False
        self._drain_timer: TimerHandle = NO_TIMER

    # -- the stop

    def request_stop(self, reason: str | None = None) -> None:
        """Request a stop, from any thread. The first reason is kept."""
        check_instance(reason, str, "reason", optional=True)
        if not self.stopped:
            self.record_stop(reason)
            self.call_in_loop(self.begin_stop)
        elif self.stop_reason is None:
            # The session had ended without a reason.
            self.stop_reason = reason

    def record_stop(self, reason: str | None) -> None:
        """Record a stop, from any thread or signal handler; the waits continue until `begin_stop`
        or `end_waits` is called in the loop.
        """
        self.stop_reason = self.stop_reason or reason or "a stop was requested"
        # After the reason: another thread may read both in between.
        self.stopped = True

    def record_end(self, reason: str | None = None) -> None:
        """Keep why the session ends if no stop was requested: a drain, or else `reason`. Nothing is
        stopped yet.
        """
        self.stop_reason = self.stop_reason or self.drain_reason or reason

    def begin_stop(self) -> None:
        """Log the reason of the stop, and end the waits. A failure is raised, and not logged."""
        logger.info("%s: stopping: %s", self.label, self.stop_reason)
        self.end_waits()

    def end_waits(self) -> None:
        """End the waits because of the stop."""
        self._drain_timer.cancel()
        self.wake_waiters()
        for wait in tuple(self.waits):
            wait.end(self.stop_error())

    def stop_error(self) -> StopRequestedError:
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
        """Request a stop when the drain has taken `secs`. The first limit is kept."""
        if self.stopped or self._drain_timer is not NO_TIMER:
            return
        reason = f"{self.drain_reason}, and the drain took longer than {secs} s"
        stop_session = functools.partial(self.request_stop, reason)
        self._drain_timer = current_clock().call_later(secs, stop_session)

    def begin_drain(self) -> None:
        """End the waits that a drain ends, and a pause."""
        if self.drain_reason is None or self.stopped or self._is_draining:
            return
        self._is_draining = True
        logger.info("%s: draining: %s", self.label, self.drain_reason)
        self.resume()
        self.wake_waiters()
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
        """Call `callback` in the loop, from any thread, and immediately in a task of the loop."""
        loop = self.loop
        if loop is None:
            # Nothing waits: every wait sets the loop first, and then looks at the requests.
            return
        if loop is running_loop() and asyncio.current_task() is not None:
            callback()
        elif not loop.is_closed():
            # From another thread, or outside of a task: perhaps from a signal handler that has
            # interrupted the loop while it waits for events, which only this ends.
            loop.call_soon_threadsafe(callback)

    def wake_waiters(self) -> None:
        """Wake the waiters whose conditions hold."""
        for waiter, condition in self.waiters.items():
            if condition():
                wake(waiter)


class RequestMethods(InitRequired, abc.ABC):
    """The requests to a session: the same methods of the session itself and of its coordinators."""

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

        Loops over `session.steps` use the elements that are prefetched or in their queue, and read
        no others. When all these loops have ended, a stop is requested. Producers that do not look
        for a drain are cancelled, with a warning. Check `should_drain()` in a loop of your own.
        Waits in `until(..., drain=True)` end, and so does a pause. A background task that ends
        cleanly does not stop the others. The first reason is kept, and is the reason of the stop
        too. After a stop this has no effect.
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

        The next run waits. Meanwhile feeds are prefetched up to their limit, leases are renewed,
        checkpoints are written, and tasks continue. The first reason is kept. A stop, a failed
        background task or the end of the session ends the pause.
        """
        self.requests.pause(reason)

    def resume(self) -> None:
        """End the pause, if there is one, from any thread."""
        self.requests.resume()

    @property
    def pause_reason(self) -> str | None:
        """Why the session is paused, or None if it is not."""
        return self.requests.pause_reason


class TasksOwner:
    """The session of a coordinator, which is a `Lifecycle`.

    This class itself stands for the session of a coordinator that is used alone: it never runs and
    never recovers.
    """

    grace_secs: float = DEFAULT_GRACE_SECS
    """How long cleanup may take, and tasks that do not end immediately."""
    effects: EffectRecorder | None = None
    """The hook that records and delivers the effects of the runs."""
    policy: RecoveryPolicy = NEVER

    def start_recovery(self) -> None:
        """Start a task that recovers from the failure of a task, unless a run does."""

    def log_wait_for_end(self) -> None:
        """Log in a second what the session waits for, unless it has closed by then."""

    def end_run(self, cause: BaseException, /) -> None:
        """End the run in progress, if there is one."""

    def end_failed_run(self, failure: BaseException, /) -> None:
        """End the run in progress because of a failed task, unless it recovers from that."""

    def status(self) -> SessionStatus | None:
        """Return the current activities."""
        return None


@dataclasses.dataclass(slots=True)
class Failure:
    """The failure of a task.

    Attributes:
        error: what it failed with.
        lasts: whether a recovery does not undo it, as the task lives through recoveries.
        is_owed: whether the session must still raise it. The first failure is owed, and the first
            one that ends the session. The others are only logged.
    """

    error: BaseException
    lasts: bool
    is_owed: bool


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
        self.joined: bool = False
        """Whether a `join` has completed."""
        self._ending: str | None = None
        """Why no task can be started any more."""
        self._is_disowned = False
        """Whether no caller is left to raise the errors of its tasks."""
        self._whole: Coordinator = self
        """The coordinator of the tasks that live through recoveries."""
        self._raw: Coordinator = self
        """The coordinator of the raw session's tasks, or this one while there is none."""
        # A session and its raw sessions share the attributes from here on.
        self.owner: TasksOwner = TasksOwner()
        """The session that these tasks belong to: for the library."""
        self.requests: Requests = Requests()
        self.failures: list[Failure] = []
        """The failures so far, in the order of their occurrence."""
        self.observers: list[Observer] = []
        """Notified of what happens outside of the session's runs, and of all waits in `until`."""
        self.events: SessionEvents = SessionEvents()
        """The events by which the session's hooks meet."""
        self._tasks: dict[Task, Coordinator] = {}
        """The tasks that have not ended, in the order of their start."""
        self._cancelled: WeakSet[Task] = WeakSet()
        """The tasks that were cancelled from here."""
        # Only the coordinator of the whole session changes the attributes from here on.
        self.closed: bool = False
        """Whether its session is ending: for the library."""
        self._producers: WeakSet[Task] = WeakSet()
        """The tasks that waits in `until` have named as their producers."""

    def for_raw_session(self) -> Coordinator:
        """Return a coordinator for the tasks of a new raw session, which replaces the last one."""
        # The copy shares the tasks, the failures and the requests.
        raw = copy.copy(self)
        self._raw = raw
        self.failures[:] = [failure for failure in self.failures if failure.lasts]
        return raw

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
            self._record_error(reason, "reported")

    def should_stop(self) -> bool:
        """Return whether a stop was requested, or the raw session was replaced, so that its tasks
        end. This never waits or raises.
        """
        return self.requests.stopped or self._is_replaced

    @property
    def _is_replaced(self) -> bool:
        """Whether a recovery has closed the raw session of these tasks."""
        return self not in (self._whole, self._whole._raw)

    async def wait_for_stop(self, timeout: float | None = None) -> bool:
        """Wait until a stop is requested, for at most `timeout` seconds. Return whether it was."""
        return await self._wait_for(self.should_stop, timeout)

    # -- the drain

    def end_producers(self, producers: Producers) -> None:
        """Cancel these producers, and those of all waits in `until`, that do not end by themselves
        in a drain.
        """
        for task in {*producers, *self._whole._producers}.difference(_ending_in_drains):
            if task.done():
                continue
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

        def awaited() -> Awaited:
            return Awaited("pause", "the end of the pause", self.pause_reason or "")

        # Another pause may begin before this task continues.
        while self.pause_reason is not None:
            with active("wait", "end of the pause", awaited, observers=self.observers):
                await self.wait_until_ended(
                    "the end of the pause",
                    self._wait_for(lambda: self.pause_reason is None),
                    lasts=True,
                )

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
            self._whole._producers.update(producers)
        if drain or producers:
            note_own_end_in_drain()
        name = describe_awaitable(awaitable) if self.observers else ""
        with active("wait", name, observers=self.observers):
            return await self.wait_until_ended(
                "what `until` awaits",
                awaitable,
                producers,
                drain=drain,
                # A recovery repeats a run, so a wait inside of a run ends with it.
                lasts=self._starter() is self._whole and not self.is_part_of_call(),
            )

    async def wait_until_ended(
        self,
        what: str,
        awaitable: Awaitable[T],
        producers: Producers | None = None,
        *,
        drain: bool = False,
        lasts: bool = False,
    ) -> T:
        """Await like `until`, without observers.

        Args:
            what: the name of the wait.
            awaitable: a coroutine, a task or a future.
            producers: the checked producers. With `()` all have ended.
            drain: whether a drain ends the wait.
            lasts: whether a recovery does not end it.
        """
        wait = SessionWait[T](what, producers, ends_at_drain=drain, lasts=lasts)
        try:
            self.bind()
            self._raise_if_ended(drain=drain, lasts=lasts)
            self.requests.waits[wait] = None
            wait.watch_producers()
            return await wait.result_of(awaitable)
        except BaseException as raised:
            close_unawaited(awaitable)
            self._note_delivery_outside(raised)
            raise
        finally:
            wait.forget_producers()
            self.requests.waits.pop(wait, None)

    def _raise_if_ended(self, *, drain: bool, lasts: bool) -> None:
        """Raise if a wait must not begin.

        The reason is the failure of a task that would end the wait, or else a stop, or, if `drain`,
        a drain.
        """
        # There is no raw session while it recovers from such a failure.
        is_recovering = self._whole._raw is self._whole
        # No failure is in a variable: its traceback would refer to this frame, and so to itself.
        if self.ending_failures:
            raise_unchanged(self.ending_failures[0])
        if self.errors and lasts:
            self.owner.start_recovery()
        elif self.errors and not is_recovering:
            raise_unchanged(self.errors[0])
        starter = self._starter()
        if starter is not None and starter._is_replaced:
            raise StopRequestedError(f"this task should have ended: {starter._ending}")
        if self.requests.stopped or (drain and self.drain_reason is not None):
            raise_unchanged(self.requests.stop_error())

    def checked_producers(self, producer: Producer | None) -> Producers | None:
        """Return the producers of a wait.

        Raises:
            InvalidArgumentError: a producer is no task, or ends with a recovery which the wait may
                outlast.
        """
        if producer is None:
            return None
        given: Any = producer
        is_several = isinstance(producer, Iterable) and not is_task(producer)
        producers: Producers = tuple(given) if is_several else (given,)
        whole = self._whole
        is_lasting_code = self._starter() in (None, whole) and not self.is_part_of_call()
        outlasts_recoveries = bool(self.owner.policy.on) and is_lasting_code
        for task in producers:
            if not is_task(task):
                close_unawaited(task)
                raise InvalidArgumentError(
                    f"producer is {safe_repr(given)}; give the task that session.start_soon"
                    " returned, or a list of tasks"
                )
            if outlasts_recoveries and self._tasks.get(task, whole) is not whole:
                raise InvalidArgumentError(
                    f"producer is task {task.get_name()!r} of a hook's coordinator: a recovery ends"
                    " it, and not this wait; start the producer with session.start_soon"
                )
        return producers

    async def _wait_for(self, condition: Callable[[], bool], secs: float | None = None) -> bool:
        """Wait until `condition()` holds, of requests or tasks, at most `secs`. Return whether it
        does.
        """
        check_secs(secs, "timeout", optional=True)
        self.bind()
        if condition():
            return True
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.requests.waiters[waiter] = condition
        try:
            await wait_woken(waiter, secs)
        finally:
            del self.requests.waiters[waiter]
        return condition()

    def bind(self) -> None:
        """Bind the session to the running loop."""
        requests = self.requests
        loop = running_loop()
        if loop is None or loop is not (requests.loop or loop):
            raise WrongLoopError(
                f"{self!r} is used outside its own event loop; call only should_stop, request_stop,"
                " request_drain, pause and resume there"
            )
        if requests.loop is None:
            requests.loop = loop
            # One may have been requested before there was a loop.
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
        ending = self._ending or self._whole._ending
        if ending is not None:
            raise SessionClosedError(f"no task can be started any more: {ending}")
        # The task is not part of the run in which it was started.
        context = contextvars.copy_context()
        context.run(leave_run)
        context.run(_background_of.set, (*_background_of.get(), self))
        coro: Any = context.run(fn, *args)
        task: asyncio.Task[T] = new_task(coro, name or getattr(fn, "__name__", None), context)
        self._tasks[task] = self
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: Task) -> None:
        del self._tasks[task]
        # Each wait looks at all tasks: waking it for each of thousands would take long.
        if self not in self._tasks.values():
            self.requests.wake_waiters()
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._ends_in_drain(error):
            add_origin(error, f"background task {task.get_name()!r}")
            how = "ended" if is_clean_end(error) else "failed"
            self._record_error(error, f"background task {task.get_name()!r} {how}")

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The background tasks that have not ended, in the order of their start."""
        return tuple(task for task, starter in self._tasks.items() if starter is self)

    @property
    def all_tasks(self) -> list[Task]:
        """The tasks, and those of raw sessions."""
        return [task for task, starter in self._tasks.items() if self in (starter, starter._whole)]

    async def join(self, stop_grace_period_secs: float = DEFAULT_GRACE_SECS) -> None:
        """Wait until all tasks have ended, or until the grace period after a stop has passed.

        Tasks that still run are then cancelled. A warning names tasks that ignore their
        cancellation. If tasks still run a second after the stop, a warning names them too.

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
                await self.end_tasks(
                    stop_grace_period_secs,
                    stop_grace_period_secs,
                    f"a stop was requested: {self.stop_reason}",
                )
        finally:
            if not (self._whole.closed or self._has_no_caller):
                self._ending = None
        self.joined = True
        self.raise_requested_exception()

    async def end_tasks(
        self, stop_grace_secs: float, cancel_grace_secs: float, reason: str
    ) -> None:
        """Wait `stop_grace_secs`, if not 0, for all tasks, cancel them, wait `cancel_grace_secs`,
        then warn.

        Tasks that they start meanwhile are part of it. `reason` is the message of the cancellation.
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
        """Wait `secs` for all tasks, or until all that remain wait for queues, and have done so
        since the look before: none of them can wake another, and no other code has.
        """
        now = current_clock().now
        ends_at = now() + secs
        pause_secs = _FIRST_LOOK_SECS
        waits_before: dict[Task, object] = {}
        # A pause begins after the look before it: in a loop that was blocked meanwhile, tasks
        # still have the time to use their queues.
        while (secs_left := ends_at - now()) > 0:
            if await self._wait_for(self._is_idle, min(pause_secs, secs_left)):
                return
            pause_secs *= 2
            waits = {task: _queue_wait(task) for task in self.all_tasks}
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
        """Cancel all tasks, each once. No other can be started from now on."""
        self._ending = self._ending or reason
        for task in self.all_tasks:
            if task not in self._cancelled:
                self._cancelled.add(task)
                task.cancel(reason)

    def close(self, failure: str | None = None) -> None:
        """Stop all tasks of an ending session. After a failure they are cancelled immediately."""
        self.closed = True
        requests = self.requests
        if failure is not None:
            self.cancel_tasks(failure)
            requests.stop_reason = self.stop_reason or failure
        requests.record_end()
        requests.stopped = True
        requests.call_in_loop(requests.end_waits)

    def disown(self, reason: str) -> None:
        """Only log errors of tasks from now on, as no caller is left to raise them. Reject other
        tasks.
        """
        self._is_disowned = True
        self._ending = self._ending or reason
        self._whole._raw = self._whole
        self.requests.wake_waiters()

    @property
    def _has_no_caller(self) -> bool:
        """Whether the coordinator, or the whole session, is disowned."""
        return self._is_disowned or self._whole._is_disowned

    # -- the code that this is part of

    def _starter(self) -> Coordinator | None:
        """Return the coordinator of the background task of this session that this code is part
        of.
        """
        for coordinator in reversed(_background_of.get()):
            if coordinator._whole is self._whole:
                return coordinator
        return None

    def _scope(self) -> RunScope | None:
        """Return the run or the end of the session in which this code was started."""
        owner: Any = self.owner
        scope = current_scope.get()
        while scope is not None and scope.session is not owner:
            scope = scope.outer
        return scope

    def is_part_of_call(self) -> bool:
        """Return whether this code is part of a run of the session, or of its end: of a hook."""
        scope = self._scope()
        return scope is not None and scope.active

    def enter_raw_session(self) -> None:
        """Make the current context, of a hook's call in the background, part of the raw session."""
        _background_of.set((*_background_of.get(), self._raw))

    # -- failures

    @property
    def errors(self) -> list[BaseException]:
        """The errors of the tasks that have failed so far, in the order of their occurrence."""
        return [failure.error for failure in self.failures]

    def failures_in(self, raised: BaseException | None) -> list[Failure]:
        """Return the failures whose errors are `raised`, or parts of that group."""
        return [failure for failure in self.failures if _is_in(failure.error, raised)]

    def raise_requested_exception(self) -> None:
        """Raise the first failure that ends the session, or else the first one, if there is one."""
        if self.failures:
            # No failure is in a variable: its traceback would refer to this frame.
            self._note_delivery_outside((self.ending_failures or self.errors)[0])
            raise_unchanged((self.ending_failures or self.errors)[0])

    @contextlib.contextmanager
    def stop_on_exception(self) -> Generator[None]:
        """Report an error of the block as the failure of a task instead of raising it. `join`
        raises it.

        A cancellation, `KeyboardInterrupt` and the like propagate.
        """
        try:
            yield
        except Exception as error:
            if not self._ends_in_drain(error):
                self.request_stop(error)

    def _ends_in_drain(self, error: BaseException) -> bool:
        """Return whether a task ends cleanly in a drain, in which the others finish their current
        work.
        """
        return self.drain_reason is not None and is_clean_end(error)

    def is_recoverable(self, error: BaseException) -> bool:
        """Return whether a new raw session can help: the policy lists the error, and it is no
        failure of a task of the whole session, which cannot be started again.
        """
        if any(failure.lasts for failure in self.failures_in(error)):
            return False
        return self.owner.policy.recovers(error)

    def root_cause(self, error: BaseException) -> BaseException:
        """Choose the error to act on: the failure of a background task may be the reason for the
        error that came out of a run.

        The first failure of a task wins, unless neither is recoverable: then the error of the run
        is the answer to the failure. The other one becomes a note, or a line of the log.
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

    def _record_error(self, error: BaseException, what: str) -> None:
        """Record the error of a task: a clean end is a stop, and any other error a failure.

        `what` says for messages what has happened.
        """
        for failure in self.failures:
            # Not the error of a raw session's task with which a recovery gives up, in a task that
            # lives through recoveries.
            if failure.error is error and failure.lasts >= (self is self._whole):
                # `until` raised it in the task, which passed it on.
                return
        label = self.requests.label
        if not is_clean_end(error):
            if self._has_no_caller:
                logger.error("%s: %s, after %s", label, what, self._ending, exc_info=error)
            else:
                self._record_failure(error, what)
        elif not (self._has_no_caller or self._whole.closed or is_end_of_producers(error)):
            self.requests.request_stop(f"{what}: {safe_repr(error)}")

    def _record_failure(self, error: BaseException, what: str) -> None:
        """Record a failure: it ends the waits and the run, and stops a session that does not
        recover. It does not end a recovery from an earlier one, if it can be recovered from.
        """
        requests = self.requests
        description = f"{what}: {safe_repr(error)}"
        first = next(iter(self.errors), None)
        had_ended = bool(self.ending_failures)
        failure = Failure(error, lasts=self is self._whole, is_owed=False)
        self.failures.append(failure)
        is_end = not self.is_recoverable(error)
        if is_end and not requests.stopped:
            requests.record_stop(description)
        if first is None or (is_end and not had_ended):
            failure.is_owed = True
            requests.call_in_loop(functools.partial(self._end_waits, error))
        # The waits end before more is said about the error: that calls the error's own methods.
        # The first one is raised, and this one must not be lost.
        if first is not None:
            add_note(first, f"then {description}")
            logger.error("%s: %s after another failure", requests.label, what, exc_info=error)

    def _end_waits(self, failure: BaseException) -> None:
        """End the waits and the run because of a failure. A lasting wait lets the session recover
        instead, where it can.
        """
        requests = self.requests
        requests.wake_waiters()
        recovers = self.is_recoverable(failure)
        for wait in tuple(requests.waits):
            if recovers and wait.lasts:
                self.owner.start_recovery()
            else:
                wait.end(failure)
        self.owner.end_failed_run(failure)

    def note_delivery(self, error: BaseException) -> None:
        """Note that `error` is raised, if it is a failure of a background task.

        A background task that gets the failure of another one does not pass it on, nor does a task
        that it has started: only code outside of the session's own tasks can handle it.
        """
        if self._starter() is None:
            for failure in self.failures_in(error):
                failure.is_owed = False

    def _note_delivery_outside(self, error: BaseException) -> None:
        """Note that `error` is raised, unless a hook gets it, or code that a hook has started."""
        if self._scope() is None:
            self.note_delivery(error)

    def take_owed(self, primary: BaseException | None) -> list[BaseException]:
        """Return the errors that the session still owes, except those in the primary error of its
        end: first the errors that end the session. None is owed from now on.
        """
        owed: list[BaseException] = []
        for failure in self.failures:
            if failure.is_owed and not _is_in(failure.error, primary):
                owed.append(failure.error)
            failure.is_owed = False
        return sorted(owed, key=self.is_recoverable)

    def owe_again(self, outcome: BaseException | None) -> None:
        """Owe the failures in `outcome` again if a background task or a hook has closed the
        session, and gets this error: it does not leave the session by that.
        """
        if self._starter() is not None or self._scope() is not None:
            for failure in self.failures_in(outcome):
                failure.is_owed = True

    def __repr__(self) -> str:
        doing = "running"
        if self.should_stop():
            doing = f"stopping: {self.stop_reason}"
        elif self.drain_reason is not None:
            doing = f"draining: {self.drain_reason}"
        names = ", ".join(task.get_name() for task in self.tasks)
        return f"<Coordinator {doing}, tasks: {names or 'none'}>"


def _is_in(error: BaseException, raised: BaseException | None) -> bool:
    """Return whether `raised` is this very object, or a group that has it at any depth."""
    if raised is error:
        return True
    if not isinstance(raised, BaseExceptionGroup):
        return False
    group: Any = raised  # pyright: ignore[reportUnknownVariableType]
    return any(_is_in(error, member) for member in group.exceptions)


# -- the producers of a wait: tasks without which it would never end

_ending_in_drains: WeakSet[Task] = WeakSet()
"""The tasks that look for a drain, or depend on producers, and so end by themselves in one."""
# Passes of the loop: a notified waiter may have to wake another one, or to take a lock.
_MOST_PASSES = 5


def note_own_end_in_drain() -> None:
    """Note that the current task ends by itself in a drain."""
    task = None if running_loop() is None else asyncio.current_task()
    if task is not None:
        _ending_in_drains.add(task)


class SessionWait(Wait[T]):
    """A wait that a stop or the failure of a task ends, and the end of its producers, when it has
    had the time to take what they left. Without producers it does not depend on any, with `()` all
    have ended.
    """

    __slots__ = ("_producers", "_unfinished", "ends_at_drain", "lasts")

    def __init__(
        self, what: str, producers: Producers | None, *, ends_at_drain: bool, lasts: bool
    ) -> None:
        super().__init__(what)
        self.ends_at_drain: bool = ends_at_drain
        self.lasts: bool = lasts
        """Whether it belongs to code that lives through recoveries: the failure of a task from
        which the session recovers does not end it, but starts the recovery.
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
        for producer in self._unfinished:
            producer.remove_done_callback(self._note_end)

    def _note_end(self, producer: Task) -> None:
        self._unfinished.discard(producer)
        if not self._unfinished:
            self._end_after(_MOST_PASSES)

    def _end_after(self, passes: int) -> None:
        if passes:
            asyncio.get_running_loop().call_soon(self._end_after, passes - 1)
        else:
            # It has no effect if the wait is over.
            self.end(_end_of(self._producers or ()))


def _end_of(producers: Producers) -> BaseException:
    """Return the failure of a producer, or else a clean end."""
    for producer in producers:
        error = None if producer.cancelled() else producer.exception()
        if error is not None and not is_clean_end(error):
            return error
    names = ", ".join(repr(producer.get_name()) for producer in producers)
    return ProducerFinishedError(f"ended, or cancelled: producer {names}")


def is_end_of_producers(error: BaseException) -> bool:
    """Return whether a task that ended with this has finished: all that it waited for was produced
    and used.
    """
    return all(isinstance(member, ProducerFinishedError) for member in flattened([error]))


# -- tasks that wait for queues

_Queue: Any = asyncio.Queue
_QUEUE_METHODS = frozenset({_Queue.put.__code__, _Queue.get.__code__, _Queue.join.__code__})


def _queue_wait(task: Task) -> object:
    """Return the future of a task that waits in a method of a queue, and else None.

    None in a `with` block, too: it may be a time limit, after which the task continues by itself.
    """
    from aiohooks._why.sources import held_by  # seldom needed

    frames = task_wait(task).frames
    if not frames or frames[-1].f_code not in _QUEUE_METHODS or [*held_by(task)]:
        return None
    _, waiter = links_of(task)[-1]
    is_waiting = asyncio.isfuture(waiter) and not waiter.done()
    return waiter if is_waiting else None
