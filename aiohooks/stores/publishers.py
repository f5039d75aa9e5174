"""Publishers: the parties that may advance a store, and the exit of the last one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from aiohooks._core.activity import Awaited, RunScope, current_run


class Publisher:
    """A party that may advance a store, from its registration until it is closed.

    `store.publisher(name)` registers a publisher. Use it as a context manager, and it is closed
    with the error that leaves the block, if any: `with store.publisher("trainer"):`.

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
        """Called by the store.

        Args:
            name: the name for messages and reports.
            leave: called by `close`, with the error that the publisher failed with, if any.
        """
        self.name: str = name
        self.closed: bool = False
        """Whether the publisher has left the store."""
        self.member_id: str = ""
        """Its id among the members of a shared run, empty in the store of one process."""
        self.session: Callable[[], Awaited] | None = None
        """Describes the session that the publisher stands for, for reports. None without one."""
        self.parked: dict[asyncio.Future[Any], tuple[int, RunScope]] = {}
        """The waits that block the publisher, with the step and the run of each. The store adds
        and removes them. A wait that has ended remains here until its task has run.
        """
        self._leave = leave

    @property
    def key(self) -> object:
        """Its identity in the wait-for graph, the same for all stores of the run."""
        return f"publisher {self.member_id}" if self.member_id else self

    def awaited(self) -> Awaited:
        """Describe a wait for this publisher, or for its session, for reports such as `why`."""
        if self.session is None:
            return Awaited("publisher", f"publisher {self.name!r}", key=self.key)
        return self.session()

    @property
    def waiting(self) -> int:
        """The number of pending waits that block the publisher, which cannot advance meanwhile."""
        return len(self._blocking_steps())

    @property
    def waits_for(self) -> int:
        """The highest step of the pending waits that block the publisher, 0 without any."""
        return max(self._blocking_steps(), default=0)

    def _blocking_steps(self) -> list[int]:
        """Return the steps of its pending waits whose runs have not ended."""
        return [step for wait, (step, run) in self.parked.items() if run.active and not wait.done()]

    def close(self, exc: BaseException | None = None) -> None:
        """Leave the store, unless it has left already.

        If no other publisher can advance the store, all waits end immediately.

        Args:
            exc: the error that the publisher failed with. With None, or with an error that is a
                clean end, the publisher has finished.
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
    """Return the publisher of the session in whose run the current code is called, or None.

    While this code waits, the publisher cannot advance. In nested sessions, it is the publisher of
    the innermost one. Tasks that a hook starts have the publisher of their run, too.
    """
    run = current_run()
    publisher = None if run is None else run.publisher
    return publisher if isinstance(publisher, Publisher) else None


def publishers_held_up(innermost: RunScope) -> dict[Publisher, RunScope]:
    """Return the publishers that cannot advance while code in a run waits, each with its run.

    They are the publishers of the run `innermost`, and of the runs that enclose it and are still in
    progress. A run outside of a step store has no publisher.
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
    """The exit of a publisher from its store."""

    name: str
    step: int
    error: BaseException | None = field(default=None, compare=False)
    """The error that the publisher failed with, or None if it has finished. Comparisons of exits
    ignore it.
    """
    is_remote: bool = False
    """Whether the publisher was in another process."""


def publisher_summary(names: tuple[str, ...]) -> str:
    """Describe the publishers of a store in a message: their names, or that there is none."""
    if not names:
        return "no publisher"
    return f"published by {shortened(names)}"


def shortened(names: tuple[str, ...]) -> str:
    """Return the first five names for a message, and the number of the others."""
    first_names = ", ".join(names[:5])
    if len(names) <= 5:
        return first_names
    return f"{first_names} and {len(names) - 5} more"
