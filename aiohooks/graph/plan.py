"""The plan of a run: the operations that compute a set of nodes, their order, and the changes to commit at the end.

A plan is made once for each set of fetched and fed nodes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from aiohooks._aio.cancel import to_thread
from aiohooks._aio.overlap import can_wait
from aiohooks.errors import FetchError, GraphError, did_you_mean
from aiohooks.graph.fetches import Take, taking
from aiohooks.graph.graph import MISSING, GlobalStep, Graph, Node, Operation, Output, Placeholder, Variable

Call = Callable[[list[Any]], Any]
"""Calls an operation with its inputs out of a run's values."""


class PlannedOperation(NamedTuple):
    """One operation of a plan: `call` takes a run's values, its result is put at `slot`. Unpacked in the loop of every run."""

    slot: int
    call: Call
    is_async: bool
    may_wait: bool
    name: str
    inputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The plan for one set of fetched and fed nodes.

    A run copies `template`, which has the constant values, and puts in the values of `fed`, `variables` and `step_slots`.
    Then it runs the operations, ordered by their inputs, and so by their slots; `take_fetched` selects the fetched values.
    `replaced` are those of the variables that `updates` replace; `own` are the slots of the graph's own operations, which
    observers are notified of.
    """

    template: list[Any]
    fed: tuple[tuple[int, Any], ...]
    variables: tuple[tuple[int, str], ...]
    step_slots: tuple[int, ...]
    operations: tuple[PlannedOperation, ...]
    own: frozenset[int]
    replaced: tuple[tuple[int, str], ...]
    updates: tuple[tuple[str, int], ...]
    additions: tuple[tuple[str, int], ...]
    steps: int
    take_fetched: Take
    changes_variables: bool


def make_plan(
    graph: Graph, nodes: Sequence[Node], feeds: Mapping[Node, Any], grace_secs: float, step: Operation | None = None
) -> Plan:
    """Plan a run; `feeds` maps each fed node to its key in the `feed_dict` of a run.

    `step`, a step function's operation, is run whatever is fetched: a parameter may be meant as a key of its result.

    Raises:
        FetchError: a placeholder is not fed, or a parameter of an operation is not in the graph.
        GraphError: the operations form a cycle, or two of them change one variable.
    """
    return _Planner(graph, feeds, grace_secs).plan(nodes, step)


class _Planner:
    def __init__(self, graph: Graph, feeds: Mapping[Node, Any], grace_secs: float) -> None:
        self.graph = graph
        self.feeds = feeds
        self.grace_secs = grace_secs
        self.slots: dict[Node, int] = {}
        self.template: list[Any] = []
        self.operations: list[PlannedOperation] = []
        self.path: list[Node] = []
        self.claims: dict[str, Operation] = {}
        self.updates: list[tuple[str, int]] = []
        self.additions: list[tuple[str, int]] = []
        self.steps = 0

    def plan(self, nodes: Sequence[Node], step: Operation | None) -> Plan:
        wanted = [self.visit(node) for node in nodes]
        if step is not None:
            returned = self.visit(step)
            wanted = [
                slot if isinstance(node, Output) else self.unambiguous(node, slot, step, returned)
                for node, slot in zip(nodes, wanted, strict=True)
            ]
        of = self.slots.items()
        variables = tuple((slot, node.name) for node, slot in of if isinstance(node, Variable) and node not in self.feeds)
        updated = {name for name, _ in self.updates}
        return Plan(
            template=self.template,
            fed=tuple((slot, self.feeds[node]) for node, slot in of if node in self.feeds),
            variables=variables,
            step_slots=tuple(slot for node, slot in of if isinstance(node, GlobalStep) and node not in self.feeds),
            operations=tuple(self.operations),
            own=frozenset(slot for node, slot in of if isinstance(node, Operation)),
            replaced=tuple((slot, name) for slot, name in variables if name in updated),
            updates=tuple(self.updates),
            additions=tuple(self.additions),
            steps=self.steps,
            take_fetched=taking(wanted),
            changes_variables=bool(self.updates or self.additions),
        )

    def visit(self, node: Node) -> int:
        slot = self.slots.get(node)
        if slot is not None:
            return slot
        if node in self.path:
            names = [one.name for one in [*self.path[self.path.index(node) :], node]]
            raise GraphError(f"operations form a cycle: {' -> '.join(names)}; feed one of them, or break the cycle")
        value: Any = MISSING
        if node not in self.feeds:
            if isinstance(node, Operation):
                return self.operation(node)
            if isinstance(node, Output):
                return self.output(node)
            if isinstance(node, Placeholder):
                value = node.default
                if value is MISSING:
                    raise FetchError(
                        f"placeholder {node.name!r} is needed and not fed; add it to feed_dict or to the feeds of the loop, "
                        "or give it a default"
                    )
        return self.add(node, value)

    def add(self, node: Node, value: Any = MISSING) -> int:
        slot = self.slots[node] = len(self.template)
        self.template.append(value)
        return slot

    def operation(self, node: Operation) -> int:
        self.path.append(node)
        positional: list[int] = []
        named: dict[str, int] = {}
        known = self.graph.nodes
        by_name = False
        for name in node.inputs:
            if name not in known and name in node.optional:
                by_name = True  # the parameters after the omitted one cannot be passed by position
                continue
            slot = self.visit(self.input(node, name))
            if by_name or name in node.keyword_only:
                named[name] = slot
            else:
                positional.append(slot)
        self.path.pop()
        slot = self.add(node)
        fn = _to_thread(node.fn, self.grace_secs) if node.thread else node.fn
        call = _call(fn, tuple(positional), named)
        is_async = node.is_async or node.thread
        inputs = (*positional, *named.values())
        self.operations.append(PlannedOperation(slot, call, is_async, is_async and can_wait(fn), node.name, inputs))
        self.claim(node, slot)
        return slot

    def input(self, node: Operation, name: str) -> Node:
        try:
            return self.graph.node(name)
        except FetchError as error:
            raise FetchError(f"operation {node.name!r} has an input that cannot be found: {error}") from None

    def output(self, node: Output) -> int:
        self.path.append(node)
        source = self.visit(node.operation)
        self.path.pop()
        slot = self.add(node)
        return self.compute(slot, node.name, functools.partial(_item, node), source)

    def unambiguous(self, node: Node, slot: int, step: Operation, returned: int) -> int:
        """Plan the fetch of a node that is no key of the step's result; there may be a key of its name."""
        self.template.append(MISSING)
        return self.compute(len(self.template) - 1, node.name, functools.partial(_unambiguous, node, step), slot, returned)

    def compute(self, slot: int, name: str, fn: Callable[..., Any], *inputs: int) -> int:
        self.operations.append(PlannedOperation(slot, _call(fn, inputs, {}), False, False, name, inputs))
        return slot

    def claim(self, node: Operation, slot: int) -> None:
        self.steps += node.steps
        name = node.updates or node.adds_to
        if name is None:
            return
        variables = {variable.name for variable in self.graph.variables}
        if name not in variables:
            raise GraphError(
                f"operation {node.name!r} changes {name!r}, which is not a variable; {did_you_mean(name, variables)}"
            )
        other = self.claims.setdefault(name, node)
        if other is not node and (other.updates or node.updates):
            raise GraphError(
                f"{other.name!r} and {node.name!r} both change {name!r} in one run; use adds_to for both, or run one"
            )
        (self.updates if node.updates else self.additions).append((name, slot))


