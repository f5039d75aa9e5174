"""Cancellation: ending a task's current wait and taking that cancel back exactly, time limits, and cleanup that must finish.

    CancelScope   a block whose wait can be ended
    TimeLimit     a block that is ended after a time
    shielded      cleanup that is finished in spite of a cancel
    to_thread     a call in a thread, which is waited for

`asyncio.TaskGroup`, `wait_for` and `Condition` lose cancels or wake-ups on Python versions that we support; nothing here
uses them.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from aiohooks._aio.cancel_watch import CancelWatch, ScopeReason, cancel_count, current_task, task_of
from aiohooks._aio.clock import TimerHandle, current_clock, wake, wake_after

_logger = logging.getLogger("aiohooks")
T = TypeVar("T")

DEFAULT_GRACE_SECS = 10.0
"""How long background tasks and cleanup may take at the end of a session, where the user does not say."""
_THREAD_GRACE_SECS = 120.0  # a thread that writes files is left behind only if it hangs; the caller may have a shorter limit


class CancelScope:
    """A block of one task whose current wait can be ended from outside.

    `cancel` cancels the task; when the block has been left, `uncancel` takes that cancel back. Only the scope's own cancel is
    ever taken back, so a cancel of the caller's is never lost. A block that runs code of users is awaited with a watch.
    """

    __slots__ = ("_base", "_own", "_pending", "_watch", "cancel_called", "cause", "task")

    def __init__(self, task: asyncio.Task[Any], watch: CancelWatch | None = None) -> None:
        """Open the block, which `task` runs, under `watch` if there is one."""
        self.task: asyncio.Task[Any] = task
        self.cause: BaseException | None = None
        """What the block is to end with instead of the cancellation, if `cancel` got it."""
        self.cancel_called: bool = False
        self._watch = watch
        self._base = cancel_count(task) if watch is None else 0
        self._own: list[int] = []
        self._pending: asyncio.Handle | None = None

    def cancel(self, why: str, cause: BaseException | None = None) -> None:
        """End the block's current wait, once."""
        if self.cancel_called:
            return
        self.cancel_called = True
        self.cause = cause
        self.cancel_again(why)

    def cancel_again(self, why: str) -> None:
        """End the block's current wait once more: the first cancel was ignored."""
        if self.task is task_of(self.task.get_loop()):
            # Cancelling oneself takes effect at the next await, which may lie behind the block; before 3.13 it cannot be
            # taken back. So it is put off until the block waits.
            self._pending = self.task.get_loop().call_soon(self._cancel, why)
        else:
            self._cancel(why)

    def _cancel(self, why: str) -> None:
        self._pending = None
        self._own.append(0 if self._watch is None else self._watch.deliveries)
        self.task.cancel(ScopeReason(why))

    @property
    def own_cancels(self) -> Sequence[int]:
        """The deliveries of the scope's own cancels that have not been taken back."""
        return self._own

    def uncancel(self, error: BaseException | None = None) -> asyncio.CancelledError | None:
        """Take the own cancels back; return the cancel from outside with which the block ends, or None.

        It is `error`, with which the block ends, unless one came in the same tick as the scope's own.
        """
        outside: asyncio.CancelledError | None = None
        if self._watch is not None:
            outside = self._watch.outside_cancel(error, self._own)
            del self._own[self._watch.counted(self._own) :]
        elif self.task.cancelling() - len(self._own) > self._base:
            outside = error if isinstance(error, asyncio.CancelledError) else asyncio.CancelledError()
        if self._pending is not None:
            self._pending.cancel()
        while self._own:
            self._own.pop()
            self.task.uncancel()
        if self._watch is not None:
            self._watch.taken_back()
        return outside


class TimeLimit:
    """A time limit for a block of the running task: `with TimeLimit(5.0, "closing X"): await ...`.

    Raises `TimeoutError` when the time is up; a cancel from outside passes unchanged. `secs=None` sets no limit.
    """

    __slots__ = ("_scope", "_secs", "_timer", "_what")

    def __init__(self, secs: float | None, what: str) -> None:
        self._secs = secs
        self._what = what
        self._timer: TimerHandle | None = None

    def __enter__(self) -> None:
        self._scope = CancelScope(current_task())
        if self._secs is not None:
            self._timer = current_clock().call_later(self._secs, functools.partial(self._scope.cancel, self._what))

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        outside = self._scope.uncancel(error)
        if self._scope.cancel_called and not outside and isinstance(error, asyncio.CancelledError):
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


async def to_thread(
    fn: Callable[..., T], *args: Any, grace_secs: float = _THREAD_GRACE_SECS, on_cancel: Callable[[], object] | None = None
) -> T:
    """Call a blocking function in a worker thread; a cancel waits for the thread, which cannot be stopped, up to `grace_secs`.

    At a cancel `on_cancel` is called: it may make the function end.
    """
    call = functools.partial(fn, *args)
    thread = anyio.to_thread.run_sync(call)
    return await shielded(thread, grace_secs=grace_secs, what=f"thread of {fn!r}", on_cancel=on_cancel)


def retrieve_exception(task: asyncio.Future[Any]) -> None:
    """Retrieve the outcome of a task or future that has no waiter any more, so that asyncio does not log it as lost."""
    if not task.cancelled():
        task.exception()
