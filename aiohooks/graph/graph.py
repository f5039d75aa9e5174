"""Graphs of placeholders, variables and operations, and the default graph of a context.

A graph only names its variables. A `Variables` has their values, for one session or for several
sessions of a process.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    NamedTuple,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from aiohooks._core.activity import RunScope, assigned, current_scope
from aiohooks._core.validate import (
    InitRequired,
    check_callable,
    check_instance,
    check_mapping,
    check_secs,
    checked_int,
    is_coroutine_function,
)
from aiohooks._core.waits import DEFAULT_GRACE_SECS, Waiters, to_thread, wait_for_others
from aiohooks.errors import (
    FetchError,
    GraphError,
    GraphFinalizedError,
    InvalidArgumentError,
    PublisherFailedError,
    SessionNotReadyError,
    add_note,
    did_you_mean,
)

if TYPE_CHECKING:
    # `typing.TypeVar` accepts a default only from Python 3.13 on. Type checkers bring
    # `typing_extensions` along, so the library does not have to depend on it.
    from typing_extensions import TypeVar as _TypeVar

    T_co = _TypeVar("T_co", covariant=True, default=Any)
else:
    T_co = TypeVar("T_co", covariant=True)
A = TypeVar("A")


class _Missing:
    """The class of `MISSING`, which stands for a default or a value that was not given."""

    def __repr__(self) -> str:
        return "<missing>"


MISSING = _Missing()


@dataclass(eq=False, repr=False)
class Node(Generic[T_co]):
    """A part of a graph that a run can fetch or feed.

    A run that fetches the node returns a `T_co` for it. Nodes are compared by identity. A graph
    finds them by name.
    """

    graph: Graph
    name: str

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


@dataclass(eq=False, repr=False)
class Placeholder(Node[Any]):
    """A value that each run feeds, unless it has a default. `Graph.placeholder` creates it."""

    default: Any


@dataclass(eq=False, repr=False)
class Variable(Node[Any]):
    """A value that the `Variables` of a session keep between runs.

    `initial` is its initial value, or a function without arguments that returns it.
    `Graph.variable` creates it.
    """

    initial: Any


class GlobalStep(Node[int]):
    """The global step. Fetching it returns the step at which the run started."""


@dataclass(eq=False, repr=False)
class Output(Node[Any]):
    """An item of the mapping that a step function returns. Its key is the name of the node.

    `operation` is the operation of the step function.
    """

    operation: Operation


@dataclass(eq=False, repr=False)
class Operation(Node[T_co]):
    """A coroutine function or a plain function that a graph calls with the values of its inputs.

    Calling an operation calls its function. `Graph.operation` and `Graph.train_op` create it.

    Attributes:
        fn: the function.
        steps: the number of steps by which a run that calls it advances the global step.
        inputs: the names of its inputs, in the order of the parameters.
        optional: the inputs that may be absent from the graph, because their parameters have a
            default.
        keyword_only: the inputs that are passed by keyword.
        updates: the variable that the result replaces, if any.
        adds_to: the variable to which the result is added, if any.
    """

    fn: Callable[..., Any]
    steps: int
    inputs: tuple[str, ...]
    optional: frozenset[str]
    keyword_only: frozenset[str]
    updates: str | None
    adds_to: str | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself, as if it were not an operation."""
        return self.fn(*args, **kwargs)


FeedDict = Mapping[Any, Any] | None
"""Values by node or by name. None feeds nothing."""
Options = Mapping[str, Any] | None
"""The options of a session class that has a `run` of its own. None passes no options."""
AsyncFn = Callable[..., Coroutine[Any, Any, A]]
"""A coroutine function."""


class OperationOptions(TypedDict, total=False):
    """The options of `Graph.operation`, which explains them."""

    updates: str | None
    adds_to: str | None
    name: str | None


class AddOperation(Protocol):
    """A decorator that adds a function. `Graph.operation` with options returns it."""

    @overload
    def __call__(self, fn: AsyncFn[A], /) -> Operation[A]: ...
    @overload
    def __call__(self, fn: Callable[..., A], /) -> Operation[A]: ...


