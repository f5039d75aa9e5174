"""How the processes of a run are notified of changes: by inotify."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from pathlib import Path
from typing import NamedTuple

from aiohooks._aio.fork import call_after_fork
from aiohooks.errors import StoreUnavailableError

MODIFY = 0x2
ATTRIB = 0x4
CLOSE_WRITE = 0x8
DELETE = 0x200
MOVE_SELF = 0x800

_EVENT = struct.Struct("iIII")
_READ_SIZE = 1 << 13
"""Bytes of events read at a time; further events are read in the next iteration of the loop."""
_LIMITS = {
    errno.EMFILE: (
        "fs.inotify.max_user_instances, or the number of files that a process may have open"
    ),
    errno.ENOSPC: "fs.inotify.max_user_watches",
}


class Inotify:
    """One inotify instance; its `fd` becomes readable when there are events."""

    def __init__(self) -> None:
        """Raise `OSError` where there is no inotify, or where the user has reached the limit of
        instances (EMFILE).
        """
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = -1
        if not hasattr(libc, "inotify_init1"):
            raise OSError(errno.ENOSYS, "this system has no inotify")
        self._add_watch = libc.inotify_add_watch
        self.fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise _os_error("inotify_init1")
        call_after_fork(self)

    def add(self, path: str | os.PathLike[str], mask: int) -> int:
        """Watch a file, or the files in a directory; raise `OSError` where the user has reached the
        limit of watches (ENOSPC).
        """
        watch: int = self._add_watch(self.fd, os.fsencode(path), ctypes.c_uint32(mask))
        if watch < 0:
            raise _os_error(os.fspath(path))
        return watch

    def close(self) -> None:
        """Close it with all its watches; harmless when called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    after_fork = close  # a child would keep it alive, and it counts towards the user's limit


def _os_error(subject: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{subject}: {os.strerror(number)}")


class RunEvents(NamedTuple):
    """Events of a run.

    Attributes:
        notified: the file `notify` was written.
        ended: slots whose processes may have ended; None: any of them.
        removed: slots that were freed, by their processes or because the run was deleted.
        moved: the run's directory, the one above it, or one of the files, was moved or removed.
    """

    notified: bool
    ended: set[str] | None
    removed: set[str]
    moved: bool


_NOTIFIED = RunEvents(notified=True, ended=set(), removed=set(), moved=False)


class InotifyWatcher(Inotify):
    """Watches the files of the run in `path`."""

    def __init__(self, path: Path) -> None:
        """Begin to watch.

        Raises:
            StoreUnavailableError: the user has reached a limit of inotify.
            OSError: a file cannot be watched.
        """
        try:
            super().__init__()
            self._watch(path)
        except OSError as error:
            self.close()
            if error.errno not in _LIMITS:
                raise
            raise StoreUnavailableError(
                f"local:// cannot watch the run, as a limit of this user is reached ({error}):"
                f" raise {_LIMITS[error.errno]}, close other stores, or use redis://"
            ) from error
        self._only_notified = _EVENT.pack(self._notify_watch, MODIFY, 0, 0)

    def _watch(self, path: Path) -> None:
        self._notify_watch = self.add(path / "notify", MODIFY | ATTRIB | MOVE_SELF)
        self._alive_watch = self.add(path / "alive", CLOSE_WRITE | DELETE)
        self.add(
            path / "position", ATTRIB | MOVE_SELF
        )  # a file that is removed while it is open has one name less
        for directory in (path, path.parent):
            self.add(directory, MOVE_SELF)

    def read_events(self) -> RunEvents:
        """Return the events since the last call, without waiting."""
        try:
            data = os.read(self.fd, _READ_SIZE)
        except BlockingIOError:
            data = b""
        if data == self._only_notified:
            return _NOTIFIED
        notified = overflow = moved = False
        ended: set[str] = set()
        removed: set[str] = set()
        offset = 0
        while offset < len(data):
            watch, mask, _, size = _EVENT.unpack_from(data, offset)
            offset += _EVENT.size + size
            overflow |= watch < 0  # any number of events was lost
            notified |= watch == self._notify_watch
            moved |= bool(mask & (ATTRIB | MOVE_SELF))
            if watch == self._alive_watch:
                name = os.fsdecode(data[offset - size : offset].rstrip(b"\0"))
                ended |= {name} if mask & CLOSE_WRITE else set()
                removed |= {name} if mask & DELETE else set()
        return RunEvents(
            overflow or notified, None if overflow else ended, removed, overflow or moved
        )
