"""The run that the current code is part of.

With it a hook that calls `run` of its own session gets an error instead of a deadlock, and a wait for a step knows which
publisher it blocks.
"""

from __future__ import annotations

import contextvars
import dataclasses
import types
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

from aiohooks._aio.observers import RunObserver

T = TypeVar("T")


@dataclasses.dataclass(slots=True, eq=False)
class RunScope:
    """A run in progress, stored in its context: its session, its publisher, and the run that it is nested in."""

    session: object
    publisher: object
    outer: RunScope | None
    active: bool = True
    private: bool = False
    """Whether the context is a run's own, which no overlapping hook shares."""
    observers: tuple[RunObserver, ...] = ()
    """Those of the current attempt; a hook adds its own in `before_run`."""

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


def begin_run(session: object, publisher: object) -> RunScope:
    """Make the current context part of a new run; the scope stays in the context, inactive, when the run is over."""
    scope = RunScope(session, publisher, current_run())
    current_scope.set(scope)
    return scope


class SharedContext(RunScope):
    """In a context that overlapping hooks share, and that is not part of a run. Each overlap has one of its own."""

    __slots__ = ()

    session = publisher = outer = None
    active = private = False
    observers = ()

    def __init__(self) -> None:
        """Nothing is set: all of them are equal."""


def shares_context() -> bool:
    """Return whether other hooks may share the current context, so that a run has to begin in one of its own."""
    scope = current_scope.get()
    return scope is not None and not scope.private


@types.coroutine
def in_own_context(coro: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    """Await `coro` in a copy of the context, and copy the variables that it has set back at its end.

    A run begun inside a hook belongs to that hook alone: overlapping hooks share a context, and would all seem part of the run.
    """
    before = contextvars.copy_context()
    context = before.copy()
    context.run(current_scope.set, RunScope(None, None, current_scope.get(), active=False, private=True))
    error: BaseException | None = None
    try:
        while True:
            try:
                waiting = context.run(coro.send, None) if error is None else context.run(coro.throw, error)
            except StopIteration as stop:
                result: T = stop.value
                return result
            finally:
                error = None  # its traceback has this frame
            try:
                yield waiting
            except GeneratorExit:
                context.run(coro.close)
                raise
            except BaseException as thrown:
                error = thrown
    finally:
        for variable, value in context.items():
            if variable is not current_scope and value is not before.get(variable):
                variable.set(value)
