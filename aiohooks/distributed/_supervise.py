"""All tasks of a run: each is tried again when its process dies, and all are ended when one has failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aiohooks._aio.backoff import Backoff
from aiohooks._aio.cancel import shielded, wait_done
from aiohooks._aio.clock import current_clock
from aiohooks.distributed.task import task_name
from aiohooks.errors import TaskDiedError

_logger = logging.getLogger("aiohooks")
T = TypeVar("T")

Attempt = Callable[[int, int], Coroutine[Any, Any, T]]
"""Does a task, by its number, for the so-manieth time; `TaskDiedError` if it died. Cancelled, it ends what it started."""


async def supervise(attempt: Attempt[T], *, num_tasks: int, max_restarts: int, backoff: Backoff, grace_secs: float) -> list[T]:
    """The results of all tasks, by number.

    Raises:
        ExceptionGroup: of those that failed; the others have been ended then.
    """
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ended(task: asyncio.Task[T]) -> None:
        bad = task.cancelled() or task.exception() is not None
        if not failed.done() and (bad or all(one.done() for one in tasks)):
            failed.set_result(None)

    tasks = [
        asyncio.get_running_loop().create_task(_insist(attempt, number, max_restarts, backoff), name=task_name(number))
        for number in range(num_tasks)
    ]
    for task in tasks:
        task.add_done_callback(ended)
    try:
        await failed
    finally:
        for task in tasks:
            task.cancel()
        await shielded(wait_done(tasks, None), grace_secs=grace_secs, what="ending the tasks of a run")
    errors = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    if not errors and any(task.cancelled() for task in tasks):
        errors = [TaskDiedError(f"the {task.get_name()} was cancelled by somebody else") for task in tasks if task.cancelled()]
    if errors:
        raise BaseExceptionGroup(f"{len(errors)} of {num_tasks} tasks failed", errors)
    return [task.result() for task in tasks]


async def _insist(attempt: Attempt[T], number: int, max_restarts: int, backoff: Backoff) -> T:
    tries = 1
    while True:
        try:
            return await attempt(number, tries)
        except TaskDiedError as error:
            if tries > max_restarts:
                error.add_note(f"after {max_restarts} restarts it is given up")
                raise
            secs = backoff.pause_secs(tries)
            _logger.warning("%s; starting it again in %.1f s, attempt %d", error, secs, tries + 1)
        await _pause(secs)
        tries += 1


async def _pause(secs: float) -> None:
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    timer = current_clock().call_later(secs, lambda: None if over.done() else over.set_result(None))
    try:
        await over
    finally:
        timer.cancel()
