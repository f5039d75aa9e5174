"""Cleanup that must finish, in spite of cancels.

    shielded       cleanup that is finished
    to_thread      a call in a thread, which is waited for
    wait_done      waits for tasks, and cancels none of them
    new_task       a task that begins later
    current_task   the running task

`asyncio.TaskGroup`, `wait_for` and `Condition` lose cancels or wake-ups on Python versions that we
support; nothing here uses them.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from aiohooks._core.clock import current_clock, wait_woken, wake
from aiohooks._core.diagnostics import logger

T = TypeVar("T")

make_task: Callable[..., asyncio.Task[Any]] = asyncio.Task
"""Makes a task that begins later; an exploration puts its own kind in its place."""
DEFAULT_GRACE_SECS = 10.0
"""How long background tasks and cleanup may take at the end of a session, where the user does not
say.
"""
# a thread that writes files is left behind only if it hangs; the caller may have a shorter limit
_THREAD_GRACE_SECS = 120.0


def current_task() -> asyncio.Task[Any]:
    """Return the running task."""
    task = asyncio.current_task()
    assert task is not None, "coroutines of this library run inside a task"
    return task


def new_task(
    coro: Coroutine[Any, Any, T], name: str | None, context: contextvars.Context | None = None
) -> asyncio.Task[T]:
    """Start a task that begins later, so that it is known by then; an eager factory of the loop
    would begin with it.
    """
    return make_task(coro, loop=asyncio.get_running_loop(), name=name, context=context)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the running event loop, if there is one."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def shielded(
    coro: Coroutine[Any, Any, T],
    *,
    grace_secs: float,
    what: str,
    on_cancel: Callable[[], object] | None = None,
) -> T:
    """Run `coro` to its end in a task of its own, in a copy of the caller's context.

    A cancel of the caller is kept until then and raised afterwards. From the first cancel on, at
    which `on_cancel` is called, `coro` has `grace_secs`; then it is cancelled, and after as long
    again left running, with a warning.
    """
    return (
        await shielded_task(coro, grace_secs=grace_secs, what=what, on_cancel=on_cancel)
    ).result()


async def shielded_task(
    coro: Coroutine[Any, Any, T],
    *,
    grace_secs: float,
    what: str,
    on_cancel: Callable[[], object] | None = None,
) -> asyncio.Task[T]:
    """Like `shielded`, and return the task, which has ended; if it was cancelled, others have done
    it.

    Raises:
        CancelledError: the caller was cancelled.
    """
    task = asyncio.get_running_loop().create_task(
        coro, name=what, context=contextvars.copy_context()
    )
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError as cancelled:
        if on_cancel is not None:
            on_cancel()
        # An anyio scope repeats its cancel at every tick until the task has left it: hence the
        # shield.
        with anyio.CancelScope(shield=True):
            if not await _wait_done_uncancelled([task], grace_secs):
                task.cancel()
                if not await _wait_done_uncancelled([task], grace_secs):
                    logger.warning(
                        "%s still runs %s s after its cancellation; continuing without it",
                        what,
                        grace_secs,
                    )
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            cancelled.__context__ = error
        elif not task.done():
            task.add_done_callback(retrieve_exception)
        raise
    return task


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
    """Wait until all tasks are done or `secs` have passed; return whether they are done. Cancels
    none of them.
    """
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
    try:
        await wait_woken(waiter, secs)
    finally:
        for task in watched:
            task.remove_done_callback(ended)
    return not pending


async def to_thread(
    fn: Callable[..., T],
    *args: Any,
    grace_secs: float = _THREAD_GRACE_SECS,
    on_cancel: Callable[[], object] | None = None,
) -> T:
    """Call a blocking function in a worker thread; a cancel waits for the thread, which cannot be
    stopped, up to `grace_secs`.

    At a cancel `on_cancel` is called: it may make the function end.
    """
    call = functools.partial(fn, *args)
    thread = anyio.to_thread.run_sync(call)
    return await shielded(
        thread, grace_secs=grace_secs, what=f"thread of {fn!r}", on_cancel=on_cancel
    )


def retrieve_exception(task: asyncio.Future[Any]) -> None:
    """Retrieve the outcome of a task or future that has no waiter any more, so that asyncio does
    not log it as lost.
    """
    if not task.cancelled():
        task.exception()
