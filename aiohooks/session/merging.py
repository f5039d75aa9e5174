"""Merging the requests of the caller and the hooks, and splitting the values of the run. Nothing
here waits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from aiohooks._core.validate import check_mapping
from aiohooks.dispatch.calls import OrderGroup
from aiohooks.errors import FeedConflictError, FetchError, InvalidHookError, add_note
from aiohooks.graph.graph import Graph, Node
from aiohooks.graph.plan import LEAF_TYPES, Build, Leaves, Take, canonical_feeds, taking
from aiohooks.graph.session import RunRequest
from aiohooks.session.hook import SessionRunArgs, SessionRunValues

_REQUEST_OR_NOTHING = {SessionRunArgs, type(None)}
_LEAF_OR_NOTHING = LEAF_TYPES | {type(None)}
_MOST_MERGES = 1024
_NOTHING = SessionRunValues(None, None, None)
# Half the price of calling the class: a NamedTuple's own `__new__` is written in Python.
_new_tuple = cast("Any", tuple).__new__
_new_values: Callable[[tuple[Any, ...]], SessionRunValues] = partial(_new_tuple, SessionRunValues)


class MergedFetches:
    """The nodes that a merged run fetches, and what builds the caller's and the hooks' parts of
    their values; kept for runs that fetch the same.

    Requests for the same leaf share a part; with each is the name of the first hook. `takes` has a
    function for each order group of `after_run`, which takes the parts of its hooks out of all
    parts; behind these is the part of a hook without a request.
    """

    def __init__(
        self,
        nodes: tuple[Node, ...],
        for_caller: Build,
        for_hooks: Sequence[tuple[Build, str]],
        takes: Sequence[Take],
    ) -> None:
        self.nodes = nodes
        self.takes = takes
        self._for_caller = for_caller
        self._for_hooks = for_hooks

    def build(self, values: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Return the caller's part of the values, and those of the hooks."""
        parts: list[Any] = []
        try:
            for build, _ in self._for_hooks:
                parts.append(build(values))
        except FetchError as error:
            add_note(error, f"fetched by {self._for_hooks[len(parts)][1]}")
            raise
        return self._for_caller(values), parts


class MergedRun(RunRequest):
    """A run for the caller and all hooks; before `Merger.merge`, for the caller alone.

    `unasked` has what the hooks get of a run for which no hook asks, and that has no options.
    """

    __slots__ = ("_takes", "_unasked")

    # Each run makes one of these: the fields are set here, and not by `super()`.
    def __init__(
        self,
        fetches: Any,
        feed_dict: Mapping[Any, Any] | None,
        options: Mapping[str, Any] | None,
        unasked: Sequence[Sequence[SessionRunValues]],
        merged: MergedFetches | None = None,
    ) -> None:
        self.fetches = fetches
        self.feed_dict = feed_dict
        self.options = options
        self.run_metadata: dict[str, Any] | None = None if options is None else {}
        self._unasked = unasked
        self.build: Build | None = None if merged is None else merged.build
        self._takes = None if merged is None else merged.takes

    def split(self, values: Any) -> tuple[Any, Sequence[Sequence[SessionRunValues]]]:
        """Return the caller's result, and what each hook of `after_run` gets, by order group."""
        options = self.options
        if self._takes is None and options is None:
            return values, self._unasked
        nothing = _new_values((None, options, self.run_metadata))
        if self._takes is None:
            return values, [(nothing,) * len(group) for group in self._unasked]
        result, parts = values
        answers = [_new_values((part, options, self.run_metadata)) for part in parts]
        answers.append(nothing)
        return result, [take(answers) for take in self._takes]


