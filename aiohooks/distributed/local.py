"""Chief and workers on one machine: as tasks of one event loop, or as processes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import multiprocessing
import os
import shutil
import signal
import struct
import tempfile
import threading
from collections.abc import Callable, Coroutine, Generator, Mapping
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from multiprocessing.process import parent_process
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar, cast

from aiohooks._aio.cancel import shielded, to_thread
from aiohooks._aio.clock import wake
from aiohooks._aio.overlap import limited
from aiohooks._aio.waits import Backoff
from aiohooks.distributed.task import (
    TaskResult,
    TaskSpec,
    launch,
    make_spec,
    run_task,
    supervise,
    until_sigterm,
    unwrap_result,
)
from aiohooks.errors import InvalidArgumentError, TaskDiedError, UnsupportedSystemError
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
    """Run `main(task, *args)` for the chief and each worker, as tasks of this event loop that share
    a `MemoryStepStore`.

    When one fails the others are cancelled. There are no restarts: a session recovers by itself
    from all that a restart in the same process could help with.

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
        return await supervise(lambda task: task.call(store), spec)


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
    """Run `main(task, *args)` for the chief and each worker, each in a process of its own on this
    machine.

    A process that dies (by a signal, with an exit code other than 0, or before `main` has ended) is
    restarted after a growing pause, with the next `attempt`; so is a worker that ends while a chief
    is dead. An exception of `main` is final: the other processes get SIGTERM, which a session with
    `handle_signals=True` takes as a stop, and SIGKILL `stop_grace_secs` later. They also end when
    this process does, however it ends. Whatever a process that dies has started itself, and has
    left in its process group, is killed.

    Unless the program handles SIGTERM, it ends the processes in this way, and then the program by
    `SystemExit`.

    `main`, `args` and the results are pickled: `main` is a function of a module, or of a script
    that starts its own work under `if __name__ == "__main__":`. The processes also find the run's
    address in AIOHOOKS_STEP_STORE and AIOHOOKS_RUN.

    Args:
        main: see `run_tasks`.
        num_workers: see `run_tasks`.
        args: see `run_tasks`.
        store: the URL of the step store; by default a local one in a new directory, which is
            removed afterwards.
        run: the name of the run; by default a new one, which is forgotten afterwards.
        checkpoint_dir: see `run_tasks`.
        max_restarts: how often each task may be restarted.
        backoff: the pauses before restarts.
        stop_grace_secs: how long a process may take to end after SIGTERM.
        store_options: further arguments of `open_step_store`; `on_lost` is "keep" by default.

    Returns:
        The results: the chief's, then the workers'.

    Raises:
        ExceptionGroup: of what `main` raised, or `TaskDiedError`, for each task that failed.
        SystemExit: SIGTERM was received; the exit code is 143, as in shells.
        InvalidArgumentError: an argument is invalid; nothing was started.
        UnsupportedSystemError: the system has no groups of processes as Unix has them; nothing was
            started.
    """
    if not hasattr(os, "killpg"):
        raise UnsupportedSystemError(
            "run_processes needs groups of processes as Unix has them, which this system has not;"
            " use run_tasks, or start the processes yourself, with a store that all of them reach"
            " (redis://)"
        )
    spec = make_spec(
        *(main, args, num_workers, run, checkpoint_dir),
        max_restarts=max_restarts,
        backoff=backoff,
        stop_grace_secs=stop_grace_secs,
        store_options=store_options,
    )
    if str(store).startswith("memory:"):
        raise InvalidArgumentError(
            f"store={store!r} is for one process; leave it out, or give local:///directory"
        )
    # Made here as well, so that invalid options are refused once, before any process is started.
    open_step_store("local://" if store is None else store, run=spec.run, **spec.store_options)

    async def run_all() -> list[T]:
        own_dir = None
        if store is None:
            own_dir = await to_thread(
                lambda: tempfile.mkdtemp(prefix="aiohooks-"), grace_secs=stop_grace_secs
            )
        own = dataclasses.replace(spec, url=store or f"local://{own_dir}")
        observer = open_step_store(own.url, run=spec.run, **spec.store_options)
        try:
            run_attempt = functools.partial(_run_in_process, own_dir=own_dir)
            return await launch(run_attempt, own, observer, forgets=run is None and own_dir is None)
        finally:
            if own_dir is not None:
                await to_thread(
                    lambda: shutil.rmtree(own_dir, ignore_errors=True), grace_secs=stop_grace_secs
                )

    return await until_sigterm(run_all(), f"the launcher of the run {spec.run}")


_spawn = multiprocessing.get_context("spawn")
# `start` and `join` of multiprocessing also reap other processes that have ended: of two threads
# that do so at the same time one does not get the exit code.
_start_lock = threading.Lock()


async def _run_in_process(spec: TaskSpec, own_dir: str | None) -> Any:
    """Run a task in a new process, which has ended when this returns or raises.

    If this process is killed, the last of those that it has started removes the directory
    `own_dir`.

    Raises:
        TaskDiedError: the process ended without a result.
    """
    receiver, sender = _spawn.Pipe(duplex=False)
    process = _spawn.Process(
        target=_process_main, args=(sender, spec, own_dir), name=f"aiohooks {spec.name}"
    )
    grace_secs = spec.stop_grace_secs
    sent: bytes | None = None
    pid = code = None
    try:
        try:
            await to_thread(_start_process, process, grace_secs=grace_secs)
        finally:
            sender.close()
            pid = process.pid
        sent = await _receive_result(receiver.fileno(), process)
    except BaseException:
        if pid is not None:
            process.terminate()
        raise
    finally:
        receiver.close()
        if pid is not None:
            ending = _end_process(process, pid, grace_secs)
            code = await shielded(ending, grace_secs=2 * grace_secs + 1, what=process.name)
    if sent is not None:
        unpickle: Callable[[bytes], TaskResult] = cast("Any", ForkingPickler).loads
        return unwrap_result(await to_thread(unpickle, sent, grace_secs=grace_secs), spec)
    raise TaskDiedError(
        f"the {spec.name} (process {pid}, attempt {spec.attempt}) {_describe_exit(code)}",
        task_id=spec.task_id,
        exit_code=code,
    )


