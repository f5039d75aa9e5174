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
import sys
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

from aiohooks._crew import Crew, Work, cancelled_by_others, describe_failure
from aiohooks._interrupt import running_task

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
        task = running_task()
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
        if isinstance(error, asyncio.CancelledError) and running_task().cancelling() <= self.base:
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