class Merger:
    """Merges requests over one graph; fetches without structure are merged once and looked up from
    then on.
    """

    def __init__(
        self, graph: Graph, before_run: Sequence[OrderGroup], after_run: Sequence[OrderGroup]
    ) -> None:
        """Take the graph, and the groups of the hooks that ask and of those that get values."""
        self._graph = graph
        self._names = [call.name for group in before_run for call in group.calls]
        asking = [hook for group in before_run for hook in group.hooks]
        places = {hook: place for place, hook in enumerate(asking)}
        self._request_of = [[places.get(hook, -1) for hook in group.hooks] for group in after_run]
        """Where, among the requests, each hook of `after_run` finds its own; -1 if it has no
        `before_run`.
        """
        self.unasked: Sequence[Sequence[SessionRunValues]] = [
            (_NOTHING,) * len(group.hooks) for group in after_run
        ]
        self._by_requests: dict[tuple[Any, ...], MergedFetches] = {}
        """By the caller's fetches and the hooks' requests, where these have fetches alone."""
        self._by_fetches: dict[tuple[Any, ...], MergedFetches] = {}
        """By the fetches of the caller and the hooks, where hooks feed or have options as well."""

    def merge(self, request: MergedRun, requests: Sequence[SessionRunArgs | None]) -> MergedRun:
        """Merge the caller's request with those of the hooks."""
        if not _has_request(requests):
            if request.options is None:
                return request
            # The hooks of each attempt get a `run_metadata` of their own.
            return MergedRun(request.fetches, request.feed_dict, request.options, self.unasked)
        merged = self._lookup(request.fetches, requests)
        if merged is None:
            return self._merge_requests(request, requests)
        return MergedRun(merged.nodes, request.feed_dict, request.options, self.unasked, merged)

    def _lookup(
        self, fetches: Any, requests: Sequence[SessionRunArgs | None]
    ) -> MergedFetches | None:
        """Return the merged fetches of requests that were merged before; None if there are none."""
        # A plain tuple is equal to a request, but it has to be rejected.
        if not _REQUEST_OR_NOTHING.issuperset(map(type, requests)):
            return None
        try:
            return self._by_requests.get((fetches, *requests))
        except TypeError:  # feeds, options and nested fetches have no hash
            return None

    def _merge_requests(
        self, request: MergedRun, requests: Sequence[SessionRunArgs | None]
    ) -> MergedRun:
        """Merge requests that were not merged before, or that have more than fetches."""
        feed_dict = request.feed_dict
        options = request.options
        feeds: list[tuple[str, Mapping[Any, Any]]] = []
        further_options: list[tuple[str, Mapping[str, Any]]] = []
        fetches = [request.fetches]
        for added, name in zip(requests, self._names, strict=True):
            if added is None:
                fetches.append(None)
                continue
            if not isinstance(added, SessionRunArgs):
                raise InvalidHookError(
                    f"{name} returned {added!r}; return SessionRunArgs(fetches, feed_dict) or None"
                )
            fetches.append(added.fetches)
            if added.feed_dict is not None:
                feeds.append((name, added.feed_dict))
            if added.options is not None:
                further_options.append((name, added.options))
        if feeds or further_options:
            merged = self._merge_once(self._by_fetches, fetches, fetches)
        else:
            merged = self._merge_once(self._by_requests, [request.fetches, *requests], fetches)
        if feeds:
            feed_dict = _merge_feeds(self._graph, [*feeds, ("the caller", feed_dict)])
        if further_options:
            options = _merge_options([("the caller", options), *further_options])
        return MergedRun(merged.nodes, feed_dict, options, self.unasked, merged)

    def _merge_once(
        self, merges: dict[tuple[Any, ...], MergedFetches], key: Sequence[Any], fetches: list[Any]
    ) -> MergedFetches:
        """Return the merged fetches that are kept under a key; merge them at the first time."""
        # Names, nodes and None only: everything else may compare equal and yet have another shape.
        if not _LEAF_OR_NOTHING.issuperset(map(type, fetches)):
            return self._merge_fetches(fetches)
        merged = merges.get(tuple(key))
        if merged is None:
            merged = self._merge_fetches(fetches)
            if len(merges) >= _MOST_MERGES:
                merges.clear()
            merges[tuple(key)] = merged
        return merged

    def note_owners(self, error: FetchError, requests: Sequence[SessionRunArgs | None]) -> None:
        """Note on an error of a run, if it is about one name, the hooks that fetch or feed that."""
        for request, owner in zip(requests, self._names, strict=True):
            if request is None or error.name is None:
                continue
            leaves = Leaves(self._graph)
            leaves.build(() if request.fetches is None else request.fetches)
            fed = canonical_feeds(self._graph, request.feed_dict)
            if any(node.name == error.name for node in leaves.nodes):
                add_note(error, f"fetched by {owner}")
            if any(node.name == error.name for node in fed):
                add_note(error, f"fed by {owner}")

    def _merge_fetches(self, all_fetches: Sequence[Any]) -> MergedFetches:
        """Merge the fetches of the caller, the first ones, and those of the hooks."""
        leaves = Leaves(self._graph)
        caller = leaves.build(all_fetches[0])
        parts: list[tuple[Build, str]] = []
        part_of: list[int] = []  # for each request
        shared: dict[Node, int] = {}  # the part of a leaf
        for fetches, name in zip(all_fetches[1:], self._names, strict=True):
            if fetches is None:
                part_of.append(-1)
                continue
            try:
                build = leaves.build(fetches)
            except FetchError as error:
                add_note(error, f"fetched by {name}")
                raise
            part = len(parts)
            if type(fetches) in LEAF_TYPES:
                part = shared.setdefault(self._graph.node(fetches), part)
            if part == len(parts):
                parts.append((build, name))
            part_of.append(part)
        part_of.append(-1)
        takes = [taking([part_of[place] for place in places]) for places in self._request_of]
        return MergedFetches(leaves.nodes, caller, parts, takes)


