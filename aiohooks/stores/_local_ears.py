"""Hearing of what other processes do to a run, through inotify."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from aiohooks.stores._inotify import CLOSE_WRITE, DELETE, MODIFY, Inotify, packed, parse
from aiohooks.stores._progress import logger

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
