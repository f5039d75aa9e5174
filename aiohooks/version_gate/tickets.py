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

_GOOD = ("used", "shipped")


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

    def __init__(self, ledger: AdmissionLedger, number: int, position: Position, step: int) -> None:
        self.number: int = number
        """How many items had been admitted before this one."""
        self.position: Position = position
        """The published position when it was admitted; send it along to another process, for
        `VersionGate.lag_of`.
        """
        self.step: int = step
        """The version for which it is used if all items are used in order: at most `max_lag` above
        `version`.
        """
        self.admitted_by: str = current_task().get_name()
        """The name of the task that admitted it."""
        self.state: TicketState = "open"
        """"open": not settled. "used" and "shipped": good ends. "dropped": given up. "stale": too
        old for `use`, or at the end of its block. "invalidated": the versions were reset.
        "abandoned": an error left its block, or nothing refers to it.
        """
        self.settled_at: Position | None = None
        """The published position when it was settled; None while it is open."""
        self.handed_off: bool = False
        """Whether `hand_off` was called."""
        self._ledger = ledger

    @property
    def version(self) -> int:
        """The published version when it was admitted: the one it works with, if that is read before
        any `await`.
        """
        return self.position.step

    @property
    def lag(self) -> int:
        """How many versions were published between its admission and its settling, or now while it
        is open.

        `2**53 - 1`, more than any bound, if the versions were reset between.
        """
        return versions_between(self.position, self.settled_at or self._ledger.versions.latest)

    def use(self) -> bool:
        """Use the item for the version that is published next; to be called right before that work
        begins.

        Returns:
            Whether it may be used. False: it is stale or invalidated, or was dropped or abandoned
            before.

        Raises:
            InvalidArgumentError: it was used or shipped already.
        """
        self._ledger.enter()
        if self.state == "open":
            in_time = self.lag <= self._ledger.max_lag
            self._ledger.settle_ticket(self, "used" if in_time else "stale")
            return in_time
        self._check_not_used()
        return False

    def drop(self) -> None:
        """Give the item up, which frees its place. Harmless if that has happened already.

        Raises:
            InvalidArgumentError: it was used or shipped already.
        """
        self._ledger.enter()
        if self.state == "open":
            self._ledger.settle_ticket(self, "dropped")
        self._check_not_used()

    def hand_off(self) -> Ticket:
        """Keep the ticket open when its block ends normally, for example to put it into a queue
        with the item.

        Returns:
            The ticket itself.
        """
        self.handed_off = True
        return self

    def _check_not_used(self) -> None:
        if self.state in _GOOD:
            advice = (
                "its block has ended; call hand_off() inside the block"
                if self.state == "shipped"
                else "one item, one use"
            )
            raise InvalidArgumentError(f"{self!r} was {self.state} already: {advice}")

    def __del__(self) -> None:
        if getattr(self, "state", None) == "open":
            self._ledger.lose_ticket(self.number, self.version, self.admitted_by)

    def __repr__(self) -> str:
        return f"<Ticket {self.number} of version {self.version}, {self.state}, lag {self.lag}>"


def versions_between(old: Position, new: Position) -> int:
    """Return how many versions were published between the positions: 0 if `new` is not newer,
    `MAX_STEP` across a reset.
    """
    if old >= new:
        return 0
    return new.step - old.step if old.epoch == new.epoch else MAX_STEP


class OpenTicket(NamedTuple):
    """What the ledger knows of an open ticket. It refers to it weakly: a ticket that everybody else
    has dropped is lost.
    """

    ref: weakref.ref[Ticket]
    version: int
    admitted_by: str


