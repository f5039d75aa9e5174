"""Publishers: what may advance a store, and how the last one left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from aiohooks._core.activity import Awaited
from aiohooks._core.scope import RunScope, current_run


class Publisher:
    """A party that may advance a store, from its registration until it is closed.

    `store.publisher(name)` registers it.

    `with store.publisher("trainer"):` closes it with the error that leaves the block, if any.

    Created by `StepStore.publisher`.
    """

    __slots__ = (
        "_leave",
        "closed",
        "member_id",
        "name",
        "parked",
        "session",
    )

    def __init__(
        self,
        name: str,
        leave: Callable[[Publisher, BaseException | None], None],
    ) -> None:
        """Called by the store."""
        self.name: str = name
        self.closed: bool = False
        """Whether it has left."""
        self.member_id: str = ""
        """Its id among the members of a shared run; empty in the store of one process."""
        self.session: Callable[[], Awaited] | None = None
        """Returns the session that it stands for, for reports."""
        self.parked: dict[asyncio.Future[Any], tuple[int, RunScope]] = {}
        """The step of each of its own waits, and the run in which the wait began. The store keeps
        them; a resolved wait stays until its task has run.
        """
        self._leave = leave

    @property
    def key(self) -> object:
        """Its identity in the wait-for graph, the same for all stores of the run."""
        return f"publisher {self.member_id}" if self.member_id else self

    def awaited(self) -> Awaited:
        """Return its session, or itself, as what is waited for, for reports."""
        if self.session is None:
            return Awaited("publisher", f"publisher {self.name!r}", key=self.key)
        return self.session()

    @property
    def waiting(self) -> int:
        """The number of its waits that are parked and hold up the run in which they began."""
        return len(self._pending_steps())

    @property
    def waits_for(self) -> int:
        """The highest step that holds up its run; 0 while nothing does."""
        return max(self._pending_steps(), default=0)

    def _pending_steps(self) -> list[int]:
        return [step for wait, (step, run) in self.parked.items() if not wait.done() and run.active]

    def close(self, exc: BaseException | None = None) -> None:
        """Leave the store; harmless if it has left already.

        If no other publisher could advance the store then, all its waits end immediately.

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
        state = f"{self.waiting} waiting" if self.waiting else "at work"
        if self.closed:
            state = "left"
        return f"<Publisher {self.name!r}, {state}>"


def current_publisher() -> Publisher | None:
    """Return the publisher on whose behalf the current code runs.

    A wait in a session's run keeps it from advancing.

    It is that of the innermost run, wherever the run's context has reached: also in tasks that a
    hook has started.
    """
    run = current_run()
    publisher = None if run is None else run.publisher
    return publisher if isinstance(publisher, Publisher) else None


def publishers_held_up(innermost: RunScope) -> dict[Publisher, RunScope]:
    """Return the publishers that a wait in a run holds up.

    They are those of the runs in progress that it is part of.
    """
    held_up: dict[Publisher, RunScope] = {}
    run: RunScope | None = innermost
    while run is not None:
        if run.active and isinstance(run.publisher, Publisher):
            held_up[run.publisher] = run
        run = run.outer
    return held_up


@dataclass(frozen=True, slots=True)
class PublisherExit:
    """How a publisher left: at which step, and with which error if it failed."""

    name: str
    step: int
    error: BaseException | None
    is_remote: bool = False
    """Whether it was in another process."""


def publisher_summary(names: tuple[str, ...]) -> str:
    """Return the names of publishers for a message, or that there are none."""
    return f"published by {shortened(names)}" if names else "no publisher"


def shortened(names: tuple[str, ...]) -> str:
    """Return a few of the names, and how many more there are."""
    few = ", ".join(names[:5])
    return f"{few} and {len(names) - 5} more" if len(names) > 5 else few
