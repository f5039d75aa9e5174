"""The plan of a run: the operations that its fetches need, their order, and the changes to commit.

A fetch is a node or its name, or a list, tuple, named tuple or mapping of fetches, to any depth. A
run evaluates each leaf once. The result of a request has the shape of its fetches. Planning never
waits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from aiohooks._core.coroutines import can_wait
from aiohooks._core.validate import is_coroutine_function
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
from aiohooks.graph.variables import Change

Build = Callable[[Sequence[Any]], Any]
"""Builds the result of one request from the values of all leaves of a run."""

Take = Callable[[list[Any]], Sequence[Any]]
"""Takes the items at certain places out of a list. `taking` returns such a function."""

# The exact types of the fetches that are not nested.
LEAF_TYPES = frozenset({str, Operation, Placeholder, Variable, GlobalStep, Output})


def taking(places: Sequence[int]) -> Take:
    """Return a function that returns the items at `places` of a list."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    if not places:
        return operator.itemgetter(slice(0))
    # With a single place, `itemgetter` would return the item itself. A slice is a list, and as
    # quick. The last place may be given as -1.
    (place,) = places
    return operator.itemgetter(slice(place, place + 1 or None))


class Leaves:
    """The distinct nodes that one run fetches, in the order of their first request."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._slots: dict[Node, int] = {}

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes that have been requested so far."""
        return tuple(self._slots)

    def slot(self, leaf: Any) -> int:
        """Return the slot of a node or name, which gets the next slot at its first request."""
        return self._slots.setdefault(self._graph.node(leaf), len(self._slots))

    def build(self, fetches: Any) -> Build:
        """Assign a slot to each node in `fetches`. Return the function that builds the result.

        Raises:
            FetchError: a part of the request is neither a known node nor a container of fetches.
        """
        if fetches is None:
            raise FetchError(
                "None cannot be fetched; give [] to fetch nothing, or leave it out of a list"
            )
        container = _split_container(fetches)
        if container is None:
            return operator.itemgetter(self.slot(fetches))
        parts, make_container = container
        builders = [self.build(part) for part in parts]
        return lambda fetched_values: make_container(
            [builder(fetched_values) for builder in builders]
        )


