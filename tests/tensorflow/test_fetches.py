"""TensorFlow's own tests of fetches and feeds (246-272 in the table), beside
tests/graph/test_plan_fetches.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

import aiohooks as ah
from tests.support.checks import refused
from tests.support.sessions import counting_graph

pytestmark = pytest.mark.every_python


class Sparse(NamedTuple):
    """Several values of one object, as a sparse tensor's."""

    indices: Any
    values: Any
    shape: Any


def sparse_graph() -> tuple[ah.Graph, Sparse]:
    """Placeholders of such a value, and an operation on all of them."""
    graph = ah.Graph()
    nodes = Sparse(*(graph.placeholder(name) for name in Sparse._fields))
    graph.operation(name="sum")(lambda indices, values, shape: sum(values))
    return graph, nodes


async def test_nodes_and_names_are_fetched_alike() -> None:
    """A placeholder, variable, operation or the global step is fetched as the object or by name; an
    operation has a value.
    """
    graph = counting_graph()
    session = ah.Session(graph)
    names = ["x", "total", "loss", "train", "global_step"]
    assert await session.run(names) == [1, 0, 10, 1, 0]
    assert await session.run([graph.nodes[name] for name in names]) == [1, 1, 10, 1, 1]
    assert [await session.run(name) for name in names] == [1, 2, 10, 1, 3]
    assert [await session.run(graph.nodes[name]) for name in names] == [1, 3, 10, 1, 4]


async def test_a_fed_node_that_is_fetched_is_what_was_fed() -> None:
    """A fed node has that value, also when it is fetched, by node or by name; it is not computed
    then.
    """
    graph = counting_graph()
    session = ah.Session(graph)
    nodes = graph.nodes
    for feeds in (
        {"x": 3, "total": 40, "loss": 7},
        {nodes["x"]: 3, nodes["total"]: 40, nodes["loss"]: 7},
    ):
        assert await session.run({"fed": ["x", nodes["total"]], "loss": "loss"}, feeds) == {
            "fed": [3, 40],
            "loss": 7,
        }
    assert (
        await session.run("loss", {nodes["x"]: 3})
        == await session.run(nodes["loss"], {"x": 3})
        == 30
    )


async def test_a_value_is_passed_as_it_is() -> None:
    """Any object is a value: nothing is converted or copied between a feed, an operation and a
    fetch.
    """
    graph, nodes = sparse_graph()
    value = Sparse([[0, 1]], (2.5, 3), [4, 4])
    session = ah.Session(graph)
    fed = dict(zip(nodes, value, strict=True))
    result = await session.run({"all": nodes, "sum": "sum"}, fed)
    assert result == {"all": value, "sum": 5.5}
    assert type(result["all"]) is Sparse
    assert all(one is other for one, other in zip(result["all"], value, strict=True))
    assert await session.run(nodes.values, {"values": value}) is value


async def test_nodes_may_be_shared_in_a_deep_structure() -> None:
    """One node in many places of a deep structure is the same value in all of them."""
    value = object()
    session = ah.Session(counting_graph())
    result = await session.run([["x", ["x"]], {"x": ("x", ["x"])}], {"x": value})
    assert result == [[value, [value]], {"x": (value, [value])}]


async def test_a_closed_raw_session_is_not_used() -> None:
    """After `aclose` a run is refused, and nothing is computed."""
    graph, calls = ah.Graph(), []
    graph.operation(name="count")(lambda: calls.append(1))
    session = ah.Session(graph)
    await session.run("count")
    await session.aclose()
    assert session.closed
    with refused(ah.errors.SessionClosedError, "this session is closed") as caught:
        await session.run("count")
    assert isinstance(caught.value, RuntimeError)
    assert calls == [1]


@pytest.mark.parametrize("fetches", [[], (), {}, "global_step"], ids=repr)
async def test_an_empty_graph_can_be_run(fetches: Any) -> None:
    """Unlike TensorFlow's, a session of an empty graph runs: there is nothing to fetch but the
    global step.
    """
    session = ah.Session(ah.Graph())
    assert await session.run(fetches) == (0 if fetches == "global_step" else fetches)
    with refused(ah.errors.FetchError, "'loss' is not in the graph", "global_step"):
        await session.run("loss")
