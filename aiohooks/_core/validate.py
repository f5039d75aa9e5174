"""Checks of arguments.

A function `check_...` returns nothing, and a function `checked_...` returns the value in its usual
type. Both raise `InvalidArgumentError` with the invalid value, and with what to give instead. In
each, `what` or `name` is the name of the argument in the message.

    is_coroutine_function   whether a call returns a coroutine
    call_error              the error of a call with other arguments than a function takes
    InitRequired            reports a subclass that forgets to call `super().__init__()`
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import numbers
import operator
import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeGuard, cast

from aiohooks.errors import InvalidArgumentError, note_skipped_init, safe_repr


def is_finite(value: object) -> TypeGuard[int | float]:
    """Return whether `value` is a finite number, of any library, that a float can represent.

    A bool is not a number here, and the int 10**400 is too large for a float.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, numbers.Real)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_secs(
    value: object,
    what: str,
    *,
    optional: bool = False,
    positive: bool = False,
) -> None:
    """Raise unless `value` is a number of seconds: 0 or more, or above 0 if `positive`.

    None is allowed if `optional`.
    """
    if value is None and optional:
        return
    if not is_finite(value) or value < 0 or (positive and value == 0):
        bounds = "above 0" if positive else "0 or more"
        or_none = ", or None for no limit" if optional else ""
        raise InvalidArgumentError(f"{what} is {safe_repr(value)}; give seconds, {bounds}{or_none}")


def checked_int(
    value: Any,
    what: str,
    least: int | None = 0,
    *,
    most: float = math.inf,
    expected: str | None = None,
    optional: bool = False,
) -> Any:
    """Return a whole number of any library, such as numpy's, as an int.

    Raise unless the number is from `least` to `most`; if `least` is None, there is no lower limit.
    A bool is not a number here. None is allowed if `optional`. The message asks for `expected`, by
    default for `least` or more.
    """
    if value is None and optional:
        return None
    if value is not None and not isinstance(value, bool):
        # TypeError: the value is no whole number, and the message below says so.
        with contextlib.suppress(TypeError):
            number = operator.index(value)
            if (least is None or least <= number) and number <= most:
                return number
    expected = expected or f"a whole number, {least} or more"
    raise InvalidArgumentError(f"{what} is {safe_repr(value)}; give {expected}")


def check_choice(value: object, what: str, *choices: str) -> None:
    """Raise unless `value` is one of `choices`."""
    if value not in choices:
        *others, last = (f'"{choice}"' for choice in choices)
        raise InvalidArgumentError(
            f"{what} is {safe_repr(value)}; give {', '.join(others)} or {last}"
        )


def check_instance(
    value: object,
    kind: type[Any],
    what: str,
    *,
    optional: bool = False,
) -> None:
    """Raise unless `value` is a `kind`. None is allowed if `optional`."""
    if isinstance(value, kind) or (optional and value is None):
        return
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    example = ""
    # A user may give the number alone. This module imports nothing that defines `Every`.
    if kind.__name__ == "Every":
        number = value if is_finite(value) else "..."
        example = f": Every(steps={number}) or Every(secs={number})"
    or_nothing = ", or leave it out" if optional else ""
    raise InvalidArgumentError(
        f"{what} is {safe_repr(value)}; give {article} {kind.__name__}{example}{or_nothing}"
    )


def check_callable(
    value: object,
    what: str,
    *,
    optional: bool = False,
) -> None:
    """Raise unless `value` is callable. None is allowed if `optional`."""
    if optional and value is None:
        return
    if inspect.iscoroutine(value):
        # Without this, Python would also warn that the coroutine was never awaited.
        value.close()
        raise InvalidArgumentError(
            f"{what} is {safe_repr(value)}, a coroutine; give the function and its arguments, not"
            " the call"
        )
    if not callable(value):
        raise InvalidArgumentError(f"{what} is {safe_repr(value)}; give a function")


def check_mapping(
    value: object,
    what: str,
    *,
    optional: bool = True,
) -> None:
    """Raise unless `value` is a mapping. None is allowed if `optional`."""
    check_instance(value, Mapping, what, optional=optional)


def check_checkpoint_dir(value: Any) -> None:
    """Raise unless `value` is the path of a directory for checkpoints."""
    check_directory(value, "checkpoint_dir", url="the URL is for `mirror=` of a Saver")


def check_directory(
    value: Any,
    what: str,
    *,
    url: str,
) -> None:
    """Raise unless `value` is the path of a directory.

    Without this check, a URL, or a "~" that only a shell replaces, would become a directory of this
    name in the current one. The message for a URL ends with the advice `url`.
    """
    path = checked_path(value, what, "the path of a directory")
    # In `C://...`, the colon is at 1: behind the letter of a drive, and not behind a scheme.
    if path.find("://") > 1:
        raise InvalidArgumentError(f"{what} is {value!r}; give the path of a directory; {url}")
    if path == "~" or path.startswith(("~/", f"~{os.sep}")):
        raise InvalidArgumentError(f"{what} is {value!r}; give os.path.expanduser({path!r})")


def checked_path(
    path: Any,
    name: str,
    expected: str = "a path",
) -> str:
    """Return a path as a str. Raise if it is no path, or empty.

    A path of bytes is rejected, too. The message asks for `expected`.
    """
    text: object = None
    # TypeError: the value is no path, and the message below says so.
    with contextlib.suppress(TypeError):
        text = cast("object", os.fspath(path))
    if isinstance(text, str) and text:
        return text
    raise InvalidArgumentError(f"{name} is {safe_repr(path)}; give {expected}")


def is_coroutine_function(fn: object) -> bool:
    """Return whether a call of `fn` returns a coroutine.

    `fn` may be a partial function, or an object with an `async def __call__`.
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    # The method of an object's class. That of a function is a method-wrapper, and that of a class
    # makes an object: both are no coroutine functions.
    method = getattr(type(fn), "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(method)


def call_error(fn: Callable[..., Any], *arguments: object) -> TypeError | None:
    """Return the error that a call of `fn` with these arguments would raise, or None.

    It is None if the arguments fit, or if `fn` has no signature, as some functions written in C.
    """
    with contextlib.suppress(ValueError):
        try:
            inspect.signature(fn).bind(*arguments)
        except TypeError as error:
            # A traceback refers to the frames of the callers, and such a frame to the error that it
            # gets from here: only the garbage collector would free this cycle.
            return error.with_traceback(None)
    return None


class InitRequired:
    """A base class that reports a subclass which forgets to call `super().__init__()`."""

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        is_own = cls.__module__.partition(".")[0] == "aiohooks"
        # On Python 3.11, `__getattr__` makes each access to an attribute slower. So it is set only
        # where it can help: on a user's class with an `__init__` of its own.
        if "__init__" in vars(cls) and not is_own and not hasattr(cls, "__getattr__"):
            setattr(cls, "__getattr__", _report_missing)  # noqa: B010 - for type checkers


def _report_missing(self: object, name: str) -> NoReturn:
    """Raise the error of a missing attribute, with a note if `__init__` was skipped."""
    message = f"{type(self).__name__!r} object has no attribute {name!r}"
    error = AttributeError(message, name=name, obj=self)
    note_skipped_init(error)
    raise error
