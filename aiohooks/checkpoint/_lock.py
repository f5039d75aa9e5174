"""Keeping a directory to one writer. The lock is the kernel's: it ends with the process, whatever way that ends."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import weakref
from pathlib import Path

from aiohooks.checkpoint._files import Files
from aiohooks.checkpoint._format import LOCK
from aiohooks.errors import CheckpointBusyError, CheckpointError


class DirectoryLock:
    """The lock of one checkpoint directory, and the directory, open as long as the lock is held."""

    def __init__(self, files: Files, path: Path) -> None:
        """Takes nothing yet."""
        self._files = files
        self._path = path
        self._directory: int | None = None
        self._lock: int | None = None
        _all_locks.add(self)

    @property
    def held(self) -> bool:
        """Whether this process has the lock by this object."""
        return self._lock is not None

    def take(self) -> int:
        """Makes the directory if it is missing, locks it unless that is done, and returns it, open.

        Raises:
            CheckpointBusyError: another writer has it.
            CheckpointError: the directory belongs to somebody else and anybody could change what is in it.
            OSError: what the system refused.
        """
        if self._directory is not None and self._files.status(self._directory).st_nlink == 0:
            self.release()  # somebody removed the directory; one of the same name may be there again
        if self._directory is not None:
            return self._directory
        self._files.make_directories(self._path)
        directory = self._files.open_directory(self._path)
        try:
            self._check_owner(directory)
            lock = self._files.lock(LOCK, dir_fd=directory)
            if lock is None:
                raise self._busy(directory)
            self._directory, self._lock = directory, lock
        except BaseException:
            self._files.close_quietly(directory)
            raise
        try:
            self._files.sync_path(self._path.parent)  # the directory's own name, if it was made just now or before a crash
        except BaseException:
            self.release()
            raise
        self._files.write_note(lock, f"{os.getpid()}\n")
        return directory

    def release(self) -> None:
        """Gives the lock up; harmless without one."""
        lock, directory = self._lock, self._directory
        self._lock = self._directory = None
        if lock is not None:
            self._files.unlock(lock)
        if directory is not None:
            self._files.close_quietly(directory)

    def forget(self) -> None:
        """Gives up what a forked child has inherited; the parent keeps its lock."""
        for fd in (self._lock, self._directory):
            if fd is not None:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._lock = self._directory = None

    def _check_owner(self, directory: int) -> None:
        status = self._files.status(directory)
        open_to_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
        if open_to_others and hasattr(os, "geteuid") and status.st_uid != os.geteuid():
            raise CheckpointError(
                errno.EPERM,
                f"{self._path} belongs to user {status.st_uid} and others may write to it, so what is saved there could be "
                "exchanged; take a directory of your own, or have its mode changed to 0755",
            )

    def _busy(self, directory: int) -> CheckpointBusyError:
        note = self._files.read_note(LOCK, dir_fd=directory).strip()
        pid = int(note) if note.isdigit() and len(note) <= 10 else None
        holder = "another writer" if pid is None else "this process itself" if pid == os.getpid() else f"process {pid}"
        return CheckpointBusyError(
            f"{self._path} is in use by {holder}; a directory has one writer: close that Saver first, take another directory, "
            "or pass read_only=True to read only",
            pid=pid,
        )


_all_locks: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _in_forked_child() -> None:
    for lock in list(_all_locks):
        lock.forget()


if hasattr(os, "register_at_fork"):  # a system without fork has nothing to forget
    os.register_at_fork(after_in_child=_in_forked_child)
