"""The waiting room of a store: everybody who waits for a step or for a change, and how their waits end."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohooks._clock import Clock
from aiohooks._errors import (
    AiohooksError,
    PublisherFailedError,
    PublisherFinishedError,
    StepResetError,
    StepTimeoutError,
    StoreClosedError,
)
from aiohooks.stores._changes import Watch
from aiohooks.stores._mark import Mark
from aiohooks.stores._progress import ProgressLog, Waiting, logger
from aiohooks.stores._publishers import Publisher, Publishers, current_publisher, listed
from aiohooks.stores._waiters import NOBODY, Waiter, Waiters


@dataclass(frozen=True, slots=True)
class _End:
    """Why waits end badly."""

    kind: type[AiohooksError]
    message: str
    cause: BaseException | None = None

    def error(self, wanted: int | None) -> AiohooksError:
        """One for each wait: an error that is raised twice would collect both tracebacks."""
        error = self.kind(self.message if wanted is None else f"{self.message}, wanted {wanted}")
        error.__cause__ = self.cause
        return error


class WaitingRoom:
    """Knows the latest mark, who waits and who publishes; ends each wait once.

    Nothing here calls foreign code: ending a wait only makes its task runnable.
    """

    __slots__ = (
        "_arm",
        "_clock",
        "_failure",
        "_progress",
        "_run",
        "_strict",
        "_warned",
        "closed",
        "due",
        "latest",
        "max_waiting",
        "publishers",
        "waiters",
        "waits",
        "watches",
    )

    def __init__(self, run: str, mark: Mark, clock: Clock, arm: Callable[[int | None], None]) -> None:
        """`arm` is told whenever `due` has changed: None when nobody waits."""
        self.latest = mark
        self.due = NOBODY
        """The lowest step at which somebody is to be told: the lowest threshold; 0 while a change is waited for."""
        self.closed = False
        self.waiters = Waiters()
        self.watches: dict[Watch, None] = {}
        self.publishers = Publishers()
        self.waits = 0
        self.max_waiting = 0
        self._run = run
        self._clock = clock
        self._arm = arm
        self._strict: dict[Waiter, None] = {}  # those that a reset is to end
        self._failure: tuple[BaseException, Mark] | None = None
        self._warned: Mark | None = None
        self._progress = ProgressLog(clock, self._describe)

    # Waiting.

    async def wait(self, step: int, secs: float | None, strict: bool) -> int:
        """Waits for a step that is not reached yet, and returns the one seen."""
        if (end := self._end()) is not None:
            raise end.error(step)
        if secs == 0:
            raise self._late(step, 0.0)
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self.waiters.park(step, waiter)
        self.waits += 1
        if self.waiters.count > self.max_waiting:
            self.max_waiting = self.waiters.count
        if strict:
            self._strict[waiter] = None
        publisher = self._parked_by(waiter)
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

    async def next_mark(self, seen: Mark | None, own: dict[Watch, None]) -> Mark:
        """The latest mark, as soon as it is another than `seen`; `own` holds the wait meanwhile."""
        if self.latest != seen:
            return self.latest
        if (end := self._end()) is not None:
            raise end.error(None)
        watch: Watch = asyncio.get_running_loop().create_future()
        self.watches[watch] = own[watch] = None
        publisher = self._parked_by(watch)
        try:
            self._settle()
            if publisher is not None:
                self._judge()
            error = await watch
        finally:
            if publisher is not None:
                self._unpark(publisher, watch)
            del own[watch]
            if watch in self.watches:
                del self.watches[watch]
                self._settle()
        if error is not None:
            raise error
        return self.latest

    # News.

    def observe(self, mark: Mark) -> None:
        """Takes note of a mark, and wakes who waited for it; older news is dropped."""
        old = self.latest
        if mark <= old:
            return
        self.latest = mark
        if mark.step >= self.due:
            self.wake()
        if mark.epoch != old.epoch:
            message = f"{self._run} was reset from step {old.step} to step {mark.step}"
            for waiter in self._strict:
                if not waiter.done():
                    waiter.set_result(StepResetError(message, old=old, new=mark))

    def wake(self) -> None:
        """Ends the waits that the latest mark answers."""
        for watch in self.watches:
            if not watch.done():
                watch.set_result(None)
        self.watches.clear()
        self.waiters.wake(self.latest.step)
        self._settle()

    def join(self, publisher: Publisher) -> None:
        """Takes note of one more publisher."""
        self.publishers.join(publisher)
        self._failure = None

    def leave(self, publisher: Publisher, exc: BaseException | None) -> None:
        """Takes note of a publisher's departure."""
        self.publishers.leave(publisher, self.latest.step, exc)
        self._judge()

    def fail(self, exc: BaseException) -> None:
        """Ends all waits, also those that begin before anything new happens."""
        self._failure = exc, self.latest
        self._end_now()

    def close(self) -> None:
        """Ends all waits for good."""
        self.closed = True
        self._end_now()

    # How waits end.

    def _end(self) -> _End | None:
        """Why no wait can end well now, if so."""
        if self.closed:
            return _End(StoreClosedError, f"the step store {self._run} was closed")
        if self._failure is not None:
            cause, mark = self._failure
            if mark == self.latest:
                return _End(PublisherFailedError, f"the publisher of {self._run} failed at step {mark.step}", cause)
        departure = self.publishers.departure
        if departure is None or not self.publishers.all_waiting():
            return None
        if departure.error is None:
            return _End(PublisherFinishedError, f"{departure.name} finished at step {departure.step}")
        return _End(PublisherFailedError, f"{departure.name} failed at step {departure.step}", departure.error)

    def _end_now(self) -> None:
        """Ends all waits, if none can end well."""
        if (end := self._end()) is None:
            return
        for watch in self.watches:
            if not watch.done():
                watch.set_result(end.error(None))
        self.watches.clear()
        for step, waiter in self.waiters.take_all():
            if not waiter.done():
                waiter.set_result(end.error(step))
        self._settle()

    def _expire(self, step: int, waiter: Waiter, since: float) -> None:
        if not waiter.done():
            waiter.set_result(self._late(step, self._clock.now() - since))

    def _late(self, step: int, secs: float) -> StepTimeoutError:
        return StepTimeoutError(
            f"step {step} of {self._run} was not reached in {secs:g} s: seen step {self.latest.step},"
            f" published by {listed(self.publishers.names)}",
            wanted=step,
            seen=self.latest.step,
            waited_secs=secs,
        )

    def _settle(self) -> None:
        """After somebody has come or gone."""
        due = 0 if self.watches else self.waiters.lowest
        if due != self.due:
            self.due = due
            self._arm(None if due == NOBODY else due)
        self._progress.keep(self.waiters.count > 0, self.latest)

    def _describe(self) -> Waiting:
        waiters = self.waiters
        return Waiting(self._run, waiters.lowest, waiters.count, self.latest, listed(self.publishers.names))

    # Publishers' own waits.

    def _parked_by(self, wait: asyncio.Future[Any]) -> Publisher | None:
        publisher = current_publisher()
        if publisher is None or publisher not in self.publishers:
            return None
        self.publishers.park(publisher, wait)
        return publisher

    def _unpark(self, publisher: Publisher, wait: asyncio.Future[Any]) -> None:
        self.publishers.unpark(publisher, wait)
        if not publisher.parked:
            self._warned = None

    def _judge(self) -> None:
        """A publisher has left, or begun to wait: can those who wait still be served?"""
        if self.publishers.departure is not None:
            self._end_now()
            return
        if self._warned == self.latest or not self.publishers.all_waiting():
            return  # nothing has happened since it was said, or there is nothing to say
        self._warned = self.latest
        logger.warning(
            "run %s: at step %d every registered publisher is itself waiting for a step: %s",
            self._run,
            self.latest.step,
            listed(self.publishers.names),
        )
