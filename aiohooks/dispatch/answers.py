"""One result of several hooks, for each way (`ways.Point.how`).

Target    what a call of a method calls
answer    calls the hooks that do not wrap, and returns the one result: the only one, the first,
          the last of a chain, or all as one

A plain function is called as a coroutine function that cannot wait.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, cast

from aiohooks.dispatch.arguments import Keywords
from aiohooks.dispatch.calls import (
    Method,
    OrderGroup,
    RegisteredHook,
    bound_method,
    call_groups,
    order_groups,
)
from aiohooks.dispatch.plain import wraps_others
from aiohooks.dispatch.ways import ChainEnd, Point
from aiohooks.dispatch.wrapping import generator_call
from aiohooks.errors import InvalidHookError, safe_repr

Bind = Callable[[RegisteredHook, str], Method]


class Target(NamedTuple):
    """What a call of a method calls; nothing, if no hook implements it."""

    point: Point
    groups: tuple[OrderGroup, ...]
    """The calls of the hooks that do not wrap; of one hook each, where a result decides what is
    called next.
    """
    wrappers: tuple[OrderGroup, ...]
    """The calls of hooks that wrap the others, of one hook each."""
    once: tuple[RegisteredHook, ...]
    """The hooks that are removed by this call."""
    may_wait: bool
    quick: OrderGroup | None
    """All calls, if none may wait and nothing else has to be done; otherwise None. This is the path
    that has to cost almost nothing.
    """


def make_target(
    point: Point,
    hooks: Collection[RegisteredHook],
    grace_secs: float,
    bind: Bind,
) -> Target:
    """Return what a call of a method calls.

    Args:
        point: the method.
        hooks: the hooks that implement it, in registration order.
        grace_secs: how long cancelled calls may take to end.
        bind: returns the function that is called for a hook, which may queue the call.
    """
    wrapping = [registered for registered in hooks if wraps(point, registered)]
    callees = [registered for registered in hooks if not wraps(point, registered)]
    once = tuple(registered for registered in hooks if registered.registration.once)
    if not point.is_async:
        bind = _plain
    elif point.how != "none":
        bind = bound_method
    name = point.name
    one_by_one = point.how in ("first", "chain")
    groups = order_groups(name, callees, grace_secs, bind, one_by_one=one_by_one)
    bind_wrapper = bound_method if point.how == "wrap" else generator_call
    wrappers = order_groups(
        name, wrapping, grace_secs, bind_wrapper, one_by_one=True, is_always_called=True
    )
    may_wait = not all(group.in_turn for group in (*groups, *wrappers))
    # A body of the class itself has to be called where no hook has a result.
    is_simple = point.how == "none" or (
        point.how in ("any", "one", "together") and point.does_nothing
    )
    quick: OrderGroup | None = None
    if groups and is_simple and not (wrappers or once or may_wait):
        in_order = [registered for group in groups for registered in group.hooks]
        quick = OrderGroup(name, in_order, grace_secs, bind=bind)
    return Target(point, groups, wrappers, once, may_wait, quick)


def wraps(point: Point, registered: RegisteredHook) -> bool:
    """Return whether the method of a hook wraps that of the others."""
    return point.how == "wrap" or wraps_others(getattr(registered.hook, point.name))


def _plain(registered: RegisteredHook, method: str) -> Method:
    """Return a plain method as a coroutine function, which cannot wait."""
    function = getattr(registered.hook, method)

    async def call(*args: Any, **keywords: Any) -> Any:
        return function(*args, **keywords)

    return call


# -- results

_MERGEABLE: tuple[Any, ...] = (list, tuple, dict)


async def answer(
    target: Target,
    own: Method,
    args: tuple[Any, ...],
    keywords: Keywords,
) -> Any:
    """Call the hooks that do not wrap, and return the result of the call.

    Args:
        target: what is called.
        own: the method of the class itself, which is called if no hook has a result.
        args: the positions of the call.
        keywords: the keywords of the call.
    """
    point = target.point
    if not target.groups:
        return await own(*args, **keywords)
    if point.how == "chain":
        return await _chained(target, own, args, keywords)
    if point.how == "first":
        result = await _first_result(target, args, keywords)
    else:
        result = combined(target, await all_results(target, args, keywords))
    # None is a result, too, of a hook that calls the next one itself.
    is_answered = point.how == "none" or point.does_nothing or point.calls_next
    if result is None and not is_answered:
        return await own(*args, **keywords)
    return result


async def all_results(target: Target, args: tuple[Any, ...], keywords: Keywords) -> list[Any]:
    """Call the hooks that do not wrap, and return all their results."""
    given = target.point.parameters.call_for_hooks(args, keywords)
    return await call_groups(target.groups, *given)


async def _chained(
    target: Target,
    own: Method,
    args: tuple[Any, ...],
    keywords: Keywords,
) -> Any:
    """Call the hooks of a chain; if none has a result, call `own`, the method of the class."""
    parameters = target.point.parameters
    values = parameters.values(args, keywords)
    has_result = False
    for group in target.groups:
        (result,) = await call_groups((group,), *parameters.for_hooks(values))
        if isinstance(result, ChainEnd):
            return result.value
        if result is not None:
            values[parameters.chosen] = result
            has_result = True
    if not has_result:
        return await own(*args, **keywords)
    return parameters.chosen_value(values)


async def _first_result(target: Target, args: tuple[Any, ...], keywords: Keywords) -> Any:
    """Call the hooks in order, and return the first result that is not None."""
    given = target.point.parameters.call_for_hooks(args, keywords)
    for group in target.groups:
        (result,) = await call_groups((group,), *given)
        if result is not None:
            return target.point.value_of(result)
    return None


def combined(target: Target, results: Iterable[Any]) -> Any:
    """Return the result of a call whose hooks have all been called, in the way of its method.

    Raises:
        InvalidHookError: there are several hooks and a result, and nothing says what that means; or
            the results cannot be merged.
    """
    point = target.point
    if point.how == "none":
        remaining = iter(results)
        for group in target.groups:
            for registered, call in zip(group.hooks, group.calls, strict=True):
                registered.log_dropped(call.name, next(remaining))
        return None
    values = [point.value_of(result) for result in results]
    if point.how == "all":
        return values
    if point.how == "merge":
        return _merged(target, values)
    first = next((value for value in values if value is not None), None)
    # Only where the interface does not say whether the method returns something.
    if point.how != "together" and len(values) > 1 and first is not None:
        raise InvalidHookError(
            f"{point.label} got the results {safe_repr(values)}; say which one counts:"
            f" {point.advice}"
        )
    return first


def _merged(target: Target, results: Iterable[Any]) -> Any:
    """Join results in a new list, tuple or dict.

    Raises:
        InvalidHookError: the results have different types, or a key comes from two hooks.
    """
    names = [call.name for group in target.groups for call in group.calls]
    given = [pair for pair in zip(names, results, strict=True) if pair[1] is not None]
    if not given:
        return target.point.empty() if target.point.does_nothing else None
    first, like = given[0]
    kind = cast("Any", type(cast("object", like)))
    items: list[Any] = []
    origins: dict[Any, str] = {}
    for name, result in given:
        if kind not in _MERGEABLE or type(result) is not kind:
            wanted = f"a {kind.__name__} as {first} does"
            if result is like:
                wanted = "a list, tuple or dict"
            raise InvalidHookError(
                f"{name} returned {safe_repr(result)}, which cannot be merged; return {wanted}, or"
                " None"
            )
        if kind is not dict:
            items += result
            continue
        for key, value in result.items():
            if key in origins:
                raise InvalidHookError(
                    f"{origins[key]} and {name} both returned {key!r}; each key may come from one"
                    " hook only"
                )
            origins[key] = name
            items.append((key, value))
    return cast("Any", kind)(items)
