"""Code of users that may have to be ended: whatever may wait runs in a task and in a context of its
own.

Nothing here cancels the caller's task: the caller waits for a future of ours, so a `CancelledError`
that it gets is meant for it. What is awaited is ended by cancelling its task, whose outcome says
whether others have cancelled it.

    can_wait    whether a call of a function may wait
    result_now  the result of one that cannot
    Overlap     numbered calls that are awaited together, and end together
    Wait        one awaitable, which can be ended with an error
    RunWaits    what a run awaits, and the error with which it is ended from outside
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
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from contextvars import Context, copy_context
from typing import Any, ClassVar, Generic, TypeVar

import anyio

from aiohooks._core.cancel import retrieve_exception, running_loop, wait_done
from aiohooks._core.clock import TimerHandle, call_later, current_clock, monotonic_now, wake
from aiohooks._core.contexts import (
    CallContext,
    Changes,
    OwnContext,
    RunScope,
    copy_back,
    is_unchanged,
)
from aiohooks._core.diagnostics import Awaited, Waiting, describe_suspension, logger
from aiohooks._core.observers import as_coroutine
from aiohooks.errors import (
    add_origin,
    contexts,
    failure_of,
    flattened,
    hook_cancelled_error,
    raise_unchanged,
    set_context,
)

T = TypeVar("T")

_WAITS = frozenset({"GET_AWAITABLE", "GET_ANEXT", "BEFORE_ASYNC_WITH", "SEND", "YIELD_VALUE"})


def can_wait(function: object) -> bool:
    """Return whether a call may wait: not if it is a coroutine function whose code has no `await`,
    `async for`, `async with`.

    A function whose code is not known may wait.
    """
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    return type(function) is not types.FunctionType or _code_can_wait(
        function.__code__
    )  # what is compiled has no bytecode


@functools.lru_cache(maxsize=4096)
def _code_can_wait(code: types.CodeType) -> bool:
    return not code.co_flags & inspect.CO_COROUTINE or any(
        one.opname in _WAITS for one in dis.get_instructions(code)
    )


def result_now(coro: Any) -> Any:
    """Return the result of a coroutine that cannot wait."""
    try:
        coro.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError(f"{coro!r} has waited")


class RunWaits:
    """What a run awaits, one wait after the other, and the error with which it is ended from
    outside.
    """

    __slots__ = (
        "began",
        "cause",
        "current",
        "now",
        "outermost",
        "own_contexts",
        "scope",
        "suspended_at",
    )

    def __init__(
        self, scope: RunScope | None = None, now: Callable[[], float] | None = None
    ) -> None:
        """Make one for the run `scope`; with `now` it notes the times for a status."""
        self.scope: RunScope | None = scope
        """The run."""
        self.now: Callable[[], float] | None = now
        self.cause: BaseException | None = None
        """What the run is to end with."""
        self.outermost: Overlap | None = None
        """What the run's own task waits for; tasks of that may wait for others."""
        self.current: Overlap | None = None
        """The latest of these."""
        self.began: float | None = None
        """When the run waited first: as good as its start, and free while nothing waits."""
        self.suspended_at: float | None = None
        """When the current wait began."""
        self.own_contexts: dict[Any, OwnContext] = {}
        """The contexts of hooks with several calls in one attempt."""

    def own_context(self, key: Any) -> OwnContext:
        """Return the context for the calls of a hook, the same until `reset`."""
        own = self.own_contexts.get(key)
        if own is None:
            own = self.own_contexts[key] = OwnContext()
        return own

    def reset(self) -> None:
        """Forget the last run, or the last attempt, and what it was to end with."""
        self.cause = None
        self.end_attempt()

    def end_attempt(self) -> None:
        """Forget the contexts of an attempt."""
        if self.own_contexts:
            self.own_contexts = {}

    def end(self, cause: BaseException) -> None:
        """End the run with `cause`: in what it awaits, or in what it awaits next."""
        if self.cause is None:
            self.cause = cause
            if self.outermost is not None:
                self.outermost.end(cause)

    def begin_wait(self, wait: Overlap) -> Overlap | None:
        """Note what is awaited; return what `end_wait` wants."""
        if self.now is not None:
            self.suspended_at = wait.since = self.now()
            if self.began is None:
                self.began = self.suspended_at
        before, self.current = self.current, wait
        if self.outermost is None:
            self.outermost = wait
            if self.cause is not None:
                wait.end(self.cause)
        return before

    def end_wait(self, wait: Overlap, before: Overlap | None) -> None:
        """Note the end of a wait."""
        self.current = before
        if self.outermost is wait:
            self.outermost = None


