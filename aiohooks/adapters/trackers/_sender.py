"""The thread that sends metrics to a tracker, whatever the tracker does."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from aiohooks._aio.thread_queue import ThreadQueue
from aiohooks.adapters.trackers.tracker import Tracker
from aiohooks.hooks._record_files import Record

_logger = logging.getLogger("aiohooks.hooks")


class Restart(NamedTuple):
    """From here on, records are of steps after `after`: the session starts at `step`, or is set back to it."""

    after: int
    step: int


class Sender(ThreadQueue[Record | Restart]):
    """Sends records to a tracker in a thread of its own, one at a time, in order.

    Nothing here waits for the tracker: what does not fit into the queue is refused, and `take_back` gives back what is left.
    From then on the thread only ends its current call, and closes the tracker.
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
        super().__init__(f"sender to {tracker!r}", max_queue, max_batch=1)
        self.sent: int = 0
        self._tracker = tracker
        self._on_sent = on_sent
        self._on_failure = on_failure
        self._previous = previous
        self._restart: Restart | None = None
        self._last = -1
        self._sending: Record | None = None
        self._error: BaseException | None = None

    def restart(self, step: int, restored: Iterable[Record] = ()) -> None:
        """Continue after `step`: queued records of later steps are dropped, those of an earlier process come first."""
        earlier = [record for record in restored if record.step <= step]
        after = min([step, *(record.step - 1 for record in earlier)])

        def change(waiting: deque[Record | Restart]) -> None:
            kept = [item for item in waiting if isinstance(item, Restart) or item.step <= step]
            while kept and isinstance(kept[-1], Restart):
                kept.pop()
            waiting.clear()
            waiting.extend([*kept, Restart(after, step), *earlier])

        self.change(change)

    def records(self) -> list[Record]:
        """Return the records that are not sent yet, oldest first."""
        return [item for item in self.pending() if isinstance(item, Record)]

    def current_call(self) -> str:
        """Return what the thread does, for messages."""
        if (sending := self._sending) is not None:
            return f"is busy with step {sending.step}"
        return "has not been reached yet" if self.pending() else "has not been closed"

    def close_after(self, error: BaseException | None) -> asyncio.Future[None]:
        """Let the thread send what is queued, close the tracker after a session that ended with `error`, and end."""
        self._error = error
        return self.finish()

    def work(self, items: list[Record | Restart]) -> None:
        previous, self._previous = self._previous, None
        if previous is not None:
            previous.join()
        (item,) = items
        if isinstance(item, Restart):
            self._restart = item if self._restart is None else Restart(min(self._restart.after, item.after), item.step)
            return
        self._sending = item
        if self._restart is not None:
            self._last = self._start(self._restart)
            self._restart = None
        if item.step > self._last:
            self._tracker.log_metrics(item.values, item.step, item.time)

    def _start(self, restart: Restart) -> int:
        last = self._tracker.start(restart.after)
        if last > restart.after:
            _logger.warning(
                "%r has metrics up to step %d already, and this run continues after step %d: steps up to %d are not sent again",
                *(self._tracker, last, restart.step, last),
            )
        return last

    def done(self, items: list[Record | Restart], error: BaseException | None) -> None:
        (item,) = items
        self._sending = None
        if isinstance(item, Restart):
            return
        if error is not None:
            self._on_failure(item, error)
        elif item.step > self._last:
            self.sent += 1
            self._on_sent(item)

    def ended(self) -> None:
        try:
            self._tracker.close(self._error)
        except BaseException as error:
            _logger.error("%r was not closed: %r", self._tracker, error, exc_info=error)
