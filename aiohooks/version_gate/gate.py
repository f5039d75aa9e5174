"""The gate, with the callers that wait for room in its ledger of admitted items."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohooks._core.activity import Awaited, active
from aiohooks._core.calls import Wait
from aiohooks._core.clock import call_later, current_clock
from aiohooks._core.reports import WaitLog
from aiohooks._core.validate import check_callable, check_instance, check_secs
from aiohooks.errors import (
    AiohooksError,
    InvalidArgumentError,
    StepResetError,
    StepTimeoutError,
    add_note,
)
from aiohooks.stores import Position, StepStore
from aiohooks.stores._protocol import checked_step
from aiohooks.stores.base import step_timeout_error
from aiohooks.stores.publishers import publisher_summary, shortened
from aiohooks.version_gate.tickets import AdmissionLedger, Ticket, logger, versions_between

# A function that awaits an awaitable until a stop: `session.until` or `coord.until`.
Until = Callable[[Awaitable[Any]], Awaitable[Any]]


class _RoomFreedError(Exception):
    """Ends the first waiter's wait for a version. It is a signal, and no caller gets it."""


class _Waiter(Wait[None]):
    """The wait of a caller in the queue."""

    admitted = False


class Admission:
    """The block of one item: `async with gate.admit() as ticket`.

    `VersionGate.admit` creates it.
    """

    def __init__(
        self,
        ledger: AdmissionLedger,
        admit: Callable[[], Awaitable[Ticket]],
    ) -> None:
        self._ledger = ledger
        self._admit = admit
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
        kind: object,
        error: BaseException | None,
        traceback: object,
    ) -> None:
        if self._ticket is not None:
            self._ledger.end_block(self._ticket, error)


