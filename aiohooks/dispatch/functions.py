"""One coroutine function in the place of several functions."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, Protocol, cast, overload

from aiohooks.dispatch.group import HookGroup
from aiohooks.dispatch.hook import FunctionHook, HookRegistration, registration_of
from aiohooks.dispatch.ways import How, checked_how, point
from aiohooks.errors import InvalidArgumentError, safe_repr

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
    What this returns has `add` and `remove`, which hold from the next call on. Arguments are passed
    by position where they can be. Each function must take every call that the first one takes,
    whatever its parameters are named.

    Args:
        functions: coroutine functions and plain ones, or registrations made by `configure`; at
            least one.
        results: how the results of several become one, if they return any; see `point`.
        name: its name, and that of the group in messages.

    Raises:
        InvalidHookError: one is not a function, cannot be called as the first one is, or has an
            option that cannot hold.
        InvalidArgumentError: an argument is invalid.
    """
    if callable(functions) or not isinstance(functions, Iterable):
        raise InvalidArgumentError(f"functions is {safe_repr(functions)}; give a list of functions")
    if results is not None:
        checked_how(results, "results")
    hooks = [_function_hook(function) for function in functions]
    if not hooks:
        raise InvalidArgumentError("functions is empty; the first one says how all are called")
    first = hooks[0].hook.function
    label = name or "functions"
    namespace = {"__call__": _method_like(first, results)}
    kind: Any = type(label, (), namespace)
    group: HookGroup[Any] = HookGroup(kind, hooks)

    async def call(*args: Any, **keywords: Any) -> Any:
        return await group.hooks(*args, **keywords)

    def add(function: object, /) -> None:
        group.add(_function_hook(function))

    call.__name__ = label
    call.__qualname__ = label
    attributes: Any = call
    attributes.add = add
    attributes.remove = group.remove
    attributes.__signature__ = _signature(first)
    return cast("ComposedFunctions[...]", call)


def _function_hook(function: object) -> HookRegistration:
    """Make a hook of a function, or of a registration of one; its only method is `__call__`.

    Raises:
        InvalidHookError: `function` is not a function.
    """
    registration = registration_of(function)
    hook = FunctionHook("__call__", registration.hook, is_alone=True)
    return registration._replace(hook=hook)


def _method_like(function: Callable[..., Any], results: How | None) -> Any:
    """Return a method of a hook interface of functions that are called as this one is."""

    async def call(self: Any, *args: Any, **keywords: Any) -> Any: ...

    method: Any = functools.update_wrapper(call, function)
    del method.__wrapped__  # it is no method
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    signature = _signature(function)
    parameters = [own, *signature.parameters.values()]
    method.__signature__ = signature.replace(parameters=parameters)
    if results is not None:
        return point(results)(method)
    # What this one returns says nothing of the others.
    method.__annotations__ = {}
    return method


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function; one that is written in C may take any arguments."""
    with contextlib.suppress(TypeError, ValueError):
        return inspect.signature(function)
    return inspect.signature(_anything)


def _anything(*args: Any, **keywords: Any) -> Any: ...