class Overlap(Waiting):
    """Numbered calls that are awaited together; made when the first of them may wait.

    The first failure cancels the others, which are waited for. One failure is raised as it is,
    several as one flat group; a cancel of the caller wins over both. No task is left, except one
    that ignores its cancellation for longer than the grace period; a warning names it.
    """

    __slots__ = (
        "_base",
        "_cause",
        "_contexts",
        "_errors",
        "_expired",
        "_grace",
        "_idle",
        "_known",
        "_left_behind",
        "_loop",
        "_outer",
        "_starts",
        "_tasks",
        "_timers",
        "_values",
        "_waits",
        "failing",
        "grace_secs",
        "left",
        "results",
        "since",
    )

    _has_successors = False
    kind: ClassVar[str] = "call"
    """What the calls are, for reports."""
    keeps_result: bool = False
    """Whether the calls have ended well in spite of `end`, and that counts."""

    def __init__(
        self, results: list[Any], grace_secs: float | None, waits: RunWaits | None = None
    ) -> None:
        """Put results into `results`, by number; give cancelled calls `grace_secs` to end, or None
        for as long as they need.
        """
        self.results: list[Any] = results
        self.grace_secs: float | None = grace_secs
        self.left: int = 0
        """How many calls have not ended; if none, `finish` does for `wait`."""
        self.failing: bool = False
        """Whether the calls have been cancelled, so that no other is to be started."""
        self.since: float | None = None
        """When the wait for them began, if it is part of a run."""
        self._waits = waits
        self._loop = asyncio.get_running_loop()
        self._starts = _nested.starts
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._contexts: list[CallContext] = []
        self._base: Context | None = None
        self._values: list[Any]  # of the base
        self._known: dict[int, Changes] | None = (
            None  # what differs from the base in earlier contexts of the caller
        )
        self._idle: asyncio.Future[None] | None = None
        self._outer: CancelledError | None = None
        self._cause: BaseException | None = None
        # What follows is rarely needed.
        self._errors: dict[int, BaseException] | None = None
        self._expired: dict[int, str] | None = None  # and where they waited
        self._timers: dict[int, TimerHandle] | None = None
        self._grace: TimerHandle | None = None
        self._left_behind: set[int] | None = None

    # -- what the calls are

    @abc.abstractmethod
    def describe(self, number: int) -> str:
        """Return the name for messages: hook, method, step."""

    def timeout_error(self, number: int, waited_at: str) -> BaseException:
        """Return the error for a call that exceeded its time limit."""
        return TimeoutError(f"{self.describe(number)} took too long, {waited_at}")

    def describe_suspension(self, number: int, task: asyncio.Task[Any]) -> str:
        """Return where a call is suspended that exceeds its time limit."""
        return describe_suspension(task)

    def cancelled_error(self, number: int, cause: BaseException) -> BaseException:
        """Return the error for a call that was cancelled, and not from here: that must not
        vanish.
        """
        return hook_cancelled_error(self.describe(number), cause)

    def suppresses(self, number: int, error: BaseException) -> bool:
        """Log the error and return true, if this call's errors are only logged."""
        return False

    def add_origin(self, number: int, error: BaseException) -> None:
        """Note the origin of an error that is raised."""
        add_origin(error, self.describe(number))

    def succeeded(
        self, number: int
    ) -> None:  # nothing is to be done where no call depends on another
        """Called when a call has put its result, in its task."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._has_successors = cls.succeeded is not Overlap.succeeded

    # -- starting and waiting

    def in_turn(self) -> None:
        """Note that a call runs in the caller's context, which it may change."""
        self._base = self._known = None

    # so many parameters, as an object for them would be made for each call of a hook that may wait
    def start(
        self,
        number: int,
        call: Callable[..., Awaitable[Any]],
        args: tuple[Any, ...],
        keywords: Mapping[str, Any],
        name: str | None,
        secs: float | None = None,
        own: OwnContext | None = None,
        context: Context | None = None,
    ) -> None:
        """Start a call in a task, up to its first wait where Python can do that.

        Args:
            number: its number.
            call: what is called, and its result awaited.
            args: the arguments.
            keywords: those given by keyword.
            name: the name of the task.
            secs: its time limit.
            own: its context, instead of a copy of the caller's.
            context: the same, and nothing is given back to the caller.
        """
        base = None
        if context is None:
            base = self._base
            if base is None:
                base = self._base = copy_context()
                self._values = [*base.values()]
            if own is None:
                context = base.copy()
            else:
                if self._known is None:
                    self._known = {}
                context = own.update(base, self._known)
                self._contexts.append(own)
                base = None
        if keywords:
            call = functools.partial(call, **keywords)
        starts = self._starts
        if starts[0] < _MOST_NESTED:
            starts[0] += 1
            try:
                coro = self._call(number, call, args, False)
                task = make_task(
                    coro, loop=self._loop, name=name, context=context, eager_start=True
                )
            finally:
                starts[0] -= 1
            if task.done():
                if task.cancelled():
                    self._tasks[number] = task
                if (
                    base is not None
                    and (base or context)
                    and not is_unchanged(self._values, context)
                ):
                    self._contexts.append((base, context))
                return
        else:
            coro = self._call(number, call, args, True, secs)
            # Up to its pause, so that a cancel which comes before the first step is reported.
            coro.send(None)
            task = make_task(coro, loop=self._loop, name=name, context=context)
            # its time begins with its first step: a busy loop would end a call that has not begun
            secs = None
        self._tasks[number] = task
        self.left += 1
        if base is not None:
            self._contexts.append((base, context))
        if self.failing:  # while it was started, in which it could not be cancelled
            task.cancel()
        if secs is not None:
            self.start_timer(number, secs)

    def start_timer(self, number: int, secs: float) -> None:
        """Limit the time of a call that has been started."""
        if self._timers is None:
            self._timers = {}
        self._timers[number] = current_clock().call_later(
            secs, functools.partial(self._expire, number)
        )

    async def _call(
        self,
        number: int,
        call: Callable[..., Awaitable[Any]],
        args: tuple[Any, ...],
        pauses: bool,
        secs: float | None = None,
    ) -> None:
        """Make a call and report its outcome; a callback of the task would come one turn of the
        loop later.
        """
        try:
            if pauses:
                await _pause()
                if secs is not None:
                    self.start_timer(number, secs)
            self.results[number] = await call(*args)
        except (
            BaseException
        ) as error:  # KeyboardInterrupt, too: it is raised in the caller, and not by the loop
            self._ended(number)
            self._call_failed(number, error)
        else:
            if number in self._tasks:
                self._ended(number)
            if self._has_successors:
                try:
                    self.succeeded(number)
                except (
                    BaseException
                ) as error:  # nothing awaits this task, and the caller would wait indefinitely
                    self._record(number, error)
        if self._idle is not None and not self.left and not self._loop.is_closed():
            wake(self._idle)

    def _ended(self, number: int) -> None:
        """Count a call as ended, unless it has ended before it was counted, or was left behind."""
        if self._timers is not None:
            self.stop_timer(number)
        if number in self._tasks and (self._left_behind is None or number not in self._left_behind):
            self.left -= 1

    def failed(self, number: int, error: BaseException) -> None:
        """Note the failure of a call that was made in the caller's task, beside the others."""
        if isinstance(error, CancelledError):
            error = self.cancelled_error(number, error)
        self._record(number, failure_of(error, self.describe(number)))

    async def wait(self) -> None:
        """Wait until the calls have ended, and give what they have set in their contexts to the
        caller's.

        Raises:
            CancelledError: the caller was cancelled.
            BaseException: the failure of a call, several as a group; or else the cause of `end`.
        """
        if self.left:
            waits = self._waits
            before = None if waits is None else waits.begin_wait(self)
            try:
                while self.left:
                    self._idle = self._loop.create_future()
                    if self._outer is None:
                        try:
                            await self._idle
                        except CancelledError as cancelled:
                            self._outer = cancelled
                            self._cancel_calls()
                        except GeneratorExit:  # the caller is being thrown away
                            self._cancel_calls()
                            self._stop_grace_period()
                            raise
                    else:
                        # An anyio scope repeats its cancel at every turn of the loop until the task
                        # has left it.
                        with (
                            anyio.CancelScope(shield=True),
                            contextlib.suppress(CancelledError),
                        ):  # the first one is raised
                            await self._idle
            finally:
                if waits is not None:
                    waits.end_wait(self, before)
        self.finish()

    def finish(self) -> None:
        """Do what is left when no call is unfinished; raises like `wait`."""
        if self._contexts:
            copy_back(self._contexts)
        if not self.failing:
            for number, task in self._tasks.items():
                # A call that has cancelled its own task and ended without another wait.
                if task.cancelled() and (self._expired is None or number not in self._expired):
                    self._record(number, self.cancelled_error(number, CancelledError()))
        if self._errors is not None or self.failing:
            self._raise()

    def _stop_grace_period(self) -> None:
        if self._grace is not None:
            self._grace.cancel()

    def _raise(self) -> None:
        self._stop_grace_period()  # the calls may have ended before anything waited for them
        errors = (
            []
            if self._errors is None
            else [self._errors[number] for number in sorted(self._errors)]
        )
        first: BaseException | None = self._outer
        cause = None if self.keeps_result else self._cause
        self._errors = self._outer = self._cause = None
        self._tasks.clear()
        try:
            if first is None:  # KeyboardInterrupt and the like pass as they are
                first = next(
                    (
                        error
                        for error in errors
                        if len(errors) == 1 or not isinstance(error, Exception)
                    ),
                    None,
                )
            if first is not None:
                keep_errors(first, [error for error in errors if error is not first])
                raise_unchanged(first)
            if errors:
                raise BaseExceptionGroup(f"{len(errors)} calls failed", flattened(errors))
            if cause is not None:
                raise_unchanged(cause)
        finally:
            first = cause = None  # the traceback of what is raised has this frame
            errors.clear()

    # -- ending

    def end(self, cause: BaseException) -> None:
        """End the calls, and raise `cause` when they have ended; once."""
        if self._cause is not None or self.failing:
            return
        self._cause = cause
        current = asyncio.current_task() if running_loop() is self._loop else None
        if any(task is current for task in self._tasks.values()):
            # One that cancels itself would lose its result even if it does not wait any more.
            self._loop.call_soon(self._cancel_calls)
        else:
            self._cancel_calls()

    def _cancel_calls(self) -> None:
        if self.failing or self._loop.is_closed():
            return
        self.failing = True
        for task in self._tasks.values():
            task.cancel()
        if self.left and self.grace_secs is not None:
            self._grace = current_clock().call_later(self.grace_secs, self._give_up)

    def _call_failed(self, number: int, error: BaseException) -> None:
        if self._left_behind is not None and number in self._left_behind:
            if not isinstance(error, CancelledError):
                logger.error(
                    "%s failed after it had been left running",
                    self.describe(number),
                    exc_info=error,
                )
        elif not isinstance(error, CancelledError):
            self._record(number, error)
        elif self._expired is not None and number in self._expired:
            self._record(number, self.timeout_error(number, self._expired[number]))
        elif not self.failing:
            self._record(number, self.cancelled_error(number, error))

    def _record(self, number: int, error: BaseException) -> None:
        if self.suppresses(number, error):
            return
        self.add_origin(number, error)
        if self._errors is None:
            self._errors = {}
        self._errors[number] = error
        self._cancel_calls()

    def stop_timer(self, number: int) -> None:
        """End the time limit of a call, if it has one."""
        timer = self._timers.pop(number, None) if self._timers is not None else None
        if timer is not None:
            timer.cancel()

    def _expire(self, number: int) -> None:
        if self._expired is None:
            self._expired = {}
        task = self._tasks[number]
        self._expired[number] = self.describe_suspension(number, task)
        task.cancel()
        if self.grace_secs is not None:
            assert self._timers is not None
            self._timers[number] = current_clock().call_later(
                self.grace_secs, functools.partial(self._give_up, number)
            )

    def _give_up(self, only: int | None = None) -> None:
        """Leave calls running that have ignored their cancellation: all, or the only one whose time
        was up.
        """
        numbers = [number for number, _, _ in self.unfinished] if only is None else [only]
        names = ", ".join(self.describe(number) for number in numbers)
        logger.warning(
            "%s still runs %s s after its cancellation; continuing without it",
            names,
            self.grace_secs,
        )
        self._left_behind = {*(self._left_behind or ()), *numbers}
        for number in numbers:
            _left_running.add(self._tasks[number])
            self._tasks[number].add_done_callback(_left_running.discard)
            self.stop_timer(number)
            if self._expired is not None and number in self._expired:
                self._record(number, self.timeout_error(number, self._expired[number]))
            self.left -= 1
        if not self.left and self._idle is not None:
            wake(self._idle)

    @property
    def unfinished(self) -> list[tuple[int, str, asyncio.Task[Any]]]:
        """The number, description and task of each call that has not ended."""
        left_behind = self._left_behind or ()
        running = [
            (number, task)
            for number, task in self._tasks.items()
            if not task.done() and number not in left_behind
        ]
        return [(number, self.describe(number), task) for number, task in running]

    def awaited_by(self, method: str, arguments: Mapping[str, Any]) -> Awaited | None:
        if method != "wait" or not (unfinished := self.unfinished):
            return None
        waits, session = self._waits, None
        owner = None if waits is None or waits.scope is None else waits.scope.session
        if (
            waits is not None
            and owner is not None
            and waits.outermost is self
            and getattr(owner, "waits", None) is waits
        ):
            session = (
                owner.awaited()
            )  # else what the hooks of a session do that is nested in a run of this one
        secs = None if self.since is None else max(0.0, monotonic_now()() - self.since)
        calls = [Awaited(self.kind, what, key=task, secs=secs) for _, what, task in unfinished]
        return Awaited(
            "calls", f"task {unfinished[0][2].get_name()!r}", by=lambda: calls, key=session
        )


