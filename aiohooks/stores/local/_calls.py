"""Calls of a database that another process may have locked: the event loop never waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from typing import TypeVar

T = TypeVar("T")
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)


def _attempt(work: Callable[[], T], outcome: asyncio.Future[T] | Future[T]) -> bool:
    """Call `work` and set its outcome; return False if another process has locked the database."""
    try:
        result = work()
    except Exception as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if isinstance(error, BlockingIOError) or code in _BUSY:
            return False
        outcome.set_exception(error)
    else:
        outcome.set_result(result)
    return True


def submit(work: Callable[[], T]) -> asyncio.Future[T]:
    """Call `work`, immediately or in a thread as soon as the database is not locked; return its
    result. The thread ends if that is cancelled, or when the database is closed.

    It is a daemon and not one of a pool, whose threads keep the interpreter from exiting: a stopped
    process may have locked the database for as long as it is stopped.
    """
    result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    if _attempt(work, result):
        return result
    outcome: Future[T] = Future()

    def run() -> None:
        pause_secs = 0.0002
        with contextlib.suppress(InvalidStateError):  # it is cancelled just now
            while not (outcome.cancelled() or _attempt(work, outcome)):
                wait([outcome], pause_secs)
                pause_secs = min(2 * pause_secs, 0.01)

    threading.Thread(target=run, name="aiohooks step store", daemon=True).start()
    return asyncio.wrap_future(outcome)
