"""Background tasks, the stop, the drain before it and the first error, shared by everything inside a session."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from typing import Any, TypeVar

from aiohooks._aio.cancel import DEFAULT_GRACE_SECS, current_task, new_task, running_loop, wait_done
from aiohooks._aio.clock import TimerHandle, current_clock, wake, wake_after
from aiohooks._aio.long_waits import LongWaitLog
from aiohooks._aio.observers import Observer, observing
from aiohooks._aio.overlap import Wait
from aiohooks._aio.run_scope import leave_run
from aiohooks._diagnostics import describe_awaitable
from aiohooks._validate import check_callable, check_instance, check_secs
from aiohooks.errors import (
    InvalidArgumentError,
    NestedRunError,
    SessionClosedError,
    StopRequestedError,
    WrongLoopError,
    add_note,
    add_origin,
    is_clean_end,
    raise_unchanged,
    safe_repr,
)
from aiohooks.session.producers import EndOfProducers, Producer, Producers, checked_producers, is_end_of_producers
from aiohooks.session.status import SessionStatus, background_activities

_logger = logging.getLogger("aiohooks")
T = TypeVar("T")


class Coordinator:
    """Coordinates tasks that stop together; usable alone, and every session has one.

    A stop is recorded immediately, with its first reason, and withdrawn only by `clear_stop`. A task that fails also requests a
    stop, and its error ends every wait in `until`. An error that means a clean end (`OutOfRangeError`, ...) is a plain stop.

    A session has a new coordinator after each recovery; a stop requested from it stops the whole session.
    """

    def __init__(
        self,
        clean_stop_exception_types: tuple[type[BaseException], ...] = (),
        *,
        parent: Coordinator | None = None,
        is_recoverable: Callable[[BaseException], bool] | None = None,
    ) -> None:
        """Start without tasks, not stopped.

        Args:
            clean_stop_exception_types: errors of tasks that mean a plain stop, besides the usual ones.
            parent: the coordinator that shares the stop with this one.
            is_recoverable: whether a session recovers from an error of a task; such an error does not stop the parent.
        """
        types: object = clean_stop_exception_types
        if not isinstance(types, tuple) or not all(isinstance(one, type) and issubclass(one, BaseException) for one in types):  # pyright: ignore[reportUnknownVariableType]
            raise InvalidArgumentError(f"clean_stop_exception_types is {types!r}; give a tuple of exception classes")
        self._clean = clean_stop_exception_types
        self._root: Coordinator = self if parent is None else parent._root
        self._is_recoverable = is_recoverable
        self.stopped: bool = False
        """Whether a stop was requested from this coordinator itself; `should_stop` includes its parent."""
        self.closed: bool = False
        """Internal: whether its session has ended or was replaced."""
        self._disowned: str | None = None
        self._reason: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: dict[asyncio.Task[Any], bool] = {}  # and whether they were cancelled from here
        self._ending: str | None = None  # why no task can be started any more
        self.errors: list[BaseException] = []
        """The failures so far, in the order of their occurrence."""
        self.raised: bool = False
        """Internal: whether the first failure has been raised."""
        self._joined = False
        self.observers: list[Observer] = [] if parent is None else parent.observers
        """Internal: notified of what happens outside of the session's runs, and of all waits in `until`."""
        # What follows is used on the root only, when the session stops or a task fails.
        self.label: str = "coordinator"
        """Internal: the name for messages, set by the monitored session."""
        self._waits: dict[Wait[Any], bool] = {}  # and whether a drain ends them too
        self._stop_waiters: set[asyncio.Future[None]] = set()
        self._drain_reason: str | None = None
        self._drain_limits: list[float] = []  # in seconds; requested, and not begun yet
        self._drain_timer: TimerHandle | None = None
        self._drain_end = math.inf
        self._drain_waiters: set[asyncio.Future[None]] = set()
        self._pause_reason: str | None = None
        self._pause_waiters: set[asyncio.Future[None]] = set()
        self.on_pause: Callable[[], None] | None = None
        """Internal: called in the loop after a pause or its end."""
        self.on_failure: Callable[[BaseException], None] | None = None
        """Internal: called when a task has failed, after the waits have ended."""
        self.get_status: Callable[[], SessionStatus] | None = None
        """Internal: returns the status of the session; only on the root coordinator, set by the monitored session."""

    def request_stop(self, reason: str | BaseException | None = None) -> None:
        """Request a stop; from any thread or signal handler, any number of times. The first reason is kept.

        Args:
            reason: a text, or an error, which then counts as the failure of a task.

        Raises:
            BaseException: the error itself, if it is reported after `join`, because it would be lost otherwise.
        """
        if isinstance(reason, BaseException):
            if self._joined and not self._is_clean_end(reason):
                raise reason
            self._record_error(reason, "reported")
            return
        check_instance(reason, str, "reason", optional=True)
        if self._root is not self:
            self._root.request_stop(reason)
            return
        if not self.stopped:
            self.record_stop(reason)
            self._call_in_loop(self.end_waits)
        elif self._reason is None:  # closed before; a stop was requested only now
            self._reason = reason

    def record_stop(self, reason: str | None) -> None:
        """Internal: record a stop of the root; the waits continue until `end_waits` is called in the loop."""
        self._reason = self._reason or reason or "a stop was requested"
        self.stopped = True  # after the reason: another thread may read both in between

    def record_end(self, reason: str | None = None) -> None:
        """Internal: keep why the session ends if no stop was requested: a drain, or else `reason`; nothing is stopped yet."""
        self._reason = self._reason or self._drain_reason or reason

    def should_stop(self) -> bool:
        """Return whether a stop was requested; never waits, never raises."""
        return self.stopped or self._root.stopped

    @property
    def stop_reason(self) -> str | None:
        """The first reason; None if no stop was requested, and the session's block was not left by a clean-end exception."""
        return self._root._reason

    async def wait_for_stop(self, timeout: float | None = None) -> bool:
        """Wait until a stop is requested, at most `timeout` seconds; return whether it was."""
        return await self._wait_for(self.should_stop, self._root._stop_waiters, timeout)

    async def wait_stopped_or_done(self, tasks: Iterable[asyncio.Task[Any]]) -> None:
        """Internal: wait until a stop is requested, or one of the tasks has ended; cancel none of them."""
        stop = asyncio.ensure_future(self.wait_for_stop())
        try:
            await asyncio.wait([*tasks, stop], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            await asyncio.wait([stop])

    async def _wait_for(self, requested: Callable[[], bool], waiters: set[asyncio.Future[None]], timeout: float | None) -> bool:
        check_secs(timeout, "timeout", optional=True)
        if requested():
            return True
        self.bind()
        # Looked at again: a request from another thread came before the loop was known, or it will wake the waiter there.
        if not requested():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            timer = None if timeout is None else wake_after(waiter, timeout)
            waiters.add(waiter)
            try:
                await waiter
            finally:
                waiters.discard(waiter)
                if timer is not None:
                    timer.cancel()
        return requested()

    def request_drain(self, reason: str | None = None, *, secs: float | None = None) -> None:
        """Request that nothing new is begun and what is under way is finished, and then a stop; from any thread.

        Loops over `session.steps` use the elements that were taken, and take no others; when all of them have ended, a stop
        is requested. Waits in `until(..., drain=True)` end. A background task that ends cleanly stops no other. A pause ends.
        The first reason is kept, and of several time limits the one that is reached first; after a stop nothing changes.

        Args:
            reason: a text, which is the reason of the stop as well.
            secs: how long the drain may take; then a stop is requested. In a session that is not open yet, from its opening on.
        """
        check_instance(reason, str, "reason", optional=True)
        check_secs(secs, "secs", optional=True)
        if self.should_stop():
            return
        root = self._root
        begin = root._limit_drain if self.should_drain() else root.begin_drain
        if secs is not None:
            root._drain_limits.append(secs)
        root.record_drain(reason)
        root._call_in_loop(begin)

    def record_drain(self, reason: str | None) -> None:
        """Internal: record a drain of the root; the waits continue until `begin_drain` is called in the loop."""
        self._drain_reason = self._drain_reason or reason or "a drain was requested"

    def begin_drain(self) -> None:
        """Internal: end the waits that a drain ends, and a pause."""
        if self._drain_reason is None or self.stopped:
            return
        _logger.info("%s: draining: %s", self.label, self._drain_reason)
        self._limit_drain()
        self.resume()
        for waiter in self._drain_waiters:
            wake(waiter)
        for wait, ends_at_drain in tuple(self._waits.items()):
            if ends_at_drain:
                wait.end(self._stop_error())

    def _limit_drain(self) -> None:
        """Set the timer for the time limit that is reached first."""
        clock = current_clock()
        while self._drain_limits and not self.stopped:
            secs = self._drain_limits.pop()
            end = clock.now() + secs
            if end < self._drain_end:
                self._forget_drain_timer()
                self._drain_timer, self._drain_end = clock.call_later(secs, functools.partial(self._stop_late_drain, secs)), end

    def _stop_late_drain(self, secs: float) -> None:
        self.request_stop(f"{self._drain_reason}, and the drain took longer than {secs} s")

    def _forget_drain_timer(self) -> None:
        if self._drain_timer is not None:
            self._drain_timer.cancel()
            self._drain_timer, self._drain_end = None, math.inf

    def should_drain(self) -> bool:
        """Return whether nothing new is to be begun: a drain or a stop was requested; never waits, never raises."""
        return self._root._drain_reason is not None or self.should_stop()

    @property
    def drain_reason(self) -> str | None:
        """Why the session drains, or drained before its stop; None if no drain was requested."""
        return self._root._drain_reason

    async def wait_for_drain(self, timeout: float | None = None) -> bool:
        """Wait until a drain or a stop is requested, at most `timeout` seconds; return whether it was."""
        return await self._wait_for(self.should_drain, self._root._drain_waiters, timeout)

    def pause(self, reason: str | None = None) -> None:
        """Let no run of the session begin until `resume`, from any thread; a run in progress is finished.

        The first reason is kept. A stop, a failed background task and the end of the session end the wait of those that are
        about to run.
        """
        check_instance(reason, str, "reason", optional=True)
        if self.pause_reason is None:
            self._root._pause_reason = reason or "a pause was requested"
            self._root._call_in_loop(self._root._pause_changed)

    def resume(self) -> None:
        """End the pause, if there is one; from any thread."""
        if self.pause_reason is not None:
            self._root._pause_reason = None
            self._root._call_in_loop(self._root._pause_changed)

    @property
    def pause_reason(self) -> str | None:
        """Why the session is paused; None if it is not."""
        return self._root._pause_reason

    async def wait_for_resume(self) -> None:
        """Wait while there is a pause, as a run does before it begins: also for tasks that prepare what runs use.

        Raises:
            StopRequestedError: a stop was requested; a clean end of a session.
            BaseException: the error of a background task that has failed.
        """
        while self.pause_reason is not None:
            self.bind()
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._root._pause_waiters.add(waiter)
            try:
                await self.until(waiter)
            finally:
                self._root._pause_waiters.discard(waiter)

    def _pause_changed(self) -> None:
        paused = self._pause_reason is not None
        _logger.info("%s: %s", self.label, f"paused: {self._pause_reason}" if paused else "resumed")
        if not paused:
            for waiter in self._pause_waiters:
                wake(waiter)
        if self.on_pause is not None:
            self.on_pause()

    def clear_stop(self) -> None:
        """Reset the stop, the drain, their reasons, the errors and `joined`; the tasks stay."""
        self.stopped = self._joined = self.raised = False
        self._reason = self._drain_reason = None
        self._drain_limits.clear()
        self._forget_drain_timer()
        self.errors.clear()
        if self._root is not self:
            self._root.clear_stop()

    @contextlib.contextmanager
    def stop_on_exception(self) -> Generator[None]:
        """Report the error of the block like that of a task instead of raising it; `join` raises it.

        A cancellation, `KeyboardInterrupt` and the like propagate.
        """
        try:
            yield
        except Exception as error:
            if not self._ends_in_drain(error):
                self.request_stop(error)

    async def until(self, awaitable: Awaitable[T], *, producer: Producer | None = None, drain: bool = False) -> T:
        """Await something; a stop or the failure of a background task also ends the wait.

        A coroutine is cancelled then; a task or future that was passed in is not.

        Args:
            awaitable: a coroutine, a task or a future.
            producer: the task, or the tasks, without which the awaitable is never done: when all of them have ended, and what
                they have left is used up, the wait ends. Give the wait itself then, such as `queue.get()`: a coroutine that
                does other work after it would be cut off.
            drain: whether a drain ends the wait too: for what would begin something new, such as the next message of a source.

        Returns:
            The result of the awaitable.

        Raises:
            StopRequestedError: a stop was requested, before or meanwhile, or a drain if that ends the wait; a clean end of a
                session.
            ProducerFinishedError: the producers have finished or were cancelled; a clean end, too.
            BaseException: the error of the background task, or the producer, that failed, the same object.
        """
        try:
            producers = checked_producers(producer)
        except InvalidArgumentError:
            close_unawaited(awaitable)
            raise
        what = describe_awaitable(awaitable) if self.observers else ""
        with observing(self.observers, "wait", what):
            return await self.until_in(Wait("what `until` awaits"), awaitable, producers, drain=drain)

    async def until_in(
        self, wait: Wait[T], awaitable: Awaitable[T], producers: Producers | None = None, *, drain: bool = False
    ) -> T:
        """Internal: `until` with a wait of another class, which gets what ends it. With `()` all producers have ended."""
        try:
            self.bind()
        except BaseException:
            close_unawaited(awaitable)
            raise
        error = self._wait_error(drain)
        if error is not None:
            close_unawaited(awaitable)
            self.mark_raised(error)
            raise_unchanged(error)
        if not inspect.isawaitable(awaitable):  # also generators that are marked as coroutines
            raise InvalidArgumentError(f"until got {awaitable!r}; give a coroutine, a task or a future")
        waits = self._root._waits
        waits[wait] = drain
        end = None if producers is None else EndOfProducers(producers, wait)
        try:
            return await wait.result_of(awaitable)
        except BaseException as raised:
            self.mark_raised(raised)
            raise
        finally:
            waits.pop(wait, None)
            if end is not None:
                end.stop_watching()

    def failed_with(self, error: BaseException) -> bool:
        """Internal: return whether `error` is one of the failures."""
        return any(error is one for one in self.errors)

    def mark_raised(self, error: BaseException) -> None:
        """Internal: note that `error` is raised, if it is one of the failures here or in the parent."""
        for one in (self, self._root):
            one.raised = one.raised or one.failed_with(error)

    def _wait_error(self, drain: bool) -> BaseException | None:
        """Return the error that ends a wait now: the first failure, else the stop, or the drain if that ends it too."""
        for one in (self, self._root):
            if one.errors:
                return one.errors[0]
        return self._stop_error() if self.should_stop() or (drain and self.should_drain()) else None

    def _stop_error(self) -> StopRequestedError:
        return StopRequestedError(self.stop_reason or self.drain_reason or "the session has ended")

    def start_soon(self, fn: Callable[..., Coroutine[Any, Any, T]], *args: Any, name: str | None = None) -> asyncio.Task[T]:
        """Start `fn(*args)` as a task that this coordinator owns.

        If it fails, waits end, and in a session the current `run` is cancelled and raises the error. A cancelled task does not
        count as a failure.

        Returns:
            The task.

        Raises:
            InvalidArgumentError: `fn` is not a coroutine function.
            SessionClosedError: the tasks are being cancelled, or the session has ended or was replaced. A task that is started
                before, also during the grace period, ends with the others.
        """
        check_callable(fn, "start_soon's function")
        self.bind()
        if self._ending is not None:
            raise SessionClosedError(f"no task can be started any more: {self._ending}")
        context = contextvars.copy_context()
        context.run(leave_run)  # a background task is not part of the run in which it was started
        coro: Any = context.run(fn, *args)
        if not asyncio.iscoroutine(coro):
            raise InvalidArgumentError(
                f"{fn!r} returned {coro!r} and not a coroutine; start_soon takes an `async def` and its arguments"
            )
        task: asyncio.Task[T] = new_task(coro, name or getattr(fn, "__name__", None), context)
        self._tasks[task] = False
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None and not self._ends_in_drain(error):
            add_origin(error, f"background task {task.get_name()!r}")
            self._record_error(error, f"background task {task.get_name()!r} failed")

    def _is_clean_end(self, error: BaseException) -> bool:
        return is_clean_end(error) or isinstance(error, self._clean)

    def _ends_in_drain(self, error: BaseException) -> bool:
        """Return whether a task ends cleanly in a drain, in which the others finish what they have under way."""
        return self.drain_reason is not None and self._is_clean_end(error)

    def _record_error(self, error: BaseException, what: str) -> None:
        if self.failed_with(error):
            return  # `until` raised it in the task, which passed it on
        is_clean = self._is_clean_end(error)
        if (self.closed and is_clean) or is_end_of_producers(error):
            return
        described = f"{what}: {safe_repr(error)}"
        if is_clean:
            self.request_stop(described)
            return
        if self._disowned is not None:
            _logger.error("%s: %s, after %s", self._root.label, what, self._disowned, exc_info=error)
            return
        # The waits end before anything is said about the error: that calls the error's own methods.
        first = not self.errors
        self.errors.append(error)
        root = self._root
        if not root.stopped and not (self._is_recoverable is not None and self._is_recoverable(error)):
            root._reason = described
            root.stopped = True
        if first or root.stopped:  # otherwise the first one has interrupted the run already, which may be recovering
            self._call_in_loop(functools.partial(root.end_waits, error if first else None))
        if not first:  # the first one is raised; this one must not be lost
            add_note(self.errors[0], f"then {described}")
            _logger.error("%s: %s after another failure", root.label, what, exc_info=error)

    @property
    def tasks(self) -> tuple[asyncio.Task[Any], ...]:
        """The background tasks that have not ended, in the order of their start."""
        return tuple(self._tasks)

    def status(self) -> SessionStatus | None:
        """Return the current activities of the session; None if this coordinator is used without one."""
        return None if self._root.get_status is None else self._root.get_status()

    @property
    def joined(self) -> bool:
        """Whether a `join` has completed."""
        return self._joined

    def raise_requested_exception(self) -> None:
        """Raise the first failure, if there is one."""
        if self.errors:
            self.raised = True
            raise_unchanged(self.errors[0])

    async def join(self, stop_grace_period_secs: float = DEFAULT_GRACE_SECS) -> None:
        """Wait until all tasks have ended, or until a stop is requested and the grace period after it has passed.

        Tasks that still run then are cancelled; a warning names those that ignore it. After a second, another warning names
        the tasks that are waited for after the stop.

        Raises:
            NestedRunError: called from one of the tasks, which would wait for itself.
            BaseException: the first failure of a task.
        """
        check_secs(stop_grace_period_secs, "stop_grace_period_secs")
        self.bind()
        if self.owns(task := current_task()):
            raise NestedRunError(
                f"join was called from the background task {task.get_name()!r}, which it waits for; "
                "to wait for the end there, use wait_for_stop"
            )
        while self._tasks and not self.should_stop():
            await self.wait_stopped_or_done(self._tasks)
        try:
            why, what = f"a stop was requested: {self.stop_reason}", f"{self._root.label}, joining"
            await end_tasks([self], stop_grace_period_secs, stop_grace_period_secs, why, what)
        finally:
            if not self.closed:
                self._ending = None
        self._joined = True
        self._root._forget_drain_timer()
        self.raise_requested_exception()

    def owns(self, task: asyncio.Task[Any]) -> bool:
        """Internal: return whether `task` is one of the background tasks."""
        return task in self._tasks

    def cancel_tasks(self, why: str) -> None:
        """Internal: cancel the tasks, each once; no other can be started from now on."""
        self._ending = self._ending or why
        for task, cancelled in tuple(self._tasks.items()):
            if not cancelled:
                self._tasks[task] = True
                task.cancel(why)

    def close(self, failure: str | None = None) -> None:
        """Internal: stop this coordinator only, not its parent: its session is being replaced or closed.

        Args:
            failure: why the session ends, if not cleanly: the tasks are cancelled immediately, with this message.
        """
        self.stopped = self.closed = True
        if failure is not None:
            self._reason = self._reason or failure
            self.cancel_tasks(failure)
        else:
            self.record_end()
        if self._root is self:
            self._call_in_loop(self.end_waits)

    def disown(self, why: str) -> None:
        """Internal: only log errors of tasks from now on, as no caller is left to raise them; refuse other tasks."""
        self._disowned = self._disowned or why
        self._ending = self._ending or why

    def bind(self) -> asyncio.AbstractEventLoop:
        """Internal: bind it to the running loop.

        Raises:
            WrongLoopError: it is bound to another one.
        """
        loop = running_loop()
        if loop is None or loop is not (self._root._loop or loop):
            raise WrongLoopError(f"{self!r} is used outside its own event loop; only request_stop and should_stop may be")
        is_first = self._root._loop is None
        self._root._loop = loop
        if is_first:
            self._root.begin_drain()  # one that was requested before
        return loop

    def _call_in_loop(self, call: Callable[[], None]) -> None:
        loop = self._root._loop
        if loop is None:
            return  # there is no waiter: each one looks for a stop after it has set the loop
        if loop is running_loop() and asyncio.current_task() is not None:
            call()
        elif not loop.is_closed():
            # From another thread, or outside of a task: perhaps from a signal handler that has interrupted the loop while it
            # waits for events, which only this ends.
            loop.call_soon_threadsafe(call)

    def end_waits(self, error: BaseException | None = None) -> None:
        """Internal: end the waits in `until`, and those for a stop if there is one."""
        if self.stopped:
            self._forget_drain_timer()
            for waiter in (*self._stop_waiters, *self._drain_waiters):
                wake(waiter)
        for wait in tuple(self._waits):
            wait.end(error or self._stop_error())
        if error is not None and self.on_failure is not None:
            self.on_failure(error)

    def __repr__(self) -> str:
        state = "running" if self.drain_reason is None else f"draining: {self.drain_reason}"
        if self.should_stop():
            state = f"stopping: {self.stop_reason}"
        return f"<Coordinator {state}, tasks: {', '.join(task.get_name() for task in self._tasks) or 'none'}>"


async def end_tasks(
    coords: Iterable[Coordinator], stop_grace_period_secs: float, cancel_grace_secs: float, why: str, what: str
) -> None:
    """Wait `stop_grace_period_secs` for the tasks of all these, cancel them, wait `cancel_grace_secs`, then warn.

    Tasks that they start meanwhile are part of it.

    Args:
        coords: a session's coordinators, or one alone.
        stop_grace_period_secs: 0 to cancel the tasks immediately.
        cancel_grace_secs: how long they may take to end after that.
        why: the message of the cancellation.
        what: the session and what it is doing, for messages.
    """
    coords = tuple(dict.fromkeys(coords))

    def tasks() -> list[asyncio.Task[Any]]:
        return [task for coord in coords for task in coord.tasks]

    def described() -> dict[object, str]:
        return {one.task: str(one) for one in background_activities(tasks())}

    async def ended(secs: float) -> bool:
        clock = current_clock()
        until = clock.now() + secs
        while left := tasks():
            if all(task.done() for task in left):
                await asyncio.sleep(0)  # their outcome is recorded in the next iteration of the loop
            elif not await wait_done(left, max(0.0, until - clock.now())):
                return False
        return True

    if not tasks():
        return
    with LongWaitLog(what, described):
        if stop_grace_period_secs > 0 and await ended(stop_grace_period_secs):
            return
        for coord in coords:
            coord.cancel_tasks(why)
        if not await ended(cancel_grace_secs):
            names = "; ".join(described().values())
            _logger.warning("%s: still active %s s after their cancellation: %s", what, cancel_grace_secs, names)


def close_unawaited(awaitable: object) -> None:
    """Close a coroutine that will not be awaited, or Python warns about it."""
    if asyncio.iscoroutine(awaitable):
        awaitable.close()
