"""Numbers among the fetched values: Python's own, and arrays with one element."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohooks.errors import InvalidArgumentError


def checked_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers by tag; raise `InvalidArgumentError` for anything else."""
    numbers: dict[str, float] = {}
    for tag, value in values.items():
        number = scalar(value)
        if number is None:
            raise InvalidArgumentError(
                f"{str(tag)!r} is {describe_value(value)}; give one number, for example a mean or a"
                " norm of it"
            )
        numbers[str(tag)] = float(number)
    return numbers


def scalar(value: Any) -> int | float | None:
    """Return the number that an object of any library converts to, or None."""
    if isinstance(value, (str, bytes, complex)):
        return None
    try:
        has_item = callable(getattr(value, "item", None))
        number = value.item() if has_item else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        # torch raises RuntimeError.
        return None
    if isinstance(number, (int, float)):
        return number
    return None


def describe_value(value: Any) -> str:
    """Return a short text for messages: type and shape of an array, else the start of its repr."""
    shape = getattr(value, "shape", None)
    if shape is not None and shape != ():
        return f"a {type(value).__name__} of shape {tuple(shape)}"
    text = repr(value)
    if len(text) > 80:
        text = f"{text[:77]}..."
    return text
