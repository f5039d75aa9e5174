"""The processes that have a run open: each has a file of its own in `alive/`, open and locked.

The name of the file is the number of the process's slot, and its content the name of the process.
When the process ends, in any way, the kernel releases the lock and then reports to inotify that a
file was closed after writing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path

from aiohooks._core.fork import hold_during_fork
from aiohooks.errors import StoreUnavailableError

if sys.platform != "win32":  # Windows has no fcntl; `LocalEngine` rejects it
    import fcntl

MAX_SLOTS = 1024

no_fork = threading.Lock()
"""The lock to hold during each use of the files of a run. One thread at a time uses them, and a
child that is forked does not get them in the middle of a change.
"""
hold_during_fork(no_fork)

# The locks are POSIX locks: a `flock` is released only after the report, when other processes may
# have checked it already. But a process loses a POSIX lock as soon as it closes *any* descriptor of
# the file, and its own locks never conflict. So a process never opens its own files a second time:
# it remembers their content.
_own_files: dict[tuple[int, int], str] = {}
"""The content of the files of this very process, by device and inode."""


def claim_slot(directory: Path, process: str) -> tuple[int, int]:
    """Make and lock the file of this process in the lowest free slot. Return slot and descriptor.

    The process counts as alive as long as it has the descriptor. The caller has the lock of the
    run, and has removed the files of dead processes.
    """
    free_slots = set(range(MAX_SLOTS)).difference(processes_by_slot(directory))
    if not free_slots:
        raise StoreUnavailableError(f"{MAX_SLOTS} processes have this run open: limit reached")
    slot = min(free_slots)
    fd = os.open(directory / str(slot), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.lockf(fd, fcntl.LOCK_EX)
    os.write(fd, process.encode())
    _own_files[file_id(os.fstat(fd))] = process
    return slot, fd


def release_slot(fd: int) -> None:
    """Close the file of this process, which the kernel reports to the others.

    In a forked child that reports nothing: its parent has the file open, too.
    """
    del _own_files[file_id(os.fstat(fd))]
    os.close(fd)


def file_id(status: os.stat_result) -> tuple[int, int]:
    """Return the device and the inode of a file."""
    return status.st_dev, status.st_ino


def processes_by_slot(directory: Path) -> dict[int, str | None]:
    """Return the name of the process in each slot, or None for a process that has died.

    Each process has a file with the number of its slot as its name. It keeps the file locked.
    """
    processes: dict[int, str | None] = {}
    # `Path.glob` would hide an error of the system: all processes would look dead.
    for filename in os.listdir(directory):
        if not filename.isdecimal():
            continue  # a foreign file
        path = directory / filename
        with contextlib.suppress(FileNotFoundError):  # the process left after the listing
            process = _own_files.get(file_id(path.lstat()))
            if process is None:
                process = _process_with_lock(path)
            processes[int(filename)] = process
    return processes


def _process_with_lock(path: Path) -> str | None:
    """Return the name in the file of another process, or None if no process has locked the file."""
    with path.open("rb") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # the two errors of a lock that is taken
            return file.read().decode(errors="replace")
    return None
