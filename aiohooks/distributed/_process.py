"""A task in a process of its own: starting it, hearing of its end, and ending it."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from multiprocessing.process import parent_process
from typing import Any

from aiohooks._clock import current_clock
from aiohooks._errors import InvalidArgumentError, TaskDiedError
from aiohooks._shield import in_thread, shielded
from aiohooks.distributed._task import Order, Outcome, fulfil, result_of, task_name

_spawn = multiprocessing.get_context("spawn")
# Starting a process also looks after those that have ended, and of two who do that at once one learns nothing.
_lock = threading.Lock()


async def do_in_process(order: Order, grace_secs: float) -> Any:
    """Does a task in a new process, which has ended when this returns or raises.

    Raises:
        TaskDiedError: it ended without an outcome.
    """
    ours, theirs = _spawn.Pipe(duplex=False)
    process = _spawn.Process(target=_child, args=(theirs, order, grace_secs), name=f"aiohooks {task_name(order.task_id)}")
    outcome: Outcome | None = None
    heard = False
    pid = code = None
    try:
        try:
            await in_thread(_start, process, grace_secs=grace_secs)
        finally:
            theirs.close()
        await _readable(ours.fileno())
        outcome = await in_thread(_received, ours, grace_secs=grace_secs)
        heard = True
    finally:
        ours.close()
        pid = process.pid
        if pid is not None:
            # One that has told its outcome, or has died, ends by itself.
            code = await shielded(_end(process, grace_secs, ask=not heard), grace_secs=2 * grace_secs + 1, what=process.name)
    if outcome is not None:
        return result_of(outcome, order.task_id, order.attempt)
    if code == 0:
        return None
    raise TaskDiedError(
        f"the {task_name(order.task_id)} (process {pid}, attempt {order.attempt}) {_how(code)}",
        task_id=order.task_id,
        exit_code=code,
    )


def _start(process: SpawnProcess) -> None:
    with _lock:
        try:
            process.start()
        except (AttributeError, TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"main or its args cannot be sent to another process ({error}): give a function of a module, and plain values"
            ) from error


def _received(ours: connection.Connection[Any, Any]) -> Outcome | None:
    try:
        outcome: Outcome = ours.recv()
    except (EOFError, OSError):
        return None
    return outcome


async def _end(process: SpawnProcess, grace_secs: float, *, ask: bool) -> int | None:
    """Waits for the end of a process, and helps after a while; returns its exit code."""
    if ask:
        process.terminate()
    if not await _readable(process.sentinel, grace_secs):
        process.kill()
        await _readable(process.sentinel)
    with _lock:
        process.join()
    code = process.exitcode
    process.close()
    return code


async def _readable(fd: int, secs: float | None = None) -> bool:
    """Waits until there is something to read, or the end; False when the time is up before."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[bool] = loop.create_future()

    def settle(result: bool) -> None:
        if not ready.done():
            ready.set_result(result)

    timer = None if secs is None else current_clock().call_later(secs, lambda: settle(False))
    loop.add_reader(fd, settle, True)
    try:
        return await ready
    finally:
        loop.remove_reader(fd)
        if timer is not None:
            timer.cancel()


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"ended with exit code {code}"


# In the new process.


def _child(theirs: connection.Connection[Any, Any], order: Order, grace_secs: float) -> None:
    if hasattr(os, "setpgrp"):
        # Ctrl-C is for the launcher, which asks each process once.
        os.setpgrp()
    threading.Thread(target=_end_with_parent, args=(grace_secs,), name="aiohooks: parent's end", daemon=True).start()
    outcome = fulfil(order)
    try:
        theirs.send(outcome)
    except BrokenPipeError:
        pass  # nobody wants to know any more
    except Exception as error:
        theirs.send(Outcome(None, TypeError(f"what main returned cannot be sent to another process: {error}")))
    theirs.close()


def _end_with_parent(grace_secs: float) -> None:
    """Waits for the parent's end, which it cannot announce itself, and ends this process then."""
    parent = parent_process()
    if parent is None:
        return
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(grace_secs)
    os._exit(1)
