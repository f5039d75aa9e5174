"""The wait-for graph as plain data, which can be converted to text and JSON, with its deadlocks."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
from typing import Literal, NamedTuple, Self

from aiohooks._core.clock import secs_text

_MOST_LINES = 30


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
        text = " ".join((self.name + (f" ({self.detail})" if self.detail else "")).splitlines())
        if self.where is not None:
            named = re.sub(r"#\d+", "", self.name)
            is_said = self.function is None or re.search(
                rf"(?<!\w){re.escape(self.function)}(?!\w)", named
            )
            function = "" if is_said else f"{self.function} at "
            place = "/".join(self.where.split(os.sep)[-2:])  # of a library, without its folder
            if self.function is not None:
                place = self.where.removeprefix(os.getcwd() + os.sep)
            text += f", {function}{place}"
        return text if self.secs is None else f"{text}, {secs_text(self.secs)}"


class WaitEdge(NamedTuple):
    """The ids of a `waiter` and of what is `awaited`; whether the waiter `needs` "all" such nodes,
    "any", or "perhaps" this.
    """

    waiter: str
    awaited: str
    needs: Literal["all", "any", "perhaps"]


@dataclasses.dataclass(frozen=True, slots=True)
class WaitGraph:
    """What waits for what in a process at one moment; `str()` of it has a paragraph for each chain
    of waits.

    Attributes:
        nodes: all that waits or is waited for.
        edges: what waits for what.
        notes: why the process has not answered.
    """

    nodes: tuple[WaitNode, ...]
    edges: tuple[WaitEdge, ...]
    notes: tuple[str, ...] = ()

    @property
    def deadlocks(self) -> tuple[tuple[WaitNode, ...], ...]:
        """The cycles, each of which only an end from outside can resolve."""
        after, nodes = self._after(all_needed=True), {node.id: node for node in self.nodes}
        found: list[tuple[WaitNode, ...]] = []
        seen: set[str] = set()
        path: list[str] = []
        ahead = [(root, 0) for root in reversed(after)]
        while ahead:
            node, depth = ahead.pop()
            del path[depth:]
            if node not in seen:
                seen.add(node)
                path.append(node)
                ahead += [(one, depth + 1) for one in reversed(after.get(node, ()))]
            elif node in path:
                found.append(tuple(nodes[one] for one in path[path.index(node) :]))
        return tuple(found)

    def chains(self) -> list[tuple[WaitNode, ...]]:
        """Return the paths from what no other certainly waits for to what waits for no other;
        sessions first.
        """
        after, nodes = self._after(), {node.id: node for node in self.nodes}
        awaited = {edge.awaited for edge in self.edges if edge.needs != "perhaps"}
        seen: set[str] = set()
        chains: list[tuple[WaitNode, ...]] = []
        for root in sorted(nodes, key=lambda one: (nodes[one].kind != "session", one in awaited)):
            ahead: list[list[str]] = [] if root in seen else [[root]]
            while ahead:
                path = ahead.pop()
                last, further = path[-1], after.get(path[-1], [])
                # What is only perhaps waited for has a chain of its own, if nothing else waits for
                # it.
                if last in seen or (last != root and last not in awaited and further):
                    further = []
                else:
                    seen.add(last)
                ahead += [[*path, one] for one in reversed(further)]
                if not further:
                    chains.append(tuple(nodes[one] for one in path))
        return chains

    def lines(self) -> list[str]:
        """Return the deadlocks and the other chains of waits as text, without what only tasks of
        the library wait for.
        """
        return self._texts(self.deadlocks, " ")

    def _texts(self, deadlocks: tuple[tuple[WaitNode, ...], ...], apart: str) -> list[str]:
        lines = [
            f"deadlock: {f'{apart}<- '.join([*map(str, _own_places(cycle)), cycle[0].name])}"
            for cycle in deadlocks
        ]
        unsure = {edge[:2] for edge in self.edges if edge.needs == "perhaps"}
        ends = {node.id for cycle in deadlocks for node in cycle}
        chains = [
            _shortened(chain, ends) for chain in self.chains() if chain[0].kind != "internal task"
        ]
        chains = [
            *dict.fromkeys(
                chain
                for chain in chains
                if len(chain) > 1 or ends.isdisjoint(one.id for one in chain)
            )
        ]
        for chain in chains[:_MOST_LINES]:
            nodes = *_own_places(chain[:-1]), *chain[-1:]
            texts = [
                f"{one.name}, in the deadlock" if one.id in ends else str(one) for one in nodes
            ]
            for number, pair in enumerate(itertools.pairwise(chain), 1):
                perhaps = "perhaps " if (pair[0].id, pair[1].id) in unsure else ""
                texts[number] = f"{'<-' if number > 1 else 'waits for'} {perhaps}{texts[number]}"
            lines.append(apart.join(texts))
        if len(chains) > _MOST_LINES:
            lines.append(f"and {len(chains) - _MOST_LINES} more; to_json() has all")
        return [*lines, *self.notes] or ["nothing waits"]

    def __str__(self) -> str:
        return "\n".join(self._texts(self.deadlocks, "\n    "))

    def to_json(self) -> str:
        """Return the graph, its deadlocks and its text as JSON."""
        cycles = self.deadlocks
        more = {
            "deadlocks": [[node.id for node in cycle] for cycle in cycles],
            "lines": self._texts(cycles, " "),
        }
        return json.dumps({**dataclasses.asdict(self), **more})

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the graph that `to_json` was called for."""
        given = json.loads(text)
        nodes, edges = (
            (WaitNode(**one) for one in given["nodes"]),
            (WaitEdge(*one) for one in given["edges"]),
        )
        return cls(tuple(nodes), tuple(edges), tuple(given["notes"]))

    def _after(self, *, all_needed: bool = False) -> dict[str, list[str]]:
        after: dict[str, list[str]] = {}
        for edge in self.edges:
            if edge.needs == "all" or not all_needed:
                after.setdefault(edge.waiter, []).append(edge.awaited)
        return after


def _own_places(chain: tuple[WaitNode, ...]) -> list[WaitNode]:
    """Leave out places in libraries, which say something only at the end of a chain."""
    return [dataclasses.replace(one, where=None) if one.function is None else one for one in chain]


def _shortened(chain: tuple[WaitNode, ...], ends: set[str]) -> tuple[WaitNode, ...]:
    """Leave out what is behind the beginning of a deadlock, and calls and tasks of the library that
    add nothing.
    """
    kept: list[WaitNode] = []
    for node, after in itertools.zip_longest(chain, chain[1:]):
        adds_nothing = kept and (
            (node.kind == "call" and kept[-1].secs is not None)
            or (
                node.kind in ("task", "internal task")
                and after is not None
                and after.kind == "thread"
            )
        )
        if node.function is not None or after is None or not adds_nothing:
            kept.append(node)
        if node.id in ends:
            break
    return tuple(kept)


for _public in (WaitEdge, WaitGraph, WaitNode):
    _public.__module__ = "aiohooks.session"  # which imports them when they are first used
