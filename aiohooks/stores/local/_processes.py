"""Which processes have a run open: each keeps a file of its own in `alive/`, locked and open.

The file is named by the number of the process's slot, and holds the name of the process. When the
process ends, in whatever way, the kernel releases the lock and then reports to inotify that a file
was closed after writing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path

from aiohooks._core.fork import hold_during_fork
from aiohooks.errors import StoreUnavailableError

if sys.platform != "win32":  # which has none: `LocalEngine` rejects it
    import fcntl

MAX_SLOTS = 1024

no_fork = threading.Lock()
"""Hold it to use the files of a run: a forked child must not get them in the middle of a change,
and a thread may be using them.
"""
hold_during_fork(no_fork)

# The lock is a POSIX one: a `flock` is released only after the report, when others may have looked
# already. But POSIX locks are lost as soon as the process closes *any* descriptor of the file, and
# never conflict within a process: so a process never opens its own files, but remembers them.
_own_files: dict[tuple[int, int], str] = {}
"""The names in the files of this very process, by device and inode."""


def claim_slot(directory: Path, process: str) -> tuple[int, int]:
    """Make the file of this process in the lowest free slot, and return both.

    The caller has the lock of the run, and has removed dead processes.
    """
    free = set(range(MAX_SLOTS)).difference(check_processes(directory))
    if not free:
        raise StoreUnavailableError(f"{MAX_SLOTS} processes have this run open: limit reached")
    slot = min(free)
    fd = os.open(directory / str(slot), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.lockf(fd, fcntl.LOCK_EX)
    os.write(fd, process.encode())
    _own_files[file_id(os.fstat(fd))] = process
    return slot, fd


def release_slot(fd: int) -> None:
    """Close the file, which reports the end of this process; in a forked child only forget it."""
    del _own_files[file_id(os.fstat(fd))]
    os.close(fd)


def file_id(status: os.stat_result) -> tuple[int, int]:
    """Return the device and the inode of a file."""
    return status.st_dev, status.st_ino


def check_processes(directory: Path) -> dict[int, str | None]:
    """Return the names of the processes by slot; None for a process that has died."""
    processes: dict[int, str | None] = {}
    for name in os.listdir(directory):  # not `glob`, which takes an error for an empty directory
        if not name.isdecimal():
            continue  # no store has made it
        path = directory / name
        with contextlib.suppress(FileNotFoundError):  # it has just left
            own = _own_files.get(file_id(path.lstat()))
            processes[int(name)] = own or _other_process(path)
    return processes


def _other_process(path: Path) -> str | None:
    with path.open("rb") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # the two errors of a lock that is taken
            return file.read().decode(errors="replace")
    return None
