"""The gate: a book of what is let in, and a line of those who wait."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType

from aiohooks._aio.clock import current_clock
from aiohooks._validate import check_callable, check_instance
from aiohooks.errors import InvalidArgumentError, StepTimeoutError
from aiohooks.stores import Position, StepStore
from aiohooks.stores._protocol import checked_step, checked_timeout
from aiohooks.version_gate.tickets import Book, Line, Ticket, Until, distance


class Admission:
    """The block of one item: `async with gate.admit() as ticket`. Made by `VersionGate.admit`."""

    __slots__ = ("_admit", "_leave", "_ticket")

    def __init__(self, admit: Callable[[], Awaitable[Ticket]], leave: Callable[[Ticket, BaseException | None], None]) -> None:
        """Made by the gate."""
        self._admit = admit
        self._leave = leave
        self._ticket: Ticket | None = None

    async def __aenter__(self) -> Ticket:
        if self._ticket is not None:
            raise InvalidArgumentError(f"the admission of {self._ticket!r} is entered again: call admit() for each item")
        self._ticket = await self._admit()
        return self._ticket

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._ticket is not None:
            self._leave(self._ticket, error)


@dataclass(frozen=True, slots=True)
class GateStatistics:
    """What a gate looks like at one moment; `admitted` is always `open` + `used` + `shipped` + `dropped`.

    Attributes:
        published: the latest version.
        room: how many would be let in now.
        open: how many are let in and not settled.
        due: how many of these must be used before the next version is published, or will be too old.
        admitted: how many were let in so far.
        used: how many were used.
        shipped: how many were shipped.
        dropped: how many were given up, for whatever reason.
        too_old: those of them that were too old for `use`, or at the end of their block.
        outdated: those of them that a reset of the versions ended.
        abandoned: those of them whose block an error or a cancellation left.
        waiting: how many wait to be let in.
        max_waiting: how many did at the same time, at most.
        waits: how many had to wait so far.
        waited_secs: the sum of those waits that are over.
        lag_mean: the mean lag of what was used or shipped; 0 if nothing was.
        lag_max: the highest lag of what was used or shipped.
    """

    published: Position
    room: int
    open: int
    due: int
    admitted: int
    used: int
    shipped: int
    dropped: int
    too_old: int
    outdated: int
    abandoned: int
    waiting: int
    max_waiting: int
    waits: int
    waited_secs: float
    lag_mean: float
    lag_max: int


class VersionGate:
    """Lets work in only while it is at most `max_lag` versions ahead of what is published, and says how old it is at its use.

    The versions are a step store that somebody advances: a trainer, with whose weights the work is done. A gate belongs to
    one event loop and knows no session. Nothing is polled, and the first in line is the first to be let in.

    Where the trainer is beside the gate, `use` each item in the step that publishes the next version. Where it is elsewhere,
    let the item's block end when the item is sent: each version then counts as having used up `per_version` of them.
    """

    def __init__(self, versions: StepStore, *, max_lag: int, per_version: int = 1) -> None:
        """Takes the versions and the bound.

        Args:
            versions: where the published versions are counted; it may begin anywhere.
            max_lag: how many versions may be published between letting an item in and its use. With 0 nothing is used but
                what was made with the newest one.
            per_version: how many items one version uses up.

        Raises:
            InvalidArgumentError: a value that cannot be meant.
        """
        check_instance(versions, StepStore, "versions")
        self.max_lag: int = checked_step(max_lag, "max_lag")
        self.per_version: int = checked_step(per_version, "per_version", least=1)
        self.versions: StepStore = versions
        self._clock = current_clock()
        self._book = Book(versions, self.max_lag, self.per_version, self._let_in)
        self._line = Line(versions, self._clock, self._book.sync)
        self._waits = 0
        self._max_waiting = 0
        self._waited_secs = 0.0

    def admit(self, *, timeout: float | None = None, until: Until | None = None) -> Admission:
        """Lets an item in: `async with gate.admit() as ticket`. Waits while there is no room for it, and suspends only then.

        Cancelling the wait leaves nothing behind.

        Args:
            timeout: how many seconds to wait at most. 0 does not wait, None waits for as long as it takes.
            until: `session.until` or `coord.until`: a stop of the session, or a task of it that fails, ends the wait too.

        Raises:
            StepTimeoutError: there was no room in time.
            PublisherFinishedError: nobody is left who could publish the next version; the last one finished. A clean end.
            PublisherFailedError: nobody is left, and the last one failed: caused by its error.
            StoreClosedError: the store of the versions was closed.
            InvalidArgumentError: a value that cannot be meant.
        """
        secs = checked_timeout(timeout)
        check_callable(until, "until", optional=True)
        return Admission(lambda: self._admit(secs, until), self._book.leave)

    async def _admit(self, secs: float | None, until: Until | None) -> Ticket:
        book = self._book
        book.enter()
        if len(self._line) or book.room <= 0:
            await self._wait(secs, until)
            book.sync()
            book.entering -= 1
        return book.write()

    async def _wait(self, secs: float | None, until: Until | None) -> None:
        since = self._clock.now()

        def late() -> StepTimeoutError:
            waited, seen = self._clock.now() - since, self.versions.latest.step
            who = ", ".join(self.versions.statistics().publishers[:5]) or "nobody"
            message = (
                f"no room within {waited:g} s in {self!r}, published by {who}: "
                f"some comes with version {seen + 1}, or when an item is dropped"
            )
            return StepTimeoutError(message, wanted=seen + 1, seen=seen, waited_secs=waited)

        if secs == 0:
            raise late()
        self._waits += 1
        self._max_waiting = max(self._max_waiting, len(self._line) + 1)
        try:
            await self._line.wait(secs, until, late=late, give_back=self._give_back)
        finally:
            self._waited_secs += self._clock.now() - since

    def _let_in(self) -> None:
        while len(self._line) and self._book.room > 0:
            self._book.entering += 1
            self._line.let_in_first()

    def _give_back(self) -> None:
        # Somebody was let in and is not coming.
        self._book.entering -= 1
        self._let_in()

    @property
    def due(self) -> int:
        """How many open items must be used before the next version is published, or will be too old.

        A trainer that goes on taking items until this is 0 never drops one for its age.
        """
        return self._book.due

    def lag_of(self, position: Position) -> int:
        """How many versions were published since `position`, as far as this process knows; `2**53 - 1` if it lies before a reset.

        For items that come from elsewhere with the position of their ticket: `gate.lag_of(position) <= gate.max_lag`.
        """
        return distance(Position(*position), self.versions.latest)

    def statistics(self) -> GateStatistics:
        """What the gate looks like now; outside its event loop, when it was last used."""
        book = self._book
        if book.is_own_loop():
            book.sync()
        ends = book.ends
        good = ends["used"] + ends["shipped"]
        return GateStatistics(
            published=self.versions.latest,
            room=max(0, book.room),
            open=len(book.open),
            due=book.due,
            admitted=book.admitted,
            used=ends["used"],
            shipped=ends["shipped"],
            dropped=sum(ends.values()) - good,
            too_old=ends["too old"],
            outdated=ends["outdated"],
            abandoned=ends["abandoned"],
            waiting=len(self._line),
            max_waiting=self._max_waiting,
            waits=self._waits,
            waited_secs=self._waited_secs,
            lag_mean=book.lag_sum / good if good else 0.0,
            lag_max=book.lag_max,
        )

    def __repr__(self) -> str:
        waiting = f", {len(self._line)} waiting" if len(self._line) else ""
        return f"{repr(self._book)[:-1]}{waiting}>"
