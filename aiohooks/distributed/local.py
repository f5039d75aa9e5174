"""Chief and workers on one machine: as tasks of one event loop, or as processes."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import multiprocessing
import os
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
from aiohooks._aio.cancel import TimeLimit, shielded, to_thread
from aiohooks._aio.clock import wake
from aiohooks._validate import check_secs
from aiohooks.distributed.task import TaskResult, TaskSpec, forget_run, make_spec, run_task, supervise, task_name, unwrap_result
from aiohooks.errors import InvalidArgumentError, TaskDiedError
from aiohooks.stores import MemoryStepStore, open_step_store

__all__ = ["run_processes", "run_tasks"]

T = TypeVar("T")


async def run_tasks(
    main: Callable[..., Coroutine[Any, Any, T]],
    *,
    num_workers: int = 3,
    args: tuple[Any, ...] = (),
    run: str = "default",
    checkpoint_dir: str | os.PathLike[str] | None = None,
) -> list[T]:
    """Run `main(task, *args)` for the chief and each worker, as tasks of this event loop that share a `MemoryStepStore`.

    When one fails the others are cancelled. There are no restarts: a session recovers by itself from all that a restart in
    the same process could help with.

    Args:
        main: a coroutine function that takes the `Task`.
        num_workers: the number of workers besides the chief.
        args: further arguments of `main`.
        run: the name of the run.
        checkpoint_dir: the value of `Task.checkpoint_dir`.

    Returns:
        The results: the chief's, then the workers'.

    Raises:
        ExceptionGroup: of the errors of the tasks that failed.
    """
    spec = make_spec(main, args, num_workers, run, checkpoint_dir)
    async with MemoryStepStore(run=run) as store:

        def run_attempt(spec: TaskSpec) -> Coroutine[Any, Any, T]:
            return main(spec.task(store), *args)

        return await supervise(run_attempt, spec, max_restarts=0, backoff=Backoff(), grace_secs=10.0)


async def run_processes(
    main: Callable[..., Coroutine[Any, Any, T]],
    *,
    num_workers: int = 3,
    args: tuple[Any, ...] = (),
    store: str | None = None,
    run: str | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    max_restarts: int = 3,
    backoff: Backoff = Backoff(initial_secs=0.5, max_secs=30.0),
    stop_grace_secs: float = 10.0,
    store_options: Mapping[str, Any] | None = None,
) -> list[T]:
    """Run `main(task, *args)` for the chief and each worker, each in a process of its own on this machine.

    A process that dies (by a signal, or with an exit code other than 0) is restarted after a growing pause, with the next
    `attempt`. An exception of `main` is final: the other processes get SIGTERM, which a session with `handle_signals=True`
    takes as a stop, and SIGKILL `stop_grace_secs` later. They also end when this process does, however it ends.

    `main`, `args` and the results are pickled: `main` is a function of a module, or of a script that starts its own work under
    `if __name__ == "__main__":`. The processes also find the run's address in AIOHOOKS_STEP_STORE and AIOHOOKS_RUN.

    Args:
        main: a coroutine function that takes the `Task`.
        num_workers: the number of workers besides the chief.
        args: further arguments of `main`.
        store: the URL of the step store; by default a local one in a new directory, which is removed afterwards.
        run: the name of the run; by default a new one, which is forgotten afterwards.
        checkpoint_dir: the value of `Task.checkpoint_dir`.
        max_restarts: how often each task may be restarted.
        backoff: the pauses before restarts.
        stop_grace_secs: how long a process may take to end after SIGTERM.
        store_options: further arguments of `open_step_store`; `on_lost` is "keep" by default.

    Returns:
        The results: the chief's, then the workers'.

    Raises:
        ExceptionGroup: of what `main` raised, or `TaskDiedError`, for each task that failed.
        InvalidArgumentError: an argument is invalid; nothing was started.
    """
    spec = make_spec(main, args, num_workers, run, checkpoint_dir, max_restarts, backoff, store_options)
    check_secs(stop_grace_secs, "stop_grace_secs")
    if str(store).startswith("memory:"):
        raise InvalidArgumentError(f"store={store!r} is for one process; leave it out, or give local:///directory")
    # Made here as well, so that invalid options are refused once, before any process is started.
    opened = open_step_store("local://" if store is None else store, run=spec.run, **spec.store_options)
    own_dir = None
    if store is None:
        own_dir = await to_thread(lambda: tempfile.mkdtemp(prefix="aiohooks-"), grace_secs=stop_grace_secs)
    spec = dataclasses.replace(spec, url=store or f"local://{own_dir}")
    run_attempt = functools.partial(run_in_process, grace_secs=stop_grace_secs)
    try:
        grace_secs = 2 * stop_grace_secs + 5.0
        return await supervise(run_attempt, spec, max_restarts=max_restarts, backoff=backoff, grace_secs=grace_secs)
    finally:
        if own_dir is not None:
            await to_thread(lambda: shutil.rmtree(own_dir, ignore_errors=True), grace_secs=stop_grace_secs)
        elif run is None:
            await forget_run(opened, stop_grace_secs)


_spawn = multiprocessing.get_context("spawn")
# `start` and `join` of multiprocessing also reap other processes that have ended: of two threads that do so at the same time
# one does not get the exit code.
_start_lock = threading.Lock()


async def run_in_process(spec: TaskSpec, grace_secs: float) -> Any:
    """Run a task in a new process, which has ended when this returns or raises.

    Raises:
        TaskDiedError: the process ended without a result.
    """
    receiver, sender = _spawn.Pipe(duplex=False)
    process = _spawn.Process(target=_process_main, args=(sender, spec, grace_secs), name=f"aiohooks {task_name(spec.task_id)}")
    result: TaskResult | None = None
    received = False
    pid = code = None
    try:
        try:
            await to_thread(_start_process, process, grace_secs=grace_secs)
        finally:
            sender.close()
        await _wait_readable(receiver.fileno())
        result = await to_thread(_receive_result, receiver, grace_secs=grace_secs)
        received = True
    finally:
        receiver.close()
        pid = process.pid
        if pid is not None:
            # A process that has sent its result, or has died, ends by itself.
            ending = _end_process(process, grace_secs, terminate=not received)
            code = await shielded(ending, grace_secs=2 * grace_secs + 1, what=process.name)
    if result is not None:
        return unwrap_result(result, spec)
    if code == 0:
        return None
    raise TaskDiedError(
        f"the {task_name(spec.task_id)} (process {pid}, attempt {spec.attempt}) {_describe_exit(code)}",
        task_id=spec.task_id,
        exit_code=code,
    )


def _start_process(process: SpawnProcess) -> None:
    with _start_lock:
        try:
            process.start()
        except (AttributeError, TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"main or its args cannot be sent to another process ({error}): give a function of a module, and plain values"
            ) from error


def _receive_result(receiver: connection.Connection[Any, Any]) -> TaskResult | None:
    try:
        result: TaskResult = receiver.recv()
    except (EOFError, OSError):
        return None
    return result


async def _end_process(process: SpawnProcess, grace_secs: float, *, terminate: bool) -> int | None:
    """Wait for the end of a process, kill it after the grace period, and return its exit code."""
    if terminate:
        process.terminate()
    try:
        with TimeLimit(grace_secs, process.name):
            await _wait_readable(process.sentinel)
    except TimeoutError:
        process.kill()
        await _wait_readable(process.sentinel)
    with _start_lock:
        process.join()
    code = process.exitcode
    process.close()
    return code


async def _wait_readable(fd: int) -> None:
    """Wait until the file has data or is at its end."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, wake, readable)
    try:
        await readable
    finally:
        loop.remove_reader(fd)


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"ended with exit code {code}"


# In the new process.


def _process_main(sender: connection.Connection[Any, Any], spec: TaskSpec, grace_secs: float) -> None:
    if hasattr(os, "setpgrp"):
        # A process group of its own, or Ctrl-C would reach this process twice: from the terminal and from the launcher.
        os.setpgrp()
    threading.Thread(target=_end_with_parent, args=(grace_secs,), name="aiohooks: parent's end", daemon=True).start()
    result = run_task(spec)
    try:
        sender.send(result)
    except BrokenPipeError:
        pass  # the launcher has ended
    except Exception as error:
        sender.send(TaskResult(None, TypeError(f"what main returned cannot be sent to another process: {error}")))
    sender.close()


def _end_with_parent(grace_secs: float) -> None:
    """End this process when its parent ends, which may be killed before it can end its processes."""
    parent = parent_process()
    if parent is None:
        return
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(grace_secs)
    os._exit(1)
