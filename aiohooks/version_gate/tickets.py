"""Tickets, and the ledger that counts which items were admitted and how they ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Literal, NamedTuple

from aiohooks._aio.cancel import current_task, running_loop
from aiohooks.errors import InvalidArgumentError, WrongLoopError
from aiohooks.stores import Position, StepStore
from aiohooks.stores._protocol import MAX_STEP

logger: logging.Logger = logging.getLogger("aiohooks.version_gate")

TicketState = Literal["open", "used", "shipped", "dropped", "stale", "invalidated", "abandoned"]
"""The state of a ticket; see `Ticket.state`."""


class Ticket:
    """One admitted item: how old it is, and whether it may be used. Made by `VersionGate.admit`.

    A ticket is settled once: by `use`, by `drop`, or by the end of its block. A block that an error
    or a cancellation leaves abandons its item. A block that ends normally has shipped it: it is
    used elsewhere, for one of the next versions. After `hand_off` a normal end has no effect, and
    whoever has the ticket then calls `use` or `drop`. An open ticket to which nothing refers any
    more, because the task that had it has ended, abandons its item too: keep it with the item.
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
        self.number: int = ledger.admitted
        """How many items had been admitted before this one."""
        self.position: Position = ledger.position
        """The published position at its admission.

        Send it along to another process, for `VersionGate.lag_of`.
        """
        self.step: int = step
        """The version for which it is used if all items are used in order.

        At most `max_lag` above `version`.
        """
        self.admitted_by: str = current_task().get_name()
        """The name of the task that admitted it."""
        self.state: TicketState = "open"
        """How it was settled.

        "open": not settled. "used" and "shipped": good ends. "dropped": given up. "stale": too old
        for `use`, or at the end of its block. "invalidated": the versions were reset. "abandoned":
        an error left its block, or nothing refers to it.
        """
        self.settled_at: Position | None = None
        """The published position when it was settled; None while it is open."""
        self.handed_off: bool = False
        """Whether `hand_off` was called."""
        self._ledger = ledger

    @property
    def version(self) -> int:
        """The published version at its admission.

        The item works with this version if it reads the version before any `await`.
        """
        return self.position.step

    @property
    def lag(self) -> int:
        """How many versions were published between its admission and its settling.

        While it is open, up to now. `2**53 - 1`, more than any bound, if the versions were reset
        between.
        """
        return versions_between(self.position, self.settled_at or self._ledger.versions.latest)

    def use(self) -> bool:
        """Use the item for the version that is published next.

        Call it right before that work begins.

        Returns:
            Whether the item may be used. False: it is stale or invalidated, or was dropped or
            abandoned before.

        Raises:
            InvalidArgumentError: it was used or shipped already.
        """
        self._ledger.enter()
        if self.state == "open":
            return self._ledger.use_or_ship(self, "used")
        self._check_not_used()
        return False

    def drop(self) -> None:
        """Give the item up, which frees its place; harmless if that has happened already.

        Raises:
            InvalidArgumentError: it was used or shipped already.
        """
        self._ledger.enter()
        if self.state == "open":
            self._ledger.settle_ticket(self.number, "dropped")
        self._check_not_used()

    def hand_off(self) -> Ticket:
        """Keep the ticket open when its block ends normally, and return the ticket.

        For example, to put it into a queue with the item.
        """
        self.handed_off = True
        return self

    def _check_not_used(self) -> None:
        if self.state == "used":
            raise InvalidArgumentError(f"{self!r} was used already: one item, one use")
        if self.state == "shipped":
            raise InvalidArgumentError(
                f"{self!r} was shipped already: its block has ended; call hand_off() inside the"
                " block"
            )

    def __del__(self) -> None:
        # There is no state if `__init__` has failed.
        if getattr(self, "state", None) == "open":
            self._ledger.lose_ticket(self.number)

    def __repr__(self) -> str:
        return f"<Ticket {self.number} of version {self.version}, {self.state}, lag {self.lag}>"


def versions_between(old: Position, new: Position) -> int:
    """Return how many versions were published between the positions.

    0 if `new` is not newer, `MAX_STEP` across a reset.
    """
    if old >= new:
        return 0
    if old.epoch != new.epoch:
        return MAX_STEP
    return new.step - old.step


class OpenTicket(NamedTuple):
    """An open ticket in the ledger, which does not keep it alive."""

    ref: weakref.ref[Ticket]
    version: int
    admitted_by: str