def _start_process(process: SpawnProcess) -> None:
    try:
        with _start_lock:
            process.start()
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"main or its args cannot be sent to another process ({error}): give a function of a"
            " module, and plain values"
        ) from error


_LENGTH = struct.Struct("!Q")


async def _receive_result(pipe: int, process: SpawnProcess) -> bytes | None:
    """Return the pickled result of a process, or None if the process ends without one.

    The end of the pipe alone does not say that: whatever the process has forked holds it open.
    """
    os.set_blocking(pipe, False)
    received, ended = bytearray(), False
    with _open_process(process.pid, process.sentinel) as end:
        while True:
            try:
                while part := os.read(pipe, 1 << 20):
                    received += part
                ended = True
            except BlockingIOError:
                pass
            if (
                len(received) >= _LENGTH.size
                and len(received) - _LENGTH.size >= _LENGTH.unpack_from(received)[0]
            ):
                return bytes(received[_LENGTH.size :])
            if ended:
                return None
            await _wait_readable(pipe, end)
            ended = bool(
                connection.wait([end], 0)
            )  # before the pipe is read: all that was sent is in it then


async def _end_process(process: SpawnProcess, pid: int, grace_secs: float) -> int | None:
    """Wait for the end of a process, which it comes to by itself or was asked for; kill it after
    the grace period.

    Returns:
        Its exit code.
    """
    with _open_process(pid, process.sentinel) as end:
        try:
            await limited(_wait_readable(end), grace_secs, process.name)
        except TimeoutError:
            process.kill()
            await _wait_readable(end)
    with _start_lock:
        process.join()
    code = process.exitcode
    process.close()
    if code != 0:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # what it has started itself, and has not ended
    return code


@contextlib.contextmanager
def _open_process(pid: int | None, sentinel: int) -> Generator[int]:
    """Open a process as a file that is readable once it has ended.

    A sentinel of multiprocessing is a pipe, which whatever the process has forked holds open. It is
    used where the system has nothing better: other systems than Linux.
    """
    fd = -1
    if hasattr(os, "pidfd_open") and pid is not None:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended, and its exit code was taken
            fd, writer = os.pipe()
            os.close(writer)
        except OSError:  # an old kernel, or a sandbox
            pass
    if fd == -1:
        fd = os.dup(sentinel)
    try:
        yield fd
    finally:
        os.close(fd)


async def _wait_readable(*fds: int) -> None:
    """Wait until one of the files has data or is at its end."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    for fd in fds:
        loop.add_reader(fd, wake, readable)
    try:
        await readable
    finally:
        for fd in fds:
            loop.remove_reader(fd)


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"was killed by {names.get(-code, f'signal {-code}')}"
    return f"ended with exit code {code}" + ("" if code else ", before main had ended")


# In the new process.


def _lock_directory(path: str) -> Callable[[], None]:
    """Lock the launcher's directory, together with its other processes; return what gives that up,
    and is called at the end.

    The last one removes the directory of a launcher that was killed. The lock is one of POSIX: no
    fork inherits it.
    """
    import fcntl  # every system with groups of processes has it

    fd = os.open(
        os.path.join(path, ".processes"), os.O_RDWR | os.O_CREAT, 0o600
    )  # no run has a file of this name
    fcntl.lockf(fd, fcntl.LOCK_SH)

    def leave() -> None:
        fcntl.lockf(fd, fcntl.LOCK_UN)
        with contextlib.suppress(BlockingIOError, PermissionError):
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)

    return leave


def _process_main(
    sender: connection.Connection[Any, Any], spec: TaskSpec, own_dir: str | None
) -> None:
    # A process group of its own, or Ctrl-C would reach this process twice: from the terminal and
    # from the launcher.
    os.setpgrp()
    leave = _lock_directory(own_dir) if own_dir is not None else bool
    watching = threading.Thread(
        target=_end_with_parent,
        args=(spec.stop_grace_secs, leave),
        name="aiohooks: parent's end",
        daemon=True,
    )
    watching.start()
    result = run_task(spec)
    try:
        data = ForkingPickler.dumps(result)
    except Exception as error:
        data = ForkingPickler.dumps(
            TaskResult(
                None, TypeError(f"what main returned cannot be sent to another process: {error}")
            )
        )
    # The view is released here: an error refers to this frame, and Python 3.13 complains when it
    # collects both with a view.
    with (
        data,
        contextlib.suppress(BrokenPipeError),
        open(sender.fileno(), "wb", closefd=False) as pipe,
    ):
        pipe.write(_LENGTH.pack(len(data)))  # the launcher may have ended
        pipe.write(data)
    sender.close()
    if (parent := parent_process()) is not None and parent.pid != os.getppid():
        leave()


def _end_with_parent(grace_secs: float, leave: Callable[[], object]) -> None:
    """End this process when its parent ends, which may be killed before it can end its
    processes.
    """
    parent = parent_process()
    if parent is None:
        return
    with _open_process(parent.pid, parent.sentinel) as end:
        connection.wait([end])
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(grace_secs)
    leave()
    os.killpg(0, signal.SIGKILL)  # with what this process has started itself
