"""Nested fetches and feeds: merging the requests of a run, and splitting its results. Nothing here waits.

A fetch is a node or its name, or a list, tuple, namedtuple, mapping or dataclass of fetches, nested as you like. Each leaf
is evaluated once per run; the result of a request has the shape of its fetches.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiohooks.errors import FetchError
from aiohooks.graph.graph import GlobalStep, Graph, Node, Operation, Output, Placeholder, Variable

Build = Callable[[Sequence[Any]], Any]
"""Builds the result of one request from the values of all leaves of a run."""

Take = Callable[[Sequence[Any]], Sequence[Any]]
"""Selects some of the values."""

LEAF_TYPES = frozenset({str, Operation, Placeholder, Variable, GlobalStep, Output})
"""The exact types of a fetch that is not nested."""


def taking(places: Sequence[int]) -> Take:
    """Return a function that takes the items at `places` out of a sequence."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    # `itemgetter` of one index would return the bare item: a slice gives a sequence, also of one or none.
    return operator.itemgetter(slice(places[0], places[0] + 1 or None) if places else slice(0))


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
        if type(fetches) in LEAF_TYPES or isinstance(fetches, (str, Node)):
            return _leaf(self.slot(fetches))
        if isinstance(fetches, Mapping):
            mapping: Mapping[Any, Any] = fetches  # pyright: ignore[reportUnknownVariableType]
            return _mapping(mapping, {key: self.build(value) for key, value in mapping.items()})
        if isinstance(fetches, tuple):
            items: tuple[Any, ...] = fetches  # pyright: ignore[reportUnknownVariableType]
            return _tuple(type(items), [self.build(item) for item in items])
        if isinstance(fetches, list):
            elements: list[Any] = fetches  # pyright: ignore[reportUnknownVariableType]
            return _list([self.build(item) for item in elements])
        if dataclasses.is_dataclass(fetches) and not isinstance(fetches, type):  # pyright: ignore[reportUnknownArgumentType]
            fields = [field.name for field in dataclasses.fields(fetches)]
            return _object(fetches, {name: self.build(getattr(fetches, name)) for name in fields})
        attributes: Any = getattr(fetches, "__attrs_attrs__", None)
        if attributes is not None:
            return _object(fetches, {one.name: self.build(getattr(fetches, one.name)) for one in attributes})
        if fetches is None:
            raise FetchError("None cannot be fetched; leave it out")
        return _leaf(self.slot(fetches))  # raises, naming the type


def _leaf(slot: int) -> Build:
    return operator.itemgetter(slot)


def _list(parts: list[Build]) -> Build:
    return lambda values: [part(values) for part in parts]


def _tuple(cls: type[tuple[Any, ...]], parts: list[Build]) -> Build:
    if cls is tuple:
        return lambda values: tuple([part(values) for part in parts])
    if hasattr(cls, "_fields"):
        return _of_class(cls, lambda values: cls(*(part(values) for part in parts)))
    return _of_class(cls, lambda values: cls(part(values) for part in parts))


def _mapping(like: Mapping[Any, Any], parts: dict[Any, Build]) -> Build:
    cls: Any = type(like)

    def build(values: Sequence[Any]) -> Any:
        items = {key: part(values) for key, part in parts.items()}
        if cls is dict:
            return items
        return cls(like.default_factory, items) if isinstance(like, defaultdict) else cls(items)

    return _of_class(cls, build)


def _object(like: object, parts: dict[str, Build]) -> Build:
    def build(values: Sequence[Any]) -> Any:
        result = copy.copy(like)
        for name, part in parts.items():
            object.__setattr__(result, name, part(values))  # also where the class is frozen
        return result

    return _of_class(type(like), build)


def _of_class(cls: type, build: Build) -> Build:
    """Return `build`, with an error that names the class if an object of it cannot be made of the values."""

    def build_object(values: Sequence[Any]) -> Any:
        try:
            return build(values)
        except FetchError:  # of an inner part
            raise
        except Exception as error:
            raise FetchError(
                f"the fetches have a {cls.__name__}, and none can be made of their values: {error!r}; fetch a tuple, list or dict"
            ) from error

    return build_object


def canonical_feeds(graph: Graph, feed_dict: Mapping[Any, Any] | None) -> dict[Node, Any]:
    """Return the feeds by node; a key may be a node, a name, or a tuple of these with equally nested values.

    Raises:
        FetchError: a key is unknown, a value is a node, a tuple does not match its values, or a node is fed twice.
    """
    feeds: dict[Node, Any] = {}
    if feed_dict is None:
        return feeds
    if not isinstance(feed_dict, Mapping):
        raise FetchError(
            f"feed_dict is {feed_dict!r}; give a mapping from nodes or names to values (in session.steps, a step function "
            "of one parameter takes the value itself)"
        )
    for key, value in feed_dict.items():
        _feed(graph, feeds, key, value)
    return feeds


def _feed(graph: Graph, feeds: dict[Node, Any], key: Any, value: Any) -> None:
    if isinstance(key, tuple):
        keys: tuple[Any, ...] = key  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(value, (tuple, list)) or len(value) != len(keys):  # pyright: ignore[reportUnknownArgumentType]
            raise FetchError(f"feed {keys!r} needs a tuple of {len(keys)} values; got {value!r}")
        for one, part in zip(keys, value, strict=True):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            _feed(graph, feeds, one, part)
        return
    node = graph.node(key)
    if node in feeds:
        raise FetchError(f"{node.name!r} is fed twice in one feed_dict, by name and by node; leave one out")
    if isinstance(value, Node):
        raise FetchError(f"{node.name!r} is fed with {value!r}; feed a value, or make the node an input of the operation")
    feeds[node] = value
