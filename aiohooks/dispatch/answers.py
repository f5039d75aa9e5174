"""One result of several hooks, for each way (`ways.Point.how`).

Target      what a method calls
answer      calls the hooks that do not wrap, and returns the one result: the only one, the first,
            the last of a chain, or all as one

A plain function is called as a coroutine function that cannot wait.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple

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
    """What a method calls; nothing, if no hook implements it."""

    point: Point
    groups: tuple[OrderGroup, ...]
    """The calls of the hooks that do not wrap; of one hook each, where a result decides what is
    called next.
    """
    wrappers: tuple[OrderGroup, ...]
    """The calls of hooks that wrap the others, of one hook each."""
    once: tuple[RegisteredHook, ...]
    """The hooks that are removed by this call."""
    quick: OrderGroup | None
    """All calls, if they are made one after another and nothing else has to be done; otherwise
    None. This is the path that has to cost almost nothing.
    """

    @property
    def may_wait(self) -> bool:
        """Whether a call may wait."""
        return not all(group.in_turn for group in (*self.groups, *self.wrappers))


def make_target(
    point: Point,
    hooks: Iterable[RegisteredHook],
    grace_secs: float,
    bind: Bind,
) -> Target:
    """Return what a method calls.

    Args:
        point: the method.
        hooks: the hooks that implement it, in registration order.
        grace_secs: how long cancelled calls may take to end.
        bind: returns the function that is called for a hook, which may queue the call.
    """
    hooks = sorted(hooks, key=lambda registered: registered.registration.order)
    if not point.is_async:
        bind = _plain
    elif point.how != "none":
        bind = bound_method
    bind_wrapper = bound_method if point.how == "wrap" else generator_call
    wrappers: list[OrderGroup] = []
    callees: list[RegisteredHook] = []
    for registered in hooks:
        if point.how == "wrap" or wraps_others(getattr(registered.hook, point.name)):
            wrapper = OrderGroup(
                point.name, [registered], grace_secs, bind=bind_wrapper, is_always_called=True
            )
            wrappers.append(wrapper)
        else:
            callees.append(registered)
    once = tuple(registered for registered in hooks if registered.registration.once)
    is_answered_in_turn = point.how in ("first", "chain")
    all_calls = OrderGroup(point.name, callees, grace_secs, bind=bind)
    if is_answered_in_turn:
        groups = tuple(
            OrderGroup(point.name, [registered], grace_secs, bind=bind) for registered in callees
        )
    else:
        groups = order_groups(point.name, callees, grace_secs, bind)
    # A body of the class itself has to be called where no hook has a result.
    is_simple = point.how == "none" or (
        point.how in ("any", "one", "together") and point.does_nothing
    )
    is_quick = is_simple and all_calls.in_turn and callees and not (wrappers or once)
    return Target(point, groups, tuple(wrappers), once, all_calls if is_quick else None)


def as_coroutine_function(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """Return a plain function as a coroutine function, which cannot wait."""

    async def call(*args: Any, **keywords: Any) -> Any:
        return function(*args, **keywords)

    return call


def _plain(registered: RegisteredHook, method: str) -> Method:
    return as_coroutine_function(getattr(registered.hook, method))


# -- results


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
    if keywords:
        args, keywords = point.parameters.call_for_hooks(args, keywords)
    if point.how == "first":
        result = await _first_result(target, args, keywords)
    else:
        result = combined(target, await call_groups(target.groups, args, keywords))
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
            values[parameters.chosen_key(values)] = result
            has_result = True
    if not has_result:
        return await own(*args, **keywords)
    return parameters.chosen_value(values)


async def _first_result(target: Target, args: tuple[Any, ...], keywords: Keywords) -> Any:
    """Call the hooks in order, and return the first result that is not None."""
    for group in target.groups:
        (result,) = await call_groups((group,), args, keywords)
        if result is not None:
            return target.point.value_of(result)
    return None


def combined(target: Target, results: Sequence[Any]) -> Any:
    """Return the result of a call whose hooks have all been called, in the way of its method.

    Raises:
        InvalidHookError: there are several hooks and a result, and nothing says what that means; or
            the results cannot be merged.
    """
    point = target.point
    if point.how == "none":
        if _first(results) is not None:
            _log_dropped(target.groups, results)
        return None
    values = [point.value_of(result) for result in results]
    if point.how == "together":
        return _first(values)
    if point.how == "all":
        return values
    if point.how == "merge":
        names = [call.name for group in target.groups for call in group.calls]
        return _merged(point, names, values)
    # Only where the interface does not say whether the method returns something.
    if len(values) > 1 and _first(values) is not None:
        raise InvalidHookError(
            f"{point.label} got the results {safe_repr(values)}; say which one counts:"
            f" {point.advice}"
        )
    return _first(values)


def _first(answers: Sequence[Any]) -> Any:
    for answer in answers:
        if answer is not None:
            return answer
    return None


def _log_dropped(groups: Sequence[OrderGroup], answers: Sequence[Any]) -> None:
    remaining = iter(answers)
    for group in groups:
        for registered, call in zip(group.hooks, group.calls, strict=True):
            registered.log_dropped(call.name, next(remaining))


def _merged(point: Point, names: Sequence[str], answers: Sequence[Any]) -> Any:
    """Join results in a new list, tuple or dict.

    Args:
        point: the method.
        names: the name of each call, for messages.
        answers: the result of each call.

    Raises:
        InvalidHookError: the results have different types, or a key comes from two hooks.
    """
    given = [pair for pair in zip(names, answers, strict=True) if pair[1] is not None]
    if not given:
        if point.does_nothing:
            return point.empty()
        return None
    first, like = given[0]
    for name, result in given:
        if type(result) not in (list, tuple, dict) or type(result) is not type(like):
            wanted = f"a {type(like).__name__} as {first} does"
            if result is like:
                wanted = "a list, tuple or dict"
            raise InvalidHookError(
                f"{name} returned {safe_repr(result)}, which cannot be merged; return {wanted}, or"
                " None"
            )
    if type(like) is not dict:
        return type(like)(item for _, result in given for item in result)
    merged: dict[Any, Any] = {}
    origins: dict[Any, str] = {}
    for name, result in given:
        for key, value in result.items():
            if key in merged:
                raise InvalidHookError(
                    f"{origins[key]} and {name} both returned {key!r}; each key may come from one"
                    " hook only"
                )
            merged[key] = value
            origins[key] = name
    return merged
