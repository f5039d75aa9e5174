"""The raw session: runs of a graph's operations, each of which changes everything or nothing.

A fetch is a node or its name, which is a leaf, or a list, tuple, named tuple or mapping of fetches,
to any depth. The result of a run has the shape of its fetches.

Each set of leaves and feeds has a `Plan`: the operations that the leaves need, their order, and the
changes to commit. A run evaluates each leaf once. Planning never waits.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import operator
import types
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard, overload

from aiohooks._core.activity import Observer, active, current_scope, observed_call
from aiohooks._core.calls import (
    Calls,
    RunWaits,
    Wait,
    can_wait,
    context_changes,
    copy_back,
    result_now,
)
from aiohooks._core.validate import check_instance, is_coroutine_function
from aiohooks._core.waits import DEFAULT_GRACE_SECS, shielded
from aiohooks.checkpoint.stateful import HostMemory, Stateful, snapshot
from aiohooks.errors import (
    FetchError,
    GraphError,
    PublisherFinishedError,
    SessionClosedError,
    UpdateConflictError,
    WrongLoopError,
    did_you_mean,
    safe_repr,
)
from aiohooks.graph.graph import (
    MISSING,
    A,
    Change,
    FeedDict,
    GlobalStep,
    Graph,
    Node,
    Operation,
    Options,
    Output,
    Placeholder,
    Variable,
    Variables,
    values_of,
)
from aiohooks.stores.base import MemoryStepStore, StepStore

if TYPE_CHECKING:
    from aiohooks.checkpoint import Restored, Saver

Build = Callable[[Sequence[Any]], Any]
"""Builds the result of one request from the values of all leaves of a run."""

Take = Callable[[list[Any]], Sequence[Any]]
"""Takes the items at certain places out of a list. `taking` returns such a function."""

# The exact types of leaves: of the fetches that are not containers of other fetches.
LEAF_TYPES = frozenset({str, Operation, Placeholder, Variable, GlobalStep, Output})


def taking(places: Sequence[int]) -> Take:
    """Return a function that returns the items at `places` of a list.

    Place -1 is the last one.
    """
    if len(places) > 1:
        return operator.itemgetter(*places)
    # Without a place, `itemgetter` raises, and with a single place it returns the item itself. A
    # slice returns a list, and takes no longer.
    if not places:
        return operator.itemgetter(slice(0))
    (place,) = places
    end = None if place == -1 else place + 1
    return operator.itemgetter(slice(place, end))


class Leaves:
    """The distinct nodes that one run fetches, in the order of their first request."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        # The place of each node among the values of `nodes`, which each `Build` gets.
        self._places: dict[Node, int] = {}

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes that have been requested so far."""
        return tuple(self._places)

    def place(self, leaf: Any) -> int:
        """Return the place of a node or name. Add a node that was not requested before."""
        return self._places.setdefault(self._graph.node(leaf), len(self._places))

    def build(self, fetches: Any) -> Build:
        """Add the nodes in `fetches`. Return the function that builds the result of this request.

        Raises:
            FetchError: a part of the request is neither a known node nor a container of fetches.
        """
        if fetches is None:
            raise FetchError(
                "None cannot be fetched; give [] to fetch nothing, or leave it out of a list"
            )
        container = _split_container(fetches)
        if container is None:
            return operator.itemgetter(self.place(fetches))
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


def canonical_feeds(graph: Graph, feed_dict: FeedDict) -> dict[Node, Any]:
    """Return the feeds by node. A key of `feed_dict` is a node or a name.

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


def _check_feeds(graph: Graph, feed_dict: FeedDict) -> None:
    """Raise if `canonical_feeds` would raise."""
    canonical_feeds(graph, feed_dict)


# -- plans


