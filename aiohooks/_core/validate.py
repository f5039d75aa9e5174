"""Shared checks of arguments: each `check_` function raises `InvalidArgumentError` with the value
and what to give instead.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import numbers
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard, cast

from aiohooks.errors import InvalidArgumentError, safe_repr


def is_finite(value: object) -> TypeGuard[int | float]:
    """Return whether `value` is a number of any library (not a bool) that a finite float can stand
    for, which 10**400 is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, numbers.Real)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_secs(value: object, what: str, *, optional: bool = False, positive: bool = False) -> None:
    """Raise unless `value` is a number of seconds: 0 or more, above 0 if `positive`; `optional`
    lets None pass.
    """
    if value is None and optional:
        return
    if not is_finite(value) or value < 0 or (positive and value == 0):
        bounds = "above 0" if positive else "0 or more"
        raise InvalidArgumentError(
            f"{what} is {safe_repr(value)}; give seconds,"
            f" {bounds}{', or None for no limit' if optional else ''}"
        )


def checked_int(
    value: Any,
    what: str,
    least: int | None = 0,
    *,
    most: float = math.inf,
    expected: str | None = None,
    optional: bool = False,
) -> Any:
    """Return a whole number of any library, such as numpy's, as an int; raise unless it is from
    `least` to `most`.

    A bool is none; `least=None` is no bound, and `optional` lets None pass. `expected` says what to
    give, if that is more.
    """
    if value is None and optional:
        return None
    if value is not None and not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            number = operator.index(value)
            if (least is None or least <= number) and number <= most:
                return number
    raise InvalidArgumentError(
        f"{what} is {safe_repr(value)}; give {expected or f'a whole number, {least} or more'}"
    )


def check_choice(value: object, what: str, *choices: str) -> None:
    """Raise unless `value` is one of `choices`."""
    if value not in choices:
        *others, last = (f'"{choice}"' for choice in choices)
        raise InvalidArgumentError(
            f"{what} is {safe_repr(value)}; give {', '.join(others)} or {last}"
        )


def check_instance(value: object, kind: type[Any], what: str, *, optional: bool = False) -> None:
    """Raise unless `value` is a `kind`; `optional` lets None pass."""
    if not isinstance(value, kind) and not (optional and value is None):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        or_nothing = ", or leave it out" if optional else ""
        if kind.__name__ == "Every":
            number = value if is_finite(value) else "..."
            or_nothing = f": Every(steps={number}) or Every(secs={number}){or_nothing}"
        raise InvalidArgumentError(
            f"{what} is {safe_repr(value)}; give {article} {kind.__name__}{or_nothing}"
        )


def check_callable(value: object, what: str, *, optional: bool = False) -> None:
    """Raise unless `value` is callable; a coroutine given instead of its function is closed."""
    if optional and value is None:
        return
    if inspect.iscoroutine(value):
        value.close()  # or Python warns that it was never awaited
        raise InvalidArgumentError(
            f"{what} is {safe_repr(value)}, a coroutine; give the function and its arguments, not"
            " the call"
        )
    if not callable(value):
        raise InvalidArgumentError(f"{what} is {safe_repr(value)}; give a function")


def checked_objects(values: object, kind: type[Any], what: str) -> list[Any]:
    """Return the objects as a list; raise unless each is a `kind`."""
    package = kind.__module__.partition(".")[0]
    if not isinstance(values, Iterable):
        raise InvalidArgumentError(
            f"{what} is {safe_repr(values)}; give a list of objects of {kind.__name__} of {package}"
        )
    objects: list[Any] = [*cast("Any", values)]
    for one in objects:
        if not isinstance(one, kind):
            raise InvalidArgumentError(
                f"{what} has {safe_repr(one)}; give objects of {kind.__name__} of {package}"
            )
    return objects


def check_mapping(value: object, what: str, *, optional: bool = True) -> None:
    """Raise unless `value` is a mapping; `optional` lets None pass."""
    if not isinstance(value, Mapping) and not (optional and value is None):
        raise InvalidArgumentError(
            f"{what} is {safe_repr(value)}; give a mapping{', or leave it out' if optional else ''}"
        )


def check_checkpoint_dir(value: Any) -> None:
    """Raise unless `value` is the path of a directory for checkpoints."""
    check_directory(value, "checkpoint_dir", url="the URL is for `mirror=` of a Saver")


def check_directory(value: Any, what: str, *, url: str) -> None:
    """Raise unless `value` is the path of a directory; `url` says what a URL is for.

    A URL, and a "~" that only a shell replaces, would otherwise be directories of these names below
    the current one.
    """
    try:
        path = cast("object", os.fspath(value))
    except TypeError:
        path = None
    if not path or not isinstance(path, str):
        raise InvalidArgumentError(f"{what} is {safe_repr(value)}; give the path of a directory")
    if path.find("://") > 1:  # not the letter of a drive
        raise InvalidArgumentError(
            f"{what} is {safe_repr(value)}; give the path of a directory; {url}"
        )
    if path == "~" or path.startswith(("~/", f"~{os.sep}")):
        raise InvalidArgumentError(
            f"{what} is {safe_repr(value)}; give os.path.expanduser({path!r})"
        )


def is_coroutine_function(fn: object) -> bool:
    """Return whether calling `fn` gives a coroutine: also for partials and objects with an `async
    def __call__`.
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    method = getattr(fn, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(method)


def call_error(fn: Callable[..., Any], *arguments: object) -> TypeError | None:
    """Return the error of a call with so many arguments; None if it fits, or if the function is in
    C and has no signature.
    """
    with contextlib.suppress(ValueError):
        try:
            inspect.signature(fn).bind(*arguments)
        except TypeError as error:
            return error.with_traceback(
                None
            )  # whose frames would hold the caller, which holds the error
    return None


def checked_path(path: object, name: str) -> str:
    """Return a path as a str; raise `InvalidArgumentError` if it is not one, or empty."""
    if isinstance(path, (str, os.PathLike)):
        given: str | os.PathLike[Any] = path  # pyright: ignore[reportUnknownVariableType]
        text: object = os.fspath(given)
        if isinstance(text, str) and text:
            return text
    raise InvalidArgumentError(f"{name} is {path!r}; give a path")


def checked_number(value: Any, tag: str) -> int | float:
    """Return a Python number, or the element of an array of one; raise `InvalidArgumentError` for
    anything else.
    """
    found = value if isinstance(value, (bool, int, float)) else scalar(value)
    if found is None:
        raise InvalidArgumentError(
            f"{tag!r} is {describe_value(value)}; give one number, for example a mean or a norm"
            " of it"
        )
    return found


def checked_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers by tag; raise `InvalidArgumentError` for anything else."""
    return {str(tag): float(checked_number(value, str(tag))) for tag, value in values.items()}


def scalar(value: Any) -> int | float | None:
    """Return the number that an object of any library converts to, or None."""
    try:
        if callable(getattr(value, "item", None)):
            found = value.item()
        elif isinstance(value, (str, bytes, complex)):
            return None
        else:
            found = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # torch raises RuntimeError
        return None
    return found if isinstance(found, (bool, int, float)) else None


def describe_value(value: Any) -> str:
    """Return a short text for error messages: type and shape of an array, else the start of its
    repr.
    """
    shape = getattr(value, "shape", None)
    if shape is not None and shape != ():
        return f"a {type(value).__name__} of shape {tuple(shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
