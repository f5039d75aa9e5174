"""Cleanup that must finish in spite of cancels, and tasks.

    shielded       runs cleanup to its end
    to_thread      calls a function in a thread, and waits for it
    wait_done      waits for tasks, and cancels none of them
    leave_behind   keeps tasks that ignore their cancellation, for which nothing waits any more
    new_task       makes a task that begins later
    current_task   the running task

`asyncio.TaskGroup`, `wait_for` and `Condition` lose cancels or wake-ups on supported Python
versions, so nothing here uses them.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from aiohooks._core.activity import logger
from aiohooks._core.clock import current_clock, wait_woken, wake

T = TypeVar("T")

make_task: Callable[..., asyncio.Task[Any]] | None = None
"""Makes all tasks of the library, by default `asyncio.Task`.

An exploration sets a class of its own, and the check for leaks notes where tasks start. The default
is looked up for each task, as others replace it after the import (nest_asyncio).
"""
DEFAULT_GRACE_SECS = 10.0
"""How long background tasks and cleanup may take at the end of a session, by default."""
# A thread that writes files is left behind only if it hangs. The caller may have a shorter limit.
_THREAD_GRACE_SECS = 120.0


def current_task() -> asyncio.Task[Any]:
    """Return the running task."""
    task = asyncio.current_task()
    assert task is not None, "coroutines of this library run inside a task"
    return task


def new_task(
    coro: Coroutine[Any, Any, T],
    name: str | None,
    context: contextvars.Context | None = None,
) -> asyncio.Task[T]:
    """Make a task that begins later, also if the loop has an eager task factory."""
    make: Any = make_task or asyncio.Task
    task: asyncio.Task[T] = make(
        coro,
        loop=asyncio.get_running_loop(),
        name=name,
        context=context,
    )
    return task


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

    A cancel of the caller is raised afterwards. The first cancel calls `on_cancel`, and `coro` then
    has `grace_secs` to end. After this time it is cancelled, and after the same time again it is
    left running, with a warning.
    """
    task = await shielded_task(
        coro,
        grace_secs=grace_secs,
        what=what,
        on_cancel=on_cancel,
    )
    return task.result()


async def shielded_task(
    coro: Coroutine[Any, Any, T],
    *,
    grace_secs: float,
    what: str,
    on_cancel: Callable[[], object] | None = None,
) -> asyncio.Task[T]:
    """Run `coro` like `shielded`, and return its task, which has ended.

    If the task was cancelled, other code has cancelled it.

    Raises:
        CancelledError: the caller was cancelled.
    """
    task = asyncio.get_running_loop().create_task(coro, name=what)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError as cancelled:
        if on_cancel is not None:
            on_cancel()
        # An anyio scope cancels again at each iteration of the loop until the task has left it.
        with anyio.CancelScope(shield=True):
            await _end_within(task, grace_secs, what)
        if not task.done():
            task.add_done_callback(retrieve_exception)
        elif not task.cancelled():
            error = task.exception()
            if error is not None:
                cancelled.__context__ = error
        raise
    return task


async def _end_within(
    task: asyncio.Task[Any],
    grace_secs: float,
    what: str,
) -> None:
    """Give a task `grace_secs` to end, cancel it, and give it the same time again.

    A task that still runs then is left alone, with a warning.
    """
    clock = current_clock()
    deadline = clock.now() + 2 * grace_secs
    cancel_timer = clock.call_later(grace_secs, task.cancel)
    while not task.done():
        # Further cancels are ignored: the caller has noted one already.
        with contextlib.suppress(asyncio.CancelledError):
            await wait_done([task], deadline - clock.now())
        if clock.now() >= deadline:
            break
    cancel_timer.cancel()
    if not task.done():
        message = "%s still runs %s s after its cancellation; continuing without it"
        logger.warning(message, what, grace_secs)
        leave_behind([task])


LEFT_BEHIND: set[asyncio.Task[Any]] = set()
"""The tasks that were left behind. The event loop itself has only weak references to tasks."""


def leave_behind(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Keep tasks that still run after their grace period; `aiohooks.run` ends without them."""
    for task in tasks:
        LEFT_BEHIND.add(task)
        task.add_done_callback(LEFT_BEHIND.discard)


async def wait_done(tasks: Iterable[asyncio.Future[Any]], secs: float | None) -> bool:
    """Wait until all tasks are done, or `secs` have passed, and return whether they are done.

    No task is cancelled.
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
    what: str | None = None,
) -> T:
    """Call a blocking function in a worker thread.

    A thread cannot be stopped. A cancel calls `on_cancel`, which may make the function end, and
    waits for the thread, `what` in messages, for at most `grace_secs`.
    """
    return await shielded(
        anyio.to_thread.run_sync(functools.partial(fn, *args)),
        grace_secs=grace_secs,
        what=what or f"thread of {fn!r}",
        on_cancel=on_cancel,
    )


def retrieve_exception(task: asyncio.Future[Any]) -> None:
    """Retrieve the error of a task or future without a waiter, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()