_NodeT = TypeVar("_NodeT", bound=Node)


class Graph(InitRequired):
    """Placeholders, variables and operations.

    The inputs of an operation are nodes. By default, the names of its parameters are the names of
    these nodes. While a session is open, its graph is finalized and rejects additions.

    Attributes:
        global_step: the node of the global step. It can be fetched, and can be an input of
            operations.
        step_operation: the only operation of a graph that was made from a step function. Other
            graphs have None.
    """

    def __init__(self) -> None:
        self.global_step: GlobalStep = GlobalStep(self, "global_step")
        self.step_operation: Operation | None = None
        # All nodes except outputs, by name.
        self._nodes: dict[str, Node] = {"global_step": self.global_step}
        # The outputs of the step operation that `node` has returned, by name.
        self._outputs: dict[str, Output] = {}
        # The number of calls of `finalize` that were not undone. It is no flag, because several
        # sessions can be open: each calls `finalize`, and its end must not undo the other calls.
        self._finalize_count = 0

    def placeholder(self, name: str, *, default: Any = MISSING) -> Placeholder:
        """Add a value that each run must feed, unless it has a default.

        Raises:
            GraphError: the name is taken, or is not a non-empty string.
            GraphFinalizedError: the graph is finalized, for example by an open session.
        """
        return self._add(Placeholder(self, name, default))

    def variable(self, name: str, initial: Any) -> Variable:
        """Add a value that is kept between runs.

        Args:
            name: the name of the variable. A parameter with this name reads its value.
            initial: the initial value, or a plain function without arguments that returns it.

        Raises:
            GraphError: the name is taken or invalid, or `initial` is a coroutine function.
            GraphFinalizedError: the graph is finalized, for example by an open session.
        """
        if is_coroutine_function(initial):
            raise GraphError(
                f"the initial value of {name!r} is {initial!r}, a coroutine function, which is not"
                " awaited. Give a plain function. If the value must be awaited, assign it in the"
                " init_fn of a Scaffold"
            )
        return self._add(Variable(self, name, initial))

    @overload
    def operation(self, fn: AsyncFn[A], /) -> Operation[A]: ...
    @overload
    def operation(self, fn: Callable[..., A], /) -> Operation[A]: ...
    @overload
    def operation(self, **options: Unpack[OperationOptions]) -> AddOperation: ...
    def operation(
        self, fn: Any = None, **options: Unpack[OperationOptions]
    ) -> Operation | AddOperation:
        """Add a function as an operation. The names of its parameters name its inputs.

        A parameter that has a default does not need a node.

        Use this method as a decorator, with or without options. A run awaits a coroutine function,
        such as that of `in_thread`, and calls a plain function in the event loop.

        Args:
            fn: the function, if you write `@graph.operation` without options.
            updates: the name of the variable that the result replaces when the run commits. If the
                variable got another value after this run read it, the operations of the run are
                called again.
            adds_to: the name of the variable to which the result is added when the run commits.
                Other runs can add to it in the meantime.
            name: the name of the operation, by default the name of the function. See
                `unique_name`.

        Raises:
            GraphError: the name is taken, a parameter has no name, or the options contradict each
                other.
            GraphFinalizedError: the graph is finalized, for example by an open session.
        """
        return self._operation_or_decorator(fn, steps=0, **options)

    @overload
    def train_op(self, fn: AsyncFn[A], /) -> Operation[A]: ...
    @overload
    def train_op(self, fn: Callable[..., A], /) -> Operation[A]: ...
    @overload
    def train_op(self, *, steps: int = 1, **options: Unpack[OperationOptions]) -> AddOperation: ...
    def train_op(
        self, fn: Any = None, *, steps: int = 1, **options: Unpack[OperationOptions]
    ) -> Operation | AddOperation:
        """Add an operation that advances the global step by `steps` when a run commits.

        See `operation` for the other options and the errors.
        """
        steps = checked_int(steps, "steps", 1, expected="how many steps one run trains, 1 or more")
        return self._operation_or_decorator(fn, steps=steps, **options)

    def _operation_or_decorator(
        self,
        fn: Any,
        *,
        steps: int,
        **options: Any,
    ) -> Operation | AddOperation:
        """Add `fn` as an operation. Without `fn`, return a decorator that adds a function."""
        known_options = OperationOptions.__annotations__
        for option in options:
            if option not in known_options:
                advice = did_you_mean(option, known_options)
                raise InvalidArgumentError(f"an operation has no option {option!r}; {advice}")
        decorator: AddOperation = functools.partial(self._add_operation, steps=steps, **options)
        if fn is None:
            return decorator
        return decorator(fn)

    def _add_operation(
        self,
        fn: Callable[..., Any],
        *,
        steps: int,
        name: str | None = None,
        updates: str | None = None,
        adds_to: str | None = None,
    ) -> Operation:
        """Check the options of an operation, which `operation` explains, and add it."""
        check_callable(fn, "the function of an operation")
        if name is None:
            # A callable object may have no `__name__`.
            name = str(getattr(fn, "__name__", repr(fn)))
        subject = f"operation {name!r}"
        check_instance(updates, str, f"updates of {subject}", optional=True)
        check_instance(adds_to, str, f"adds_to of {subject}", optional=True)
        if updates is not None and adds_to is not None:
            raise GraphError(
                f"{subject} has both updates={updates!r} and adds_to={adds_to!r}; give one"
            )
        parameters = _input_parameters(fn, subject)
        optional = [item.name for item in parameters if item.default is not item.empty]
        keyword_only = [item.name for item in parameters if item.kind is item.KEYWORD_ONLY]
        operation = Operation(
            self,
            name,
            fn,
            steps,
            inputs=tuple(item.name for item in parameters),
            optional=frozenset(optional),
            keyword_only=frozenset(keyword_only),
            updates=updates,
            adds_to=adds_to,
        )
        return self._add(operation)

    def _add(self, node: _NodeT) -> _NodeT:
        """Add a node and return it. Raise if the graph is finalized or has a node of its name."""
        if self.finalized:
            raise GraphFinalizedError(
                f"{node.name!r} cannot be added, because the graph is finalized. Add it in a hook's"
                " begin(), or before a session opens"
            )
        _check_name(node.name)
        if node.name in self._nodes:
            raise GraphError(
                f"{node.name!r} is already the name of {self._nodes[node.name]!r}. Names are unique"
                f" in a graph. Give another one, for example name=graph.unique_name({node.name!r})"
            )
        self._nodes[node.name] = node
        return node

    def unique_name(self, name: str) -> str:
        """Return `name`, or if a node has it the first free name of `name_1`, `name_2` and so on.

        With `name=graph.unique_name("loss")`, two hooks can add the same operation. The name is not
        reserved: it stays free until you add a node with it.
        """
        _check_name(name)
        unique = name
        number = 0
        while unique in self._nodes:
            number += 1
            unique = f"{name}_{number}"
        return unique

    def node(self, key: object) -> Node:
        """Return the node that has the name `key`, or `key` itself if it is a node of this graph.

        In the graph of a step function, any unknown name stands for an output of the step.

        Raises:
            FetchError: the name is unknown, or the node belongs to another graph.
        """
        if isinstance(key, str):
            if key in self._nodes:
                return self._nodes[key]
            if self.step_operation is not None:
                # Nodes are compared by identity, so each call with this name must return the same
                # output.
                output = Output(self, key, self.step_operation)
                return self._outputs.setdefault(key, output)
            raise FetchError(f"{key!r} is not in the graph; {did_you_mean(key, self._nodes)}")
        if not isinstance(key, Node):
            raise FetchError(
                f"{key!r} is of type {type(key).__name__}; fetch and feed by name (a str) or by"
                " node of the graph"
            )
        if key.graph is not self:
            raise FetchError(
                f"{key!r} belongs to another graph; fetch and feed nodes of the session's own graph"
            )
        return key  # pyright: ignore[reportUnknownVariableType]

    @property
    def nodes(self) -> Mapping[str, Node]:
        """All nodes by name."""
        # This is a copy so that nodes are only added by `_add`, which checks their names.
        return self._nodes.copy()

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The variables, in the order in which they were added."""
        return tuple(node for node in self._nodes.values() if isinstance(node, Variable))

    @property
    def trains(self) -> bool:
        """Whether some operation advances the global step."""
        return any(isinstance(node, Operation) and node.steps for node in self._nodes.values())

    @property
    def finalized(self) -> bool:
        """Whether the graph rejects additions: `finalize` was called, or a session is open."""
        return self._finalize_count > 0

    def finalize(self) -> None:
        """Reject all later additions."""
        self._finalize_count += 1

    def _release(self) -> None:
        """Undo one call of `finalize`, for a session that has ended."""
        self._finalize_count -= 1

    def as_default(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that makes this the default graph in its block."""
        return assigned(_default_graph, _Default(self))

    def __repr__(self) -> str:
        state = " finalized" if self.finalized else ""
        return f"<Graph {', '.join(self._nodes)}{state}>"


