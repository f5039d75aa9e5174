"""The thread that sends metrics to a tracker, whatever the tracker does, and the file of those that could not be sent.

Each line of it is a JSON object: `{"step": 7, "time": 1.5, "metrics": {"loss": 0.5}}`; or `{"sent": 7}`, after which the lines of
this step above are void: a run that was set back has made the step again, and it was sent then.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from aiohooks._aio.thread_queue import ThreadQueue
from aiohooks.adapters.trackers.tracker import Tracker
from aiohooks.errors import add_note
from aiohooks.hooks._observing import checked_path, write_whole
from aiohooks.hooks._record_files import LineFile, Record, json_line

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
        on_failure: Callable[[Record, BaseException], Callable[[], object] | None],
        previous: Sender | None,
    ) -> None:
        """Create a sender; the thread starts with `restart`.

        Args:
            tracker: where to send the records.
            max_queue: how many of them may wait.
            on_sent: called in the thread with a record that was sent.
            on_failure: called in the thread with a record that could not be sent, and the reason; what it returns is called
                when the queue waits no more.
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

    def done(self, items: list[Record | Restart], error: BaseException | None) -> Callable[[], object] | None:
        (item,) = items
        self._sending = None
        if isinstance(item, Restart):
            return None
        if error is not None:
            return self._on_failure(item, error)
        if item.step > self._last:
            self.sent += 1
            self._on_sent(item)
        return None

    def ended(self) -> None:
        try:
            self._tracker.close(self._error)
        except BaseException as error:
            _logger.error("%r was not closed: %r", self._tracker, error, exc_info=error)


# -- what could not be sent


def send_unsent(path: str | os.PathLike[str], tracker: Tracker) -> int:
    """Send the metrics of a file of unsent metrics to a tracker, in order of their steps, then remove the file.

    It blocks. What cannot be sent remains in the file. The tracker is closed in any case.

    Args:
        path: the file, which no session is writing to.
        tracker: a tracker that continues the run to which the metrics belong.

    Returns:
        How many steps were sent.

    Raises:
        InvalidArgumentError: a session is writing to the file.
        OSError: it cannot be read or written.
        Exception: the error of the tracker.
    """
    name = checked_path(path, "path")
    os.stat(name)  # opening would create it
    file = LineFile(name, fsync=False)
    file.open()
    sent = 0
    error: BaseException | None = None
    try:
        records = read_unsent(name)
        for record in records:
            try:
                tracker.log_metrics(record.values, record.step, record.time)
            except BaseException:
                write_whole(name, partial(_write_lines, records=records[sent:]))
                raise
            sent += 1
        os.unlink(name)
    except BaseException as raised:
        error = raised
        add_note(raised, f"raised after {sent} of the metrics in {name} were sent; the file has the others")
        raise
    finally:
        file.close()
        tracker.close(error)
    return sent


def _write_lines(path: str, records: Iterable[Record]) -> None:
    with open(path, "wb") as file:
        file.writelines(json_line(metrics_line(record)) for record in records)
        file.flush()
        os.fsync(file.fileno())


def metrics_line(record: Record) -> dict[str, Any]:
    """Return the line of a step."""
    return {"step": record.step, "time": record.time, "metrics": dict(record.values)}


def read_unsent(path: str) -> list[Record]:
    """Return the metrics of a file, in order of their steps, of which the last line counts; torn lines are left out."""
    found: dict[int, Record] = {}
    with open(path, "rb") as file:
        for number, text in enumerate(file, 1):
            try:
                line: Any = json.loads(text)
                if "sent" in line:
                    found.pop(line["sent"], None)
                else:
                    metrics = {tag: float(value) for tag, value in line["metrics"].items()}
                    found[line["step"]] = Record(line["step"], float(line["time"]), metrics)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                _logger.warning("%s: line %d is left out, it is torn or of another kind: %r", path, number, error)
    return [found[step] for step in sorted(found)]


class UnsentFile(LineFile):
    """The file while a session runs: created with the first metrics that could not be sent."""

    def last_step(self) -> int:
        """Return the last step of the metrics in the file; -1 if there are none."""
        steps = [record.step for record in read_unsent(self.path)] if os.path.exists(self.path) else []
        if steps:
            _logger.warning("%s has the metrics of %d steps, which were not sent; send_unsent sends them", self.path, len(steps))
        return max(steps, default=-1)

    def write(self, lines: list[dict[str, Any]]) -> None:
        """Append the lines."""
        if self._file is None:
            file = self.open()
            size = file.seek(0, os.SEEK_END)
            self.continue_at(size)
            if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                self.append(b"\n")  # the last line was torn by a crash
        self.append(b"".join(map(json_line, lines)))
