"""The hooks of one session: checked once, sorted once, called method by method; and their requests
for a run, merged with the request of the caller.

    HookSet     the calls of the hooks' methods
    Merger      merges requests, and splits the values of the run; nothing in it waits

`begin`, `end` and `close` are called one hook after the other. `after_create_session`, `before_run`
and `after_run` of all hooks of one `order` run concurrently.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from aiohooks._core.calls import OwnContext, RunWaits
from aiohooks._core.clock import current_clock
from aiohooks._core.scope import current_scope
from aiohooks._core.validate import check_mapping
from aiohooks.checkpoint.stateful import Stateful, is_numbered, is_stateful
from aiohooks.dispatch.background import BackgroundCalls
from aiohooks.dispatch.calls import (
    HookCall,
    Method,
    OrderGroup,
    RegisteredHook,
    bound_method,
    call_groups,
    order_groups,
)
from aiohooks.dispatch.hook import HookRegistration
from aiohooks.dispatch.interface import Interface, registered_hooks
from aiohooks.errors import (
    FeedConflictError,
    FetchError,
    HookCancelledError,
    InvalidHookError,
    add_note,
    safe_repr,
)
from aiohooks.graph.graph import Graph, Node, make_default
from aiohooks.graph.plan import LEAF_TYPES, Build, Leaves, Take, canonical_feeds, taking
from aiohooks.graph.session import RunRequest, Session
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)

LIFECYCLE = Interface(
    SessionRunHook, in_group=False, hint=", or wrap an object with plain methods in BlockingHook"
)
"""The methods of a session's hooks."""
_users: weakref.WeakValueDictionary[tuple[int, int], HookSet] = weakref.WeakValueDictionary()
"""The open session of each hook, by its process and its id: a hook need not be hashable, and its
session keeps it alive.
"""
T = TypeVar("T")
_LEAF_OR_NOTHING = LEAF_TYPES | {type(None)}
_REQUEST_OR_NOTHING = {SessionRunArgs, type(None)}
_MOST_MERGES = 1024
# Half the price of calling the class: a NamedTuple's own `__new__` is written in Python.
_new_tuple = cast("Any", tuple).__new__
Answers = Sequence[Sequence[SessionRunValues]]
"""The values of the hooks of each order group of `after_run`."""