@dataclasses.dataclass(frozen=True)
class PlannedOperation:
    """One call of a plan: of an operation of the graph, or of a function of this module.

    A function of this module only reads the result of a step function.

    Attributes:
        name: the name of the operation, the output or the step function, for messages.
        slot: the place of the result among the values of a run. See `Plan`.
        inputs: the slots of the inputs.
        call: calls the function with the inputs, which it takes out of the values of a run.
        is_async: whether the result of the call must be awaited.
        may_wait: whether awaiting the result may suspend the task. A coroutine function without an
            `await` never waits.
        of_graph: whether it is a call of an operation of the graph. Only these are observed.
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
        take_fetched: takes the fetched values, in the order of `Leaves.nodes`, out of the values of
            a run.
    """

    def __init__(self, graph: Graph, fed: Collection[Node]) -> None:
        """Start with the slots of the global step and of the fed nodes, in the order of `fed`.

        If the global step is fed, too, its later slot counts, which has the fed value.
        """
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
        # The slot of each planned node. It is None while the inputs of the node are being planned:
        # the nodes with None are the path to the current node, in order. If `_slot_of` comes to a
        # node of this path again, the operations form a cycle.
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

        The check is made in each run, because only the result of the step shows whether one of its
        keys has the same name as a fetched node. The errors are the same as for `fetch`.
        """
        result_slot = self._slot_of(step)
        # An output stands for the key that has its name, so its name is not ambiguous.
        other_nodes = [node for node in nodes if not isinstance(node, Output)]

        def check(values: list[Any]) -> None:
            _check_unambiguous(other_nodes, step, values[result_slot])

        if other_nodes:
            self._append_operation(step.name, check, (result_slot,))

    def _slot_of(self, node: Node) -> int:
        """Return the slot of a node. Plan the node and its inputs first if it has no slot."""
        if node not in self._slots:
            self._slots[node] = None
            self._slots[node] = self._plan_node(node)
        slot = self._slots[node]
        if slot is None:
            path = [visited.name for visited in self._slots if self._slots[visited] is None]
            cycle = path[path.index(node.name) :]
            raise GraphError(
                f"operations form a cycle: {' -> '.join([*cycle, node.name])}; feed one of them, or"
                " break the cycle"
            )
        return slot

    def _new_slot(self, value: Any = MISSING) -> int:
        """Add a slot with this value at the start of a run. Return the number of the slot."""
        self.initial_values.append(value)
        # The global step has slot 0, and the feeds have the slots 1 to `_fed_count`. So the first
        # of the `initial_values` has slot `_fed_count + 1`.
        return self._fed_count + len(self.initial_values)

    def _plan_node(self, node: Node) -> int:
        """Plan a node after its inputs, and return its new slot."""
        if isinstance(node, Operation):
            return self._plan_operation(node)
        if isinstance(node, Output):
            result_slot = self._slot_of(node.operation)

            def read_output(values: list[Any]) -> Any:
                return _output_value(node, values[result_slot])

            return self._append_operation(node.name, read_output, (result_slot,))
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
        by_keyword: dict[str, int] = {}
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
            # If an optional input was left out, the next inputs are passed by keyword, because
            # their positions no longer match those of the parameters.
            is_left_out_before = len(positional) < index
            if name in node.keyword_only or is_left_out_before:
                by_keyword[name] = slot
            else:
                positional.append(slot)
        call = _call_with_slots(node.fn, positional, by_keyword)
        input_slots = (*positional, *by_keyword.values())
        slot = self._append_operation(node.name, call, input_slots, node.fn)
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
        """Append a call that reads its inputs from slots. Return the slot of its result.

        See `PlannedOperation`. `fn` is the function of an operation of the graph, and None if
        `call` only reads the result of a step function.
        """
        slot = self._new_slot()
        is_async = fn is not None and is_coroutine_function(fn)
        may_wait = is_async and can_wait(fn)
        self.operations.append(
            PlannedOperation(name, slot, inputs, call, is_async, may_wait, of_graph=fn is not None)
        )
        return slot

    def _add_change(self, node: Operation, slot: int) -> None:
        """Add the change that the result of an operation, in `slot`, makes to a variable, if any.

        Raises:
            GraphError: the graph has no such variable, or another operation changes the variable,
                and one of the two would discard the change of the other.
        """
        is_added = node.updates is None
        name = node.adds_to if is_added else node.updates
        if name is None:
            return
        variable_names = {variable.name for variable in self._graph.variables}
        if name not in variable_names:
            raise GraphError(
                f"operation {node.name!r} changes {name!r}, which is not a variable;"
                f" {did_you_mean(name, variable_names)}. To add it, call"
                f" graph.variable({name!r}, ...)"
            )
        other = self._changed_by.get(name)
        if other is None:
            self._changed_by[name] = node
        elif node.updates is not None or other.updates is not None:
            # Several operations may add to a variable. But an operation that replaces the variable
            # would discard the change of the other one.
            raise GraphError(
                f"{other.name!r} and {node.name!r} both change {name!r} in one run; use adds_to for"
                " both, or run one"
            )
        self.changes.append(Change(name, slot, is_added))


def _call_with_slots(
    fn: Callable[..., Any],
    positional: Sequence[int],
    by_keyword: Mapping[str, int],
) -> Callable[[list[Any]], Any]:
    """Return a function that calls `fn` with arguments from these slots of the values of a run."""
    take_positional = taking(positional)
    if by_keyword:
        return lambda values: fn(
            *take_positional(values), **{name: values[slot] for name, slot in by_keyword.items()}
        )
    # Hot path: each run calls these functions. Up to two inputs, the usual numbers, have a call of
    # their own, because `fn(*...)` takes twice as long.
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
    """Return whether the result of a step is a mapping."""
    # Hot path: the usual results, a dict and None, are tested first, because the test for an
    # abstract class takes ten times as long.
    return type(result) is dict or (result is not None and isinstance(result, Mapping))


def _output_value(node: Output, result: Any) -> Any:
    """Return the item of a step's result that has the name of an output."""
    step_name = node.operation.name
    if not _is_mapping(result):
        raise FetchError(
            f"{node.name!r} is fetched by name, but step {step_name!r} returned"
            f" {type(result).__name__} and not a mapping; return a dict, or fetch {step_name!r} for"
            " the whole result",
            name=node.name,
        )
    if node.name not in result:
        raise FetchError(
            f"{node.name!r} is not in the result of step {step_name!r};"
            f" {did_you_mean(node.name, result)}",
            name=node.name,
        )
    return result[node.name]


