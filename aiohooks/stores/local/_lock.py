"""The lock of a run, and the file that shows that a process is alive: the kernel releases both when
the process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from aiohooks._aio.fork import call_after_fork, hold_during_fork
from aiohooks._aio.waits import wait_for_others
from aiohooks.errors import StoreUnavailableError, UnsupportedSystemError

if sys.platform != "win32":  # which has none: `check_system` refuses it
    import fcntl

T = TypeVar("T")

_ATTEMPTS = range(3)
"""To get a held lock before a thread waits for it: its holder needs it for some microseconds."""


def check_system() -> None:
    """Refuse a system without the locks and the notifications.

    Raises:
        UnsupportedSystemError: it is not Linux.
    """
    if sys.platform != "linux":
        raise UnsupportedSystemError(
            "the step store local:// needs Linux, whose kernel notifies of changed files (inotify);"
            " on this system use redis://, or memory:// in one process"
        )


class FileLock:
    """A `flock` on a run's directory, as one store has it. The event loop never waits for it.

    Work under the lock is a short function. It is called immediately if the lock is free, otherwise
    by a thread that waits for the lock: the loop continues while a stopped process holds it. The
    thread is a daemon and not one of a pool, whose threads keep the interpreter from exiting: it
    may wait for as long as that process is stopped.
    """

    def __init__(self, fd: int, on_change: Callable[[], object]) -> None:
        """Take over the descriptor `fd`; `on_change` is called in the loop when a thread may have
        changed the run.
        """
        self._fd = fd
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._thread_started = False  # used by the loop only
        self._mutex = threading.Lock()  # guards the two below; held by the thread while it works
        self._thread_has_fd = False
        self._closed = False

    def try_acquire(self) -> bool:
        """Acquire the lock if that is possible without waiting; call `release` then."""
        if self._thread_started:
            return False
        for _ in _ATTEMPTS:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            return True
        return False

    def release(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    async def run(
        self,
        work: Callable[[], T],
        outage: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
    ) -> T:
        """Call `work` under the lock; where a thread has to wait for it, after earlier work, and
        not if cancelled by then.

        With `outage` the wait is in a block of it, and one for others, which a stop ends: another
        process has the lock, and is stopped if that lasts.
        """
        if self.try_acquire():
            try:
                return work()
            finally:
                self.release()
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.append((work, future))
        if not self._thread_started:
            self._start_thread()
        if outage is None:
            return await future
        try:
            with outage():
                return await wait_for_others(future)
        finally:
            future.cancel()  # a stop has ended the wait

    def _start_thread(self) -> None:
        self._thread_started = self._thread_has_fd = True
        threading.Thread(target=self._run_queue, name="aiohooks step store", daemon=True).start()

    def _run_queue(self) -> None:
        # In the thread.
        done: list[tuple[asyncio.Future[Any], Any, Exception | None]] = []
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        while True:
            with self._mutex:
                if self._closed or not self._queue:
                    self._thread_has_fd = False
                    if self._closed:
                        os.close(self._fd)
                    else:
                        fcntl.flock(self._fd, fcntl.LOCK_UN)
                    break
                work, future = self._queue.popleft()
                if future.cancelled():
                    continue
                try:
                    done.append((future, work(), None))
                except Exception as error:
                    done.append((future, None, error))
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._deliver_results, done)

    def _deliver_results(
        self, done: list[tuple[asyncio.Future[Any], Any, Exception | None]]
    ) -> None:
        for future, result, error in done:
            if future.cancelled():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        self._thread_started = False
        if self._closed:
            return
        if self._queue:
            self._start_thread()
        # A caller that was cancelled meanwhile does not report the change.
        self._on_change()

    def close(self, error: Exception) -> None:
        """Close the descriptor, as soon as no thread uses it; pending work fails with `error`."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            if not self._thread_has_fd:
                os.close(self._fd)
        for _, future in self._queue:
            if not future.done():
                future.set_exception(error)
        self._queue.clear()


# Which processes have a run open: each keeps a file of its own in `alive/`, open for writing and
# locked. It is named by the number of the process's slot, and holds the name of the process. When
# the process ends, in whatever way, the kernel releases the lock and then reports to inotify that a
# file was closed after writing.
#
# The lock is a POSIX one: a `flock` is released only after the report, when others may have looked
# already. POSIX locks are not inherited by a fork either. But they are lost as soon as the process
# closes *any* descriptor of the file, and never conflict within a process: so a process never opens
# its own files, but remembers which ones they are. All of this is done under the lock of the run.

MAX_SLOTS = 4096


class _OwnFiles:
    """The files in `alive/` of this very process."""

    def __init__(self) -> None:
        self.processes: dict[tuple[int, int], str] = {}
        """The names that they hold, by device and inode."""
        self.fds: set[int] = set()

    def after_fork(self) -> None:
        """Close them in the child: while it has one open, the end of the parent would go
        unnoticed.
        """
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()
        self.processes.clear()


_own_files = _OwnFiles()
call_after_fork(_own_files)
_no_fork = threading.Lock()
"""Held while a file is opened or closed: no descriptor may get into a child that `_own_files` does
not know of.
"""
hold_during_fork(_no_fork)


def claim_slot(run_fd: int, process: str) -> tuple[int, int]:
    """Take the lowest free slot, and return it with the descriptor that holds it. Dead processes
    must have been removed.
    """
    taken = taken_slots(run_fd)
    slot = next((number for number in range(MAX_SLOTS) if str(number) not in taken), None)
    if slot is None:
        raise StoreUnavailableError(f"{MAX_SLOTS} processes have this run open: limit reached")
    with _no_fork:
        fd = os.open(
            f"alive/{slot}",
            os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW,
            0o600,
            dir_fd=run_fd,
        )
        _own_files.fds.add(fd)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(fd, process.encode(), 0)
        found = os.fstat(fd)
        _own_files.processes[found.st_dev, found.st_ino] = process
    except BaseException:
        release_slot(fd)
        raise
    return slot, fd


def release_slot(fd: int) -> None:
    """Close the descriptor that `claim_slot` returned."""
    found = os.fstat(fd)
    _own_files.processes.pop((found.st_dev, found.st_ino), None)
    with _no_fork:
        _own_files.fds.discard(fd)
        os.close(fd)


def taken_slots(run_fd: int) -> set[str]:
    """Return the slots of all processes, living or dead."""
    fd = os.open("alive", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=run_fd)
    try:
        return {name for name in os.listdir(fd) if name.isdecimal()}
    finally:
        os.close(fd)


def check_processes(run_fd: int, slots: set[str] | None) -> tuple[dict[str, str], dict[str, str]]:
    """Return the living and the dead among the processes in `slots` (None: in all): their names by
    slot.
    """
    living: dict[str, str] = {}
    dead: dict[str, str] = {}
    for name in taken_slots(run_fd) if slots is None else slots:
        path = f"alive/{name}"
        try:
            found = os.stat(path, dir_fd=run_fd, follow_symlinks=False)
            process = _own_files.processes.get((found.st_dev, found.st_ino))
            if process is not None:
                living[name] = process
                continue
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=run_fd)
        except FileNotFoundError:
            continue
        try:
            process = os.read(fd, 4096).decode(errors="replace")
            (dead if _is_unlocked(fd) else living)[name] = process
        finally:
            os.close(fd)
    return living, dead


def _is_unlocked(fd: int) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True
