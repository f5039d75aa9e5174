"""TensorFlow's own tests of fetches and feeds (246-272 in the table), beside
tests/graph/test_plan_fetches.py.
"""

from __future__ import annotations

import pytest

import aiohooks as ah
from tests.support.sessions import counting_graph

pytestmark = pytest.mark.every_python


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
