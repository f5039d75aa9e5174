"""What observing hooks are given to watch, and what they make of the values."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, cast

from aiohooks._errors import InvalidArgumentError
from aiohooks._graph import Node

Values = Mapping[str, Any] | Iterable[Any]
"""A mapping from a tag to a fetch, or several nodes or names, which name themselves."""


def checked_values(values: object, *, may_be_empty: bool = False) -> dict[str, Any]:
    """The fetches by tag.

    Raises:
        InvalidArgumentError: not a mapping and not a list, a tag that is no text, or nothing at all.
    """
    if isinstance(values, str):
        raise InvalidArgumentError(f"values is the str {values!r}; give a mapping or a list: [{values!r}]")
    if values is None:
        fetches: dict[str, Any] = {}
    elif isinstance(values, Mapping):
        fetches = dict(values)  # pyright: ignore[reportUnknownArgumentType]
    elif isinstance(values, Iterable):
        items: list[Any] = list(values)  # pyright: ignore[reportUnknownArgumentType]
        fetches = {item.name if isinstance(item, Node) else item: item for item in items}
    else:
        raise InvalidArgumentError(f"values is {values!r}; give a mapping from a tag to what to fetch, or a list")
    for tag in cast("Iterable[object]", fetches):
        if not isinstance(tag, str) or not tag:
            raise InvalidArgumentError(f"values has the tag {tag!r}; give a mapping from a non-empty str to what to fetch")
    if not fetches and not may_be_empty:
        raise InvalidArgumentError("values is empty; give a mapping from a tag to what to fetch")
    return fetches


def number(value: Any, tag: str) -> int | float:
    """A value as a plain number: of Python, or of one element of any library's array.

    Raises:
        InvalidArgumentError: it is not one number.
    """
    if not isinstance(value, (bool, int, float)):
        found = _item(value)
        if not isinstance(found, (bool, int, float)):
            raise InvalidArgumentError(f"{tag!r} is {_shown(value)}; give one number, a mean or a norm of it for example")
        return found
    return value


def plain(value: Any, tag: str) -> Any:
    """A value made of None, bool, int, float, str, lists and dicts with str keys alone; arrays become lists.

    Raises:
        InvalidArgumentError: something in it is none of these.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (bool, int, float, str)):  # of a subclass, whose own repr would be written: an enumeration's
        return str.__str__(value) if isinstance(value, str) else float(value) if isinstance(value, float) else int(value)
    if isinstance(value, Mapping):
        mapping: Mapping[Any, Any] = value  # pyright: ignore[reportUnknownVariableType]
        return {str(key): plain(item, f"{tag}.{key}") for key, item in mapping.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, tag) for item in cast("Iterable[Any]", value)]
    if callable(getattr(value, "tolist", None)):
        listed = value.tolist()
        if type(listed) is not type(value):
            return plain(listed, tag)
    found = _item(value)
    if found is None:
        raise InvalidArgumentError(f"{tag!r} is {_shown(value)}; give numbers, texts, or lists or mappings of these")
    return found


def checked_path(path: object, what: str) -> str:
    """A path as a str.

    Raises:
        InvalidArgumentError: it is none.
    """
    if isinstance(path, (str, os.PathLike)):
        text: object = os.fspath(path)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        if isinstance(text, str) and text:
            return text
    raise InvalidArgumentError(f"{what} is {path!r}; give a path")


def _item(value: Any) -> int | float | None:
    """The one number that it is, or None."""
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


def _shown(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None and shape != ():
        return f"a {type(value).__name__} of shape {tuple(shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
