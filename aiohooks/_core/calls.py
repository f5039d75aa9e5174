"""Calls of user code that run together and end together.

A call that may wait gets a task and a context of its own. Nothing here cancels the caller's task:
the caller waits for a future of this module, so a `CancelledError` that reaches it is meant for it.

    Calls       starts numbered calls, waits for them, fails with them, and ends them
    Wait        one awaitable, which can be ended with an error
    limited     awaits a coroutine with a time limit
    RunWaits    the calls that a run waits for, and the error that ends the run
    OwnContext  a context that consecutive calls share
    copy_back   applies the changes of the contexts of calls to the caller's context
    can_wait    whether a call of a function may wait
    result_now  the result of a coroutine that cannot wait
    close_unawaited  ends a coroutine that will not be awaited

The caller is the code that starts calls and then awaits `wait`. To end calls is to cancel them, and
to raise a given error, the cause, when they have ended. A call that still runs at the end of its
grace period is left behind: nothing waits for it any more.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dis
import functools
import inspect
import sys
import threading
import types
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextvars import Context, ContextVar, Token, copy_context
from operator import is_
from time import monotonic
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar
from weakref import ref

import anyio

from aiohooks._core import waits
from aiohooks._core.activity import ENTRIES, Awaited, RunScope, as_coroutine, current_scope, logger
from aiohooks._core.clock import (
    NO_TIMER,
    TimerHandle,
    call_later,
    current_clock,
    monotonic_now,
)
from aiohooks._core.waits import (
    LEFT_BEHIND_MESSAGE,
    leave_behind,
    retrieve_exception,
    running_loop,
    wait_done,
)
from aiohooks.errors import (
    add_origin,
    failure_of,
    hook_cancelled_error,
    keep_errors,
    raise_failures,
    raise_unchanged,
)

T = TypeVar("T")

_HAS_EAGER_TASKS = sys.version_info >= (3, 12)
_MAX_NESTED_STARTS = 16
"""How many calls may start inside the eager start of another one, as each uses some C stack."""
_MISSING: Any = object()
"""Stands for a result that has not arrived, and for the value of a variable that is unset."""


class _Ending:
    """The state of `Calls` that is needed only for a time limit, a failure or a cancel.

    It is made at the first of these. Most calls have none, and only return. A call that exceeds its
    time limit first has a timeout error, and this error becomes its failure when it has ended or is
    left behind.
    """

    def __init__(self) -> None:
        self.errors: dict[int, BaseException] = {}
        """The failures that will be raised, by the number of the call."""
        self.caller_cancel: CancelledError | None = None
        """The first CancelledError that the caller has got while it waited."""
        self.cause: BaseException | None = None
        """The error for which the calls are ended (`Calls.end`), or None."""
        self.timers: dict[int, TimerHandle] = {}
        """The timer of each call: that of its time limit, and afterwards of its grace period."""
        self.grace_timer: TimerHandle = NO_TIMER
        """The timer of the grace period of all calls, from `_cancel_calls`."""
        self.timeout_errors: dict[int, BaseException] = {}
        """The errors of the calls that have exceeded their time limits, by number."""
        self.left_behind: set[int] = set()
        """The calls that still run after their grace period."""

    def forget_errors(self) -> None:
        """Drop the errors, whose tracebacks refer to the calls."""
        self.errors = {}
        self.timeout_errors = {}
        self.caller_cancel = None
        self.cause = None


class Calls(abc.ABC):
    """Numbered calls that run concurrently and end together.

    Use: `start` each call, then `await wait()`. The number of a call is the place of its result.

    The first failure cancels the other calls, and `wait` waits for them. A single failure is raised
    as it is, several as one flat group. A cancel of the caller takes precedence over both.

    No task is left, except a task that ignores its cancellation for longer than the grace period. A
    warning names it.
    """

    __slots__ = (
        "__weakref__",
        "_caller",
        "_ending",
        "_idle",
        "_loop",
        "_tasks",
        "_waits",
        "cancelling",
        "contexts",
        "grace_secs",
        "pending",
        "results",
        "since",
        "task",
    )

    # `wait` sets these two, if it has to wait.
    task: asyncio.Task[Any] | None
    """The task that waits for the calls, or None when it has waited."""
    since: float
    """When the wait for the calls began, on the clock of `RunWaits.now` or of the event loop."""

    kind: ClassVar[str] = "call"
    """The kind of the calls in reports."""

    def __init__(
        self,
        results: list[Any],
        grace_secs: float | None,
        waits: RunWaits | None = None,
    ) -> None:
        """Prepare calls.

        Args:
            results: a list in which the result of a call gets the place of its number.
            grace_secs: how long cancelled calls may take to end. If None, as long as they need.
            waits: the waits of the run that the calls are part of.
        """
        self.results: list[Any] = results
        self.grace_secs: float | None = grace_secs
        self.pending: int = 0
        """The number of started calls that have not ended, without those left behind. While it is
        0, `finish`, which cannot wait, may be called in place of `wait`.
        """
        self.cancelling: bool = False
        """Whether the calls have been cancelled, so that no other call may start."""
        self.contexts: list[CallContext] = []
        """The contexts whose changes the caller gets, in the order of the calls."""
        self._waits = waits
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """The tasks by the numbers of their calls, without tasks that ended when they were started.
        """
        self._caller: Context | None = None
        """A copy of the caller's context, from which the contexts of calls are copied. None before
        the first call, and when a call in the caller's task may have changed that context.
        """
        self._idle: asyncio.Future[None] | None = None
        """The future that the caller awaits. It gets its result when no call is pending."""
        self._ending: _Ending | None = None
        """None before the first time limit, failure or cancel: most calls never need it."""

    # -- for subclasses

    @abc.abstractmethod
    def describe(self, number: int) -> str:
        """Return the name of a call for messages: hook, method, step."""

    def timeout_error(self, number: int, task: asyncio.Task[Any]) -> BaseException:
        """Return the error for a call that has exceeded its time limit.

        `task` has not been cancelled yet, so that the error can say where it waits.
        """
        return TimeoutError(f"{self.describe(number)} took too long")

    def cancelled_error(self, number: int, cause: BaseException) -> BaseException:
        """Return the error for a call that other code has cancelled."""
        return hook_cancelled_error(self.describe(number), cause)

    def suppresses(self, number: int, error: BaseException) -> bool:
        """If errors of this call are only logged, log this one and return True."""
        return False

    def add_origin(self, number: int, error: BaseException) -> None:
        """Add the origin to an error that will be raised."""
        add_origin(error, self.describe(number))

    def has_result(self) -> bool:
        """Return whether there is a result that counts more than the cause of `end`."""
        return False

    def succeeded(self, number: int) -> None:  # noqa: B027 - most calls have no successors
        """Called in the task of a call after it has stored its result: start what depends on it."""

    # -- start

    def note_context_change(self) -> None:
        """Note that the caller's own context may change: a call runs in it.

        The next call that is started gets a new copy of the context.
        """
        self._caller = None

    def start(
        self,
        number: int,
        call: Callable[..., Awaitable[Any]],
        args: tuple[Any, ...],
        name: str | None,
        secs: float | None = None,
        context: Context | None = None,
    ) -> None:
        """Start a call in a task. Since Python 3.12, it runs immediately, up to its first wait.

        Args:
            number: the number of the call.
            call: the function to call and await.
            args: its arguments.
            name: the name of the task.
            secs: the time limit of the call, or None.
            context: the context of the call, whose changes the caller does not get. By default, it
                is a copy of the caller's context, and the caller gets the changes.
        """
        if self._caller is None:
            self._caller = copy_context()
        if context is None:
            context = self._caller.copy()
            self.contexts.append((self._caller, context))
        self.pending += 1
        make_task: Any = waits.make_task or asyncio.Task
        task: asyncio.Task[None]
        # An eager task runs the call up to its first wait, inside of `make_task`. Before Python
        # 3.12, and beyond the limit of nested starts, the call starts later.
        if _HAS_EAGER_TASKS and (depth := _eager_starts.depth) < _MAX_NESTED_STARTS:
            coro = self._report(number, call, args)
            _eager_starts.depth = depth + 1
            try:
                task = make_task(
                    coro,
                    loop=self._loop,
                    name=name,
                    context=context,
                    eager_start=True,
                )
            finally:
                _eager_starts.depth = depth
            # A call that did not wait has reported its end, and its task is not needed any more. If
            # the task is cancelled, the call has cancelled it, which `finish` has to see.
            if task.done() and not task.cancelled():
                return
            self._tasks[number] = task
            if secs is not None:
                self.start_timer(number, secs)
        else:
            coro = self._report(number, call, args, starts_later=True, secs=secs)
            # Run the coroutine up to its pause: cancelled before its first step, a coroutine runs
            # no code, and could not report its end.
            coro.send(None)
            task = make_task(
                coro,
                loop=self._loop,
                name=name,
                context=context,
            )
            self._tasks[number] = task
        if self.cancelling:
            # The call has itself ended the calls while it started. Its task was not in `_tasks`
            # yet, so it is cancelled here.
            task.cancel()

    async def _report(
        self,
        number: int,
        call: Callable[..., Awaitable[Any]],
        args: tuple[Any, ...],
        starts_later: bool = False,
        secs: float | None = None,
    ) -> None:
        """Make a call and report how it has ended. This is the coroutine of the call's task.

        The report is made here, as a done-callback of the task would be called one iteration of the
        event loop later.

        Args:
            number: the number of the call.
            call: the function to call and await.
            args: its arguments.
            starts_later: whether the coroutine first pauses until the first step of its task.
                `start` has run it up to this pause before it makes the task.
            secs: the time limit of a call that starts later. `start` limits the other calls.
        """
        try:
            if starts_later:
                await _PAUSE
                if secs is not None:
                    # The limit begins here and not in `start`: if the event loop was busy
                    # meanwhile, it would end a call that has not begun.
                    self.start_timer(number, secs)
            self.results[number] = await call(*args)
            self.succeeded(number)
        except BaseException as error:
            # This includes KeyboardInterrupt: out of a task, it would stop the event loop. From
            # here, it is raised in the caller.
            self._call_failed(number, error)
        else:
            # Hot path: `_call_ended`, written out for every call that waits.
            if self._ending is None:
                self.pending -= 1
            else:
                self._call_ended(number)
        if not self.pending:
            self._wake_if_ended()

    # -- wait

    async def wait(self) -> None:
        """Wait until the calls have ended, and apply their changes to the caller's context.

        Raises:
            CancelledError: the caller was cancelled.
            BaseException: the failure of a call, several as one group, or else the cause that `end`
                was called with.
        """
        if self.pending:
            self._idle = self._loop.create_future()
            self._begin_wait()
            try:
                await self._idle
            except CancelledError as cancelled:
                # It must not leave the calls running, so it is kept until they have ended: `finish`
                # raises it.
                self._get_ending().caller_cancel = cancelled
                self._cancel_calls()
                await self._wait_for_cancelled_calls()
            except GeneratorExit:
                # The coroutine of the caller is closed, so nothing will wait for the calls, and
                # their grace period is of no use.
                self._cancel_calls()
                self._get_ending().grace_timer.cancel()
                raise
            finally:
                self._end_wait()
        self.finish()

    def _begin_wait(self) -> None:
        """Show this wait in the registry of activity, and note it as a wait of the run.

        `_end_wait` undoes this.
        """
        self.task = asyncio.current_task(self._loop)
        ENTRIES[id(self)] = ref(self)
        if self._waits is not None:
            self.since = self._waits.now()
            self._waits.begin_wait(self)
        else:
            # Outside of a run, only reports need the time.
            self.since = self._loop.time()

    def _end_wait(self) -> None:
        """Leave the registry and the waits of the run, which `_begin_wait` has entered."""
        del ENTRIES[id(self)]
        # If an error leaves the task, its traceback refers to the frame of `wait`, and so to this
        # object. A reference to the task here would make this a cycle.
        self.task = None
        if self._waits is not None:
            self._waits.end_wait(self)

    async def _wait_for_cancelled_calls(self) -> None:
        """Wait until the calls have ended, and ignore further cancels of the caller."""
        while self.pending:
            self._idle = self._loop.create_future()
            # A cancelled scope of anyio cancels its task again at each iteration of the event loop,
            # unless it is shielded. Only the first cancel is raised, by `finish`.
            with anyio.CancelScope(shield=True), contextlib.suppress(CancelledError):
                await self._idle

    def _wake_if_ended(self) -> None:
        """Wake the caller, if it waits and no call is pending."""
        # The loop is closed if the coroutine of a call is collected after the program.
        if self.pending or self._idle is None or self._loop.is_closed():
            return
        if not self._idle.done():
            self._idle.set_result(None)

    def finish(self) -> None:
        """Complete calls that have all ended: apply their changes of context. Raise like `wait`."""
        if self.contexts:
            copy_back(self.contexts)
        if not self.cancelling:
            for number, task in self._tasks.items():
                # `_report` has not seen the cancel of such a task: the call has cancelled its own
                # task, and returned without another `await`, so that no CancelledError was raised.
                if task.cancelled() and not self.has_timed_out(number):
                    self._record(number, self.cancelled_error(number, CancelledError()))
        self._tasks.clear()
        if self._ending is not None:
            self._ending.grace_timer.cancel()
            self._raise(self._ending)

    def _raise(self, ending: _Ending) -> None:
        """Raise the cancel of the caller, or else the failures, or else the cause of `end`.

        If there is none of these, return.
        """
        errors = [ending.errors[number] for number in sorted(ending.errors)]
        caller_cancel = ending.caller_cancel
        cause = None if self.has_result() else ending.cause
        ending.forget_errors()
        try:
            if caller_cancel is not None:
                keep_errors(caller_cancel, errors)
                raise_unchanged(caller_cancel)
            raise_failures(errors, "calls failed")
            if cause is not None:
                raise_unchanged(cause)
        finally:
            # The traceback of the raised error refers to this frame, which must not refer to the
            # error: only the garbage collector would free such a cycle.
            caller_cancel = cause = None
            errors.clear()

    # -- fail

    def record_failure(self, number: int, error: BaseException) -> None:
        """Record the failure of a call that was made in the caller's own task.

        Such a call cannot wait, so a CancelledError was raised by the call itself.
        """
        if isinstance(error, CancelledError):
            error = self.cancelled_error(number, error)
        self._record(number, failure_of(error, self.describe(number)))

    def _get_ending(self) -> _Ending:
        """Return the state of the ending, which is made when it is needed first."""
        if self._ending is None:
            self._ending = _Ending()
        return self._ending

    def _call_ended(self, number: int) -> None:
        """Count a call as ended, unless it was left behind and is not pending any more."""
        self.stop_timer(number)
        if not self.is_left_behind(number):
            self.pending -= 1

    def _call_failed(self, number: int, error: BaseException) -> None:
        """Record the failure of a call in a task, if it is one.

        The error of a call that was left behind is only logged. A CancelledError is no failure if
        this object has cancelled all calls, or if the caller is being cancelled: the event loop
        cancels all tasks when it shuts down. If this object has cancelled this call for its time
        limit, the failure is the error of the time limit.
        """
        self._call_ended(number)
        was_cancelled = isinstance(error, CancelledError)
        if self.is_left_behind(number):
            if not was_cancelled:
                message = "%s failed after it had been left running"
                logger.error(message, self.describe(number), exc_info=error)
        elif not was_cancelled:
            self._record(number, error)
        elif self.has_timed_out(number):
            self._record(number, self._get_ending().timeout_errors[number])
        elif not self.cancelling and not self._is_caller_cancelled():
            self._record(number, self.cancelled_error(number, error))

    def _is_caller_cancelled(self) -> bool:
        """Return whether the caller has been cancelled during its wait, and has not run since."""
        # A cancel of a task cancels the future that it awaits, which nothing else cancels.
        return self._idle is not None and self._idle.cancelled()

    def _record(self, number: int, error: BaseException) -> None:
        """Keep a failure for `_raise`, and cancel the other calls, unless it is only logged."""
        if self.suppresses(number, error):
            return
        self.add_origin(number, error)
        self._get_ending().errors[number] = error
        self._cancel_calls()

    # -- end

    def end(self, cause: BaseException) -> None:
        """Cancel the calls, and let `wait` raise `cause` when they have ended.

        The first cause counts: this does nothing if there is a cause, or if the calls are being
        cancelled. If a task of these calls ends them itself, they are cancelled in the next
        iteration of the event loop.
        """
        ending = self._get_ending()
        if ending.cause is not None or self.cancelling:
            return
        ending.cause = cause
        if running_loop() is self._loop and asyncio.current_task() in self._tasks.values():
            # Let the current task return first: a cancel would discard its result.
            self._loop.call_soon(self._cancel_calls)
        else:
            self._cancel_calls()

    def _cancel_calls(self) -> None:
        """Cancel the tasks of all calls and start the grace period. Further times do nothing."""
        if self.cancelling or self._loop.is_closed():
            return
        self.cancelling = True
        for task in self._tasks.values():
            task.cancel()
        if self.pending and self.grace_secs is not None:
            timer = current_clock().call_later(self.grace_secs, self._leave_all_behind)
            self._get_ending().grace_timer = timer

    def start_timer(self, number: int, secs: float) -> None:
        """Limit the time of a call that has been started, unless it has ended already."""
        if self.is_running(number):
            expire = functools.partial(self._expire, number)
            self._get_ending().timers[number] = current_clock().call_later(secs, expire)

    def stop_timer(self, number: int) -> None:
        """Cancel the time limit of a call, if it has one."""
        if self._ending is not None:
            timer = self._ending.timers.pop(number, None)
            if timer is not None:
                timer.cancel()

    def has_timed_out(self, number: int) -> bool:
        """Return whether a call has exceeded its time limit, and has the grace period to end."""
        return self._ending is not None and number in self._ending.timeout_errors

    def _expire(self, number: int) -> None:
        """Cancel a call that has exceeded its time limit, and start its grace period.

        Without a grace period (None), the call may take as long as it needs to end.
        """
        ending = self._get_ending()
        task = self._tasks[number]
        ending.timeout_errors[number] = self.timeout_error(number, task)
        task.cancel()
        if self.grace_secs is not None:
            leave_behind_call = functools.partial(self._leave_behind, [number])
            timer = current_clock().call_later(self.grace_secs, leave_behind_call)
            ending.timers[number] = timer

    def _leave_all_behind(self) -> None:
        """Leave all calls behind that still run at the end of the grace period."""
        numbers = [number for number in self._tasks if self.is_running(number)]
        # The last call may have ended in this iteration of the event loop, before the caller has
        # run, which cancels the timer.
        if numbers:
            self._leave_behind(numbers)

    def _leave_behind(self, numbers: list[int]) -> None:
        """Stop waiting for calls that have ignored their cancellation."""
        ending = self._get_ending()
        names = ", ".join(self.describe(number) for number in numbers)
        logger.warning(LEFT_BEHIND_MESSAGE, names, self.grace_secs)
        ending.left_behind.update(numbers)
        leave_behind(self._tasks[number] for number in numbers)
        for number in numbers:
            self.stop_timer(number)
            self.pending -= 1
            # A call that exceeds its time limit usually fails when it has ended. Nothing waits for
            # the end of this one, so that it fails here.
            if number in ending.timeout_errors:
                self._record(number, ending.timeout_errors[number])
        self._wake_if_ended()

    # -- reports

    def is_left_behind(self, number: int) -> bool:
        """Return whether a call still runs although nothing waits for it any more."""
        return self._ending is not None and number in self._ending.left_behind

    def is_running(self, number: int) -> bool:
        """Return whether a call was started in a task, and has not ended."""
        task = self._tasks.get(number)
        return task is not None and not task.done() and not self.is_left_behind(number)

    def hook(self, number: int) -> object:
        """Return the hook of a call, or None if it is the call of no hook."""
        return None

    @property
    def owner(self) -> object:
        """The session whose run waits for the calls."""
        return None if self._waits is None else self._waits.owner

    def awaited(self) -> Awaited:
        """Return the description for reports: one part for each call that still runs."""
        secs = max(0.0, monotonic_now()() - self.since)
        calls = [
            Awaited(
                self.kind,
                self.describe(number),
                key=task,
                secs=secs,
                hook=self.hook(number),
            )
            for number, task in self._tasks.items()
            if self.is_running(number)
        ]
        return Awaited("calls", "", by=lambda: calls)


class _Pause:
    """`await _PAUSE` waits for the next iteration of the event loop, as `asyncio.sleep(0)` does."""

    # A coroutine or a generator would need a frame for each await. The iterator of a tuple yields
    # its only None without one.
    __await__ = staticmethod(functools.partial(iter, (None,)))


_PAUSE: Any = _Pause()


class _EagerStarts(threading.local):
    """Counts the eager starts of a thread that are nested in each other."""

    depth = 0


_eager_starts = _EagerStarts()


# -- one awaitable


class Wait(Calls, Generic[T]):
    """The wait for one awaitable, which `end` can end: `await Wait("name").result_of(awaitable)`.

    Errors of the awaitable are raised unchanged.
    """

    __slots__ = ("_is_future", "what")

    def __init__(
        self,
        what: str,
        grace_secs: float | None = None,
        waits: RunWaits | None = None,
    ) -> None:
        super().__init__([_MISSING], grace_secs, waits)
        self.what: str = what
        """The name of the awaitable in messages."""
        self._is_future = False

    def has_result(self) -> bool:
        return self.results[0] is not _MISSING

    def describe(self, number: int) -> str:
        return self.what

    def add_origin(self, number: int, error: BaseException) -> None:
        pass

    def cancelled_error(self, number: int, cause: BaseException) -> BaseException:
        if self._is_future:
            # As under `await`, a cancel of the future reaches its waiter.
            return cause
        return hook_cancelled_error(self.what, cause)

    async def result_of(self, awaitable: Awaitable[T]) -> T:
        """Await the awaitable in a task of its own.

        If the awaitable is a task or a future, it is only waited for: the end of the wait does not
        cancel it.
        """
        self._is_future = asyncio.isfuture(awaitable)
        call = _result_of_future if self._is_future else as_coroutine
        try:
            # `end` was called before the wait has begun.
            if self._ending is not None and self._ending.cause is not None:
                raise_unchanged(self._ending.cause)
            self.start(0, call, (awaitable,), self.what)
            await self.wait()
        except BaseException:
            # If its task was cancelled before the first step, a coroutine has not been awaited.
            close_unawaited(awaitable)
            raise
        result: T = self.results[0]
        return result


async def _result_of_future(future: asyncio.Future[T]) -> T:
    """Wait for a future, and return its result. A cancel ends this wait, and not the future."""
    try:
        await wait_done([future], secs=None)
    except CancelledError:
        # The future may have got an error at the same time, which no one will see now. Mark it as
        # retrieved, as `await future` would, or asyncio would log it.
        if future.done():
            retrieve_exception(future)
        raise
    return future.result()


async def limited(
    coro: Coroutine[Any, Any, T],
    secs: float | None,
    what: str,
) -> T:
    """Await `coro` for at most `secs`.

    Raises:
        TimeoutError: the time is up, and `coro` has ended after its cancellation.
    """
    wait = Wait[T](what)
    timer = call_later(secs, lambda: wait.end(TimeoutError(f"{what} took longer than {secs} s")))
    try:
        return await wait.result_of(coro)
    finally:
        timer.cancel()


# -- the waits of a run


class RunWaits:
    """The calls that a run waits for, one group at a time, and the error that ends the run."""

    def __init__(
        self,
        scope: RunScope | None = None,
        now: Callable[[], float] = monotonic,
        owner: object = None,
    ) -> None:
        """Prepare the waits of the run `scope` of the session `owner`. `now` returns the time."""
        self.scope: RunScope | None = scope
        self.now: Callable[[], float] = now
        self.owner: object = owner
        self.cause: BaseException | None = None
        """The error that ends the run."""
        self.outermost: Calls | None = None
        """The calls that the run's own task waits for, while it waits. The tasks of these calls may
        wait for other calls, which end with them.
        """
        self.began: float | None = None
        """When the run waited first, or None before. Reports take it for the start of the run:
        reading the clock there would cost time in each run, and the first wait comes soon.
        """

    def end(self, cause: BaseException) -> None:
        """End the run with `cause`: in its current wait, or in the next one."""
        if self.cause is not None:
            return
        self.cause = cause
        if self.outermost is not None:
            self.outermost.end(cause)

    def begin_wait(self, calls: Calls) -> None:
        """Note that a task of the run begins to wait for calls."""
        if self.began is None:
            self.began = calls.since
        if self.outermost is None:
            self.outermost = calls
            if self.cause is not None:
                calls.end(self.cause)

    def end_wait(self, calls: Calls) -> None:
        """Note that a task of the run has stopped waiting for calls."""
        if self.outermost is calls:
            self.outermost = None


# -- the contexts of calls
#
# Each call that may wait has a copy of the caller's context. When it ends, its changes of this copy
# are applied to the caller's context, too, as if it had run there.


def context_changes(
    before: Context,
    after: Context,
) -> list[tuple[ContextVar[Any], Any]]:
    """Return the variables that differ between two states of a context, with their new values.

    The new value is `_MISSING` for a variable that is unset in `after`. The variable of the current
    run is left out: it is this library's own.
    """
    # Hot path: usually nothing has changed, and this is done for each call of each run. Comparing
    # the two states in C is much faster than the loops below. Equal states with another order of
    # the variables take the loops.
    if (
        len(before) == len(after)
        and all(map(is_, before.values(), after.values()))
        and all(map(is_, before, after))
    ):
        return []
    changed = [
        (variable, value)
        for variable, value in after.items()
        if value is not before.get(variable, _MISSING)
    ]
    changed += [(variable, _MISSING) for variable in before if variable not in after]
    return [change for change in changed if change[0] is not current_scope]


class OwnContext:
    """A context that consecutive calls share, so that a token of one call is valid in the next.

    Changes of the caller's context are applied to this context before each call (`update`), and
    changes of the call are applied to the caller's context afterwards (`copy_back`).
    """

    __slots__ = ("_before", "_caller_copy", "_context", "_tokens_here", "_tokens_in_caller")

    # Only `_context` is set before the first call.
    _context: Context | None
    """The shared context, or None before the first call."""
    _before: Context
    """A copy of the shared context from when changes were last applied, with which its later state
    is compared.
    """
    _caller_copy: Context
    """A copy of the caller's context from then, for the same comparison."""
    _tokens_here: dict[ContextVar[Any], Token[Any]]
    """The tokens of the variables that changes of the caller have set in the shared context, where
    they were unset. A variable can be unset again only by its token.
    """
    _tokens_in_caller: dict[ContextVar[Any], Token[Any]]
    """The tokens of the variables that changes of calls have set in the caller's context."""

    def __init__(self) -> None:
        self._context = None

    def update(self) -> Context:
        """Return the context for a call, with the changes of the caller's context."""
        caller = copy_context()
        context = self._context
        if context is None:
            # The first call: the shared context begins as a copy of the caller's.
            context = self._context = caller.copy()
            self._before = caller
            self._tokens_here = {}
            self._tokens_in_caller = {}
        else:
            for variable, value in context_changes(self._caller_copy, caller):
                # A variable that has the value already needs no token.
                if context.get(variable, _MISSING) is not value:
                    context.run(_set, variable, value, self._tokens_here)
            # `context_changes` leaves out the run of the caller, which these calls are part of.
            scope = caller.get(current_scope)
            if context.get(current_scope) is not scope:
                context.run(current_scope.set, scope)
            self._before = context.copy()
        self._caller_copy = caller
        return context

    def copy_back(self, since: Context | None = None) -> None:
        """Apply the changes of the shared context to the current context, which is the caller's.

        Args:
            since: an earlier result of `state`: only later changes are applied. By default, these
                are the changes since the last `update` or `copy_back`.
        """
        context = self._context
        if context is None:
            return
        changed = context_changes(self._before if since is None else since, context)
        if not changed:
            return
        self._caller_copy = self._caller_copy.copy()
        for variable, value in changed:
            _set(variable, value, tokens=self._tokens_in_caller)
            if value is not _MISSING:
                # Note only this variable as applied. A change that other code has made in the
                # caller's context since `update` is still applied by the next `update`.
                self._caller_copy.run(variable.set, value)
        self._before = context.copy()

    def state(self) -> Context | None:
        """Return a copy of the shared context, from which a later `copy_back` applies changes.

        It is for calls of another task, whose own `copy_back` applies them to the context of that
        task. It is None before the first call.
        """
        return None if self._context is None else self._context.copy()


