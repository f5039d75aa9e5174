"""Contexts of calls, and how the variables that calls set return to their caller."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextvars import Context, ContextVar, Token, copy_context
from operator import is_
from typing import Any, TypeAlias

from aiohooks._core.scope import current_scope

_MISSING: Any = object()

Changes: TypeAlias = list[tuple[ContextVar[Any], Any]]
"""Variables with their new values; `_MISSING` for a variable that is unset."""


def changes(before: Context, after: Context) -> Changes:
    """Return the variables that differ between two states of a context."""
    if (
        len(before) == len(after)
        and all(map(is_, before.values(), after.values()))
        and all(map(is_, before, after))
    ):
        return []
    changed = [
        (variable, value)
        for variable, value in after.items()
        if value is not before.get(variable, _MISSING)
    ]
    changed += [(variable, _MISSING) for variable in before if variable not in after]
    # A run that a call has begun is part of that call alone.
    return [change for change in changed if change[0] is not current_scope]


def is_unchanged(before: Context, after: Context) -> bool:
    """Return whether a copy of the context `before` still has its values.

    A copy never loses a variable, so equal values belong to the same variables.
    """
    if len(before) != len(after):
        return False
    # Without variables, which is usual outside of runs, `all` would cost the most.
    return not before or all(map(is_, before.values(), after.values()))


class OwnContext:
    """A context that consecutive calls share, so that a token of one call is valid in the next.

    Changes of the caller's context are applied to it before each call, and changes of a call are
    applied to the caller's context afterwards.
    """

    __slots__ = ("_before", "_caller", "_context", "_from_caller", "_to_caller")

    _context: Context | None
    _before: Context  # the state of `_context` at the last exchange with the caller
    _caller: Context  # the state of the caller's context at that time
    # The tokens with which a variable that was not set before is unset again.
    _from_caller: dict[ContextVar[Any], Token[Any]]
    _to_caller: dict[ContextVar[Any], Token[Any]]

    def __init__(self) -> None:
        self._context = None

    def update(self, caller: Context | None = None) -> Context:
        """Return the context for a call, with the changes of the caller's context.

        `caller` is a copy of the current context. By default, a new copy is made.
        """
        if caller is None:
            caller = copy_context()
        context = self._context
        if context is None:
            context = self._context = caller.copy()
            self._before = caller
            self._from_caller = {}
            self._to_caller = {}
        else:
            for variable, value in changes(self._caller, caller):
                if context.get(variable, _MISSING) is not value:
                    context.run(_set, variable, value, self._from_caller)
            # `changes` leaves out the run of the caller, which these calls are part of.
            scope = caller.get(current_scope)
            if context.get(current_scope) is not scope:
                context.run(current_scope.set, scope)
            self._before = context.copy()
        self._caller = caller
        return context

    def copy_back(
        self,
        since: Context | None = None,
        merged: dict[ContextVar[Any], Any] | None = None,
    ) -> None:
        """Apply the changes since `update`, or since a `state`, to the current context.

        `merged` has the values that concurrent calls have set so far. With it, a value that a later
        call has set in the current context itself is kept.
        """
        context = self._context
        if context is None:
            return
        changed = changes(self._before if since is None else since, context)
        if not changed:
            return
        before = self._caller
        self._caller = before.copy()
        for variable, value in changed:
            if merged is not None:
                if _is_set_later(variable, before, merged):
                    continue
                merged[variable] = value
            _set(variable, value, self._to_caller)
            if value is not _MISSING:
                # What others have set since `update` remains a change for this context.
                self._caller.run(variable.set, value)
        self._before = context.copy()

    def state(self) -> Context | None:
        """Return a copy for `copy_back`, for calls that another task makes."""
        return None if self._context is None else self._context.copy()


def _set(variable: ContextVar[Any], value: Any, tokens: dict[ContextVar[Any], Token[Any]]) -> None:
    """Set a variable, or unset it with the token of its first `_set` unless others have set it."""
    if value is not _MISSING:
        was_set = variable.get(_MISSING) is not _MISSING
        token = variable.set(value)
        if not was_set:
            tokens[variable] = token
    elif variable in tokens:
        # ValueError: the variable was set in the context of another task.
        with contextlib.suppress(ValueError):
            variable.reset(tokens[variable])
            del tokens[variable]


def _is_set_later(
    variable: ContextVar[Any], before: Context, merged: dict[ContextVar[Any], Any]
) -> bool:
    """Return whether a later call has set a variable in the current context itself.

    Its value is then neither that of `before` nor one that was merged.
    """
    current = variable.get(_MISSING)
    return current is not before.get(variable, _MISSING) and current is not merged.get(
        variable, _MISSING
    )


CallContext: TypeAlias = tuple[Context, Context] | OwnContext
"""The context of a call before and after the call, or a context that several calls share."""


def copy_back(call_contexts: Iterable[CallContext]) -> None:
    """Apply the changes of concurrent calls to the current context, in call order.

    A value that a later call has set in the current context itself is kept.
    """
    merged: dict[ContextVar[Any], Any] = {}
    for call_context in call_contexts:
        if isinstance(call_context, OwnContext):
            call_context.copy_back(merged=merged)
            continue
        before, after = call_context
        if is_unchanged(before, after):
            continue
        for variable, value in changes(before, after):
            if not _is_set_later(variable, before, merged):
                variable.set(value)
                merged[variable] = value
