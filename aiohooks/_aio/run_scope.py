"""Which run the current code belongs to.

A hook that calls its own session's `run` is told so instead of hung, and a wait for a step knows whom it keeps from
advancing it.
"""

from __future__ import annotations

import contextvars


class RunScope:
    """One run while it goes on, in whatever its context has reached."""

    __slots__ = ("active", "outer", "publisher", "session")

    def __init__(self, session: object, publisher: object, outer: RunScope | None) -> None:
        """Begins a run of `session`, which may advance a store as `publisher`, inside the run `outer`."""
        self.session: object = session
        self.publisher: object = publisher
        self.outer: RunScope | None = outer
        self.active: bool = True


_running: contextvars.ContextVar[RunScope | None] = contextvars.ContextVar("aiohooks_running", default=None)


def begin_run(session: object, publisher: object) -> RunScope:
    """Marks the context; the mark is left behind when the run is over, as inactive."""
    running = RunScope(session, publisher, current_run())
    _running.set(running)
    return running


def current_run() -> RunScope | None:
    """The run that this code is part of."""
    running = _running.get()
    while running is not None and not running.active:
        running = running.outer
    return running


def leave_run() -> None:
    """Makes the current context part of no run: for background tasks."""
    _running.set(None)
