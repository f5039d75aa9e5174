"""The arguments of a call by the names that the hook interface has for them.

Hooks may use other names, so that they get by position what may be given so. What calls the next
hook, or takes the result of a chain, is found by name.

    values_of      the arguments of a call, by key
    spread         the same as positions and keywords
    for_hooks      the same for hooks
    by_position    the arguments of a call for hooks
    with_changes   the same with those that a hook gives to the next one
    for_function   those that a function takes which is no hook
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiohooks.dispatch.interface import Point

Keywords = Mapping[str, Any]
Arguments = tuple[tuple[Any, ...], Keywords]
Key = str | int
"""The name of a parameter of the method, or of a further keyword; the place of what may only be
given by position.
"""
Values = dict[Key, Any]
"""The arguments that are given, in order of the parameters, further ones behind them."""


def values_of(point: Point, args: tuple[Any, ...], keywords: Keywords) -> Values:
    """Return the arguments of a call by their keys.

    Raises:
        TypeError: an argument is given twice.
    """
    values: Values = dict(zip(point.keys, args, strict=False))
    values.update(enumerate(args[len(point.keys) :], len(point.keys)))
    if not keywords:
        return values
    if not values.keys().isdisjoint(keywords):
        point.signature.bind(*args, **keywords)  # it raises, and names what is given twice
    values.update(keywords)
    return _sorted(point, values)


def _sorted(point: Point, values: Values) -> Values:
    named = {key: values[key] for key in (*point.keys, *point.keywords) if key in values}
    return {**named, **values}


def spread(point: Point, values: Values) -> Arguments:
    """Return arguments as positions and keywords: by position up to the first that is left out."""
    keywords: dict[Any, Any] = dict(values)
    args: list[Any] = []
    for key in point.keys:
        if key not in values:
            break
        args.append(keywords.pop(key))
    further = [key for key in keywords if isinstance(key, int)]
    args.extend(keywords.pop(key) for key in further)
    return tuple(args), keywords


def for_hooks(point: Point, values: Values) -> Arguments:
    """Return arguments for hooks, which may use other names: by position what may be given so.

    A parameter that is left out before another one has the default of the interface.

    Raises:
        TypeError: it has no default.
    """
    given = [place for place, key in enumerate(point.keys) if key in values]
    filled = {**values}
    for key in point.keys[: max(given, default=0)]:
        if key not in values and key not in point.defaults:
            args, keywords = spread(point, values)
            point.signature.bind(*args, **keywords)  # it raises, and names what is missing
        filled.setdefault(key, point.defaults.get(key))
    return spread(point, filled)


def by_position(point: Point, args: tuple[Any, ...], keywords: Keywords) -> Arguments:
    """Return the arguments of a call for hooks, as `for_hooks`."""
    if not keywords:
        return args, keywords
    return for_hooks(point, values_of(point, args, keywords))


def key_of(point: Point, values: Values) -> Key:
    """Return the key of the argument that calls the next hook, or that results replace."""
    if point.argument is not None:
        return point.positional.get(point.argument, point.argument)
    return max([key for key in values if isinstance(key, int)], default=0)


def value_of(point: Point, values: Values) -> Any:
    """Return this argument, its default if it is left out, None if it has none."""
    key = key_of(point, values)
    return values.get(key, point.defaults.get(key))


def with_changes(point: Point, values: Values, new: Sequence[Any], named: Keywords) -> Values:
    """Return the arguments with those that a hook gives to the next one: by name, or in the place
    of the last ones.
    """
    changed: Values = {**values, **named}
    fixed = {key_of(point, values), *named}
    replaced = [key for key in values if key not in fixed and key not in point.keywords]
    for key in point.keys:
        if len(replaced) < len(new) and key not in changed and key in point.defaults:
            replaced.append(key)  # the hook gives what the caller has left out, too
    if not replaced:
        replaced = [key for key in point.keywords if key in values and key not in fixed]
    if len(new) > len(replaced) and (point.takes_any_positional or not point.does_nothing):
        raise TypeError(
            f"{point.label}: the next one is called with {len(new)} positional arguments, but has"
            f" {len(replaced)} beside that which calls the next"
        )
    count = min(len(new), len(replaced))
    last = _sorted(point, dict.fromkeys(replaced))
    changed.update(zip([*last][len(last) - count :], new[len(new) - count :], strict=True))
    return _sorted(point, changed)


def for_function(point: Point, values: Values, function: Callable[..., Any]) -> Arguments:
    """Return the arguments for a function that is no hook: by position, the last ones, as many as
    it takes; by keyword what it or the method takes so.
    """
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):  # it is written in C
        parameters = [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]
    taken = 0
    keyword_only: set[Key] = set()
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            taken += 1
        elif parameter.kind is parameter.VAR_POSITIONAL:
            taken = len(values)
        elif parameter.kind is parameter.KEYWORD_ONLY:
            keyword_only.add(parameter.name)
    own = {*point.keys, *point.keywords} - keyword_only
    positions: list[Any] = []
    keywords: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(key, int) or key in own:
            positions.append(value)
        else:
            keywords[key] = value
    return tuple(positions[max(len(positions) - taken, 0) :]), keywords
