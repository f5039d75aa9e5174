"""The waiting room of a store: everybody who waits for a step or for a change, and how their waits end."""

from __future__ import annotations

import asyncio
import functools
import heapq
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Self

from aiohooks._aio.clock import Clock, TimerHandle
from aiohooks.errors import (
    AiohooksError,
    PublisherFailedError,
    PublisherFinishedError,
    SessionNotReadyError,
    StepResetError,
    StepTimeoutError,
    StoreClosedError,
    another,
)
from aiohooks.stores._protocol import MAX_STEP, Member, Position, logger
from aiohooks.stores._publishers import Publisher, PublisherExit, Publishers, current_publisher, listed

# What a wait ends with is a result, also when it is an error: a future with an exception that nobody comes to fetch,
# because its task was cancelled in the same tick, would be reported as never retrieved.
Waiter = asyncio.Future[int | AiohooksError]

NO_WAITER = MAX_STEP + 1
"""The lowest threshold where nobody waits."""

_LOG_PERIOD_SECS = 60.0
_SPARE = 64  # thresholds without a waiter that the heap may hold beside as many as have one


class WaitersByThreshold:
    """Futures by threshold, and a heap of the thresholds.

    Parking, discarding and waking cost O(log n) for a threshold and O(1) for one waiter more under it; asking for the
    lowest costs nothing. A threshold whose waiters were all discarded stays in the heap for a while, but never more of
    these than there are live ones, plus a few.
    """

    __slots__ = ("_buckets", "_heap", "count", "lowest")

    def __init__(self) -> None:
        """Nobody waits."""
        self._buckets: dict[int, dict[Waiter, None]] = {}
        self._heap: list[int] = []
        self.count = 0
        """How many are parked."""
        self.lowest = NO_WAITER
        """The lowest threshold with a waiter."""

    @property
    def thresholds(self) -> int:
        """How many different thresholds are waited for."""
        return len(self._buckets)

    @property
    def heap_size(self) -> int:
        """How many thresholds the heap holds, live or not."""
        return len(self._heap)

    def park(self, threshold: int, waiter: Waiter) -> None:
        """Takes in one waiter."""
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
        """Forgets one waiter, and says whether it was still here."""
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
        """Ends the waits for `step` and below; they return `step`."""
        heap, buckets = self._heap, self._buckets
        while heap and heap[0] <= step:
            bucket = buckets.pop(heapq.heappop(heap), None)
            if bucket is not None:
                self.count -= len(bucket)
                for waiter in bucket:
                    if not waiter.done():
                        waiter.set_result(step)
        self._find_lowest()

    def take_all(self) -> list[tuple[int, Waiter]]:
        """Hands out all waiters with their thresholds, the lowest first, and is empty then."""
        taken = [(threshold, waiter) for threshold in sorted(self._buckets) for waiter in self._buckets[threshold]]
        self._buckets.clear()
        self._heap.clear()
        self.count = 0
        self.lowest = NO_WAITER
        return taken

    def _find_lowest(self) -> None:
        heap, buckets = self._heap, self._buckets
        while heap and heap[0] not in buckets:
            heapq.heappop(heap)
        self.lowest = heap[0] if heap else NO_WAITER


# See `_waiters.Waiter`; None: look at the mark.
ChangeWaiter = asyncio.Future[AiohooksError | None]


class Changes:
    """An iterator over a store's positions: the current one first, then the newest whenever it has changed.

    Marks that came and went between two steps of the iteration are left out; there is never a backlog. It ends when the
    publishers have finished and nothing more can come; when they failed, or the store was closed, it raises what a
    `wait_for` would raise. It holds nothing while nobody waits on it, so it may be dropped at any time.
    """

    __slots__ = ("_closed", "_next", "_seen", "_watches")

    def __init__(self, next_position: Callable[[Position | None, dict[ChangeWaiter, None]], Awaitable[Position]]) -> None:
        """Made by `StepStore.changes`."""
        self._next = next_position
        self._seen: Position | None = None
        self._watches: dict[ChangeWaiter, None] = {}
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Position:
        if self._closed:
            raise StopAsyncIteration
        try:
            position = await self._next(self._seen, self._watches)
        except PublisherFinishedError:
            self._closed = True
            raise StopAsyncIteration from None
        if self._closed:  # by `aclose`, meanwhile
            raise StopAsyncIteration
        self._seen = position
        return position

    async def aclose(self) -> None:
        """Ends the iteration, also for a task that waits on it now; harmless when called twice."""
        self._closed = True
        for watch in self._watches:
            if not watch.done():
                watch.set_result(None)

    def __repr__(self) -> str:
        return f"<Changes after {self._seen}{', closed' if self._closed else ''}>"