def _set(
    variable: ContextVar[Any],
    value: Any,
    tokens: dict[ContextVar[Any], Token[Any]],
) -> None:
    """Set a variable in the current context. If the value is `_MISSING`, unset it.

    If the variable was unset before, `tokens` keeps the token with which it can be unset again. A
    variable without such a token keeps its value.
    """
    if value is not _MISSING:
        was_set = variable.get(_MISSING) is not _MISSING
        token = variable.set(value)
        if not was_set:
            tokens[variable] = token
    elif variable in tokens:
        # ValueError: the variable was set in the context of another task, and cannot be unset here.
        with contextlib.suppress(ValueError):
            variable.reset(tokens[variable])
            del tokens[variable]


CallContext: TypeAlias = tuple[Context, Context]
"""The context of a call: a copy of the caller's from before the call, and the call's own."""


def copy_back(call_contexts: Iterable[CallContext]) -> None:
    """Apply the changes of concurrent calls to the current context, in the order of the calls.

    Of two changes of a variable, the later one stays. A value that a later call has set in the
    current context itself, as it ran in the caller's task, is kept.
    """
    # The values that were applied here.
    merged: dict[ContextVar[Any], Any] = {}
    for before, after in call_contexts:
        # Hot path: a context without variables has no changes, and usually no variable is set.
        if not after:
            continue
        for variable, value in context_changes(before, after):
            current = variable.get(_MISSING)
            is_merged = current is merged.get(variable, _MISSING)
            # If the value is neither from here nor that from before the calls, a later call has set
            # it in the current context itself.
            if is_merged or current is before.get(variable, _MISSING):
                variable.set(value)
                merged[variable] = value


