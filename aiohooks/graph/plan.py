"""The plan of a run: the operations that compute a set of nodes, their order, and the changes to commit at the end."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from aiohooks._aio.cancel import to_thread
from aiohooks._aio.overlap import can_wait
from aiohooks.errors import FetchError, GraphError, did_you_mean
from aiohooks.graph.fetches import Take, taking
from aiohooks.graph.graph import MISSING, GlobalStep, Graph, Node, Operation, Output, Placeholder, Variable


@dataclass(frozen=True, slots=True, eq=False)
class PlannedOperation:
    """One operation of a plan: `call` takes a run's values, its result is put at `slot`.

    `of_graph` is false for what takes values out of the result of a step; observers are not notified of that.
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

    A run copies `template`, which has the constant values, and puts in the fed ones, which come first, and those of `variables`
    and `step_slots`. Then it runs the operations, ordered by their inputs, and so by their slots; `take_fetched` selects the
    fetched values. `changes` are the variables that the run changes, and whether by an addition; `replaced` are those that it
    reads and replaces.
    """

    def __init__(
        self, graph: Graph, nodes: Sequence[Node], fed: Iterable[Node], grace_secs: float, step: Operation | None = None
    ) -> None:
        """Plan a run that fetches `nodes`, and in whose `feed_dict` are those of `fed`, in this order.

        `step`, a step function's operation, is run whatever is fetched: a parameter may be meant as a key of its result.

        Raises:
            FetchError: a placeholder is not fed, or a parameter of an operation is not in the graph.
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
                    self._compute(node.name, functools.partial(_check_unambiguous, node, step), returned)
        self.take_fetched: Take = taking(fetched)
        replaced = {name for name, _, adds in self.changes if not adds}
        self.replaced: list[tuple[int, str]] = [(slot, name) for slot, name in self.variables if name in replaced]

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
            return self._compute(node.name, functools.partial(_item, node), self._visit(node.operation))
        slot = self._new_slot(node.default if isinstance(node, Placeholder) else MISSING)
        if isinstance(node, Variable):
            self.variables.append((slot, node.name))
        elif isinstance(node, GlobalStep):
            self.step_slots.append(slot)
        elif isinstance(node, Placeholder) and node.default is MISSING:
            raise FetchError(
                f"placeholder {node.name!r} is needed and not fed; add it to feed_dict or to the feeds of the loop, "
                "or give it a default"
            )
        return slot

    def _plan_operation(self, node: Operation) -> int:
        if node in self._path:
            names = [one.name for one in [*self._path[self._path.index(node) :], node]]
            raise GraphError(f"operations form a cycle: {' -> '.join(names)}; feed one of them, or break the cycle")
        self._path.append(node)
        positional: list[int] = []
        named: dict[str, int] = {}
        for place, name in enumerate(node.inputs):
            if name in node.optional and name not in self._graph.nodes:
                continue
            try:
                needed = self._graph.node(name)
            except FetchError as error:
                raise FetchError(f"operation {node.name!r} has an input that cannot be found: {error}") from None
            slot = self._visit(needed)
            if name in node.keyword_only or len(positional) < place:  # behind one that was omitted, none is passed by position
                named[name] = slot
            else:
                positional.append(slot)
        self._path.pop()
        fn = _to_thread(node.fn, self._grace_secs) if node.thread else node.fn
        is_async = node.is_async or node.thread
        slot, inputs = self._new_slot(), (*positional, *named.values())
        call = _call(fn, tuple(positional), named)
        self.operations.append(PlannedOperation(slot, call, is_async, is_async and can_wait(fn), node.name, inputs, True))
        self._claim(node, slot)
        return slot

    def _compute(self, name: str, fn: Callable[[Any], Any], source: int) -> int:
        """Plan a function of the result of a step."""
        slot = self._new_slot()
        self.operations.append(PlannedOperation(slot, _call(fn, (source,), {}), False, False, name, (source,), False))
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
                f"operation {node.name!r} changes {name!r}, which is not a variable; {did_you_mean(name, variables)}"
            )
        other = self._claims.setdefault(name, node)
        if other is not node and (other.updates or node.updates):
            raise GraphError(
                f"{other.name!r} and {node.name!r} both change {name!r} in one run; use adds_to for both, or run one"
            )
        self.changes.append((name, slot, node.updates is None))


def _call(fn: Callable[..., Any], positional: tuple[int, ...], named: dict[str, int]) -> Callable[[list[Any]], Any]:
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
    return lambda *args, **kwargs: to_thread(functools.partial(fn, *args, **kwargs), grace_secs=grace_secs)


def _is_mapping(result: object) -> TypeGuard[Mapping[Any, Any]]:
    # The usual results come first: the check of an abstract class costs ten times as much.
    return type(result) is dict or (result is not None and isinstance(result, Mapping))


def _item(node: Output, result: Any) -> Any:
    if not _is_mapping(result):
        raise FetchError(
            f"{node.name!r} is fetched by name, but step {node.operation.name!r} returned {type(result).__name__} and not a "
            f"mapping; return a dict, or fetch {node.operation.name!r} for the whole result",
            name=node.name,
        )
    if node.name not in result:
        raise FetchError(
            f"{node.name!r} is not in the result of step {node.operation.name!r}; {did_you_mean(node.name, result)}",
            name=node.name,
        )
    return result[node.name]


def _check_unambiguous(node: Node, step: Operation, result: Any) -> None:
    """Raise if a node that is fetched, and is no key of the step's result, is one all the same."""
    if _is_mapping(result) and node.name in result:
        other = "the function itself" if node is step else "the global step" if isinstance(node, GlobalStep) else "a parameter"
        raise FetchError(
            f"{node.name!r} is fetched, and is both {other} and a key of the result of step {step.name!r}; rename the key",
            name=node.name,
        )