def _has_request(requests: Sequence[SessionRunArgs | None]) -> bool:
    # Not `requests.count(None)`: that compares, and arrays do so in their own way.
    for added in requests:  # noqa: SIM110 - a generator takes longer, in each run
        if added is not None:
            return True
    return False


def _merge_feeds(
    graph: Graph, requests: Sequence[tuple[str, Mapping[Any, Any] | None]]
) -> dict[Node, Any]:
    """Merge the feeds of the hooks and the caller, given with their names."""
    merged: dict[Node, Any] = {}
    owners: dict[Node, list[str]] = {}
    for owner, feed_dict in requests:
        try:
            feeds = canonical_feeds(graph, feed_dict)
        except FetchError as error:
            add_note(error, f"fed by {owner}")
            raise
        merged.update(feeds)
        for node in feeds:
            owners.setdefault(node, []).append(owner)
    conflicts = [
        f"{node.name!r} by {' and '.join(names)}"
        for node, names in owners.items()
        if len(names) > 1
    ]
    if conflicts:
        raise FeedConflictError(
            f"the same node is fed twice: {'; '.join(conflicts)}; remove one of them"
        )
    return merged


def _merge_options(requests: Sequence[tuple[str, Mapping[str, Any] | None]]) -> dict[str, Any]:
    """Merge run options into a new dict: the larger number, either flag, sequences joined,
    otherwise the later value.

    These are TensorFlow's rules for `RunOptions`, applied to options of any name. The requests are
    given with the names of their owners.
    """
    merged: dict[str, Any] = {}
    for owner, options in requests:
        check_mapping(options, f"options of {owner}")
        for key, value in (options or {}).items():
            if key in merged:
                merged[key] = _merged_option(merged[key], value)
            else:
                merged[key] = copy.copy(value)
    return merged


def _merged_option(old: Any, new: Any) -> Any:
    if isinstance(old, bool) and isinstance(new, bool):
        return old or new
    if isinstance(old, (int, float)) and isinstance(new, (int, float)):
        return max(old, new)
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        return [*old, *new]
    return new