# -- coroutines

# The instructions of `await`, `async for` and `async with`, in all supported versions of Python.
_WAITING_OPCODES = frozenset(
    {"GET_AWAITABLE", "GET_ANEXT", "BEFORE_ASYNC_WITH", "SEND", "YIELD_VALUE"},
)


def can_wait(function: object) -> bool:
    """Return whether a call of a function may wait.

    A coroutine function without `await`, `async for` and `async with` cannot wait. Everything else
    may, such as a callable object or a compiled function, which has no bytecode.
    """
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    # Not by `isinstance`: an object of `create_autospec` claims the class of a function.
    if type(function) is not types.FunctionType:
        return True
    return _code_can_wait(function.__code__)


@functools.lru_cache(maxsize=4096)
def _code_can_wait(code: types.CodeType) -> bool:
    """Return whether code can wait. The answer is cached, as reading the bytecode is slow."""
    # A plain function may return any awaitable.
    if not code.co_flags & inspect.CO_COROUTINE:
        return True
    return any(step.opname in _WAITING_OPCODES for step in dis.get_instructions(code))


def result_now(coro: Any) -> Any:
    """Return the result of a coroutine that cannot wait."""
    try:
        coro.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError(f"{coro!r} has waited")


def close_unawaited(awaitable: object) -> None:
    """Close a coroutine that will not be awaited. Python would warn about it."""
    if not inspect.iscoroutine(awaitable):
        return
    if inspect.getcoroutinestate(awaitable) == inspect.CORO_CREATED:
        awaitable.close()