def _check_name(name: object) -> None:
    """Raise if `name` cannot be the name of a node."""
    if not isinstance(name, str) or not name:
        raise GraphError(f"{name!r} is not a name for a node; give a non-empty str")


def held(graph: Graph) -> Callable[[], None]:
    """Finalize a graph for a session. Return the function to call when the session has ended.

    When the last session of the graph has ended, nodes can be added again.
    """
    graph.finalize()
    return graph._release  # pyright: ignore[reportPrivateUsage] - of this module


class _Default:
    """A default graph, and the innermost run of the code that made it the default, if any."""

    def __init__(self, graph: Graph) -> None:
        """Make `graph` a default that the calling code sets."""
        self.graph = graph
        self.run = current_scope.get()


_default_graph: ContextVar[_Default | None] = ContextVar("aiohooks_default_graph", default=None)


def make_default(graph: Graph) -> Token[Any]:
    """Make a graph the default of the current context. Return the token that undoes this."""
    return _default_graph.set(_Default(graph))


def get_default_graph() -> Graph:
    """Return the default graph of the calling code.

    Code that a session calls gets the graph of that session: the methods of hooks, the operations,
    the step, the functions of a `Scaffold`, and their threads and tasks. A block of `as_default`
    gets the graph of that block, also inside such code. In other code, a context without a default
    graph gets a new graph and keeps it.

    The `async with` block of a session is not code that the session calls. Use
    `with session.graph.as_default()` in it.
    """
    default = _default_graph.get()
    # A run does not set the default graph of its context, because its session has the graph.
    for run in _enclosing_runs(current_scope.get()):
        session_graph = getattr(run.session, "graph", None)
        if isinstance(session_graph, Graph):
            # The innermost default counts. A block of `as_default` in the code of this run is
            # inside the run. Otherwise the default is that of code around the run.
            if default is not None and run in _enclosing_runs(default.run):
                return default.graph
            return session_graph
    if default is not None:
        return default.graph
    graph = Graph()
    make_default(graph)
    return graph


