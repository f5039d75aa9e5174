"""The run that the current code is part of.

A hook that calls `run` of its own session gets an error instead of a deadlock, and a wait for a
step knows the publisher that it blocks.
"""

from __future__ import annotations

from collections.abc import Awaitable
from contextvars import ContextVar
from typing import Any, Generic, Protocol, TypeVar

from aiohooks._core.activity import RunObserver

T = TypeVar("T")


class RunOwner(Protocol):
    """A session, as the code of its runs sees it.

    Attributes:
        grace_secs: how long a cancelled run waits for calls that do not end immediately.
    """

    grace_secs: float

    def until(self, awaitable: Awaitable[T], /) -> Awaitable[T]:
        """Return a wait for an awaitable, which a stop of the session ends."""
        ...


class RunScope:
    """A run in progress, stored in its context.

    It has the session, the publisher, and the enclosing run.
    """

    # Defaults that few runs change are attributes of the class, as each run makes an object.
    active: bool = True
    runner: int = 0
    """The id of the caller's task."""
    committed: bool = False
    """Whether an attempt of the run has been committed."""
    result: Any = None
    """The result of an attempt that failed after its commit."""
    observers: tuple[RunObserver, ...] = ()
    """The observers of the current attempt. A hook adds its own in `before_run`."""
    attempt: Any = None
    """The run context of the current attempt (`SessionRunContext`), if the session has hooks."""

    def __init__(
        self,
        session: RunOwner | None,
        publisher: object,
        outer: RunScope | None,
    ) -> None:
        """Make the scope of a run of `session`, or of no session, nested in the run `outer`."""
        self.session = session
        self.publisher = publisher
        self.outer = outer

    def end_attempt(self, error: BaseException | None = None) -> None:
        """End an attempt: it accepts no more effects, and its observers are notified."""
        if self.attempt is not None:
            self.attempt.accepts_effects = False
            self.attempt = None
        observers = self.observers
        self.observers = ()
        for observer in observers:
            observer.attempt_ended(error)


current_scope: ContextVar[RunScope | None] = ContextVar("aiohooks_run", default=None)
"""The run of the current context.

The run may have ended: a task keeps the context in which it was started.
"""


class assigned(Generic[T]):
    """A block in which a context variable has a value: `with assigned(variable, value): ...`.

    It is a class because `contextlib.contextmanager` sets the traceback of an error that the block
    raises, which fails if the error is frozen.
    """

    def __init__(self, variable: ContextVar[T], value: T) -> None:
        self._variable = variable
        self._value = value

    def __enter__(self) -> None:
        self._token = self._variable.set(self._value)

    def __exit__(self, *_: object) -> None:
        self._variable.reset(self._token)


def current_run() -> RunScope | None:
    """Return the innermost active run that this code is part of."""
    scope = current_scope.get()
    while scope is not None and not scope.active:
        scope = scope.outer
    return scope


def leave_run() -> None:
    """Remove the current context from its run, for a task in the background."""
    current_scope.set(None)


def begin_run(session: RunOwner | None, publisher: object) -> RunScope:
    """Make the current context part of a new run.

    The scope stays in the context after the run, and is inactive then.
    """
    outer = current_scope.get()
    if outer is not None and not outer.active:
        outer = current_run()
    scope = RunScope(session, publisher, outer)
    current_scope.set(scope)
    return scope
