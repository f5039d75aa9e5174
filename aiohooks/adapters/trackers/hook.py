"""`TrackerHook`: the metrics of runs for an experiment tracker, sent by a thread of its own.

tracker   a program or a file that stores metrics by step
record    the metrics of one due run, with its step and its time
start     the session begins, or a recovery moves it back: later records are of later steps
lost      said of a record that the tracker does not get
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from aiohooks._core.queue import ThreadQueue
from aiohooks._core.validate import check_instance, check_secs, is_coroutine_function
from aiohooks._core.waits import wait_done
from aiohooks.errors import InvalidArgumentError
from aiohooks.graph.session import Session
from aiohooks.hooks._observing import (
    Record,
    Sampling,
    Values,
    checked_numbers,
    checked_values,
    logger,
)
from aiohooks.hooks.every import Every, ScheduledHook
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunValues

MAX_QUEUE = 1000
"""How many steps may wait to be sent."""


@runtime_checkable
class Tracker(Protocol):
    """Stores metrics by step.

    All methods are plain, may block, and are called from one thread at a time.

    A tracker connects when it is first used, not when it is made: an error of `start` or
    `log_metrics` means that the metrics could not be sent, and the next call may try again.
    """

    def start(self, step: int) -> int:
        """Begin, or continue after a recovery: the next metrics are of later steps than `step`.

        Returns:
            The last step that remains here: metrics of steps up to it are not sent. A tracker that
            can drop metrics drops the metrics of later steps, and returns `step`. Another tracker
            returns its last step if that is later, so that no step is stored twice.
        """
        ...

    def log_metrics(
        self,
        metrics: Mapping[str, float],
        step: int,
        time: float,
    ) -> None:
        """Store the metrics of a step. `time` is the Unix time at which they were taken."""

    def close(self, error: BaseException | None) -> None:
        """Called once at the end, also without `start`.

        `error` is the error that ended the session, or None after a clean end.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class TrackerStatistics:
    """The metrics of a session, counted in steps.

    Attributes:
        sent: the tracker has them.
        pending: they wait to be sent.
        lost: they could not be sent.
        error: why the last step was lost, or None if all were sent.
    """

    sent: int = 0
    pending: int = 0
    lost: int = 0
    error: str | None = None


