"""Contexts: the run that the current one is part of, and copies for calls, which give back to the
caller what they have set.

With the run, a hook that calls `run` of its own session gets an error instead of a deadlock, and a
wait for a step knows which publisher it blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Iterable
from contextvars import Context, ContextVar, Token, copy_context
from operator import is_
from typing import Any, Protocol, TypeAlias, TypeVar

from aiohooks._core.diagnostics import Awaited
from aiohooks._core.observers import RunObserver

T = TypeVar("T")
_MISSING: Any = object()


class RunOwner(Protocol):
    """A session, as what is part of its runs knows it."""

    def until(self, awaitable: Awaitable[T], /) -> Awaitable[T]:
        """Return a wait for something, which a stop of the session ends too."""
        ...

    def awaited(self) -> Awaited:
        """Return the session, as what its calls are part of, for a report."""
        ...


class RunScope:
    """A run in progress, stored in its context: its session, its publisher, and the run that it is
    nested in.
    """

    # Attributes of the class where they are seldom set: one is made for each run.
    active: bool = True
    runner: int = 0
    """The id of the caller's task."""
    committed: bool = False
    """Whether an attempt of it has been committed."""
    observers: tuple[RunObserver, ...] = ()
    """Those of the current attempt; a hook adds its own in `before_run`."""
    attempt: Any = None
    """The run context of the current attempt (`SessionRunContext`), where hooks have one."""

    def __init__(self, session: RunOwner | None, publisher: object, outer: RunScope | None) -> None:
        """Make the scope of a run of `session`, or of none, which is nested in `outer`."""
        self.session = session
        self.publisher = publisher
        self.outer = outer

    def end_attempt(self, error: BaseException | None = None) -> None:
        """End an attempt: its effects are complete, and its observers see nothing of the next."""
        if self.attempt is not None:
            self.attempt.accepts_effects = False
            self.attempt = None
        observers, self.observers = self.observers, ()
        for observer in observers:
            observer.attempt_ended(error)


current_scope: ContextVar[RunScope | None] = ContextVar("aiohooks_run", default=None)
"""The run of the current context. It may have ended: a task keeps the context that it was started
in.
"""


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
    """Make the current context part of a new run; the scope stays in the context, inactive, when
    the run is over.
    """
    outer = current_scope.get()
    scope = RunScope(session, publisher, outer if outer is None or outer.active else current_run())
    current_scope.set(scope)
    return scope


# -- contexts of calls


Changes: TypeAlias = list[tuple[ContextVar[Any], Any]]


def changes(before: Context, after: Context) -> Changes:
    """Return the variables that differ between two states of one context, with their new values;
    `_MISSING` if unset.
    """
    if (
        len(before) == len(after)
        and all(map(is_, before.values(), after.values()))
        and all(map(is_, before, after))
    ):
        return []
    found = [(one, value) for one, value in after.items() if value is not before.get(one, _MISSING)]
    found += [(one, _MISSING) for one in before if one not in after]
    return [
        change for change in found if change[0] is not current_scope
    ]  # a run begun in a call is part of that call alone


class OwnContext:
    """A context for several calls, one after the other: a token that one of them has got is valid
    in the next.

    Before each call it gets what has changed in the caller's context, and after it, the caller's
    gets what the call has changed.
    """

    __slots__ = ("_before", "_caller", "_context", "_given", "_taken")

    _context: Context | None
    _caller: Context  # at the last call, with what was given back since
    _before: Context  # the state of the context then
    # By which a variable that was not set before is unset again.
    _given: dict[ContextVar[Any], Token[Any]]
    _taken: dict[ContextVar[Any], Token[Any]]

    def __init__(self) -> None:
        self._context = None

    def update(
        self, caller: Context | None = None, known: dict[int, Changes] | None = None
    ) -> Context:
        """Return the context for a call from the current context, of which `caller` is a copy.

        `known` has its differences from earlier copies, for other hooks that have been called with
        the same ones.
        """
        if caller is None:
            caller = copy_context()
        context = self._context
        if context is None:
            context = self._context = caller.copy()
            self._before, self._given, self._taken = caller, {}, {}
        else:
            found = None if known is None else known.get(id(self._caller))
            if found is None:
                found = changes(self._caller, caller)
                if known is not None:
                    known[id(self._caller)] = found
            for variable, value in found:
                if context.get(variable, _MISSING) is not value:
                    context.run(_set, variable, value, self._taken)
            if context.get(current_scope) is not (scope := caller.get(current_scope)):
                context.run(current_scope.set, scope)
            self._before = context.copy()
        self._caller = caller
        return context

    def copy_back(self, since: Context | None = None) -> None:
        """Set in the current context what was set, and unset what was unset, since the last call,
        or since an earlier `state`.
        """
        if self._context is not None and (found := changes(since or self._before, self._context)):
            self._caller = self._caller.copy()
            for variable, value in found:
                _set(variable, value, self._given)
                if value is not _MISSING:
                    self._caller.run(
                        variable.set, value
                    )  # what others have set since `update` is new to this context
            self._before = self._context.copy()

    def state(self) -> Context | None:
        """Return the present state for `copy_back`: where calls are made in another task, its
        context has got what they set.
        """
        return None if self._context is None else self._context.copy()


def _set(variable: ContextVar[Any], value: Any, tokens: dict[ContextVar[Any], Token[Any]]) -> None:
    """Set a variable, or unset it with the token of its first `_set`; one that others have set
    stays.
    """
    if value is not _MISSING:
        was_set = variable.get(_MISSING) is not _MISSING
        token = variable.set(value)
        if not was_set:
            tokens[variable] = token
    elif variable in tokens:
        with contextlib.suppress(
            ValueError
        ):  # it was set in another context, as the block was entered in another task
            variable.reset(tokens[variable])
            del tokens[variable]


def is_unchanged(values: list[Any], after: Context) -> bool:
    """Return whether a copy of a context with these values still has them: a variable that was set
    cannot be unset in a copy.
    """
    return len(after) == len(values) and (not values or all(map(is_, after.values(), values)))


CallContext: TypeAlias = tuple[Context, Context] | OwnContext
"""The context of a call, as it was before the call and as it is; or one that several calls have
had.
"""


def copy_back(contexts: Iterable[CallContext]) -> None:
    """Set in the current context what concurrent calls have set in theirs, in order of the calls.

    What a later call in the current context itself has set meanwhile stays.
    """
    known: Context | None = None
    values: list[Any] = []
    merged: dict[ContextVar[Any], Any] = {}
    for one in contexts:
        if isinstance(one, OwnContext):
            one.copy_back()
            continue
        before, after = one
        if before is not known:
            known, values = before, [*before.values()]
        if is_unchanged(values, after):
            continue
        for variable, value in changes(before, after):
            current = variable.get(_MISSING)
            if current is before.get(variable, _MISSING) or current is merged.get(
                variable, _MISSING
            ):
                variable.set(value)
                merged[variable] = value
