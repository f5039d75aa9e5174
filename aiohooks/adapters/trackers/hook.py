"""`TrackerHook`: the metrics of runs, for an experiment tracker; the thread that sends them, and
the file of those not sent.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

from aiohooks._core.cancel import to_thread, wait_done
from aiohooks._core.thread_queue import ThreadQueue
from aiohooks._core.validate import check_instance, check_secs, checked_int, checked_path
from aiohooks.adapters.trackers.tracker import Tracker
from aiohooks.dispatch.calls import is_logged, only_if
from aiohooks.errors import add_note
from aiohooks.graph.session import Session
from aiohooks.hooks._fetching import Record
from aiohooks.hooks._line_file import LineFile, json_line
from aiohooks.hooks._numbers import checked_numbers
from aiohooks.hooks._observing import (
    BackgroundWriter,
    Sampling,
    Values,
    checked_values,
    logger,
    write_whole,
)
from aiohooks.hooks.every import Every
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)


@dataclasses.dataclass(frozen=True, slots=True)
class TrackerStatistics:
    """What became of the metrics of a session, in steps.

    Attributes:
        sent: the tracker has them.
        pending: they wait to be sent.
        unsent: they could not be sent, and went to the file.
        lost: of those, how many could not be written to the file either.
        error: why the last one could not be sent; None if all were.
    """

    sent: int = 0
    pending: int = 0
    unsent: int = 0
    lost: int = 0
    error: str | None = None


class TrackerHook(SessionRunHook):
    """Sends metrics to an experiment tracker on each crossing of `every`: the chosen values, and
    `run_context.metrics`.

    They are sent by a thread, so a tracker that is slow, hangs or fails neither slows nor stops the
    session. Metrics that could not be sent, because the tracker failed or too many of them wait,
    are counted, reported in the log, and appended to a file, from which `send_unsent` sends them
    later. The hook is called after the others (it has order 90), so it has what they added, and
    before a `CheckpointSaverHook`: metrics that wait to be sent are saved in checkpoints.

    A run that resumes from a checkpoint, and one that a recovery set back, repeat no step in the
    tracker; see `Tracker.start`.
    """

    order: ClassVar[int] = 90

    def __init__(
        self,
        tracker: Tracker,
        values: Values | None = None,
        *,
        every: Every = Every(steps=100),
        max_queue: int = 1000,
        drain_secs: float = 5.0,
        unsent_path: str | os.PathLike[str] = "unsent_metrics.jsonl",
        name: str | None = None,
    ) -> None:
        """Create the hook.

        Args:
            tracker: where the metrics go; it is closed with the session.
            values: a mapping from a tag to a fetch, or several nodes or names, whose names are the
                tags; each is one number. A value hides the metric of `run_context.metrics` with
                this name.
            every: when to send.
            max_queue: how many steps may wait to be sent, or are just being sent; the others go to
                the file.
            drain_secs: how long the end of the session waits for the tracker; what is left goes to
                the file. Less than the grace period of the session.
            unsent_path: the file, one for each training; it is created when it is needed.
            name: the name of its state in checkpoints; by default the class.

        Raises:
            InvalidArgumentError: an argument is invalid.
        """
        check_instance(tracker, Tracker, "tracker")
        check_instance(every, Every, "every")
        max_queue = checked_int(max_queue, "max_queue", 1)
        check_secs(drain_secs, "drain_secs")
        self.tracker: Tracker = tracker
        self.unsent_path: str = checked_path(unsent_path, "unsent_path")
        self.name: str = type(self).__name__ if name is None else name
        self._values = checked_values(values, may_be_empty=True)
        self._request = SessionRunArgs(self._values) if self._values else None
        self._every = every
        self._max_queue = max_queue
        self._drain_secs = drain_secs
        self._sender: Sender | None = None
        self._sampling: Sampling
        self._file: LineFile
        self._writer: BackgroundWriter[dict[str, Any]]
        self._restored: list[Record] = []
        self._counting = threading.Lock()  # guards the attributes below
        self._unsent: int
        self._error: str | None
        self._last_unsent: int
        self._repeated: int

    def statistics(self) -> TrackerStatistics:
        """Return what became of the metrics of the current or the last session."""
        sender = self._sender
        if sender is None:
            return TrackerStatistics()
        return TrackerStatistics(
            sender.sent, len(sender.records()), self._unsent, self._writer.lost, self._error
        )

    async def begin(self) -> None:
        """Prepare for a new session; nothing is sent, and a file of unsent metrics is only read."""
        self._sampling = Sampling(self._every, first=False)
        self._file = LineFile(self.unsent_path)
        self._writer = BackgroundWriter(
            self._file.append,
            what=self.unsent_path,
            max_queue=self._max_queue,
            on_write_error="log",
        )
        self._unsent, self._error = 0, None
        self._last_unsent = await to_thread(last_unsent_step, self.unsent_path)
        self._restored = []
        self._sender = Sender(
            self.tracker, self._max_queue, self._note_sent, self._put_into_file, self._sender
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the metrics that are not sent yet, so that a process that resumes after a kill
        does not lose them.
        """
        pending = [] if self._sender is None else self._sender.records()
        records = [[record.step, record.time, dict(record.values)] for record in pending]
        return {**self._sampling.state_dict(), "pending": records}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the metrics of `state_dict`."""
        self._sampling.load_state_dict(state)
        self._restored = [
            Record(int(step), float(time), dict(values))
            for step, time, values in state.get("pending", ())
        ]

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Continue after the step at which the session starts, or to which a recovery set it
        back.
        """
        step = session.global_step.latest.step
        is_first = not self._sampling.started
        if self._sampling.start(step) and self._sender is not None:
            self._repeated = self._last_unsent
            self._sender.restart(
                step, self._restored if is_first else ()
            )  # after a recovery the queue has them

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Fetch the values if the run is due."""
        return self._request if self._sampling.should_fetch(run_context.global_step) else None

    @only_if("_queue_metrics")
    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Queue the metrics; raise `InvalidArgumentError` if one of them is not a single number."""
        self._queue_metrics(run_context, run_values)
        if self._sender is not None:
            await self._writer.wait_for_room()  # of the disk, not of the tracker: memory is bounded

    def _queue_metrics(self, run_context: SessionRunContext, run_values: SessionRunValues) -> bool:
        """Queue the metrics of a run that is due, once; return whether to wait for the file that
        they were put into.
        """
        sender = self._sender
        if sender is None or not self._sampling.mark_if_due(run_context.global_step):
            return False
        metrics: dict[str, Any] = {**run_context.metrics, **(run_values.results or {})}
        if not metrics:
            return False
        record = Record(run_context.global_step, self._sampling.time(), checked_numbers(metrics))
        if not sender.is_full:
            sender.add(record)
            return False
        self._keep(
            [record], f"{self._max_queue} wait already, and the tracker {sender.current_call()}"
        )
        return self._writer.is_full

    async def close(self, exc: BaseException | None) -> None:
        """Send what is left, for at most `drain_secs`; the rest goes to the file."""
        sender = self._sender
        if sender is None:
            return
        ended = sender.close_after(exc)
        try:
            if not await wait_done([ended], self._drain_secs):
                logger.warning(
                    "%r: %r %s %s s after the end of the session; continuing without it",
                    *(self, self.tracker, sender.current_call(), self._drain_secs),
                )
        finally:
            if rest := [item for item in sender.take_back() if isinstance(item, Record)]:
                self._keep(
                    rest,
                    "the session has ended, and the tracker did not answer for"
                    f" {self._drain_secs} s",
                )
            try:
                await self._writer.aclose()
            finally:
                await to_thread(self._file.close)

    def _note_sent(self, record: Record) -> None:
        if (
            record.step <= self._repeated
        ):  # the file may have this step, from before the run was set back
            self._writer.add({"sent": record.step})

    def _keep(self, records: list[Record], reason: str) -> None:
        if (log := self._put_into_file(records, reason)) is not None:
            log()

    def _put_into_file(self, records: list[Record], reason: str) -> Callable[[], object] | None:
        """Put records into the file; return what logs the first one that could not be sent, then
        the tenth, the hundredth etc.
        """
        for record in records:
            self._writer.add(metrics_line(record))
        with self._counting:
            self._unsent += len(records)
            count, self._error = self._unsent, reason
            self._last_unsent = max(self._last_unsent, *(record.step for record in records))
        if not is_logged(count, len(records)):
            return None
        return functools.partial(
            logger.warning,
            "%r: the metrics of %d steps, step %d the last, could not be sent: %s; they are in %s,"
            " for send_unsent",
            *(self, count, records[-1].step, reason, self.unsent_path),
        )

    def __repr__(self) -> str:
        return f"TrackerHook({self.tracker!r}, {list(self._values)}, every={self._every})"


