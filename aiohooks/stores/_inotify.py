"""Being told by the kernel what happens to files: Linux's inotify, through the C library."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import weakref
from typing import NamedTuple

MODIFY = 0x2
CLOSE_WRITE = 0x8
DELETE = 0x200

_EVENT = struct.Struct("iIII")


class Event(NamedTuple):
    """Something that has happened."""

    watch: int
    """What `add` returned; -1 for an overflow, after which anything may have happened."""
    mask: int
    name: str
    """In a directory, of which file; otherwise empty."""


class Inotify:
    """One instance of inotify; its `fd` becomes readable when there are events, see `parse`."""

    def __init__(self) -> None:
        """Raises `OSError` where there is no inotify, or where the user has as many instances as allowed (EMFILE)."""
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "inotify_init1"):
            raise OSError(errno.ENOSYS, "this system has no inotify")
        self._add_watch = libc.inotify_add_watch
        self.fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise _os_error("inotify_init1")
        _all.add(self)

    def add(self, path: str | os.PathLike[str], mask: int) -> int:
        """Watches a file, or what is in a directory; raises `OSError` where the user has no watch left (ENOSPC)."""
        watch: int = self._add_watch(self.fd, os.fsencode(path), ctypes.c_uint32(mask))
        if watch < 0:
            raise _os_error(os.fspath(path))
        return watch

    def close(self) -> None:
        """Ends it, with all its watches; harmless when it was closed already."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def parse(data: bytes) -> list[Event]:
    """The events in what was read from the `fd`."""
    events: list[Event] = []
    place = 0
    while place < len(data):
        watch, mask, _, size = _EVENT.unpack_from(data, place)
        place += _EVENT.size
        events.append(Event(watch, mask, os.fsdecode(data[place : place + size].rstrip(b"\0"))))
        place += size
    return events


def packed(watch: int, mask: int) -> bytes:
    """One event without a name, as it is read from the `fd`."""
    return _EVENT.pack(watch, mask, 0, 0)


def _os_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


_all: weakref.WeakSet[Inotify] = weakref.WeakSet()


def _after_fork() -> None:
    # A child would keep it alive, and it counts among those that the user may have.
    for each in _all:
        each.close()


os.register_at_fork(after_in_child=_after_fork)