class AdmissionLedger:
    """Counts admitted items, as of the position that it has seen last: call `sync` before reading
    it.
    """

    def __init__(self, versions: StepStore, max_lag: int, per_version: int) -> None:
        self.versions: StepStore = versions
        self.max_lag: int = max_lag
        self.per_version: int = per_version
        self.on_room: Callable[[], None] = lambda: None
        """Called whenever there may be more room than before."""
        self.position: Position = versions.latest
        self.open: dict[int, OpenTicket] = {}
        """The open tickets by their numbers, the oldest first."""
        self.entering: int = 0
        """How many waiters were admitted whose tasks have not run since."""
        self.shipped_ahead: int = 0
        """How many items were shipped that no version has used up yet."""
        self.admitted: int = 0
        self.ends: Counter[TicketState] = Counter()
        self.lag_sum: int = 0
        self.lag_max: int = 0
        self._used_ahead = 0  # items used for the version that is published next
        self._open_by_version: Counter[int] = Counter()
        self._lost = False  # whether a ticket was lost before
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def room(self) -> int:
        """How many items may be admitted now."""
        return (
            (self.max_lag + 1) * self.per_version - len(self.open) - self.entering - self.reserved
        )

    @property
    def reserved(self) -> int:
        """How many places are taken by items that are settled, until a version has used them up."""
        # A version uses up no more than `per_version` items, however many were used for it.
        return self.shipped_ahead + min(self._used_ahead, self.per_version)

    @property
    def due(self) -> int:
        """How many open items would be stale with one more version."""
        epoch, step = self.versions.latest
        return self._open_by_version[step - self.max_lag] if epoch == self.position.epoch else 0

    def return_place(self) -> None:
        """Free the place of a waiter that was admitted and ended with an error."""
        self.entering -= 1
        self.on_room()

    def issue_ticket(self) -> Ticket:
        """Return the ticket of an item that is admitted now."""
        ahead = (len(self.open) + self.reserved) // self.per_version
        ticket = Ticket(self, self.admitted, self.position, self.position.step + ahead)
        self.open[ticket.number] = OpenTicket(
            weakref.ref(ticket), ticket.version, ticket.admitted_by
        )
        self._open_by_version[ticket.version] += 1
        self.admitted += 1
        return ticket

    def sync(self) -> None:
        """Count what was published since the last call."""
        old, position = self.position, self.versions.latest
        if position == old:
            return
        self.position = position
        self._used_ahead = 0
        if position.epoch == old.epoch:
            self.shipped_ahead = max(
                0, self.shipped_ahead - (position.step - old.step) * self.per_version
            )
        else:
            self.shipped_ahead = 0
            for number, (ref, version, _) in tuple(self.open.items()):
                ticket = ref()
                if ticket is not None:
                    self._close_ticket(ticket, "invalidated")
                else:
                    self._remove_open(number, version, "invalidated")
        self.on_room()

    def settle_ticket(self, ticket: Ticket, state: TicketState) -> None:
        """Settle an open ticket."""
        self._close_ticket(ticket, state)
        self._used_ahead += state == "used"
        self.shipped_ahead += state == "shipped"
        if state in _GOOD:
            self.lag_sum += ticket.lag
            self.lag_max = max(self.lag_max, ticket.lag)
        self.on_room()

    def end_block(self, ticket: Ticket, error: BaseException | None) -> None:
        """Settle the ticket of a block that has ended, if it is still open."""
        if error is None and ticket.handed_off:
            return
        self.sync()
        if ticket.state == "open":
            in_time = ticket.lag <= self.max_lag
            self.settle_ticket(
                ticket, "abandoned" if error is not None else "shipped" if in_time else "stale"
            )

    def lose_ticket(self, number: int, version: int, admitted_by: str) -> None:
        """Abandon an item whose open ticket was collected, soon: that happens in any thread, in the
        middle of anything.
        """
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed, and so is the gate
            self._loop.call_soon_threadsafe(self._abandon_lost, number, version, admitted_by)

    def _abandon_lost(self, number: int, version: int, admitted_by: str) -> None:
        self.sync()
        if number not in self.open:  # invalidated meanwhile
            return
        if not self._lost:
            self._lost = True
            logger.warning(
                "%r: item %d, admitted by task %r, is abandoned because nothing refers to its"
                " ticket any more; call use() or drop() on each ticket (later ones are only"
                " counted)",
                self,
                number,
                admitted_by,
            )
        self._remove_open(number, version, "abandoned")
        self.on_room()

    def _close_ticket(self, ticket: Ticket, state: TicketState) -> None:
        ticket.settled_at = self.position
        ticket.state = state
        self._remove_open(ticket.number, ticket.version, state)

    def _remove_open(self, number: int, version: int, state: TicketState) -> None:
        del self.open[number]
        self._open_by_version[version] -= 1
        if not self._open_by_version[version]:
            del self._open_by_version[version]
        self.ends[state] += 1

    def is_own_loop(self) -> bool:
        """Return whether the running event loop is the ledger's own."""
        return self._loop is not None and running_loop() is self._loop

    def enter(self) -> None:
        """Check that the running event loop is the ledger's own, which is that of the first call;
        then `sync`.

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
        run, step = self.versions.run, self.versions.latest.step
        shipped = f", {self.shipped_ahead} shipped" if self.shipped_ahead else ""
        return (
            f"<version gate of {run!r} at version {step}, max_lag {self.max_lag}, {len(self.open)}"
            f" open{shipped}>"
        )
