"""The gate: a ledger of admitted items, and a queue of the callers that wait for room."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from aiohooks._aio.clock import call_later, current_clock, wake
from aiohooks._aio.overlap import Wait
from aiohooks._aio.waits import WaitLog
from aiohooks._diagnostics import Awaited, Waiting
from aiohooks._validate import check_callable, check_instance
from aiohooks.errors import (
    AiohooksError,
    InvalidArgumentError,
    StepResetError,
    StepTimeoutError,
    add_note,
)
from aiohooks.stores import Position, StepStore
from aiohooks.stores._protocol import checked_step, checked_timeout
from aiohooks.stores._waiting import step_timeout_error
from aiohooks.stores.publishers import publisher_summary, shortened
from aiohooks.version_gate.tickets import AdmissionLedger, Ticket, logger, versions_between

Until = Callable[[Awaitable[Any]], Awaitable[Any]]
"""Awaits an awaitable, or ends with a stop, as `session.until` and `coord.until` do."""


class NotNeeded(Exception):
    """Ends a wait on a store that is not needed any more; a signal between waits, which no caller
    gets.
    """


class _Waiter:
    """One caller in the queue."""

    __slots__ = ("admitted", "checks_store", "expired", "future", "store_wait")

    def __init__(self) -> None:
        self.admitted = False
        self.expired = False
        self.checks_store = (
            False  # it was woken because the store has failed the wait of another one
        )
        self.future: asyncio.Future[None] | None = None
        self.store_wait: Wait[None] | None = None

    def wake(self) -> None:
        if self.store_wait is not None:
            self.store_wait.end(NotNeeded("the queue moves"))
        elif self.future is not None:
            wake(self.future)

    def expire(self) -> None:
        self.expired = True
        self.wake()


class AdmissionQueue(Waiting):
    """Callers that wait for room, in order. While there are any, one of them waits on the store or
    has been woken to do so.

    Each one waits for itself, so that a cancelled one leaves nothing behind, and each gets an error
    of its own.
    """

    __slots__ = (
        "_clock",
        "_ledger",
        "_listener",
        "_log",
        "_waiters",
        "max_waiting",
        "waited_secs",
        "waits",
    )

    def __init__(self, ledger: AdmissionLedger) -> None:
        self.waits: int = 0
        self.max_waiting: int = 0
        self.waited_secs: float = 0.0
        self._ledger = ledger
        self._clock = current_clock()
        self._waiters: dict[_Waiter, None] = {}
        self._listener: _Waiter | None = None
        self._log = WaitLog(logger, self._clock, self._describe_waits)
        ledger.on_room = self.admit_waiters

    def awaited_by(self, method: str, arguments: Mapping[str, Any]) -> Awaited | None:
        if method != "wait":
            return None
        versions = self._ledger.versions
        name = f"room in the version gate of {versions.run}"
        return Awaited(
            "gate",
            name,
            repr(self._ledger).strip("<>"),
            lambda: [versions.awaited_step(versions.latest.step + 1)],
            self,
        )

    def __len__(self) -> int:
        return len(self._waiters)

    def admit_waiters(self) -> None:
        """Admit waiters, the first ones first, while there is room."""
        while self._waiters and self._ledger.room > 0:
            self._ledger.entering += 1
            waiter = next(iter(self._waiters))
            del self._waiters[waiter]
            waiter.admitted = True
            waiter.wake()

    async def wait(self, secs: float | None, until: Until | None) -> None:
        """Wait at the end of the queue until admitted.

        Raises:
            StepTimeoutError: that took longer than `secs`.
        """
        since = self._clock.now()
        if secs == 0:
            raise self._timeout_error(since)
        waiter = _Waiter()
        self._waiters[waiter] = None
        self.waits += 1
        self.max_waiting = max(self.max_waiting, len(self._waiters))
        timer = call_later(secs, waiter.expire, self._clock)
        self._log.begin(waiter)
        try:
            admitted = self._wait_admitted(waiter, since)
            await (admitted if until is None else until(admitted))
        except BaseException:
            if waiter.admitted:
                self._ledger.return_place()
            raise
        finally:
            timer.cancel()
            self._log.end(waiter)
            self.waited_secs += self._clock.now() - since
            self._waiters.pop(waiter, None)
            if self._listener is None and self._waiters:
                next(iter(self._waiters)).wake()  # to wait on the store in its turn

    async def _wait_admitted(self, waiter: _Waiter, since: float) -> None:
        while not waiter.admitted:
            if waiter.expired:
                raise self._timeout_error(since)
            if self._listener is None:
                await self._wait_on_store(waiter)
            else:
                waiter.future = asyncio.get_running_loop().create_future()
                try:
                    await waiter.future
                finally:
                    waiter.future = None

    async def _wait_on_store(self, waiter: _Waiter) -> None:
        """Wait for the next version or the next reset, unless there is room already or `waiter` is
        woken.
        """
        self._ledger.sync()
        if waiter.admitted:
            return
        versions = self._ledger.versions
        self._listener, waiter.store_wait = (
            waiter,
            Wait(f"a wait in the version gate of {versions.run}"),
        )
        try:
            await waiter.store_wait.result_of(self._wait_for_change(versions.latest))
        except (StepResetError, NotNeeded):
            pass
        except AiohooksError as error:
            add_note(
                error, f"{len(self._waiters)} waited for room in the version gate of {versions.run}"
            )
            if not waiter.checks_store:  # else all have been woken already
                for other in self._waiters:  # each waits on the store, and gets an error of its own
                    other.checks_store = True
                    other.wake()
            raise
        finally:
            self._listener = waiter.store_wait = None
        self._ledger.sync()

    async def _wait_for_change(self, seen: Position) -> None:
        """Wait until the position of the versions is another one than `seen`."""
        versions = self._ledger.versions
        if (
            versions.latest == seen
        ):  # the position may have changed since, as a task may begin later than it was made
            await versions.wait_for(seen.step + 1, on_reset="raise")

    def _describe_waits(self) -> str:
        ledger = self._ledger
        wanted, summary = (
            ledger.versions.latest.step + 1,
            publisher_summary(ledger.versions.statistics().publishers),
        )
        admitted_by = tuple(dict.fromkeys(ticket.admitted_by for ticket in ledger.open.values()))
        holders = (
            f"; its open items were admitted by {shortened(admitted_by)}" if admitted_by else ""
        )
        gate = f"{repr(ledger)[:-1]}, {len(self)} waiting>"
        return f"{gate}: waiting for version {wanted} or a dropped item, {summary}{holders}"

    def _timeout_error(self, since: float) -> StepTimeoutError:
        versions, secs = self._ledger.versions, self._clock.now() - since
        seen, publishers = versions.latest.step, versions.statistics().publishers
        problem = (
            f"{self._ledger!r} has no room until version {seen + 1} is published or an item is"
            " dropped; not admitted"
        )
        error = step_timeout_error(
            problem, wanted=seen + 1, seen=seen, secs=secs, publishers=publishers
        )
        if publishers:
            from aiohooks._why.builder import why  # seldom needed

            if note := why(versions.awaited_step(seen + 1)):
                add_note(error, note)
        return error


class Admission:
    """The block of one item: `async with gate.admit() as ticket`. Made by `VersionGate.admit`."""

    __slots__ = ("_admit", "_ledger", "_ticket")

    def __init__(self, admit: Callable[[], Awaitable[Ticket]], ledger: AdmissionLedger) -> None:
        self._admit = admit
        self._ledger = ledger
        self._ticket: Ticket | None = None

    async def __aenter__(self) -> Ticket:
        if self._ticket is not None:
            raise InvalidArgumentError(
                f"the admission of {self._ticket!r} is entered again: call admit() for each item"
            )
        self._ticket = await self._admit()
        return self._ticket

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._ticket is not None:
            self._ledger.end_block(self._ticket, error)


@dataclass(frozen=True, slots=True)
class GateStatistics:
    """A snapshot of a gate; `admitted` is always `open` + `used` + `shipped` + `dropped`.

    Attributes:
        published: the latest version.
        room: how many items would be admitted now.
        open: how many are admitted and not settled.
        due: how many of these must be used before the next version is published, or will be stale.
        admitted: how many were admitted so far.
        used: how many were used.
        shipped: how many were shipped.
        dropped: how many were given up, for whatever reason.
        stale: those of them that were too old for `use`, or at the end of their block.
        invalidated: those of them that a reset of the versions ended.
        abandoned: those of them whose block an error or a cancellation left, or to whose ticket
            nothing refers any more.
        waiting: how many callers wait to be admitted.
        max_waiting: the most that have waited at the same time.
        waits: how many have had to wait so far.
        waited_secs: the sum of those waits that are over.
        lag_mean: the mean lag of the items that were used or shipped; 0 if there are none.
        lag_max: the highest lag of the items that were used or shipped.
    """

    published: Position
    room: int
    open: int
    due: int
    admitted: int
    used: int
    shipped: int
    dropped: int
    stale: int
    invalidated: int
    abandoned: int
    waiting: int
    max_waiting: int
    waits: int
    waited_secs: float
    lag_mean: float
    lag_max: int


class VersionGate:
    """Admits work only while it is at most `max_lag` versions ahead of the published one, and
    measures its age when it is used.

    The versions are a step store that a trainer advances, with whose weights the work is done. A
    gate belongs to one event loop and needs no session. It does not poll, and admits waiters in
    order.

    Where the trainer runs beside the gate, `use` each item in the step that publishes the next
    version. Where it runs elsewhere, let the item's block end when the item is sent: each version
    then counts as having used up `per_version` of them.
    """

    def __init__(self, versions: StepStore, *, max_lag: int, per_version: int = 1) -> None:
        """Open the gate at the latest version.

        Args:
            versions: counts the published versions; may be at any step.
            max_lag: how many versions may be published between the admission of an item and its
                use. With 0 only items that were made with the newest version are used.
            per_version: how many items one version uses up.
        """
        check_instance(versions, StepStore, "versions")
        self.max_lag: int = checked_step(max_lag, "max_lag")
        self.per_version: int = checked_step(per_version, "per_version", least=1)
        self.versions: StepStore = versions
        self._ledger = AdmissionLedger(versions, self.max_lag, self.per_version)
        self._queue = AdmissionQueue(self._ledger)

    def admit(self, *, timeout: float | None = None, until: Until | None = None) -> Admission:
        """Admit an item: `async with gate.admit() as ticket`. Suspends only while there is no room
        for it.

        Cancelling the wait leaves nothing behind.

        Args:
            timeout: the time limit of the wait in seconds. 0 does not wait, None sets no limit.
            until: `session.until` or `coord.until`: the wait also ends with a stop of the session
                or a failed task of it.

        Raises:
            StepTimeoutError: there was no room in time.
            PublisherFinishedError: no publisher is left, the last one finished. A clean end of a
                session.
            PublisherFailedError: no publisher is left, the last one failed; caused by its error.
            StoreClosedError: the store of the versions was closed.
            InvalidArgumentError: an argument is invalid.
        """
        secs = checked_timeout(timeout)
        check_callable(until, "until", optional=True)
        return Admission(lambda: self._admit(secs, until), self._ledger)

    async def _admit(self, secs: float | None, until: Until | None) -> Ticket:
        ledger = self._ledger
        ledger.enter()
        if len(self._queue) or ledger.room <= 0:
            await self._queue.wait(secs, until)
            ledger.sync()
            ledger.entering -= 1
        return ledger.issue_ticket()

    @property
    def due(self) -> int:
        """How many open items must be used before the next version is published, or will be stale.

        A trainer that continues to take items until this is 0 never drops one for its age.
        """
        return self._ledger.due

    def lag_of(self, position: Position) -> int:
        """Return how many versions were published since `position`, as far as this process knows.

        For items of another process, which come with the position of their ticket:
        `gate.lag_of(position) <= gate.max_lag`.

        Returns:
            `2**53 - 1` if the versions were reset since.
        """
        return versions_between(Position(*position), self.versions.latest)

    def statistics(self) -> GateStatistics:
        """Return a snapshot of the gate; outside its event loop, one as of the last use there."""
        ledger = self._ledger
        if ledger.is_own_loop():
            ledger.sync()
        ends = ledger.ends
        good = ends["used"] + ends["shipped"]
        return GateStatistics(
            published=self.versions.latest,
            room=max(0, ledger.room),
            open=len(ledger.open),
            due=ledger.due,
            admitted=ledger.admitted,
            used=ends["used"],
            shipped=ends["shipped"],
            dropped=sum(ends.values()) - good,
            stale=ends["stale"],
            invalidated=ends["invalidated"],
            abandoned=ends["abandoned"],
            waiting=len(self._queue),
            max_waiting=self._queue.max_waiting,
            waits=self._queue.waits,
            waited_secs=self._queue.waited_secs,
            lag_mean=ledger.lag_sum / good if good else 0.0,
            lag_max=ledger.lag_max,
        )

    def __repr__(self) -> str:
        waiting = f", {len(self._queue)} waiting" if len(self._queue) else ""
        return f"{repr(self._ledger)[:-1]}{waiting}>"
