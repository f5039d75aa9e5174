"""The lazy gather: awaiting many coroutines together, at the price of awaiting them in turn while none suspends.

Coroutines start in order and run one after the other in the caller's task; no task is created. The moment one suspends, the
others are started as tasks in the caller's context, and the one that suspended continues in the caller's task. The first
failure cancels the others and waits for them. One failure is raised as it is, several as one flat group; a cancel from
outside wins over both.

    LazyGather   which batch the driven coroutine awaits in turn, and what overlaps since it suspended
    Batch        what is awaited together: the calls of hooks, the operations of a graph
    Overlap      the tasks of a batch that suspended: their failures, time limits and end
"""

from __future__ import annotations

import abc
import asyncio
import contextvars
import functools
import gc
import logging
import sys
import types
import weakref
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import anyio

from aiohooks._aio.await_chain import describe_suspension
from aiohooks._aio.cancel import CancelScope, CancelWatch, cancel_is_pending
from aiohooks._aio.clock import TimerHandle, current_clock, wake
from aiohooks._aio.run_scope import OVERLAPPING, RunScope, current_scope
from aiohooks.errors import add_origin, flattened, raise_unchanged, set_context

_logger = logging.getLogger("aiohooks")
_probe: contextvars.ContextVar[object] = contextvars.ContextVar("aiohooks_probe")


class Batch(abc.ABC):
    """Numbered coroutines that are awaited together; some may depend on the results of others."""

    __slots__ = ()

    has_dependencies: ClassVar[bool] = False
    """Whether some can start only when others have brought their results."""

    @property
    @abc.abstractmethod
    def grace_secs(self) -> float:
        """How long cancelled coroutines may take to end."""

    @abc.abstractmethod
    def ready(self) -> Iterable[int]:
        """Return the numbers whose coroutines can start now, each once, and start none of them in turn any more.

        Asked again only if there are dependencies.
        """

    @abc.abstractmethod
    def start(self, number: int) -> Awaitable[Any]:
        """Make the coroutine of `number`."""

    @abc.abstractmethod
    def current(self) -> int:
        """Return the number that runs in the caller's task."""

    @property
    @abc.abstractmethod
    def results(self) -> list[Any]:
        """Where the result of each number that runs in a task is put; asked once it is ready."""

    def complete(self) -> None:  # noqa: B027 - nothing is left to do where results are put at their places
        """Arrange the results, all of which are there."""

    @property
    @abc.abstractmethod
    def names(self) -> Sequence[str] | Mapping[int, str]:
        """The names of the tasks, by number."""

    @abc.abstractmethod
    def describe(self, number: int) -> str:
        """Return the name for messages: hook, method, step."""

    @property
    def has_timeouts(self) -> bool:
        """Whether some have a time limit."""
        return False

    def timeout_secs(self, number: int) -> float | None:
        """Return its time limit."""
        return None

    def timeout_error(self, number: int, suspended_at: str) -> BaseException:
        """Return the error for a coroutine that exceeded its time limit."""
        return TimeoutError(f"{self.describe(number)} took too long, {suspended_at}")

    @abc.abstractmethod
    def cancelled_error(self, number: int, cause: BaseException) -> BaseException:
        """Return the error for a coroutine that a third party cancelled: that must not vanish."""

    def suppresses(self, number: int, error: BaseException) -> bool:
        """Log the error and return true, if this coroutine's errors are only logged."""
        return False

    def leave_behind(self, number: int) -> bool:
        """Let the coroutine that runs in the caller's task continue in another one, if that can be done."""
        return False