class HookSet:
    """All hooks of one session. A method that no hook overrides has no order group, so it costs
    nothing.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        hooks: Iterable[SessionRunHook | HookRegistration],
        graph: Graph,
    ) -> None:
        """Check the hooks and sort their methods. `coordinator` is that of the whole session."""
        self._coordinator = coordinator
        self._grace_secs = coordinator.owner.grace_secs
        self.registered: tuple[RegisteredHook, ...] = registered_hooks(_checked_hooks(hooks))
        self._keys = [(os.getpid(), id(registered.hook)) for registered in self.registered]
        for registered in self.registered:
            LIFECYCLE.check(registered)

        def enter() -> None:
            make_default(graph)
            coordinator.enter_raw_session()

        self.background: BackgroundCalls = BackgroundCalls(
            self._grace_secs, enter, coordinator.observers, _step_of
        )
        """The calls of `after_run` that run alongside the next steps."""
        self.has_background: bool = any(
            registered.registration.background for registered in self.registered
        )
        self._begin = self._calls("begin", self.registered)
        self._end = self._calls("end", sorted(self.registered, key=_place_at_end))
        # Unlike the other methods, this one always has a time limit.
        self._close = self._calls("close", self.registered, limit=max(self._grace_secs, 1e-9))
        self._after_create_session = self._groups("after_create_session")
        self.before_run: tuple[OrderGroup, ...] = self._groups("before_run")
        # What saves the session must see what all other hooks keep of the run.
        self.after_run: tuple[OrderGroup, ...] = (
            *self._groups("after_run", self.background.bind, ends_last=False),
            *self._groups("after_run", self.background.bind, ends_last=True),
        )
        self.in_runs: bool = bool(self.before_run or self.after_run)
        """Whether a hook takes part in runs."""
        self._keep_contexts()
        self.merger: Merger = Merger(graph, self.before_run, self.after_run)
        self.begun: list[RegisteredHook] = []
        """The hooks whose `begin` was started and whose `close` was not."""
        self.own: OwnContext = OwnContext()
        """The context of `begin`, `end` and `close`: a token of one is valid in the others."""

    def hold(self) -> None:
        """Keep the hooks from being used in another session until this one is closed."""
        for key, registered in zip(self._keys, self.registered, strict=True):
            user = _users.get(key)
            if user is not None:
                label = user._coordinator.requests.label
                raise InvalidHookError(
                    f"{registered.hook!r} is used in {label}, which is open; a hook keeps the state"
                    " of one session: make another object, or use it when that session has ended"
                )
        _users.update(dict.fromkeys(self._keys, self))

    def release(self) -> None:
        """Let other sessions use the hooks."""
        for key in self._keys:
            _users.pop(key, None)

    def stateful(self) -> dict[str, Stateful]:
        """Return the hooks that are kept in checkpoints, by their unique names: hooks that only
        keep time are numbered.
        """
        by_name: dict[str, Stateful] = {}
        hooks = [registered.hook for registered in self.registered]
        for hook in sorted(filter(is_stateful, hooks), key=is_numbered):
            name = first_name = hook.name or type(hook).__name__
            numbers = itertools.count(2)
            while name in by_name:
                if not is_numbered(hook):
                    raise InvalidHookError(
                        f"{by_name[name]!r} and {hook!r} would both be {name!r} in a checkpoint;"
                        " give each a `name` of its own"
                    )
                name = f"{first_name}#{next(numbers)}"
            by_name[name] = hook
        return by_name

    async def drain_stateful(self) -> None:
        """Wait for the background calls of the hooks that are kept in checkpoints."""
        hooks = [
            registered
            for registered in self.registered
            if registered.registration.background and is_stateful(registered.hook)
        ]
        if hooks:
            await self.background.drain(hooks)

    async def finish_background(self) -> list[BaseException]:
        """Finish the background calls, and accept no others. Return the errors that no call has
        raised.
        """
        if not self.has_background:
            return []
        return await self.background.end(self._grace_secs)

    async def begin(self) -> None:
        """Call `begin` of the hooks one by one. Each counts as begun from the moment it is
        started.
        """
        for registered in self.registered:
            self.begun.append(registered)
            await self._call_one(self._begin, registered)

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        if self._after_create_session:
            step = session.global_step.latest.step
            await self._call(self._after_create_session, session, coord, step=step)

    async def end(self, session: Session, errors: list[BaseException]) -> None:
        """Wait for the background calls, then call `end` of the hooks one by one, also after one
        that fails. Append their errors.
        """
        errors += await self.finish_background()
        for registered in self._end:
            try:
                await self._call_one(self._end, registered, session)
            except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                errors.append(error)

    async def close(self, exc: BaseException | None, errors: list[BaseException]) -> None:
        """Call `close` of the begun hooks, once and in reverse order, also after one that fails.
        Append their errors.
        """
        try:
            errors += await self.finish_background()
        finally:  # a cancellation is raised when the hooks are closed
            while self.begun:
                registered = self.begun.pop()
                try:
                    await self._call_one(self._close, registered, exc)
                except asyncio.CancelledError as error:
                    # The closing itself was cancelled: at the end of the grace period, or by a
                    # third party. The others continue.
                    cancelled = HookCancelledError(
                        f"{registered.name}.close was cancelled before it was done"
                    )
                    cancelled.__cause__ = error
                    errors.append(cancelled)
                except BaseException as error:
                    errors.append(error)

    async def _call_one(
        self, calls: Mapping[RegisteredHook, OrderGroup], registered: RegisteredHook, *args: Any
    ) -> None:
        if registered in calls:
            await self._call((calls[registered],), *args, own=self.own)

    async def _call(self, groups: tuple[OrderGroup, ...], *args: Any, **options: Any) -> None:
        waits = RunWaits(current_scope.get(), current_clock().now, self._coordinator.owner)
        observers = self._coordinator.observers
        await call_groups(groups, args, waits=waits, observers=observers, **options)

    def _calls(
        self, method: str, hooks: Iterable[RegisteredHook], limit: float | None = None
    ) -> dict[RegisteredHook, OrderGroup]:
        """Return the call of a method of each hook that overrides it, to be made by itself."""
        return {
            registered: OrderGroup(method, [registered], self._grace_secs, limit)
            for registered in hooks
            if LIFECYCLE.overrides(registered.hook, method)
        }

    def _groups(
        self,
        method: str,
        bind: Callable[[RegisteredHook, str], Method] = bound_method,
        ends_last: bool | None = None,
    ) -> tuple[OrderGroup, ...]:
        """Return the order groups of a method. With `ends_last`, return only the groups of such
        hooks, or of all others.
        """
        overriding = [
            registered
            for registered in self.registered
            if LIFECYCLE.overrides(registered.hook, method)
            and ends_last in (None, _ends_last(registered))
        ]
        return order_groups(method, overriding, self._grace_secs, bind)

    def _keep_contexts(self) -> None:
        """Give hooks one context for both methods of a run, where one of these may wait: a token of
        the first is valid then.
        """
        groups = (*self.before_run, *self.after_run)
        calls: dict[RegisteredHook, list[HookCall]] = defaultdict(list)
        for group in groups:
            for hook, call in zip(group.hooks, group.calls, strict=True):
                if not hook.registration.background:
                    calls[hook].append(call)
        for group in groups:
            group.keeping = {
                hook
                for hook in group.hooks
                if len(calls[hook]) == 2 and any(call.may_wait for call in calls[hook])
            }

    def __repr__(self) -> str:
        names = ", ".join(registered.name for registered in self.registered)
        return f"<hooks: {names or 'none'}>"


def _place_at_end(registered: RegisteredHook) -> tuple[bool, float]:
    """Return the place of a hook among the calls of `end`."""
    return _ends_last(registered), registered.registration.order


def _ends_last(registered: RegisteredHook) -> bool:
    hook: Any = registered.hook
    return bool(hook.ends_last)


def _step_of(context: SessionRunContext, _: object) -> int:
    """Return the step of a call of `after_run`."""
    return context.global_step


def _checked_hooks(hooks: Iterable[SessionRunHook | HookRegistration]) -> Iterable[object]:
    """Raise unless each of `hooks` is a `SessionRunHook`. Return them."""
    if isinstance(hooks, (SessionRunHook, HookRegistration)) or not isinstance(hooks, Iterable):
        raise InvalidHookError(f"hooks is {hooks!r}; give a list of hooks")
    for given in hooks:
        hook = given.hook if isinstance(given, HookRegistration) else given
        if not isinstance(hook, (SessionRunHook, type)):
            raise InvalidHookError(
                f"hooks has {safe_repr(hook)}, which is not a SessionRunHook; derive it from"
                ' SessionRunHook, make a hook of a function with @hook("after_run"), or wrap an'
                " object with plain methods in BlockingHook"
            )
        yield given


# -- what the caller and the hooks ask for in a run


class MergedRequest(RunRequest):
    """A run that fetches what the caller and the hooks ask for.

    Its values are those of the distinct nodes, or if a fetch is nested, the parts of the caller and
    of each hook. The first is the caller's result.

    Attributes:
        takes: take the values of the hooks of each order group of `after_run`.
    """

    __slots__ = ("takes",)

    def __init__(
        self,
        fetches: tuple[Node, ...],
        takes: Sequence[Take],
        *,
        feed_dict: Mapping[Any, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        build: Build | None = None,
    ) -> None:
        super().__init__(fetches, feed_dict, options, build)
        self.takes: Sequence[Take] = takes

    def with_feeds(
        self,
        feed_dict: Mapping[Any, Any] | None,
        options: Mapping[str, Any] | None,
    ) -> MergedRequest:
        """Return the same request, which has neither, with feeds and options."""
        if feed_dict is None and options is None:
            return self
        return MergedRequest(
            self.fetches,
            self.takes,
            feed_dict=feed_dict,
            options=options,
            build=self.build,
        )


class Merger:
    """Merges requests over one graph. Fetches without structure are merged once and looked up from
    then on.
    """

    def __init__(
        self, graph: Graph, before_run: Sequence[OrderGroup], after_run: Sequence[OrderGroup]
    ) -> None:
        """Take the graph, and the groups of hooks that ask and of hooks that get values."""
        self._graph = graph
        self._names = [call.name for group in before_run for call in group.calls]
        asking = [hook for group in before_run for hook in group.hooks]
        self._places = {hook: place for place, hook in enumerate(asking, start=1)}
        self._after_run = after_run
        self._takes_of_parts = self._takes(range(len(asking) + 1))
        self._no_parts = (None,) * (len(asking) + 1)
        self._no_answers = _answers(self._no_parts, RunRequest(None, None), self._takes_of_parts)
        self._merges: dict[tuple[Any, ...], MergedRequest] = {}
        """The merged fetches without structure, by the fetches of the caller and the requests of
        the hooks, or only by fetches if some hooks also feed or have options.
        """

    def _takes(self, slots: Sequence[int]) -> list[Take]:
        """Return the functions that take the values of the hooks of each group of `after_run`.

        Args:
            slots: the slots of the caller and of each hook that asks; -1 for nothing.
        """
        takes: list[Take] = []
        for group in self._after_run:
            asked = [self._places.get(hook) for hook in group.hooks]
            takes.append(taking([-1 if place is None else slots[place] for place in asked]))
        return takes

    def merge(self, request: RunRequest, requests: Sequence[SessionRunArgs | None]) -> RunRequest:
        """Merge the requests of the caller and the hooks."""
        if not _has_request(requests):
            if request.options is None:
                return request
            # The hooks of each attempt get a `run_metadata` of their own.
            return RunRequest(request.fetches, request.feed_dict, request.options)
        key = (request.fetches, *requests)
        # A plain tuple would be equal to a request, and is rejected below.
        if _REQUEST_OR_NOTHING.issuperset(map(type, requests)):
            try:
                merged = self._merges.get(key)
            except TypeError:  # there are feeds, options, or nested fetches
                merged = None
            if merged is not None:
                return merged.with_feeds(request.feed_dict, request.options)
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
            # In half the time of its attributes.
            added_fetches, feed_dict, options = added
            fetches.append(added_fetches)
            if feed_dict is not None:
                feeds.append((name, feed_dict))
            if options is not None:
                hook_options.append((name, options))
        merged = self._merged_fetches(fetches)
        is_flat = merged.build is None
        if is_flat and not feeds and not hook_options:
            self._keep(key, merged)
        feed_dict = request.feed_dict
        if feeds:
            feed_dict = _merge_feeds(self._graph, [*feeds, ("the caller", feed_dict)])
        options = request.options
        if hook_options:
            options = _merge_options([("the caller", options), *hook_options])
        return merged.with_feeds(feed_dict, options)

    def _merged_fetches(self, fetches: list[Any]) -> MergedRequest:
        # Names, nodes and None only: everything else may compare equal and yet have another shape.
        if not _LEAF_OR_NOTHING.issuperset(map(type, fetches)):
            return self._merge_fetches(fetches)
        key = tuple(fetches)
        merged = self._merges.get(key)
        if merged is None:
            merged = self._merge_leaves(fetches)
            self._keep(key, merged)
        return merged

    def _keep(self, key: tuple[Any, ...], merged: MergedRequest) -> None:
        if len(self._merges) >= _MOST_MERGES:
            self._merges.clear()
        self._merges[key] = merged

    def _merge_leaves(self, fetches: list[Any]) -> MergedRequest:
        """Return a request for all nodes of fetches without structure."""
        leaves = Leaves(self._graph)
        slots = self._for_owners(fetches, leaves.slot, -1)
        return MergedRequest(leaves.nodes, self._takes(slots))

    def _merge_fetches(self, fetches: list[Any]) -> MergedRequest:
        """Return a request for all nodes, which builds the parts of the caller and the hooks."""
        leaves = Leaves(self._graph)
        no_build: Build = _nothing
        builds = self._for_owners(fetches, leaves.build, no_build)
        build = partial(_build_parts, builds)
        return MergedRequest(leaves.nodes, self._takes_of_parts, build=build)

    def _for_owners(
        self,
        fetches: list[Any],
        assign: Callable[[Any], T],
        nothing: T,
    ) -> list[T]:
        """Return `assign(part)` for what the caller and each hook fetch; `nothing` for None."""
        assigned = [assign(fetches[0])]
        for owner, wanted in zip(self._names, fetches[1:], strict=True):
            try:
                assigned.append(nothing if wanted is None else assign(wanted))
            except FetchError as error:
                add_note(error, f"fetched by {owner}")
                raise
        return assigned

    def split(self, request: RunRequest, values: Any) -> tuple[Any, Answers]:
        """Return the caller's result of a merged run, and the values of each hook of
        `after_run`.
        """
        if isinstance(request, MergedRequest):
            return values[0], _answers(values, request, request.takes)
        if request.options is None:
            return values, self._no_answers
        return values, _answers(self._no_parts, request, self._takes_of_parts)


def _answers(
    values: Sequence[Any],
    request: RunRequest,
    takes: Sequence[Take],
) -> Answers:
    """Return the values of each hook of `after_run`, by order group."""
    options = request.options
    metadata = request.run_metadata
    answers = [_new_tuple(SessionRunValues, (value, options, metadata)) for value in values]
    # At the place -1: the values of a hook that has asked for nothing.
    answers.append(_new_tuple(SessionRunValues, (None, options, metadata)))
    return [take(answers) for take in takes]


def _nothing(_: Sequence[Any]) -> None:
    """Build the part of a hook that fetches nothing."""


def _build_parts(builds: Sequence[Build], values: Sequence[Any]) -> list[Any]:
    """Build the parts of the caller and the hooks of the values of all nodes."""
    return [build(values) for build in builds]


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
