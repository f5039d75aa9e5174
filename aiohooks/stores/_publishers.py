"""Who may advance a store: registered publishers, who of them still could, and how the last one left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from aiohooks._aio.run_scope import RunScope, current_run
from aiohooks.errors import is_clean_end
from aiohooks.stores._protocol import Member


class Publisher:
    """One who may advance a store, from its registration (`store.publisher(name)`) until it is closed.

    `with store.publisher("trainer"):` closes it with whatever error leaves the block.
    """

    __slots__ = ("_leave", "closed", "name", "parked")

    def __init__(self, name: str, leave: Callable[[Publisher, BaseException | None], None]) -> None:
        """Made by the store."""
        self.name: str = name
        self.closed: bool = False
        """Whether it has left."""
        self.parked: dict[asyncio.Future[Any], tuple[int, RunScope | None]] = {}
        """Its waits: for which step, and in which run they began; one that was resolved stays here until its task runs."""
        self._leave = leave

    @property
    def waiting(self) -> int:
        """How many of its waits are parked, and hold up the run in which they began."""
        return sum(not wait.done() and (run is None or run.active) for wait, (_, run) in self.parked.items())

    @property
    def waits_for(self) -> int:
        """The highest step that it waits for in the run that its waits hold up; 0 while it is at work."""
        waits = self.parked.items()
        return max((step for wait, (step, run) in waits if not wait.done() and (run is None or run.active)), default=0)

    def close(self, exc: BaseException | None = None) -> None:
        """Leaves the store; harmless when it was left already.

        When this leaves nobody who could advance it, all waits there end at once.

        Args:
            exc: what it failed with. None, or an error that is a clean end: it has finished.
        """
        if not self.closed:
            self._leave(self, exc)
            self.closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, exc: BaseException | None, traceback: object) -> None:
        self.close(exc)

    def __repr__(self) -> str:
        state = "left" if self.closed else f"{waiting} waiting" if (waiting := self.waiting) else "at work"
        return f"<Publisher {self.name!r}, {state}>"


def current_publisher() -> Publisher | None:
    """The publisher on whose behalf the current code runs: a wait made in a session's run keeps it from advancing.

    It is that of the innermost run, wherever its context has reached: also in tasks that a hook has made.
    """
    run = current_run()
    publisher = None if run is None else run.publisher
    return publisher if isinstance(publisher, Publisher) else None


@dataclass(frozen=True, slots=True)
class PublisherExit:
    """How a publisher left: at which step, and with which error if it failed."""

    name: str
    step: int
    error: BaseException | None
    is_remote: bool = False
    """Whether it was a publisher of another process."""


class Publishers:
    """The publishers of one store."""

    __slots__ = ("_idle", "_registered", "last_exit", "others")

    def __init__(self) -> None:
        """Nobody has come yet."""
        self._registered: dict[Publisher, None] = {}
        # Those with a wait in `parked`, resolved or not: so many are waiting at most.
        self._idle = 0
        self.last_exit: PublisherExit | None = None
        """How the last one that left did so."""
        self.others: tuple[Member, ...] = ()
        """Those of other processes."""

    def __contains__(self, publisher: object) -> bool:
        return publisher in self._registered

    @property
    def here(self) -> tuple[Publisher, ...]:
        """Those of this process, in order of registration."""
        return tuple(self._registered)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of those who are registered, in order of registration; then those of other processes."""
        return (*(publisher.name for publisher in self._registered), *(member.name for member in self.others))

    def join(self, publisher: Publisher) -> None:
        """Registers one."""
        self._registered[publisher] = None

    def leave(self, publisher: Publisher, step: int, exc: BaseException | None) -> None:
        """Takes one out, and keeps how it left."""
        del self._registered[publisher]
        self._idle -= bool(publisher.parked)
        error = None if exc is None or is_clean_end(exc) else exc
        self.last_exit = PublisherExit(publisher.name, step, error)

    def park(self, publisher: Publisher, wait: asyncio.Future[Any], step: int) -> None:
        """Notes a wait of a registered publisher for a step."""
        self._idle += not publisher.parked
        publisher.parked[wait] = step, current_run()

    def unpark(self, publisher: Publisher, wait: asyncio.Future[Any]) -> None:
        """Forgets a wait, also of a publisher that has left meanwhile."""
        del publisher.parked[wait]
        if not publisher.parked and publisher in self._registered:
            self._idle -= 1

    def all_waiting(self, step: int) -> bool:
        """Whether nobody who is registered could advance now: there is none, or every one is itself waiting beyond `step`."""
        # Counting comes first, so that n publishers who park one after the other are not looked through n times.
        return (
            self._idle == len(self._registered)
            and all(publisher.waiting for publisher in self._registered)
            and all(member.waits_for > step for member in self.others)
        )


def listed(names: tuple[str, ...]) -> str:
    """The names for a message: not more than a few of them."""
    few = ", ".join(names[:5])
    return f"{few} and {len(names) - 5} more" if len(names) > 5 else few or "nobody"
