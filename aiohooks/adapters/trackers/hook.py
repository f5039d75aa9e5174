"""`TrackerHook`: the metrics of runs for an experiment tracker, sent by a thread of its own."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

from aiohooks._core.cancel import wait_done
from aiohooks._core.queue import ThreadQueue
from aiohooks._core.reports import is_logged
from aiohooks._core.validate import check_instance, check_secs, checked_int
from aiohooks.adapters.trackers.tracker import Tracker
from aiohooks.graph.session import Session
from aiohooks.hooks._fetching import Record, restored_records
from aiohooks.hooks._numbers import checked_numbers
from aiohooks.hooks._observing import Sampling, Values, checked_values, logger
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
    """The metrics of a session, counted in steps.

    Attributes:
        sent: the tracker has them.
        pending: they wait to be sent.
        lost: they could not be sent.
        error: why the last step was lost; None if all were sent.
    """

    sent: int = 0
    pending: int = 0
    lost: int = 0
    error: str | None = None


class TrackerHook(SessionRunHook):
    """Sends metrics to an experiment tracker on each crossing of `every`: the chosen values, and
    `run_context.metrics`.

    A thread sends them, so that a tracker that is slow, hangs or fails neither slows nor stops the
    session. Metrics are lost if the tracker fails, or if too many wait: they are counted, and the
    log has the reason. Put a `JSONLinesHook` into the session to keep all metrics.

    The hook is called after the others (it has order 90), so it has the metrics that they added,
    and before a `CheckpointSaverHook`: metrics that wait to be sent are saved in checkpoints. A run
    that resumes from a checkpoint, or that a recovery moved back, repeats no step in the tracker;
    see `Tracker.start`.
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
        name: str | None = None,
    ) -> None:
        """Create the hook.

        Args:
            tracker: where the metrics go; it is closed with the session.
            values: a mapping from a tag to a fetch, or several nodes or names, whose names are the
                tags; each is one number. A value replaces the metric of `run_context.metrics` with
                this name.
            every: when to send.
            max_queue: how many steps may wait to be sent.
            drain_secs: how long the end of the session waits for the tracker. Give less than the
                grace period of the session.
            name: the name of its state in checkpoints; by default the class.

        Raises:
            InvalidArgumentError: an argument is invalid.
        """
        check_instance(tracker, Tracker, "tracker")
        check_instance(every, Every, "every")
        max_queue = checked_int(max_queue, "max_queue", 1)
        check_secs(drain_secs, "drain_secs")
        self.tracker: Tracker = tracker
        self.name: str = name or type(self).__name__
        self._values = checked_values(values, may_be_empty=True)
        self._request = SessionRunArgs(self._values) if self._values else None
        self._every = every
        self._max_queue = max_queue
        self._drain_secs = drain_secs
        self._sender: Sender | None = None
        self._sampling: Sampling
        self._restored: list[Record] = []

    def statistics(self) -> TrackerStatistics:
        """Return the counts of the current or the last session."""
        sender = self._sender
        if sender is None:
            return TrackerStatistics()
        return TrackerStatistics(sender.sent, len(sender.records()), sender.lost, sender.error)

    async def begin(self) -> None:
        """Prepare for a new session; nothing is sent yet."""
        self._sampling = Sampling(self._every, first=False)
        self._restored = []
        self._sender = Sender(self.tracker, self._max_queue, self._sender)

    def state_dict(self) -> dict[str, Any]:
        """Return the metrics that are not sent yet, so that a kill does not lose them."""
        pending = [] if self._sender is None else self._sender.records()
        return {**self._sampling.state_dict(), "pending": [record.state() for record in pending]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the metrics of `state_dict`."""
        self._sampling.load_state_dict(state)
        self._restored = restored_records(state)

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Continue after the step at which the session starts, or to which a recovery moved it."""
        step = session.global_step.latest.step
        # After a recovery the queue still has them.
        restored = () if self._sampling.started else self._restored
        if self._sampling.start(step) and self._sender is not None:
            self._sender.restart(step, restored)

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Fetch the values if the run is due."""
        return self._request if self._sampling.should_fetch(run_context.global_step) else None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Queue the metrics if the run is due.

        Raises:
            InvalidArgumentError: a metric is not a single number.
        """
        step = run_context.global_step
        if self._sender is None or not self._sampling.mark_if_due(step):
            return
        metrics: dict[str, Any] = {**run_context.metrics, **(run_values.results or {})}
        if metrics:
            self._sender.send(Record(step, self._sampling.time(), checked_numbers(metrics)))

    async def close(self, exc: BaseException | None) -> None:
        """Send the metrics that wait, for at most `drain_secs`; the rest is lost."""
        sender = self._sender
        if sender is None:
            return
        ended = sender.close_after(exc)
        try:
            if not await wait_done([ended], self._drain_secs):
                logger.warning(
                    "%r: %r %s %s s after the end of the session; continuing without it",
                    self,
                    self.tracker,
                    sender.current_call(),
                    self._drain_secs,
                )
        finally:
            sender.abandon(f"the session has ended, and it did not answer for {self._drain_secs} s")

    def __repr__(self) -> str:
        return f"TrackerHook({self.tracker!r}, {list(self._values)}, every={self._every})"


class Start(NamedTuple):
    """A session starts at `step`, or is moved back to it; records that follow are of later steps
    than `after`.
    """

    after: int
    step: int


class Sender(ThreadQueue[Record | Start]):
    """Sends records to a tracker in a thread of its own, one at a time, in order.

    Nothing waits for the tracker. After `abandon` the thread only ends its current call, and closes
    the tracker.
    """

    def __init__(self, tracker: Tracker, max_queue: int, previous: Sender | None) -> None:
        """Create a sender; the thread starts with `restart`.

        `previous` is the last sender to this tracker, whose thread ends first.
        """
        super().__init__(f"sender to {tracker!r}", max_queue, max_batch=1)
        self.sent: int = 0
        self.lost: int = 0
        self.error: str | None = None
        """Why the last record was lost."""
        self._tracker = tracker
        self._previous = previous
        self._start: Start | None = None  # it has not reached the tracker yet
        self._last_step = -1  # that the tracker has, when it was started
        self._ended_by: BaseException | None = None

    # In the event loop.

    def restart(self, step: int, restored: Iterable[Record]) -> None:
        """Continue after `step`: queued records of later steps are dropped.

        Records that were `restored` from a checkpoint are sent first.
        """
        earlier = [record for record in restored if record.step <= step]
        after = min([step, *(record.step - 1 for record in earlier)])
        kept = [item for item in self.withdraw() if isinstance(item, Start) or item.step <= step]
        for item in (*kept, Start(after, step), *earlier):
            self.add(item)

    def send(self, record: Record) -> None:
        """Queue a record; it is lost if the queue is full."""
        if not self.put_nowait(record):
            reason = f"{len(self.items)} wait already, and the tracker {self.current_call()}"
            self._lose([record], reason)

    def records(self) -> list[Record]:
        """Return the records that are not sent yet, the oldest first."""
        return [item for item in self.items if isinstance(item, Record)]

    def current_call(self) -> str:
        """Return the current call of the thread, for messages."""
        if not self.items:
            return "has not been closed"
        first = self.items[0]
        if isinstance(first, Start):
            return "has not been reached yet"
        return f"is busy with step {first.step}"

    def close_after(self, error: BaseException | None) -> asyncio.Future[None]:
        """Let the thread send what is queued, close the tracker, and end.

        `error` is the one that ended the session.
        """
        self._ended_by = error
        return self.finish()

    def abandon(self, reason: str) -> None:
        """Send no record any more: the ones that are left are lost."""
        records = self.records()
        self.withdraw()
        self.items.clear()
        if records:
            self._lose(records, reason)

    def ended(self, items: list[Record | Start], error: BaseException | None) -> None:
        (item,) = items
        if error is None and isinstance(item, Record) and item.step > self._last_step:
            self.sent += 1
        super().ended(items, error)

    def failed(self, items: list[Record | Start], error: BaseException) -> None:
        records = [item for item in items if isinstance(item, Record)]
        self._lose(records, f"{type(error).__name__}: {error}")

    def _lose(self, records: list[Record], reason: str) -> None:
        """Count records as lost; log the first one, the tenth, the hundredth, ..."""
        self.lost += len(records)
        self.error = reason
        if is_logged(self.lost, len(records)):
            message = "%r: the metrics of %d steps, step %d the last, are lost: %s"
            logger.warning(message, self._tracker, self.lost, records[-1].step, reason)

    # In the thread.

    def work(self, items: list[Record | Start]) -> None:
        if self._previous is not None:
            self._previous.join()
            self._previous = None
        (item,) = items
        if isinstance(item, Start):
            # The tracker does not know the one before yet.
            after = item.after if self._start is None else min(item.after, self._start.after)
            self._start = Start(after, item.step)
            return
        if self._start is not None:
            self._last_step = self._start_tracker(self._start)
            self._start = None
        if item.step > self._last_step:
            self._tracker.log_metrics(item.values, item.step, item.time)

    def _start_tracker(self, start: Start) -> int:
        """Start the tracker, and return the last step that it has."""
        last_step = self._tracker.start(start.after)
        if last_step > start.after:
            logger.warning(
                "%r has metrics up to step %d already, and this run continues after step %d: steps"
                " up to %d are not sent again",
                self._tracker,
                last_step,
                start.step,
                last_step,
            )
        return last_step

    def close_worker(self) -> None:
        try:
            self._tracker.close(self._ended_by)
        except BaseException as error:
            logger.error("%r was not closed: %r", self._tracker, error, exc_info=error)
