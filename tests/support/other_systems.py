"""Takes away from this process what another system lacks, before the library is imported.

    become("win32"); import aiohooks

That is, of all that Linux has, what the library, asyncio or a server of HTTP looks for. Nothing is
added that only the other system has, and child processes have everything. It imports nothing of the
library.
"""

from __future__ import annotations

import asyncio

# Imported while they find what they need of this system.
import concurrent.futures.process  # noqa: F401
import ctypes
import errno
import multiprocessing.popen_spawn_posix
import multiprocessing.util  # noqa: F401
import os
import select
import selectors
import shutil
import signal
import subprocess  # noqa: F401
import sys
import tempfile  # noqa: F401
from collections.abc import Iterable
from typing import Any, Literal

System = Literal["darwin", "win32"]

LACKING: dict[System, dict[Any, tuple[str, ...]]] = {
    "darwin": {
        os: ("pidfd_open", "O_TMPFILE"),
    },
    "win32": {
        os: (
            "fork",
            "register_at_fork",
            "WNOHANG",
            "pidfd_open",
            "killpg",
            "setpgrp",
            "getuid",
            "geteuid",
            "mknod",
            "pread",
            "sendfile",
            "pwrite",
            "O_NOFOLLOW",
            "O_DIRECTORY",
            "O_NONBLOCK",
            "O_CLOEXEC",
            "O_TMPFILE",
        ),
        select: ("poll",),
        signal: (
            "SIGKILL",
            "SIGUSR1",
            "SIGCHLD",
            "SIGQUIT",
            "SIGSTOP",
            "SIGCONT",
            "siginterrupt",
            "pause",
        ),
    },
}
MISSING_MODULES: dict[System, tuple[str, ...]] = {
    "darwin": ("_inotify",),
    "win32": (
        "fcntl",
        "resource",
        "readline",
        "uvloop",
    ),
}


class NoLibc:
    """A C library that has nothing of Linux."""

    def __init__(self, *arguments: object, **options: object) -> None:
        pass


def _loop_without_files(base: type[asyncio.SelectorEventLoop]) -> type[asyncio.SelectorEventLoop]:
    """Make a loop like that of Windows: it watches no files, handles no signals, and is woken by
    them on its own.
    """

    class LoopWithoutFiles(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            signal.set_wakeup_fd(self._csock.fileno())  # as ProactorEventLoop does

        def close(self) -> None:
            signal.set_wakeup_fd(-1)
            super().close()

    def refuse(*arguments: object) -> None:
        raise NotImplementedError

    for name in (
        "add_reader",
        "remove_reader",
        "add_writer",
        "remove_writer",
        "add_signal_handler",
        "remove_signal_handler",
    ):
        setattr(LoopWithoutFiles, name, refuse)
    return LoopWithoutFiles


def become(system: System) -> None:
    """Take away what `system` lacks."""
    for module, names in LACKING[system].items():
        _delete(module, names)
    for name in MISSING_MODULES[system]:
        sys.modules[name] = None  # type: ignore[assignment]
    ctypes.CDLL = NoLibc  # type: ignore[assignment, misc]
    selectors.DefaultSelector = selectors.SelectSelector  # type: ignore[misc, assignment]
    if system == "win32":
        for functions in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            functions.clear()
        os.open = _open_without_directories(os.open)
        # What it has found when it was imported.
        shutil._use_fd_functions = False  # type: ignore[attr-defined]
        policy: Any = asyncio.get_event_loop_policy()
        type(policy)._loop_factory = _loop_without_files(asyncio.SelectorEventLoop)
    sys.platform = system


def _delete(module: Any, names: Iterable[str]) -> None:
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


def _open_without_directories(original: Any) -> Any:
    """Make `os.open` that opens plain files only, and none relative to a directory."""

    def open_file(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is not None:
            raise NotImplementedError("dir_fd unavailable on this platform")
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return int(original(path, flags, mode))

    return open_file
