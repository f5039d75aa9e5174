"""Which processes have a run open: each keeps a file of its own in `alive/`, open for writing and locked.

The file is named by the number of the process's slot, and holds its name. When the process ends, in whatever way, the kernel
gives back the lock and then tells who watches the directory that a file was closed after writing.

The lock is a POSIX one, not a `flock`: those are given back before the telling, a `flock` after it, when somebody may have
looked already. They are not inherited by a fork either. But they are lost as soon as the process closes *any* descriptor of
the file, and never stop the process itself: so a process never opens its own files, but keeps in mind which ones they are.
All of this is done by who has the lock of the run.
"""

from __future__ import annotations

import errno
import os
import threading

from aiohooks.errors import StoreUnavailableError

try:
    import fcntl
except ImportError as missing:
    raise ImportError("the local step store needs file locks as Unix has them; here use redis:// or nats://") from missing

MOST_SLOTS = 4096

_own: dict[tuple[int, int], str] = {}
"""The files of this very process, by device and inode, with the names they hold."""
_open: set[int] = set()
"""Their descriptors."""
_no_fork = threading.Lock()
"""Held while one is opened or closed: none may get into a child of which `_open` does not tell."""


def claim(run_fd: int, process: str) -> tuple[int, int]:
    """Takes the lowest free slot; returns it with the descriptor that holds it. The dead must have been removed before."""
    taken = names(run_fd)
    slot = next((number for number in range(MOST_SLOTS) if str(number) not in taken), None)
    if slot is None:
        raise StoreUnavailableError(f"{MOST_SLOTS} processes have this run open already, which is as many as can be")
    with _no_fork:
        fd = os.open(f"alive/{slot}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=run_fd)
        _open.add(fd)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(fd, process.encode(), 0)
        found = os.fstat(fd)
        _own[found.st_dev, found.st_ino] = process
    except BaseException:
        release(fd)
        raise
    return slot, fd


def release(fd: int) -> None:
    """Gives back what `claim` returned."""
    found = os.fstat(fd)
    _own.pop((found.st_dev, found.st_ino), None)
    with _no_fork:
        _open.discard(fd)
        os.close(fd)


def names(run_fd: int) -> set[str]:
    """The slots that are taken, by the living or by the dead."""
    fd = os.open("alive", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=run_fd)
    try:
        return {name for name in os.listdir(fd) if name.isdecimal()}
    finally:
        os.close(fd)


def look(run_fd: int, slots: set[str] | None) -> tuple[dict[str, str], dict[str, str]]:
    """Who of `slots` (None: of all) is alive and who is dead: for each slot the name of its process."""
    living: dict[str, str] = {}
    dead: dict[str, str] = {}
    for name in names(run_fd) if slots is None else slots:
        path = f"alive/{name}"
        try:
            found = os.stat(path, dir_fd=run_fd, follow_symlinks=False)
            process = _own.get((found.st_dev, found.st_ino))
            if process is not None:
                living[name] = process
                continue
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=run_fd)
        except FileNotFoundError:
            continue
        try:
            process = os.read(fd, 4096).decode(errors="replace")
            (dead if _unlocked(fd) else living)[name] = process
        finally:
            os.close(fd)
    return living, dead


def _unlocked(fd: int) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def _after_fork() -> None:
    # As long as a child has such a file open, nobody would hear that this process has ended.
    for fd in _open:
        os.close(fd)
    _open.clear()
    _own.clear()
    _no_fork.release()


os.register_at_fork(before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_after_fork)