class Wait(Overlap, Generic[T]):
    """One awaitable: `await Wait("what it is").result_of(awaitable)`. Its errors are raised as they
    are.
    """

    __slots__ = ("_is_future", "keeps_result", "what")

    def __init__(
        self, what: str, grace_secs: float | None = None, waits: RunWaits | None = None
    ) -> None:
        super().__init__([None], grace_secs, waits)
        self.what: str = what
        self.keeps_result: bool = False
        self._is_future = False  # whose cancel is passed on, as under any other `await`

    def succeeded(self, number: int) -> None:
        self.keeps_result = True

    def describe(self, number: int) -> str:
        return self.what

    def add_origin(self, number: int, error: BaseException) -> None:
        pass

    def cancelled_error(self, number: int, cause: BaseException) -> BaseException:
        return cause if self._is_future else hook_cancelled_error(self.what, cause)

    async def result_of(self, awaitable: Awaitable[T]) -> T:
        """Await something, in a task of its own; a task or future that is given is not cancelled
        with it.
        """
        self._is_future = asyncio.isfuture(awaitable)
        call = _done if self._is_future else as_coroutine
        try:
            if self._cause is not None:
                raise_unchanged(self._cause)
            self.start(0, call, (awaitable,), {}, self.what)
            await self.wait()
        except BaseException:
            close_unawaited(awaitable)  # ended before its task has begun
            raise
        result: T = self.results[0]
        return result


