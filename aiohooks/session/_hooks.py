"""The hooks of one session: checked once, sorted once, called method by method; and what they ask
of a run.

`begin`, `end` and `close` are called one hook after the other; `after_create_session`, `before_run`
and `after_run` of all hooks of one `order` run concurrently.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple, cast

from aiohooks._core.calls import OwnContext, RunWaits
from aiohooks._core.clock import current_clock
from aiohooks._core.scope import current_scope
from aiohooks._core.validate import check_mapping
from aiohooks.checkpoint.stateful import Stateful, is_numbered, is_stateful
from aiohooks.dispatch.background import BackgroundCalls
from aiohooks.dispatch.calls import (
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
from aiohooks.graph.session import Session
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)

_LEAF_OR_NOTHING = LEAF_TYPES | {type(None)}
_REQUEST_OR_NOTHING = {SessionRunArgs, type(None)}
LIFECYCLE = Interface(
    SessionRunHook, in_group=False, hint=", or wrap an object with plain methods in BlockingHook"
)
"""The methods of a session's hooks."""
_MOST_MERGES = 1024
_NOTHING = SessionRunValues(None, None, None)
# Half the price of calling the class: a NamedTuple's own `__new__` is written in Python.
_new_tuple = cast("Any", tuple).__new__
new_args: Callable[[tuple[Any, ...]], SessionRunArgs] = partial(_new_tuple, SessionRunArgs)
_new_values: Callable[[tuple[Any, ...]], SessionRunValues] = partial(_new_tuple, SessionRunValues)


