"""Awaiting many coroutines together, at the price of awaiting them in turn while none suspends.

Coroutines start in order and run one after the other in the caller's task; no task is made. The moment one suspends, the
others are started as tasks in the caller's context, and the one that suspended goes on in the caller's task. The first
failure cancels the others and waits for them. One failure is raised as it is, several as one flat group; an outer cancel
wins over both.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import logging
import sys
import types
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, Protocol, TypeVar, cast

import anyio

from aiohooks._aio.await_chain import describe_suspension
from aiohooks._aio.cancel import CancelScope, current_task
from aiohooks._aio.clock import TimerHandle, current_clock
from aiohooks.errors import HookCancelledError, HookTimeoutError

_logger = logging.getLogger("aiohooks")


class Work(Protocol):
    """What is awaited together: numbered coroutines, some of which may have to wait for others' results."""

    grace_secs: float
    has_order: bool
    """Whether some can start only when others have brought their results."""
    has_timeouts: bool
    """Whether some call has a time limit."""

    def startable(self) -> Iterable[int]:
        """The numbers not handed out yet whose coroutines can start now; each number comes once."""
        ...

    def start(self, number: int) -> Coroutine[Any, Any, Any]:
        """Makes the coroutine of `number`."""
        ...

    def current(self) -> int:
        """The number that is running in the caller's task."""
        ...

    def store(self, number: int, result: Any) -> None:
        """Keeps a result that a task brought."""
        ...

    def name(self, number: int) -> str:
        """A task's name for it."""
        ...

    def describe(self, number: int) -> str:
        """Who this is, for messages: hook, phase, step."""
        ...

    def timeout_secs(self, number: int) -> float | None:
        """How long this call may take, or None."""
        ...

    def forgives(self, number: int, error: BaseException) -> bool:
        """Whether this failure is only logged (and was: the method logs it)."""
        ...

    def complete(self) -> None:
        """All results are there."""
        ...


def describe_failure(error: BaseException, who: str) -> None:
    """Adds to a passing error whose it is; an error that passes twice says it once."""
    note = f"raised by {who}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def cancelled_by_others(work: Work, number: int, cause: BaseException) -> HookCancelledError:
    """The error for a coroutine that was cancelled, and not by us: it must not vanish."""
    error = HookCancelledError(
        f"{work.describe(number)} was cancelled, and not by its session; to end the session, request a stop or raise an error"
    )
    error.__cause__ = cause
    return error


def flat(errors: Iterable[BaseException]) -> list[BaseException]:
    """The errors, with those of groups instead of the groups."""
    found: list[BaseException] = []
    for error in errors:
        if isinstance(error, BaseExceptionGroup):
            group = cast("BaseExceptionGroup[BaseException]", error)
            found.extend(flat(group.exceptions))
        else:
            found.append(error)
    return found