def _enclosing_runs(scope: RunScope | None) -> Iterator[RunScope]:
    """Yield a run and then the runs in which it is nested, from the inside out."""
    while scope is not None:
        yield scope
        scope = scope.outer


def in_thread(fn: Callable[..., A]) -> AsyncFn[A]:
    """Return a coroutine function that calls the blocking function `fn` in a worker thread.

    Write `AsyncMonitoredSession(in_thread(train_step))`, or `@in_thread` below `@graph.operation`.
    The event loop runs other tasks while the function computes. A thread cannot be interrupted: if
    a run is cancelled, it waits until the function returns, for at most the session's
    `stop_grace_period_secs`. A cancelled run commits nothing.

    Args:
        fn: a plain function. The parameters and the name are kept, so that a step is fed by name.

    Raises:
        InvalidArgumentError: `fn` is not callable, or is a coroutine function.
    """
    check_callable(fn, "the step")
    if is_coroutine_function(fn):
        raise InvalidArgumentError(
            f"{fn!r} is a coroutine function, which cannot run in a thread; leave out in_thread"
        )

    @functools.wraps(fn)
    async def call_in_thread(*args: Any, **kwargs: Any) -> A:
        scope = current_scope.get()
        grace_secs = DEFAULT_GRACE_SECS
        if scope is not None and scope.session is not None:
            grace_secs = scope.session.grace_secs
        return await to_thread(functools.partial(fn, *args, **kwargs), grace_secs=grace_secs)

    return call_in_thread


