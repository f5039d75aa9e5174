"""Being told of changes where there is no inotify: a named pipe for each process, into which who changes something writes.

Telling is a second step here, after the change: a process killed between the two leaves the others untold. So who listens to a
bell also looks by itself, once a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from aiohooks.stores._protocol import logger

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


_AT_ONCE = 1 << 13
"""How many bytes of events are read at once; what is more comes with the next turn of the loop."""
_NOT_FOR_US = {
    errno.ENOSYS: "there is no inotify here",
    errno.EMFILE: "there are as many as fs.inotify.max_user_instances allows, or as many open files as a process may have",
    errno.ENOSPC: "there are as many watches as fs.inotify.max_user_watches allows",
}


class Heard(NamedTuple):
    """What was heard."""

    news: bool
    """The record has changed in a way that somebody waits for."""
    ended: set[str] | None
    """In these slots the process may have ended; None: in any."""
    deleted: set[str]
    """In these slots the process was taken out, by itself or because the run was deleted."""


_NEWS = Heard(news=True, ended=set(), deleted=set())


class Ears:
    """Hears of changes of a run; `fd` becomes readable when there is something to hear."""

    def __init__(self, path: Path, inotify: Inotify) -> None:
        """Begins to listen to the run in `path`."""
        self.fd: int = inotify.fd
        """What to wait for."""
        self._inotify = inotify
        self._loud = inotify.add(path / "loud", MODIFY)
        self._alive = inotify.add(path / "alive", CLOSE_WRITE | DELETE)
        self._only_news = packed(self._loud, MODIFY)

    def hear(self) -> Heard:
        """What has happened since the last time; does not wait."""
        try:
            data = os.read(self.fd, _AT_ONCE)
        except BlockingIOError:
            data = b""
        if data == self._only_news:
            return _NEWS
        events = parse(data)
        lost = any(event.watch < 0 for event in events)  # more has happened than the kernel keeps
        news = any(event.watch == self._loud for event in events)
        ended = {event.name for event in events if event.watch == self._alive and event.mask & CLOSE_WRITE}
        deleted = {event.name for event in events if event.watch == self._alive and event.mask & DELETE}
        return Heard(lost or news, None if lost else ended, deleted)

    def close(self) -> None:
        """Hears nothing more."""
        self._inotify.close()


def listen(path: Path, run: str, make: Callable[[], Inotify]) -> Ears | None:
    """Begins to listen; None, with a warning, where that cannot be: then use a `Bell`."""
    inotify = None
    try:
        inotify = make()
        return Ears(path, inotify)
    except BaseException as error:
        if inotify is not None:
            inotify.close()
        if not isinstance(error, OSError) or error.errno not in _NOT_FOR_US:
            raise
        logger.warning(
            "run %s: the kernel does not tell of changes of files (%s: %s): using named pipes, and looking once a second",
            run,
            error,
            _NOT_FOR_US[error.errno],
        )
        return None


_NOBODY_LISTENS = (errno.ENXIO, errno.ENOENT, errno.EAGAIN, errno.EPIPE)


class Bell:
    """The end at which one process listens; its `fd` becomes readable when it rings."""

    def __init__(self, run_fd: int, slot: int) -> None:
        """Hangs it up at the place of a slot."""
        path = f"bells/{slot}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path, dir_fd=run_fd)
        os.mkfifo(path, 0o600, dir_fd=run_fd)
        # For writing as well: otherwise it would be at its end whenever nobody else has it open.
        self.fd: int = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=run_fd)

    def read(self) -> None:
        """Forgets how often it has rung."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 1 << 16)

    def close(self) -> None:
        """Takes it down; harmless when that was done already."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def ring(run_fd: int, slots: Iterable[int]) -> None:
    """Rings the bells of these slots; one that is gone is nobody's, and one that is full rings already."""
    for slot in slots:
        try:
            fd = os.open(f"bells/{slot}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=run_fd)
        except OSError as error:
            if error.errno not in _NOBODY_LISTENS:
                raise
            continue
        try:
            os.write(fd, b"!")
        except OSError as error:
            if error.errno not in _NOBODY_LISTENS:
                raise
        finally:
            os.close(fd)