# -- the thread that sends, whatever the tracker does


class Restart(NamedTuple):
    """From here on, records are of steps after `after`: the session starts at `step`, or is set
    back to it.
    """

    after: int
    step: int


class Sender(ThreadQueue[Record | Restart]):
    """Sends records to a tracker in a thread of its own, one at a time, in order.

    Nothing here waits for the tracker: what does not fit into the queue is refused, and `take_back`
    gives back what is left. From then on the thread only ends its current call, and closes the
    tracker.
    """

    def __init__(
        self,
        tracker: Tracker,
        max_queue: int,
        on_sent: Callable[[Record], object],
        on_failure: Callable[[list[Record], str], Callable[[], object] | None],
        previous: Sender | None,
    ) -> None:
        """Create a sender; the thread starts with `restart`.

        Args:
            tracker: where to send the records.
            max_queue: how many of them may wait.
            on_sent: called in the thread with a record that was sent.
            on_failure: called in the thread with records that could not be sent, and the reason;
                what it returns is called when the queue waits no more.
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
        """Continue after `step`: queued records of later steps are dropped, those of an earlier
        process come first.
        """
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
        """Let the thread send what is queued, close the tracker after a session that ended with
        `error`, and end.
        """
        self._error = error
        return self.finish()

    def work(self, items: list[Record | Restart]) -> None:
        previous, self._previous = self._previous, None
        if previous is not None:
            previous.join()
        (item,) = items
        if isinstance(item, Restart):
            self._restart = (
                item
                if self._restart is None
                else Restart(min(self._restart.after, item.after), item.step)
            )
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
            logger.warning(
                "%r has metrics up to step %d already, and this run continues after step %d: steps"
                " up to %d are not sent again",
                *(self._tracker, last, restart.step, last),
            )
        return last

    def done(
        self, items: list[Record | Restart], error: BaseException | None
    ) -> Callable[[], object] | None:
        (item,) = items
        self._sending = None
        if isinstance(item, Restart):
            return None
        if error is not None:
            return self._on_failure([item], f"{type(error).__name__}: {error}")
        if item.step > self._last:
            self.sent += 1
            self._on_sent(item)
        return None

    def ended(self) -> None:
        try:
            self._tracker.close(self._error)
        except BaseException as error:
            logger.error("%r was not closed: %r", self._tracker, error, exc_info=error)


# -- what could not be sent: a file, each line of which is a JSON object

# `{"step": 7, "time": 1.5, "metrics": {"loss": 0.5}}`; or `{"sent": 7}`, after which the lines of
# this step above are void: a run that was set back has made the step again, and it was sent then.


def send_unsent(path: str | os.PathLike[str], tracker: Tracker) -> int:
    """Send the metrics of a file of unsent metrics to a tracker, in order of their steps, then
    remove the file.

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
    file = LineFile(name)
    file.open()
    sent = 0
    error: BaseException | None = None
    try:
        records = read_unsent(name)
        for record in records:
            try:
                tracker.log_metrics(record.values, record.step, record.time)
            except BaseException:
                write_whole(name, functools.partial(_write_lines, records=records[sent:]))
                raise
            sent += 1
        os.unlink(name)
    except BaseException as raised:
        error = raised
        add_note(
            raised,
            f"raised after {sent} of the metrics in {name} were sent; the file has the others",
        )
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
    """Return the metrics of a file, in order of their steps, of which the last line counts; torn
    lines are left out.
    """
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
                logger.warning(
                    "%s: line %d is left out, it is torn or of another kind: %r",
                    path,
                    number,
                    error,
                )
    return [found[step] for step in sorted(found)]


def last_unsent_step(path: str) -> int:
    """Return the last step of the metrics in a file; -1 if there are none."""
    if not os.path.exists(path):
        return -1
    records = read_unsent(path)
    if not records:
        return -1
    logger.warning(
        "%s has the metrics of %d steps, which were not sent; send_unsent sends them",
        path,
        len(records),
    )
    return records[-1].step
