"""Cancellation: ending a task's current wait and taking that cancel back exactly, time limits, and cleanup that must finish.

`asyncio.TaskGroup`, `wait_for` and `Condition` lose cancels or wake-ups on Python versions that we support; nothing here
uses them.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import sys
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar, cast

import anyio
import anyio.to_thread

from aiohooks._aio.await_chain import describe_suspension
from aiohooks._aio.clock import TimerHandle, current_clock, wake, wake_after

_logger = logging.getLogger("aiohooks")
T = TypeVar("T")

DEFAULT_GRACE_SECS = 120.0
"""How long cleanup may take after a cancellation, where the user does not say."""


task_of: Callable[[asyncio.AbstractEventLoop | None], asyncio.Task[Any] | None]
if sys.version_info >= (3, 12):
    task_of = asyncio.current_task
else:  # `asyncio.current_task` is written in Python there, and slower than all else that a run does for itself
    task_of = cast("Any", asyncio.tasks)._current_tasks.get


def current_task() -> asyncio.Task[Any]:
    """Return the running task."""
    task = task_of(asyncio.get_running_loop())
    assert task is not None, "coroutines of this library run inside a task"
    return task


def cancel_count(task: asyncio.Task[Any]) -> int:
    """Return the number of cancels delivered to the task; one that it called on itself and that is pending is not counted."""
    return task.cancelling() - bool(getattr(task, "_must_cancel", False))


class CancelScope:
    """A block of one task whose current wait can be ended from outside.

    `cancel` cancels the task; when the block has been left, `uncancel` takes that cancel back and returns whether another
    one remains. Only the scope's own cancel is ever taken back, so a cancel of the caller's is never lost.
    """

    __slots__ = ("_base", "_cancelled", "_pending", "cancel_called", "cause", "task")

    def __init__(self, task: asyncio.Task[Any], base: int | None = None) -> None:
        """Open the block; `task` runs it, `base` is its cancel count at the beginning."""
        self.task = task
        self.cause: BaseException | None = None
        """What the block is to end with instead of the cancellation, if `cancel` got it."""
        self.cancel_called: bool = False
        self._base = cancel_count(task) if base is None else base
        self._cancelled = False
        self._pending: asyncio.Handle | None = None

    def cancel(self, why: str, cause: BaseException | None = None) -> None:
        """End the block's current wait, once."""
        if self.cancel_called:
            return
        self.cancel_called = True
        self.cause = cause
        if self.task is task_of(self.task.get_loop()):
            # Cancelling oneself takes effect at the next await, which may lie behind the block; before 3.13 it cannot be
            # taken back. So it is put off until the block waits.
            self._pending = self.task.get_loop().call_soon(self._cancel, why)
        else:
            self._cancel(why)

    def _cancel(self, why: str) -> None:
        self._pending = None
        self._cancelled = True
        self.task.cancel(why)

    def cancelled_from_outside(self) -> bool:
        """Return whether something else than this scope has cancelled the task since the block was opened."""
        return self.task.cancelling() - self._cancelled > self._base

    def uncancel(self) -> bool:
        """Take the own cancel back; return whether the task was cancelled from outside as well."""
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        if self._cancelled:
            self._cancelled = False
            self.task.uncancel()
        return self.task.cancelling() > self._base


class TimeLimit:
    """A time limit for a block of the running task: `with TimeLimit(5.0, "closing X"): await ...`.

    Raises `TimeoutError` when the time is up; a cancel from outside passes unchanged. `secs=None` sets no limit.
    """

    __slots__ = ("_scope", "_secs", "_timer", "_what", "expired", "suspended_at")

    def __init__(self, secs: float | None, what: str) -> None:
        self._secs = secs
        self._what = what
        self._timer: TimerHandle | None = None
        self.expired: bool = False
        """Whether the block ended because the time was up."""
        self.suspended_at: str = ""
        """Where the task was suspended when the time was up."""

    def __enter__(self) -> None:
        self._scope = CancelScope(current_task())
        if self._secs is not None:
            self._timer = current_clock().call_later(self._secs, self._expire)

    def _expire(self) -> None:
        self.suspended_at = describe_suspension(self._scope.task)
        self._scope.cancel(self._what)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        outer = self._scope.uncancel()
        if self._scope.cancel_called and not outer and isinstance(error, asyncio.CancelledError):
            self.expired = True
            raise TimeoutError(f"{self._what} took longer than {self._secs} s") from error


async def shielded(
    coro: Coroutine[Any, Any, T], *, grace_secs: float, what: str, on_cancel: Callable[[], object] | None = None
) -> T:
    """Run `coro` to its end in a task of its own, in a copy of the caller's context.

    A cancel of the caller is kept until then and raised afterwards. From the first cancel on, at which `on_cancel` is
    called, `coro` has `grace_secs`; then it is cancelled, and after as long again left running, with a warning.
    """
    task = asyncio.get_running_loop().create_task(coro, name=what, context=contextvars.copy_context())
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError as cancelled:
        if on_cancel is not None:
            on_cancel()
        # An anyio scope repeats its cancel at every tick until the task has left it: hence the shield.
        with anyio.CancelScope(shield=True):
            if not await _wait_done_uncancelled([task], grace_secs):
                task.cancel()
                if not await _wait_done_uncancelled([task], grace_secs):
                    _logger.warning("%s still runs %s s after its cancellation; continuing without it", what, grace_secs)
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            cancelled.__context__ = error
        elif not task.done():
            task.add_done_callback(retrieve_exception)
        raise
    return task.result()


async def _wait_done_uncancelled(tasks: Iterable[asyncio.Task[Any]], secs: float) -> bool:
    """Like `wait_done`, but ignores cancels: the caller has noted one already."""
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
    """Wait until all tasks are done or `secs` have passed; return whether they are done. Cancels none of them."""
    pending = {task for task in tasks if not task.done()}
    if not pending:
        return True
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ended(task: asyncio.Future[Any]) -> None:
        pending.discard(task)
        if not pending:
            wake(waiter)

    watched = tuple(pending)
    for task in watched:
        task.add_done_callback(ended)
    timer = None if secs is None else wake_after(waiter, secs)
    try:
        await waiter
    finally:
        if timer is not None:
            timer.cancel()
        for task in watched:
            task.remove_done_callback(ended)
    return not pending


async def to_thread(fn: Callable[..., T], *args: Any, grace_secs: float = DEFAULT_GRACE_SECS) -> T:
    """Call a blocking function in a worker thread; a cancel waits for the thread, which cannot be stopped, up to `grace_secs`."""
    call = functools.partial(fn, *args)
    return await shielded(anyio.to_thread.run_sync(call), grace_secs=grace_secs, what=f"thread of {fn!r}")


def retrieve_exception(task: asyncio.Task[Any]) -> None:
    """Retrieve the outcome of a task that has no waiter any more, so that asyncio does not log it as lost."""
    if not task.cancelled():
        task.exception()
