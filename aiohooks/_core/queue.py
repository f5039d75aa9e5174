"""Bounded queues, whose items are processed in order.

Queue         the queue; a subclass begins the work for an item
ThreadQueue   a queue with a thread of its own, for work that may block: files, trackers

A queue is full if it has `max_pending` unfinished items. A place is the room for another item, for
which the callers of `put` wait.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import functools
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from aiohooks._core.activity import WaitLog, current_run, wait_log
from aiohooks._core.clock import wake
from aiohooks._core.waits import until_stop, wait_done
from aiohooks.errors import StopRequestedError, WrongLoopError, raise_failures

T = TypeVar("T")


class Queue(abc.ABC, Generic[T]):
    """A bounded queue of one event loop, in which its methods are called.

    An item stays in the queue until the work for it has ended. A failure of the work is kept, and
    raised by the next `check`. It is not raised by `put`, whose own item would be lost. Waits that
    take long are logged.
    """

    def __init__(self, name: str, max_pending: int) -> None:
        """Make an empty queue, which is full when it has `max_pending` items.

        `name` is its name in messages.
        """
        self.name: str = name
        self.items: deque[T] = deque()
        """The items whose work has not ended, the oldest first."""
        self.max_pending: int = max_pending
        self.failures: list[BaseException] = []
        """The failures that have not been raised, the oldest first."""
        self._place_waiters: list[asyncio.Future[None]] = []
        """A future for each caller that waits for a place, in order. A future that has its result
        stays until its caller has run, and added its item.
        """
        self._empty: asyncio.Future[None] | None = None
        """The last future that `when_empty` has returned."""

    @abc.abstractmethod
    def begin(self, item: T) -> None:
        """Begin the work for an item, which is being added.

        When the work for some items has ended, the subclass calls `ended`.
        """

    @property
    def is_full(self) -> bool:
        """Whether the caller of `put` has to wait for a place."""
        # While other callers wait, a new caller waits behind them, even if there is a place.
        return bool(self._place_waiters) or len(self.items) >= self.max_pending

    def add(self, item: T) -> None:
        """Add an item, also if the queue is full."""
        self.begin(item)
        self.items.append(item)

    def put_nowait(self, item: T) -> bool:
        """Add an item unless the queue is full; return whether it was added."""
        if self.is_full:
            return False
        self.add(item)
        return True

    async def put(self, item: T) -> None:
        """Add an item. Wait while the queue is full. Waiting callers get places in their order.

        If a run waits here, a stop or a failure of its session ends the wait. The item is added all
        the same, and the end of the session takes care of it.
        """
        if self.put_nowait(item):
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._place_waiters.append(place)
        self._wait_log.begin(place)
        try:
            with contextlib.suppress(StopRequestedError):
                await until_stop(place, current_run())
        except Exception:
            # A task of the session has failed, so that the session ends. The item is kept; only a
            # cancel of the caller loses it.
            self.add(item)
            raise
        else:
            self.add(item)
        finally:
            self._wait_log.end(place)
            self._place_waiters.remove(place)
            self._give_places()

    def _give_places(self) -> None:
        """Wake as many of the first waiting callers as there are places."""
        places = max(self.max_pending - len(self.items), 0)
        for place in self._place_waiters[:places]:
            wake(place)

    def ended(self, items: list[T], error: BaseException | None) -> None:
        """Remove items whose work has ended, or has failed with `error`.

        They have to be the first items of the queue.
        """
        for _ in items:
            self.items.popleft()
        if error is not None:
            self.failed(items, error)
        self._give_places()
        if self._empty is not None and not self.items:
            wake(self._empty)

    def failed(self, items: list[T], error: BaseException) -> None:
        """Keep the error of items for `check`. A subclass may handle it in another way."""
        self.failures.append(error)

    def take_failures(self, count: int = sys.maxsize) -> list[BaseException]:
        """Return the failures that have not been raised, at most `count`, and forget them."""
        failures = self.failures[:count]
        del self.failures[:count]
        return failures

    def check(self) -> None:
        """Raise the failures that have not been raised, if there are any."""
        raise_failures(self.take_failures(), "background calls failed")

    def when_empty(self) -> asyncio.Future[None]:
        """Return a future that is done when the queue is empty."""
        if self._empty is None or self._empty.done():
            self._empty = asyncio.get_running_loop().create_future()
        if not self.items:
            wake(self._empty)
        return self._empty

    async def drain(self) -> None:
        """Wait until the queue is empty, also of items that are added meanwhile."""
        while self.items:
            with wait_log(self.describe):
                await wait_done([self.when_empty()], None)

    @functools.cached_property
    def _wait_log(self) -> WaitLog:
        """The log of the waits for a place."""
        return wait_log(self.describe)

    def describe(self) -> str:
        """Return a description for the log: the name, and how full the queue is."""
        return (
            f"the {self.name}: {len(self.items)} items are pending, of at most {self.max_pending}"
        )


class ThreadQueue(Queue[T]):
    """A queue whose work is done in a daemon thread. The thread starts with the first item.

    The thread reports the end of the work to the event loop in which the first item was added.
    """

    def __init__(
        self,
        name: str,
        max_pending: int,
        max_batch: int = sys.maxsize,
    ) -> None:
        """Start no thread yet.

        Args:
            name: the name of the thread.
            max_pending: how many items may be unfinished before the queue is full.
            max_batch: how many items `work` gets in a call, at most.
        """
        super().__init__(name, max_pending)
        self._max_batch = max_batch
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end_waiter: asyncio.Future[None] | None = None
        """The future of `finish`, which is done when the thread has ended. None until `finish` is
        called.
        """
        self._waiting: deque[T] = deque()
        """The items whose work has not begun."""
        self._changed = threading.Condition()
        """Guards `_waiting`, which both threads use; notified of new items and of `finish`."""

    # -- in the thread

    @abc.abstractmethod
    def work(self, items: list[T]) -> None:
        """Do the work for some items."""

    def close_worker(self) -> None:
        """Called when the work for all items that came before `finish` has ended.

        A subclass closes here what its work has opened. By default, this does nothing.
        """

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Do the work for all items: the target of the thread."""
        while batch := self._next_batch():
            error: BaseException | None = None
            try:
                self.work(batch)
            except BaseException as raised:
                # SystemExit is caught, too, which an SDK may raise: it would end this thread.
                error = raised
            _call_in_loop(loop, self._batch_ended, batch, error)
            # While the thread waits for the next batch, it must not keep this one alive.
            del batch, error
        self.close_worker()
        _call_in_loop(loop, wake, self._end_waiter)

    def _next_batch(self) -> list[T]:
        """Wait for items, and return some of them, or none after `finish` if none are left."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._end_waiter is not None)
            count = min(len(self._waiting), self._max_batch)
            return [self._waiting.popleft() for _ in range(count)]

    # -- in the event loop

    def begin(self, item: T) -> None:
        if self._end_waiter is not None:
            raise RuntimeError(f"the {self.name} has been finished")
        self._check_loop()
        with self._changed:
            self._waiting.append(item)
            self._changed.notify()
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.Thread(
                target=self._run,
                args=(self._loop,),
                name=self.name,
                daemon=True,
            )
            self._thread.start()

    async def drain(self) -> None:
        self._check_loop()
        await super().drain()

    def _check_loop(self) -> None:
        # The thread reports to the loop of the first item: nothing else would end a wait.
        if self._loop not in (None, asyncio.get_running_loop()):
            raise WrongLoopError(
                f"the {self.name} is used in another event loop than its first item: close it in"
                " that loop, and make a new one here"
            )

    def _batch_ended(self, batch: list[T], error: BaseException | None) -> None:
        """Remove the items of a batch, in the event loop."""
        # A subclass may have removed all items meanwhile.
        if self.items:
            self.ended(batch, error)

    def withdraw(self) -> list[T]:
        """Remove the items whose work has not begun, and return them."""
        with self._changed:
            withdrawn = list(self._waiting)
            self._waiting.clear()
        # These are the last items of `items`: the thread works on the items before them.
        for _ in withdrawn:
            self.items.pop()
        return withdrawn

    def finish(self) -> asyncio.Future[None]:
        """Let the thread end after the last item, and return a future that is done then."""
        with self._changed:
            if self._end_waiter is None:
                self._end_waiter = asyncio.get_running_loop().create_future()
            self._changed.notify()
        # Without a thread, there were no items, and nothing else would set the result.
        if self._thread is None:
            wake(self._end_waiter)
        return self._end_waiter

    def join(self) -> None:
        """Block until the thread has ended, if it was started."""
        if self._thread is not None:
            self._thread.join()


def _call_in_loop(
    loop: asyncio.AbstractEventLoop,
    callback: Callable[..., object],
    *args: Any,
) -> None:
    """Call `callback` in the event loop of another thread, unless the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *args)