def _split_container(fetches: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Take a container of fetches apart, or return None if `fetches` is not a container.

    Return the fetches in it, and a function that builds the container of their values: a list, a
    tuple, a named tuple of the same class, or a dict with the keys of a mapping.
    """
    if isinstance(fetches, list):
        return fetches, list  # pyright: ignore[reportUnknownVariableType]
    if isinstance(fetches, tuple):
        make_tuple = getattr(fetches, "_make", tuple)  # pyright: ignore[reportUnknownArgumentType]
        return [*fetches], make_tuple  # pyright: ignore[reportUnknownVariableType]
    if isinstance(fetches, Mapping):
        fetches_by_key: Mapping[Any, Any] = fetches  # pyright: ignore[reportUnknownVariableType]
        return [*fetches_by_key.values()], lambda items: dict(
            zip(fetches_by_key, items, strict=True)
        )
    return None


def canonical_feeds(graph: Graph, feed_dict: Mapping[Any, Any] | None) -> dict[Node, Any]:
    """Return the feeds by node.

    A key is a node or a name.

    Raises:
        FetchError: a key is unknown, a value is a node, or a node is fed twice.
    """
    if feed_dict is None:
        return {}
    if not isinstance(feed_dict, Mapping):
        raise FetchError(
            f"feed_dict is {safe_repr(feed_dict)}; give a mapping from nodes or names to values. In"
            " session.steps, a step function that has one parameter besides the global step takes"
            " the value itself"
        )
    feeds: dict[Node, Any] = {}
    for key, value in feed_dict.items():
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


# -- plans


@dataclass(frozen=True)
class PlannedOperation:
    """One operation of a plan.

    Attributes:
        name: the name of the operation.
        slot: the place of its result among the values of a run.
        inputs: the slots of its inputs.
        call: calls its function with the inputs, which it selects from the values of a run.
        is_async: whether the result of the call must be awaited.
        may_wait: whether awaiting the result may suspend the task.
        of_graph: whether observers see it. False if it only reads the result of a step function.
    """

    name: str
    slot: int
    inputs: tuple[int, ...]
    call: Callable[[list[Any]], Any]
    is_async: bool
    may_wait: bool
    of_graph: bool


class Plan:
    """The plan for one set of fetched and fed nodes. A session makes it once and keeps it.

    A run has a list of values, and each node has its place in this list, its slot. Slot 0 has the
    global step at the start of the run. The slots of the fed nodes follow, in order, and then those
    of the `initial_values`. The run reads the variables, calls the operations in order, and puts
    each result into the slot of its operation.

    Attributes:
        initial_values: the values of the later slots at the start of a run. They are the defaults
            of placeholders, and `MISSING` for variables and results.
        variable_slots: the slots of the variables that the run reads, by their names.
        operations: the operations in the order of their slots, each after its inputs.
        changes: the changes of variables that the run commits.
        steps: the number of steps by which the run advances the global step.
        take_fetched: takes the fetched values out of the values of a run.
    """

    def __init__(self, graph: Graph, fed: Collection[Node]) -> None:
        """Start with the slots of the global step and of the fed nodes, in the order of `fed`."""
        self.initial_values: list[Any] = []
        self.variable_slots: dict[str, int] = {}
        self.operations: list[PlannedOperation] = []
        self.changes: list[Change] = []
        self.steps: int = 0
        self.take_fetched: Take = taking(())
        self._graph = graph
        # The first operation that changes each variable.
        self._changed_by: dict[str, Operation] = {}
        self._fed_count = len(fed)
        # A slot is None while its node is being planned. The nodes without a slot are the path to
        # the current node, in order, so a cycle shows when one of them is visited again.
        self._slots: dict[Node, int | None] = {
            node: slot for slot, node in enumerate((graph.global_step, *fed))
        }

    def fetch(self, nodes: Sequence[Node]) -> None:
        """Plan the fetched nodes, in this order, and all nodes that they need.

        Raises:
            FetchError: a placeholder is not fed, or an input of an operation is not in the graph.
            GraphError: the operations form a cycle, or two of them change one variable.
        """
        self.take_fetched = taking([self._slot_of(node) for node in nodes])

    def call_step(self, step: Operation, nodes: Sequence[Node]) -> None:
        """Plan a call of the step function, and a check of the names of the fetched nodes.

        Only the result of the step shows whether one of its keys has the same name as a node. The
        errors are the same as for `fetch`.
        """
        result_slot = self._slot_of(step)
        # An output is itself the item of the result that has its name.
        checked = [node for node in nodes if not isinstance(node, Output)]

        def check(values: list[Any]) -> None:
            _check_unambiguous(checked, step, values[result_slot])

        if checked:
            self._append_operation(step.name, check, (result_slot,))

    def _slot_of(self, node: Node) -> int:
        """Return the slot of a node. Plan the node and its inputs first if it has no slot."""
        if node not in self._slots:
            self._slots[node] = None
            self._slots[node] = self._plan_node(node)
        slot = self._slots[node]
        if slot is None:
            path = [visited.name for visited, place in self._slots.items() if place is None]
            cycle = path[path.index(node.name) :]
            raise GraphError(
                f"operations form a cycle: {' -> '.join([*cycle, node.name])}; feed one of them, or"
                " break the cycle"
            )
        return slot

    def _new_slot(self, value: Any = MISSING) -> int:
        """Add a slot after the slots of the global step and the feeds. Return its number."""
        self.initial_values.append(value)
        return self._fed_count + len(self.initial_values)

    def _plan_node(self, node: Node) -> int:
        """Plan a node after its inputs, and return its new slot."""
        if isinstance(node, Operation):
            return self._plan_operation(node)
        if isinstance(node, Output):
            result_slot = self._slot_of(node.operation)
            return self._append_operation(
                node.name, lambda values: _output_value(node, values[result_slot]), (result_slot,)
            )
        if isinstance(node, Placeholder):
            if node.default is MISSING:
                raise FetchError(
                    f"placeholder {node.name!r} is needed and not fed; add it to feed_dict or to"
                    " the feeds of the loop, or give it a default"
                )
            return self._new_slot(node.default)
        # The node is a variable, because the global step has had a slot from the beginning.
        slot = self._new_slot()
        self.variable_slots[node.name] = slot
        return slot

    def _plan_operation(self, node: Operation) -> int:
        """Plan an operation after its inputs, and return the slot of its result."""
        positional: list[int] = []
        named: dict[str, int] = {}
        for index, name in enumerate(node.inputs):
            if name in node.optional and name not in self._graph.nodes:
                continue
            try:
                input_node = self._graph.node(name)
            except FetchError as error:
                raise FetchError(
                    f"operation {node.name!r} has an input that cannot be found: {error}. To feed"
                    f" the input, add graph.placeholder({name!r})"
                ) from None
            slot = self._slot_of(input_node)
            # After an input that was left out, the positions do not match the parameters any more.
            if name in node.keyword_only or len(positional) < index:
                named[name] = slot
            else:
                positional.append(slot)
        call = _call_with_slots(node.fn, positional, named)
        slots_of_inputs = (*positional, *named.values())
        slot = self._append_operation(node.name, call, slots_of_inputs, node.fn)
        self.steps += node.steps
        self._add_change(node, slot)
        return slot

    def _append_operation(
        self,
        name: str,
        call: Callable[[list[Any]], Any],
        inputs: tuple[int, ...],
        fn: Callable[..., Any] | None = None,
    ) -> int:
        """Append an operation that reads its inputs from slots. Return the slot of its result.

        `fn` is the function of an operation of the graph.
        """
        slot = self._new_slot()
        is_async = fn is not None and is_coroutine_function(fn)
        may_wait = is_async and can_wait(fn)
        self.operations.append(
            PlannedOperation(name, slot, inputs, call, is_async, may_wait, of_graph=fn is not None)
        )
        return slot

    def _add_change(self, node: Operation, slot: int) -> None:
        """Add the change of a variable by an operation, if any. Its result is in `slot`."""
        name = node.updates or node.adds_to
        if name is None:
            return
        variable_names = {variable.name for variable in self._graph.variables}
        if name not in variable_names:
            raise GraphError(
                f"operation {node.name!r} changes {name!r}, which is not a variable;"
                f" {did_you_mean(name, variable_names)}. To add it, call"
                f" graph.variable({name!r}, ...)"
            )
        first = self._changed_by.setdefault(name, node)
        # A variable can be added to several times, but a replacement would discard other changes.
        if first is not node and (first.updates or node.updates):
            raise GraphError(
                f"{first.name!r} and {node.name!r} both change {name!r} in one run; use adds_to for"
                " both, or run one"
            )
        self.changes.append(Change(name, slot, is_added=node.updates is None))


def _call_with_slots(
    fn: Callable[..., Any], positional: Sequence[int], named: Mapping[str, int]
) -> Callable[[list[Any]], Any]:
    """Return a function that calls `fn` with arguments from these slots of the values of a run."""
    take_positional = taking(positional)
    if named:
        return lambda values: fn(
            *take_positional(values), **{name: values[slot] for name, slot in named.items()}
        )
    # The usual numbers of inputs have calls of their own, because each run makes such calls and
    # `fn(*...)` takes twice as long.
    if not positional:
        return lambda values: fn()
    if len(positional) == 1:
        (first,) = positional
        return lambda values: fn(values[first])
    if len(positional) == 2:
        first, second = positional
        return lambda values: fn(values[first], values[second])
    return lambda values: fn(*take_positional(values))


def _is_mapping(result: object) -> TypeGuard[Mapping[Any, Any]]:
    # A dict and None, the usual results, are tested first: testing for an abstract class takes ten
    # times as long.
    return type(result) is dict or (result is not None and isinstance(result, Mapping))


def _output_value(node: Output, result: Any) -> Any:
    """Return the item of a step's result that has the name of an output."""
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


def _check_unambiguous(nodes: Sequence[Node], step: Operation, result: Any) -> None:
    """Raise if the result of a step has the name of a fetched node as a key.

    The caller, who has fetched this name, may have meant the node or the item of the result.
    """
    if not _is_mapping(result):
        return
    for node in nodes:
        if node.name not in result:
            continue
        if node is step:
            meaning = "the function itself"
        elif isinstance(node, GlobalStep):
            meaning = "the global step"
        else:
            # All other nodes in the graph of a step function are its parameters.
            meaning = "a parameter"
        raise FetchError(
            f"{node.name!r} is fetched, and is both {meaning} and a key of the result of step"
            f" {step.name!r}; rename the key",
            name=node.name,
        )
