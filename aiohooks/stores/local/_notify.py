"""How the processes of a run are notified of changes: by inotify."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from pathlib import Path

from aiohooks._core.fork import call_after_fork
from aiohooks.errors import StoreUnavailableError

MODIFY = 0x2
CLOSE_WRITE = 0x8
_REMOVED = 0x4 | 0x800
"""ATTRIB, as a file that is removed while it is open has one name less, and MOVE_SELF."""
_DELETED = 0x200
OVERFLOW = 0x4000
"""Any number of events was lost, of any kind."""

_EVENT = struct.Struct("iIII")
_LIMITS = {
    errno.EMFILE: (
        "fs.inotify.max_user_instances, or the number of files that a process may have open"
    ),
    errno.ENOSPC: "fs.inotify.max_user_watches",
}


class Inotify:
    """One inotify instance; its `fd` becomes readable when there are events."""

    def __init__(self) -> None:
        """Raise `StoreUnavailableError` where the user has reached the limit of instances."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        _check(self.fd, "inotify")
        call_after_fork(self)

    def add(self, path: Path, kinds: int) -> None:
        """Watch a file, or the files in a directory.

        Raises:
            StoreUnavailableError: the user has reached the limit of watches.
            OSError: the system refuses it.
        """
        watch = self._libc.inotify_add_watch(self.fd, os.fsencode(path), ctypes.c_uint32(kinds))
        _check(watch, str(path))

    def add_run(self, path: Path) -> None:
        """Watch the files of the run in the directory `path`."""
        self.add(path / "notify", MODIFY | _REMOVED)
        self.add(path / "alive", CLOSE_WRITE | _DELETED)
        for watched in (path / "run.db", path / "waiting", path, path.parent):
            self.add(watched, _REMOVED)

    def read_events(self) -> int:
        """Return the kinds of the events since the last call, combined, without waiting."""
        try:
            data = os.read(self.fd, 8192)  # the next iteration of the loop reads the others
        except BlockingIOError:
            return 0
        kinds = 0
        offset = 0
        while offset < len(data):
            _, kind, _, name_size = _EVENT.unpack_from(data, offset)
            offset += _EVENT.size + name_size
            kinds |= kind
        return kinds

    def close(self) -> None:
        """Close it with all its watches; harmless when called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    after_fork = close  # a child would keep it alive, and it counts towards the user's limit


def _check(result: int, subject: str) -> None:
    """Raise the error of a call of the system."""
    if result >= 0:
        return
    number = ctypes.get_errno()
    text = os.strerror(number)
    if number not in _LIMITS:
        raise OSError(number, text, subject)
    raise StoreUnavailableError(
        f"local:// cannot watch {subject}, as a limit of this user is reached ({text}):"
        f" raise {_LIMITS[number]}, close other stores, or use redis://"
    )
