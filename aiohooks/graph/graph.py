"""The graph: placeholders, variables and operations by name; and the default graph."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Protocol,
    TypeAlias,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from aiohooks._aio.cancel import to_thread
from aiohooks._aio.contexts import RunScope, current_scope
from aiohooks._validate import call_error, check_callable, checked_int, is_coroutine_function
from aiohooks.errors import (
    FetchError,
    GraphError,
    GraphFinalizedError,
    InvalidArgumentError,
    did_you_mean,
)

if TYPE_CHECKING:
    # Type checkers bring this module; `typing.TypeVar` has a default from Python 3.13 on.
    from typing_extensions import TypeVar as _TypeVar

    T_co = _TypeVar("T_co", covariant=True, default=Any)
else:
    T_co = TypeVar("T_co", covariant=True)
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")


class _Missing:
    """The class of `MISSING`: no default, no value."""

    def __repr__(self) -> str:
        return "<missing>"


MISSING = _Missing()


@dataclass(eq=False, repr=False)
class Node(Generic[T_co]):
    """A part of a graph that can be fetched and fed; a fetch of it returns a `T_co`.

    Nodes are compared by identity and found by name.
    """

    graph: Graph
    name: str

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


@dataclass(eq=False, repr=False)
class Placeholder(Node[Any]):
    """A value that is fed to each run, or its default. Created by `Graph.placeholder`."""

    default: Any


@dataclass(eq=False, repr=False)
class Variable(Node[Any]):
    """A value that is kept between runs, in the `Variables` of a session.

    `initial` may be a function without arguments. Created by `Graph.variable`.
    """

    initial: Any


@dataclass(eq=False, repr=False)
class GlobalStep(Node[int]):
    """The global step: fetched, it is the step at which the run started."""


@dataclass(eq=False, repr=False)
class Output(Node[Any]):
    """A value of the mapping that a step function returns; the name of the node is its key."""

    operation: Operation


@dataclass(eq=False, repr=False)
class Operation(Node[T_co]):
    """A function of the graph: a coroutine function, or a plain function.

    Calling an operation calls the function. Created by `Graph.operation` and `Graph.train_op`.
    """

    fn: Callable[..., Any]
    steps: int
    """The number of steps by which it advances the global step."""
    inputs: tuple[str, ...]
    """The names of its inputs, in the order of the parameters."""
    optional: frozenset[str]
    """Inputs that the graph need not have: parameters that have a default."""
    keyword_only: frozenset[str]
    """Inputs that are passed by keyword."""
    updates: str | None
    """The variable that the result replaces."""
    adds_to: str | None
    """The variable to which the result is added."""
    thread: bool
    """Whether the function is called in a worker thread."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself, as if it were not an operation."""
        return self.fn(*args, **kwargs)


Two: TypeAlias = tuple[Node[A], Node[B]]
Three: TypeAlias = tuple[Node[A], Node[B], Node[C]]
Four: TypeAlias = tuple[Node[A], Node[B], Node[C], Node[D]]
"""Several nodes that are fetched together."""
FeedDict: TypeAlias = Mapping[Any, Any] | None
"""Values by node or name; None for none."""
Options: TypeAlias = Mapping[str, Any] | None
"""For a session's own `run`; None for none."""
VariableKey: TypeAlias = str | Variable | None
"""A variable or its name; None for none."""
InputKeys: TypeAlias = Sequence[str | Node] | None
"""The inputs of an operation, nodes or names; None for the names of its parameters."""


AsyncFn: TypeAlias = Callable[..., Coroutine[Any, Any, A]]
"""A coroutine function."""


class OperationOptions(TypedDict, total=False):
    """The options of `Graph.operation`, which are explained there."""

    inputs: InputKeys
    updates: VariableKey
    adds_to: VariableKey
    thread: bool
    name: str | None


class AddOperation(Protocol):
    """The result of `Graph.operation` with options: a decorator that adds a function."""

    @overload
    def __call__(self, fn: AsyncFn[A], /) -> Operation[A]: ...
    @overload
    def __call__(self, fn: Callable[..., A], /) -> Operation[A]: ...


_N = TypeVar("_N", bound=Node)