def graph_of_step(fn: Callable[..., Any]) -> Graph:
    """Return a graph whose only operation is the step function `fn`, which trains one step.

    The parameters of the function are placeholders. Any other name that is fetched is that of an
    item of its result, which is a mapping.

    Raises:
        InvalidArgumentError: the function is not a coroutine function.
    """
    if not is_coroutine_function(fn):
        raise InvalidArgumentError(
            f"{fn!r} is not a coroutine function; write the step as `async def`, or give"
            " in_thread(...) of one that blocks"
        )
    graph = Graph()
    name = getattr(fn, "__name__", type(fn).__name__)
    for parameter in _input_parameters(fn, f"operation {name!r}"):
        # This parameter needs no placeholder: every graph has a node of its name already, whose
        # value it gets.
        if parameter.name == "global_step":
            continue
        default = parameter.default
        if default is parameter.empty:
            default = MISSING
        graph.placeholder(parameter.name, default=default)
    graph.step_operation = graph.train_op(name=name)(fn)
    return graph


def _input_parameters(fn: Callable[..., Any], subject: str) -> list[inspect.Parameter]:
    """Return the parameters of a function. Raise if one of them cannot be passed by name."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError) as error:
        raise GraphError(
            f"{subject}: the parameters of {fn!r} cannot be read; wrap it in a function"
        ) from error
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise GraphError(
                f"{subject}: parameter {parameter} has no name that could be the name of an input;"
                " give each input a named parameter"
            )
    return parameters


class Change(NamedTuple):
    """The change of a variable by the result of an operation.

    Attributes:
        name: the name of the variable.
        slot: the place of the result in the list of values that a run has. See `Plan`.
        is_added: whether the result is added to the variable. Otherwise it replaces the value.
    """

    name: str
    slot: int
    is_added: bool


class Values:
    """The state of a `Variables`, for sessions and their creators.

    Attributes:
        by_name: the values of the variables.
        version: how often values were replaced.
        ready: whether the values, and the rest of the session that claimed them, are initialized.
        failure: the error of a session that should have initialized the values and gave up, or
            None.
        waiting_workers: the waits of workers until the values are ready or their initialization has
            failed.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Any] = {}
        self.version: int = 0
        self.ready: bool = False
        self.failure: BaseException | None = None
        self.waiting_workers: Waiters = Waiters()
        # Whether a session is initializing the values, or has initialized them.
        self._is_claimed = False
        # The waits in `claim`, of sessions that initialize the values if the session that has
        # claimed them fails.
        self._waiting_chiefs = Waiters()

    async def claim(self) -> bool:
        """Return whether the caller must initialize the values.

        If another session is initializing them, wait until it has succeeded or failed.
        """
        while self._is_claimed:
            if self.ready:
                return False
            await self._waiting_chiefs.wait()
        self._is_claimed = True
        return True

    def initialize(self, initial: Mapping[str, Any]) -> None:
        """Give each variable of `initial` that has no value its initial value.

        An initial value may be a function that returns it. If one of these functions raises, no
        variable is set. The values are not ready yet: call `mark_ready` when the rest of the
        session is initialized, too.
        """
        values: dict[str, Any] = {}
        for name in self.missing(initial):
            value = initial[name]
            if callable(value):
                value = value()
            values[name] = value
        self.replace(values)

    def replace(self, values: Mapping[str, Any]) -> None:
        """Replace several values together."""
        if values:
            self.by_name.update(values)
            self.version += 1

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return the names that have no value."""
        return [name for name in names if name not in self.by_name]

    def mark_ready(self) -> None:
        """Mark the values as ready, and wake the sessions that wait for this."""
        self.ready = True
        self.failure = None
        self._waiting_chiefs.wake()
        self.waiting_workers.wake()

    def discard(self) -> None:
        """Remove the values of a failed initialization, so that another session can claim them."""
        self.by_name.clear()
        self._is_claimed = False
        self._waiting_chiefs.wake()

    def fail(self, error: BaseException) -> None:
        """Make the waits of workers raise, because the session to initialize the values failed.

        Do nothing if another session is initializing the values, or has initialized them.
        """
        if self._is_claimed:
            return
        # Workers that an earlier failure has woken may not have run yet. They still count as
        # waiting, and must get the error of that failure.
        if self.failure is None or not self.waiting_workers:
            self.failure = error
        self.waiting_workers.wake()

    def prepare(
        self,
        changes: Iterable[Change],
        results: Sequence[Any],
    ) -> dict[str, Any]:
        """Return the new values of the variables that a run changes. Set nothing yet.

        If a result cannot be added to a variable, raise the error of the addition with a note.
        """
        new_values: dict[str, Any] = {}
        for name, slot, is_added in changes:
            value = results[slot]
            if is_added:
                # Several operations of the run may add to one variable: a later operation adds to
                # the new value that an earlier operation has made.
                old_value = new_values.get(name, self.by_name[name])
                try:
                    value = old_value + value
                except Exception as error:
                    add_note(
                        error,
                        f"the operation returned a value of type {type(value).__name__}, which"
                        f" cannot be added to variable {name!r} of type {type(old_value).__name__}."
                        " Return a value that can be added",
                    )
                    raise
            new_values[name] = value
        return new_values


class Variables:
    """The values of variables by name.

    A value is never changed in place: a commit replaces all changed values together. A new object
    has no values. The first session that is created on it (a chief) initializes them. Other
    sessions (workers) can wait until the object is `ready`. Sessions that share one object train
    one model.
    """

    def __init__(self) -> None:
        self._values = Values()

    @property
    def ready(self) -> bool:
        """Whether the values have been initialized or restored."""
        return self._values.ready

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until the values are initialized. Return immediately if they are.

        Args:
            timeout: seconds to wait, or None for no limit.

        Raises:
            SessionNotReadyError: the values were not initialized in time.
            PublisherFailedError: the session that should have initialized the values failed.
        """
        check_secs(timeout, "timeout", optional=True)
        values = self._values
        if not values.ready and values.failure is None:
            # The wait also returns at the timeout, so both conditions are tested again below.
            await wait_for_others(values.waiting_workers.wait(timeout))
        if values.failure is not None:
            raise PublisherFailedError(
                f"the session that should have initialized the variables failed: {values.failure!r}"
            ) from values.failure
        if not values.ready:
            raise SessionNotReadyError(
                f"the variables were not initialized within {timeout} s; is a chief running that"
                " shares these Variables?"
            )

    def snapshot(self) -> dict[str, Any]:
        """Return the current values by name. Later commits do not change the returned dict."""
        return self._values.by_name.copy()

    def assign(self, values: Mapping[str, Any]) -> None:
        """Replace several values together, as in `variables.assign({"rate": 0.1})`.

        Call this method between runs. If a run in progress has read a value and is going to replace
        it (`updates=`), its operations are called again with the new value.

        Raises:
            FetchError: a name is not a variable. In this case, no value is changed.
        """
        check_mapping(values, "values", optional=False)
        by_name = self._values.by_name
        for name in values:
            if name not in by_name:
                raise FetchError(f"{name!r} is not a variable; {did_you_mean(name, by_name)}")
        self._values.replace(values)

    def __repr__(self) -> str:
        state = "ready" if self.ready else "not ready"
        return f"<Variables {', '.join(self._values.by_name) or 'none'}, {state}>"


def values_of(variables: Variables) -> Values:
    """Return the state of a `Variables`."""
    return variables._values  # pyright: ignore[reportPrivateUsage] - of this module
