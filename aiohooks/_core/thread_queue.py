"""A bounded queue with a thread of its own, for work that may block: files, trackers."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from aiohooks._core.clock import wake

T = TypeVar("T")


class ThreadQueue(abc.ABC, Generic[T]):
    """Does the work for its items in order, in a daemon thread that starts with the first one.

    Nothing waits for the thread unless it wants to: `wait_for_room` while the queue is full,
    `drain` for all items, a future of `finish` for the end. `take_back` gives back what is not
    done.
    """

    def __init__(
        self,
        name: str,
        max_queue: int,
        max_batch: int | None = None,
    ) -> None:
        """Start no thread yet.

        Args:
            name: the name of the thread.
            max_queue: how many items may be unfinished before the queue is full.
            max_batch: how many items `work` gets at a time; all that are waiting, if None.
        """
        self._name = name
        self._max_queue = max_queue
        self._max_batch = max_batch
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()  # guards the attributes below
        self._waiting: deque[T] = deque()
        self._active: list[T] = []
        self._reporting = False
        self._stopping = False
        self._waiters: list[asyncio.Future[None]] = []  # for the end of a batch
        self._ends: list[asyncio.Future[None]] = []

    # -- in the thread

    @abc.abstractmethod
    def work(self, items: list[T]) -> None:
        """Do the work for some items."""

    @abc.abstractmethod
    def done(self, items: list[T], error: BaseException | None) -> Callable[[], object] | None:
        """Note that items are done, or have failed; not called for items that were taken back.

        The queue is locked meanwhile. What may wait for other code, such as a line in a log, is
        returned, and called without the lock.
        """

    def ended(self) -> None:  # nothing is to be done where nothing was opened
        """Called when all items that came before `finish` are done."""

    def _run(self) -> None:
        while items := self._next_items():
            error: BaseException | None = None
            try:
                self.work(items)
            except BaseException as raised:
                # SystemExit, too, which an SDK may raise: it would end this thread.
                error = raised
            report: Callable[[], object] | None = None
            with self._changed:
                were_taken_back = self._active is not items
                if not were_taken_back:
                    report = self.done(items, error)
                self._active = []
                self._reporting = report is not None
            if report is not None:
                report()
            # An idle queue keeps neither the error nor what reports it.
            error = None
            report = None
            with self._changed:
                self._reporting = False
                waiters = self._waiters
                self._waiters = []
            _wake_threadsafe(waiters)
        self.ended()
        _wake_threadsafe(self._ends)

    def _next_items(self) -> list[T]:
        """Wait for items, and return some; none if there are none left at the end."""
        with self._changed:
            while not self._waiting and not self._stopping:
                self._changed.wait()
            count = len(self._waiting)
            if self._max_batch is not None:
                count = min(count, self._max_batch)
            self._active = [self._waiting.popleft() for _ in range(count)]
            return self._active

    # -- in the event loop

    def pending(self) -> list[T]:
        """Return the items that are not done, the oldest first."""
        with self._changed:
            return [*self._active, *self._waiting]

    @property
    def left(self) -> int:
        """How many items are not done."""
        with self._changed:
            return len(self._active) + len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another item."""
        return self.left >= self._max_queue

    def add(self, item: T) -> None:
        """Queue an item, also if the queue is full; from any thread."""
        self.change(lambda waiting: waiting.append(item))

    def change(self, change: Callable[[deque[T]], object]) -> None:
        """Change the items whose work has not begun.

        Raises:
            RuntimeError: `finish` was called, so that no work would be done for them.
        """
        with self._changed:
            if self._stopping:
                raise RuntimeError(f"the {self._name} has been finished")
            change(self._waiting)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    async def wait_for_room(self) -> None:
        """Wait while the queue is full."""
        while self.is_full:
            await self._wait_for_batch()

    async def drain(self) -> None:
        """Wait until all items are done, and reported."""
        while self.left or self._reporting:
            await self._wait_for_batch()

    async def _wait_for_batch(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._changed:
            if not (self.left or self._reporting):
                return
            self._waiters.append(waiter)
        await waiter

    def finish(self) -> asyncio.Future[None]:
        """Let the thread end when all is done; return a future that is done then."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._changed:
            self._stopping = True
            self._ends.append(ended)
            self._changed.notify_all()
        if self._thread is None:
            wake(ended)
        return ended

    def take_back(self) -> list[T]:
        """Take all items that are not done off the queue, and return them.

        `done` is not called for those whose work has begun.
        """
        with self._changed:
            rest = self.pending()
            self._waiting.clear()
            self._active = []
        return rest

    def join(self) -> None:
        """Block until the thread has ended, if it was started."""
        if self._thread is not None:
            self._thread.join()


def _wake_threadsafe(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        # RuntimeError: its event loop was closed.
        with contextlib.suppress(RuntimeError):
            waiter.get_loop().call_soon_threadsafe(wake, waiter)
