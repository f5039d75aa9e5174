"""Planning a run: inputs by name, which nodes are computed and in which order, and errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

import aiohooks as ah
from tests.support.checks import refused
from tests.support.hooks import PhaseHook
from tests.support.sessions import counting_graph

# -- inputs


async def test_inputs_are_found_by_name_and_may_be_optional() -> None:
    """A parameter with a default is given if the graph has its name, and left out otherwise;
    keyword-only ones as well.
    """
    graph = ah.Graph()
    graph.placeholder("x", default=1)
    graph.placeholder("z", default=3)

    @graph.operation
    def seen(x: int, y: int = -2, z: int = -3, *, w: int = -4) -> tuple[int, ...]:
        return x, y, z, w

    @graph.operation
    async def wanted(*, z: int, x: int) -> tuple[int, ...]:
        return x, z

    session = ah.Session(graph)
    assert await session.run(("seen", "wanted")) == ((1, -2, 3, -4), (1, 3))


async def test_a_fed_node_that_is_fetched_is_what_was_fed() -> None:
    """A fed node has that value, also when it is fetched, by node or by name; it is not computed
    then.
    """
    graph = counting_graph()
    session = ah.Session(graph)
    nodes = graph.nodes
    by_name = {"x": 3, "total": 40, "loss": 7}
    by_node = {nodes["x"]: 3, nodes["total"]: 40, nodes["loss"]: 7}
    for feeds in (by_name, by_node):
        values = await session.run({"fed": ["x", nodes["total"]], "loss": "loss"}, feeds)
        assert values == {"fed": [3, 40], "loss": 7}
    assert await session.run("loss", {nodes["x"]: 3}) == 30
    assert await session.run(nodes["loss"], {"x": 3}) == 30


async def test_an_unknown_input_is_refused() -> None:
    """A parameter without a default must be in the graph when the operation is run, not when it is
    added.
    """
    graph = ah.Graph()
    graph.operation(name="loss")(lambda labels: labels)
    graph.operation(name="misspelled")(lambda label: label)
    session = ah.Session(graph)
    with refused(
        ah.errors.FetchError,
        "operation 'loss' has an input",
        "'labels' is not in the graph",
        "known are:",
        "placeholder(",
    ):
        await session.run("loss")
    graph.placeholder("labels", default=7)
    assert await session.run("loss") == 7
    with refused(
        ah.errors.FetchError,
        "operation 'misspelled' has an input",
        "'label' is not in the graph",
        "did you mean 'labels'",
    ):
        await session.run("misspelled")


async def test_results_of_a_step_are_inputs() -> None:
    """An operation that a hook adds beside a step function may take the keys of its result."""
    calls: list[int] = []

    async def step(x: int) -> dict[str, int]:
        calls.append(x)
        return {"loss": 2 * x, "norm": 3 * x}

    async def add() -> None:
        graph = ah.graph.get_default_graph()
        graph.operation(name="squared")(lambda loss, missing=0: loss * loss + missing)
        graph.operation(name="both")(lambda loss, norm: loss + norm)

    async with ah.AsyncMonitoredSession(step, [PhaseHook("begin", add)]) as session:
        assert await session.run(("squared", "both", "loss"), {"x": 2}) == (16, 10, 4)
    assert calls == [2]


async def test_an_unfed_placeholder_is_refused_where_it_is_needed() -> None:
    """A placeholder without a default must be fed if a fetch leads to it, and need not
    otherwise.
    """
    graph = ah.Graph()
    graph.placeholder("x")
    graph.operation(name="loss")(lambda x: x)
    graph.operation(name="other")(lambda: 1)
    session = ah.Session(graph)
    for fetches in ("x", "loss", ["other", {"deep": ("loss",)}]):
        with refused(
            ah.errors.FetchError,
            "placeholder 'x' is needed and not fed",
            "add it to feed_dict",
            "default",
        ):
            await session.run(fetches)
    assert await session.run("other") == 1
    assert await session.run("loss", {"loss": 5}) == 5


async def test_a_default_may_be_anything() -> None:
    """None is a default like any other, and falsy feeds are feeds."""
    graph = ah.Graph()
    graph.placeholder("x", default=None)
    session = ah.Session(graph)
    assert await session.run("x") is None
    assert await session.run("x", {"x": 0}) == 0
    assert await session.run("x", {}) is None


# -- plans


@pytest.mark.parametrize("circle", ["a -> a", "a -> b -> a", "a -> c -> b -> a"])
async def test_a_cycle_is_named(circle: str) -> None:
    """Operations that need each other are a GraphError that spells out the cycle alone; feeding one
    of them breaks it.
    """
    graph = ah.Graph()
    graph.placeholder("x", default=1)
    graph.operation(name="done")(lambda x: x)
    names = circle.split(" -> ")
    needs: dict[str, Callable[..., Any]] = {
        "a": lambda x, done, a: a,
        "b": lambda x, done, b: b,
        "c": lambda x, done, c: c,
    }
    for name, needed in itertools.pairwise(names):
        graph.operation(name=name)(needs[needed])
    graph.operation(name="start")(lambda a: a)
    session = ah.Session(graph)
    with refused(
        ah.errors.GraphError, f"form a cycle: {circle}; feed one of them, or break the cycle"
    ):
        await session.run("start")
    assert await session.run("start", {"a": 5}) == 5


async def test_only_what_is_needed_is_computed() -> None:
    """A run computes the nodes that its fetches need. A fed node, and nodes that only a fed node
    needs, are left out.
    """
    calls: list[str] = []
    graph = ah.Graph()
    graph.operation(name="source")(lambda: calls.append("source"))
    graph.operation(name="middle")(lambda source: calls.append("middle"))
    graph.operation(name="last")(lambda middle: calls.append("last"))
    graph.operation(name="apart")(lambda: calls.append("apart"))
    session = ah.Session(graph)
    await session.run("last")
    await session.run("last", {"middle": 1})
    await session.run("last", {graph.nodes["last"]: 1})
    await session.run([])
    assert calls == ["source", "middle", "last", "last"]


def conflicting_graph(first: dict[str, str], second: dict[str, str]) -> ah.Graph:
    graph = ah.Graph()
    graph.variable("v", 10)
    graph.operation(name="one", **first)(lambda: 1)
    graph.operation(name="two", **second)(lambda: 2)
    return graph


@pytest.mark.parametrize(
    "kinds", [("updates", "updates"), ("updates", "adds_to"), ("adds_to", "updates")]
)
async def test_a_variable_is_updated_by_one_operation_of_a_run(kinds: tuple[str, str]) -> None:
    """Two operations of one run that both change a variable are refused unless both add; each may
    be run alone.
    """
    graph = conflicting_graph({kinds[0]: "v"}, {kinds[1]: "v"})
    session = ah.Session(graph)
    with refused(
        ah.errors.GraphError, "'one' and 'two' both change 'v'", "use adds_to for both, or run one"
    ):
        await session.run(["one", "two"])
    assert session.variables.snapshot() == {"v": 10}
    await session.run("one")
    await session.run("two")


async def test_several_operations_may_add_to_a_variable() -> None:
    """What several operations of a run add to a variable is all added."""
    session = ah.Session(conflicting_graph({"adds_to": "v"}, {"adds_to": "v"}))
    await session.run(["one", "two"])
    assert session.variables.snapshot() == {"v": 13}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("weigths", "did you mean 'weights'?"),
        ("x", "known are: weights"),
        ("loss", "known are"),
        ("", "known are: weights"),
    ],
)
async def test_only_variables_are_changed(name: str, says: str) -> None:
    """`updates` and `adds_to` name a variable; the error lists the variables. It comes when the
    operation is run.
    """
    graph = ah.Graph()
    graph.placeholder("x", default=1)
    graph.variable("weights", 0)
    graph.operation(name="loss")(lambda: 1)
    graph.operation(name="bad", updates=name)(lambda: 1)
    with refused(
        ah.errors.GraphError, f"operation 'bad' changes {name!r}, which is not a variable", says
    ):
        await ah.Session(graph).run("bad")


async def test_plans_follow_the_fetches_and_feeds() -> None:
    """The same fetches with other feeds, and the same feeds with other fetches, have plans of their
    own.
    """
    graph = counting_graph()
    session = ah.Session(graph)
    x = graph.nodes["x"]
    loss = graph.nodes["loss"]
    # The second time, the session has every plan already.
    for _ in range(2):
        assert await session.run("loss") == 10
        assert await session.run("loss", {"x": 2}) == 20
        assert await session.run("loss", {x: 3}) == 30
        assert await session.run("loss", {"loss": 4}) == 4
        assert await session.run(("loss", "x"), {"x": 5}) == (50, 5)
        assert await session.run((loss, x), {"x": 6}) == (60, 6)
        assert await session.run((loss, x), {x: 7, "loss": 1}) == (1, 7)
        assert await session.run([loss, x]) == [10, 1]


@pytest.mark.parametrize("fetches", ["total", ("total", "train"), ("train", "total")], ids=repr)
async def test_leaves_that_were_fetched_before_are_not_looked_up_again(fetches: Any) -> None:
    """A name, or a tuple of names, is found in the graph once; every later run with it finds its
    plan.
    """
    looked_up: list[object] = []

    class Watched(ah.Graph):
        def node(self, fetch: object) -> Any:
            looked_up.append(fetch)
            return super().node(fetch)

    graph = counting_graph(Watched())
    session = ah.Session(graph)
    first = await session.run(fetches)
    assert looked_up
    await session.run("loss")
    looked_up.clear()
    second = await session.run(fetches)
    assert not looked_up
    assert type(second) is type(first)