@dataclass(frozen=True, slots=True)
class GateStatistics:
    """A snapshot of a gate. `admitted` is always `open` + `used` + `shipped` + `dropped`.

    Attributes:
        published: the latest version.
        room: how many items would be admitted now.
        open: how many are admitted and not settled.
        due: how many open items will be stale once the next version is published.
        admitted: how many were admitted so far.
        used: how many were used.
        shipped: how many were shipped.
        dropped: how many were given up, for any reason.
        stale: dropped items that were too old for `use`, or at the end of their block.
        invalidated: dropped items that a reset of the versions ended.
        abandoned: dropped items whose block an error or a cancellation left, or to whose ticket
            nothing refers any more.
        waiting: how many callers wait to be admitted.
        waits: how many callers have had to wait so far.
        waited_secs: the total duration of the waits that have ended.
        lag_mean: the mean lag of the items that were used or shipped, 0 if there are none.
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
    waits: int
    waited_secs: float
    lag_mean: float
    lag_max: int


class VersionGate:
    """Admits work only while it is at most `max_lag` versions ahead of the published version.

    The gate measures the age of the work when it is used. The versions are the steps of a step
    store. A trainer advances the store, and the work is done with its weights. A gate belongs to
    one event loop and needs no session. It does not poll, and admits waiters in order.

    If the trainer runs in the same process, `use` each item in the step that publishes the next
    version. If it runs elsewhere, let the item's block end when the item is sent: the gate then
    assumes that each version uses up `per_version` sent items.
    """

    def __init__(self, versions: StepStore, *, max_lag: int, per_version: int = 1) -> None:
        """Open the gate at the latest version.

        Args:
            versions: the step store whose step is the number of the published version. It need not
                be at step 0.
            max_lag: how many versions may be published between the admission of an item and its
                use. With 0, only items that were made with the newest version are used.
            per_version: how many items the trainer uses to make one version. It is the number of
                items for which each published version makes room.
        """
        check_instance(versions, StepStore, "versions")
        self.max_lag: int = checked_step(max_lag, "max_lag")
        self.per_version: int = checked_step(per_version, "per_version", least=1)
        self.versions: StepStore = versions
        self._ledger = AdmissionLedger(
            versions,
            self.max_lag,
            self.per_version,
            on_room=self._end_wait_for_room,
        )
        self._waiters: dict[_Waiter, None] = {}
        self._wait_count = 0
        self._waited_secs = 0.0
        # Its waiters get it in the order in which they came.
        self._turn = asyncio.Lock()
        self._room: Wait[None] | None = None  # the first waiter's wait for room
        self._clock = current_clock()
        self._log = WaitLog(60.0, self._log_long_wait)

    def admit(self, *, timeout: float | None = None, until: Until | None = None) -> Admission:
        """Admit an item: `async with gate.admit() as ticket`.

        Entering the block suspends only while there is no room for the item. Cancelling the wait
        leaves nothing behind.

        Args:
            timeout: the time limit of the wait in seconds. 0 means not to wait, None sets no limit.
            until: `session.until` or `coord.until`. With it, the wait also ends when the session
                stops or one of its tasks fails.

        Raises:
            StepTimeoutError: there was no room in time.
            PublisherFinishedError: the last publisher has finished. This ends a session cleanly.
            PublisherFailedError: the last publisher has failed. Its error is the cause.
            StoreClosedError: the store of the versions was closed.
            InvalidArgumentError: an argument is invalid.
        """
        check_secs(timeout, "timeout", optional=True)
        check_callable(until, "until", optional=True)
        return Admission(self._ledger, functools.partial(self._admit, timeout, until))

    def admit_nowait(self) -> Ticket | None:
        """Admit an item if there is room now. Return its ticket, or None.

        The item has no block: call `use`, `ship` or `drop` on its ticket.
        """
        self._ledger.check_loop_and_sync()
        if self._waiters or self._ledger.room <= 0:
            return None
        return self._ledger.issue_ticket()

    @property
    def due(self) -> int:
        """How many open items will be stale once the next version is published.

        A trainer that uses items until this is 0 never drops an item because of its age.
        """
        return self._ledger.due

    def lag_of(self, position: Position) -> int:
        """Return how many versions were published after `position`, as far as this process knows.

        Use it for an item of another process that comes with the position of its ticket:
        `gate.lag_of(position) <= gate.max_lag`.

        Returns:
            The number of versions, or `2**53 - 1` if the versions were reset after `position`.
        """
        return versions_between(Position(*position), self.versions.latest)

    def statistics(self) -> GateStatistics:
        """Return a snapshot of the gate.

        Outside the gate's event loop, the snapshot shows the gate as of its last use in the loop.
        """
        ledger = self._ledger
        if ledger.is_own_loop():
            ledger.sync()
        ends = ledger.ends
        used_or_shipped = ends["used"] + ends["shipped"]
        return GateStatistics(
            published=self.versions.latest,
            room=max(0, ledger.room),
            open=len(ledger.open),
            due=ledger.due,
            admitted=ledger.admitted,
            used=ends["used"],
            shipped=ends["shipped"],
            dropped=ends.total() - used_or_shipped,
            stale=ends["stale"],
            invalidated=ends["invalidated"],
            abandoned=ends["abandoned"],
            waiting=len(self._waiters),
            waits=self._wait_count,
            waited_secs=self._waited_secs,
            lag_mean=ledger.lag_sum / max(1, used_or_shipped),
            lag_max=ledger.lag_max,
        )

    # The callers that wait for room, in order. The first one waits for the next version or a freed
    # place, and the others for their turn. Each waits in its own task, so that a cancelled caller
    # leaves nothing behind, and gets its own error.

    @property
    def _name(self) -> str:
        return f"room in the version gate of {self.versions.run}"

    def _awaited(self) -> Awaited:
        versions = self.versions
        return Awaited(
            "gate",
            self._name,
            repr(self._ledger).strip("<>"),
            lambda: [versions.awaited_step(versions.latest.step + 1)],
            self,
        )

    def _end_wait_for_room(self) -> None:
        if self._room is not None and self._ledger.room > 0:
            self._room.end(_RoomFreedError())

    async def _admit(self, secs: float | None, until: Until | None) -> Ticket:
        """Return the ticket of an item, once there is room for it and for all earlier callers."""
        ticket = self.admit_nowait()
        if ticket is None:
            await self._wait(secs, until)
            self._ledger.sync()
            # The ledger has kept a place for this caller since its admission. The ticket takes it.
            self._ledger.entering -= 1
            ticket = self._ledger.issue_ticket()
        return ticket

    async def _wait(self, secs: float | None, until: Until | None) -> None:
        """Wait at the end of the queue until admitted. Call this only if there is no room.

        If `until` is given, such as `session.until`, it awaits the wait and can end it early.

        Raises:
            StepTimeoutError: the caller was not admitted within `secs`.
        """
        begin_secs = self._clock.now()
        if secs == 0:
            raise self._timeout_error(begin_secs)
        waiter = _Waiter(self._name)
        self._waiters[waiter] = None
        self._wait_count += 1
        timer = call_later(secs, lambda: self._expire(waiter, begin_secs), self._clock)
        self._log.begin(waiter)

        async def admission() -> None:
            await waiter.result_of(self._wait_for_turn(waiter))

        try:
            with active("wait", self._name, self._awaited):
                if until is None:
                    await admission()
                else:
                    await until(admission())
        except BaseException:
            # The caller may have been admitted and cancelled in the same iteration of the event
            # loop. It does not use its place, so another caller gets it.
            if waiter.admitted:
                self._ledger.return_place()
            raise
        finally:
            timer.cancel()
            self._log.end(waiter)
            self._waited_secs += self._clock.now() - begin_secs
            self._waiters.pop(waiter, None)

    def _expire(self, waiter: _Waiter, begin_secs: float) -> None:
        # A version that comes in the same iteration of the event loop still admits.
        self._ledger.sync()
        is_next = waiter is next(iter(self._waiters), None)
        if not is_next or self._ledger.room <= 0:
            waiter.end(self._timeout_error(begin_secs))

    async def _wait_for_turn(self, waiter: _Waiter) -> None:
        """Wait for the turn of a caller, and then for room."""
        async with self._turn:
            self._ledger.sync()
            while self._ledger.room <= 0:
                await self._wait_for_room()
                self._ledger.sync()
            self._ledger.entering += 1
            waiter.admitted = True
            del self._waiters[waiter]

    async def _wait_for_room(self) -> None:
        """Wait for the next version or reset, or until there is room."""
        versions = self.versions
        position = versions.latest

        async def wait_for_change() -> None:
            # The position may have changed between the creation of this task and its start.
            if versions.latest == position:
                await versions.wait_for(position.step + 1, on_reset="raise")

        # `_end_wait_for_room` ends it when a place becomes free.
        self._room = Wait(self._name)
        try:
            await self._room.result_of(wait_for_change())
        except (StepResetError, _RoomFreedError):
            pass
        except AiohooksError as error:
            add_note(
                error, f"{len(self._waiters)} waited for room in the version gate of {versions.run}"
            )
            raise
        finally:
            self._room = None

    def _log_long_wait(self, secs: float) -> None:
        """Log the waits, of which the oldest has lasted for `secs`."""
        versions = self.versions
        publishers = publisher_summary(versions.statistics().publishers)
        text = (
            f"{self!r}: waiting for version {versions.latest.step + 1} or a dropped item,"
            f" {publishers}"
        )
        # A dict, because it keeps the order and drops repeated names.
        holders = dict.fromkeys(ticket.admitted_by for ticket in self._ledger.open.values())
        if holders:
            text += f"; its open items were admitted by {shortened(tuple(holders))}"
        logger.info("%s, for %.0f s now", text, secs)

    def _timeout_error(self, begin_secs: float) -> StepTimeoutError:
        """Return the error of a wait that began at `begin_secs`."""
        versions = self.versions
        publishers = versions.statistics().publishers
        step = versions.latest.step
        return step_timeout_error(
            f"{self._ledger!r} has no room until version {step + 1} is published or an item is"
            " dropped; not admitted",
            wanted=step + 1,
            seen=step,
            secs=self._clock.now() - begin_secs,
            publishers=publishers,
        )

    def __repr__(self) -> str:
        waiting = f", {len(self._waiters)} waiting" if self._waiters else ""
        return f"{repr(self._ledger)[:-1]}{waiting}>"
