"""Awaiting many coroutines together, at the price of awaiting them in turn while none suspends.

Coroutines start in order and run one after the other in the caller's task; no task is made. The moment one suspends, the
others are started as tasks in the caller's context, and the one that suspended goes on in the caller's task. The first
failure cancels the others and waits for them. One failure is raised as it is, several as one flat group; an outer cancel
wins over both.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import sys
import types
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, Protocol, TypeVar

import anyio

from aiohooks._clock import TimerHandle, current_clock
from aiohooks._errors import HookCancelledError, HookTimeoutError
from aiohooks._interrupt import Interrupt, running_task

_logger = logging.getLogger("aiohooks")
T = TypeVar("T")
_probe: contextvars.ContextVar[object] = contextvars.ContextVar("aiohooks_probe")


class Work(Protocol):
    """What is awaited together: numbered coroutines, some of which may have to wait for others' results."""

    grace_secs: float
    has_order: bool
    """Whether some can start only when others have brought their results."""

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


def _cancelled_by_others(work: Work, number: int, cause: BaseException) -> HookCancelledError:
    error = HookCancelledError(
        f"{work.describe(number)} was cancelled, and not by its session; to end the session, request a stop or raise an error"
    )
    error.__cause__ = cause
    return error


class FanOut:
    """A place from which pieces of work fan out, one piece after the other, while `drive` watches for a suspension.

    A piece sets `make_work`, runs its coroutines in turn, and looks at `crew` after each: once that is set, all others have
    been started, and `await crew.settle(None)` is what is left to do. An error goes to `failed`. At its end it
    sets both to None.
    """

    __slots__ = ("_context", "_task", "base", "crew", "make_work")

    def __init__(self) -> None:
        """Starts with nothing to do."""
        self._task: asyncio.Task[Any] | None = None
        self._context: contextvars.Context | None = None
        self.base = 0
        """How many cancels the caller had been through when the work began; more than these come from outside."""
        self.make_work: Callable[[], Work] | None = None
        """Makes the work of the piece that runs now, when it suspends or fails."""
        self.crew: Crew | None = None

    def own_context(self) -> contextvars.Context | None:
        """The very context in which the running task runs, or None if it cannot be had; looked up once for each task."""
        task = running_task()
        if task is not self._task:
            self._task = task
            self._context = _context_of(task)
        return self._context

    async def failed(self, error: BaseException) -> None:
        """Raises what the failure of the coroutine that runs in the caller's task comes to; returns if it is forgiven."""
        if self.crew is not None:
            await self.crew.settle(error)
            return
        assert self.make_work is not None
        work = self.make_work()
        if isinstance(error, asyncio.CancelledError) and running_task().cancelling() <= self.base:
            # Nobody cancelled the caller: the hook awaited something that was cancelled, or raised this itself.
            raise _cancelled_by_others(work, work.current(), error)
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
        if fan.crew is None and fan.make_work is not None:
            fan.crew = Crew(fan.make_work(), fan.own_context(), fan.base)
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