class Graph:
    """Placeholders, variables and operations.

    The inputs of an operation are nodes, by default those with the names of its parameters. While a
    session is open its graph is finalized: nothing can be added.
    """

    def __init__(self) -> None:
        # A count, as several sessions may hold the graph.
        self._holds = 0
        self.global_step: GlobalStep = GlobalStep(self, "global_step")
        """The node of the global step, which can be fetched and be an input of operations."""
        self._nodes: dict[str, Node] = {"global_step": self.global_step}
        self.step_operation: Operation | None = None
        """The operation of a graph that was made from a step function."""
        self._outputs: dict[str, Output] = {}

    def placeholder(self, name: str, *, default: Any = MISSING) -> Placeholder:
        """Add a value that each run must feed, unless it has a default.

        Raises:
            GraphError: the name is taken or no name.
            GraphFinalizedError: a session uses the graph.
        """
        return self._add(Placeholder(self, name, default))

    def variable(self, name: str, initial: Any) -> Variable:
        """Add a value that is kept between runs. Raises like `placeholder`.

        Args:
            name: its name, also as a parameter of operations.
            initial: its initial value, or a plain function without arguments that returns it.
        """
        if is_coroutine_function(initial):
            raise GraphError(
                f"the initial value of {name!r} is {initial!r}, a coroutine function, which is not"
                " awaited; give a plain function, and assign what must be awaited in the init_fn"
                " of a Scaffold"
            )
        return self._add(Variable(self, name, initial))

    @overload
    def operation(self, fn: AsyncFn[A], /) -> Operation[A]: ...
    @overload
    def operation(self, fn: Callable[..., A], /) -> Operation[A]: ...
    @overload
    def operation(self, **options: Unpack[OperationOptions]) -> AddOperation: ...
    def operation(
        self,
        fn: Any = None,
        *,
        inputs: InputKeys = None,
        updates: VariableKey = None,
        adds_to: VariableKey = None,
        thread: bool = False,
        name: str | None = None,
    ) -> Operation | AddOperation:
        """Add a function whose parameters are its inputs by name.

        Use it as a decorator, with or without options. A coroutine function is awaited, a plain
        function is called in the event loop, or in a worker thread with `thread=True`.

        Args:
            fn: the function, when used as `@graph.operation`.
            inputs: the nodes, or their names, that are passed to it in this order, whatever its
                parameters are called. By default the nodes with the names of its parameters; a
                parameter that has a default need not have a node.
            updates: the variable that gets the result when the run commits. If it got another value
                since this run read it, the operations of the run are called again.
            adds_to: the variable to which the result is added when the run commits, whatever other
                runs have added.
            thread: whether to call it in a worker thread.
            name: its name in the graph, by default the function's; see `unique_name`.

        Raises:
            GraphError: the name is taken, the function does not take the inputs, or the options
                contradict each other.
            GraphFinalizedError: a session uses the graph.
        """
        return self._operation(
            fn, steps=0, name=name, inputs=inputs, updates=updates, adds_to=adds_to, thread=thread
        )

    @overload
    def train_op(self, fn: AsyncFn[A], /) -> Operation[A]: ...
    @overload
    def train_op(self, fn: Callable[..., A], /) -> Operation[A]: ...
    @overload
    def train_op(self, *, steps: int = 1, **options: Unpack[OperationOptions]) -> AddOperation: ...
    def train_op(
        self, fn: Any = None, *, steps: int = 1, **options: Unpack[OperationOptions]
    ) -> Operation | AddOperation:
        """Add an operation that advances the global step by `steps`; otherwise like `operation`."""
        steps = checked_int(steps, "steps", 1, expected="how many steps one run trains, 1 or more")
        return self._operation(fn, steps=steps, **options)

    def _operation(self, fn: Any, **options: Any) -> Operation | AddOperation:
        add: AddOperation = functools.partial(self._add_operation, **options)
        return add if fn is None else add(fn)

    def _add_operation(
        self,
        fn: Callable[..., Any],
        *,
        steps: int,
        name: str | None = None,
        inputs: InputKeys = None,
        updates: VariableKey = None,
        adds_to: VariableKey = None,
        thread: bool = False,
    ) -> Operation:
        if not callable(fn):
            raise GraphError(f"an operation is made of a function, not of {fn!r}")
        if not name:
            name = str(getattr(fn, "__name__", repr(fn)))
        what = f"operation {name!r}"
        if thread and is_coroutine_function(fn):
            raise GraphError(
                f"{what} is a coroutine function, which cannot run in a thread; leave out"
                " thread=True"
            )
        if updates is not None and adds_to is not None:
            raise GraphError(
                f"{what} has both updates={updates!r} and adds_to={adds_to!r}; give one"
            )
        if updates is not None:
            updates = self._name_of(updates, f"{what} updates", Variable)
        if adds_to is not None:
            adds_to = self._name_of(adds_to, f"{what} adds to", Variable)
        # Listed inputs are all needed, and all passed by position.
        parameters: Sequence[inspect.Parameter] = ()
        if inputs is None:
            parameters = _parameters(fn, what)
            names = [parameter.name for parameter in parameters]
        else:
            names = self._given_inputs(fn, inputs, what)
        optional = [
            parameter.name for parameter in parameters if parameter.default is not parameter.empty
        ]
        keyword_only = [
            parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY
        ]
        return self._add(
            Operation(
                self,
                name,
                fn,
                steps,
                tuple(names),
                frozenset(optional),
                frozenset(keyword_only),
                updates=updates,
                adds_to=adds_to,
                thread=thread,
            )
        )

    def _given_inputs(self, fn: Callable[..., Any], inputs: object, what: str) -> list[str]:
        """Return the names of the inputs that were given to an operation."""
        if isinstance(inputs, str) or not isinstance(inputs, Sequence):
            raise GraphError(f"inputs of {what} is {inputs!r}; give a list of nodes or names")
        keys = cast("Sequence[object]", inputs)
        names = [self._name_of(key, f"{what} has the input", Node) for key in keys]
        if (error := call_error(fn, *names)) is not None:
            raise GraphError(
                f"{what}: {fn!r} does not take the inputs ({', '.join(names)}): {error}"
            )
        return names

    def _name_of(self, key: object, what: str, kind: type[Node]) -> str:
        """Return the name of a node, which need not have been added yet if it is given by name."""
        if isinstance(key, str):
            return key
        is_foreign = isinstance(key, Node) and key.graph is not self
        if isinstance(key, kind) and not is_foreign:
            return key.name
        origin = " of another graph" if is_foreign else ""
        raise GraphError(
            f"{what} {key!r}{origin}; give a {kind.__name__.lower()} of this graph, or its name"
        )

    def _add(self, node: _N) -> _N:
        if self.finalized:
            raise GraphFinalizedError(
                f"{node.name!r} cannot be added: the graph is finalized; add in a hook's begin(),"
                " or before a session opens"
            )
        _check_name(node.name)
        if node.name in self._nodes:
            raise GraphError(
                f"{node.name!r} is already the name of {self._nodes[node.name]!r}; names are unique"
                f" in a graph: give another one, for example name=graph.unique_name({node.name!r})"
            )
        self._nodes[node.name] = node
        return node

    def unique_name(self, name: str) -> str:
        """Return `name` if it is free, else the first free name of `name_1`, `name_2` and so on.

        With `name=graph.unique_name("loss")` two hooks can add the same operation. The name is free
        until a node is added with it.
        """
        _check_name(name)
        unique = name
        numbers = itertools.count(1)
        while unique in self._nodes:
            unique = f"{name}_{next(numbers)}"
        return unique

    def node(self, key: object) -> Node:
        """Return the node of a name; a node of this graph is returned as it is.

        Raises:
            FetchError: the name is unknown, or the node belongs to another graph.
        """
        if isinstance(key, str):
            if key in self._nodes:
                return self._nodes[key]
            if self.step_operation is not None:
                # Kept, as nodes are compared by identity.
                return self._outputs.setdefault(key, Output(self, key, self.step_operation))
            raise FetchError(f"{key!r} is not in the graph; {did_you_mean(key, self._nodes)}")
        if not isinstance(key, Node):
            raise FetchError(
                f"{key!r} is of type {type(key).__name__}; fetch and feed by name, a str, or by a"
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
        # A copy, as only `_add` checks names.
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
        """Whether nothing can be added: `finalize` was called, or a session is open."""
        return self._holds > 0

    def finalize(self) -> None:
        """Reject all later additions."""
        self._holds += 1

    def _release(self) -> None:
        """Undo one `finalize`: a session that held the graph has ended."""
        self._holds -= 1

    def as_default(self) -> contextlib.AbstractContextManager[Graph]:
        """Make this the default graph of the block, in this context."""
        return _AsDefault(self)

    def __repr__(self) -> str:
        finalized = " finalized" if self.finalized else ""
        return f"<Graph {', '.join(self._nodes)}{finalized}>"


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise GraphError(f"{name!r} is not a name for a node; give a non-empty str")


def held(graph: Graph) -> Callable[[], None]:
    """Finalize a graph while a session is open; return the function that releases it.

    After the last session nodes can be added again.
    """
    graph.finalize()
    return graph._release  # pyright: ignore[reportPrivateUsage] - of this module


_default: ContextVar[tuple[Graph, RunScope | None] | None] = ContextVar(
    "aiohooks_default_graph", default=None
)
"""The graph that was made the default one, and the run in which that was done."""


def make_default(graph: Graph) -> Token[Any]:
    """Make a graph the default graph of the current context."""
    return _default.set((graph, current_scope.get()))


class _AsDefault(contextlib.AbstractContextManager[Graph]):
    """The block of `Graph.as_default`.

    `contextlib.contextmanager` would set the traceback of an error of the block, which fails if the
    error is a frozen dataclass.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def __enter__(self) -> Graph:
        self._token = make_default(self._graph)
        return self._graph

    def __exit__(self, *_: object) -> None:
        _default.reset(self._token)


def get_default_graph() -> Graph:
    """Return the default graph of this context.

    In all methods of a hook, and in the operations, the step and the functions of a `Scaffold`,
    also in their threads and tasks, it is the graph of the session that calls them. Elsewhere, and
    inside its block, it is that of `as_default`. A context without a default graph gets a new one,
    which stays its default.

    A session changes nothing for its own block: use `with session.graph.as_default()` there.
    """
    default, since = _default.get() or (None, None)
    for scope in _enclosing(current_scope.get()):
        # A run does not set the default graph of its context, as its session has the graph.
        graph = getattr(scope.session, "graph", None)
        if isinstance(graph, Graph):
            # An `as_default` inside the run counts, one outside of it does not.
            if default is not None and scope in _enclosing(since):
                return default
            return graph
    if default is None:
        default = Graph()
        make_default(default)
    return default


def _enclosing(scope: RunScope | None) -> Iterator[RunScope]:
    """Yield a run, and the runs in which it is nested."""
    while scope is not None:
        yield scope
        scope = scope.outer


class in_thread:  # a verb in lower case, like `functools.partial`
    """A step that calls the blocking function `fn` in a worker thread.

    Write `AsyncMonitoredSession(in_thread(train_step))`. The event loop stays free while the
    function computes. A thread cannot be interrupted: a cancellation of the run waits until the
    function has returned, for at most the session's `stop_grace_period_secs`, and nothing of the
    run is kept.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        """Check the function.

        Args:
            fn: a function whose parameters are fed by name and whose result is fetched, as those of
                a step that is `async def`.

        Raises:
            InvalidArgumentError: `fn` is not callable, or is a coroutine function.
        """
        check_callable(fn, "the step")
        if is_coroutine_function(fn):
            raise InvalidArgumentError(
                f"{fn!r} is a coroutine function, which cannot run in a thread; leave out in_thread"
            )
        self.fn: Callable[..., Any] = fn

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # For direct calls only: the graph of a step has `fn` itself, as an operation in a thread.
        return await to_thread(functools.partial(self.fn, *args, **kwargs))

    def __repr__(self) -> str:
        return f"in_thread({self.fn!r})"


def graph_of_step(fn: Callable[..., Any]) -> Graph:
    """Return a graph of one train operation, `fn`.

    Its parameters are placeholders; other names are keys of its result.
    """
    thread = isinstance(fn, in_thread)
    if isinstance(fn, in_thread):
        fn = fn.fn
    elif inspect.isasyncgenfunction(fn):
        raise InvalidArgumentError(
            f"{fn!r} has a `yield`, and a step returns its values; what yields is given to"
            " session.steps(feeds=...)"
        )
    elif not is_coroutine_function(fn):
        raise InvalidArgumentError(
            f"{fn!r} is not a coroutine function; write the step as `async def`, or give"
            " in_thread(...) of one that blocks"
        )
    graph = Graph()
    name = getattr(fn, "__name__", type(fn).__name__)
    # The global step is a node of every graph.
    for parameter in _parameters(fn, f"operation {name!r}"):
        if parameter.name != "global_step":
            has_default = parameter.default is not parameter.empty
            graph.placeholder(parameter.name, default=parameter.default if has_default else MISSING)
    graph.step_operation = graph.train_op(thread=thread, name=name)(fn)
    return graph


def _parameters(fn: Callable[..., Any], what: str) -> list[inspect.Parameter]:
    """Return the parameters of a function; raise if some cannot be inputs by name."""
    try:
        parameters = [*inspect.signature(fn).parameters.values()]
    except (TypeError, ValueError) as error:
        raise GraphError(
            f"{what}: the parameters of {fn!r} cannot be read; wrap it in a function"
        ) from error
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise GraphError(
                f"{what}: parameter {parameter} has no name to find an input by; "
                "give each input a named parameter, or list them: inputs=[...]"
            )
    return parameters
