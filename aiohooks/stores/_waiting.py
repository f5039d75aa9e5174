"""The waits of a store: for a step, for a change of the position, for the chief to be ready; and
how they end.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
from collections.abc import Awaitable, Callable
from typing import Any, Self, TypeVar

from aiohooks._aio.clock import NO_TIMER, current_clock
from aiohooks._aio.contexts import current_run
from aiohooks._aio.waits import WaitLog, wait_for_others
from aiohooks.errors import (
    AiohooksError,
    PublisherFailedError,
    PublisherFinishedError,
    SessionNotReadyError,
    StepResetError,
    StepTimeoutError,
    StoreClosedError,
    add_note,
    copy_error,
)
from aiohooks.stores._protocol import MAX_STEP, Member, Position, logger
from aiohooks.stores.publishers import (
    OwnWaits,
    Publisher,
    PublisherExit,
    Publishers,
    publisher_summary,
    publishers_held_up,
    shortened,
)

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

# An error that ends a wait is a result of its future, too: a future's exception that is never
# fetched, because the task was cancelled in the same tick, would be reported as never retrieved.
Waiter = asyncio.Future[int | AiohooksError]
ChangeWaiter = asyncio.Future[AiohooksError | None]

NO_WAITER = MAX_STEP + 1
"""The lowest threshold when there is no waiter."""

_SPARE = 64  # thresholds without a waiter that the heap may hold beside as many as have one


def resolve(waiter: asyncio.Future[T], result: T) -> None:
    """Set the result of a future, unless it is done."""
    if not waiter.done():
        waiter.set_result(result)


class WaitersByThreshold:
    """Futures by threshold, and a heap of the thresholds.

    Parking, discarding and waking cost O(log n) for a threshold and O(1) for each further waiter
    under it; reading the lowest costs nothing. A threshold whose waiters were all discarded stays
    in the heap for a while, but never more of these than there are live ones, plus a few.
    """

    __slots__ = ("_buckets", "_heap", "count", "lowest")

    def __init__(self) -> None:
        self._buckets: dict[int, dict[Waiter, None]] = {}
        self._heap: list[int] = []
        self.count = 0
        """The number of parked waiters."""
        self.lowest = NO_WAITER
        """The lowest threshold with a waiter."""

    @property
    def thresholds(self) -> int:
        return len(self._buckets)

    def park(self, threshold: int, waiter: Waiter) -> None:
        self.count += 1
        bucket = self._buckets.get(threshold)
        if bucket is not None:
            bucket[waiter] = None
            return
        self._buckets[threshold] = {waiter: None}
        heapq.heappush(self._heap, threshold)
        if threshold < self.lowest:
            self.lowest = threshold

    def discard(self, threshold: int, waiter: Waiter) -> bool:
        """Remove a waiter, and return whether it was still here."""
        bucket = self._buckets.get(threshold)
        if bucket is None or waiter not in bucket:
            return False
        self.count -= 1
        del bucket[waiter]
        if not bucket:
            del self._buckets[threshold]
            if threshold == self.lowest:
                self._find_lowest()
            elif len(self._heap) > 2 * len(self._buckets) + _SPARE:
                self._heap = list(self._buckets)
                heapq.heapify(self._heap)
        return True

    def wake(self, step: int) -> None:
        """End the waits for `step` and below with the result `step`."""
        heap, buckets = self._heap, self._buckets
        while heap and heap[0] <= step:
            bucket = buckets.pop(heapq.heappop(heap), None)
            if bucket is not None:
                self.count -= len(bucket)
                for waiter in bucket:
                    if not waiter.done():
                        waiter.set_result(step)
        self._find_lowest()

    def pop_all(self) -> list[tuple[int, Waiter]]:
        """Remove and return all waiters with their thresholds, the lowest first."""
        popped = [
            (threshold, waiter)
            for threshold in sorted(self._buckets)
            for waiter in self._buckets[threshold]
        ]
        self._buckets.clear()
        self._heap.clear()
        self.count = 0
        self.lowest = NO_WAITER
        return popped

    def _find_lowest(self) -> None:
        heap, buckets = self._heap, self._buckets
        while heap and heap[0] not in buckets:
            heapq.heappop(heap)
        self.lowest = heap[0] if heap else NO_WAITER


class Changes:
    """An iterator over a store's positions: the current one first, then the newest whenever it has
    changed.

    Positions that came and went between two steps of the iteration are left out; there is never a
    backlog. It ends when the publishers have finished and no change can follow; when they failed,
    or the store was closed, it raises what a `wait_for` would raise. It holds nothing while no task
    waits on it, so it may be dropped at any time.

    Created by `StepStore.changes`.
    """

    __slots__ = ("_closed", "_next_position", "_seen", "_waiters")

    def __init__(
        self,
        next_position: Callable[[Position | None, dict[ChangeWaiter, None]], Awaitable[Position]],
    ) -> None:
        self._next_position = next_position
        self._seen: Position | None = None
        self._waiters: dict[ChangeWaiter, None] = {}
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Position:
        if self._closed:
            raise StopAsyncIteration
        try:
            position = await self._next_position(self._seen, self._waiters)
        except PublisherFinishedError:
            self._closed = True
            raise StopAsyncIteration from None
        if self._closed:  # by `aclose`, meanwhile
            raise StopAsyncIteration
        self._seen = position
        return position

    async def aclose(self) -> None:
        """End the iteration, also for a task that is waiting on it; harmless when called twice."""
        self._closed = True
        for waiter in self._waiters:
            resolve(waiter, None)

    def __repr__(self) -> str:
        return f"<Changes after {self._seen}{', closed' if self._closed else ''}>"


def _error_of_wait(reason: AiohooksError, wanted: int | None = None) -> AiohooksError:
    """Return a copy of `reason`, why no wait can succeed, for one wait."""
    return copy_error(reason, None if wanted is None else f"{reason}, wanted {wanted}")


def step_timeout_error(
    problem: str, *, wanted: int, seen: int, secs: float, publishers: tuple[str, ...]
) -> StepTimeoutError:
    """Return the error of a wait that took too long."""
    message = (
        f"{problem} in {round(secs, 3):g} s: seen step {seen}, {publisher_summary(publishers)}"
    )
    return StepTimeoutError(message, wanted=wanted, seen=seen, waited_secs=secs)


class WaitRegistry:
    """The latest position, the waits and the publishers of a store; ends each wait once.

    Nothing here calls user code: ending a wait only makes its task runnable.
    """

    def __init__(
        self,
        run: str,
        position: Position,
        subscribe: Callable[[int | None], None],
        on_publisher_changed: Callable[[Publisher], None],
        on_unreachable: Callable[[], None],
    ) -> None:
        """Start with no waits; the callbacks are the methods of these names of `StepStore`."""
        self.run = run
        self.latest = position
        self.next_threshold = NO_WAITER
        """The step at which to wake: the lowest threshold; 0 while a change is waited for."""
        self.closed = False
        self.forked = False
        """Whether the store came into this process by a fork."""
        self.holds = False
        """Whether publishers that are not known here may still announce themselves: no wait fails
        for the lack of one.
        """
        self.waiters = WaitersByThreshold()
        self.publishers = Publishers()
        self.total = 0
        """The number of waits for a step that were parked so far."""
        self.max_waiting = 0
        self.is_initialised = False
        """Whether the chief has initialised what the workers need."""
        self._clock = current_clock()
        self._subscribe = subscribe
        self._on_publisher_changed = on_publisher_changed
        self._on_unreachable = on_unreachable
        self._change_waiters: dict[ChangeWaiter, None] = {}
        self._ready_waiters: dict[ChangeWaiter, None] = {}  # waits for the chief to be ready
        self._reset_waiters: dict[Waiter, None] = {}  # waits for a step that a reset ends
        self._loop: asyncio.AbstractEventLoop | None = None
        self._subscribed = NO_WAITER  # the latest threshold that the store was notified of
        # Without it, advances of one turn that each wake a waiter schedule as many updates, and
        # cost 1.8 times as much.
        self._update_scheduled = False
        self._failure: tuple[AiohooksError, Position] | None = None
        self._abort: tuple[AiohooksError, Position] | None = (
            None  # the failure, if it is the engine's
        )
        self._warned_at: Position | None = None
        self._log = WaitLog(logger, self._clock, self._describe_waits)
        self.waiting_since: float | None = None
        """Since when there has been a wait for a step, without a break."""
        self._logged = (
            0.0,
            position,
        )  # when the last line was logged, or the waiting began, and the position then

    def after_fork(self) -> None:
        """Note that the store is in a forked child; see `call_after_fork`."""
        self.forked = True

    # Waiting.

    async def wait(self, step: int, secs: float | None, raise_on_reset: bool) -> int:
        """Wait for a step that is not reached yet, and return the one seen."""
        if (reason := self.unreachable) is not None:
            raise _error_of_wait(reason, step)
        if secs == 0:
            raise self._timeout_error(step, 0.0)
        self._loop = asyncio.get_running_loop()
        waiter: Waiter = self._loop.create_future()
        self.waiters.park(step, waiter)
        self.total += 1
        if self.waiters.count > self.max_waiting:
            self.max_waiting = self.waiters.count
        if raise_on_reset:
            self._reset_waiters[waiter] = None
        publishers = self._park_publishers(waiter, step)
        timer = None
        try:
            self._update_threshold()
            if secs is not None:
                timer = self._clock.call_later(
                    secs, functools.partial(self._expire, step, waiter, self._clock.now())
                )
            if publishers:
                self._check_reachable()
            run = current_run()
            session = None if run is None else run.session
            # A stop of the session ends the wait, which is parked already, so that no advance is
            # missed.
            result = await (waiter if session is None else session.until(waiter))
        finally:
            if timer is not None:  # no call for nothing: many waits end together
                timer.cancel()
            if publishers:
                self._unpark_publishers(publishers, waiter)
            if raise_on_reset:
                del self._reset_waiters[waiter]
            if self.waiters.discard(step, waiter):
                self._update_threshold()
        if isinstance(result, int):
            return result
        raise result

    async def next_position(self, seen: Position | None, own: dict[ChangeWaiter, None]) -> Position:
        """Return the latest position as soon as it is another one than `seen`; `own` holds the wait
        meanwhile.
        """
        if self.latest != seen:
            return self.latest
        if (reason := self.unreachable) is not None:
            raise _error_of_wait(reason)
        self._loop = asyncio.get_running_loop()
        waiter: ChangeWaiter = self._loop.create_future()
        self._change_waiters[waiter] = own[waiter] = None
        publishers = self._park_publishers(waiter, self.latest.step + 1)
        try:
            self._update_threshold()
            if publishers:
                self._check_reachable()
            error = await waiter
        finally:
            if publishers:
                self._unpark_publishers(publishers, waiter)
            del own[waiter]
            if waiter in self._change_waiters:
                del self._change_waiters[waiter]
                self._update_threshold()
        if error is not None:
            raise error
        return self.latest

    async def wait_initialised(self, secs: float | None) -> None:
        if self.is_initialised:
            return
        if (reason := self.unreachable) is not None:
            raise _error_of_wait(reason)
        waiter: ChangeWaiter = asyncio.get_running_loop().create_future()
        self._ready_waiters[waiter] = None
        timer = NO_TIMER
        if secs is not None:
            summary = publisher_summary(self.publishers.names)
            late = SessionNotReadyError(
                f"the chief of {self.run} has not initialised it within {secs:g} s, {summary}"
            )
            timer = self._clock.call_later(secs, lambda: resolve(waiter, self._with_why(late)))
        try:
            self._notify_subscriber()  # leases are watched while any wait is parked
            error = await wait_for_others(waiter)
        finally:
            timer.cancel()
            self._ready_waiters.pop(waiter, None)
            self._notify_subscriber()
        if error is not None:
            raise error

    @property
    def waiting(self) -> bool:
        return bool(self.waiters.count or self._change_waiters or self._ready_waiters)

    @property
    def watching(self) -> int:
        return len(self._change_waiters)

    @property
    def threshold(self) -> int | None:
        """The next threshold; None without a waiter."""
        return None if self.next_threshold == NO_WAITER else self.next_threshold

    @property
    def waiting_secs(self) -> float | None:
        """For how long there has been a wait for a step without a break; None if there is none."""
        return None if self.waiting_since is None else self._clock.now() - self.waiting_since

    # What happens: each of these wakes the waits that it concerns.

    def observe(self, position: Position) -> None:
        """Take note of a position, and wake its waiters; an older one than the latest is
        dropped.
        """
        old = self.latest
        if position <= old:
            return
        self.latest = position
        if position.step >= self.next_threshold:
            self.wake()
        if position.epoch != old.epoch:
            message = f"{self.run} was reset from step {old.step} to step {position.step}"
            for waiter in self._reset_waiters:
                resolve(waiter, StepResetError(message, old=old, new=position))

    def wake(self) -> None:
        """End the waits that the latest position answers.

        What else follows waits until their tasks have run: woken tasks often wait again
        immediately.
        """
        for waiter in self._change_waiters:
            resolve(waiter, None)
        self._change_waiters.clear()
        self.waiters.wake(self.latest.step)
        self.next_threshold = self.waiters.lowest
        if not self.waiters.count:
            self.waiting_since = None
        if self._loop is not None and not self._update_scheduled:
            self._update_scheduled = True
            self._loop.call_soon(self._update_threshold)

    def set_initialised(self, ready: bool) -> None:
        self.is_initialised = ready
        if ready:
            self._end_ready_waiters(None)

    def observe_others(
        self, members: tuple[Member, ...], last_exit: PublisherExit | None, *, lost: bool
    ) -> None:
        """Take note of the publishers in other processes and of the last exit there; None: no new
        one, or not to be used yet.

        A publisher that was `lost` without an exit is expected back: all exits are forgotten.
        """
        publishers = self.publishers
        # By their ids: a renewed lease, or another step that it waits for, is no new publisher.
        if not {member.id for member in members} <= {member.id for member in publishers.others}:
            self._failure = None
        publishers.others = members
        if last_exit is not None or lost:
            publishers.last_exit = last_exit
        self._check_reachable()

    def join(self, publisher: Publisher, waits: OwnWaits) -> None:
        self.publishers.join(publisher, waits)
        self._failure = None

    def leave(self, publisher: Publisher, exc: BaseException | None) -> None:
        self.publishers.leave(publisher, self.latest.step, exc)
        self._check_reachable()

    def fail(self, exc: BaseException, position: Position | None = None) -> None:
        """End all waits, also those that begin before anything new happens; `position` is where the
        failure was reported.
        """
        position = position or self.latest
        reason = PublisherFailedError(f"the publisher of {self.run} failed at step {position.step}")
        reason.__cause__ = exc
        self._failure = reason, position
        self.fail_unreachable()

    def abort(self, error: AiohooksError) -> None:
        """End all waits as `fail` does, with an error of the engine."""
        self._failure = self._abort = error, self.latest
        self.fail_unreachable()

    def clear_failure(self, *, only_abort: bool = False) -> None:
        """Let new waits begin again after `abort`, and after `fail` unless `only_abort`."""
        if not only_abort or self._failure is self._abort:
            self._failure = None

    def close(self) -> None:
        """End all waits for good."""
        self.closed = True
        self.fail_unreachable()

    # How waits fail.

    @property
    def unreachable(self) -> AiohooksError | None:
        """Why a wait that began now would fail immediately, as far as is known here; None if it
        would not.
        """
        if self.closed:
            return StoreClosedError(f"the step store {self.run} was closed")
        if self._failure is not None and self._failure[1] == self.latest:
            return self._failure[0]
        left = self.publishers.last_exit
        if left is None or self.holds or not self.publishers.all_waiting(self.latest.step):
            return None
        if left.error is None:
            return PublisherFinishedError(f"{left.name} finished at step {left.step}")
        reason = PublisherFailedError(f"{left.name} failed at step {left.step}")
        reason.__cause__ = left.error
        return reason

    def fail_unreachable(self) -> None:
        """End all waits, if none can succeed."""
        if (reason := self.unreachable) is None:
            return
        for waiter in self._change_waiters:
            resolve(waiter, _error_of_wait(reason))
        self._change_waiters.clear()
        self._end_ready_waiters(reason)
        for step, parked in self.waiters.pop_all():
            resolve(parked, _error_of_wait(reason, step))
        self._update_threshold()

    def _end_ready_waiters(self, reason: AiohooksError | None) -> None:
        for waiter in self._ready_waiters:
            resolve(waiter, None if reason is None else _error_of_wait(reason))
        self._ready_waiters.clear()

    def _expire(self, step: int, waiter: Waiter, since: float) -> None:
        resolve(waiter, self._timeout_error(step, self._clock.now() - since))

    def _timeout_error(self, step: int, secs: float) -> StepTimeoutError:
        problem = f"step {step} of {self.run} was not reached"
        error = step_timeout_error(
            problem, wanted=step, seen=self.latest.step, secs=secs, publishers=self.publishers.names
        )
        return self._with_why(error)

    def _with_why(self, error: E) -> E:
        """Note what the publishers of this process wait for."""
        if here := [one for one in self.publishers.here if not one.waiting]:
            from aiohooks._why.builder import why  # seldom needed

            if note := why(*(one.awaited() for one in here)):
                add_note(error, note)
        return error

    def _check_reachable(self) -> None:
        """After a publisher has left or begun to wait: report waits that cannot succeed any
        more.
        """
        publishers = self.publishers
        if publishers.last_exit is not None:
            if self.waiting and self.unreachable is not None:
                self._on_unreachable()
            return
        if (
            self.holds
            or self._warned_at == self.latest
            or not publishers.names
            or not publishers.all_waiting(self.latest.step)
        ):
            return  # warned about already, or there is no reason to
        self._warned_at = self.latest
        logger.warning(
            "run %s: at step %d every registered publisher is itself waiting for a step: %s",
            self.run,
            self.latest.step,
            shortened(publishers.names),
        )

    # The next threshold.

    def _update_threshold(self) -> None:
        """After waiters have come or left."""
        self._update_scheduled = False
        threshold = self.next_threshold = 0 if self._change_waiters else self.waiters.lowest
        if threshold != self._subscribed:
            self._subscribed = threshold
            self._notify_subscriber()
        if not self.waiters.count:
            self.waiting_since = None
            self._log.end(self)
        elif self.waiting_since is None:  # the timer of the log outlives short breaks
            self.waiting_since = self._log.begin(self)
            self._logged = self.waiting_since, self.latest

    def _describe_waits(self) -> str:
        if not self.waiters.count:
            return ""  # the last one was woken in this tick
        now, latest = self._clock.now(), self.latest
        rate = self.rate(now)  # since the last line, which is this one from here on
        self._logged = now, latest
        waits = f"waiting for step {self.waiters.lowest} ({self.waiters.count} waiters)"
        return (
            f"run {self.run}: {waits}, seen step {latest.step}, {rate},"
            f" {publisher_summary(self.publishers.names)}"
        )

    def rate(self, now: float) -> str:
        """Return how fast the step has grown since the waiting began, or since the last line of the
        log.
        """
        (at, before), latest = self._logged, self.latest
        # Across a reset the difference says nothing.
        known = latest.epoch == before.epoch and now > at
        return (
            f"{(latest.step - before.step) / (now - at):.3g} steps/s"
            if known
            else "reset meanwhile"
        )

    def _notify_subscriber(self) -> None:
        self._subscribe(self.threshold)

    # Publishers that wait themselves.

    def _park_publishers(self, wait: asyncio.Future[Any], step: int) -> dict[Publisher, OwnWaits]:
        """Note the wait as one of the publishers that it holds up; return those that are registered
        here.
        """
        parked: dict[Publisher, OwnWaits] = {}
        for publisher, run in publishers_held_up().items():
            if (waits := self.publishers.park(publisher, wait, step, run)) is not None:
                parked[publisher] = waits
                self._on_publisher_changed(publisher)
        return parked

    def _unpark_publishers(
        self, parked: dict[Publisher, OwnWaits], wait: asyncio.Future[Any]
    ) -> None:
        for publisher, waits in parked.items():
            if self.publishers.unpark(publisher, waits, wait):
                self._warned_at = None
            self._on_publisher_changed(publisher)
