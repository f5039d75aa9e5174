"""The wait-for graph as plain data, which can be converted to text and JSON, with its deadlocks."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, Self

from aiohooks._core.activity import Needs
from aiohooks._core.clock import secs_text

_MAX_CHAINS = 30


@dataclasses.dataclass(frozen=True, slots=True)
class WaitNode:
    """Something that waits or is waited for.

    Attributes:
        id: unique in the graph; the edges name the node by it.
        kind: "session", "hook", "task", "thread", "lock", "queue", "step", "process" and so on.
        name: what it is.
        detail: its state.
        function: the function of the user's code that waits.
        where: the line at which it waits, as `file:line`.
        secs: for how long it has waited, or lasted; None if that is not known.
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
        text = " ".join(text.splitlines())
        if self.where is not None:
            text += f", {self._place(self.where)}"
        if self.secs is not None:
            text += f", {secs_text(self.secs)}"
        return text

    def _place(self, where: str) -> str:
        """Return the line, after the function if the name does not have it."""
        if self.function is None:
            # The line of a library, without its folder.
            return "/".join(where.split(os.sep)[-2:])
        line = where.removeprefix(os.getcwd() + os.sep)
        name = re.sub(r"#\d+", "", self.name)
        if re.search(rf"(?<!\w){re.escape(self.function)}(?!\w)", name):
            return line
        return f"{self.function} at {line}"


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
    """The waits in a process at one moment; `str()` has a paragraph for each chain of waits.

    Attributes:
        nodes: everything that waits or is waited for.
        edges: what waits for what.
        notes: why the process has not answered.
    """

    nodes: tuple[WaitNode, ...]
    edges: tuple[WaitEdge, ...]
    notes: tuple[str, ...] = ()

    @property
    def deadlocks(self) -> tuple[Chain, ...]:
        """The cycles in which each node needs the next one: they do not end by themselves."""
        needed = [edge for edge in self.edges if edge.needs == "all"]
        awaited = self._awaited_nodes(needed)
        cycles: list[Chain] = []
        visited: set[str] = set()
        path: list[WaitNode] = []
        pending = [(node, 0) for node in reversed(self.nodes)]
        while pending:
            node, depth = pending.pop()
            del path[depth:]
            if node.id not in visited:
                visited.add(node.id)
                path.append(node)
                targets = reversed(awaited[node.id])
                pending += [(target, depth + 1) for target in targets]
            elif node in path:
                begin = path.index(node)
                cycles.append(tuple(path[begin:]))
        return tuple(cycles)

    def chains(self) -> list[Chain]:
        """Return the paths from waiters to the ends of their waits; those of sessions first.

        A path begins at a node for which no other certainly waits. A node for which several wait is
        followed once.
        """
        awaited = self._awaited_nodes(self.edges)
        needed = {edge.awaited for edge in self.edges if edge.needs != "perhaps"}
        roots = sorted(
            self.nodes,
            key=lambda node: (node.kind != "session", node.id in needed),
        )
        chains: list[Chain] = []
        visited: set[str] = set()
        pending: list[Chain] = [(root,) for root in reversed(roots)]
        while pending:
            path = pending.pop()
            node = path[-1]
            targets = awaited[node.id]
            is_root = len(path) == 1
            if node.id in visited:
                if is_root:
                    continue
                targets = []
            elif targets and not is_root and node.id not in needed:
                # Its waiters need it only perhaps: it is a root itself.
                targets = []
            else:
                visited.add(node.id)
            pending += [(*path, target) for target in reversed(targets)]
            if not targets:
                chains.append(path)
        return chains

    def _awaited_nodes(
        self,
        edges: Sequence[WaitEdge],
    ) -> dict[str, list[WaitNode]]:
        """Return the nodes for which each node waits, by its id."""
        nodes = {node.id: node for node in self.nodes}
        awaited: dict[str, list[WaitNode]] = {node: [] for node in nodes}
        for edge in edges:
            target = nodes[edge.awaited]
            awaited[edge.waiter].append(target)
        return awaited

    def lines(self) -> list[str]:
        """Return the deadlocks and the other chains of waits as text.

        Chains that begin at a task of the library are left out.
        """
        return self._texts(" ")

    def __str__(self) -> str:
        return "\n".join(self._texts("\n    "))

    def to_json(self) -> str:
        """Return the graph, its deadlocks and its text as JSON."""
        deadlocks = [[node.id for node in cycle] for cycle in self.deadlocks]
        content = {
            **dataclasses.asdict(self),
            "deadlocks": deadlocks,
            "lines": self.lines(),
        }
        return json.dumps(content)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the graph that `to_json` was called for."""
        content = json.loads(text)
        nodes = tuple(WaitNode(**node) for node in content["nodes"])
        edges = tuple(WaitEdge(*edge) for edge in content["edges"])
        return cls(nodes, edges, tuple(content["notes"]))

    def _texts(self, separator: str) -> list[str]:
        cycles = self.deadlocks
        texts: list[str] = []
        for cycle in cycles:
            first = cycle[0]
            nodes = [str(node) for node in _shortened((*cycle, first))]
            nodes[-1] = first.name
            texts.append("deadlock: " + f"{separator}<- ".join(nodes))
        deadlocked = {node.id for cycle in cycles for node in cycle}
        unsure = {edge[:2] for edge in self.edges if edge.needs == "perhaps"}
        chains = self._shortened_chains(deadlocked)
        for chain in chains[:_MAX_CHAINS]:
            nodes = list(_texts_of(chain, deadlocked, unsure))
            texts.append(separator.join(nodes))
        if len(chains) > _MAX_CHAINS:
            texts.append(f"and {len(chains) - _MAX_CHAINS} more; to_json() has all")
        texts += self.notes
        return texts or ["nothing waits"]

    def _shortened_chains(self, deadlocked: set[str]) -> list[Chain]:
        """Return the chains that the text has: not those of the library's own tasks."""
        chains: dict[Chain, None] = {}
        for chain in self.chains():
            root = chain[0]
            if root.kind == "internal task":
                continue
            shortened = _shortened(chain, deadlocked)
            if len(shortened) > 1 or root.id not in deadlocked:
                chains[shortened] = None
        return list(chains)


def _texts_of(
    chain: Chain,
    deadlocked: set[str],
    unsure: set[tuple[str, str]],
) -> Iterator[str]:
    """Yield the text of each node of a chain."""
    link = ""
    waiter = ""
    for node in chain:
        text = str(node)
        if node.id in deadlocked:
            text = f"{node.name}, in the deadlock"
        if (waiter, node.id) in unsure:
            text = f"perhaps {text}"
        yield f"{link}{text}"
        link = "<- " if link else "waits for "
        waiter = node.id


def _shortened(chain: Chain, ends: Collection[str] = ()) -> Chain:
    """Return a chain without the nodes that add nothing, up to a node with one of these ids.

    Nodes with a function of the user's code are kept. Places in a library are only kept at the end.
    """
    kept: list[WaitNode] = []
    following = (*chain[1:], None)
    for node, awaited in zip(chain, following, strict=True):
        if awaited is None or node.id in ends:
            return (*kept, node)
        if node.function is not None:
            kept.append(node)
            continue
        is_timed_call = node.kind == "call" and kept and kept[-1].secs is not None
        calls_thread = node.kind.endswith("task") and kept and awaited.kind == "thread"
        if not is_timed_call and not calls_thread:
            kept.append(dataclasses.replace(node, where=None))
    return ()


for _public in (WaitEdge, WaitGraph, WaitNode):
    _public.__module__ = "aiohooks.session"  # which imports them when they are first used
