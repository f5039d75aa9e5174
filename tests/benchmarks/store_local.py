"""A database of one machine: SQLite and a watched file by hand."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from aiohooks.stores.local.store import MODIFY, Inotify
from tests.benchmarks.store_engine import Engine, Waits

SCHEME = "local://"
_ADVANCE = "UPDATE run SET step = step + 1 WHERE id = 1 RETURNING step"


@contextmanager
def serve() -> Iterator[str]:
    """A directory; beside it is the file of the bare one."""
    with tempfile.TemporaryDirectory() as directory:
        yield f"{SCHEME}{directory}/store"


class Bare:
    """A number in a database, and a watched file: a statement to advance; an event, a statement and
    a future to be woken.

    Every advance wakes all processes, publishers are not known, and deleted files are not noticed.
    """

    def __init__(self, file: Path) -> None:
        self._database = sqlite3.connect(file, isolation_level=None)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = OFF")
        self._database.execute("CREATE TABLE IF NOT EXISTS run(id INTEGER PRIMARY KEY, step INT)")
        self._database.execute("INSERT OR IGNORE INTO run VALUES (1, 0)")
        self._fd = os.open(file.with_suffix(".notify"), os.O_RDWR | os.O_CREAT)
        self._inotify = Inotify()
        self._inotify.add(file.with_suffix(".notify"), MODIFY)
        asyncio.get_running_loop().add_reader(self._inotify.fd, self._changed)
        self._waits = Waits()

    def _read(self) -> int:
        row = self._database.execute("SELECT step FROM run WHERE id = 1").fetchone()
        return int(row[0])

    def _changed(self) -> None:
        os.read(self._inotify.fd, 4096)
        self._waits.wake(self._read())

    async def advance(self) -> int:
        row = self._database.execute(_ADVANCE).fetchone()
        os.pwrite(self._fd, b"!", 0)
        return int(row[0])

    async def wait_for(self, step: int) -> None:
        if self._read() < step:
            await self._waits.park(step)

    def close(self) -> None:
        """Stop watching."""
        asyncio.get_running_loop().remove_reader(self._inotify.fd)
        self._inotify.close()
        os.close(self._fd)
        self._database.close()


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
    by_hand="SQLite by hand",
    one_call="one statement",
    together_bar=None,  # it never suspends, and there is no link whose round trips could be shared
    alone_bar=3.0,
)