_users: weakref.WeakValueDictionary[tuple[int, int], HookSet] = weakref.WeakValueDictionary()
"""Which session of a process each hook was used in last, by its id: it need not be hashable, and
its session keeps it alive.
"""


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
        """Check the hooks and sort their methods; `coordinator` is that of the whole session."""
        self._coordinator = coordinator
        self._grace_secs = coordinator.owner.grace_secs
        self._is_held = False
        self.registered: tuple[RegisteredHook, ...] = registered_hooks(_hooks(hooks))
        for one in self.registered:
            LIFECYCLE.check(one.hook, plain=one.registration.thread)
            if one.registration.observer:
                raise InvalidHookError(
                    f"{one.name} has observer=True, but a session calls all its hooks; leave it out"
                )
            if one.registration.thread:
                raise InvalidHookError(
                    f"{one.name} has thread=True, which is for hooks of a group; give"
                    " BlockingHook(hook)"
                )
        self.background: BackgroundCalls = BackgroundCalls(
            self._grace_secs, partial(make_default, graph), coordinator.observers, _step_of
        )
        """The calls of `after_run` that run beside the next steps."""
        self._after_create_session = self._groups("after_create_session")
        self.before_run: tuple[OrderGroup, ...] = self._groups("before_run")
        self.after_run: tuple[OrderGroup, ...] = self._groups("after_run")
        self.in_runs: bool = bool(self.before_run or self.after_run)
        """Whether a hook takes part in runs."""
        self._keep_contexts()
        self.merger: Merger = Merger(graph, self.before_run, self.after_run)
        self.begun: list[RegisteredHook] = []
        """The hooks whose `begin` was started and whose `close` was not."""
        self.waits: RunWaits | None = None
        """The latest call outside of runs: of `begin`, `after_create_session`, `end` or `close`."""
        self.own: OwnContext = OwnContext()
        """The context of `begin`, `end` and `close`: a token of one is valid in the others."""

    def hold(self) -> None:
        """Keep the hooks from being used in another session until this one is closed."""
        keys = {
            (os.getpid(), id(registered.hook)): registered.hook for registered in self.registered
        }
        for key, hook in keys.items():
            user = _users.get(key)
            if user is not None and user._is_held:
                label = user._coordinator.requests.label
                raise InvalidHookError(
                    f"{hook!r} is used in {label}, which is open; a hook keeps the state of one"
                    " session: make another object, or use it when that session has ended"
                )
        _users.update(dict.fromkeys(keys, self))
        self._is_held = True

    def release(self) -> None:
        """Let other sessions use the hooks."""
        self._is_held = False

    def stateful(self) -> dict[str, Stateful]:
        """Return the hooks that are kept in checkpoints, by their unique names: those that only
        keep time are numbered.
        """
        found: dict[str, Stateful] = {}
        hooks = [one.hook for one in self.registered if is_stateful(one.hook)]
        for hook in sorted(hooks, key=is_numbered):
            name = first = hook.name or type(hook).__name__
            numbers = itertools.count(2)
            while name in found:
                if not is_numbered(hook):
                    raise InvalidHookError(
                        f"{found[name]!r} and {hook!r} would both be {name!r} in a checkpoint; give"
                        " each a `name` of its own"
                    )
                name = f"{first}#{next(numbers)}"
            found[name] = hook
        return found

    async def drain_stateful(self) -> None:
        """Wait for the background calls of the hooks that are kept in checkpoints."""
        if hooks := [
            one for one in self.registered if one.registration.background and is_stateful(one.hook)
        ]:
            await self.background.drain(hooks)

    async def begin(self) -> None:
        """Call `begin` of the hooks one by one; each counts as begun from the moment it is
        started.
        """
        for registered in self.registered:
            self.begun.append(registered)
            await self._call_one("begin", registered)

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        await self._call(
            self._after_create_session, session, coord, step=session.global_step.latest.step
        )

    async def end(self, session: Session, errors: list[BaseException]) -> None:
        """Wait for the background calls, then call `end` of the hooks one by one, also after one
        that fails; append their errors.
        """
        errors += await self.background.end(self._grace_secs)
        for registered in sorted(self.begun, key=_place_at_end):
            try:
                await self._call_one("end", registered, session)
            except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                errors.append(error)

    async def close(self, exc: BaseException | None, errors: list[BaseException]) -> None:
        """Call `close` of the begun hooks, once and in reverse order, also after one that fails;
        append their errors.
        """
        try:
            errors += await self.background.end(self._grace_secs)
        finally:  # a cancellation is raised when the hooks are closed
            while self.begun:
                registered = self.begun.pop()
                try:
                    # Unlike the other methods, this one always has a time limit.
                    await self._call_one(
                        "close", registered, exc, limit=max(self._grace_secs, 1e-9)
                    )
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
        self, method: str, registered: RegisteredHook, *args: Any, limit: float | None = None
    ) -> None:
        if LIFECYCLE.overrides(registered.hook, method):
            await self._call(
                (OrderGroup(method, [registered], self._grace_secs, limit),),
                *args,
                own=self.own,
            )

    async def _call(
        self,
        groups: tuple[OrderGroup, ...],
        *args: Any,
        step: int | None = None,
        own: OwnContext | None = None,
    ) -> None:
        self.waits = RunWaits(current_scope.get(), current_clock().now)
        await call_groups(
            groups,
            args,
            step=step,
            waits=self.waits,
            observers=self._coordinator.observers,
            own=own,
        )

    def _groups(self, method: str) -> tuple[OrderGroup, ...]:
        bind = self.background.bind if method == "after_run" else bound_method
        hooks = [one for one in self.registered if LIFECYCLE.overrides(one.hook, method)]
        return order_groups(method, hooks, self._grace_secs, bind)

    def _keep_contexts(self) -> None:
        """Give hooks one context for both methods of a run, where one of these may wait: a token of
        the first is valid then.
        """
        groups = (*self.before_run, *self.after_run)
        calls = [
            (one, call.may_wait)
            for group in groups
            for one, call in zip(group.hooks, group.calls, strict=True)
        ]
        twice = {one for one, count in Counter(one for one, _ in calls).items() if count == 2}
        keeping = {
            one
            for one, may_wait in calls
            if may_wait and one in twice and not one.registration.background
        }
        for group in groups:
            if not keeping.isdisjoint(group.hooks):
                group.keeps_context = tuple(one in keeping for one in group.hooks)

    def __repr__(self) -> str:
        return f"<hooks: {', '.join(one.name for one in self.registered) or 'none'}>"


