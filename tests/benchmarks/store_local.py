"""Files of one machine: a watched file by hand."""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from aiohooks.stores.local._notify import MODIFY, Inotify
from tests.benchmarks.store_engine import Engine, Waits

SCHEME = "local://"
_STEP = struct.Struct("=Q")


@contextmanager
def serve() -> Iterator[str]:
    """A directory; beside it is the file of the bare one."""
    with tempfile.TemporaryDirectory() as directory:
        yield f"{SCHEME}{directory}/store"


class Bare:
    """A number in a file, watched: a lock, a read and a write to advance; an event, a read and a
    future to be woken.

    Every advance wakes all processes, publishers are not known, and damaged or deleted files are
    not noticed.
    """

    def __init__(self, file: Path) -> None:
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT)
        self._inotify = Inotify()
        self._inotify.add(file, MODIFY)
        asyncio.get_running_loop().add_reader(self._inotify.fd, self._changed)
        self._waits = Waits()

    def _read(self) -> int:
        return int(_STEP.unpack(os.pread(self._fd, _STEP.size, 0) or bytes(_STEP.size))[0])

    def _changed(self) -> None:
        os.read(self._inotify.fd, 4096)
        self._waits.wake(self._read())

    async def advance(self) -> int:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        step = self._read() + 1
        os.pwrite(self._fd, _STEP.pack(step), 0)
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return step

    async def wait_for(self, step: int) -> None:
        if self._read() < step:
            await self._waits.park(step)

    def close(self) -> None:
        """Stop watching."""
        asyncio.get_running_loop().remove_reader(self._inotify.fd)
        self._inotify.close()
        os.close(self._fd)


@asynccontextmanager
async def bare(url: str) -> AsyncIterator[Bare]:
    """Open it."""
    counter = Bare(Path(url.removeprefix(SCHEME)).with_name("number"))
    yield counter
    counter.close()


ENGINE = Engine(
    title="local store",
    serve=serve,
    bare=bare,
    by_hand="a watched file by hand",
    one_call="one lock, read and write",
    crowd_bar=1.5,
    together_bar=None,  # it never suspends, and there is no link whose round trips could be shared
    alone_bar=3.0,
)

if __name__ == "__main__":
    from tests.benchmarks.__main__ import main

    sys.exit(main(["--rows", "local", *sys.argv[1:]]))