class Crew:
    """The tasks of one overlap and what came of them."""

    __slots__ = (
        "caller",
        "cancelled",
        "children",
        "context",
        "copies",
        "errors",
        "expired",
        "failing",
        "idle",
        "interrupt",
        "loop",
        "number",
        "outer",
        "own_running",
        "timers",
        "work",
    )  # fmt: skip

    def __init__(self, work: Work, context: contextvars.Context | None, base: int) -> None:
        """Starts everything that can start beside what has just suspended, in `context`."""
        self.work = work
        self.number = work.current()
        self.loop = asyncio.get_running_loop()
        self.caller = running_task()
        self.context = context
        self.copies: list[tuple[contextvars.Context, dict[contextvars.ContextVar[Any], Any]]] = []
        self.interrupt = Interrupt(self.caller, base)
        self.children: dict[int, asyncio.Task[Any]] = {}
        self.errors: dict[int, BaseException] = {}
        self.expired: set[int] = set()
        self.timers: dict[int, TimerHandle] = {}
        self.idle: asyncio.Future[None] | None = None
        self.outer: asyncio.CancelledError | None = None
        self.own_running = True
        self.failing = False
        self.cancelled = False
        self.start_ready()
        self.arm_own()

    async def settle(self, error: BaseException | None) -> None:
        """Waits for the others when what ran in the caller's task has ended, with `error` or None.

        Raises what the module says. No task is left when it returns, but for one that ignores its cancellation for longer
        than the grace period; that one is named in a warning.
        """
        self.own_done(error)
        if self.children:
            await self.wait_for_children()
        self.finish()

    def start_ready(self) -> None:
        if self.failing:
            return
        for number in self.work.startable():
            # Made directly: a task factory could start it eagerly, inside a context that is already entered.
            context = self.copied_context() if self.context is None else self.context
            coro = self.child(number)
            coro.send(None)
            child = asyncio.Task(coro, loop=self.loop, context=context, name=self.work.name(number))
            self.children[number] = child
            secs = self.work.timeout_secs(number)
            if secs is not None:
                self.timers[number] = current_clock().call_later(secs, _Expiry(self, number, child))

    def copied_context(self) -> contextvars.Context:
        copy = contextvars.copy_context()
        self.copies.append((copy, dict(copy)))
        return copy

    def arm_own(self) -> None:
        secs = self.work.timeout_secs(self.number)
        if secs is not None:
            self.timers[self.number] = current_clock().call_later(secs, _Expiry(self, self.number, None))

    async def child(self, number: int) -> None:
        """Runs one piece in a task and reports what came of it: quicker than a callback of the task, which is one more tick."""
        try:
            # The coroutine is brought up to here by hand, so that a cancel which comes before its first step is reported too.
            await _pause()
            result = await self.work.start(number)
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            self.child_failed(number, error)
        else:
            self.work.store(number, result)
            if self.work.has_order:
                self.start_ready()
        finally:
            children = self.children
            if self.timers:
                self.disarm(number)
            if children.pop(number, None) is not None and not children:
                idle = self.idle
                if idle is not None and not idle.done():
                    idle.set_result(None)

    def child_failed(self, number: int, error: BaseException) -> None:
        if not isinstance(error, asyncio.CancelledError):
            self.record(number, error)
        elif number in self.expired:
            self.record(number, self.timed_out(number))
        elif not self.cancelled:
            self.record(number, _cancelled_by_others(self.work, number, error))

    def own_done(self, error: BaseException | None) -> None:
        number = self.number
        self.own_running = False
        self.disarm(number)
        if isinstance(error, asyncio.CancelledError):
            if self.interrupt.from_outside():
                self.outer = error
                self.cancel_children()
            elif number in self.expired:
                self.record(number, self.timed_out(number))
            elif not self.interrupt.fired:
                self.record(number, _cancelled_by_others(self.work, number, error))
        elif error is not None:
            self.record(number, error)
        elif self.work.has_order:
            self.start_ready()

    def record(self, number: int, error: BaseException) -> None:
        describe_failure(error, self.work.describe(number))
        if self.work.forgives(number, error):
            self.work.store(number, None)
            self.start_ready()
            return
        self.errors[number] = error
        self.failing = True
        self.cancel_children()
        if self.own_running:
            self.interrupt.fire("another hook of this phase failed")

    def timed_out(self, number: int) -> HookTimeoutError:
        return HookTimeoutError(
            f"{self.work.describe(number)} took longer than its timeout of {self.work.timeout_secs(number)} s; "
            "give it more with configure(hook, timeout=...)"
        )

    def disarm(self, number: int) -> None:
        if self.timers and (timer := self.timers.pop(number, None)) is not None:
            timer.cancel()

    def cancel_children(self) -> None:
        self.failing = True
        if not self.cancelled:
            self.cancelled = True
            for child in self.children.values():
                child.cancel()

    def abandon(self) -> None:
        self.cancel_children()
        for number in tuple(self.timers):
            self.disarm(number)

    async def wait_for_children(self) -> None:
        try:
            while self.children and not self.cancelled:
                self.idle = self.loop.create_future()
                await self.idle
        except asyncio.CancelledError as error:
            self.outer = error
            self.cancel_children()
        if self.children:
            await self.wait_for_cancelled_children()

    async def wait_for_cancelled_children(self) -> None:
        # An anyio scope repeats its cancel at every tick until the task has left it: hence the shield.
        grace = current_clock().call_later(self.work.grace_secs, self.give_up)
        try:
            with anyio.CancelScope(shield=True):
                while self.children:
                    self.idle = self.loop.create_future()
                    try:
                        await self.idle
                    except asyncio.CancelledError as error:
                        self.outer = self.outer or error
        finally:
            grace.cancel()

    def give_up(self) -> None:
        names = ", ".join(self.work.describe(number) for number in self.children)
        _logger.warning("%s still runs %s s after its cancellation; going on without it", names, self.work.grace_secs)
        self.children.clear()
        if self.idle is not None and not self.idle.done():
            self.idle.set_result(None)

    def finish(self) -> None:
        outer_remains = self.interrupt.settle()
        for copy, before in self.copies:
            for variable, value in copy.items():
                if value is not before.get(variable):
                    variable.set(value)
        errors = [self.errors[number] for number in sorted(self.errors)]
        if self.outer is None and outer_remains:
            # A hook swallowed the caller's cancel; which hook runs where is chance, so it is delivered all the same.
            self.outer = asyncio.CancelledError("cancelled while hooks ran")
        if self.outer is not None:
            if errors:
                self.outer.__context__ = errors[0] if len(errors) == 1 else BaseExceptionGroup("hooks failed", errors)
            raise self.outer
        if not errors:
            self.work.complete()
            return
        for error in errors:
            if len(errors) == 1 or not isinstance(error, Exception):  # KeyboardInterrupt and the like pass as they are
                raise error
        raise BaseExceptionGroup(f"{len(errors)} failures in one phase", errors)


class _Expiry:
    """What happens when a call has taken too long: a callback that holds no frame."""

    __slots__ = ("_child", "_crew", "_number")

    def __init__(self, crew: Crew, number: int, child: asyncio.Task[Any] | None) -> None:
        self._crew, self._number, self._child = crew, number, child

    def __call__(self) -> None:
        self._crew.expired.add(self._number)
        if self._child is not None:
            self._child.cancel()
        else:
            self._crew.interrupt.fire("hook timeout")


@types.coroutine
def _pause() -> Generator[None, None, None]:
    yield


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
