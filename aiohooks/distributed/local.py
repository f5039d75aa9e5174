"""Chief and workers on one machine: as tasks of one event loop, or as processes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import multiprocessing
import os
import pickle  # noqa: TID251 - for its error alone
import signal
import socket
import struct
import threading
import traceback
from collections.abc import Callable, Coroutine, Mapping
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

from aiohooks._core.calls import limited
from aiohooks._core.fork import call_after_fork
from aiohooks._core.waits import shielded, to_thread
from aiohooks.distributed.task import (
    TaskResult,
    TaskSpec,
    launch,
    make_spec,
    run_task,
    supervise,
    unwrap_result,
    with_process_options,
)
from aiohooks.errors import InvalidArgumentError, TaskDiedError, UnsupportedSystemError
from aiohooks.stores import MemoryStepStore

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
    """Run `main(task, *args)` for the chief and each worker, as tasks of this event loop.

    All tasks share a `MemoryStepStore`. When a task fails, the other tasks are cancelled. Tasks are
    not restarted, because a session recovers by itself from every error that a restart in the same
    process could solve.

    Args:
        main: a coroutine function that takes the `Task`.
        num_workers: the number of workers, without the chief.
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
        return await supervise(lambda task_spec: task_spec.call(store), spec)


async def run_processes(  # noqa: PLR0913 - options of users, by keyword
    main: Callable[..., Coroutine[Any, Any, T]],
    *,
    num_workers: int = 3,
    args: tuple[Any, ...] = (),
    store: str | None = None,
    run: str | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    max_restarts: int = 3,
    stop_grace_secs: float = 10.0,
    store_options: Mapping[str, Any] | None = None,
) -> list[T]:
    """Run `main(task, *args)` for the chief and each worker, in processes of this machine.

    A process dies by a signal, with an exit code other than 0, or before `main` has ended. It is
    restarted after a growing pause, with the next `attempt`. `sys.exit(0)` in `main` is a clean
    end, with the result None. A worker that ends while the chief is dead is restarted as well. When
    a process dies, the processes that it has started and left in its process group are killed.

    An exception of `main` is final: the other processes get SIGTERM, which a session with
    `handle_signals=True` takes as a stop, and SIGKILL `stop_grace_secs` later. They also end
    whenever this process ends. Unless the program handles SIGTERM, the signal ends the processes in
    this way, and then the program by `SystemExit`.

    `main`, `args` and the results are pickled: `main` is a function of a module, or of a script
    that starts its own work under `if __name__ == "__main__":`. The variables AIOHOOKS_STEP_STORE
    and AIOHOOKS_RUN give the run's address to the processes.

    Args:
        main: a coroutine function that takes the `Task`.
        num_workers: the number of workers, without the chief.
        args: further arguments of `main`.
        store: the URL of the step store, by default `local://`.
        run: the name of the run, which is kept and continued by the next launcher of this name. The
            default is a new name, and the run is deleted afterwards.
        checkpoint_dir: the value of `Task.checkpoint_dir`.
        max_restarts: how often each task may be restarted.
        stop_grace_secs: how long a process may take to end after SIGTERM.
        store_options: further arguments of `open_step_store`; `on_lost` is "keep" by default.

    Returns:
        The results: the chief's, then the workers'.

    Raises:
        ExceptionGroup: of the error of `main`, or a `TaskDiedError`, for each task that failed.
        SystemExit: SIGTERM was received. The exit code is 143, as in shells.
        InvalidArgumentError: an argument is invalid. Nothing was started.
        UnsupportedSystemError: the system has no process groups. Nothing was started.
    """
    if not hasattr(os, "killpg"):
        raise UnsupportedSystemError(
            "run_processes needs the process groups of Unix, which this system does not have. Use"
            " run_tasks, or start the processes yourself, with a store that all of them can reach"
            " (redis://)"
        )
    spec = make_spec(main, args, num_workers, run, checkpoint_dir)
    spec = with_process_options(spec, max_restarts, stop_grace_secs, store_options)
    if str(store).startswith("memory:"):
        raise InvalidArgumentError(
            f"store={store!r} is for one process; leave it out, or give local:///directory"
        )
    spec = dataclasses.replace(spec, url="local://" if store is None else store)
    # Open a store before any process starts, so that an invalid option is reported once.
    store_of_launcher = spec.open_store()
    # A run with a random name is forgotten, because no other launcher can continue it.
    has_random_name = run is None
    return await launch(_run_in_process, spec, store_of_launcher, forgets=has_random_name)


_spawn = multiprocessing.get_context("spawn")
# The lock to hold during `start` and `join` of a process. `start`, which runs in a thread, polls
# all processes that multiprocessing has started, and so reaps those that have ended. If a `join` of
# such a process ran at the same time, only one of the two calls would get the exit code.
_start_lock = threading.Lock()


class _Connection:
    """The connection of the launcher to a process. The launcher sends nothing over it.

    The end of the launcher closes the connection, and so does the end of the process. Each of them
    notices the end of the other in this way.
    """

    def __init__(self) -> None:
        """Connect two sockets: `own_end` is for the launcher, `other_end` for the process."""
        self.own_end, self.other_end = socket.socketpair()
        call_after_fork(self)

    def after_fork(self) -> None:
        """Close both ends in a forked child, which may outlive the launcher and the process."""
        for end in (self.own_end, self.other_end):
            if end.fileno() >= 0:  # the socket is not closed yet
                os.close(end.detach())