class LazyGather(CancelWatch):
    """What a coroutine under `drive` awaits together, one batch after the other.

    The coroutine sets `batch` and awaits the coroutines of the batch in turn. When one fails, or `overlap` is set after one, all
    others have been started or none is left to start, and `await gather.finish(error)` ends the batch; otherwise the coroutine
    sets `batch` to None.
    """

    __slots__ = ("batch", "began", "now", "scope", "suspended_at")

    overlap: Overlap | None
    """The tasks of the batch, once a coroutine of it has suspended."""

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        """Make one; with `now` it notes the times for a status."""
        super().__init__()
        self.now: Callable[[], float] | None = now
        self.scope: RunScope | None = current_scope.get()
        """The run that the driven coroutine is part of."""
        self.batch: Batch | None = None
        """The batch that is awaited."""
        self.began: float | None = None
        """When the driven coroutine suspended first: as good as its start, and free while it does not suspend."""
        self.suspended_at: float | None = None
        """The same, of the latest batch."""

    def suspended(self) -> None:
        """Start everything that can run beside the coroutine that has just suspended."""
        super().suspended()
        if self.overlap is not None:
            return
        if self.now is not None:
            self.suspended_at = self.now()
            if self.began is None:
                self.began = self.suspended_at
        if self.batch is None:
            return
        self.overlap = Overlap(self.batch, self)
        self.overlap.start_ready()

    async def finish(self, error: BaseException | None) -> bool:
        """End the batch, in which a coroutine has suspended or failed with `error` in the caller's task.

        Raises:
            BaseException: the error of the batch.

        Returns:
            Whether the batch is complete. False: `error` is suppressed, and those behind the one that failed are to be awaited.
        """
        try:
            if isinstance(error, GeneratorExit):
                raise error
            if self.overlap is not None:
                await self.overlap.join(error)
                if self.interrupt is not None:
                    raise asyncio.CancelledError("interrupted; what was awaited has ignored it")
                return True
            batch = self.batch
            assert batch is not None
            assert error is not None
            number = batch.current()
            if isinstance(error, asyncio.CancelledError):
                # Nothing has suspended, so no cancel was delivered: the coroutine raised this itself.
                error = batch.cancelled_error(number, error)
            add_origin(error, batch.describe(number))
            if not batch.suppresses(number, error):
                raise error
            return False
        finally:
            error = self.overlap = None


