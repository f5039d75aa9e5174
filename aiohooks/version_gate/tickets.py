"""Tickets, and the ledger that counts which items were admitted and how they ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Literal, NamedTuple

from aiohooks._core.cancel import current_task, running_loop
from aiohooks.errors import InvalidArgumentError, WrongLoopError
from aiohooks.stores import Position, StepStore
from aiohooks.stores._protocol import MAX_STEP

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
        """Make the ticket of the next item of the ledger, which expects its use for `step`."""
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
        # An object whose `__init__` has failed has no state, and is collected as well.
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

    Its counts are as of the position of the last `sync`. Call `sync` before you read the counts.
    """

    def __init__(
        self, versions: StepStore, max_lag: int, per_version: int, on_room: Callable[[], None]
    ) -> None:
        """Start with no items. Call `on_room` whenever there may be more room than before."""
        self.versions: StepStore = versions
        self.max_lag: int = max_lag
        self.per_version: int = per_version
        self.position: Position = versions.latest
        # The open tickets by their numbers, the oldest first.
        self.open: dict[int, OpenTicket] = {}
        # The number of admitted waiters that have not got their tickets yet.
        self.entering: int = 0
        # The number of shipped items that no version has used up yet.
        self.shipped_ahead: int = 0
        self.admitted: int = 0
        self.ends: Counter[TicketState] = Counter()
        self.lag_sum: int = 0
        self.lag_max: int = 0
        self._on_room = on_room
        self._used_ahead = 0  # items used for the version that is published next
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
        # The next `sync` will invalidate all items.
        if latest.epoch != self.position.epoch:
            return 0
        return self._open_by_version[latest.step - self.max_lag]

    def return_place(self) -> None:
        """Free the place of an admitted waiter that ended with an error."""
        self.entering -= 1
        self._on_room()

    def issue_ticket(self) -> Ticket:
        """Return the ticket of an item that is admitted now."""
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
            used_up = (self.position.step - old.step) * self.per_version
            self.shipped_ahead = max(0, self.shipped_ahead - used_up)
        else:
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
        """Schedule that the item of a collected, open ticket is abandoned."""
        assert self._loop is not None, "the ledger has admitted the item in its loop"
        # The garbage collector runs in any thread and between any two lines, so only the event loop
        # may change the ledger. If the loop is closed, no one uses the gate any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._abandon_lost, number)

    def _abandon_lost(self, number: int) -> None:
        """Abandon the item of a collected ticket, and log the first loss."""
        self.sync()
        lost = self.open.get(number)
        # A reset may have invalidated the ticket before.
        if lost is None:
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
        """Raise unless the loop of the first call is running, and then `sync`.

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
