"""The run that the current code is part of.

With it a hook that calls `run` of its own session gets an error instead of a deadlock, and a wait for a step knows which
publisher it blocks.
"""

from __future__ import annotations

import contextvars
import dataclasses


@dataclasses.dataclass(slots=True, eq=False)
class RunScope:
    """A run in progress, stored in its context: its session, its publisher, and the run that it is nested in."""

    session: object
    publisher: object
    outer: RunScope | None
    active: bool = True


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
