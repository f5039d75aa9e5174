"""Version gates: work is admitted and used only while it is a few versions old.

Work is admitted only a few versions ahead of the published version:

    item 0   item 1 | item 2   item 3 | item 4   item 5 |
    version 0 -> 1  | version 1 -> 2  | version 2 -> 3  |
    not ahead         1 ahead           2 ahead

Here `per_version=2`: each version uses up two items. And `max_lag=1`: an item may be 1 version
ahead, so items 4 and 5 wait until version 1 is published.

This count bounds the lag only of items that are used in the order of their admission. If items
overtake each other, the ticket decides: it counts the versions published after the admission, and
`use` rejects stale items.

    Ticket         an admitted item; the ledger counts them
    VersionGate    admits items, and has the waiting callers

A gate needs a step store and no session.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from aiohooks._core.activity import Awaited, WaitLog, active
from aiohooks._core.calls import Wait
from aiohooks._core.clock import call_later, current_clock
from aiohooks._core.validate import check_callable, check_instance, check_secs
from aiohooks._core.waits import current_task, running_loop
from aiohooks.errors import (
    AiohooksError,
    InvalidArgumentError,
    StepResetError,
    StepTimeoutError,
    WrongLoopError,
    add_note,
)
from aiohooks.stores import Position, StepStore
from aiohooks.stores._protocol import MAX_STEP, checked_step
from aiohooks.stores.base import step_timeout_error
from aiohooks.stores.publishers import publisher_summary, shortened

__all__ = ["Admission", "GateStatistics", "Ticket", "TicketState", "VersionGate"]

logger: logging.Logger = logging.getLogger("aiohooks.version_gate")

TicketState = Literal["open", "used", "shipped", "dropped", "stale", "invalidated", "abandoned"]
"""The state of a ticket. See `Ticket.state`."""


class Ticket:
    """The ticket of an admitted item: how old the item is, and whether it may be used.

    It is returned by entering `VersionGate.admit`. A ticket is settled once: by `use`, by `drop`,
    or by the end of its block. An error or a cancellation that leaves the block abandons the item.
    A block that ends normally ships the item, which is then used elsewhere, for one of the next
    versions. After `hand_off` a normal end has no effect, and the owner of the ticket must call
    `use` or `drop`. Keep the ticket with the item: a ticket that is garbage-collected while it is
    open abandons its item.

    Attributes:
        number: how many items had been admitted before this one.
        position: the published position at the admission of the item. Send it to another process
            with the item, for `VersionGate.lag_of`.
        step: the version that will be the latest one when the item is used, if all items are used
            in order. It is at most `max_lag` above `version`.
        admitted_by: the name of the task that admitted the item.
        state: "open" until the ticket is settled. Then "used" or "shipped" if the item was in time,
            "dropped" if it was given up, and "stale" if it was too old for `use`, or at the end of
            its block. The state is "invalidated" after a reset of the versions, and "abandoned" if
            an error left the block or the ticket was collected.
        settled_at: the published position when the ticket was settled, or None while it is open.
        handed_off: whether `hand_off` was called.
    """

    __slots__ = (
        "__weakref__",
        "_ledger",
        "admitted_by",
        "handed_off",
        "number",
        "position",
        "settled_at",
        "state",
        "step",
    )

    def __init__(self, ledger: AdmissionLedger, step: int) -> None:
        """Make the ticket of the next item of the ledger. `step` is the attribute of this name."""
        self.number: int = ledger.admitted
        self.position: Position = ledger.position
        self.step: int = step
        self.admitted_by: str = current_task().get_name()
        self.state: TicketState = "open"
        self.settled_at: Position | None = None
        self.handed_off: bool = False
        self._ledger = ledger

    @property
    def version(self) -> int:
        """The published version at the admission of the item.

        The work uses this version if it reads the weights before any `await`.
        """
        return self.position.step

    @property
    def lag(self) -> int:
        """How many versions were published between the admission and the settling of the ticket.

        For an open ticket, versions up to now count. If the versions were reset, the lag is
        `2**53 - 1`, which is more than any bound.
        """
        return versions_between(self.position, self.settled_at or self._ledger.versions.latest)

    def use(self) -> bool:
        """Use the item for the version that is published next.

        Call this immediately before the step that uses the item.

        Returns:
            Whether the item may be used. It may not if it is stale, invalidated, dropped or
            abandoned.

        Raises:
            InvalidArgumentError: the item was used or shipped already.
        """
        self._ledger.check_loop_and_sync()
        if self.state == "open":
            return self._ledger.use_or_ship(self, "used")
        self._check_not_used()
        return False

    def drop(self) -> None:
        """Give up the item, which frees its place. Do nothing if the item was given up already.

        Raises:
            InvalidArgumentError: the item was used or shipped already.
        """
        self._ledger.check_loop_and_sync()
        if self.state == "open":
            self._ledger.settle_ticket(self.number, "dropped")
        self._check_not_used()

    def ship(self) -> None:
        """Ship the item, as the normal end of its block does. Do nothing if it was settled."""
        self._ledger.check_loop_and_sync()
        if self.state == "open":
            self._ledger.use_or_ship(self, "shipped")

    def hand_off(self) -> Ticket:
        """Keep the ticket open when its block ends normally, and return the ticket.

        Use this, for example, to put the ticket into a queue with the item.
        """
        self.handed_off = True
        return self

    def _check_not_used(self) -> None:
        """Raise if the ticket was settled as used or shipped."""
        if self.state == "used":
            raise InvalidArgumentError(f"{self!r} was used already: one item, one use")
        if self.state == "shipped":
            raise InvalidArgumentError(
                f"{self!r} was shipped already: its block has ended. To keep it open, call"
                " hand_off() inside the block"
            )

    def __del__(self) -> None:
        # A ticket whose `__init__` has failed has no state, but is collected as well.
        if getattr(self, "state", None) == "open":
            self._ledger.lose_ticket(self.number)

    def __repr__(self) -> str:
        return f"<Ticket {self.number} of version {self.version}, {self.state}, lag {self.lag}>"


def versions_between(old: Position, new: Position) -> int:
    """Return how many versions were published between two positions.

    Return 0 if `new` is not newer, and `MAX_STEP` if the versions were reset between them.
    """
    if old >= new:
        return 0
    if old.epoch != new.epoch:
        return MAX_STEP
    return new.step - old.step


class OpenTicket(NamedTuple):
    """The entry of an open ticket in the ledger. It does not keep the ticket alive."""

    ref: weakref.ref[Ticket]
    version: int
    admitted_by: str


class AdmissionLedger:
    """The record of a gate: the open tickets, and how many items were admitted, used and dropped.

    The counts are those at the last `sync`. Call `sync` before you read them.
    """

    def __init__(
        self, versions: StepStore, max_lag: int, per_version: int, on_room: Callable[[], None]
    ) -> None:
        """Start with no items. The ledger calls `on_room` whenever there may be more room."""
        self.versions: StepStore = versions
        self.max_lag: int = max_lag
        self.per_version: int = per_version
        self.position: Position = versions.latest
        # The open tickets by their numbers, the oldest first.
        self.open: dict[int, OpenTicket] = {}
        # The number of waiters that were admitted and do not have their tickets yet.
        self.entering: int = 0
        # The number of shipped items that no version has used up yet.
        self.shipped_ahead: int = 0
        self.admitted: int = 0
        # The number of tickets that were settled in each state.
        self.ends: Counter[TicketState] = Counter()
        self.lag_sum: int = 0
        self.lag_max: int = 0
        self._on_room = on_room
        # The number of items that were used for the version that is published next.
        self._used_ahead = 0
        self._open_by_version: Counter[int] = Counter()
        self._loss_was_logged = False
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def room(self) -> int:
        """How many items may be admitted now."""
        places = (self.max_lag + 1) * self.per_version
        return places - len(self.open) - self.entering - self.reserved

    @property
    def reserved(self) -> int:
        """How many places settled items occupy until a version has used them up."""
        # A version frees at most `per_version` places, even if more items were used for it.
        return self.shipped_ahead + min(self._used_ahead, self.per_version)

    @property
    def due(self) -> int:
        """How many open items will be stale once the next version is published."""
        latest = self.versions.latest
        # After a reset, the next `sync` will invalidate all items.
        if latest.epoch != self.position.epoch:
            return 0
        # The items of this version have the highest lag now that is not stale.
        return self._open_by_version[latest.step - self.max_lag]

    def return_place(self) -> None:
        """Free the place of a waiter that was admitted, and then ended with an error."""
        self.entering -= 1
        self._on_room()

    def issue_ticket(self) -> Ticket:
        """Return the ticket of an item that is admitted now."""
        # The earlier items that are not used up yet suffice for this number of versions.
        ahead = (len(self.open) + self.reserved) // self.per_version
        ticket = Ticket(self, self.position.step + ahead)
        self.open[ticket.number] = OpenTicket(
            weakref.ref(ticket), ticket.version, ticket.admitted_by
        )
        self._open_by_version[ticket.version] += 1
        self.admitted += 1
        return ticket

    def sync(self) -> None:
        """Count the versions published after the last call. After a reset, invalidate tickets."""
        old = self.position
        self.position = self.versions.latest
        if self.position == old:
            return
        # Items that were used for the previous version do not count for the next one.
        self._used_ahead = 0
        if self.position.epoch == old.epoch:
            # Each published version has used up its share of the items that were sent.
            used_up = (self.position.step - old.step) * self.per_version
            self.shipped_ahead = max(0, self.shipped_ahead - used_up)
        else:  # a new epoch begins with a reset
            self.shipped_ahead = 0
            # Iterate over a copy, because settling a ticket removes it.
            for number in tuple(self.open):
                self.settle_ticket(number, "invalidated")
        self._on_room()

    def use_or_ship(self, ticket: Ticket, state: TicketState) -> bool:
        """Settle an open ticket as `state`, "used" or "shipped", or as stale if it is too old.

        Returns:
            Whether the item was in time.
        """
        lag = ticket.lag
        if lag > self.max_lag:
            self.settle_ticket(ticket.number, "stale")
            return False
        self.lag_sum += lag
        self.lag_max = max(self.lag_max, lag)
        # Count the item before its ticket is settled. Settling admits waiters, and one of them
        # would otherwise get the place of this item.
        if state == "used":
            self._used_ahead += 1
        else:
            self.shipped_ahead += 1
        self.settle_ticket(ticket.number, state)
        return True

    def settle_ticket(self, number: int, state: TicketState) -> None:
        """Settle an open ticket, even if the ticket itself was collected."""
        entry = self.open.pop(number)
        ticket = entry.ref()
        if ticket is not None:
            ticket.settled_at = self.position
            ticket.state = state
        # Remove versions without open tickets, or the counter would grow with every version.
        self._open_by_version[entry.version] -= 1
        if not self._open_by_version[entry.version]:
            del self._open_by_version[entry.version]
        self.ends[state] += 1
        self._on_room()

    def end_block(self, ticket: Ticket, error: BaseException | None) -> None:
        """Settle the ticket of a block that has ended, if it is still open."""
        if error is None and ticket.handed_off:
            return
        self.sync()
        if ticket.state != "open":
            return
        if error is None:
            self.use_or_ship(ticket, "shipped")
        else:
            self.settle_ticket(ticket.number, "abandoned")

    def lose_ticket(self, number: int) -> None:
        """Abandon the item of an open ticket that was garbage-collected, later in the loop."""
        assert self._loop is not None, "the ledger has admitted the item in its loop"
        # The garbage collector calls this in any thread and between any two lines, so do not change
        # the ledger here. A closed loop raises RuntimeError: then the gate is not used any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._abandon_lost, number)

    def _abandon_lost(self, number: int) -> None:
        """Abandon the item of a collected ticket, and log the first loss."""
        self.sync()
        lost = self.open.get(number)
        if lost is None:  # a reset has invalidated the ticket before
            return
        if not self._loss_was_logged:
            self._loss_was_logged = True
            logger.warning(
                "%r: item %d, admitted by task %r, is abandoned because nothing refers to its"
                " ticket any more. Call use() or drop() on each ticket. Later losses are only"
                " counted, not logged",
                self,
                number,
                lost.admitted_by,
            )
        self.settle_ticket(number, "abandoned")

    def is_own_loop(self) -> bool:
        """Return whether the running event loop is the ledger's own."""
        return self._loop is not None and running_loop() is self._loop

    def check_loop_and_sync(self) -> None:
        """Check that the loop of the first call is running, and `sync`.

        Raises:
            WrongLoopError: no event loop is running, or another one than at the first call.
        """
        if self._loop is None:
            self._loop = running_loop()
        if self._loop is None:
            raise WrongLoopError(f"{self!r} is used where no event loop is running")
        if not self.is_own_loop():
            raise WrongLoopError(f"{self!r} is used in another thread or event loop than its own")
        self.sync()

    def __repr__(self) -> str:
        run = self.versions.run
        step = self.versions.latest.step
        shipped = f", {self.shipped_ahead} shipped" if self.shipped_ahead else ""
        return (
            f"<version gate of {run!r} at version {step}, max_lag {self.max_lag}, {len(self.open)}"
            f" open{shipped}>"
        )


