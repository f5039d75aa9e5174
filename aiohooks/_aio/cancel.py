"""Finishing what must be finished although the caller is cancelled: cleanup, commits, worker threads."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import sys
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from aiohooks._aio.await_chain import describe_suspension
from aiohooks._aio.clock import TimerHandle, current_clock


class CancelScope:
    """One block of one task that may be ended from outside.

    `fire` cancels the task; when the block has been left, `settle` takes that cancel back and says whether another one,
    from outside, remains. Only own cancels are ever taken back, so a cancel of the caller's is never lost.
    """

    __slots__ = ("_base", "_cancelled", "_fired", "_later", "cause", "task")

    def __init__(self, task: asyncio.Task[Any], base: int | None = None) -> None:
        """Opens the block; `task` is the one that runs it, `base` its `cancelling()` when the block was opened."""
        self.task = task
        self.cause: BaseException | None = None
        """What the block is to end with instead of the cancellation, if the one who fired said it."""
        self._base = cancel_count(task) if base is None else base
        self._fired = False
        self._cancelled = False
        self._later: asyncio.Handle | None = None

    @property
    def fired(self) -> bool:
        """Whether `fire` was called."""
        return self._fired

    def fire(self, why: str, cause: BaseException | None = None) -> None:
        """Ends the block's current wait, once."""
        if not self._fired:
            self._fired = True
            self.cause = cause
            if self.task is _current_task():
                # Cancelling oneself takes effect at the next await, which may be one behind the block; before 3.13 it cannot
                # be taken back. So it is put off: while the block waits, or not at all.
                self._later = self.task.get_loop().call_soon(self._cancel, why)
            else:
                self._cancel(why)

    def _cancel(self, why: str) -> None:
        self._later = None
        self._cancelled = True
        self.task.cancel(why)

    def from_outside(self) -> bool:
        """Whether the task has been cancelled, since the block was opened, by somebody else."""
        return self.task.cancelling() - self._cancelled > self._base

    def settle(self) -> bool:
        """Takes the own cancel back; true if the task was cancelled from outside meanwhile."""
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if self._cancelled:
            self._cancelled = False
            self.task.uncancel()
        return self.task.cancelling() > self._base


def current_task() -> asyncio.Task[Any]:
    """The task that runs now."""
    task = _current_task()
    assert task is not None, "coroutines of this library run inside a task"
    return task


if sys.version_info >= (3, 12):
    _current_task = task_of = asyncio.current_task
else:  # written in Python there, and slower than all else that a run does for itself
    _tasks: dict[asyncio.AbstractEventLoop | None, asyncio.Task[Any]] = asyncio.tasks._current_tasks  # type: ignore[attr-defined]

    def task_of(loop: asyncio.AbstractEventLoop | None) -> asyncio.Task[Any] | None:
        """The task that runs in `loop` now."""
        return _tasks.get(loop)

    def _current_task() -> asyncio.Task[Any] | None:
        return _tasks.get(asyncio.get_running_loop())


def cancel_count(task: asyncio.Task[Any]) -> int:
    """How many cancels the task has been through; one that it has called on itself and not met yet is not among them."""
    return task.cancelling() - bool(getattr(task, "_must_cancel", False))


class TimeLimit:
    """A block of the running task that may take so many seconds: `with TimeLimit(5.0, "closing X"): await ...`.

    Raises `TimeoutError` when the time is up; a cancel from outside passes as it is.
    """

    __slots__ = ("_interrupt", "_secs", "_timer", "_what", "expired", "stood")

    def __init__(self, secs: float | None, what: str) -> None:
        """Sets no limit for `secs=None`."""
        self._secs = secs
        self._what = what
        self._timer: TimerHandle | None = None
        self.expired = False
        """Whether the block ended because the time was up."""
        self.stood = ""
        """Where the task was when the time was up."""

    def __enter__(self) -> None:
        self._interrupt = CancelScope(current_task())
        if self._secs is not None:
            self._timer = current_clock().call_later(self._secs, self._expire)

    def _expire(self) -> None:
        self.stood = describe_suspension(self._interrupt.task)
        self._interrupt.fire(self._what)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        fired = self._interrupt.fired
        outer = self._interrupt.settle()
        if fired and not outer and isinstance(error, asyncio.CancelledError):
            self.expired = True
            raise TimeoutError(f"{self._what} took longer than {self._secs} s") from error


_logger = logging.getLogger("aiohooks")
T = TypeVar("T")
DEFAULT_GRACE_SECS = 120.0
"""How long cleanup may take after a cancellation, where the user does not say."""


async def shielded(
    coro: Coroutine[Any, Any, T], *, grace_secs: float, what: str, on_cancel: Callable[[], None] | None = None
) -> T:
    """Runs `coro` to its end in a task of its own, in the caller's context as it is now.

    A cancel of the caller is kept until then and raised afterwards. From the first cancel on, of which `on_cancel` is told,
    `coro` has `grace_secs`; it is cancelled then, and if it lives on for as long again, named in a warning and left.
    """
    task = asyncio.get_running_loop().create_task(coro, name=what, context=contextvars.copy_context())
    try:
        await wait_done([task], None)
    except asyncio.CancelledError as cancelled:
        if on_cancel is not None:
            on_cancel()
        # An anyio scope repeats its cancel at every tick until the task has left it: hence the shield.
        with anyio.CancelScope(shield=True):
            if not await _insist([task], grace_secs):
                task.cancel()
                if not await _insist([task], grace_secs):
                    _logger.warning("%s still runs %s s after its cancellation; going on without it", what, grace_secs)
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            cancelled.__context__ = error
        elif not task.done():
            task.add_done_callback(retrieve)
        raise
    return task.result()


async def _insist(tasks: Iterable[asyncio.Task[Any]], secs: float) -> bool:
    """`wait_done` that a cancel does not end: it has been noted already."""
    late: list[None] = []
    timer = current_clock().call_later(secs, lambda: late.append(None))
    try:
        while not late and not all(task.done() for task in tasks):
            try:
                await wait_done(tasks, secs)
            except asyncio.CancelledError:
                continue
    finally:
        timer.cancel()
    return all(task.done() for task in tasks)


async def wait_done(tasks: Iterable[asyncio.Future[Any]], secs: float | None) -> bool:
    """Waits until all tasks are done or the time is up, and says whether they are done; cancels none of them."""
    pending = {task for task in tasks if not task.done()}
    if not pending:
        return True
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ended(task: asyncio.Future[Any]) -> None:
        pending.discard(task)
        if not pending and not waiter.done():
            waiter.set_result(None)

    watched = tuple(pending)
    for task in watched:
        task.add_done_callback(ended)
    timer = None
    if secs is not None:
        timer = current_clock().call_later(secs, lambda: None if waiter.done() else waiter.set_result(None))
    try:
        await waiter
    finally:
        if timer is not None:
            timer.cancel()
        for task in watched:
            task.remove_done_callback(ended)
    return not pending


async def to_thread(fn: Callable[..., T], *args: Any, grace_secs: float) -> T:
    """Calls a blocking function in a worker thread; a cancel waits for the thread, which nothing can stop, for a while."""
    call = functools.partial(fn, *args)
    return await shielded(anyio.to_thread.run_sync(call), grace_secs=grace_secs, what=f"thread of {fn!r}")


def retrieve(task: asyncio.Task[Any]) -> None:
    """Looks at the outcome of a task that nobody waits for any more."""
    if not task.cancelled():
        task.exception()
