"""The lazy gather: awaiting many coroutines together, at the price of awaiting them in turn while none suspends.

Coroutines start in order and run one after the other in the caller's task; no task is created. The moment one suspends, the
others are started as tasks in the caller's context, and the one that suspended continues in the caller's task. The first
failure cancels the others and waits for them. One failure is raised as it is, several as one flat group; a cancel from
outside wins over both.

    lazily            awaits a coroutine that awaits others in turn
    run_overlapping   what `lazily` does once that coroutine has suspended
    LazyGather        the cancels that reach what is awaited, and what overlaps
    Overlap           coroutines that overlap: their tasks, failures, time limits and end
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
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import anyio

from aiohooks._aio.await_chain import describe_suspension
from aiohooks._aio.cancel import CancelScope
from aiohooks._aio.cancel_watch import CancelWatch, ScopeReason, cancel_is_pending, drive, drive_on
from aiohooks._aio.clock import TimerHandle, current_clock, wake
from aiohooks._aio.run_scope import RunScope, SharedContext, current_scope
from aiohooks.errors import add_origin, contexts, flattened, raise_unchanged, set_context

_logger = logging.getLogger("aiohooks")
ENDED = object()
"""Instead of what a coroutine waits for: `next(coro.__await__(), ENDED)` costs less than a `send` that raises StopIteration."""
_probe: contextvars.ContextVar[object] = contextvars.ContextVar("aiohooks_probe")


class LazyGather(CancelWatch):
    """What a task awaits together, one overlap after the other, and the cancels that reach it meanwhile.

    All of a run is awaited with one of these: what overlaps with `lazily`, everything else under `drive`.
    """

    __slots__ = ("began", "now", "scope", "suspended_at")

    overlap: Overlap | None
    """What is awaited together, once a coroutine of it has suspended."""

    def __init__(self, scope: RunScope | None, now: Callable[[], float] | None = None) -> None:
        """Make one for the run `scope`; with `now` it notes the times for a status."""
        CancelWatch.__init__(self)  # sooner than `super()`, and made for many calls
        self.scope: RunScope | None = scope
        """The run that what is awaited is part of."""
        self.now: Callable[[], float] | None = now
        self.began: float | None = None
        """When something suspended first: as good as the start of a run, and free while nothing does."""
        self.suspended_at: float | None = None
        """The same, of the latest overlap."""

    def suspended(self) -> None:
        CancelWatch.suspended(self)
        if self.now is not None and self.overlap is None:
            self.suspended_at = self.now()
            if self.began is None:
                self.began = self.suspended_at


@types.coroutine
def lazily(
    coro: Coroutine[Any, Any, None],
    overlaps: list[Overlap],
    gather: LazyGather | None,
    new_overlap: Callable[..., Overlap],
    *args: Any,
) -> Generator[Any, Any, None]:
    """Await `coro`, which awaits others in turn; once one of these suspends, all the rest overlap with it.

    Args:
        coro: leaves out those that `Overlap.ready` has returned meanwhile, and joins what is in `overlaps` at its end.
        overlaps: gets the overlap.
        gather: of the run that they are part of.
        new_overlap: makes the overlap of `args`, when a coroutine has suspended or failed.
        args: the arguments.

    Raises:
        BaseException: the error of one, or several as a group; or the cancel from outside.
    """
    scope = current_scope.get() if gather is None else gather.scope
    failure: BaseException | None = None
    waiting: Any = None
    try:
        waiting = next(coro.__await__(), ENDED)
    except BaseException as error:
        failure = error
    if failure is None:
        if waiting is not ENDED:
            yield from run_overlapping(coro, waiting, new_overlap(*args), overlaps, gather, scope)
        return
    try:
        raise_failure(new_overlap(*args), failure)
    finally:
        failure = None


def raise_failure(overlap: Overlap, error: BaseException) -> None:
    """A coroutine has failed before any has suspended: raise its error, or return if that is only logged."""
    number = overlap.number
    try:
        if isinstance(error, asyncio.CancelledError):
            # Nothing has suspended, so no cancel was delivered: the coroutine raised this itself.
            error = overlap.cancelled_error(number, error)
        add_origin(error, overlap.describe(number))
        if not overlap.suppresses(number, error):
            raise error
    finally:
        del error  # its traceback has this frame


def run_overlapping(
    coro: Coroutine[Any, Any, None],
    waiting: Any,
    overlap: Overlap,
    overlaps: list[Overlap],
    gather: LazyGather | None,
    scope: RunScope | None,
) -> Generator[Any, Any, None]:
    """Await the rest of `coro`, which has suspended with `waiting`, and all others of `overlap` beside it.

    `scope` is the run of the context when `coro` began. Without a `gather`, one is made for this call.
    """
    watch = LazyGather(scope) if gather is None else gather
    watch.suspended()
    watch.overlap = overlap
    overlaps.append(overlap)
    failure: BaseException | None = None
    try:
        overlap.start(watch)
        try:
            yield from drive_on(coro, waiting, watch)
            return
        except GeneratorExit:
            raise
        except BaseException as error:
            if overlap.joined:
                raise
            failure = error
        yield from drive(overlap.join(failure), watch)  # pyright: ignore[reportGeneralTypeIssues]
    finally:
        failure = watch.overlap = None
        overlaps.clear()
        if gather is None:
            watch.reset()


class Overlap(abc.ABC):
    """Numbered coroutines that are awaited together, made when one suspends or fails; some may depend on others' results.

    It belongs to the task that suspended first, whose own coroutine is one of the numbers. As it is made for every call that
    suspends, what is rarely needed is None until it is.
    """

    __slots__ = (
        "_caller", "_context", "_copies", "_errors", "_expired", "_failing", "_grace", "_idle", "_left", "_left_behind",
        "_marked", "_outer", "_scope", "_tasks", "_timers", "_watch", "grace_secs", "has_timeouts", "joined",
        "names", "number", "results",
    )  # fmt: skip

    has_dependencies: ClassVar[bool] = False
    """Whether some can start only when others have brought their results."""

    number: int
    """The one that runs in the caller's task."""
    results: list[Any]
    """Where the results of the others are put, by number."""
    names: Sequence[str] | Mapping[int, str]
    """The names of the tasks, by number."""
    has_timeouts: bool
    """Whether some have a time limit."""
    grace_secs: float
    """How long cancelled coroutines may take to end."""
    joined: bool
    """Whether the coroutine in the caller's task has ended."""

    @abc.abstractmethod
    def ready(self) -> Iterable[tuple[int, Callable[..., Awaitable[Any]], tuple[Any, ...]]]:
        """Return the numbers whose coroutines can start now, each once, with the function that makes it and its arguments.

        None of these is started in turn any more. Asked again only if there are dependencies.
        """

    def complete(self) -> None:  # noqa: B027 - nothing is left to do where results are put at their places
        """Arrange the results, all of which are there."""

    @abc.abstractmethod
    def describe(self, number: int) -> str:
        """Return the name for messages: hook, method, step."""

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

    def leave_behind(self, number: int, task: asyncio.Task[Any]) -> bool:
        """Let the coroutine that runs in the caller's `task` continue in another one, if that can be done."""
        return False

    def start(self, watch: LazyGather) -> None:
        """Start the tasks, in the context of the caller or in copies of it; `watch` knows the cancels that reach the caller."""
        assert watch.task is not None
        self._watch = watch
        self._caller: asyncio.Task[Any] = watch.task
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._left = 0  # tasks that have not ended
        self.joined = self._failing = False
        self._idle: asyncio.Future[None] | None = None
        self._scope: CancelScope | None = None
        self._outer: asyncio.CancelledError | None = None
        self._errors: dict[int, BaseException] | None = None
        self._expired: dict[int, str] | None = None  # and where they were suspended
        self._timers: dict[int, TimerHandle] | None = None
        self._grace: TimerHandle | None = None
        self._copies: list[tuple[contextvars.Context, dict[contextvars.ContextVar[Any], Any]]] | None = None
        self._left_behind: set[int] | None = None
        scope = current_scope.get()
        self._marked = scope is None
        probe: contextvars.ContextVar[Any] = current_scope if scope is None else _probe
        mark = SharedContext()
        probe.set(mark)
        # A run that the coroutine has begun before it suspended is in the context, and the others are not part of it.
        self._context = _context_of(watch.task, probe, mark) if scope is watch.scope else None
        if self.has_timeouts:
            self._start_timer(self.number, None)
        self.start_ready()

    def start_ready(self) -> None:
        """Start a task for every coroutine whose dependencies are there."""
        if self._failing:
            return
        tasks, loop = self._tasks, self._caller.get_loop()
        names, timed, context = self.names, self.has_timeouts, self._context
        for number, call, args in self.ready():
            # Brought up to its first pause by hand, so that a cancel which comes before the task's first step is reported.
            coro = self._child(number, call, args)
            coro.send(None)
            # Made directly: a task factory could start it eagerly, inside a context that is already entered.
            child = tasks[number] = asyncio.Task(
                coro, loop=loop, context=self._copied_context() if context is None else context, name=names[number]
            )
            self._left += 1
            if timed:
                self._start_timer(number, child)

    async def join(self, error: BaseException | None = None) -> None:
        """Wait for the tasks when the coroutine in the caller's task has ended, with `error` or None.

        Raise one failure as it is, several as a group, or the cancel from outside. No task is left when it returns, except one
        that ignores its cancellation for longer than the grace period; a warning names it.
        """
        self.joined = True
        if self._timers is not None:
            self._stop_timer(self.number)
        try:
            if error is not None or self._scope is not None or cancel_is_pending(self._caller):
                await self._own_ended(error)
            else:
                self._watch.settle()
                if self.has_dependencies:
                    self.start_ready()
            while self._left and not self._failing:
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
            if self._marked:
                current_scope.set(None)
            interrupted = self._watch.interrupt is not None
            if error is not None or self._failing or interrupted:
                # The traceback of what is raised has this frame, and the caller's task will have what is raised.
                error = self._scope = None
                del self._caller, self._watch
        self.complete()
        if interrupted:
            raise asyncio.CancelledError(ScopeReason("interrupted; what was awaited has ignored it"))

    @property
    def unfinished(self) -> list[tuple[int, str, asyncio.Task[Any]]]:
        """The number, description and task of each coroutine that has not ended."""
        own = [(self.number, self._caller)] if not self.joined else []
        running = [(number, self._tasks[number]) for number in self._unfinished_tasks()]
        return [(number, self.describe(number), task) for number, task in (*own, *running)]

    def _unfinished_tasks(self) -> list[int]:
        left_behind = self._left_behind or ()
        return [number for number, task in self._tasks.items() if not task.done() and number not in left_behind]

    def abandon(self) -> None:
        """Cancel the tasks and stop the timers without waiting: the caller is being thrown away."""
        self._cancel_children()
        for number in tuple(self._timers or ()):
            self._stop_timer(number)

    async def _child(self, number: int, call: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> None:
        """Run one coroutine in a task and report its outcome; a callback of the task would come one tick later."""
        try:
            await _pause()
            self.results[number] = await call(*args)
            if self.has_dependencies:
                self.start_ready()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            self._child_failed(number, error)
        finally:
            if self._timers is not None:
                self._stop_timer(number)
            if self._left_behind is None or number not in self._left_behind:
                self._left -= 1
                if not self._left:
                    self._wake()

    def _wake(self) -> None:
        if self._idle is not None:
            wake(self._idle)

    def _child_failed(self, number: int, error: BaseException) -> None:
        if self._left_behind is not None and number in self._left_behind:
            if not isinstance(error, asyncio.CancelledError):
                _logger.error("%s failed after it had been left running", self.describe(number), exc_info=error)
        elif not isinstance(error, asyncio.CancelledError):
            self._record(number, error)
        elif self._expired is not None and number in self._expired:
            self._record(number, self.timeout_error(number, self._expired[number]))
        elif not self._failing:
            self._record(number, self.cancelled_error(number, error))

    async def _own_ended(self, error: BaseException | None) -> None:
        """Record the outcome of the coroutine in the caller's task: a cancel from outside, a failure, or neither."""
        watch, scope, number = self._watch, self._scope, self.number
        own = () if scope is None else tuple(scope.own_cancels)
        outside = watch.outside_cancel(error, own)
        others_cancelled = self._caller.cancelling() - watch.counted(own) > watch.base
        if scope is not None:
            scope.uncancel()
        if self._grace is not None:
            self._grace.cancel()
        if cancel_is_pending(self._caller):
            # From 3.13 on a task group that fails while its task is cancelled cancels the task again, for the next await.
            before = self._caller.cancelling()
            try:
                await _pause()
            except asyncio.CancelledError as pending:
                if outside is None and (others_cancelled or self._caller.cancelling() > before):
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
                    self._record(number, self.timeout_error(number, self._expired[number]))
                elif scope is None:
                    self._record(number, self.cancelled_error(number, error))
        finally:
            error = outside = None

    def _record(self, number: int, error: BaseException) -> None:
        add_origin(error, self.describe(number))
        if self.suppresses(number, error):
            return
        if self._errors is None:
            self._errors = {}
        self._errors[number] = error
        self._cancel_children()
        if not self.joined:
            self._cancel_own("another hook of this phase failed")

    def _cancel_own(self, why: str) -> None:
        if self._scope is None:
            self._scope = CancelScope(self._caller, self._watch)
        if not self._scope.cancel_called:
            self._scope.cancel(why)
            self._grace = current_clock().call_later(self.grace_secs, self._give_up_own)

    def _cancel_children(self) -> None:
        if not self._failing:
            self._failing = True
            for task in self._tasks.values():
                task.cancel()

    def _start_timer(self, number: int, child: asyncio.Task[None] | None) -> None:
        secs = self.timeout_secs(number)
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
                self.grace_secs, functools.partial(self._give_up, [number], timed_out=True)
            )
        else:
            self._cancel_own("hook timeout")

    async def _wait_for_cancelled_children(self) -> None:
        # An anyio scope repeats its cancel at every tick until the task has left it: hence the shield.
        loop = self._caller.get_loop()
        grace = current_clock().call_later(self.grace_secs, lambda: self._give_up(self._unfinished_tasks()))
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
        names = ", ".join(self.describe(number) for number in numbers)
        _logger.warning("%s still runs %s s after its cancellation; continuing without it", names, self.grace_secs)
        self._left_behind = {*(self._left_behind or ()), *numbers}
        for number in numbers:
            if timed_out:
                assert self._expired is not None
                self._record(number, self.timeout_error(number, self._expired[number]))
            self._left -= 1
        if not self._left:
            self._wake()

    def _give_up_own(self) -> None:
        name, grace_secs = self.describe(self.number), self.grace_secs
        if self.leave_behind(self.number, self._caller):
            _logger.warning("%s still runs %s s after its cancellation; continuing without it", name, grace_secs)
            assert self._scope is not None
            self._scope.cancel_again("the hook is left behind")
        else:
            _logger.warning(
                "%s still runs %s s after its cancellation, in its caller's task, which waits for it", name, grace_secs
            )

    def _finish(self) -> None:
        """Copy context variables back, and raise the error of the overlap, if any."""
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
        copy.run(current_scope.set, self._watch.scope or SharedContext())
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
    chain = contexts(raised)
    for error in errors:
        _logger.error("a hook failed, but %s is raised instead", type(raised).__name__, exc_info=error)
    lost = [error for error in errors if all(error is not one for one in chain)]
    for error in lost:
        for link in contexts(error):  # often raised while the cancel was handled
            if any(link.__context__ is one for one in chain):
                set_context(link, None)
                break
    if lost:
        set_context(chain[-1], lost[0] if len(lost) == 1 else BaseExceptionGroup("hooks failed", lost))


def _context_of(task: asyncio.Task[Any], probe: contextvars.ContextVar[Any], mark: object) -> contextvars.Context | None:
    """Return the very context in which `task` runs, where `probe` has been set to `mark`; or None if it cannot be had."""
    if "_nest_patched" in vars(asyncio):
        return None  # nest_asyncio runs other tasks while this one has entered its context
    context = _task_context(task)
    return context if context is not None and context.get(probe) is mark else None


if sys.version_info >= (3, 12):
    _task_context = asyncio.Task.get_context

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
