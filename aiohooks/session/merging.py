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
from aiohooks.graph.plan import LEAF_TYPES, Build, Leaves, canonical_feeds, taking
from aiohooks.graph.session import RunRequest
from aiohooks.session.hook import SessionRunArgs, SessionRunValues

_LEAF_OR_NOTHING = LEAF_TYPES | {type(None)}
_MOST_MERGES = 1024
# Half the price of calling the class: a NamedTuple's own `__new__` is written in Python.
_new_tuple = cast("Any", tuple).__new__
_new_values: Callable[[tuple[Any, ...]], SessionRunValues] = partial(_new_tuple, SessionRunValues)
Answers = Sequence[Sequence[SessionRunValues]]
"""The values of the hooks of each order group of `after_run`."""


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
        # The last part is that of the hooks without a `before_run`: nothing.
        self._takes = [
            taking([places.get(hook, -1) for hook in group.hooks]) for group in after_run
        ]
        self._no_parts = (None,) * len(asking)
        self._no_answers = self._answers(self._no_parts, RunRequest(None, None))
        self._merges: dict[tuple[Any, ...], RunRequest] = {}
        """The merged fetches by those of the caller and the hooks."""

    def merge(self, request: RunRequest, requests: Sequence[SessionRunArgs | None]) -> RunRequest:
        """Merge the caller's request with those of the hooks."""
        if not _has_request(requests):
            if request.options is None:
                return request
            # The hooks of each attempt get a `run_metadata` of their own.
            return RunRequest(request.fetches, request.feed_dict, request.options)
        fetches = [request.fetches]
        feeds: list[tuple[str, Mapping[Any, Any]]] = []
        hook_options: list[tuple[str, Mapping[str, Any]]] = []
        for name, added in zip(self._names, requests, strict=True):
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
                hook_options.append((name, added.options))
        merged = self._merged_fetches(fetches)
        feed_dict = request.feed_dict
        if feeds:
            feed_dict = _merge_feeds(self._graph, [*feeds, ("the caller", feed_dict)])
        options = request.options
        if hook_options:
            options = _merge_options([("the caller", options), *hook_options])
        return RunRequest(merged.fetches, feed_dict, options, merged.build)

    def _merged_fetches(self, fetches: list[Any]) -> RunRequest:
        # Names, nodes and None only: everything else may compare equal and yet have another shape.
        if not _LEAF_OR_NOTHING.issuperset(map(type, fetches)):
            return self._merge_fetches(fetches)
        key = tuple(fetches)
        merged = self._merges.get(key)
        if merged is None:
            merged = self._merge_fetches(fetches)
            if len(self._merges) >= _MOST_MERGES:
                self._merges.clear()
            self._merges[key] = merged
        return merged

    def _merge_fetches(self, fetches: list[Any]) -> RunRequest:
        """Return a request for all nodes, which builds the parts of the caller and the hooks."""
        leaves = Leaves(self._graph)
        caller = leaves.build(fetches[0])
        builds: list[Build] = []
        for owner, wanted in zip(self._names, fetches[1:], strict=True):
            build: Build = _nothing
            if wanted is not None:
                try:
                    build = leaves.build(wanted)
                except FetchError as error:
                    add_note(error, f"fetched by {owner}")
                    raise
            builds.append(build)
        return RunRequest(
            leaves.nodes, None, build=partial(_build_parts, caller, builds, self._names)
        )

    def split(self, request: RunRequest, values: Any) -> tuple[Any, Answers]:
        """Return the caller's result of a merged run, and the values of each hook of
        `after_run`.
        """
        if request.build is not None:
            return values[0], self._answers(values[1:], request)
        if request.options is None:
            return values, self._no_answers
        return values, self._answers(self._no_parts, request)

    def _answers(self, parts: Sequence[Any], request: RunRequest) -> Answers:
        options = request.options
        metadata = request.run_metadata
        answers = [_new_values((part, options, metadata)) for part in (*parts, None)]
        return [take(answers) for take in self._takes]

    def note_owners(self, error: FetchError, requests: Sequence[SessionRunArgs | None]) -> None:
        """Note on an error of a run, if it is about one name, the hooks that fetch or feed that."""
        for request, owner in zip(requests, self._names, strict=True):
            if request is None:
                continue
            leaves = Leaves(self._graph)
            leaves.build(request.fetches or ())
            fed = canonical_feeds(self._graph, request.feed_dict)
            for verb, nodes in (("fetched", leaves.nodes), ("fed", fed)):
                if any(node.name == error.name for node in nodes):
                    add_note(error, f"{verb} by {owner}")


def _nothing(_: Sequence[Any]) -> None:
    """Build the part of a hook that fetches nothing."""


def _build_parts(
    caller: Build, builds: Sequence[Build], names: Sequence[str], values: Sequence[Any]
) -> list[Any]:
    """Build the parts of the caller and the hooks of the values of all nodes; an error of a hook's
    part names the hook.
    """
    parts: list[Any] = []
    try:
        parts.extend(build(values) for build in builds)
    except FetchError as error:
        add_note(error, f"fetched by {names[len(parts)]}")
        raise
    return [caller(values), *parts]


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
    """Merge the run options of several owners into a new dict.

    If several owners give an option, the largest number counts; a flag is true if one of them is;
    sequences are joined; of other values, the last one counts. TensorFlow merges `RunOptions` by
    these rules.

    Args:
        requests: the name of each owner, for messages, and its options.
    """
    merged: dict[str, Any] = {}
    for owner, options in requests:
        check_mapping(options, f"options of {owner}")
        for key, value in (options or {}).items():
            if key in merged:
                merged[key] = _merged_option(merged[key], value)
            else:
                # A list of the owner must not be extended.
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