class Crew:
    """One overlap. It belongs to the task that suspended first, whose own coroutine is one of the numbers.

    It is made for every phase in which a hook suspends: what is rarely needed is None until it is.
    """

    __slots__ = (
        "_base", "_caller", "_cancelled", "_children", "_context", "_copies", "_errors", "_expired", "_failing", "_idle",
        "_interrupt", "_number", "_outer", "_own_running", "_timers", "_work",
    )  # fmt: skip

    def __init__(self, work: Work, caller: asyncio.Task[Any], context: contextvars.Context | None, base: int) -> None:
        """Makes one that has started nothing yet; tasks run in `context`, or in copies of the current one."""
        self._work = work
        self._number = work.current()
        self._caller = caller
        self._context = context
        self._base = base
        self._children: dict[int, asyncio.Task[None]] = {}
        self._idle: asyncio.Future[None] | None = None
        self._interrupt: CancelScope | None = None
        self._outer: asyncio.CancelledError | None = None
        self._errors: dict[int, BaseException] | None = None
        self._expired: dict[int, str] | None = None  # and where they stood then
        self._timers: dict[int, TimerHandle] | None = None
        self._copies: list[tuple[contextvars.Context, dict[contextvars.ContextVar[Any], Any]]] | None = None
        self._own_running = True
        self._failing = False
        self._cancelled = False
        if work.has_timeouts:
            self._arm(self._number, None)

    def start_ready(self) -> None:
        """Starts every coroutine whose inputs are there, as a task."""
        if self._failing:
            return
        work = self._work
        loop = self._caller.get_loop()
        for number in work.startable():
            # Brought up to its first pause by hand, so that a cancel which comes before the task's first step is reported.
            coro = self._child(number)
            coro.send(None)
            context = self._copied_context() if self._context is None else self._context
            # Made directly: a task factory could start it eagerly, inside a context that is already entered.
            child = asyncio.Task(coro, loop=loop, context=context, name=work.name(number))
            self._children[number] = child
            if work.has_timeouts:
                self._arm(number, child)

    async def settle(self, error: BaseException | None) -> None:
        """Waits for the others when what ran in the caller's task has ended, with `error` or None.

        Raises one failure as it is, several as a group, or the outer cancel. No task is left when it returns, but for one that
        ignores its cancellation for longer than the grace period; that one is named in a warning.
        """
        self._own_running = False
        if self._timers is not None:
            self._disarm(self._number)
        if error is not None:
            self._own_failed(error)
        elif self._cancelled_from_outside():
            # The hook swallowed the caller's cancel; which hook runs where is chance, so the others get it all the same.
            self._outer = asyncio.CancelledError("cancelled while hooks ran")
            self._cancel_children()
        elif self._work.has_order:
            self.start_ready()
        if self._children:
            if not self._cancelled:
                await self._wait_for_children()
            if self._children:
                await self._wait_for_cancelled_children()
        if self._failing or self._interrupt is not None or self._copies is not None:
            self._finish()
        elif self._caller.cancelling() > self._base:
            # A hook swallowed the caller's cancel; which hook runs where is chance, so it is delivered all the same.
            raise asyncio.CancelledError("cancelled while hooks ran")
        self._work.complete()

    @property
    def unfinished(self) -> list[tuple[int, str, asyncio.Task[Any]]]:
        """What was started and has not ended: its number, who it is, and its task."""
        own = [(self._number, self._caller)] if self._own_running else []
        return [(number, self._work.describe(number), task) for number, task in (*own, *self._children.items())]

    def abandon(self) -> None:
        """Lets go of everything: the caller is being thrown away."""
        self._cancel_children()
        for number in tuple(self._timers or ()):
            self._disarm(number)

    # -- the tasks

    async def _child(self, number: int) -> None:
        """Runs one piece in a task and reports what came of it: quicker than a callback of the task, which is one more tick."""
        try:
            await _pause()
            result = await self._work.start(number)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            self._child_failed(number, error)
        else:
            self._work.store(number, result)
            if self._work.has_order:
                self.start_ready()
        finally:
            children = self._children
            if self._timers is not None:
                self._disarm(number)
            if children.pop(number, None) is not None and not children:
                idle = self._idle
                if idle is not None and not idle.done():
                    idle.set_result(None)

    def _child_failed(self, number: int, error: BaseException) -> None:
        if not isinstance(error, asyncio.CancelledError):
            self._record(number, error)
        elif self._expired is not None and number in self._expired:
            self._record(number, self._timed_out(number))
        elif not self._cancelled:
            self._record(number, cancelled_by_others(self._work, number, error))

    def _own_failed(self, error: BaseException) -> None:
        number = self._number
        interrupt = self._interrupt
        if not isinstance(error, asyncio.CancelledError):
            self._record(number, error)
        elif self._cancelled_from_outside():
            self._outer = error
            self._cancel_children()
        elif self._expired is not None and number in self._expired:
            self._record(number, self._timed_out(number))
        elif interrupt is None:
            self._record(number, cancelled_by_others(self._work, number, error))

    def _cancelled_from_outside(self) -> bool:
        interrupt = self._interrupt
        return self._caller.cancelling() > self._base if interrupt is None else interrupt.from_outside()

    def _record(self, number: int, error: BaseException) -> None:
        describe_failure(error, self._work.describe(number))
        if self._work.forgives(number, error):
            self._work.store(number, None)
            return
        if self._errors is None:
            self._errors = {}
        self._errors[number] = error
        self._cancel_children()
        if self._own_running:
            self._fire("another hook of this phase failed")

    def _fire(self, why: str) -> None:
        if self._interrupt is None:
            self._interrupt = CancelScope(self._caller, self._base)
        self._interrupt.fire(why)

    def _cancel_children(self) -> None:
        self._failing = True
        if not self._cancelled:
            self._cancelled = True
            for child in self._children.values():
                child.cancel()

    # -- time limits

    def _arm(self, number: int, child: asyncio.Task[None] | None) -> None:
        secs = self._work.timeout_secs(number)
        if secs is not None:
            if self._timers is None:
                self._timers = {}
            self._timers[number] = current_clock().call_later(secs, functools.partial(self._expire, number, child))

    def _disarm(self, number: int) -> None:
        timer = self._timers.pop(number, None) if self._timers is not None else None
        if timer is not None:
            timer.cancel()

    def _expire(self, number: int, child: asyncio.Task[None] | None) -> None:
        if self._expired is None:
            self._expired = {}
        self._expired[number] = describe_suspension(child or self._caller)
        if child is not None:
            child.cancel()
        else:
            self._fire("hook timeout")

    def _timed_out(self, number: int) -> HookTimeoutError:
        error = HookTimeoutError(
            f"{self._work.describe(number)} took longer than its timeout of {self._work.timeout_secs(number)} s; "
            "give it more with configure(hook, timeout=...)"
        )
        assert self._expired is not None
        error.add_note(self._expired[number])
        return error

    # -- waiting

    async def _wait_for_children(self) -> None:
        loop = self._caller.get_loop()
        try:
            while self._children and not self._cancelled:
                self._idle = loop.create_future()
                await self._idle
        except asyncio.CancelledError as error:
            self._outer = error
            self._cancel_children()

    async def _wait_for_cancelled_children(self) -> None:
        # An anyio scope repeats its cancel at every tick until the task has left it: hence the shield.
        loop = self._caller.get_loop()
        grace = current_clock().call_later(self._work.grace_secs, self._give_up)
        try:
            with anyio.CancelScope(shield=True):
                while self._children:
                    self._idle = loop.create_future()
                    try:
                        await self._idle
                    except asyncio.CancelledError as error:
                        self._outer = self._outer or error
        finally:
            grace.cancel()

    def _give_up(self) -> None:
        names = ", ".join(self._work.describe(number) for number in self._children)
        _logger.warning("%s still runs %s s after its cancellation; going on without it", names, self._work.grace_secs)
        self._children.clear()
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _finish(self) -> None:
        """Carries back what tasks did to copied contexts, takes the own cancel back, and raises what there is to raise."""
        for copy, before in self._copies or ():
            for variable, value in copy.items():
                if value is not before.get(variable):
                    variable.set(value)
        outer_remains = self._caller.cancelling() > self._base if self._interrupt is None else self._interrupt.settle()
        errors = [] if self._errors is None else [self._errors[number] for number in sorted(self._errors)]
        if self._outer is None and outer_remains:
            self._outer = asyncio.CancelledError("cancelled while hooks ran")
        if self._outer is not None:
            if errors:
                self._outer.__context__ = errors[0] if len(errors) == 1 else BaseExceptionGroup("hooks failed", errors)
            raise self._outer
        for error in errors:
            if len(errors) == 1 or not isinstance(error, Exception):  # KeyboardInterrupt and the like pass as they are
                raise error
        if errors:
            raise BaseExceptionGroup(f"{len(errors)} failures in one phase", flat(errors))

    def _copied_context(self) -> contextvars.Context:
        copy = contextvars.copy_context()
        if self._copies is None:
            self._copies = []
        self._copies.append((copy, dict(copy)))
        return copy