async def _run_in_process(spec: TaskSpec) -> Any:
    """Run a task in a new process, and return its result.

    The process has ended when this function returns or raises.

    Raises:
        TaskDiedError: the process ended without a result.
    """
    grace_secs = spec.stop_grace_secs
    connection = _Connection()
    process = _spawn.Process(
        target=_process_main, args=(connection.other_end, spec), name=f"aiohooks {spec.name}"
    )
    with connection.other_end:
        reader, writer = await asyncio.open_unix_connection(sock=connection.own_end)
        try:
            try:
                await to_thread(_start_process, process, grace_secs=grace_secs)
            finally:
                # Now only the process has the other end open, so that the end of the process closes
                # the connection.
                connection.other_end.close()
            data = await _receive_result(reader)
        except BaseException:
            if process.pid is not None:  # the process was started
                process.terminate()
            raise
        finally:
            # Read the PID now, because `_end_process` closes the process object.
            pid = process.pid
            code = await shielded(
                _end_process(process, reader, grace_secs),
                grace_secs=2 * grace_secs + 1,
                what=process.name,
            )
            writer.close()
    if data is None:
        raise TaskDiedError(
            f"the {spec.name} (process {pid}, attempt {spec.attempt}) {_describe_exit(code)}",
            task_id=spec.task_id,
            exit_code=code,
        )
    pickler: Any = ForkingPickler  # its `loads` has no types
    result = await to_thread(pickler.loads, data, grace_secs=grace_secs)
    return unwrap_result(result, spec)


def _start_process(process: SpawnProcess) -> None:
    """Start a process. Raise `InvalidArgumentError` if its arguments cannot be pickled."""
    try:
        with _start_lock:
            process.start()
    # Pickling a local function raises AttributeError up to Python 3.13, and PicklingError since.
    except (AttributeError, TypeError, ValueError, pickle.PicklingError) as error:
        raise InvalidArgumentError(
            f"main or its args cannot be sent to another process ({error}). Give a function of a"
            " module, and plain values"
        ) from error


_LENGTH = struct.Struct("!Q")
"""The length of a pickled result, which is sent before the result."""


async def _receive_result(reader: asyncio.StreamReader) -> bytes | None:
    """Return the pickled result of a process, or None if the process ends without a result."""
    try:
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return await reader.readexactly(size)
    except asyncio.IncompleteReadError:
        return None


async def _end_process(
    process: SpawnProcess, reader: asyncio.StreamReader, grace_secs: float
) -> int | None:
    """Wait until a process has ended, and return its exit code. Kill it after the grace period."""
    pid = process.pid
    if pid is None:  # the process could not be started
        return None
    try:
        # Wait for the end of the connection, which the process keeps open until it ends. A process
        # that was terminated may still send a result: it is too late, so discard it.
        await limited(reader.read(), grace_secs, process.name)
    except TimeoutError:
        process.kill()
    # Both calls may block the event loop, but only for a moment: the process has ended or was
    # killed, and other threads have the lock only while they start a process.
    with _start_lock:
        process.join()
    code = process.exitcode
    process.close()
    if code != 0:
        # The process may have left other processes running that it had started. They are in its
        # process group, whose number is the PID.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    return code


def _describe_exit(code: int | None) -> str:
    """Return the words of a message that say how a process ended."""
    if code is not None and code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"was killed by {names.get(-code, f'signal {-code}')}"
    early = "" if code else ", before main had ended"
    return f"ended with exit code {code}{early}"


# In the new process.


def _process_main(launcher: socket.socket, spec: TaskSpec) -> None:
    """Run a task in this process, and send its result to the launcher."""
    # Make a process group. In the launcher's group, this process would get Ctrl-C twice: from the
    # terminal and from the launcher.
    os.setpgrp()
    # Processes that this process starts must not keep the connection open after its end.
    launcher.set_inheritable(False)
    os.register_at_fork(after_in_child=launcher.close)
    threading.Thread(
        target=_end_with_launcher,
        args=(launcher, spec.stop_grace_secs),
        name="aiohooks: parent's end",
        daemon=True,
    ).start()
    _send_result(launcher, run_task(spec))


def _send_result(launcher: socket.socket, result: TaskResult) -> None:
    """Send a result, or an error if the result cannot be pickled."""
    try:
        data = ForkingPickler.dumps(result)
    except Exception as error:
        unsent = TypeError(f"the result of main cannot be sent to another process: {error}")
        data = ForkingPickler.dumps(TaskResult(None, unsent, traceback.format_exc()))
    # `data` is a view of memory. Release it at the end of this block: an error refers to this
    # frame, and Python 3.13 warns when it collects both together with a view that is not released.
    # Sending raises ConnectionError if the launcher has ended, which needs no result then.
    with data, contextlib.suppress(ConnectionError):
        launcher.sendall(_LENGTH.pack(len(data)))
        launcher.sendall(data)


def _end_with_launcher(launcher: socket.socket, grace_secs: float) -> None:
    """End this process after its launcher, which may be killed before it can end its processes."""
    # The launcher sends nothing, so `recv` returns at the end of the connection.
    with contextlib.suppress(ConnectionError):
        launcher.recv(1)
    # If the program handles SIGTERM, as a session may do, the handler may end the task normally.
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(grace_secs)
    # Kill the whole process group (0 is the own one): this process, and those that it has started.
    os.killpg(0, signal.SIGKILL)
