"""Taking turns with other processes: a lock of the kernel's, for which the event loop never waits."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_TRIES = 2
"""How often the lock is tried for again before a thread waits for it: whoever has it needs it for some microseconds."""
_NOW = fcntl.LOCK_EX | fcntl.LOCK_NB


class Turns:
    """The lock of a run, as one store has it (a `flock`): the kernel gives it back when its process dies, wherever it was.

    What needs the lock is a short function. It is called at once if nobody has the lock, and otherwise by a thread that waits
    for it: the loop goes on while a process that was stopped has it. The thread is not one of a pool: those keep the
    interpreter from ending, and this one waits for as long as that process is stopped.
    """

    def __init__(self, fd: int, changed: Callable[[], object]) -> None:
        """Takes over the descriptor whose lock it is; `changed` is called when a thread may have changed something."""
        self._fd = fd
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._threaded = False  # known to the loop alone
        self._guard = threading.Lock()  # for what follows, and held by the thread while it is at work
        self._waiting = False
        self._closed = False

    def enter(self) -> bool:
        """Takes the lock if that can be done now; call `leave` then."""
        if self._threaded:
            return False
        try:
            fcntl.flock(self._fd, _NOW)
        except BlockingIOError:
            return self._try_again()
        return True

    def _try_again(self) -> bool:
        for _ in range(_TRIES):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._fd, _NOW)
                return True
        return False

    def leave(self) -> None:
        """Gives the lock back."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    async def take(self, work: Callable[[], T]) -> T:
        """Calls `work` when it is this store's turn."""
        if self.enter():
            try:
                return work()
            finally:
                self.leave()
        return await self.queue(work)

    def queue(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Has a thread call `work` when it is this store's turn; not if the future was cancelled by then."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.append((work, future))
        if not self._threaded:
            self._start()
        return future

    def _start(self) -> None:
        self._threaded = self._waiting = True
        threading.Thread(target=self._wait, name="aiohooks step store", daemon=True).start()

    def _wait(self) -> None:
        # In the thread.
        done: list[tuple[asyncio.Future[Any], Any, Exception | None]] = []
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        while True:
            with self._guard:
                if self._closed or not self._queue:
                    self._waiting = False
                    if self._closed:
                        os.close(self._fd)
                    else:
                        fcntl.flock(self._fd, fcntl.LOCK_UN)
                    break
                work, future = self._queue.popleft()
                if future.cancelled():
                    continue
                try:
                    done.append((future, work(), None))
                except Exception as error:
                    done.append((future, None, error))
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._deliver, done)

    def _deliver(self, done: list[tuple[asyncio.Future[Any], Any, Exception | None]]) -> None:
        for future, result, error in done:
            if future.cancelled():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        self._threaded = False
        if self._closed:
            return
        if self._queue:
            self._start()
        # Who asked for it may have been cancelled since, and hears of nothing.
        self._changed()

    def close(self, error: Exception) -> None:
        """Gives back the descriptor, as soon as no thread waits with it; what was still to be done fails with `error`."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
            if not self._waiting:
                os.close(self._fd)
        for _, future in self._queue:
            if not future.done():
                future.set_exception(error)
        self._queue.clear()
