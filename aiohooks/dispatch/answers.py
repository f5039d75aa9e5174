"""One result of several hooks, for each way (`ways.Point.how`).

Target        what a call of a method calls
call_target   calls the hooks, and returns the one result: the only one, the first, the last of a
              chain, or all as one

A plain function is called as a coroutine function that cannot wait.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, cast

from aiohooks.dispatch.arguments import NO_ARGUMENTS, Arguments, Keywords
from aiohooks.dispatch.calls import (
    Method,
    OrderGroup,
    RegisteredHook,
    bound_method,
    call_groups,
    order_groups,
)
from aiohooks.dispatch.ways import ChainEnd, Point
from aiohooks.dispatch.wrapping import generator_call, wrapped
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
    wrapping = [registered for registered in hooks if point.wraps(registered.hook)]
    callees = [registered for registered in hooks if not point.wraps(registered.hook)]
    if not point.is_async:
        bind = _plain
    elif point.how != "none":
        bind = bound_method
    bind_wrapper = bound_method if point.how == "wrap" else generator_call
    groups = order_groups(
        point.name,
        callees,
        grace_secs,
        bind,
        # Where a result decides what is called next.
        one_by_one=point.how in ("first", "chain"),
    )
    wrappers = order_groups(
        point.name,
        wrapping,
        grace_secs,
        bind_wrapper,
        one_by_one=True,
    )
    once = tuple(registered for registered in hooks if registered.registration.once)
    may_wait = not all(group.in_turn for group in (*groups, *wrappers))
    quick: OrderGroup | None = None
    if groups and _is_simple(point) and not (wrappers or once or may_wait):
        in_order = [registered for group in groups for registered in group.hooks]
        quick = OrderGroup(point.name, in_order, grace_secs, bind=bind)
    return Target(point, groups, wrappers, once, may_wait, quick)


def _is_simple(point: Point) -> bool:
    """Return whether results need neither the class's own method nor another call."""
    return point.how == "none" or (point.how in ("any", "one", "together") and point.does_nothing)


def _plain(registered: RegisteredHook, method: str) -> Method:
    """Return a plain method as a coroutine function, which cannot wait."""
    function = getattr(registered.hook, method)

    async def call(*args: Any, **keywords: Any) -> Any:
        return function(*args, **keywords)

    return call


# -- results

_MERGEABLE: tuple[Any, ...] = (list, tuple, dict)


async def call_target(
    target: Target,
    own: Method,
    args: tuple[Any, ...],
    keywords: Keywords,
) -> Any:
    """Call the hooks of a method, and return the result of the call.

    Args:
        target: what is called.
        own: the method of the class itself, which is called if no hook has a result.
        args: the positions of the call.
        keywords: the keywords of the call.
    """
    if not target.wrappers:
        return await _answer(target, own, args, keywords)
    innermost = functools.partial(_answer, target, own)
    call_wrapped = wrapped(target.point, target.wrappers, innermost)
    return await call_wrapped(target.point.parameters.values(args, keywords), NO_ARGUMENTS)


async def _answer(
    target: Target,
    own: Method,
    args: tuple[Any, ...],
    keywords: Keywords,
) -> Any:
    """Call the hooks that do not wrap, and return the result of the call."""
    point = target.point
    if not target.groups:
        return await own(*args, **keywords)
    if point.how == "chain":
        return await _chained(target, own, args, keywords)
    args_for_hooks = point.parameters.call_for_hooks(args, keywords)
    if point.how == "first":
        result = await _first_result(target, args_for_hooks)
    else:
        result = combined(target, await call_groups(target.groups, *args_for_hooks))
    # None is a result, too, of a hook that calls the next one itself.
    is_answered = point.how == "none" or point.does_nothing or point.calls_next
    if result is None and not is_answered:
        return await own(*args, **keywords)
    return result


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


async def _first_result(target: Target, arguments: Arguments) -> Any:
    """Call the hooks in order, and return the first result that is not None."""
    for group in target.groups:
        (result,) = await call_groups((group,), *arguments)
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
    merged: Any = None
    calls = [call for group in target.groups for call in group.calls]
    for call, result in zip(calls, results, strict=True):
        if result is None:
            continue
        kind = cast("Any", type(cast("object", result)))
        if merged is None:
            merged = kind() if kind in _MERGEABLE else result
        if kind not in _MERGEABLE or kind is not type(merged):
            raise InvalidHookError(
                f"{call.name} returned {safe_repr(result)}, which cannot be merged; return lists,"
                " tuples or dicts, all of one type, or None"
            )
        if kind is not dict:
            merged += result
            continue
        for key in result:
            if key in merged:
                raise InvalidHookError(
                    f"{call.name} returned {key!r} as another hook did; each key may come from one"
                    " hook only"
                )
        merged.update(result)
    if merged is None and target.point.does_nothing:
        return target.point.empty()
    return merged
