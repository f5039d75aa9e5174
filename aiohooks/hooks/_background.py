"""Writing off the event loop: a bounded queue, and one thread that empties it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Literal, TypeVar

from aiohooks._errors import InvalidArgumentError
from aiohooks._shield import in_thread

_logger = logging.getLogger("aiohooks.hooks")
T = TypeVar("T")

OnWriteError = Literal["raise", "log"]
"""What becomes of a failed write: `"raise"` raises it in the next run at the latest, `"log"` says so once and goes on."""


def check_writing(max_queue: object, on_write_error: object) -> None:
    """Refuses a queue without room and another policy than the two.

    Raises:
        InvalidArgumentError: one of them.
    """
    if isinstance(max_queue, bool) or not isinstance(max_queue, int) or max_queue < 1:
        raise InvalidArgumentError(f"max_queue is {max_queue!r}; give a whole number of records, at least 1")
    if on_write_error not in ("raise", "log"):
        raise InvalidArgumentError(f'on_write_error is {on_write_error!r}; give "raise" or "log"')


class BackgroundWriter(Generic[T]):
    """Hands records to `write(records)` in a thread of its own, in order, as many at a time as are there.

    `put` waits while `max_queue` records are under way. A failed write loses its records, which are counted.
    """

    def __init__(self, write: Callable[[list[T]], None], *, what: str, max_queue: int, on_write_error: OnWriteError) -> None:
        """Starts nothing yet: the thread comes with the first record. `what` is for messages."""
        self.lost = 0
        """How many records could not be written."""
        self._write = write
        self._what = what
        self._max = max_queue
        self._raises = on_write_error == "raise"
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = threading.Condition()  # guards what follows
        self._queue: deque[T] = deque()
        self._in_hand: list[T] = []
        self._stopping = False
        self._waiting: list[asyncio.Future[None]] = []

    def check(self) -> None:
        """Raises the failure of an earlier write, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def pending(self) -> list[T]:
        """What is not written yet, oldest first."""
        with self._changed:
            return [*self._in_hand, *self._queue]

    async def put(self, record: T) -> None:
        """Gives it a record; waits while there is no room."""
        self.check()
        while self._under_way() >= self._max:
            await self._progress()
            self.check()
        with self._changed:
            self._queue.append(record)
            self._changed.notify_all()
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._work, name=f"writer of {self._what}", daemon=True)
            self._thread.start()

    async def drain(self) -> None:
        """Waits until all is written; raises the failure of a write."""
        while self._under_way():
            await self._progress()
        self.check()

    async def aclose(self, *, grace_secs: float) -> None:
        """Lets the thread write what it has and end; a failure that nobody heard of is raised."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        thread, self._thread = self._thread, None
        if thread is not None:
            await in_thread(thread.join, grace_secs=grace_secs)
        if self.lost and not self._raises:
            _logger.warning("%s: %d records were lost to failed writes", self._what, self.lost)
        self.check()

    def _under_way(self) -> int:
        with self._changed:
            return len(self._in_hand) + len(self._queue)

    async def _progress(self) -> None:
        """Waits until the thread has written something more."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._changed:
            if not self._in_hand and not self._queue:
                return
            self._waiting.append(waiter)
        await waiter

    # -- in the thread

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._stopping:
                    self._changed.wait()
                if not self._queue:
                    return
                self._in_hand = list(self._queue)
                self._queue.clear()
            try:
                self._write(self._in_hand)
            except Exception as error:
                self._failed(error)
            with self._changed:
                self._in_hand = []
                waiting, self._waiting = self._waiting, []
            if waiting and self._loop is not None:
                try:
                    self._loop.call_soon_threadsafe(_wake, waiting)
                except RuntimeError:  # the loop was closed with the session still open: nobody waits any more
                    return

    def _failed(self, error: Exception) -> None:
        first = self.lost == 0
        self.lost += len(self._in_hand)
        if self._raises:
            error.add_note(f"raised by the writer of {self._what}")
            self._failure = self._failure or error
        elif first:
            _logger.error("%s cannot be written; going on without these records", self._what, exc_info=error)


def _wake(waiting: list[asyncio.Future[None]]) -> None:
    for waiter in waiting:
        if not waiter.done():
            waiter.set_result(None)