@dataclass(frozen=True, slots=True)
class _End:
    """Why waits end badly."""

    why: AiohooksError
    cause: BaseException | None

    def error(self, wanted: int | None) -> AiohooksError:
        """One for each wait."""
        error = another(self.why, None if wanted is None else f"{self.why}, wanted {wanted}")
        error.__cause__ = self.cause
        return error


@dataclass(frozen=True, slots=True)
class Waiting:
    """What the line tells."""

    run: str
    wanted: int
    waiters: int
    seen: Position
    publishers: str


class ProgressLog:
    """Logs once a minute for as long as somebody waits; costs nothing where nobody does."""

    __slots__ = ("_clock", "_describe", "_last", "_mark", "_timer", "since")

    def __init__(self, clock: Clock, describe: Callable[[], Waiting]) -> None:
        """`describe` is called for each line."""
        self._clock = clock
        self._describe = describe
        self.since: float | None = None
        """When somebody began to wait, after a time when nobody did; None while nobody does."""
        self._timer: TimerHandle | None = None
        self._mark: Position = Position(0, 0)  # as of the last line, or else of the beginning
        self._last: float = 0.0  # when that was

    def begin(self, position: Position) -> None:
        """Somebody has begun to wait."""
        self.since = self._last = self._clock.now()
        self._mark = position
        if self._timer is None:
            self._timer = self._clock.call_later(_LOG_PERIOD_SECS, self._look)

    def pause(self) -> None:
        """Nobody waits in this moment. The timer is left: who was woken often waits again at once."""
        self.since = None

    def end(self) -> None:
        """Nobody waits any more."""
        self.since = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self.since is None:
            return
        rest = self._last + _LOG_PERIOD_SECS - self._clock.now()
        if rest <= 0:
            self._log()
            rest = _LOG_PERIOD_SECS
        self._timer = self._clock.call_later(rest, self._look)

    def _log(self) -> None:
        now = self._clock.now()
        waiting = self._describe()
        elapsed = now - self._last
        steps = waiting.seen.step - self._mark.step
        # Across a reset the difference says nothing.
        known = waiting.seen.epoch == self._mark.epoch and elapsed > 0
        logger.info(
            "run %s: waiting for step %d (%d waiters), seen step %d, %s, published by %s",
            waiting.run,
            waiting.wanted,
            waiting.waiters,
            waiting.seen.step,
            f"{steps / elapsed:.3g} steps/s" if known else "reset meanwhile",
            waiting.publishers,
        )
        self._last, self._mark = now, waiting.seen


