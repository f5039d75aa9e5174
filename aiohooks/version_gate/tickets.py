"""The line in front of a version gate: who waits there, in order. The first one listens to the store for all."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from aiohooks._aio.cancel import CancelScope, current_task
from aiohooks._aio.clock import Clock
from aiohooks.errors import AiohooksError, InvalidArgumentError, StepResetError, WrongLoopError
from aiohooks.stores import Position, StepStore
from aiohooks.stores._protocol import MAX_STEP

TicketState = Literal["open", "used", "shipped", "dropped", "too old", "outdated", "abandoned"]
"""What became of an item; see `Ticket.state`."""

_GOOD = ("used", "shipped")


class Ticket:
    """One item that was let in: how old it is, and whether it may be used. Made by `VersionGate.admit`.

    It is settled once: by `use`, by `drop`, or by the end of its block. A block that an error or a cancellation leaves
    abandons its item. One that ends normally has shipped it: somebody elsewhere uses it up with one of the next versions.
    After `hand_on` a normal end means nothing, and whoever has the ticket then calls `use` or `drop`.
    """

    __slots__ = ("_book", "handed_on", "number", "position", "settled_at", "state", "step")

    def __init__(self, book: Book, number: int, position: Position, step: int) -> None:
        """Made by the gate."""
        self.number: int = number
        """How many items had been let in before this one."""
        self.position: Position = position
        """What was published when it was let in; for another process, which asks `VersionGate.lag_of` about it."""
        self.step: int = step
        """The version at which it is used if all are used in order: at most `max_lag` above `version`."""
        self.state: TicketState = "open"
        """"open": not settled. "used" and "shipped": good ends. "dropped": given up; "too old": refused by `use`, or at the end
        of its block; "outdated": the versions were reset since; "abandoned": its block was left by an error."""
        self.settled_at: Position | None = None
        """What was published when it was settled; None while it is open."""
        self.handed_on: bool = False
        """Whether `hand_on` was called."""
        self._book = book

    @property
    def version(self) -> int:
        """The version that was published when it was let in: the one it works with, if that is read before any `await`."""
        return self.position.step

    @property
    def lag(self) -> int:
        """How many versions were published since; once it is settled, how many it were then.

        There is no distance over a reset: it counts as `2**53 - 1`, more than any bound.
        """
        return distance(self.position, self.settled_at or self._book.versions.latest)

    def use(self) -> bool:
        """Uses the item, for the version that is published next; to be called right before that work begins.

        Returns:
            Whether it may be used. False: it is too old or outdated, or was dropped or abandoned before.

        Raises:
            InvalidArgumentError: it was used or shipped already.
        """
        self._book.enter()
        if self.state == "open":
            in_time = self.lag <= self._book.max_lag
            self._book.settle(self, "used" if in_time else "too old")
            return in_time
        self._check_not_gone()
        return False

    def drop(self) -> None:
        """Gives the item up; its place is free again. Harmless when that is so already.

        Raises:
            InvalidArgumentError: it was used or shipped already.
        """
        self._book.enter()
        if self.state == "open":
            self._book.settle(self, "dropped")
        self._check_not_gone()

    def hand_on(self) -> Ticket:
        """Keeps the ticket open when its block ends normally: the item goes into a queue, say, and the ticket with it.

        Returns:
            The ticket itself.
        """
        self.handed_on = True
        return self

    def _check_not_gone(self) -> None:
        if self.state in _GOOD:
            advice = "its block has ended; call hand_on() inside the block" if self.state == "shipped" else "one item, one use"
            raise InvalidArgumentError(f"{self!r} was {self.state} already: {advice}")

    def __repr__(self) -> str:
        return f"<Ticket {self.number} of version {self.version}, {self.state}, lag {self.lag}>"


def distance(old: Position, new: Position) -> int:
    """How many versions were published between the positions; `MAX_STEP` if there was a reset, 0 if `new` is not newer."""
    if old >= new:
        return 0
    return new.step - old.step if old.epoch == new.epoch else MAX_STEP


class Book:
    """Counts as of the position it saw last; whoever wants to know calls `sync` before."""

    def __init__(self, versions: StepStore, max_lag: int, per_version: int, room_made: Callable[[], None]) -> None:
        """`room_made` is called whenever there may be more room than before."""
        self.versions: StepStore = versions
        self.max_lag: int = max_lag
        self.per_version: int = per_version
        self.position: Position = versions.latest
        self.open: dict[Ticket, None] = {}
        self.entering = 0
        """How many were let in whose tasks have not run since."""
        self.owed: int = 0
        """How many were shipped that no version has used up yet."""
        self.admitted: int = 0
        self.ends: Counter[TicketState] = Counter()
        self.lag_sum: int = 0
        self.lag_max: int = 0
        self._used_now = 0  # for the version that is published next
        self._made_at: Counter[int] = Counter()  # how many are open, by their version
        self._room_made = room_made
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def room(self) -> int:
        """How many may be let in now."""
        return (self.max_lag + 1) * self.per_version - len(self.open) - self.entering - self._gone

    @property
    def _gone(self) -> int:
        # Items that are not here any more, and take a place still. A version has no use for more than its own.
        return self.owed + min(self._used_now, self.per_version)

    @property
    def due(self) -> int:
        """How many open items reach the bound with the present version."""
        epoch, step = self.versions.latest
        return self._made_at[step - self.max_lag] if epoch == self.position.epoch else 0

    def write(self) -> Ticket:
        """Makes the ticket of an item that is let in."""
        ahead = (len(self.open) + self._gone) // self.per_version
        ticket = Ticket(self, self.admitted, self.position, self.position.step + ahead)
        self.open[ticket] = None
        self._made_at[ticket.version] += 1
        self.admitted += 1
        return ticket

    def sync(self) -> None:
        """Takes note of what was published since."""
        old, position = self.position, self.versions.latest
        if position == old:
            return
        self.position = position
        self._used_now = 0
        if position.epoch == old.epoch:
            self.owed = max(0, self.owed - (position.step - old.step) * self.per_version)
        else:
            self.owed = 0
            for ticket in tuple(self.open):
                self._end(ticket, "outdated")
        self._room_made()

    def settle(self, ticket: Ticket, state: TicketState) -> None:
        """Takes note of what became of an open item."""
        self._end(ticket, state)
        self._used_now += state == "used"
        self.owed += state == "shipped"
        if state in _GOOD:
            self.lag_sum += ticket.lag
            self.lag_max = max(self.lag_max, ticket.lag)
        self._room_made()

    def leave(self, ticket: Ticket, error: BaseException | None) -> None:
        """Takes note that the block of an item has ended."""
        if error is None and ticket.handed_on:
            return
        self.sync()
        if ticket.state == "open":
            in_time = ticket.lag <= self.max_lag
            self.settle(ticket, "abandoned" if error is not None else "shipped" if in_time else "too old")

    def _end(self, ticket: Ticket, state: TicketState) -> None:
        ticket.settled_at = self.position
        ticket.state = state
        del self.open[ticket]
        self._made_at[ticket.version] -= 1
        if not self._made_at[ticket.version]:
            del self._made_at[ticket.version]
        self.ends[state] += 1

    def is_own_loop(self) -> bool:
        """Whether the loop of the book runs here."""
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def enter(self) -> None:
        """Makes sure that the book's own loop runs here, the one of its first use; and is up to date then."""
        if self._loop is None:
            try:
                self._loop = asyncio.get_running_loop()
            except RuntimeError:
                raise WrongLoopError(f"{self!r} is used where no event loop is running") from None
        elif not self.is_own_loop():
            raise WrongLoopError(f"{self!r} is used in another thread or event loop than its own")
        self.sync()

    def __repr__(self) -> str:
        run, step = self.versions.run, self.versions.latest.step
        owed = f", {self.owed} shipped" if self.owed else ""
        return f"<version gate of {run!r} at version {step}, max_lag {self.max_lag}, {len(self.open)} open{owed}>"


