"""The wait-for graph as plain data, with its deadlocks and its text."""

from __future__ import annotations

import dataclasses
import graphlib
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from aiohooks._core.activity import Needs
from aiohooks._core.clock import secs_text
from aiohooks.errors import printable

HIDDEN = "internal task"
"""The kind of the tasks that the text leaves out."""
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
            # A hook's call has the name of its method.
            if self.function not in self.name.split():
                text += f"{self.function} at "
            text += self.where.removeprefix(os.getcwd() + os.sep)
        if self.secs is not None:
            text += f", {secs_text(self.secs)}"
        return printable(text, _MAX_LENGTH)


class WaitEdge(NamedTuple):
    """A wait: the ids of the `waiter` and of the node that is `awaited`.

    The waiter `needs` "all" such nodes, "any" of them, or "perhaps" this one.
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
        """The cycles in which each node needs the next one: they do not end by themselves."""
        targets_of = self._targets(edge for edge in self.edges if edge.needs == "all")
        cycles: list[Chain] = []
        while len(cycles) < _MAX_TEXTS:
            cycle = _cycle_in(targets_of)
            if not cycle:
                break
            # It begins at a task, if it has one: `nodes` has tasks before what they wait for.
            first = min(cycle, key=self.nodes.index)
            place = cycle.index(first)
            cycles.append((*cycle[place:], *cycle[:place]))
            # The other cycles are found without the nodes of this one.
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
            # Of the awaited nodes only those begin paths that no other path comes to: of cycles.
            return (
                node.kind != "session",
                node.id in awaited_ids,
                node.kind == HIDDEN,
            )

        chains: list[Chain] = []
        followed: set[WaitNode] = set()
        # The paths to continue. The last one is continued first.
        pending: list[Chain] = [(node,) for node in reversed(sorted(targets_of, key=rank))]
        while pending:
            path = pending.pop()
            node = path[-1]
            is_new = node not in followed
            followed.add(node)
            if is_new and targets_of[node]:
                pending += [(*path, target) for target in reversed(targets_of[node])]
            elif is_new or len(path) > 1:
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

        Tasks of the library, and chains that begin at one, are left out.
        """
        texts: dict[str, None] = {}
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
                texts[text.replace("<-", "waits for", 1)] = None
        lines = [*texts][:_MAX_TEXTS]
        if len(texts) > _MAX_TEXTS:
            lines.append(f"and {len(texts) - _MAX_TEXTS} more, which are in its nodes and edges")
        return "\n".join(lines) or "nothing waits"


def _cycle_in(targets_of: dict[WaitNode, list[WaitNode]]) -> Chain:
    """Return nodes of which each waits for the next one, and the last one for the first.

    There are none without such a cycle.
    """
    try:
        graphlib.TopologicalSorter(targets_of).prepare()
    except graphlib.CycleError as error:
        # Each node of its list waits for the one before it, and the last node is the first one.
        cycle: list[WaitNode] = error.args[1]
        return tuple(reversed(cycle[1:]))
    return ()


def _node_texts(
    chain: Chain,
    deadlocked: set[WaitNode],
    unsure: set[tuple[str, str]],
) -> Iterator[str]:
    """Yield the texts of the nodes of a chain, which ends where it reaches a deadlock."""
    waiter = ""
    for node in chain:
        text = str(node)
        if node in deadlocked:
            text = f"{node.name}, in the deadlock"
        if (waiter, node.id) in unsure:
            text = f"perhaps {text}"
        if node.kind != HIDDEN:
            yield text
        if node in deadlocked:
            return
        waiter = node.id


for _public in (WaitEdge, WaitGraph, WaitNode):
    _public.__module__ = "aiohooks.session"  # which imports them when they are first used