class WaitRegistry:
    """Knows the latest position, who waits and who publishes; ends each wait once.

    Nothing here calls foreign code: ending a wait only makes its task runnable.
    """

    __slots__ = (
        "_claims",
        "_clock",
        "_failure",
        "_loop",
        "_on_unreachable",
        "_progress",
        "_run",
        "_strict",
        "_subscribe",
        "_subscribed",
        "_unsettled",
        "_waits_changed",
        "_warned",
        "change_waiters",
        "closed",
        "is_initialised",
        "latest",
        "max_waiting",
        "next_threshold",
        "publishers",
        "waiters",
        "waits",
    )

    def __init__(
        self,
        run: str,
        position: Position,
        clock: Clock,
        arm: Callable[[int | None], None],
        waits_changed: Callable[[Publisher], None],
        hope_lost: Callable[[], None],
    ) -> None:
        """`arm` is told whenever `due` has changed: None when nobody waits; `waits_changed` of a publisher's waits.

        `hope_lost` is told when no wait can end well, as far as is known here; it calls `fail_unreachable` when that is certain.
        """
        self.latest = position
        self.next_threshold = NO_WAITER
        """The lowest step at which somebody is to be told: the lowest threshold; 0 while a change is waited for."""
        self.closed = False
        self.waiters = WaitersByThreshold()
        self.change_waiters: dict[ChangeWaiter, None] = {}
        self.publishers = Publishers()
        self.waits = 0
        self.max_waiting = 0
        self._run = run
        self._clock = clock
        self._subscribe = arm
        self._waits_changed = waits_changed
        self._on_unreachable = hope_lost
        self.is_initialised = False
        self._claims: dict[ChangeWaiter, None] = {}  # those that wait for this
        self._loop: asyncio.AbstractEventLoop | None = None  # that of who waits
        self._subscribed = NO_WAITER  # the `due` that was told
        self._unsettled = False
        self._strict: dict[Waiter, None] = {}  # those that a reset is to end
        self._failure: tuple[_End, Position] | None = None
        self._warned: Position | None = None
        self._progress = ProgressLog(clock, self._describe)

    # Waiting.

    async def wait(self, step: int, secs: float | None, strict: bool) -> int:
        """Waits for a step that is not reached yet, and returns the one seen."""
        if (end := self._end()) is not None:
            raise end.error(step)
        if secs == 0:
            raise self._late(step, 0.0)
        self._loop = asyncio.get_running_loop()
        waiter: Waiter = self._loop.create_future()
        self.waiters.park(step, waiter)
        self.waits += 1
        if self.waiters.count > self.max_waiting:
            self.max_waiting = self.waiters.count
        if strict:
            self._strict[waiter] = None
        publisher = self._parked_by(waiter, step)
        timer = None
        try:
            self._settle()
            if secs is not None:
                timer = self._clock.call_later(secs, functools.partial(self._expire, step, waiter, self._clock.now()))
            if publisher is not None:
                self._judge()
            result = await waiter
        finally:
            if timer is not None:
                timer.cancel()
            if publisher is not None:
                self._unpark(publisher, waiter)
            if strict:
                del self._strict[waiter]
            if self.waiters.discard(step, waiter):
                self._settle()
        if isinstance(result, int):
            return result
        raise result

    async def next_position(self, seen: Position | None, own: dict[ChangeWaiter, None]) -> Position:
        """The latest position, as soon as it is another than `seen`; `own` holds the wait meanwhile."""
        if self.latest != seen:
            return self.latest
        if (end := self._end()) is not None:
            raise end.error(None)
        self._loop = asyncio.get_running_loop()
        watch: ChangeWaiter = self._loop.create_future()
        self.change_waiters[watch] = own[watch] = None
        publisher = self._parked_by(watch, self.latest.step + 1)
        try:
            self._settle()
            if publisher is not None:
                self._judge()
            error = await watch
        finally:
            if publisher is not None:
                self._unpark(publisher, watch)
            del own[watch]
            if watch in self.change_waiters:
                del self.change_waiters[watch]
                self._settle()
        if error is not None:
            raise error
        return self.latest

    async def wait_initialised(self, secs: float | None) -> None:
        """Waits until the chief has said that what the workers need is there."""
        if self.is_initialised:
            return
        if (end := self._end()) is not None:
            raise end.error(None)
        claim: ChangeWaiter = asyncio.get_running_loop().create_future()
        self._claims[claim] = None
        timer = None
        if secs is not None:
            late = SessionNotReadyError(
                f"the chief of {self._run} has not initialised it within {secs:g} s, published by {listed(self.publishers.names)}"
            )
            timer = self._clock.call_later(secs, lambda: None if claim.done() else claim.set_result(late))
        try:
            self._subscribe(None if self.next_threshold == NO_WAITER else self.next_threshold)
            error = await claim
        finally:
            if timer is not None:
                timer.cancel()
            self._claims.pop(claim, None)
            self._subscribe(None if self.next_threshold == NO_WAITER else self.next_threshold)
        if error is not None:
            raise error

    @property
    def waiting(self) -> bool:
        """Whether anybody waits for anything."""
        return bool(self.waiters.count or self.change_waiters or self._claims)

    @property
    def waiting_secs(self) -> float | None:
        """For how long somebody has been waiting for a step without a break; None if nobody does."""
        since = self._progress.since
        return None if since is None else self._clock.now() - since

    # RunWatcher.

    def initialised(self, ready: bool) -> None:
        """Takes note of whether the chief has initialised what the workers need."""
        self.is_initialised = ready
        if ready:
            for claim in self._claims:
                if not claim.done():
                    claim.set_result(None)
            self._claims.clear()

    def observe_others(self, members: tuple[Member, ...], departure: PublisherExit | None, *, lost: bool) -> None:
        """Takes note of who publishes in other processes, and of how the last one there left (None: not again, or not yet).

        A publisher that was `lost` without a departure is one that is waited for: it forgets all departures.
        """
        publishers = self.publishers
        if any(member not in publishers.others for member in members):
            self._failure = None
        publishers.others = members
        if departure is not None or lost:
            publishers.last_exit = departure
        self._judge()

    def observe(self, position: Position) -> None:
        """Takes note of a position, and wakes who waited for it; older news is dropped."""
        old = self.latest
        if position <= old:
            return
        self.latest = position
        if position.step >= self.next_threshold:
            self.wake()
        if position.epoch != old.epoch:
            message = f"{self._run} was reset from step {old.step} to step {position.step}"
            for waiter in self._strict:
                if not waiter.done():
                    waiter.set_result(StepResetError(message, old=old, new=position))

    def wake(self) -> None:
        """Ends the waits that the latest position answers; only when those tasks have gone on, `_settle` sees to the rest."""
        for watch in self.change_waiters:
            if not watch.done():
                watch.set_result(None)
        self.change_waiters.clear()
        self.waiters.wake(self.latest.step)
        self.next_threshold = self.waiters.lowest
        if not self.waiters.count:
            self._progress.pause()
        if self._loop is not None and not self._unsettled:
            self._unsettled = True
            self._loop.call_soon(self._settle)

    def join(self, publisher: Publisher) -> None:
        """Takes note of one more publisher."""
        self.publishers.join(publisher)
        self._failure = None

    def leave(self, publisher: Publisher, exc: BaseException | None) -> None:
        """Takes note of a publisher's departure."""
        self.publishers.leave(publisher, self.latest.step, exc)
        self._judge()

    def fail(self, exc: BaseException, position: Position | None = None) -> None:
        """Ends all waits, also those that begin before anything new happens; `position` is the one at which it was said."""
        position = position or self.latest
        why = PublisherFailedError(f"the publisher of {self._run} failed at step {position.step}")
        self._failure = _End(why, exc), position
        self.fail_unreachable()

    def abort(self, error: AiohooksError) -> None:
        """Ends all waits as `fail` does, with what went wrong with the engine."""
        self._failure = _End(error, error.__cause__), self.latest
        self.fail_unreachable()

    def clear_failure(self) -> None:
        """Waits may begin again after a failure."""
        self._failure = None

    def close(self) -> None:
        """Ends all waits for good."""
        self.closed = True
        self.fail_unreachable()

    # How waits end.

    @property
    def unreachable(self) -> bool:
        """Whether a wait that began now would end badly at once, as far as is known here."""
        return self._end() is not None

    def _end(self) -> _End | None:
        """Why no wait can end well now, if so."""
        if self.closed:
            return _End(StoreClosedError(f"the step store {self._run} was closed"), None)
        if self._failure is not None and self._failure[1] == self.latest:
            return self._failure[0]
        departure = self.publishers.last_exit
        if departure is None or not self.publishers.all_waiting(self.latest.step):
            return None
        if departure.error is None:
            return _End(PublisherFinishedError(f"{departure.name} finished at step {departure.step}"), None)
        return _End(PublisherFailedError(f"{departure.name} failed at step {departure.step}"), departure.error)

    def fail_unreachable(self) -> None:
        """Ends all waits, if none can end well."""
        if (end := self._end()) is None:
            return
        for watch in self.change_waiters:
            if not watch.done():
                watch.set_result(end.error(None))
        self.change_waiters.clear()
        for claim in self._claims:
            if not claim.done():
                claim.set_result(end.error(None))
        self._claims.clear()
        for step, waiter in self.waiters.take_all():
            if not waiter.done():
                waiter.set_result(end.error(step))
        self._settle()

    def _expire(self, step: int, waiter: Waiter, since: float) -> None:
        if not waiter.done():
            waiter.set_result(self._late(step, self._clock.now() - since))

    def _late(self, step: int, secs: float) -> StepTimeoutError:
        return StepTimeoutError(
            f"step {step} of {self._run} was not reached in {round(secs, 3):g} s: seen step {self.latest.step},"
            f" published by {listed(self.publishers.names)}",
            wanted=step,
            seen=self.latest.step,
            waited_secs=secs,
        )

    def _settle(self) -> None:
        """After somebody has come or gone."""
        self._unsettled = False
        due = self.next_threshold = 0 if self.change_waiters else self.waiters.lowest
        if due != self._subscribed:
            self._subscribed = due
            self._subscribe(None if due == NO_WAITER else due)
        if not self.waiters.count:
            self._progress.end()
        elif self._progress.since is None:
            self._progress.begin(self.latest)

    def _describe(self) -> Waiting:
        waiters = self.waiters
        return Waiting(self._run, waiters.lowest, waiters.count, self.latest, listed(self.publishers.names))

    # Publishers' own waits.

    def _parked_by(self, wait: asyncio.Future[Any], step: int) -> Publisher | None:
        publisher = current_publisher()
        if publisher is None or publisher not in self.publishers:
            return None
        self.publishers.park(publisher, wait, step)
        self._waits_changed(publisher)
        return publisher

    def _unpark(self, publisher: Publisher, wait: asyncio.Future[Any]) -> None:
        self.publishers.unpark(publisher, wait)
        self._waits_changed(publisher)
        if not publisher.parked:
            self._warned = None

    def _judge(self) -> None:
        """A publisher has left, or begun to wait: can those who wait still be served?"""
        publishers = self.publishers
        if publishers.last_exit is not None:
            if self.waiting and self.unreachable:
                self._on_unreachable()
            return
        if self._warned == self.latest or not publishers.names or not publishers.all_waiting(self.latest.step):
            return  # nothing has happened since it was said, or there is nothing to say
        self._warned = self.latest
        logger.warning(
            "run %s: at step %d every registered publisher is itself waiting for a step: %s",
            self._run,
            self.latest.step,
            listed(self.publishers.names),
        )