def _call(fn: Callable[..., Any], positional: tuple[int, ...], named: dict[str, int]) -> Call:
    if named:
        return lambda values: fn(*[values[slot] for slot in positional], **{name: values[slot] for name, slot in named.items()})
    # The usual numbers of inputs are spelled out: this is on the path of every run, and `fn(*...)` costs twice as much.
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


def _to_thread(fn: Callable[..., Any], grace_secs: float) -> Callable[..., Coroutine[Any, Any, Any]]:
    def call(*args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        return to_thread(functools.partial(fn, *args, **kwargs), grace_secs=grace_secs)

    return call


def _is_mapping(result: object) -> TypeGuard[Mapping[Any, Any]]:
    # The usual results come first: the check of an abstract class costs ten times as much.
    return type(result) is dict or (result is not None and isinstance(result, Mapping))


def _item(node: Output, result: Any) -> Any:
    if _is_mapping(result):
        if node.key in result:
            return result[node.key]
        known: Iterable[Any] = result.keys()
        raise FetchError(
            f"{node.key!r} is not in the result of step {node.operation.name!r}; {did_you_mean(node.key, known)}", name=node.key
        )
    raise FetchError(
        f"{node.key!r} is fetched by name, but step {node.operation.name!r} returned {type(result).__name__} and not a mapping; "
        f"return a dict, or fetch {node.operation.name!r} for the whole result",
        name=node.key,
    )


def _unambiguous(node: Node, step: Operation, value: Any, result: Any) -> Any:
    if _is_mapping(result) and node.name in result:
        other = "the function itself" if node is step else "the global step" if isinstance(node, GlobalStep) else "a parameter"
        raise FetchError(
            f"{node.name!r} is fetched, and is both {other} and a key of the result of step {step.name!r}; rename the key",
            name=node.name,
        )
    return value