class TrackerHook(ScheduledHook):
    """Sends metrics to an experiment tracker on each crossing of `every`.

    These are the chosen values, and `run_context.metrics`. A thread sends them, so that a tracker
    that is slow, hangs or fails neither slows nor stops the session. Metrics are lost if the
    tracker fails, if too many wait, or if the process is killed before they are sent. They are
    counted, and the log has the reason. Put a `JSONLinesHook` into the session to keep all metrics.

    The hook is called after the others (it has order 90), so it has the metrics that they added. A
    run that resumes from a checkpoint, or that a recovery moved back, repeats no step in the
    tracker. See `Tracker.start`.
    """

    order: ClassVar[int] = 90

    def __init__(
        self,
        tracker: Tracker,
        values: Values | None = None,
        *,
        every: Every = Every(steps=100),
        drain_secs: float = 5.0,
    ) -> None:
        """Create the hook.

        Args:
            tracker: where the metrics go. It is closed with the session.
            values: a mapping from a tag to a fetch, or several nodes or names, whose names are the
                tags. Each is one number. A value replaces the metric of `run_context.metrics` with
                this name.
            every: when to send.
            drain_secs: how long the end of the session waits for the tracker. Give less than the
                grace period of the session.

        Raises:
            InvalidArgumentError: an argument is invalid.
        """
        check_instance(tracker, Tracker, "tracker")
        if is_coroutine_function(tracker.log_metrics):
            raise InvalidArgumentError(
                f"{tracker!r} has coroutine methods, but a thread calls them; write them as `def`"
            )
        check_instance(every, Every, "every")
        check_secs(drain_secs, "drain_secs")
        self.tracker: Tracker = tracker
        self._values = checked_values(values, may_be_empty=True)
        self._every = every
        self._drain_secs = drain_secs
        self._timer: Sampling = Sampling(every, first=False)
        self._sender = Sender(tracker, None)

    def _reset(self) -> None:
        self._timer = Sampling(self._every, first=False)
        # The thread of the last session may not have ended. The new sender waits for it.
        self._sender = Sender(self.tracker, self._sender)

    def statistics(self) -> TrackerStatistics:
        """Return the counts of the current or the last session."""
        sender = self._sender
        return TrackerStatistics(
            sender.sent,
            len(sender.records()),
            sender.lost,
            sender.error,
        )

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Continue after the step at which the session starts, or to which a recovery moved it."""
        step = session.global_step.latest.step
        if self._timer.start(step):
            self._sender.restart(step)

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Fetch the values if the run is due."""
        if self._timer.should_fetch(run_context.global_step) and self._values:
            return SessionRunArgs(self._values)
        return None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Queue the metrics if the run is due.

        Raises:
            InvalidArgumentError: a metric is not a single number.
        """
        step = run_context.global_step
        if not self._timer.mark_if_due(step):
            return
        metrics: dict[str, Any] = {**run_context.metrics, **(run_values.results or {})}
        if metrics:
            self._sender.send(
                Record(
                    step,
                    self._timer.time(),
                    checked_numbers(metrics),
                )
            )

    async def close(self, exc: BaseException | None) -> None:
        """Send the metrics that wait, for at most `drain_secs`. The rest is lost."""
        sender = self._sender
        secs = self._drain_secs
        ended = sender.close_after(exc)
        try:
            if not await wait_done([ended], secs):
                logger.warning(
                    "%r: %r has not ended %s s after the session; continuing without it",
                    self,
                    self.tracker,
                    secs,
                )
        finally:
            sender.abandon(f"the session has ended, and it did not answer for {secs} s")

    def __repr__(self) -> str:
        return f"TrackerHook({self.tracker!r}, {list(self._values)}, every={self._every})"


class Start(NamedTuple):
    """The session starts at a step, or is moved back to it."""

    step: int


class Sender(ThreadQueue[Record | Start]):
    """Sends records to a tracker in a thread of its own, one at a time, in order.

    The queue also has a `Start` for each time that the session starts, or is moved back. Nothing
    waits for the tracker. After `abandon` the thread only ends its current call, and closes the
    tracker.
    """

    def __init__(
        self,
        tracker: Tracker,
        previous: Sender | None,
    ) -> None:
        """Create a sender. Its thread starts with the first call of `restart`.

        `previous` is the last sender to this tracker, or None. The thread of this one waits until
        that of the previous one has ended, because a tracker is used by one thread at a time.
        """
        super().__init__(f"sender to {tracker!r}", MAX_QUEUE, max_batch=1)
        self.sent: int = 0
        self.lost: int = 0
        self.error: str | None = None
        """Why the last record was lost."""
        self._tracker = tracker
        self._previous = previous
        # The step of a `Start` at which the tracker is still to be started, or None. That happens
        # with the next record, so a session without records does not connect.
        self._start: int | None = None
        # The last step that the tracker had when it was started. It gets only records of later
        # steps. -1 is before the first step.
        self._last_step = -1
        # The error that has ended the session.
        self._session_error: BaseException | None = None

    # In the event loop.

    def restart(self, step: int) -> None:
        """Continue after `step`. Drop the queued records of later steps, which are made again."""
        # The queued items that are kept are queued again, before the start.
        for item in [*self.withdraw(), Start(step)]:
            if item.step <= step:
                self.add(item)

    def send(self, record: Record) -> None:
        """Queue a record. It is lost if the queue is full."""
        if not self.put_nowait(record):
            self._lose([record], f"{len(self.items)} wait already")

    def records(self) -> list[Record]:
        """Return the records that are not sent yet, the oldest first."""
        return [item for item in self.items if isinstance(item, Record)]

    def close_after(self, error: BaseException | None) -> asyncio.Future[None]:
        """Let the thread send the queued records, close the tracker, and end.

        `error` is the error that ended the session.
        """
        self._session_error = error
        return self.finish()

    def abandon(self, reason: str) -> None:
        """Stop sending: records that have not been sent are lost."""
        records = self.records()
        self.withdraw()
        self.items.clear()
        if records:
            self._lose(records, reason)

    def ended(
        self,
        items: list[Record | Start],
        error: BaseException | None,
    ) -> None:
        """Count a record that was sent. Records of steps that the tracker had do not count."""
        # The thread works on one item at a time (`max_batch=1`).
        (item,) = items
        if error is None and isinstance(item, Record) and item.step > self._last_step:
            self.sent += 1
        super().ended(items, error)

    def failed(
        self,
        items: list[Record | Start],
        error: BaseException,
    ) -> None:
        """Count a record that could not be sent."""
        records = [item for item in items if isinstance(item, Record)]
        self._lose(records, f"{type(error).__name__}: {error}")

    def _lose(
        self,
        records: list[Record],
        reason: str,
    ) -> None:
        """Count records as lost. Log the first one, the tenth, the hundredth, ..."""
        lost_before = self.lost
        self.lost += len(records)
        self.error = reason
        # The number has one more digit than before, or is the first.
        if not lost_before or len(str(lost_before)) < len(str(self.lost)):
            message = "%r: the metrics of %d steps, step %d the last, are lost: %s"
            logger.warning(
                message,
                self._tracker,
                self.lost,
                records[-1].step,
                reason,
            )

    # In the thread.

    def work(self, items: list[Record | Start]) -> None:
        """Send a record, or remember a start for the next record."""
        # A tracker is used by one thread at a time.
        if self._previous is not None:
            self._previous.join()
            self._previous = None
        (item,) = items
        if isinstance(item, Start):
            # If the tracker was not started since an earlier `Start`, it must drop the steps after
            # the lower one of both.
            self._start = item.step if self._start is None else min(item.step, self._start)
            return
        if self._start is not None:
            self._last_step = self._tracker.start(self._start)
            if self._last_step > self._start:
                logger.warning(
                    "%r has metrics up to step %d already, and this run continues after step %d:"
                    " steps up to %d are not sent again",
                    self._tracker,
                    self._last_step,
                    self._start,
                    self._last_step,
                )
            self._start = None
        if item.step > self._last_step:
            self._tracker.log_metrics(item.values, item.step, item.time)

    def close_worker(self) -> None:
        try:
            self._tracker.close(self._session_error)
        except BaseException as error:
            logger.error("%r was not closed: %r", self._tracker, error, exc_info=error)