class MergedFetches(NamedTuple):
    """The nodes that a merged run fetches, and what builds the caller's and the hooks' parts of
    their values.

    Requests for the same leaf share a part; with each is the name of the first hook. `takes` has a
    function for each order group of `after_run`, which takes the parts of its hooks out of all
    parts; behind these is the part of a hook without a request.
    """

    nodes: tuple[Node, ...]
    for_caller: Build
    for_hooks: tuple[tuple[Build, str], ...]
    takes: tuple[Take, ...]

    def build(self, values: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Return the caller's part of the values, and those of the hooks."""
        parts: list[Any] = []
        try:
            for build, _ in self.for_hooks:
                parts.append(build(values))
        except FetchError as error:
            add_note(error, f"fetched by {self.for_hooks[len(parts)][1]}")
            raise
        return self.for_caller(values), parts


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
        places = {
            one: place
            for place, one in enumerate(one for group in before_run for one in group.hooks)
        }
        self._request_of = [[places.get(one, -1) for one in group.hooks] for group in after_run]
        """Where, among the requests, each hook of `after_run` finds its own; -1 if it has no
        `before_run`.
        """
        self._nothing: list[Sequence[SessionRunValues]] = [
            (_NOTHING,) * len(group.hooks) for group in after_run
        ]
        self._known: dict[tuple[Any, ...], MergedFetches] = {}
        """By the requests where these have fetches only, and by the fetches."""

    def merge(
        self, request: SessionRunArgs, asked: Sequence[SessionRunArgs | None]
    ) -> tuple[SessionRunArgs, MergedFetches | None]:
        """Merge the caller's request with those of the hooks; return the merged one, and what
        splits its values.
        """
        for one in asked:
            if (
                one is not None
            ):  # not `asked.count(None)`, which compares: arrays, for one, do so in their own way
                break
        else:
            return request, None
        key = (request[0], *asked)
        if _REQUEST_OR_NOTHING.issuperset(
            map(type, asked)
        ):  # a plain tuple is equal to a request, and yet refused
            try:
                known = self._known.get(key)
            except TypeError:  # it has feeds or options, or fetches that are not leaves
                known = None
            if known is not None:
                return new_args((known.nodes, request[1], request[2])), known
        feed_dict, options = request[1], request[2]
        feeds: list[tuple[str, Mapping[Any, Any]]] = []
        further: list[tuple[str, Mapping[str, Any]]] = []
        wanted = [request[0]]
        for one, name in zip(asked, self._names):  # noqa: B905 - of one length
            if one is None:
                wanted.append(None)
                continue
            if not isinstance(one, SessionRunArgs):
                raise InvalidHookError(
                    f"{name} returned {one!r}; return SessionRunArgs(fetches, feed_dict) or None"
                )
            wanted.append(one[0])
            if one.feed_dict is not None:
                feeds.append((name, one.feed_dict))
            if one.options is not None:
                further.append((name, one.options))
        # Names, nodes and None only: everything else may compare equal and yet have another shape.
        is_flat = _LEAF_OR_NOTHING.issuperset(map(type, wanted))
        fetches = self._known.get(tuple(wanted)) if is_flat else None
        if fetches is None:
            fetches = self._merge_fetches(wanted)
        if feeds:
            feed_dict = _merge_feeds(self._graph, [*feeds, ("the caller", feed_dict)])
        if further:
            options = _merge_options([("the caller", options), *further])
        if is_flat:
            if len(self._known) >= _MOST_MERGES:
                self._known.clear()
            self._known[tuple(wanted) if feeds or further else key] = fetches
        return new_args((fetches.nodes, feed_dict, options)), fetches

    def name_owners(self, error: FetchError, asked: Sequence[SessionRunArgs | None]) -> None:
        """Note on an error of a run, if it is about one name, the hooks that fetch or feed that."""
        for one, owner in zip(asked, self._names, strict=True):
            if one is None or error.name is None:
                continue
            leaves = Leaves(self._graph)
            leaves.build(() if one[0] is None else one[0])
            for how, nodes in (
                ("fetched", leaves.nodes),
                ("fed", canonical_feeds(self._graph, one[1])),
            ):
                if any(node.name == error.name for node in nodes):
                    add_note(error, f"{how} by {owner}")

    def split(
        self,
        parts: Sequence[Any],
        merged: MergedFetches | None,
        options: Mapping[str, Any] | None,
        run_metadata: dict[str, Any] | None,
    ) -> list[Sequence[SessionRunValues]]:
        """Return what each hook of `after_run` gets, for each of its order groups: its own of the
        `parts` of a merged run.
        """
        if merged is None and options is None:
            return self._nothing
        nothing = _NOTHING if options is None else _new_values((None, options, run_metadata))
        if merged is None:
            return [(nothing,) * len(places) for places in self._request_of]
        answers = [_new_values((part, options, run_metadata)) for part in parts]
        answers.append(nothing)
        return [take(answers) for take in merged.takes]

    def _merge_fetches(self, wanted: Sequence[Any]) -> MergedFetches:
        leaves = Leaves(self._graph)
        caller = leaves.build(wanted[0])
        parts: list[tuple[Build, str]] = []
        part_of: list[int] = []  # for each request
        shared: dict[Node, int] = {}  # the part of a leaf
        for fetches, name in zip(wanted[1:], self._names, strict=True):
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
        return MergedFetches(leaves.nodes, caller, tuple(parts), tuple(takes))


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
            merged[key] = _merged_option(merged[key], value) if key in merged else copy.copy(value)
    return merged


def _merged_option(old: Any, new: Any) -> Any:
    if isinstance(old, bool) and isinstance(new, bool):
        return old or new
    if isinstance(old, (int, float)) and isinstance(new, (int, float)):
        return max(old, new)
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        return [*old, *new]
    return new


def _place_at_end(registered: RegisteredHook) -> tuple[bool, float]:
    """Return the place of a hook among the calls of `end`."""
    hook: Any = registered.hook
    return hook.ends_last, registered.registration.order


def _step_of(context: SessionRunContext, _: object) -> int:
    """Return the step of a call of `after_run`."""
    return context.global_step


def _hooks(hooks: Iterable[SessionRunHook | HookRegistration]) -> Iterable[object]:
    """Raise unless each of `hooks` is a `SessionRunHook`; return them."""
    if isinstance(hooks, (SessionRunHook, HookRegistration)) or not isinstance(hooks, Iterable):
        raise InvalidHookError(f"hooks is {hooks!r}; give a list of hooks")
    for one in hooks:
        hook: Any = one.hook if isinstance(one, HookRegistration) else one
        if not isinstance(hook, (SessionRunHook, type)):
            packages = [base.__module__.partition(".")[0] for base in type(hook).__mro__]
            advice = (
                "derive it from SessionRunHook, or wrap an object with plain methods in"
                " BlockingHook"
            )
            if isinstance(hook, FunctionType):
                advice = 'make a hook of it with @hook("after_run")'
            if "tensorflow" in packages:
                advice = "give it to TensorFlowHooks of aiohooks.adapters.tensorflow"
            kind = cast("Any", type(hook))
            has_address = kind.__repr__ is object.__repr__  # and says no more
            what = f"an object of {kind.__qualname__}" if has_address else safe_repr(hook)
            raise InvalidHookError(f"hooks has {what}, which is not a SessionRunHook; {advice}")
        if isinstance(hook, SessionRunHook) and not isinstance(hook.name, str):
            raise InvalidHookError(
                f"the name of {hook!r} is {hook.name!r}; give a str, or leave it out"
            )
        yield one
