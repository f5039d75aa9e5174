"""How a set of nodes is computed: which operations, in which order, and what is committed at the end. Made once a set."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from aiohooks._aio.cancel import to_thread
from aiohooks.errors import FetchError, GraphError, did_you_mean
from aiohooks.graph.graph import MISSING, GlobalStep, Graph, Node, Operation, Output, Placeholder, Variable

Call = Callable[[list[Any]], Any]
"""Calls an operation with its inputs out of a run's values; gives its result, or a coroutine for it."""


class PlannedOperation(NamedTuple):
    """One operation of a plan: `call` takes a run's values, the result goes to `slot`. Unpacked in the loop of every run."""

    call: Call
    is_async: bool
    slot: int
    name: str
    inputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A run of some nodes with some nodes fed.

    `template` holds what is the same in each run; `fed`, `variables` and `step_slots` say what is put into a copy of it;
    then the operations run, in an order in which each finds its inputs; `result` takes the fetched values out. In a chain
    each one needs the one before it, so that nothing can overlap.
    """

    template: list[Any]
    fed: tuple[tuple[int, Any], ...]
    variables: tuple[tuple[int, str], ...]
    step_slots: tuple[int, ...]
    operations: tuple[PlannedOperation, ...]
    updates: tuple[tuple[str, int], ...]
    additions: tuple[tuple[str, int], ...]
    steps: int
    result: Callable[[Sequence[Any]], tuple[Any, ...]]
    is_chain: bool
    changes_variables: bool


def make_plan(graph: Graph, nodes: Sequence[Node], feeds: Mapping[Node, Any], grace_secs: float) -> Plan:
    """Plans a run; `feeds` maps each fed node to the key under which a run finds its value.

    Raises:
        FetchError: a placeholder is not fed, or an operation has a parameter that is nothing in the graph.
        GraphError: a cycle, or two operations that claim one variable.
    """
    return _Planner(graph, feeds, grace_secs).plan(nodes)


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

    def plan(self, nodes: Sequence[Node]) -> Plan:
        wanted = [self.visit(node) for node in nodes]
        of = self.slots.items()
        return Plan(
            template=self.template,
            fed=tuple((slot, self.feeds[node]) for node, slot in of if node in self.feeds),
            variables=tuple((slot, node.name) for node, slot in of if isinstance(node, Variable) and node not in self.feeds),
            step_slots=tuple(slot for node, slot in of if isinstance(node, GlobalStep) and node not in self.feeds),
            operations=tuple(self.operations),
            updates=tuple(self.updates),
            additions=tuple(self.additions),
            steps=self.steps,
            result=_taker(wanted),
            is_chain=_is_chain(self.operations),
            changes_variables=bool(self.updates or self.additions),
        )

    def visit(self, node: Node) -> int:
        slot = self.slots.get(node)
        if slot is not None:
            return slot
        if node in self.path:
            names = [one.name for one in [*self.path[self.path.index(node) :], node]]
            raise GraphError(f"operations need each other in a circle: {' -> '.join(names)}; feed one of them, or break it")
        value: Any = MISSING
        if node not in self.feeds:
            self.path.append(node)
            if isinstance(node, Operation):
                return self.operation(node)
            if isinstance(node, Output):
                return self.output(node)
            self.path.pop()
            if isinstance(node, Placeholder):
                value = node.default
                if value is MISSING:
                    raise FetchError(
                        f"placeholder {node.name!r} is needed and not fed; add it to feed_dict, or give it a default"
                    )
        return self.add(node, value)

    def add(self, node: Node, value: Any = MISSING) -> int:
        slot = self.slots[node] = len(self.template)
        self.template.append(value)
        return slot

    def operation(self, node: Operation) -> int:
        positional: list[int] = []
        named: dict[str, int] = {}
        known = self.graph.nodes
        by_name = False
        for name in node.inputs:
            if name not in known:
                if name in node.optional:
                    by_name = True  # what comes behind the left-out one cannot be given by place
                    continue
                raise FetchError(
                    f"operation {node.name!r} has a parameter {name!r} that is not in the graph; {did_you_mean(name, known)}"
                )
            slot = self.visit(known[name])
            if by_name or name in node.keyword_only:
                named[name] = slot
            else:
                positional.append(slot)
        self.path.pop()
        slot = self.add(node)
        call = _caller(node, tuple(positional), named, self.grace_secs)
        self.operations.append(
            PlannedOperation(call, node.is_async or node.thread, slot, node.name, (*positional, *named.values()))
        )
        self.claim(node, slot)
        return slot

    def output(self, node: Output) -> int:
        source = self.visit(node.operation)
        self.path.pop()
        slot = self.add(node)
        take = functools.partial(_take, node, source)
        self.operations.append(PlannedOperation(take, False, slot, node.name, (source,)))
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


def _is_chain(operations: Sequence[PlannedOperation]) -> bool:
    return all(before.slot in after.inputs for before, after in itertools.pairwise(operations))


def _taker(slots: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    if len(slots) > 1:
        return operator.itemgetter(*slots)
    if not slots:
        return lambda values: ()
    only = slots[0]
    return lambda values: (values[only],)


def _caller(node: Operation, positional: tuple[int, ...], named: dict[str, int], grace_secs: float) -> Call:
    fn = node.fn
    if node.thread:
        fn = _in_thread(fn, grace_secs)
    if named:
        return lambda values: fn(*[values[slot] for slot in positional], **{name: values[slot] for name, slot in named.items()})
    # The usual small numbers of inputs are spelled out: this is on the path of every run.
    if not positional:
        return lambda values: fn()
    if len(positional) == 1:
        a = positional[0]
        return lambda values: fn(values[a])
    if len(positional) == 2:
        a, b = positional
        return lambda values: fn(values[a], values[b])
    inputs: Any = operator.itemgetter(*positional)  # pyright: ignore[reportUnknownVariableType]
    return lambda values: fn(*inputs(values))


def _in_thread(fn: Callable[..., Any], grace_secs: float) -> Callable[..., Coroutine[Any, Any, Any]]:
    def call(*args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        return to_thread(functools.partial(fn, *args, **kwargs), grace_secs=grace_secs)

    return call


def _take(node: Output, source: int, values: Sequence[Any]) -> Any:
    result = values[source]
    if isinstance(result, Mapping):
        mapping: Mapping[Any, Any] = result  # pyright: ignore[reportUnknownVariableType]
        if node.key in mapping:
            return mapping[node.key]
        known: Iterable[Any] = mapping.keys()
        raise FetchError(f"{node.key!r} is not in what step {node.operation.name!r} returned; {did_you_mean(node.key, known)}")
    raise FetchError(
        f"{node.key!r} is fetched by name, but step {node.operation.name!r} returned {type(result).__name__} and not a mapping; "
        f"return a dict, or fetch {node.operation.name!r} for the whole result"
    )
