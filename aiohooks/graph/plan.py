"""What a run computes: its fetches and feeds, and the plan of the operations for them. Nothing here
waits.

A fetch is a node or its name, or a list, tuple, namedtuple, mapping or dataclass of fetches, nested
as you like. Each leaf is evaluated once per run; the result of a request has the shape of its
fetches.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from aiohooks._aio.cancel import to_thread
from aiohooks._aio.overlap import can_wait
from aiohooks.errors import FetchError, GraphError, did_you_mean, safe_repr
from aiohooks.graph.graph import (
    MISSING,
    GlobalStep,
    Graph,
    Node,
    Operation,
    Output,
    Placeholder,
    Variable,
)

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
            return _of_class(
                cls,
                self.build(items),
                (lambda parts: cls(*parts)) if hasattr(cls, "_fields") else cls,
            )
        if isinstance(fetches, Mapping):
            make = (
                functools.partial(cls, fetches.default_factory)
                if isinstance(fetches, defaultdict)
                else cls
            )
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
    """Return what makes an object of the parts that `build` returns; the error names the class if
    it cannot be made.
    """

    def build_object(values: Sequence[Any]) -> Any:
        parts = build(values)
        try:
            return make(parts)
        except Exception as error:
            what = (
                f"the fetches have a {cls.__name__}, and none can be made of their values:"
                f" {safe_repr(error)}"
            )
            raise FetchError(f"{what}; fetch a tuple, list or dict") from error

    return build_object


def canonical_feeds(graph: Graph, feed_dict: Mapping[Any, Any] | None) -> dict[Node, Any]:
    """Return the feeds by node; a key may be a node, a name, or a tuple of these with equally
    nested values.

    Raises:
        FetchError: a key is unknown, a value is a node, a tuple does not match its values, or a
            node is fed twice.
    """
    if feed_dict is not None and not isinstance(feed_dict, Mapping):
        raise FetchError(
            f"feed_dict is {safe_repr(feed_dict)}; give a mapping from nodes or names to values (in"
            " session.steps, a step function of one parameter, besides the global step, takes the"
            " value itself)"
        )
    feeds: dict[Node, Any] = {}
    pairs: list[tuple[Any, Any]] = [*feed_dict.items()] if feed_dict else []
    for key, value in pairs:  # those of a tuple are added at the end
        if isinstance(key, tuple):
            keys: tuple[Any, ...] = key  # pyright: ignore[reportUnknownVariableType]
            values: Any = value
            if not isinstance(value, (tuple, list)) or len(values) != len(keys):
                raise FetchError(
                    f"feed {safe_repr(keys)} needs a tuple of {len(keys)} values; got"
                    f" {safe_repr(values)}"
                )
            pairs += zip(keys, values, strict=True)
            continue
        node = graph.node(key)
        if node in feeds:
            raise FetchError(
                f"{node.name!r} is fed twice in one feed_dict, by name and by node; leave one out"
            )
        if isinstance(value, Node):
            raise FetchError(
                f"{node.name!r} is fed with {value!r}; feed a value, or make the node an input of"
                " the operation"
            )
        feeds[node] = value
    return feeds


# -- the plan: the operations that compute a set of nodes, their order, and the changes to commit at
# the end


@dataclass(frozen=True, slots=True, eq=False)
class PlannedOperation:
    """One operation of a plan: `call` takes a run's values, its result is put at `slot`.

    `of_graph` is false for what takes values out of the result of a step; observers are not
    notified of that.
    """

    slot: int
    call: Callable[[list[Any]], Any]
    is_async: bool
    may_wait: bool
    name: str
    inputs: tuple[int, ...]
    of_graph: bool


class Plan:
    """The plan for one set of fetched and fed nodes, made once.

    A run copies `template`, which has the constant values, and puts in the fed ones, which come
    first, and those of `variables` and `step_slots`. Then it runs the operations, ordered by their
    inputs, and so by their slots; `take_fetched` selects the fetched values. `changes` are the
    variables that the run changes, and whether by an addition; `replaced` are those that it reads
    and replaces.
    """

    def __init__(
        self,
        graph: Graph,
        nodes: Sequence[Node],
        fed: Iterable[Node],
        grace_secs: float,
        step: Operation | None = None,
    ) -> None:
        """Plan a run that fetches `nodes`, and in whose `feed_dict` are those of `fed`, in this
        order.

        `step`, a step function's operation, is run whatever is fetched: a parameter may be meant as
        a key of its result.

        Raises:
            FetchError: a placeholder is not fed, or a parameter of an operation is not in the
                graph.
            GraphError: the operations form a cycle, or two of them change one variable.
        """
        self._graph = graph
        self._grace_secs = grace_secs
        self._path: list[Node] = []
        self._claims: dict[str, Operation] = {}
        self.template: list[Any] = []
        self.variables: list[tuple[int, str]] = []
        self.step_slots: list[int] = []
        self.operations: list[PlannedOperation] = []
        self.changes: list[tuple[str, int, bool]] = []
        self.steps: int = 0
        self._slots = {node: self._new_slot() for node in fed}
        self.number_fed: int = len(self._slots)
        fetched = [self._visit(node) for node in nodes]
        if step is not None:
            returned = self._visit(step)
            for node in nodes:
                if not isinstance(node, Output):
                    self._compute(
                        node.name, functools.partial(_check_unambiguous, node, step), returned
                    )
        self.take_fetched: Take = taking(fetched)
        replaced = {name for name, _, adds in self.changes if not adds}
        self.replaced: list[tuple[int, str]] = [
            (slot, name) for slot, name in self.variables if name in replaced
        ]

    def _visit(self, node: Node) -> int:
        """Return the slot of a node, after planning what it needs."""
        slot = self._slots.get(node)
        if slot is None:
            slot = self._slots[node] = self._plan_node(node)
        return slot

    def _new_slot(self, value: Any = MISSING) -> int:
        self.template.append(value)
        return len(self.template) - 1

    def _plan_node(self, node: Node) -> int:
        if isinstance(node, Operation):
            return self._plan_operation(node)
        if isinstance(node, Output):
            return self._compute(
                node.name, functools.partial(_item, node), self._visit(node.operation)
            )
        slot = self._new_slot(node.default if isinstance(node, Placeholder) else MISSING)
        if isinstance(node, Variable):
            self.variables.append((slot, node.name))
        elif isinstance(node, GlobalStep):
            self.step_slots.append(slot)
        elif isinstance(node, Placeholder) and node.default is MISSING:
            raise FetchError(
                f"placeholder {node.name!r} is needed and not fed; add it to feed_dict or to the"
                " feeds of the loop, or give it a default"
            )
        return slot

    def _plan_operation(self, node: Operation) -> int:
        if node in self._path:
            names = [one.name for one in [*self._path[self._path.index(node) :], node]]
            raise GraphError(
                f"operations form a cycle: {' -> '.join(names)}; feed one of them, or break the"
                " cycle"
            )
        self._path.append(node)
        positional: list[int] = []
        named: dict[str, int] = {}
        for place, name in enumerate(node.inputs):
            if name in node.optional and name not in self._graph.nodes:
                continue
            try:
                needed = self._graph.node(name)
            except FetchError as error:
                raise FetchError(
                    f"operation {node.name!r} has an input that cannot be found: {error}; "
                    f"graph.placeholder({name!r}) adds what is fed"
                ) from None
            slot = self._visit(needed)
            if (
                name in node.keyword_only or len(positional) < place
            ):  # behind one that was omitted, none is passed by position
                named[name] = slot
            else:
                positional.append(slot)
        self._path.pop()
        fn = _to_thread(node.fn, self._grace_secs) if node.thread else node.fn
        is_async = node.is_async or node.thread
        slot, inputs = self._new_slot(), (*positional, *named.values())
        call = _call(fn, tuple(positional), named)
        self.operations.append(
            PlannedOperation(
                slot, call, is_async, is_async and can_wait(fn), node.name, inputs, True
            )
        )
        self._claim(node, slot)
        return slot

    def _compute(self, name: str, fn: Callable[[Any], Any], source: int) -> int:
        """Plan a function of the result of a step."""
        slot = self._new_slot()
        self.operations.append(
            PlannedOperation(slot, _call(fn, (source,), {}), False, False, name, (source,), False)
        )
        return slot

    def _claim(self, node: Operation, slot: int) -> None:
        """Note what an operation changes when the run commits."""
        self.steps += node.steps
        name = node.updates or node.adds_to
        if name is None:
            return
        variables = {variable.name for variable in self._graph.variables}
        if name not in variables:
            raise GraphError(
                f"operation {node.name!r} changes {name!r}, which is not a variable;"
                f" {did_you_mean(name, variables)}; graph.variable({name!r}, ...) adds one"
            )
        other = self._claims.setdefault(name, node)
        if other is not node and (other.updates or node.updates):
            raise GraphError(
                f"{other.name!r} and {node.name!r} both change {name!r} in one run; use adds_to for"
                " both, or run one"
            )
        self.changes.append((name, slot, node.updates is None))


def _call(
    fn: Callable[..., Any], positional: tuple[int, ...], named: dict[str, int]
) -> Callable[[list[Any]], Any]:
    if named:
        return lambda values: fn(
            *[values[slot] for slot in positional],
            **{name: values[slot] for name, slot in named.items()},
        )
    # The usual numbers of inputs are spelled out: this is on the path of every run, and `fn(*...)`
    # costs twice as much.
    if not positional:
        return lambda values: fn()
    if len(positional) == 1:
        a = positional[0]
        return lambda values: fn(values[a])
    if len(positional) == 2:
        a, b = positional
        return lambda values: fn(values[a], values[b])
    inputs = taking(positional)
    return lambda values: fn(*inputs(values))


def _to_thread(
    fn: Callable[..., Any], grace_secs: float
) -> Callable[..., Coroutine[Any, Any, Any]]:
    return lambda *args, **kwargs: to_thread(
        functools.partial(fn, *args, **kwargs), grace_secs=grace_secs
    )


def _is_mapping(result: object) -> TypeGuard[Mapping[Any, Any]]:
    # The usual results come first: the check of an abstract class costs ten times as much.
    return type(result) is dict or (result is not None and isinstance(result, Mapping))


def _item(node: Output, result: Any) -> Any:
    if not _is_mapping(result):
        raise FetchError(
            f"{node.name!r} is fetched by name, but step {node.operation.name!r} returned"
            f" {type(result).__name__} and not a mapping; return a dict, or fetch"
            f" {node.operation.name!r} for the whole result",
            name=node.name,
        )
    if node.name not in result:
        raise FetchError(
            f"{node.name!r} is not in the result of step {node.operation.name!r};"
            f" {did_you_mean(node.name, result)}",
            name=node.name,
        )
    return result[node.name]


def _check_unambiguous(node: Node, step: Operation, result: Any) -> None:
    """Raise if a node that is fetched, and is no key of the step's result, is one all the same."""
    if _is_mapping(result) and node.name in result:
        other = (
            "the function itself"
            if node is step
            else "the global step"
            if isinstance(node, GlobalStep)
            else "a parameter"
        )
        raise FetchError(
            f"{node.name!r} is fetched, and is both {other} and a key of the result of step"
            f" {step.name!r}; rename the key",
            name=node.name,
        )
