"""The run that the current code is part of.

With it a hook that calls `run` of its own session gets an error instead of a deadlock, and a wait for a step knows which
publisher it blocks.
"""

from __future__ import annotations

import contextvars
from collections.abc import Awaitable
from typing import Protocol, TypeVar

from aiohooks._aio.observers import RunObserver
from aiohooks._diagnostics import Awaited

T = TypeVar("T")


class RunOwner(Protocol):
    """A session, as what is part of its runs knows it."""

    def until(self, awaitable: Awaitable[T], /) -> Awaitable[T]:
        """Return a wait for something, which a stop of the session ends too."""
        ...

    def awaited(self) -> Awaited:
        """Return the session, as what its calls are part of, for a report."""
        ...


class RunScope:
    """A run in progress, stored in its context: its session, its publisher, and the run that it is nested in."""

    # Attributes of the class where they are seldom set: one is made for each run.
    active: bool = True
    runner: int = 0
    """The id of the caller's task."""
    committed: bool = False
    """Whether an attempt of it has been committed."""
    observers: tuple[RunObserver, ...] = ()
    """Those of the current attempt; a hook adds its own in `before_run`."""

    def __init__(self, session: RunOwner | None, publisher: object, outer: RunScope | None) -> None:
        """Make the scope of a run of `session`, or of none, which is nested in `outer`."""
        self.session = session
        self.publisher = publisher
        self.outer = outer

    def end_attempt(self, error: BaseException | None = None) -> None:
        """Notify the observers of the end of an attempt; they see nothing of the next one."""
        observers, self.observers = self.observers, ()
        for observer in observers:
            observer.attempt_ended(error)


current_scope: contextvars.ContextVar[RunScope | None] = contextvars.ContextVar("aiohooks_run", default=None)
"""The run of the current context. It may have ended: a task keeps the context that it was started in."""


def current_run() -> RunScope | None:
    """Return the innermost run in progress that this code is part of."""
    scope = current_scope.get()
    while scope is not None and not scope.active:
        scope = scope.outer
    return scope


def leave_run() -> None:
    """Remove the current context from its run: for background tasks."""
    current_scope.set(None)


def begin_run(session: RunOwner | None, publisher: object) -> RunScope:
    """Make the current context part of a new run; the scope stays in the context, inactive, when the run is over."""
    outer = current_scope.get()
    scope = RunScope(session, publisher, outer if outer is None or outer.active else current_run())
    current_scope.set(scope)
    return scope
