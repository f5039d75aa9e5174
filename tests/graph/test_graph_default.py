"""The default graph: in everything that a session calls it is the session's own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiohooks as ah
from tests.support.hooks import EveryPhaseHook, PhaseHook
from tests.support.sessions import counting_graph

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
