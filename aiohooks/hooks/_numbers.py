"""Numbers among the fetched values: Python's own, and arrays with one element."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohooks.errors import InvalidArgumentError


def checked_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers by tag; raise `InvalidArgumentError` for anything else."""
    return {str(tag): float(_checked_number(value, str(tag))) for tag, value in values.items()}


def _checked_number(value: Any, tag: str) -> int | float:
    number = value if isinstance(value, (bool, int, float)) else scalar(value)
    if number is None:
        raise InvalidArgumentError(
            f"{tag!r} is {describe_value(value)}; give one number, for example a mean or a norm"
            " of it"
        )
    return number


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
    return number if isinstance(number, (bool, int, float)) else None


def describe_value(value: Any) -> str:
    """Return a short text for messages: type and shape of an array, else the start of its repr."""
    shape = getattr(value, "shape", None)
    if shape is not None and shape != ():
        return f"a {type(value).__name__} of shape {tuple(shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