def close_unawaited(awaitable: object) -> None:
    """Close a coroutine that will not be awaited, or Python warns about it."""
    if (
        inspect.iscoroutine(awaitable)
        and inspect.getcoroutinestate(awaitable) == inspect.CORO_CREATED
    ):
        awaitable.close()


async def _done(future: asyncio.Future[T]) -> T:
    try:
        await wait_done([future], None)
    finally:
        if (
            future.done()
        ):  # as under any other `await`: also an error that a cancel meets is not reported as lost
            retrieve_exception(future)
    return future.result()


async def limited(coro: Coroutine[Any, Any, T], secs: float | None, what: str) -> T:
    """Await `coro` for at most `secs`.

    Raises:
        TimeoutError: the time is up, and it has ended after its cancellation.
    """
    wait = Wait[T](what)
    timer = call_later(secs, lambda: wait.end(TimeoutError(f"{what} took longer than {secs} s")))
    try:
        return await wait.result_of(coro)
    finally:
        timer.cancel()


def keep_errors(raised: BaseException, errors: list[BaseException]) -> None:
    """Log what would be lost because `raised` wins, and put it at the end of its context."""
    if not errors:
        return
    chain = contexts(raised)
    for error in errors:
        logger.error(
            "a call failed, but %s is raised instead", type(raised).__name__, exc_info=error
        )
    lost = [error for error in errors if all(error is not one for one in chain)]
    for error in lost:
        for link in contexts(error):  # often raised while the cancel was handled
            if any(link.__context__ is one for one in chain):
                set_context(link, None)
                break
    if lost:
        set_context(
            chain[-1], lost[0] if len(lost) == 1 else BaseExceptionGroup("hooks failed", lost)
        )


# -- tasks


@types.coroutine
def _pause() -> Generator[None, None, None]:
    yield


class _Nested(threading.local):
    def __init__(self) -> None:
        self.starts = [0]
        """How many tasks of this thread are being started, one inside the other: each takes some of
        the stack.
        """


make_task: Callable[..., asyncio.Task[Any]] = asyncio.Task
"""Makes the task of a call; the check for leaks puts a function in its place that notes where the
call was made.
"""
_nested = _Nested()
_left_running: set[asyncio.Task[None]] = set()
"""Tasks to which nothing else might refer; the loop does not."""
_MOST_NESTED = 16 if sys.version_info >= (3, 12) else 0