class Overlap:
    """The tasks of one batch. It belongs to the task that suspended first, whose own coroutine is one of the numbers.

    It is made for every batch in which a coroutine suspends: what is rarely needed is None until it is.
    """

    __slots__ = (
        "_batch", "_caller", "_cancelled", "_context", "_copies", "_errors", "_expired", "_failing", "_grace", "_idle", "_left",
        "_left_behind", "_marked", "_number", "_outer", "_own_running", "_results", "_run_scope", "_scope", "_tasks",
        "_timers", "_watch",
    )  # fmt: skip

    def __init__(self, batch: Batch, watch: LazyGather) -> None:
        """Start nothing yet; tasks will run in the context of the caller, or in copies of it."""
        self._batch = batch
        self._watch = watch
        self._number = batch.current()
        assert watch.task is not None
        self._caller: asyncio.Task[Any] = watch.task
        self._run_scope = watch.scope
        scope = current_scope.get()
        # A run that the coroutine has begun before it suspended is in the context, and the others are not part of it.
        self._context = _context_of(watch.task) if scope is watch.scope else None
        self._marked = scope is None
        if scope is None:
            current_scope.set(OVERLAPPING)
        self._results: list[Any] = []
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._left = 0  # tasks that have not ended
        self._idle: asyncio.Future[None] | None = None
        self._scope: CancelScope | None = None
        self._outer: asyncio.CancelledError | None = None
        self._errors: dict[int, BaseException] | None = None
        self._expired: dict[int, str] | None = None  # and where they were suspended
        self._timers: dict[int, TimerHandle] | None = None
        self._grace: TimerHandle | None = None
        self._copies: list[tuple[contextvars.Context, dict[contextvars.ContextVar[Any], Any]]] | None = None
        self._own_running = True
        self._failing = False
        self._cancelled = False
        self._left_behind: set[int] | None = None
        if batch.has_timeouts:
            self._start_timer(self._number, None)

    def start_ready(self) -> None:
        """Start a task for every coroutine whose dependencies are there."""
        if self._failing:
            return
        batch, tasks, loop = self._batch, self._tasks, self._caller.get_loop()
        numbers = batch.ready()
        names, timed, self._results = batch.names, batch.has_timeouts, batch.results
        for number in numbers:
            # Brought up to its first pause by hand, so that a cancel which comes before the task's first step is reported.
            coro = self._child(number)
            coro.send(None)
            context = self._copied_context() if self._context is None else self._context
            # Made directly: a task factory could start it eagerly, inside a context that is already entered.
            child = tasks[number] = asyncio.Task(coro, loop=loop, context=context, name=names[number])
            self._left += 1
            if timed:
                self._start_timer(number, child)

    async def join(self, error: BaseException | None) -> None:
        """Wait for the tasks when the coroutine in the caller's task has ended, with `error` or None.

        Raise one failure as it is, several as a group, or the cancel from outside. No task is left when it returns, except one
        that ignores its cancellation for longer than the grace period; a warning names it.
        """
        self._own_running = False
        if self._timers is not None:
            self._stop_timer(self._number)
        try:
            if error is not None or self._scope is not None or cancel_is_pending(self._caller):
                await self._own_ended(error)
            else:
                self._watch.settle()
                if self._batch.has_dependencies:
                    self.start_ready()
            while self._left and not self._cancelled:
                self._idle = self._caller.get_loop().create_future()
                try:
                    await self._idle
                except asyncio.CancelledError as cancelled:  # our own wait, so from outside
                    self._outer = cancelled
                    self._cancel_children()
            if self._left:
                await self._wait_for_cancelled_children()
            if self._failing or self._copies is not None:
                self._finish()
        finally:
            error = None
            if self._marked:
                current_scope.set(None)
            # The traceback of what is raised has this frame, and the caller's task will have what is raised.
            del self._caller, self._watch, self._scope
        self._batch.complete()

    @property
    def unfinished(self) -> list[tuple[int, str, asyncio.Task[Any]]]:
        """The number, description and task of each coroutine that has not ended."""
        own = [(self._number, self._caller)] if self._own_running else []
        running = [(number, self._tasks[number]) for number in self._unfinished_tasks()]
        return [(number, self._batch.describe(number), task) for number, task in (*own, *running)]

    def _unfinished_tasks(self) -> list[int]:
        left_behind = self._left_behind or ()
        return [number for number, task in self._tasks.items() if not task.done() and number not in left_behind]

    def abandon(self) -> None:
        """Cancel the tasks and stop the timers without waiting: the caller is being thrown away."""
        self._cancel_children()
        for number in tuple(self._timers or ()):
            self._stop_timer(number)

    async def _child(self, number: int) -> None:
        """Run one coroutine in a task and report its outcome; a callback of the task would come one tick later."""
        try:
            await _pause()
            self._results[number] = await self._batch.start(number)
            if self._batch.has_dependencies:
                self.start_ready()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            self._child_failed(number, error)
        finally:
            if self._timers is not None:
                self._stop_timer(number)
            if self._left_behind is None or number not in self._left_behind:
                self._child_ended()

    def _child_ended(self) -> None:
        self._left -= 1
        if not self._left and self._idle is not None:
            wake(self._idle)

    def _child_failed(self, number: int, error: BaseException) -> None:
        if self._left_behind is not None and number in self._left_behind:
            if not isinstance(error, asyncio.CancelledError):
                _logger.error("%s failed after it had been left running", self._batch.describe(number), exc_info=error)
        elif not isinstance(error, asyncio.CancelledError):
            self._record(number, error)
        elif self._expired is not None and number in self._expired:
            self._record(number, self._batch.timeout_error(number, self._expired[number]))
        elif not self._cancelled:
            self._record(number, self._batch.cancelled_error(number, error))

    async def _own_ended(self, error: BaseException | None) -> None:
        """Record the outcome of the coroutine in the caller's task: a cancel from outside, a failure, or neither."""
        watch, scope, number = self._watch, self._scope, self._number
        own = () if scope is None else tuple(scope.own_cancels)
        outside = watch.outside_cancel(error, own)
        others_cancelled = self._caller.cancelling() - len(own) > watch.base
        if scope is not None:
            scope.uncancel()
        if self._grace is not None:
            self._grace.cancel()
        if cancel_is_pending(self._caller):
            # From 3.13 on a task group that fails while its task is cancelled cancels the task again, for the next await.
            try:
                await _pause()
            except asyncio.CancelledError as pending:
                if outside is None and others_cancelled:
                    outside = pending
        if outside is None:
            watch.settle()
        else:
            self._outer = outside
            self._cancel_children()
        try:
            if error is not None and not isinstance(error, asyncio.CancelledError):
                self._record(number, error)
            elif error is not None and outside is None:
                if self._expired is not None and number in self._expired:
                    self._record(number, self._batch.timeout_error(number, self._expired[number]))
                elif scope is None:
                    self._record(number, self._batch.cancelled_error(number, error))
        finally:
            error = outside = None

    def _record(self, number: int, error: BaseException) -> None:
        add_origin(error, self._batch.describe(number))
        if self._batch.suppresses(number, error):
            self._results[number] = None
            return
        if self._errors is None:
            self._errors = {}
        self._errors[number] = error
        self._cancel_children()
        if self._own_running:
            self._cancel_own("another hook of this phase failed")

    def _cancel_own(self, why: str) -> None:
        if self._scope is None:
            self._scope = CancelScope(self._caller, self._watch)
        if not self._scope.cancel_called:
            self._scope.cancel(why)
            self._grace = current_clock().call_later(self._batch.grace_secs, self._give_up_own)

    def _cancel_children(self) -> None:
        self._failing = True
        if not self._cancelled:
            self._cancelled = True
            for task in self._tasks.values():
                task.cancel()

    def _start_timer(self, number: int, child: asyncio.Task[None] | None) -> None:
        secs = self._batch.timeout_secs(number)
        if secs is not None:
            if self._timers is None:
                self._timers = {}
            self._timers[number] = current_clock().call_later(secs, functools.partial(self._expire, number, child))

    def _stop_timer(self, number: int) -> None:
        timer = self._timers.pop(number, None) if self._timers is not None else None
        if timer is not None:
            timer.cancel()

    def _expire(self, number: int, child: asyncio.Task[None] | None) -> None:
        if self._expired is None:
            self._expired = {}
        self._expired[number] = describe_suspension(child or self._caller)
        if child is not None:
            child.cancel()
            assert self._timers is not None
            self._timers[number] = current_clock().call_later(
                self._batch.grace_secs, functools.partial(self._give_up, [number], timed_out=True)
            )
        else:
            self._cancel_own("hook timeout")

    async def _wait_for_cancelled_children(self) -> None:
        # An anyio scope repeats its cancel at every tick until the task has left it: hence the shield.
        loop = self._caller.get_loop()
        grace = current_clock().call_later(self._batch.grace_secs, lambda: self._give_up(self._unfinished_tasks()))
        try:
            with anyio.CancelScope(shield=True):
                while self._left:
                    self._idle = loop.create_future()
                    try:
                        await self._idle
                    except asyncio.CancelledError as error:
                        self._outer = self._outer or error
        finally:
            grace.cancel()

    def _give_up(self, numbers: list[int], *, timed_out: bool = False) -> None:
        """Leave tasks running that have ignored their cancellation."""
        names = ", ".join(self._batch.describe(number) for number in numbers)
        _logger.warning("%s still runs %s s after its cancellation; continuing without it", names, self._batch.grace_secs)
        self._left_behind = {*(self._left_behind or ()), *numbers}
        for number in numbers:
            if timed_out:
                assert self._expired is not None
                self._record(number, self._batch.timeout_error(number, self._expired[number]))
            self._child_ended()

    def _give_up_own(self) -> None:
        name, grace_secs = self._batch.describe(self._number), self._batch.grace_secs
        if self._batch.leave_behind(self._number):
            _logger.warning("%s still runs %s s after its cancellation; continuing without it", name, grace_secs)
            assert self._scope is not None
            self._scope.cancel_again("the hook is left behind")
        else:
            _logger.warning(
                "%s still runs %s s after its cancellation, in its caller's task, which waits for it", name, grace_secs
            )

    def _finish(self) -> None:
        """Copy context variables back, and raise the error of the batch, if any."""
        for copy, before in self._copies or ():
            for variable, value in copy.items():
                if value is not before.get(variable) and variable is not current_scope:
                    variable.set(value)
        errors = [] if self._errors is None else [self._errors[number] for number in sorted(self._errors)]
        first: BaseException | None = self._outer
        self._errors = self._outer = None
        try:
            if first is None:  # KeyboardInterrupt and the like pass as they are
                first = next((error for error in errors if len(errors) == 1 or not isinstance(error, Exception)), None)
            if first is not None:
                keep_errors(first, [error for error in errors if error is not first])
                raise_unchanged(first)
            if errors:
                raise BaseExceptionGroup(f"{len(errors)} failures in one phase", flattened(errors))
        finally:
            first = None  # the traceback of what is raised has this frame
            errors.clear()

    def _copied_context(self) -> contextvars.Context:
        copy = contextvars.copy_context()
        copy.run(current_scope.set, OVERLAPPING if self._run_scope is None else self._run_scope)
        if self._copies is None:
            self._copies = []
        self._copies.append((copy, dict(copy)))
        return copy