# A function that awaits an awaitable until a stop: `session.until` or `coord.until`.
Until = Callable[[Awaitable[Any]], Awaitable[Any]]


class _RoomFreedError(Exception):
    """Ends the first waiter's wait for a version. It is only a signal, which no caller gets."""


class _Waiter(Wait[None]):
    """The wait of a caller in the queue."""

    admitted = False
    """Whether the caller was admitted: the ledger keeps a place for it until it has its ticket."""


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
        # The caller that has the lock waits for room. The lock's waiters get it in order.
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
        # Only the loop of the gate may change the ledger.
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
            # These include the stale, invalidated and abandoned items.
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

    # The callers that wait for room, in order. The first caller waits for the next version or a
    # freed place, and the other callers wait for their turn. Each waits in its own task, so that
    # each gets its own error, and a cancelled caller leaves nothing behind.

    @property
    def _name(self) -> str:
        return f"room in the version gate of {self.versions.run}"

    def _awaited(self) -> Awaited:
        """Describe a wait for room, for reports such as `why`."""
        versions = self.versions
        return Awaited(
            "gate",
            self._name,
            repr(self._ledger).strip("<>"),
            by=lambda: [versions.awaited_step(versions.latest.step + 1)],
            key=self,
        )

    def _end_wait_for_room(self) -> None:
        """Let the first waiter continue if there is room. The ledger calls this."""
        if self._room is not None and self._ledger.room > 0:
            self._room.end(_RoomFreedError())

    async def _admit(self, secs: float | None, until: Until | None) -> Ticket:
        """Return the ticket of an item, once there is room for it and for all earlier callers."""
        ticket = self.admit_nowait()
        if ticket is None:
            await self._wait(secs, until)
            self._ledger.sync()
            # The ledger has kept a place for this caller, which the ticket takes now.
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
        """End the wait of a caller whose time is up, unless it is about to be admitted."""
        # A version may have been published in the same iteration of the event loop. If there is
        # room now, the first waiter is about to be admitted.
        self._ledger.sync()
        is_first = waiter is next(iter(self._waiters), None)
        if not is_first or self._ledger.room <= 0:
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

        # `_end_wait_for_room` ends this wait when a place becomes free.
        self._room = Wait(self._name)
        try:
            await self._room.result_of(wait_for_change())
        except (StepResetError, _RoomFreedError):
            pass  # the caller looks at the room again
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
