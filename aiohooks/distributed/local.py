"""Chief and workers on one machine: as tasks of one event loop, or as processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Coroutine, Mapping
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from multiprocessing.process import parent_process
from typing import Any, TypeVar

from aiohooks._aio.backoff import Backoff
from aiohooks._aio.cancel import shielded, to_thread
from aiohooks._aio.clock import current_clock
from aiohooks._validate import check_secs
from aiohooks.distributed._supervise import supervise
from aiohooks.distributed.task import (
    Order,
    Outcome,
    Task,
    absolute,
    check_task_options,
    forget,
    fulfil,
    options_of_stores,
    result_of,
    task_name,
)
from aiohooks.errors import InvalidArgumentError, TaskDiedError
from aiohooks.stores import MemoryStepStore, open_step_store

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
            await to_thread(_start, process, grace_secs=grace_secs)
        finally:
            theirs.close()
        await _readable(ours.fileno())
        outcome = await to_thread(_received, ours, grace_secs=grace_secs)
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


T = TypeVar("T")


async def run_tasks(
    main: Callable[..., Coroutine[Any, Any, T]],
    *,
    num_workers: int = 3,
    args: tuple[Any, ...] = (),
    run: str = "default",
    checkpoint_dir: str | os.PathLike[str] | None = None,
) -> list[T]:
    """Runs `main(task, *args)` for the chief and each worker, as tasks of this event loop that share a `MemoryStepStore`.

    When one fails the others are cancelled. There are no restarts: what one could survive here is its session's to recover.

    Args:
        main: a coroutine function that takes the `Task`.
        num_workers: how many workers there are besides the chief.
        args: what `main` takes besides.
        run: the name of the run.
        checkpoint_dir: for `Task.checkpoint_dir`.

    Returns:
        What they returned: the chief, then the workers.

    Raises:
        ExceptionGroup: of those that failed.
    """
    check_task_options(main, args, num_workers)
    directory = absolute(checkpoint_dir)
    async with MemoryStepStore(run=run) as store:

        def attempt(task_id: int, tries: int) -> Coroutine[Any, Any, T]:
            return main(Task(task_id, num_workers, store, directory, tries), *args)

        return await supervise(attempt, num_tasks=num_workers + 1, max_restarts=0, backoff=Backoff(), grace_secs=10.0)


async def run_processes(
    main: Callable[..., Coroutine[Any, Any, T]],
    *,
    num_workers: int = 3,
    args: tuple[Any, ...] = (),
    store: str | None = None,
    run: str | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    max_restarts: int = 3,
    backoff: Backoff = Backoff(initial_secs=0.5, max_secs=30.0),  # noqa: B008 - it is frozen
    stop_grace_secs: float = 10.0,
    store_options: Mapping[str, Any] | None = None,
) -> list[T]:
    """Runs `main(task, *args)` for the chief and each worker, each in a process of its own on this machine.

    A process that dies (a signal, an exit code other than 0) is started again, after growing pauses, with the next `attempt`;
    what `main` raises is final, and ends the others. These get SIGTERM, which a session with `handle_signals=True` takes as a
    stop, and SIGKILL `stop_grace_secs` later. They end also when this process does, however it ends.

    `main`, `args` and the results are pickled: `main` is a function of a module, or of a script whose own doings are under
    `if __name__ == "__main__":`. The processes find the run's address also in AIOHOOKS_STEP_STORE and AIOHOOKS_RUN.

    Args:
        main: a coroutine function that takes the `Task`.
        num_workers: how many workers there are besides the chief.
        args: what `main` takes besides.
        store: the URL of the step store; left out, a local one in a new directory, which is removed afterwards.
        run: the name of the run; left out, a new one, which is forgotten afterwards.
        checkpoint_dir: for `Task.checkpoint_dir`.
        max_restarts: how often each task is started again.
        backoff: the pauses before that.
        stop_grace_secs: how long a process may take to end when it is asked to.
        store_options: what `open_step_store` takes besides; `on_lost` is "keep" if it is left out.

    Returns:
        What they returned: the chief, then the workers.

    Raises:
        ExceptionGroup: of those that failed: with what `main` raised, or `TaskDiedError`.
        InvalidArgumentError: an argument cannot be meant; nothing was started.
    """
    check_task_options(main, args, num_workers, max_restarts, backoff)
    check_secs(stop_grace_secs, "stop_grace_secs")
    options, directory = options_of_stores(store_options), absolute(checkpoint_dir)
    name = f"run-{secrets.token_hex(4)}" if run is None else run
    if str(store).startswith("memory:"):
        raise InvalidArgumentError(f"store={store!r} is for one process; leave it out, or give local:///directory")
    # Made here as well, so that what is wrong with it is said once, and now.
    kept = open_step_store("local://" if store is None else store, run=name, **options)
    own = None
    if store is None:
        own = await to_thread(lambda: tempfile.mkdtemp(prefix="aiohooks-"), grace_secs=stop_grace_secs)
    url = store or f"local://{own}"

    async def attempt(task_id: int, tries: int) -> T:
        order = Order(main, args, url, name, task_id, num_workers, directory, tries, options)
        result: T = await do_in_process(order, stop_grace_secs)
        return result

    try:
        grace = 2 * stop_grace_secs + 5.0
        return await supervise(attempt, num_tasks=num_workers + 1, max_restarts=max_restarts, backoff=backoff, grace_secs=grace)
    finally:
        if own is not None:
            await to_thread(lambda: shutil.rmtree(own, ignore_errors=True), grace_secs=stop_grace_secs)
        elif run is None:
            await forget(kept, stop_grace_secs)