def _check_unambiguous(nodes: Sequence[Node], step: Operation, result: Any) -> None:
    """Raise if the result of a step has the name of a fetched node as a key.

    The caller has fetched this name, and may have meant either the node or the item of the result.
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


# -- the session

_MOST_PLANS = 1024
# Builds the result of a run that fetches a single leaf: the only fetched value.
_BUILD_LEAF = operator.itemgetter(0)
# The attempts of a run. Their number is limited, because other runs may overtake each of them.
# Hot path: the range is a constant, because every run uses it.
_ATTEMPTS = range(100)


@dataclasses.dataclass
class Monitor:
    """The parts of a monitored session that its raw sessions use.

    Attributes:
        grace_secs: see `Session.grace_secs`.
        stateful_hooks: implements `Session.stateful_hooks`.
        state_of: implements `Session.state_of`.
        drain_hooks: implements `Session.drain_hooks`.
        plans: the plans of the latest raw session. The next one, after a recovery, uses them too.
    """

    grace_secs: float
    stateful_hooks: Callable[[], Mapping[str, Stateful]]
    state_of: Callable[[Stateful], Any]
    drain_hooks: Callable[[], Awaitable[None]]
    plans: dict[Any, Plan] = dataclasses.field(default_factory=dict[Any, Plan])


class RunRequest:
    """A run of a session: its fetches and feeds, and how its result is made.

    Attributes:
        fetches: nodes or names, nested at will.
        feed_dict: values by node or name.
        options: the options for a session class that overrides `run`, or None.
        run_metadata: a dict into which such a `run` may write. None if `options` is None.
        build: builds the result from the values of the fetches. With None, the result has the shape
            of the fetches.
    """

    __slots__ = ("build", "feed_dict", "fetches", "options", "run_metadata")

    def __init__(
        self,
        fetches: Any,
        feed_dict: FeedDict,
        options: Options = None,
        build: Build | None = None,
    ) -> None:
        self.fetches: Any = fetches
        self.feed_dict: FeedDict = feed_dict
        self.options: Options = options
        self.build: Build | None = build
        self.run_metadata: dict[str, Any] | None = None if options is None else {}


class Session:
    """Runs the operations that a set of fetches needs: each once, independent ones concurrently.

    A run reads each variable once, at its start. When every operation has succeeded, the run
    commits the new values of variables and the global step together. A run that fails or is
    cancelled changes nothing.

    Runs of one session may be concurrent, except that the runs of a monitored session take turns.
    A run may replace a variable (`updates=`) after another run has replaced the value that it read.
    In this case, its operations are called again with the new value, so that no update is lost.

    The first operation that may wait and all later ones are called in contexts of their own. Such a
    context has the context variables that were set by the operations whose results it needs. At
    the end of a run, the caller's context gets the variables that all operations have set. If
    several operations have set one variable, the last operation wins.
    """

    graph: Graph
    """The graph that is run."""
    global_step: StepStore
    """The step store. `session.global_step.latest.step` is the latest step."""
    variables: Variables
    """The values of the variables. See `variables.snapshot` and `variables.assign`."""
    committed_step: int
    """The global step after the latest run of this session."""
    grace_secs: float
    """How long a cancelled run waits for calls that do not end immediately: 10 s, or the
    `stop_grace_period_secs` of the monitored session.
    """
    tracked: Mapping[str, Stateful]
    """The objects saved in checkpoints in addition to the variables: the scaffold's `tracked`."""
    saver: Saver | None
    """The saver from which the creator of this session restores."""
    saved: bool
    """Whether a hook saves the session in checkpoints.

    If your own hook saves the session, set this in it. Otherwise a warning says that no hook saves
    it.
    """
    restored: Restored | None
    """The restored checkpoint of this session. Its `state` has only the states of hooks."""
    finished: PublisherFinishedError | None
    """Why there is nothing left to do: the run had finished before this session was created."""

    def __init__(
        self,
        graph: Graph,
        *,
        global_step: StepStore | None = None,
        variables: Variables | None = None,
    ) -> None:
        """Open a session. It holds no resources, and closing it only makes `run` raise.

        Args:
            graph: the graph to run.
            global_step: the store of the global step. By default, the session has its own store.
            variables: the values of the variables. By default, the session has its own values.
        """
        check_instance(graph, Graph, "graph")
        check_instance(global_step, StepStore, "global_step", optional=True)
        check_instance(variables, Variables, "variables", optional=True)
        self.graph = graph
        self.global_step = MemoryStepStore() if global_step is None else global_step
        self.variables = Variables() if variables is None else variables
        self.committed_step = self.global_step.latest.step
        # A monitored session sets these: its creator, or its hooks.
        self.grace_secs = DEFAULT_GRACE_SECS
        self.tracked = {}
        self.saver = None
        self.saved = False
        self.restored = None
        self.finished = None
        self._monitor: Monitor | None = None
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        # The plans by fetches, keys of the feeds, and whether the run is raw. See `_plan`.
        self._plans: dict[tuple[Any, tuple[Any, ...], bool], Plan] = {}
        # The plans of the raw session that this one replaces, so that a recovery plans nothing
        # again.
        self._earlier_plans: Mapping[Any, Plan] = {}
        initial = {variable.name: variable.initial for variable in graph.variables}
        # The variables of checkpoints. A variable that is added to the graph later has no value in
        # this session.
        self._variable_names = tuple(initial)
        self._values = values_of(self.variables)
        self._values.initialize(initial)

    @functools.cached_property
    def _snapshot_memory(self) -> HostMemory:
        """The memory of the latest copy of states, for the next one. Made for the first copy."""
        return HostMemory()

    @property
    def closed(self) -> bool:
        """Whether `aclose` was called."""
        return self._closed

    @overload
    async def run(
        self,
        fetches: Node[A],
        feed_dict: FeedDict = None,
    ) -> A: ...
    @overload
    async def run(self, fetches: Any, feed_dict: FeedDict = None) -> Any: ...
    async def run(self, fetches: Any, feed_dict: FeedDict = None) -> Any:
        """Run the operations that `fetches` needs, and return the values in the same shape.

        A step function is called unless you fetch nothing, or only the global step.

        Args:
            fetches: nodes or names, which may be nested in lists, tuples and mappings.
            feed_dict: values by node or name, for this run only. A fed node is not computed.

        Raises:
            FetchError: a name is unknown, or a placeholder is not fed.
            GraphError: the operations cannot be ordered.
            SessionClosedError: the session is closed.
            UpdateConflictError: other runs kept replacing a variable that this run replaces.
            WrongLoopError: the session was used in another event loop before.
            BaseException: an operation raised this error, or several errors form this group.
        """
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise WrongLoopError(
                "this session belongs to another event loop. Make a session in each loop, and"
                " share a step store by URL"
            )
        return await self._run(None, RunRequest(fetches, feed_dict))

    def _run(self, run_waits: RunWaits | None, request: RunRequest) -> Awaitable[Any]:
        """Find the plan of a run, or make it. Return the coroutine that runs the plan.

        A monitored run gives its `run_waits`, which can end the waits of this run. A raw run, which
        is not part of a monitored run, gives None.
        """
        # Hot path: each run comes here. This is a plain function, and calls others only in rare
        # cases: of a run of 2.4 µs, a further coroutine would take 90 ns, and a call 30 ns.
        if self._closed:
            self._check_open()
        is_raw = run_waits is None
        fetches = request.fetches
        feed_dict = request.feed_dict
        plan = None
        build: Build = _BUILD_LEAF
        fetches_type: Any = type(fetches)  # pyright: ignore[reportUnknownVariableType]
        if fetches_type is tuple:
            # The fetched values may be a list: see `taking`.
            build = tuple
        # The usual fetches, a leaf or a tuple of leaves, are keys of `_plans` as they are.
        if fetches_type is tuple or fetches_type in LEAF_TYPES:
            try:
                fed_keys = () if feed_dict is None else tuple(feed_dict)
                plan = self._plans.get((fetches, fed_keys, is_raw))
            except TypeError:
                # A part of the fetches cannot be hashed, such as a list in a tuple.
                pass
        if plan is None:
            plan, build, feed_dict = self._plan(fetches, feed_dict, is_raw)
        # Slot 0 is that of the global step, which `_run_plan` reads.
        fed_values: list[Any] = [MISSING]
        if feed_dict:
            try:
                values = feed_dict.values()
            except AttributeError:
                # Feeds that are no mapping may have the keys of a plan, as a list of names does.
                _check_feeds(self.graph, feed_dict)
                raise
            for value in values:
                fed_values.append(value)
                # The plan was made for feeds with these keys, but the values are new.
                if isinstance(value, Node):
                    _check_feeds(self.graph, feed_dict)
        return self._run_plan(plan, request.build or build, fed_values, run_waits)

    async def _run_plan(
        self,
        plan: Plan,
        build: Build,
        fed_values: list[Any],
        run_waits: RunWaits | None,
    ) -> Any:
        """Call the operations of a plan, and commit their results. Return the result of the run.

        A run is overtaken if another run has replaced a variable after this run read it, and this
        run would replace it as well. An overtaken run commits nothing and begins again.
        """
        # Hot path: each run comes here. Most operations and commits do not wait. So `_call_now` and
        # the shortest form of `_commit` are written out: calls would take 30 ns, coroutines 90 ns.
        for _ in _ATTEMPTS:
            values = fed_values + plan.initial_values
            values[0] = self.global_step.latest.step
            for name, slot in plan.variable_slots.items():
                values[slot] = self._values.by_name[name]
            operations = plan.operations
            # A raw run is observed as well if the code of a monitored run makes it.
            scope = current_scope.get() if run_waits is None else run_waits.scope
            if scope is not None and scope.observers:
                operations = [_observed(operation, scope.observers) for operation in operations]
            calls: OperationCalls | None = None
            slot = 0
            try:
                for operation in operations:
                    slot = operation.slot
                    if operation.may_wait:
                        # From here on, `OperationCalls` starts each operation when its inputs are
                        # ready, and goes through the rest of the plan itself.
                        calls = OperationCalls(self, operations, values, run_waits)
                        calls.start_ready()
                        break
                    # As in `_call_now`.
                    result = operation.call(values)
                    if operation.is_async:
                        result = await result
                    elif type(result) is types.CoroutineType:
                        _reject_coroutine(operation.name, result)
                    values[slot] = result
            except BaseException as error:
                # The error of the operation that has this slot is only recorded here. `wait` raises
                # it when no call is in progress.
                calls = calls or OperationCalls(self, operations, values, run_waits)
                calls.record_failure(slot, error)
            if calls is not None:
                await calls.wait()
            # The result is built before the commit, because a run that fails must change nothing.
            result = build(plan.take_fetched(values))
            store = self.global_step
            steps = plan.steps
            # As in `_commit`, without variables to set and without a store to wait for.
            if not plan.changes and (store.inline or not steps):
                self.committed_step = store.advance_nowait(steps) if steps else store.latest.step
                return result
            if await self._commit(plan, values, run_waits):
                return result
            # The run was overtaken, and begins again. But a session that a recovery has replaced in
            # the meantime must not run again: the session after it has the variables now.
            self._check_open()
            _drop_effects(run_waits)
        raise _conflict_error(plan)

    def _check_open(self) -> None:
        """Raise if the session is closed."""
        if self._closed:
            raise SessionClosedError(
                "this session is closed; use the session that the latest after_create_session got"
            )

    def _plan(
        self, fetches: Any, feed_dict: FeedDict, is_raw: bool
    ) -> tuple[Plan, Build, Mapping[Node, Any]]:
        """Return the plan of a run, the function that builds its result, and the feeds by node.

        `is_raw` is true if the run is not part of a monitored run.
        """
        leaves = Leaves(self.graph)
        build = leaves.build(fetches)
        feeds = canonical_feeds(self.graph, feed_dict)
        nodes = leaves.nodes
        fed_keys = tuple(feed_dict or ())
        parts: Any = (fetches,)
        if type(fetches) is tuple:
            parts = fetches  # pyright: ignore[reportUnknownVariableType]
        has_only_leaves = LEAF_TYPES.issuperset(map(type, (*parts, *fed_keys)))
        # `_run` looks up a leaf or a tuple of leaves as it is. All other fetches share the plan of
        # their nodes. So does a tuple with a repeated leaf, whose plan has fewer nodes than parts.
        key: Any = (nodes, tuple(feeds), is_raw)
        if has_only_leaves and len(parts) == len(nodes):
            key = (fetches, fed_keys, is_raw)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._earlier_plans.get(key)
            if plan is None:
                step = self._step_to_run(nodes, feeds, is_raw)
                plan = Plan(self.graph, feeds)
                plan.fetch(nodes)
                if step is not None:
                    plan.call_step(step, nodes)
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan, build, feeds

    def _step_to_run(
        self,
        nodes: Collection[Node],
        fed: Collection[Node],
        is_raw: bool,
    ) -> Operation | None:
        """Return the operation of the step function if the run must call it, else None.

        A run calls the step even if it fetches none of its outputs. There are two exceptions:
        outputs of the step are fed, or a raw run fetches nothing but the global step. A graph
        without a step function has nothing to call.

        Raises:
            FetchError: nothing would run, or a fed name is neither a parameter of the step nor
                fetched, so it is probably misspelled.
        """
        step = self.graph.step_operation
        if step is None:
            if nodes or is_raw:
                return None
            names = [name for name, node in self.graph.nodes.items() if isinstance(node, Operation)]
            raise FetchError(
                "neither the caller nor a hook fetches anything, so nothing would run;"
                f" operations are: {names}"
            )
        fed_outputs = [node for node in fed if isinstance(node, Output)]
        for node in fed_outputs:
            if node not in nodes:
                raise FetchError(
                    f"{node.name!r} is fed, and is neither a parameter of step {step.name!r} nor"
                    f" fetched; {did_you_mean(node.name, step.inputs)}",
                    name=node.name,
                )
        # A raw run that fetches only the global step must not train: hooks read the step this way.
        # This is also true if nothing is fetched.
        only_reads_global_step = is_raw and all(isinstance(node, GlobalStep) for node in nodes)
        if fed_outputs or only_reads_global_step:
            return None
        return step

    def _commit(
        self,
        plan: Plan,
        values: list[Any],
        run_waits: RunWaits | None,
    ) -> Awaitable[bool]:
        """Commit the changes of a run, or change nothing and return False if it was overtaken."""
        committing = self._commit_changes(plan, values, run_waits)
        if not plan.steps or self.global_step.inline:
            # This commit does not wait.
            return committing
        wait = Wait[bool]("commit of the variables and the global step", waits=run_waits)
        return wait.result_of(committing)

    async def _commit_changes(
        self, plan: Plan, values: list[Any], run_waits: RunWaits | None
    ) -> bool:
        """Set the variables and advance the global step, without the wait of `_commit`.

        Return False if the run was overtaken.
        """
        by_name = self._values.by_name
        for name, _, is_added in plan.changes:
            slot = plan.variable_slots.get(name)
            # Values are not changed in place, so a value that was replaced is another object.
            if not is_added and slot is not None and by_name[name] is not values[slot]:
                return False
        new_values = self._values.prepare(plan.changes, values)
        store = self.global_step
        steps = plan.steps
        if not steps or store.inline:
            # The store comes first, because it may reject the step. Nothing is awaited before the
            # values are set, so no other task sees the new step with the old values.
            self.committed_step = store.advance_nowait(steps) if steps else store.latest.step
            self._values.replace(new_values)
        else:
            await self._set_and_advance(new_values, steps, run_waits)
        return True

    async def _set_and_advance(
        self, new_values: Mapping[str, Any], steps: int, run_waits: RunWaits | None
    ) -> None:
        """Set variables, and then advance the global step in a store that waits.

        If the store does not advance, give the variables their old values again.
        """
        # The values come first, because a task that waits for the step must find its variables.
        by_name = self._values.by_name
        old_values = {name: by_name[name] for name in new_values}
        self._values.replace(new_values)
        scope = None if run_waits is None else run_waits.scope
        attempt = None if scope is None else scope.attempt

        async def advance_step() -> None:
            # `shielded` runs this in a task of its own: if the run is cancelled in the meantime, it
            # must still be either committed or undone.
            try:
                self.committed_step = await self.global_step.advance(steps)
            except Exception:
                for name, value in new_values.items():
                    # A value that another session has committed in the meantime must stay.
                    if by_name[name] is value:
                        by_name[name] = old_values[name]
                raise
            if scope is not None:
                scope.committed = True
            if attempt is not None:
                attempt.committed = True

        await shielded(
            advance_step(), grace_secs=self.grace_secs, what="advance of the global step"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the content of a checkpoint.

        The keys are "variables", "tracked" and "hooks". Each has a dict of values or states by
        name. Values of variables are not copied, because a commit replaces a value and never
        modifies it. States are copied, with their tensors, to the memory of the host.

        Raises:
            InvalidHookError: two stateful hooks have the same name.
        """
        states = {
            "tracked": {name: self.state_of(tracked) for name, tracked in self.tracked.items()},
            "hooks": {name: hook.state_dict() for name, hook in self.stateful_hooks().items()},
        }
        # A single call copies both groups of states, so that tensors that share memory also share
        # it in the copies.
        copies = snapshot(states, self._snapshot_memory)
        return {
            "variables": {name: self._values.by_name[name] for name in self._variable_names},
            "tracked": copies["tracked"],
            "hooks": copies["hooks"],
        }

    def stateful_hooks(self) -> Mapping[str, Stateful]:
        """Return the hooks of the monitored session that are saved in checkpoints, by name.

        Raises:
            InvalidHookError: two of them have the same name.
        """
        if self._monitor is None:
            return {}
        return self._monitor.stateful_hooks()

    def state_of(self, tracked: Stateful) -> Any:
        """Return the state of a tracked object for a checkpoint.

        For prefetched feeds, return the state after the last element that was used.
        """
        if self._monitor is None:
            return tracked.state_dict()
        return self._monitor.state_of(tracked)

    async def drain_hooks(self) -> None:
        """Wait for the background calls of the hooks that are saved in checkpoints.

        Call it before `state_dict`.
        """
        if self._monitor is not None:
            await self._monitor.drain_hooks()

    async def aclose(self) -> None:
        """Close the session, so that `run` raises. You may call this method again.

        The variables and the global step of the session stay readable.
        """
        self._closed = True

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        return f"<Session at step {self.global_step.latest.step}{closed}>"


GatheredRun = Callable[[RunWaits, RunRequest], Awaitable[Any]]
"""Runs a session as part of the monitored run that has these waits."""


def monitored_run(session: Session, monitor: Monitor) -> GatheredRun:
    """Make a raw session part of a monitored session, and return the function that runs it.

    If `run` is overridden, the function calls it. What ends the wait then ends the whole call.
    """
    session._monitor = monitor  # pyright: ignore[reportPrivateUsage]
    session._earlier_plans = monitor.plans  # pyright: ignore[reportPrivateUsage]
    monitor.plans = session._plans  # pyright: ignore[reportPrivateUsage]
    session.grace_secs = monitor.grace_secs
    inherits_run = type(session).run is Session.run
    # `run` can also be replaced on the object itself.
    if inherits_run and "run" not in vars(session):
        return session._run  # pyright: ignore[reportPrivateUsage]

    async def run(run_waits: RunWaits, request: RunRequest) -> Any:
        # Without options, `run` need not have the parameters for them.
        run_options: dict[str, Any] = {}
        if request.options is not None:
            run_options = {"options": request.options, "run_metadata": request.run_metadata}
        wait = Wait[Any]("run of the session", waits=run_waits)
        values = await wait.result_of(
            session.run(request.fetches, feed_dict=request.feed_dict, **run_options)
        )
        if request.build is None:
            return values
        return request.build(values)

    return run


def was_fed(session: Session) -> bool:
    """Return whether a run of the session had feeds, by the plans that the session keeps."""
    plans = session._plans  # pyright: ignore[reportPrivateUsage]
    return any(fed_keys for _, fed_keys, _ in plans)


def _conflict_error(plan: Plan) -> UpdateConflictError:
    """Return the error of a run that other runs have overtaken in every attempt."""
    names = ", ".join(repr(change.name) for change in plan.changes if not change.is_added)
    return UpdateConflictError(
        f"this run replaces {names} (updates=), and in each of its {len(_ATTEMPTS)} attempts"
        " another run did so first. Add to the variable with adds_to=, or let the runs take turns"
    )


def _drop_effects(run_waits: RunWaits | None) -> None:
    """Drop the effects that the operations of an attempt have recorded, before the next attempt."""
    # A raw run has no waits. It keeps all effects, because it cannot tell its own effects from
    # those of the monitored run around it.
    if run_waits is None or run_waits.scope is None:
        return
    attempt = run_waits.scope.attempt
    if attempt is not None:
        del attempt.effects[attempt.effects_before_run :]


def _call_now(operation: PlannedOperation, values: list[Any]) -> Any:
    """Call an operation that never suspends, and return its result.

    It is a plain function, or a coroutine function without an `await`.
    """
    if operation.is_async:
        return result_now(operation.call(values))
    result = operation.call(values)
    if type(result) is types.CoroutineType:
        _reject_coroutine(operation.name, result)
    return result


def _reject_coroutine(name: str, coroutine: Any) -> NoReturn:
    """Close the coroutine that a plain function has returned, which nothing awaits, and raise."""
    # Python would warn that a coroutine that is not closed was never awaited.
    coroutine.close()
    raise GraphError(
        f"operation {name!r} is a plain function that returned a coroutine; write it as `async def`"
    )


def _observed(operation: PlannedOperation, observers: Sequence[Observer]) -> PlannedOperation:
    """Return the operation for a run with observers: each call notifies them.

    A call that only reads the result of a step function is not observed, and returned unchanged.
    """
    if not operation.of_graph:
        return operation
    if operation.is_async:
        # A coroutine function has done nothing yet when its call returns. `observed_call` also
        # awaits the coroutine, and notifies the observers when it suspends and when it ends.
        call = functools.partial(
            observed_call, operation.call, "operation", operation.name, observers
        )
        return dataclasses.replace(operation, call=call)

    def call_observed(values: list[Any]) -> Any:
        with active("operation", operation.name, observers=observers):
            return operation.call(values)

    return dataclasses.replace(operation, call=call_observed)


class OperationCalls(Calls):
    """The concurrent calls of the operations of a run.

    A run makes this object when it comes to an operation that may wait, or when an operation has
    failed. A call starts when its inputs are ready. The number of a call is the slot of its result
    in the values of the run.
    """

    kind = "operation"

    def __init__(
        self,
        session: Session,
        operations: Sequence[PlannedOperation],
        values: list[Any],
        run_waits: RunWaits | None,
    ) -> None:
        super().__init__(values, session.grace_secs, run_waits)
        self._session = session
        self._operations = operations
        self._caller_context = copy_context()
        # The context of each call, by slot: a copy from before the call, and the context itself.
        self._call_contexts: dict[int, tuple[Context, Context]] = {}
        # By the slot of each call, the slots of the calls that it needs, directly or indirectly,
        # and that have set context variables.
        self._setters: dict[int, set[int]] = {}

    def start_ready(self) -> None:
        """Start the operations whose inputs are ready, in the order of the plan."""
        for operation in self._operations:
            # An operation that this loop has called may have failed, and ended all calls.
            if self.cancelling:
                return
            slot = operation.slot
            # Skip the operations that were started already. Those that the run called before this
            # object was made have a result, but no context here.
            if slot in self._call_contexts or self.results[slot] is not MISSING:
                continue
            if all(self.results[needed] is not MISSING for needed in operation.inputs):
                self._start_operation(operation)

    def _start_operation(self, operation: PlannedOperation) -> None:
        """Call an operation in a context of its own: in a task if it may wait, otherwise here."""
        context = self._new_context(operation)
        slot = operation.slot
        if operation.may_wait:
            self.start(slot, operation.call, (self.results,), operation.name, context=context)
            return
        try:
            self.results[slot] = context.run(_call_now, operation, self.results)
        except BaseException as error:
            self.record_failure(slot, error)

    def succeeded(self, number: int) -> None:
        self.start_ready()

    def _new_context(self, operation: PlannedOperation) -> Context:
        """Return the context for a call, and keep it.

        It is a copy of the caller's context, with the changes by the calls that this call needs:
        those of its inputs, of the inputs of these, and so on.
        """
        setters: set[int] = set()
        for input_slot in operation.inputs:
            # The other inputs have no context here: they are feeds, variables, and results from
            # before this object was made, whose calls were made in the caller's context.
            if input_slot in self._call_contexts:
                setters |= self._setters[input_slot]
                before, after = self._call_contexts[input_slot]
                if context_changes(before, after):
                    setters.add(input_slot)
        start_context = self._caller_context
        if setters:
            start_context = start_context.copy()
            # The order of slots is that of the plan: the last operation that has set a context
            # variable wins.
            setter_contexts = [self._call_contexts[slot] for slot in sorted(setters)]
            start_context.run(copy_back, setter_contexts)
        context = start_context.copy()
        self._call_contexts[operation.slot] = (start_context, context)
        self._setters[operation.slot] = setters
        return context

    def finish(self) -> None:
        # `super` applies the changes of these contexts to the caller's context, in this order: that
        # of the plan, so that the last operation wins, whichever ended last.
        self.contexts[:] = [self._call_contexts[slot] for slot in sorted(self._call_contexts)]
        super().finish()

    def describe(self, number: int) -> str:
        name = next(operation.name for operation in self._operations if operation.slot == number)
        # The run trains the step after the latest one, unless a train operation has more `steps`.
        return f"operation {name!r} at step {self._session.global_step.latest.step + 1}"
