"""One run's requests joined, and its values split again: what each hook and the caller asked for. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from aiohooks.errors import InvalidHookError
from aiohooks.graph.fetches import LEAF_TYPES, Build, Leaves, merge_feeds, merge_options
from aiohooks.graph.graph import Graph, Node
from aiohooks.session.hook import SessionRunArgs

_LEAF_OR_NOTHING = LEAF_TYPES | {type(None)}
_MOST_JOINS = 1024


class Joined(NamedTuple):
    """The nodes of a merged run, and what makes the parts of its values.

    `parts` are the different answers to the hooks, and `which[i]` says which of them the i-th hook gets: -1, the one behind
    the last, stands for nothing.
    """

    nodes: tuple[Node, ...]
    caller: Build
    parts: tuple[Build, ...]
    which: tuple[int, ...]


class Joiner:
    """Joins requests over one graph; what has no structure is joined once and found again."""

    def __init__(self, graph: Graph) -> None:
        """Starts with nothing known."""
        self._graph = graph
        self._known: dict[tuple[Any, ...], Joined] = {}

    def fetches(self, wanted: Sequence[Any]) -> Joined:
        """Joins fetches: the caller's, then each hook's, None for a hook that wants nothing.

        Raises:
            FetchError: something in them is not known to the graph.
        """
        # Names, nodes and None only: everything else may compare equal and yet have another shape.
        if not _LEAF_OR_NOTHING.issuperset(map(type, wanted)):
            return self._join(wanted)
        key = tuple(wanted)
        joined = self._known.get(key)
        if joined is None:
            if len(self._known) >= _MOST_JOINS:
                self._known.clear()
            joined = self._known[key] = self._join(wanted)
        return joined

    def _join(self, wanted: Sequence[Any]) -> Joined:
        leaves = Leaves(self._graph)
        caller = leaves.build(wanted[0])
        parts: list[Build] = []
        which: list[int] = []
        shared: dict[Any, int] = {}  # hooks that ask for the same leaf get the same answer
        for fetches in wanted[1:]:
            if fetches is None:
                which.append(-1)
            elif type(fetches) in LEAF_TYPES:
                slot = leaves.slot(fetches)
                if slot not in shared:
                    shared[slot] = len(parts)
                    parts.append(leaves.build(fetches))
                which.append(shared[slot])
            else:
                which.append(len(parts))
                parts.append(leaves.build(fetches))
        return Joined(leaves.nodes, caller, tuple(parts), tuple(which))

    def feeds(
        self, caller: Mapping[Any, Any] | None, requests: Sequence[SessionRunArgs | None], names: Sequence[str]
    ) -> Mapping[Any, Any] | None:
        """Joins the feeds; the caller's own mapping if no hook feeds anything.

        Raises:
            FeedConflictError: two of them feed one node; lists all such.
        """
        given = [
            (name, request.feed_dict)
            for name, request in zip(names, requests, strict=True)
            if request is not None and request.feed_dict
        ]
        return merge_feeds(self._graph, [*given, ("the caller", caller)]) if given else caller


def options_of(caller: Mapping[str, Any] | None, requests: Sequence[SessionRunArgs | None]) -> dict[str, Any] | None:
    """The merged options of a run, a new dict each time; None if nobody gave any."""
    return merge_options([caller, *[request.options for request in requests if request is not None]])


def check_requests(requests: Sequence[object], names: Sequence[str]) -> None:
    """Raises `InvalidHookError` for an answer of `before_run` that is neither None nor SessionRunArgs."""
    for request, name in zip(requests, names, strict=True):
        if request is not None and not isinstance(request, SessionRunArgs):
            raise InvalidHookError(f"{name} returned {request!r}; return SessionRunArgs(fetches, feed_dict) or None")
