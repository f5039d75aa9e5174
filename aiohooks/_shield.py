"""Finishing what must be finished although the caller is cancelled: cleanup, commits, worker threads."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from aiohooks._clock import current_clock

_logger = logging.getLogger("aiohooks")
T = TypeVar("T")


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


async def wait_done(tasks: Iterable[asyncio.Task[Any]], secs: float | None) -> bool:
    """Waits until all tasks are done or the time is up, and says whether they are done; cancels none of them."""
    pending = {task for task in tasks if not task.done()}
    if not pending:
        return True
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ended(task: asyncio.Task[Any]) -> None:
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


async def in_thread(fn: Callable[..., T], *args: Any, grace_secs: float) -> T:
    """Calls a blocking function in a worker thread; a cancel waits for the thread, which nothing can stop, for a while."""
    call = functools.partial(fn, *args)
    return await shielded(anyio.to_thread.run_sync(call), grace_secs=grace_secs, what=f"thread of {fn!r}")


def retrieve(task: asyncio.Task[Any]) -> None:
    """Looks at the outcome of a task that nobody waits for any more."""
    if not task.cancelled():
        task.exception()
