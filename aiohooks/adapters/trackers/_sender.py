"""The thread that sends metrics to a tracker, whatever the tracker does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from aiohooks._aio.clock import wake
from aiohooks.adapters.trackers.tracker import Tracker
from aiohooks.hooks.records import Record

_logger = logging.getLogger("aiohooks.hooks")


class Restart(NamedTuple):
    """From here on, records are of steps after `after`: the session starts at `step`, or is set back to it."""

    after: int
    step: int


class Sender:
    """Sends records to a tracker in a thread of its own, one at a time, in order.

    Nothing here waits for the tracker: what does not fit into the queue is refused, and `abandon` gives back what is left. From
    then on the thread only ends its current call, and closes the tracker.
    """

    def __init__(
        self,
        tracker: Tracker,
        max_queue: int,
        on_sent: Callable[[Record], object],
        on_failure: Callable[[Record, BaseException], object],
        previous: Sender | None,
    ) -> None:
        """Create a sender; the thread starts with `restart`.

        Args:
            tracker: where to send the records.
            max_queue: how many of them may wait.
            on_sent: called in the thread with a record that was sent.
            on_failure: called in the thread with a record that could not be sent, and the reason.
            previous: the last sender to this tracker, whose thread ends first.
        """
        self.sent: int = 0
        self._tracker = tracker
        self._max_queue = max_queue
        self._on_sent = on_sent
        self._on_failure = on_failure
        self._previous = previous
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()  # guards the attributes below
        self._queue: deque[Record | Restart] = deque()
        self._sending: Record | None = None
        self._reporting = False
        self._stopping = False
        self._abandoned = False
        self._error: BaseException | None = None
        self._ended: Callable[[], object] | None = None

    def restart(self, step: int, restored: Iterable[Record] = ()) -> None:
        """Continue after `step`: queued records of later steps are dropped, those of an earlier process come first."""
        with self._changed:
            kept = [item for item in self._queue if isinstance(item, Restart) or item.step <= step]
            while kept and isinstance(kept[-1], Restart):
                kept.pop()
            earlier = [record for record in restored if record.step <= step]
            after = min([step, *(record.step - 1 for record in earlier)])
            self._queue = deque([*kept, Restart(after, step), *earlier])
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"sender to {self._tracker!r}", daemon=True)
                self._thread.start()

    def offer(self, record: Record) -> bool:
        """Queue a record; return False if the queue is full."""
        with self._changed:
            if len(self._queue) >= self._max_queue:
                return False
            self._queue.append(record)
            self._changed.notify_all()
            return True

    def pending(self) -> list[Record]:
        """Return the records that are not sent yet, oldest first."""
        with self._changed:
            waiting = [item for item in self._queue if isinstance(item, Record)]
            return waiting if self._sending is None else [self._sending, *waiting]

    def current_call(self) -> str:
        """Return what the thread does, for messages."""
        with self._changed:
            if self._sending is not None:
                return f"is busy with step {self._sending.step}"
            return "has not been reached yet" if self._queue else "has not been closed"

    def finish(self, error: BaseException | None) -> asyncio.Future[None]:
        """Let the thread send what is queued, close the tracker after a session that ended with `error`, and end."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def wake_waiter() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: no waiter is left
                loop.call_soon_threadsafe(wake, ended)

        with self._changed:
            self._stopping, self._error, self._ended = True, error, wake_waiter
            self._changed.notify_all()
        if self._thread is None:
            wake(ended)
        return ended

    def abandon(self) -> list[Record]:
        """Return the records that are not sent, among them the one that is being sent; from now on the thread reports none."""
        with self._changed:
            rest = self.pending()
            self._abandoned = True
            self._sending = None
            self._queue.clear()
            while self._reporting:  # it logs at most
                self._changed.wait()
        return rest

    def join(self) -> None:
        """Wait for the end of the thread."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        previous, self._previous = self._previous, None
        if previous is not None:
            previous.join()
        restart: Restart | None = None
        last = -1
        while (item := self._next_item()) is not None:
            if isinstance(item, Restart):
                restart = item if restart is None else Restart(min(restart.after, item.after), item.step)
                continue
            failure: BaseException | None = None
            is_new = True
            try:
                if restart is not None:
                    last = self._start(restart)
                    restart = None
                is_new = item.step > last
                if is_new:
                    self._tracker.log_metrics(item.values, item.step, item.time)
            except BaseException as error:  # also SystemExit, which an SDK may raise: it would end this thread
                failure = error
            self._report(item, is_new, failure)
        try:
            self._tracker.close(self._error)
        except BaseException as error:
            _logger.error("%r was not closed: %r", self._tracker, error, exc_info=error)
        if self._ended is not None:
            self._ended()

    def _start(self, restart: Restart) -> int:
        last = self._tracker.start(restart.after)
        if last > restart.after:
            _logger.warning(
                "%r has metrics up to step %d already, and this run continues after step %d: steps up to %d are not sent again",
                *(self._tracker, last, restart.step, last),
            )
        return last

    def _next_item(self) -> Record | Restart | None:
        with self._changed:
            while not self._queue and not self._stopping:
                self._changed.wait()
            if not self._queue:
                return None
            item = self._queue.popleft()
            if isinstance(item, Record):
                self._sending = item
            return item

    def _report(self, record: Record, is_new: bool, failure: BaseException | None) -> None:
        """Note that a call has ended; nothing, if its record was abandoned meanwhile, and counts as unsent."""
        with self._changed:
            if self._abandoned:
                return
            self._sending = None
            self._reporting = True
            self.sent += is_new and failure is None
        try:
            if failure is not None:
                self._on_failure(record, failure)
            elif is_new:
                self._on_sent(record)
        finally:
            with self._changed:
                self._reporting = False
                self._changed.notify_all()
