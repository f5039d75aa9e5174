"""Graphs: adding nodes, finalizing, and the default graph."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.graph.graph import graph_of_step
from tests.support.checks import refused
from tests.support.hooks import EveryPhaseHook, PhaseHook
from tests.support.sessions import counting_graph, do_nothing, run_session

# -- names


@pytest.mark.parametrize("name", ["x", "v", "op", "global_step"])
@pytest.mark.parametrize("kind", ["placeholder", "variable", "operation", "train_op"])
def test_names_are_unique(kind: str, name: str) -> None:
    """A second node of a name is refused, whatever the two are, and the graph stays as it was."""
    graph = ah.Graph()
    graph.placeholder("x")
    graph.variable("v", 0)
    graph.operation(name="op")(lambda: None)
    add: dict[str, Callable[[], Any]] = {
        "placeholder": lambda: graph.placeholder(name),
        "variable": lambda: graph.variable(name, 1),
        "operation": lambda: graph.operation(name=name)(lambda: None),
        "train_op": lambda: graph.train_op(name=name)(lambda: None),
    }
    before = graph.nodes
    with refused(ah.errors.GraphError, f"{name!r} is already the name of", "unique") as caught:
        add[kind]()
    assert isinstance(caught.value, ValueError)
    assert graph.nodes == before


def test_unique_names() -> None:
    """`unique_name` returns a free name, numbered if it has to be: nodes do not collide."""
    graph = counting_graph()
    assert graph.unique_name("norm") == graph.unique_name("norm") == "norm"
    graph.placeholder("loss_2", default=0)
    for expected in ("loss_1", "loss_3"):
        node = graph.placeholder(graph.unique_name("loss"), default=0)
        assert node.name == expected
    assert graph.unique_name("global_step") == "global_step_1"
    with refused(ah.errors.GraphError, "'' is not a name"):
        graph.unique_name("")


# -- operations


async def takes_args(*args: int) -> None: ...
async def takes_kwargs(**kwargs: int) -> None: ...
async def takes_positional(x: int, /) -> None: ...
async def batch(batch: int) -> None: ...
async def batches() -> AsyncIterator[int]:
    yield 1


OTHER = ah.Graph().placeholder("x")


def operation(fn: Any = lambda a, b: None, **options: Any) -> Callable[[ah.Graph], Any]:
    """Return what adds an operation "op" to a graph."""
    return lambda graph: graph.operation(**{"name": "op", **options})(fn)


@pytest.mark.parametrize(
    ("add", "says"),
    [
        *[
            (
                lambda graph, name=name: graph.placeholder(name),
                (f"{name!r} is not a name", "give a non-empty str"),
            )
            for name in ("", None, 5)
        ],
        (lambda graph: graph.variable(b"x", 0), ("b'x' is not a name", "give a non-empty str")),
        (operation(name=""), ("'' is not a name", "give a non-empty str")),
        (lambda _: ah.AsyncMonitoredSession(batch), ("'batch' is already the name of", "unique")),
        *[
            (add, (f"operation {fn.__name__!r}: parameter {parameter}", "give each input a named"))
            for fn, parameter in (
                (takes_args, "*args"),
                (takes_kwargs, "**kwargs"),
                (takes_positional, "x"),
            )
            for add in (
                lambda graph, fn=fn: graph.operation(fn),
                lambda _, fn=fn: ah.AsyncMonitoredSession(fn),
            )
        ],
        (
            operation(dict),
            (
                "operation 'op': the parameters of <class 'dict'> cannot be read",
                "wrap it in a function",
            ),
        ),
        (operation(updates="v", adds_to="v"), ("both updates='v' and adds_to='v'", "give one")),
        (
            lambda graph: graph.variable("weights", do_nothing),
            ("'weights'", "do_nothing", "coroutine function", "init_fn of a Scaffold"),
        ),
    ],
)
def test_what_cannot_be_added_is_refused(
    add: Callable[[ah.Graph], Any], says: tuple[str, ...]
) -> None:
    """With a name or the value, and what to do; the graph stays as it was."""
    graph = ah.Graph()
    graph.placeholder("x")
    graph.variable("v", 0)
    before = graph.nodes
    with refused(ah.errors.GraphError, *says):
        add(graph)
    assert graph.nodes == before


@pytest.mark.parametrize(
    ("add", "says"),
    [
        *[
            (
                lambda steps=steps: ah.Graph().train_op(steps=steps)(lambda: 1),
                (f"steps is {steps!r}", "1 or more"),
            )
            for steps in (0, -1, 1.5, True, "1", None)
        ],
        (lambda: graph_of_step(lambda x: x), ("is not a coroutine function", "in_thread(...)")),
        (lambda: graph_of_step(batches), ("is not a coroutine function",)),
        *[
            (
                lambda option=option, value=value: operation(**{option: value})(ah.Graph()),
                (f"{option} of operation 'op' is {value!r}", "str"),
            )
            for option in ("updates", "adds_to")
            for value in (5, ["v"], OTHER)
        ],
        *[
            (
                lambda fn=fn: operation(fn)(ah.Graph()),
                ("the function of an operation is", repr(fn), "give a function"),
            )
            for fn in (5, None, "train", OTHER)
        ],
        *[
            (
                lambda add=add: add(add_to="v"),
                ("an operation has no option 'add_to'", "did you mean 'adds_to'?"),
            )
            for add in (ah.Graph().operation, ah.Graph().train_op)
        ],
    ],
)
def test_invalid_arguments_are_refused(add: Callable[[], Any], says: tuple[str, ...]) -> None:
    """Of an operation, whose variable is given by name, and of a step, which is no generator and
    does not block.
    """
    with refused(ah.errors.InvalidArgumentError, *says):
        add()


async def test_a_plain_function_that_returns_a_coroutine_is_refused() -> None:
    """A plain operation that returns a coroutine is refused, suspended or not; the message says to
    write `async def`.
    """
    for first in (asyncio.sleep, lambda _: asyncio.Event().set()):
        graph = ah.Graph()
        graph.operation(name="first")(
            functools.partial(first, 0) if first is asyncio.sleep else lambda: None
        )
        graph.operation(name="op")(lambda: do_nothing())
        with refused(
            ah.errors.GraphError,
            "operation 'op' is a plain function that returned a coroutine",
            "`async def`",
        ):
            await ah.Session(graph).run(["first", "op"])


async def test_an_operation_can_be_called() -> None:
    """An operation is callable as its function is, so that a decorated function can still be
    tested.
    """
    graph = ah.Graph()

    @graph.operation
    def add(x: int, y: int = 2) -> int:
        return x + y

    @graph.train_op(adds_to="total", steps=2)
    async def train(add: int) -> int:
        return add

    assert (add(1), add(x=1, y=1), await train(4)) == (3, 2, 4)
    assert (add.name, add.inputs, add.optional, train.steps, train.adds_to) == (
        "add",
        ("x", "y"),
        {"y"},
        2,
        "total",
    )


async def test_all_kinds_of_functions_are_operations() -> None:
    """Plain functions, coroutine functions, partials, bound methods and callable objects are
    operations by parameter name.
    """

    class Adder:
        def bound(self, x: int) -> int:
            return x + 1

        async def __call__(self, x: int) -> int:
            return x + 2

    async def twice(x: int, times: int = 2) -> int:
        return x * times

    graph = ah.Graph()
    graph.placeholder("x")
    graph.operation(Adder().bound)
    graph.operation(name="object")(Adder())
    graph.operation(name="partial")(functools.partial(twice, times=5))
    graph.operation(twice)
    values = await ah.Session(graph).run(["bound", "object", "partial", "twice"], {"x": 10})
    assert values == [11, 12, 50, 20]


# -- finalizing, and the default graph


async def test_an_open_session_finalizes_its_graph() -> None:
    """While a session is open no node can be added; when the last session of a graph has closed,
    one can again.
    """
    graph = counting_graph()
    async with ah.AsyncMonitoredSession(graph):
        async with ah.AsyncMonitoredSession(graph):
            assert graph.finalized
        assert graph.finalized
        with refused(
            ah.errors.GraphFinalizedError,
            "'late' cannot be added",
            "in a hook's begin(), or before a session",
        ) as caught:
            graph.placeholder("late")
        assert isinstance(caught.value, RuntimeError)
    assert not graph.finalized
    graph.placeholder("late")


async def test_a_graph_that_was_finalized_before_stays_so() -> None:
    """Closing un-finalizes only what opening finalized."""
    graph = counting_graph()
    graph.finalize()
    await run_session(ah.AsyncMonitoredSession(graph), 1, "train")
    assert graph.finalized
    with refused(ah.errors.GraphFinalizedError, "'late' cannot be added"):
        graph.operation(name="late")(lambda: 1)


@pytest.mark.parametrize("phase", ["begin", "after_create_session", "end", "close"])
async def test_a_session_that_fails_releases_its_graph(phase: str) -> None:
    """However a session ends, also while it is opened, its graph is not finalized afterwards."""

    async def fail(*_: object) -> None:
        raise OSError(phase)

    graph = counting_graph()
    with pytest.raises(OSError, match=phase):
        async with ah.AsyncMonitoredSession(graph, [PhaseHook(phase, fail)]):
            pass
    assert not graph.finalized


def test_a_graph_lists_its_nodes() -> None:
    """`nodes`, `variables`, `trains` and the reprs say what is in a graph."""
    graph = counting_graph()
    assert list(graph.nodes) == ["global_step", "x", "total", "loss", "train"]
    assert [variable.name for variable in graph.variables] == ["total"]
    assert graph.trains
    assert not ah.Graph().trains
    assert repr(graph) == "<Graph global_step, x, total, loss, train>"
    graph.finalize()
    assert repr(graph) == "<Graph global_step, x, total, loss, train finalized>"
    assert repr(graph.nodes["x"]) == "<Placeholder 'x'>"
    assert repr(graph.nodes["total"]) == "<Variable 'total'>"
    assert repr(graph.nodes["train"]) == "<Operation 'train'>"
    assert repr(graph.global_step) == "<GlobalStep 'global_step'>"


# -- the default graph of a session


PHASES = ("begin", "after_create_session", "before_run", "after_run", "end", "close")


class GraphHook(EveryPhaseHook):
    """Records the default graph of each method, before and after it has suspended."""

    def __init__(self, *, suspend: bool = False) -> None:
        self.seen: dict[str, set[ah.Graph]] = {}
        self._suspend = suspend

    async def in_phase(self, phase: str, *args: Any) -> None:
        self.seen.setdefault(phase, set()).add(ah.graph.get_default_graph())
        if self._suspend:
            await asyncio.sleep(0)
            self.seen[phase].add(ah.graph.get_default_graph())


def phases_of(graph: ah.Graph, *without: str) -> dict[str, set[ah.Graph]]:
    """Return what a `GraphHook` records that sees `graph` everywhere."""
    return {phase: {graph} for phase in PHASES if phase not in without}


@pytest.mark.every_python
@pytest.mark.parametrize("suspend", [False, True])
async def test_every_method_of_a_hook_sees_the_sessions_graph(suspend: bool) -> None:
    """In each method, whether hooks overlap or not, the session's graph is the default one;
    outside, nothing changes.
    """
    own = ah.graph.get_default_graph()
    graph = counting_graph()
    hooks = [GraphHook(suspend=suspend) for _ in range(3)]
    async with ah.AsyncMonitoredSession(graph, hooks) as session:
        assert ah.graph.get_default_graph() is own
        await session.run("train")
        assert ah.graph.get_default_graph() is own
    assert ah.graph.get_default_graph() is own
    assert [hook.seen for hook in hooks] == [phases_of(graph)] * 3


async def test_as_default_inside_a_hook() -> None:
    """A hook may make another graph the default one: in its block, and not in the runs of a session
    inside that.
    """
    outer = counting_graph()
    inner = counting_graph()
    other = ah.Graph()
    hook = GraphHook()
    seen = list[ah.Graph]()

    async def choose(run_context: ah.SessionRunContext) -> None:
        with other.as_default():
            seen.append(ah.graph.get_default_graph())
            async with ah.AsyncMonitoredSession(inner, [hook]) as session:
                await session.run("train")
                seen.append(ah.graph.get_default_graph())
        seen.append(ah.graph.get_default_graph())

    async with ah.AsyncMonitoredSession(outer, [PhaseHook("before_run", choose)]) as session:
        await session.run("train")
    assert seen == [other, other, outer]
    assert hook.seen == phases_of(inner)