@types.coroutine
def _pause() -> Generator[None, None, None]:
    yield


T = TypeVar("T")
_probe: contextvars.ContextVar[object] = contextvars.ContextVar("aiohooks_probe")


class FanOut:
    """A place from which pieces of work fan out, one piece after the other, while `drive` watches for a suspension.

    A piece sets `piece`, runs its coroutines in turn, and looks at `crew` after each: once that is set, all others have been
    started, and `await crew.settle(None)` is what is left to do. An error goes to `failed`. At its end it sets both to None.
    """

    __slots__ = ("_context", "_task", "base", "began", "crew", "now", "piece", "since")

    def __init__(self) -> None:
        """Starts with nothing to do."""
        self.piece: tuple[Any, ...] | None = None
        """The piece that runs now: the class of its `Work` and the arguments, for when it suspends or fails."""
        self.crew: Crew | None = None
        self.base: int = 0
        """How many cancels the caller had been through when the work began; more than these come from outside."""
        self.now: Callable[[], float] | None = None
        """What tells the time, where somebody may ask for `since` and `began`."""
        self.since: float | None = None
        """When the latest piece that suspended did so first: as good as its start, and free while nothing suspends."""
        self.began: float | None = None
        """The same, of the first piece since this was last set to None."""
        self._task: asyncio.Task[Any] | None = None
        self._context: contextvars.Context | None = None

    def work(self) -> Work:
        """The work of the piece that runs now."""
        assert self.piece is not None
        make: Callable[..., Work] = self.piece[0]
        return make(*self.piece[1:])

    def overlap(self) -> None:
        """Starts everything that can start beside what has just suspended."""
        task = current_task()
        if task is not self._task:  # the context is looked up once for each task
            self._task = task
            self._context = _context_of(task)
        if self.now is not None:
            self.since = now = self.now()
            if self.began is None:
                self.began = now
        self.crew = Crew(self.work(), task, self._context, self.base)
        self.crew.start_ready()

    async def failed(self, error: BaseException) -> None:
        """Raises what the failure of the coroutine that runs in the caller's task comes to; returns if it is forgiven."""
        if self.crew is not None:
            await self.crew.settle(error)
            return
        work = self.work()
        if isinstance(error, asyncio.CancelledError) and current_task().cancelling() <= self.base:
            # Nobody cancelled the caller: the hook awaited something that was cancelled, or raised this itself.
            raise cancelled_by_others(work, work.current(), error)
        describe_failure(error, work.describe(work.current()))
        raise error


@types.coroutine
def drive(coro: Coroutine[Any, Any, T], fan: FanOut) -> Generator[Any, Any, T]:
    """Awaits `coro`, and starts the rest of what it does in turn when that suspends. Costs one frame while nothing does."""
    error: BaseException | None = None
    while True:
        try:
            waiting = coro.send(None) if error is None else coro.throw(error)
        except StopIteration as stop:
            result: T = stop.value
            return result
        if fan.crew is None and fan.piece is not None:
            fan.overlap()
        try:
            yield waiting
            error = None
        except GeneratorExit:  # the caller itself is thrown away: nothing may be awaited any more
            if fan.crew is not None:
                fan.crew.abandon()
            coro.close()
            raise
        except BaseException as thrown:
            error = thrown


def _context_of(task: asyncio.Task[Any]) -> contextvars.Context | None:
    """The very context in which `task` runs now, or None if it cannot be had."""
    mark = object()
    _probe.set(mark)
    context: contextvars.Context | None = None
    if sys.version_info >= (3, 12):
        context = task.get_context()
    else:  # 3.11 keeps it to itself, but the garbage collector sees it
        context = next((one for one in gc.get_referents(task) if type(one) is contextvars.Context), None)
    return context if context is not None and context.get(_probe) is mark else None
