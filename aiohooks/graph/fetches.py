"""Nested fetches and feeds: merging the requests of a run, and splitting its results. Nothing here waits.

A fetch is a node or its name, or a list, tuple, namedtuple, mapping or dataclass of fetches, nested as you like. Each leaf
is evaluated once per run; the result of a request has the shape of its fetches.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiohooks.errors import FetchError, safe_repr
from aiohooks.graph.graph import GlobalStep, Graph, Node, Operation, Output, Placeholder, Variable

Build = Callable[[Sequence[Any]], Any]
"""Builds the result of one request from the values of all leaves of a run."""

Take = Callable[[Sequence[Any]], tuple[Any, ...]]
"""Selects some of the values."""

LEAF_TYPES = frozenset({str, Operation, Placeholder, Variable, GlobalStep, Output})
"""The exact types of a fetch that is not nested."""


def taking(places: Sequence[int]) -> Take:
    """Return a function that takes the items at `places` out of a sequence."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    if not places:
        return lambda values: ()
    (place,) = places  # `itemgetter` of one would return the bare item
    return lambda values: (values[place],)


class Leaves:
    """The distinct nodes of one run, in the order of their first request."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._slots: dict[Node, int] = {}

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes requested so far."""
        return tuple(self._slots)

    def slot(self, fetch: object) -> int:
        """Return the index of a leaf among the values."""
        return self._slots.setdefault(self._graph.node(fetch), len(self._slots))

    def build(self, fetches: Any) -> Build:
        """Add the leaves of one request, and return the function that builds its result.

        Raises:
            FetchError: a part of it is neither a known node nor a container of fetches.
        """
        cls: Any = type(fetches)  # pyright: ignore[reportUnknownVariableType]
        if cls in LEAF_TYPES or isinstance(fetches, (str, Node)):
            return operator.itemgetter(self.slot(fetches))  # pyright: ignore[reportUnknownArgumentType]
        if isinstance(fetches, list):
            elements: list[Any] = fetches  # pyright: ignore[reportUnknownVariableType]
            builds = [self.build(one) for one in elements]
            return lambda values: [build(values) for build in builds]
        if cls is dict:
            by_key = {key: self.build(value) for key, value in fetches.items()}
            return lambda values: {key: build(values) for key, build in by_key.items()}
        # All others are made of a list or a dict of their parts.
        if isinstance(fetches, tuple):
            items: list[Any] = [*fetches]  # pyright: ignore[reportUnknownArgumentType]
            return _of_class(cls, self.build(items), (lambda parts: cls(*parts)) if hasattr(cls, "_fields") else cls)
        if isinstance(fetches, Mapping):
            make = functools.partial(cls, fetches.default_factory) if isinstance(fetches, defaultdict) else cls
            return _of_class(cls, self.build(dict(fetches)), make)  # pyright: ignore[reportUnknownArgumentType]
        fields: Any = getattr(fetches, "__attrs_attrs__", None)
        if dataclasses.is_dataclass(fetches) and not isinstance(fetches, type):  # pyright: ignore[reportUnknownArgumentType]
            fields = dataclasses.fields(fetches)
        if fields is not None:
            attributes = {field.name: getattr(fetches, field.name) for field in fields}
            return _of_class(cls, self.build(attributes), functools.partial(_changed_copy, fetches))
        if fetches is None:
            raise FetchError("None cannot be fetched; leave it out")
        return operator.itemgetter(self.slot(fetches))  # raises, naming the type


def _changed_copy(one: Any, attributes: dict[str, Any]) -> Any:
    result = copy.copy(one)
    for name, value in attributes.items():
        object.__setattr__(result, name, value)  # also where the class is frozen
    return result


def _of_class(cls: type, build: Build, make: Callable[[Any], Any]) -> Build:
    """Return what makes an object of the parts that `build` returns; the error names the class if it cannot be made."""

    def build_object(values: Sequence[Any]) -> Any:
        parts = build(values)
        try:
            return make(parts)
        except Exception as error:
            what = f"the fetches have a {cls.__name__}, and none can be made of their values: {safe_repr(error)}"
            raise FetchError(f"{what}; fetch a tuple, list or dict") from error

    return build_object


def canonical_feeds(graph: Graph, feed_dict: Mapping[Any, Any] | None) -> dict[Node, Any]:
    """Return the feeds by node; a key may be a node, a name, or a tuple of these with equally nested values.

    Raises:
        FetchError: a key is unknown, a value is a node, a tuple does not match its values, or a node is fed twice.
    """
    if feed_dict is not None and not isinstance(feed_dict, Mapping):
        raise FetchError(
            f"feed_dict is {safe_repr(feed_dict)}; give a mapping from nodes or names to values (in session.steps, a "
            "step function of one parameter, besides the global step, takes the value itself)"
        )
    feeds: dict[Node, Any] = {}
    pairs: list[tuple[Any, Any]] = [*feed_dict.items()] if feed_dict else []
    for key, value in pairs:  # those of a tuple are added at the end
        if isinstance(key, tuple):
            keys: tuple[Any, ...] = key  # pyright: ignore[reportUnknownVariableType]
            if not isinstance(value, (tuple, list)) or len(value) != len(keys):  # pyright: ignore[reportUnknownArgumentType]
                raise FetchError(f"feed {safe_repr(keys)} needs a tuple of {len(keys)} values; got {safe_repr(value)}")  # pyright: ignore[reportUnknownArgumentType]
            pairs += zip(keys, value, strict=True)  # pyright: ignore[reportUnknownArgumentType]
            continue
        node = graph.node(key)
        if node in feeds:
            raise FetchError(f"{node.name!r} is fed twice in one feed_dict, by name and by node; leave one out")
        if isinstance(value, Node):
            raise FetchError(f"{node.name!r} is fed with {value!r}; feed a value, or make the node an input of the operation")
        feeds[node] = value
    return feeds
