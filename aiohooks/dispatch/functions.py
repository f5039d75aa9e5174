"""One coroutine function in the place of several functions."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Never, ParamSpec, Protocol, cast, overload

from aiohooks.dispatch.group import HookGroup
from aiohooks.dispatch.hook import FunctionHook, HookRegistration, registration_of
from aiohooks.dispatch.ways import How, checked_how, point
from aiohooks.errors import InvalidArgumentError, InvalidHookError, safe_repr

P = ParamSpec("P")


class ComposedFunctions(Protocol[P]):
    """What `compose_functions` returns."""

    async def __call__(self, *args: P.args, **keywords: P.kwargs) -> Any:
        """Call the functions."""

    def add(self, function: object, /) -> None:
        """Add a function, or a registration; this applies from the next call."""

    def remove(self, function: object, /) -> None:
        """Remove a function, of several registrations the earliest; this applies from the next
        call.
        """


@overload
def compose_functions(
    functions: list[Never],
    *,
    results: How | None = None,
    name: str | None = None,
) -> ComposedFunctions[...]: ...
@overload
def compose_functions(  # type: ignore[overload-overlap]
    functions: Iterable[Callable[P, object]],
    *,
    results: How | None = None,
    name: str | None = None,
) -> ComposedFunctions[P]: ...
@overload
def compose_functions(
    functions: Iterable[object],
    *,
    results: How | None = None,
    name: str | None = None,
) -> ComposedFunctions[...]: ...
def compose_functions(
    functions: Iterable[object],
    *,
    results: How | None = None,
    name: str | None = None,
) -> ComposedFunctions[...]:
    """Return one coroutine function that calls several functions, for a framework that takes a
    plain callable.

    Example: `httpx.AsyncClient(event_hooks={"request": [compose_functions([sign, audit])]})`.

    They are called as the methods of hooks are: concurrently, and the first failure ends the call.
    What this returns has `add` and `remove`, which hold from the next call on. Each function must
    take every call that the first one takes, whatever its parameters are named.

    Args:
        functions: coroutine functions and plain ones, or registrations made by `configure`.
        results: how the results of several become one, if they return any; see `point`.
        name: its name, and that of the group in messages.

    Raises:
        InvalidHookError: one is not a function, cannot be called as the first one is, has an option
            that cannot hold, or its arguments in another order than the first.
        InvalidArgumentError: an argument is invalid.
    """
    if callable(functions) or not isinstance(functions, Iterable):
        raise InvalidArgumentError(f"functions is {safe_repr(functions)}; give a list of functions")
    if results is not None:
        checked_how(results, "results")
    composed = _FunctionGroup(name or "functions", results)
    composed.make([_function_hook(function) for function in functions])

    async def call(*args: Any, **keywords: Any) -> Any:
        return await composed.group.hooks(*args, **keywords)

    call.__name__ = call.__qualname__ = name or "functions"
    attributes: Any = call
    attributes.add = composed.add
    attributes.remove = composed.remove
    attributes.__signature__ = _signature(composed.pattern)
    return cast("ComposedFunctions[...]", call)


class _FunctionGroup:
    """A group of functions, which are called as the first one of them is."""

    def __init__(self, name: str, results: How | None) -> None:
        self._name = name
        self._results: How | None = results

    def make(self, hooks: list[HookRegistration]) -> None:
        """Make the group, of which the hooks are functions."""
        functions: list[Callable[..., Any]] = [hook.hook.function for hook in hooks]
        # One of `*args` alone would accept any call, and the functions behind it would not.
        named = [function for function in functions if _places(function)]
        pattern = [*named, *functions, _anything][0]
        for function in functions:
            self._check_order(function, pattern)
        kind: Any = type(self._name, (), {"__call__": _method_like(pattern, self._results)})
        self.group: HookGroup[Any] = HookGroup(kind, hooks, name=self._name)
        # Last: if functions do not fit, nothing has changed.
        self.pattern: Callable[..., Any] = pattern

    def add(self, function: object, /) -> None:
        hook = _function_hook(function)
        if self.pattern is _anything:
            self.make([hook])
        else:
            self._check_order(hook.hook.function, self.pattern)
            self.group.add(hook)

    def remove(self, function: object, /) -> None:
        self.group.remove(function)

    def _check_order(self, function: Callable[..., Any], pattern: Callable[..., Any]) -> None:
        """Raise if a parameter has another place in a function than in `pattern`, the first one."""
        if self._results is None:
            return
        places = _places(pattern)
        for name, place in _places(function).items():
            if places.get(name, place) != place:
                raise InvalidHookError(
                    f"{function!r} has its arguments in another order than {pattern!r}, which would"
                    " mix up what calls the next, or takes a result; give functions with the same"
                    " arguments in the same order"
                )


def _function_hook(function: object) -> HookRegistration:
    """Return the registration of a hook whose only method is a function.

    Raises:
        InvalidHookError: it is no function.
    """
    registration = registration_of(function)
    return registration._replace(hook=FunctionHook("__call__", registration.hook, is_alone=True))


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function; one that is written in C may take any arguments."""
    with contextlib.suppress(TypeError, ValueError):
        return inspect.signature(function)
    return inspect.signature(_anything)


def _places(function: Callable[..., Any]) -> dict[str, int]:
    """Return the places of the named parameters of a function; -1 is passed by name only."""
    places: dict[str, int] = {}
    for place, parameter in enumerate(_signature(function).parameters.values()):
        if parameter.kind is parameter.KEYWORD_ONLY:
            places[parameter.name] = -1
        elif parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            places[parameter.name] = place
    return places


def _method_like(function: Callable[..., Any], results: How | None) -> Any:
    """Return a method of a hook interface of functions that are called as this one is."""

    async def call(self: Any, *args: Any, **keywords: Any) -> Any: ...

    method: Any = functools.update_wrapper(call, function)
    del method.__wrapped__  # it is no method
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    signature = _signature(function)
    method.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])
    if results is not None:
        return point(results)(method)
    # What this one returns says nothing of the others.
    method.__annotations__ = {}
    return method


def _anything(*args: Any, **keywords: Any) -> Any: ...
