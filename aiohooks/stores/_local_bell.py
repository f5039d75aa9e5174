"""Being told of changes where there is no inotify: a named pipe for each process, into which who changes something writes.

Telling is a second step here, after the change: a process killed between the two leaves the others untold. So who listens to a
bell also looks by itself, once a second.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable

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
