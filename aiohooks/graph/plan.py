"""The plan of a run: the operations that its fetches need, their order, and the changes to commit.

A fetch is a node or its name, or a list, tuple, namedtuple, mapping or dataclass of fetches, nested
as you like. Each leaf is evaluated once per run; the result of a request has the shape of its
fetches. Nothing here waits.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from aiohooks._aio.cancel import to_thread
from aiohooks._aio.overlap import can_wait
from aiohooks._validate import is_coroutine_function
from aiohooks.dispatch.calls import NO_KEYWORDS
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
    # `itemgetter` of a single place would return the bare item.
    (place,) = places
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

    def build(self, fetches: Any) -> Build:
        """Add the leaves of one request, and return the function that builds its result.

        Raises:
            FetchError: a part of it is neither a known node nor a container of fetches.
        """
        cls: Any = type(fetches)  # pyright: ignore[reportUnknownVariableType]
        if isinstance(fetches, list):
            elements: list[Any] = fetches  # pyright: ignore[reportUnknownVariableType]
            builds = [self.build(element) for element in elements]
            return lambda values: [build(values) for build in builds]
        if cls is dict:
            by_key = {key: self.build(value) for key, value in fetches.items()}
            return lambda values: {key: build(values) for key, build in by_key.items()}
        if fetches is None:
            raise FetchError("None cannot be fetched; leave it out")
        container = _taken_apart(fetches)
        if container is None:
            node = self._graph.node(fetches)
            return operator.itemgetter(self._slots.setdefault(node, len(self._slots)))
        parts, make = container
        build_parts = self.build(parts)

        def build_container(values: Sequence[Any]) -> Any:
            built = build_parts(values)
            try:
                return make(built)
            except Exception as error:
                raise FetchError(
                    f"the fetches have a {cls.__name__}, and none can be made of their values:"
                    f" {safe_repr(error)}; fetch a tuple, list or dict"
                ) from error

        return build_container


def _taken_apart(fetches: Any) -> tuple[Any, Callable[[Any], Any]] | None:
    """Return a list or dict of the parts of a container, and the function that makes another of it.

    For anything else return None.
    """
    if isinstance(fetches, (str, Node)):
        return None
    cls: Any = type(fetches)  # pyright: ignore[reportUnknownVariableType]
    container: Any = fetches
    if isinstance(fetches, tuple):
        # The class of a named tuple takes the items as arguments.
        return [*container], (lambda items: cls(*items)) if hasattr(cls, "_fields") else cls
    if isinstance(fetches, defaultdict):
        return dict(container), functools.partial(cls, container.default_factory)
    if isinstance(fetches, Mapping):
        return dict(container), cls
    fields = getattr(cls, "__attrs_attrs__", None)
    if dataclasses.is_dataclass(cls):
        fields = dataclasses.fields(cls)
    if fields is None:
        return None
    attributes = {field.name: getattr(fetches, field.name) for field in fields}
    return attributes, functools.partial(_changed_copy, fetches)


def _changed_copy(original: Any, attributes: dict[str, Any]) -> Any:
    result = copy.copy(original)
    for name, value in attributes.items():
        # A frozen class rejects `setattr`.
        object.__setattr__(result, name, value)
    return result


def canonical_feeds(graph: Graph, feed_dict: Mapping[Any, Any] | None) -> dict[Node, Any]:
    """Return the feeds by node.

    A key may be a node, a name, or a tuple of these with equally nested values.

    Raises:
        FetchError: a key is unknown, a value is a node, a tuple does not match its values, or a
            node is fed twice.
    """
    if feed_dict is None:
        return {}
    if not isinstance(feed_dict, Mapping):
        raise FetchError(
            f"feed_dict is {safe_repr(feed_dict)}; give a mapping from nodes or names to values (in"
            " session.steps, a step function of one parameter, besides the global step, takes the"
            " value itself)"
        )
    feeds: dict[Node, Any] = {}
    pairs: list[tuple[Any, Any]] = [*feed_dict.items()]
    # The loop appends the pairs of a tuple to the list that it reads.
    for key, value in pairs:
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


# -- the plan: the operations that compute a set of nodes, their order, and the changes to commit


@dataclass(frozen=True)
class PlannedOperation:
    """One operation of a plan."""

    name: str
    slot: int
    """The place of its result among the values of a run."""
    inputs: tuple[int, ...]
    """The slots of its inputs."""
    call: Callable[[list[Any]], Any]
    """Calls its function with the inputs, which it takes out of the values."""
    is_async: bool
    may_wait: bool
    of_graph: bool
    """False if it only reads the result of a step function, which observers do not see."""


class Plan:
    """The plan for one set of fetched and fed nodes, made once.

    The values of a run are the global step at its start, those of the fed nodes, in order, and a
    copy of `template`, which has constants. The run sets those of `variables`, and calls the
    operations, which are ordered by their inputs, and so by their slots. `take_fetched` selects the
    fetched values.

    `changes` are the variables that the run changes, the slots of the results, and whether these
    are added; `replaced` are the variables to which nothing is added.
    """

    def __init__(
        self,
        graph: Graph,
        nodes: Sequence[Node],
        fed: Collection[Node],
        grace_secs: float,
        step: Operation | None = None,
    ) -> None:
        """Plan a run that fetches `nodes`, and whose feeds are those of `fed`, in this order.

        `step`, the operation of a step function, is run whatever is fetched: a parameter that is
        fetched may be meant as a key of its result.

        Raises:
            FetchError: a placeholder is not fed, or a parameter of an operation is not in the
                graph.
            GraphError: the operations form a cycle, or two of them change one variable.
        """
        self._graph = graph
        self._grace_secs = grace_secs
        self._claims: dict[str, Operation] = {}
        self.template: list[Any] = []
        self.variables: list[tuple[int, str]] = []
        self.operations: list[PlannedOperation] = []
        self.changes: list[tuple[str, int, bool]] = []
        self.replaced: list[str] = []
        self.steps: int = 0
        self._number_fed = len(fed)
        # None for a node that is being planned: these are the path to the current node, in order.
        self._slots: dict[Node, int | None] = {graph.global_step: 0}
        self._slots.update({node: slot for slot, node in enumerate(fed, 1)})
        self.take_fetched: Take = taking([self._visit(node) for node in nodes])
        if step is not None:
            returned = self._visit(step)
            for node in nodes:
                if not isinstance(node, Output):
                    check = functools.partial(_check_unambiguous, node, step)
                    self._append(node.name, check, [returned])

    def _visit(self, node: Node) -> int:
        """Return the slot of a node, after planning the nodes that it needs."""
        if node not in self._slots:
            self._slots[node] = None
            self._slots[node] = self._plan_node(node)
        slot = self._slots[node]
        if slot is None:
            path = [visited for visited, place in self._slots.items() if place is None]
            names = [visited.name for visited in [*path[path.index(node) :], node]]
            raise GraphError(
                f"operations form a cycle: {' -> '.join(names)}; feed one of them, or break the"
                " cycle"
            )
        return slot

    def _new_slot(self, value: Any = MISSING) -> int:
        self.template.append(value)
        return self._number_fed + len(self.template)

    def _plan_node(self, node: Node) -> int:
        if isinstance(node, Operation):
            return self._plan_operation(node)
        if isinstance(node, Output):
            result = self._visit(node.operation)
            return self._append(node.name, functools.partial(_item, node), [result])
        if isinstance(node, Placeholder):
            if node.default is MISSING:
                raise FetchError(
                    f"placeholder {node.name!r} is needed and not fed; add it to feed_dict or to"
                    " the feeds of the loop, or give it a default"
                )
            return self._new_slot(node.default)
        # A variable, as the global step has its slot from the beginning.
        slot = self._new_slot()
        self.variables.append((slot, node.name))
        return slot

    def _plan_operation(self, node: Operation) -> int:
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
            # After an input that was left out none is passed by position.
            if name in node.keyword_only or len(positional) < place:
                named[name] = slot
            else:
                positional.append(slot)
        fn = node.fn
        if node.thread:
            fn = functools.partial(_call_in_thread, fn, self._grace_secs)
        slot = self._append(node.name, fn, positional, named, of_graph=True)
        self._claim(node, slot)
        return slot

    def _append(
        self,
        name: str,
        fn: Callable[..., Any],
        positional: list[int],
        named: Mapping[str, int] = NO_KEYWORDS,
        *,
        of_graph: bool = False,
    ) -> int:
        """Append an operation whose inputs are in these slots; return the slot of its result."""
        slot = self._new_slot()
        is_async = is_coroutine_function(fn)
        self.operations.append(
            PlannedOperation(
                name,
                slot,
                inputs=(*positional, *named.values()),
                call=_call(fn, positional, named),
                is_async=is_async,
                may_wait=is_async and can_wait(fn),
                of_graph=of_graph,
            )
        )
        return slot

    def _claim(self, node: Operation, slot: int) -> None:
        """Note the changes of an operation, whose result is in `slot`, for the commit."""
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
        if node.updates:
            self.replaced.append(name)


async def _call_in_thread(
    fn: Callable[..., Any], grace_secs: float, /, *args: Any, **kwargs: Any
) -> Any:
    return await to_thread(functools.partial(fn, *args, **kwargs), grace_secs=grace_secs)


def _call(
    fn: Callable[..., Any], positional: Sequence[int], named: Mapping[str, int]
) -> Callable[[list[Any]], Any]:
    inputs = taking(positional)
    if named:
        return lambda values: fn(
            *inputs(values), **{name: values[slot] for name, slot in named.items()}
        )
    # The usual numbers of inputs are spelled out: this is on the path of every run, and `fn(*...)`
    # costs twice as much.
    if not positional:
        return lambda values: fn()
    if len(positional) == 1:
        (first,) = positional
        return lambda values: fn(values[first])
    if len(positional) == 2:
        first, second = positional
        return lambda values: fn(values[first], values[second])
    return lambda values: fn(*inputs(values))


def _is_mapping(result: object) -> TypeGuard[Mapping[Any, Any]]:
    # The usual results come first: the check of an abstract class costs ten times as much.
    return type(result) is dict or (result is not None and isinstance(result, Mapping))


def _item(node: Output, result: Any) -> Any:
    """Return the item of a step's result that an output stands for."""
    step = node.operation.name
    if not _is_mapping(result):
        raise FetchError(
            f"{node.name!r} is fetched by name, but step {step!r} returned"
            f" {type(result).__name__} and not a mapping; return a dict, or fetch {step!r} for the"
            " whole result",
            name=node.name,
        )
    if node.name not in result:
        raise FetchError(
            f"{node.name!r} is not in the result of step {step!r};"
            f" {did_you_mean(node.name, result)}",
            name=node.name,
        )
    return result[node.name]


def _check_unambiguous(node: Node, step: Operation, result: Any) -> None:
    """Raise if a fetched node has the name of a key of the step's result."""
    if not _is_mapping(result) or node.name not in result:
        return
    other = "a parameter"
    if node is step:
        other = "the function itself"
    elif isinstance(node, GlobalStep):
        other = "the global step"
    raise FetchError(
        f"{node.name!r} is fetched, and is both {other} and a key of the result of step"
        f" {step.name!r}; rename the key",
        name=node.name,
    )
