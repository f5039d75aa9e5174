"""The wait-for graph as plain data, with its deadlocks and its text."""

from __future__ import annotations

import dataclasses
import graphlib
import os
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from aiohooks._core.activity import Needs
from aiohooks._core.clock import secs_text
from aiohooks.errors import printable

HIDDEN = "internal task"
"""The kind of the tasks that the text of the graph leaves out."""
_MAX_TEXTS = 30
_MAX_LENGTH = 1_000
_LINK = "\n    <- "


@dataclasses.dataclass(frozen=True, slots=True)
class WaitNode:
    """Something that waits or is waited for.

    Attributes:
        id: unique in the graph. The edges name the node by it.
        kind: "session", "hook", "task", "thread", "lock", "queue", "step", "process" and so on.
        name: what it is.
        detail: its state.
        function: the function of the user's code that waits.
        where: the line at which it waits, as `file:line`.
        secs: for how long it has waited or lasted, or None if that is not known.
    """

    id: str
    kind: str
    name: str
    detail: str = ""
    function: str | None = None
    where: str | None = None
    secs: float | None = None

    def __str__(self) -> str:
        text = self.name
        if self.detail:
            text += f" ({self.detail})"
        if self.where is not None:
            text += ", "
            # The name of a hook's call contains that of its method, which need not be repeated. The
            # second hook of a class has "#2" in its name, which the method has not.
            if self.function not in re.sub(r"#\d+", "", self.name).split():
                text += f"{self.function} at "
            text += self.where.removeprefix(os.getcwd() + os.sep)
        if self.secs is not None:
            text += f", {secs_text(self.secs)}"
        return printable(text, _MAX_LENGTH)


class WaitEdge(NamedTuple):
    """A wait: the ids of the `waiter` and of the node that is `awaited`.

    The waiter `needs` "all" nodes that it awaits, "any" of them, or "perhaps" this one: then it is
    not known which node the waiter needs.
    """

    waiter: str
    awaited: str
    needs: Needs


Chain = tuple[WaitNode, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class WaitGraph:
    """The waits in a process at one moment. `str()` has a paragraph for each chain of waits.

    Attributes:
        nodes: everything that waits or is waited for.
        edges: what waits for what.
    """

    nodes: tuple[WaitNode, ...]
    edges: tuple[WaitEdge, ...]

    @property
    def deadlocks(self) -> tuple[Chain, ...]:
        """The cycles in which each node needs the next one, so that they do not end by themselves.

        A node is in one cycle at most, even if there are several through it.
        """
        targets_of = self._targets(edge for edge in self.edges if edge.needs == "all")
        cycles: list[Chain] = []
        while len(cycles) < _MAX_TEXTS:
            cycle = _cycle_in(targets_of)
            if not cycle:
                break
            # Let the cycle begin at its first node in `nodes`, which usually is a task: these come
            # before the things that they wait for.
            first = min(cycle, key=self.nodes.index)
            place = cycle.index(first)
            cycles.append((*cycle[place:], *cycle[:place]))
            # Without these nodes, the next search finds another cycle.
            for node in cycle:
                del targets_of[node]
        return tuple(cycles)

    def chains(self) -> list[Chain]:
        """Return the paths from waiters to the ends of their waits, sessions first.

        Each node is followed once: where several wait for it, only the first path continues.
        """
        targets_of = self._targets(self.edges)
        awaited_ids = {edge.awaited for edge in self.edges}

        def rank(node: WaitNode) -> tuple[bool, bool, bool]:
            # Sessions come first. Awaited nodes come last, when other paths have reached most of
            # them: the rest are nodes of cycles, and begin paths of their own.
            return (
                node.kind != "session",
                node.id in awaited_ids,
                node.kind == HIDDEN,
            )

        chains: list[Chain] = []
        followed: set[WaitNode] = set()
        # The paths to continue. They are a stack: the last one is continued first, hence the
        # reversed orders.
        pending: list[Chain] = [(node,) for node in reversed(sorted(targets_of, key=rank))]
        while pending:
            path = pending.pop()
            node = path[-1]
            is_new = node not in followed
            followed.add(node)
            if is_new and targets_of[node]:
                pending += [(*path, target) for target in reversed(targets_of[node])]
            elif is_new or len(path) > 1:
                # The path ends at a node without targets, or at a node of an earlier path. It is
                # left out if it is only such a node of an earlier path.
                chains.append(path)
        return chains

    def _targets(self, edges: Iterable[WaitEdge]) -> dict[WaitNode, list[WaitNode]]:
        """Return for each node the nodes that it waits for by these edges."""
        nodes = {node.id: node for node in self.nodes}
        targets_of: dict[WaitNode, list[WaitNode]] = {node: [] for node in self.nodes}
        for edge in edges:
            targets_of[nodes[edge.waiter]].append(nodes[edge.awaited])
        return targets_of

    def __str__(self) -> str:
        """Return the deadlocks and the other chains of waits as text.

        Tasks of the library are left out, and so are chains that begin at one.
        """
        texts: dict[str, None] = {}
        # The ids of the nodes of edges of which it is not known whether they are waits.
        unsure = {edge[:2] for edge in self.edges if edge.needs == "perhaps"}
        deadlocked: set[WaitNode] = set()
        for cycle in self.deadlocks:
            deadlocked.update(cycle)
            shown = [node for node in cycle if node.kind != HIDDEN] or cycle
            names = [*map(str, shown), shown[0].name]
            texts[f"deadlock: {_LINK.join(names)}"] = None
        for chain in self.chains():
            if chain[0].kind != HIDDEN and chain[0] not in deadlocked:
                text = _LINK.join(_node_texts(chain, deadlocked, unsure))
                # The first link is in words, as a legend for the others.
                texts[text.replace("<-", "waits for", 1)] = None
        lines = [*texts][:_MAX_TEXTS]
        if len(texts) > _MAX_TEXTS:
            lines.append(f"and {len(texts) - _MAX_TEXTS} more, which are in its nodes and edges")
        return "\n".join(lines) or "nothing waits"


def _cycle_in(targets_of: dict[WaitNode, list[WaitNode]]) -> Chain:
    """Return a cycle: nodes of which each waits for the next one, and the last one for the first.

    Without a cycle, return no nodes.
    """
    try:
        graphlib.TopologicalSorter(targets_of).prepare()
    except graphlib.CycleError as error:
        # In the list of the error, each node waits for the node before it, and the first node is
        # repeated at the end.
        cycle: list[WaitNode] = error.args[1]
        return tuple(reversed(cycle[1:]))
    return ()


def _node_texts(
    chain: Chain,
    deadlocked: set[WaitNode],
    unsure: set[tuple[str, str]],
) -> Iterator[str]:
    """Yield the texts of the nodes of a chain, up to the first node of a deadlock.

    Args:
        chain: the nodes.
        deadlocked: the nodes of all deadlocks. Their own text has the rest of the chain.
        unsure: the ids of the nodes of "perhaps" edges.
    """
    waiter_id = ""
    for node in chain:
        text = str(node)
        if node in deadlocked:
            text = f"{node.name}, in the deadlock"
        if (waiter_id, node.id) in unsure:
            text = f"perhaps {text}"
        if node.kind != HIDDEN:
            yield text
        if node in deadlocked:
            return
        waiter_id = node.id


# `aiohooks.session` exports these classes, and imports them when they are first used.
for _public in (WaitEdge, WaitGraph, WaitNode):
    _public.__module__ = "aiohooks.session"