class AdmissionLedger:
    """Counts admitted items, as of the position that it has seen last.

    Call `sync` before you read it.
    """

    def __init__(
        self,
        versions: StepStore,
        max_lag: int,
        per_version: int,
        on_room: Callable[[], None],
    ) -> None:
        """Start with no items; call `on_room` whenever there may be more room than before."""
        self.versions: StepStore = versions
        self.max_lag: int = max_lag
        self.per_version: int = per_version
        self.position: Position = versions.latest
        self.open: dict[int, OpenTicket] = {}
        """The open tickets by their numbers, the oldest first."""
        self.entering: int = 0
        """The number of admitted waiters whose tasks have not run since."""
        self.shipped_ahead: int = 0
        """The number of shipped items that no version has used up yet."""
        self.admitted: int = 0
        self.ends: Counter[TicketState] = Counter()
        self.lag_sum: int = 0
        self.lag_max: int = 0
        self._on_room = on_room
        self._used_ahead = 0  # items used for the version that is published next
        self._open_by_version: Counter[int] = Counter()
        self._warned = False  # that a ticket was lost
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def room(self) -> int:
        """How many items may be admitted now."""
        places = (self.max_lag + 1) * self.per_version
        return places - len(self.open) - self.entering - self.reserved

    @property
    def reserved(self) -> int:
        """How many places settled items take until a version has used them up."""
        # A version uses up no more than `per_version` items, however many were used for it.
        return self.shipped_ahead + min(self._used_ahead, self.per_version)

    @property
    def due(self) -> int:
        """How many open items would be stale with one more version."""
        latest = self.versions.latest
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
        """Count the versions published since the last call; invalidate all tickets at a reset."""
        old = self.position
        self.position = self.versions.latest
        if self.position == old:
            return
        # Items used for the version before do not count for the next one.
        self._used_ahead = 0
        if self.position.epoch == old.epoch:
            used_up = (self.position.step - old.step) * self.per_version
            self.shipped_ahead = max(0, self.shipped_ahead - used_up)
        else:
            self.shipped_ahead = 0
            # A copy: settling removes the ticket.
            for number in tuple(self.open):
                self.settle_ticket(number, "invalidated")
        self._on_room()

    def use_or_ship(self, ticket: Ticket, state: Literal["used", "shipped"]) -> bool:
        """Settle an open ticket as used or shipped, or as stale if it is too old.

        Returns:
            Whether it was in time.
        """
        lag = ticket.lag
        if lag > self.max_lag:
            self.settle_ticket(ticket.number, "stale")
            return False
        self.lag_sum += lag
        self.lag_max = max(self.lag_max, lag)
        # Before the ticket is settled, which admits waiters: the item keeps its place.
        if state == "used":
            self._used_ahead += 1
        else:
            self.shipped_ahead += 1
        self.settle_ticket(ticket.number, state)
        return True

    def settle_ticket(self, number: int, state: TicketState) -> None:
        """Settle an open ticket, which may have been collected."""
        entry = self.open.pop(number)
        ticket = entry.ref()
        if ticket is not None:
            ticket.settled_at = self.position
            ticket.state = state
        # Versions without open tickets are removed, or the counter would grow without end.
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
        """Abandon soon the item of an open ticket that was collected."""
        assert self._loop is not None, "it has admitted the item"
        # Not now: tickets are collected in any thread, in the middle of anything. If the loop is
        # closed, so is the gate.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._abandon_lost, number)

    def _abandon_lost(self, number: int) -> None:
        self.sync()
        lost = self.open.get(number)
        # A reset may have invalidated it meanwhile.
        if lost is None:
            return
        if not self._warned:
            self._warned = True
            logger.warning(
                "%r: item %d, admitted by task %r, is abandoned because nothing refers to its"
                " ticket any more; call use() or drop() on each ticket (later ones are only"
                " counted)",
                self,
                number,
                lost.admitted_by,
            )
        self.settle_ticket(number, "abandoned")

    def is_own_loop(self) -> bool:
        """Return whether the running event loop is the ledger's own."""
        return self._loop is not None and running_loop() is self._loop

    def enter(self) -> None:
        """Check that the running event loop is that of the first call, and `sync`.

        Raises:
            WrongLoopError: it is another one, or there is none.
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