@types.coroutine
def _pause() -> Generator[None, None, None]:
    yield


def keep_errors(raised: BaseException, errors: list[BaseException]) -> None:
    """Log what would be lost because `raised` wins, and put it at the end of its context."""
    if not errors:
        return
    last = raised
    for _ in range(_MOST_LINKS):
        if last.__context__ is None:
            break
        last = last.__context__
    for error in errors:
        _logger.error("a hook failed, but %s is raised instead", type(raised).__name__, exc_info=error)
        link = error
        for _ in range(_MOST_LINKS):  # cut where the chain would become a circle
            if link.__context__ is None:
                break
            if link.__context__ is raised:
                set_context(link, None)
                break
            link = link.__context__
    if all(error is not last for error in errors):
        set_context(last, errors[0] if len(errors) == 1 else BaseExceptionGroup("hooks failed", errors))


_MOST_LINKS = 100


def _context_of(task: asyncio.Task[Any]) -> contextvars.Context | None:
    """Return the very context in which `task` runs, or None if it cannot be had."""
    if hasattr(asyncio, "_nest_patched"):
        return None  # nest_asyncio runs other tasks while this one has entered its context
    mark = object()
    _probe.set(mark)
    context = _task_context(task)
    return context if context is not None and context.get(_probe) is mark else None


if sys.version_info >= (3, 12):

    def _task_context(task: asyncio.Task[Any]) -> contextvars.Context | None:
        return task.get_context()

else:  # 3.11 has no method for it, but the garbage collector sees it; slowly, so the latest is remembered
    _latest: tuple[Callable[[], asyncio.Task[Any] | None], contextvars.Context | None] = (lambda: None, None)

    def _task_context(task: asyncio.Task[Any]) -> contextvars.Context | None:
        global _latest
        known, context = _latest
        if known() is not task:
            context = next((one for one in gc.get_referents(task) if type(one) is contextvars.Context), None)
            _latest = weakref.ref(task, _forget), context
        return context

    def _forget(known: object) -> None:
        global _latest
        if _latest[0] is known:
            _latest = (lambda: None, None)