Until = Callable[[Awaitable[Any]], Awaitable[Any]]
"""Awaits something that a stop ends too, as `session.until` and `coord.until` do."""


class _Place:
    """Where somebody stands, and how to wake who does."""

    __slots__ = ("called", "expired", "future", "interrupt", "let_in")

    def __init__(self) -> None:
        self.let_in = False
        self.expired = False
        self.called = False  # to ask the store, which had an error for another one
        self.future: asyncio.Future[None] | None = None
        self.interrupt: CancelScope | None = None  # of the one who listens

    def wake(self) -> None:
        if self.interrupt is not None:
            self.interrupt.fire("the line moves")
        elif self.future is not None and not self.future.done():
            self.future.set_result(None)

    def expire(self) -> None:
        self.expired = True
        self.wake()


class Line:
    """Everybody waits in a task of their own, so nothing is left behind when one is cancelled, or gets the store's error.

    While anybody waits, one of them listens to the store, or has been woken to do so.
    """

    __slots__ = ("_clock", "_listener", "_look", "_places", "_versions")

    def __init__(self, versions: StepStore, clock: Clock, look: Callable[[], None]) -> None:
        """`look` is called when there may be news; it calls `let_in_first` as often as there is room."""
        self._versions = versions
        self._clock = clock
        self._look = look
        self._places: dict[_Place, None] = {}
        self._listener: _Place | None = None

    def __len__(self) -> int:
        return len(self._places)

    def let_in_first(self) -> None:
        """Lets the first one in, who leaves the line at once."""
        place = next(iter(self._places))
        del self._places[place]
        place.let_in = True
        place.wake()

    async def wait(
        self, secs: float | None, until: Until | None, *, late: Callable[[], Exception], give_back: Callable[[], None]
    ) -> None:
        """Waits at the end of the line until let in.

        Args:
            secs: how long at most; `late()` is raised then.
            until: see `Until`.
            late: makes that error.
            give_back: called if this was let in and raises all the same.
        """
        place = _Place()
        self._places[place] = None
        timer = None if secs is None else self._clock.call_later(secs, place.expire)
        try:
            standing = self._stand(place, late)
            await (standing if until is None else until(standing))
        except BaseException:
            if place.let_in:
                give_back()
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self._places.pop(place, None)
            if self._listener is None and self._places:
                next(iter(self._places)).wake()  # to listen in its turn

    async def _stand(self, place: _Place, late: Callable[[], Exception]) -> None:
        while not place.let_in:
            if place.expired:
                raise late()
            if self._listener is None:
                await self._listen(place)
            else:
                place.future = asyncio.get_running_loop().create_future()
                try:
                    await place.future
                finally:
                    place.future = None

    async def _listen(self, place: _Place) -> None:
        """Waits for the next version or the next reset, unless there is room already or `place` is woken."""
        self._look()
        if place.let_in:
            return
        self._listener = place
        place.interrupt = interrupt = CancelScope(current_task())
        try:
            await self._versions.wait_for(self._versions.latest.step + 1, on_reset="raise")
        except StepResetError:
            pass
        except asyncio.CancelledError:
            if interrupt.settle() or not interrupt.fired:
                raise
        except AiohooksError as error:
            error.add_note(f"{len(self._places)} waited for room in the version gate of {self._versions.run}")
            if not place.called:  # else whoever called it has called them all
                for other in self._places:  # each asks the store, and gets an error of its own
                    other.called = True
                    other.wake()
            raise
        finally:
            interrupt.settle()
            self._listener = place.interrupt = None
        self._look()
