"""The base class of hooks, the objects exchanged between a hook and its session, and the calls.

The life of a hook, as its session calls it:

    begin()                                     once, before the session exists; may add to the
                                                graph
    after_create_session(session, coord)        after each creation, so again after a recovery
    loop:
        before_run(run_context)                 all hooks concurrently; may add fetches and feeds
        ... the run ...
        after_run(run_context, run_values)      all hooks concurrently, each gets its own results;
                                                not if the run failed
    end(session)                                once, on a clean end, while the session is still
                                                open
    close(exc)                                  once, however it ended, if `begin` was started

For authors of hooks:

    SessionRunHook, SessionRunArgs, SessionRunContext, SessionRunValues

For the session alone:

    HookSet     the hooks of one session: checked once, sorted once, called method by method
    Merger      merges the requests of hooks with that of the caller, and splits the values of the
                run again; it does not wait

`begin`, `end` and `close` are called one hook after the other. `after_create_session`, `before_run`
and `after_run` of all hooks of one `order` run concurrently.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import itertools
import operator
import os
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, Generic, NamedTuple, cast

from aiohooks._core.activity import current_run, current_scope
from aiohooks._core.calls import RunWaits
from aiohooks._core.clock import current_clock
from aiohooks._core.validate import check_mapping
from aiohooks.checkpoint.stateful import Stateful, is_numbered, is_stateful
from aiohooks.dispatch.background import BackgroundCalls
from aiohooks.dispatch.calls import (
    MakeCall,
    OrderGroup,
    RegisteredHook,
    call_groups,
    hook_call,
    order_groups,
)
from aiohooks.dispatch.hook import Hook, HookRegistration, check_hooks, registration_of
from aiohooks.dispatch.interface import Interface, checked_and_named
from aiohooks.errors import (
    EffectError,
    FeedConflictError,
    FetchError,
    HookCancelledError,
    InvalidHookError,
    add_note,
    safe_repr,
)
from aiohooks.graph.graph import Graph, Node, T_co, make_default
from aiohooks.graph.session import (
    LEAF_TYPES,
    Build,
    Leaves,
    RunRequest,
    Session,
    Take,
    canonical_feeds,
    taking,
)
from aiohooks.session.coordinator import Coordinator, TasksOwner
from aiohooks.session.status import EffectRecorder


class SessionRunArgs(NamedTuple):
    """The arguments of a run: from the caller of `run`, or added by a hook.

    Attributes:
        fetches: nodes of the graph or their names, nested as you like. None fetches nothing.
        feed_dict: values by node or name.
        options: a mapping for a session's own `run`. Values of one option are merged: the larger
            number, either flag, lists joined, otherwise the later value.
    """

    fetches: Any = None
    feed_dict: Mapping[Any, Any] | None = None
    options: Mapping[str, Any] | None = None


class SessionRunValues(NamedTuple, Generic[T_co]):
    """The results of a run for a hook. Annotate `SessionRunValues[float]` if the hook fetches a
    node of floats.

    Attributes:
        results: the values in the shape of the hook's fetches, or None if it fetched nothing.
        options: the merged options of the run, or None.
        run_metadata: a dict shared by all hooks of a run that has options, otherwise None.
    """

    results: T_co
    options: Mapping[str, Any] | None
    run_metadata: dict[str, Any] | None


class SessionRunContext:
    """An attempt of a run, as its hooks see it. `before_run` and `after_run` of all hooks get the
    same object.

    Attributes:
        original_args: the arguments of `run`, the caller's own objects.
        session: the raw session: runs through it call no hooks.
        coord: its coordinator. Without one (in a test) a stop is only recorded here.
        global_step: in `before_run` the step about to run, in `after_run` the committed step.
        attempt: 1, and one more after each recovery of this run.
        effect_recorder: the `EffectsHook` of the session, or None without one.
        effects: the effects recorded so far: kind, payload and recorder of each.
        effects_before_run: how many of them were recorded in `before_run`.
        accepts_effects: whether `effect` may still be called.
        committed: whether the run is committed, also while `after_run` of its hooks fails.
    """

    _requested = False
    """Whether `request_stop` of this object was called."""
    effects_before_run: int = 0
    accepts_effects: bool = True
    committed: bool = False

    def __init__(
        self,
        original_args: SessionRunArgs | RunRequest,
        session: Session,
        coord: Coordinator | None = None,
        *,
        global_step: int = 0,
        attempt: int = 1,
        effect_recorder: EffectRecorder | None = None,
    ) -> None:
        self._original_args = original_args
        self.session: Session = session
        self.coord: Coordinator | None = coord
        self.global_step: int = global_step
        self.attempt: int = attempt
        self.effects: list[tuple[str, Any, str]] = []
        self.effect_recorder: EffectRecorder | None = effect_recorder

    @property
    def original_args(self) -> SessionRunArgs:
        """The arguments of `run`, the caller's own objects."""
        args = self._original_args
        return SessionRunArgs(args.fetches, args.feed_dict, args.options)

    @property
    def metrics(self) -> dict[str, Any]:
        """Numbers about this attempt by name. Every hook may add numbers.

        Hooks with a higher `order` see the metrics that hooks with a lower order added, and
        `after_run` sees what `before_run` added.
        """
        # `setdefault` is atomic. A hook in a thread (`BlockingHook`) may ask for the metrics at the
        # same time as another hook, and both must get the same dict.
        metrics: dict[str, Any] = vars(self).setdefault("_metrics", {})
        return metrics

    def effect(self, kind: str, payload: Any = None, *, recorder: str | None = None) -> None:
        """Record an effect of this run. See `aiohooks.effect`."""
        if self.effect_recorder is None:
            raise EffectError(
                f"effect({kind!r}) was called in a session that delivers none; add"
                " EffectsHook({kind: handler}, run=...) to its hooks"
            )
        self.effect_recorder.record(self, kind, payload, recorder)

    def take_effects(self) -> list[tuple[str, Any, str]]:
        """Return the effects recorded so far, and forget them: for the `EffectsHook`."""
        effects = self.effects
        self.effects = []
        return effects

    @property
    def stop_requested(self) -> bool:
        """Whether a stop was requested, by this hook or elsewhere."""
        return self._requested or (self.coord is not None and self.coord.should_stop())

    def request_stop(self, reason: str | None = None) -> None:
        """Request a stop of the session after this run. It takes effect immediately, and the first
        reason is kept.
        """
        self._requested = True
        if self.coord is not None:
            self.coord.request_stop(reason)

    def __repr__(self) -> str:
        return (
            f"<SessionRunContext step={self.global_step} attempt={self.attempt}"
            f" stop_requested={self.stop_requested}>"
        )


def effect(kind: str, payload: Any = None, *, recorder: str | None = None) -> None:
    """Record an effect of the current run: in a step, an operation or a hook.

    The effect is not delivered yet. A run that fails before its commit leaves no effects, a
    committed run leaves all of them. Recording never waits. You may also record in threads of
    `asyncio.to_thread`.

    Args:
        kind: the name of a handler of the session's `EffectsHook`.
        payload: data that a checkpoint can hold. It is copied.
        recorder: a name that is part of the key (run, step, recorder and a number), by default the
            kind. If concurrent hooks or operations record the same kind, give each its own name, so
            that their order changes no key.

    Raises:
        EffectError: the code is not part of an attempt of a run, the session has no `EffectsHook`,
            or it is too late in the run.
        InvalidArgumentError: the kind has no handler, or a checkpoint cannot hold the payload.
    """
    run = current_run()
    if run is None or run.attempt is None:
        raise EffectError(
            f"effect({kind!r}) was called outside of a run with an EffectsHook; record effects in a"
            " step, in before_run or in after_run of a hook without background=True, and in threads"
            " of asyncio.to_thread"
        )
    run.attempt.effect(kind, payload, recorder=recorder)


class SessionRunHook(Hook):
    """The base class of hooks. Override the methods that you need, as coroutines. The others are
    never called.

    Set `order`, `timeout` and `on_error` in your subclass, or for a single registration with
    `configure`. If your hook has the plain methods `state_dict` and `load_state_dict` (see
    `Stateful`), checkpoints contain its state. The state is loaded after `begin` and before
    `after_create_session`, both at a restart and after a recovery. In all methods the session's
    graph is the default graph (`get_default_graph`).
    """

    ends_last: ClassVar[bool] = False
    """Whether `after_run` and `end` are called after the methods of all other hooks, whatever their
    `order`: a hook that saves the session saves their state.
    """

    async def begin(self) -> None:
        """Called once before the session is created. Nodes may be added to the default graph."""

    async def after_create_session(self, session: Session, coord: Coordinator, /) -> None:
        """Called after each creation of a session, so again after each recovery. The graph is
        finalized.

        Args:
            session: the raw session, open.
            coord: its coordinator, new for each created session. Tasks started with it end with the
                session.
        """

    async def before_run(self, run_context: SessionRunContext, /) -> SessionRunArgs | None:
        """Called before each attempt of a run, concurrently with the other hooks. Return fetches
        and feeds to add, or None.
        """
        return None

    async def after_run(
        self, run_context: SessionRunContext, run_values: SessionRunValues, /
    ) -> None:
        """Called after each successful run, concurrently with the other hooks."""

    async def end(self, session: Session, /) -> None:
        """Called once at a clean end, in `order`, with the session still open."""

    async def close(self, exc: BaseException | None, /) -> None:
        """Called exactly once if `begin` was started, however the session ended, in reverse order.

        It runs in a separate task, shielded from cancellation and with a time limit. It gets no
        session, as there may be none: the opening may have failed before. The session of the latest
        `after_create_session` is closed, and stays readable: `session.global_step.latest.step` is
        the last step, `session.variables.snapshot()` has the values.

        Args:
            exc: the error that ended the session, or None after a clean end.
        """


HOOK_METHODS: tuple[str, ...] = tuple(
    name for name, method in vars(SessionRunHook).items() if inspect.iscoroutinefunction(method)
)
"""The methods of a hook's life cycle, in the order of their first calls."""


LIFECYCLE = Interface(
    SessionRunHook, in_group=False, hint=", or wrap an object with plain methods in BlockingHook"
)
"""The methods of a session's hooks."""
_users: weakref.WeakValueDictionary[tuple[int, int], HookSet] = weakref.WeakValueDictionary()
"""The open session that uses a hook, as its `HookSet`: by the process and the id of the hook. The
keys are ids because a hook need not be hashable. They stay valid, as the session keeps its hooks.
"""
_LEAF_OR_NOTHING = LEAF_TYPES | {type(None)}
"""The types of fetches that are not nested."""
_REQUEST_OR_NOTHING = {SessionRunArgs, type(None)}
"""The types that a hook may return from `before_run`."""
_MOST_MERGES = 1024
# Hot path: this makes a NamedTuple in half the time of a call of its class, whose own `__new__` is
# written in Python.
_new_tuple = cast("Any", tuple).__new__
Answers = Sequence[Sequence[SessionRunValues]]
"""The values of the hooks of each order group of `after_run`."""


class HookSet:
    """All hooks of one session.

    An order group has the hooks of the same `order` that override a method: they are called
    together. A method that no hook overrides has no order group, so it costs nothing.
    """

    def __init__(
        self,
        session: TasksOwner,
        hooks: Iterable[SessionRunHook | HookRegistration],
        graph: Graph,
    ) -> None:
        """Check the hooks, and make the calls of their methods."""
        self._session = session
        self._graph = graph
        self._grace_secs = session.grace_secs
        self.registered: list[RegisteredHook] = []
        """The hooks in the order of the list."""
        name_counts: Counter[str] = Counter()
        ids: set[int] = set()
        for hook in _checked_hooks(hooks):
            registered = checked_and_named(registration_of(hook), ids, name_counts)
            ids.add(id(registered.hook))
            LIFECYCLE.check(registered)
            self.registered.append(registered)
        # By their keys in `_users`, which has the hooks of all open sessions. The keys contain the
        # process, as a forked child may use the same objects in a session of its own.
        self._by_key = {(os.getpid(), id(entry.hook)): entry for entry in self.registered}
        self.background: BackgroundCalls = BackgroundCalls(
            self._grace_secs, self._enter_background, session.observers, _step_of
        )
        """The calls of `after_run` that run alongside the next steps."""
        self.has_background: bool = any(
            registered.registration.background for registered in self.registered
        )
        self.begun: list[RegisteredHook] = []
        """The hooks whose `begin` was started and whose `close` was not."""
        self._make_calls()
        self.in_runs: bool = bool(self.before_run or self.after_run)
        """Whether a hook takes part in runs."""
        self.merger: Merger = Merger(graph, self.before_run, self.after_run)

    def _make_calls(self) -> None:
        """Make the calls of each method, in its order of the hooks."""
        order = operator.attrgetter("registration.order")
        # In `after_run` and `end`, hooks that save the session come last, so that they save the new
        # states of all others.
        savers = [*filter(_ends_last, self.registered)]
        others = [*itertools.filterfalse(_ends_last, self.registered)]
        # These methods are called for one hook after another. `begin` follows the list, and `close`
        # its reverse, because a hook may use what an earlier hook has opened.
        self._begin = self._calls("begin", self.registered)
        self._end = self._calls("end", [*sorted(others, key=order), *sorted(savers, key=order)])
        self._close = self._calls("close", self.registered)
        # These methods are called for all hooks of an order together.
        self._after_create_session = self._groups("after_create_session", self.registered)
        self.before_run: tuple[OrderGroup, ...] = self._groups("before_run", self.registered)
        self.after_run: tuple[OrderGroup, ...] = (
            *self._groups("after_run", others, self.background.make_call),
            *self._groups("after_run", savers, self.background.make_call),
        )

    def _enter_background(self) -> None:
        """Prepare the context of a background call: as in a run, it has the default graph, and is
        part of the raw session.
        """
        make_default(self._graph)
        self._session.enter_raw_session()

    def hold(self) -> None:
        """Reserve the hooks for this session until `release`.

        Raises:
            InvalidHookError: another open session uses one of them.
        """
        for key, registered in self._by_key.items():
            user = _users.get(key)
            if user is not None:
                label = user._session.requests.label
                raise InvalidHookError(
                    f"{registered.hook!r} is used in {label}, which is open; a hook keeps the state"
                    " of one session: make another object, or use it when that session has ended"
                )
        _users.update(dict.fromkeys(self._by_key, self))

    def release(self) -> None:
        """Let other sessions use the hooks."""
        for key in self._by_key:
            _users.pop(key, None)

    @cached_property
    def stateful(self) -> dict[str, Stateful]:
        """The hooks whose states checkpoints contain, by unique names.

        The name of a hook is its `name` or its class. Hooks that only keep time may share a name,
        and get a number.

        Raises:
            InvalidHookError: two other hooks have the same name.
        """
        by_name: dict[str, Stateful] = {}
        hooks = [registered.hook for registered in self.registered]
        # The hooks that may be numbered come last, so that no other hook finds its name in use.
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
        """Wait for the background calls of the hooks whose states checkpoints contain."""
        if self.has_background:
            await self.background.drain(
                registered for registered in self.registered if is_stateful(registered.hook)
            )

    async def begin(self) -> None:
        """Call `begin` of the hooks one by one.

        A hook counts as begun before its call, so that `close` of it is called if that fails.
        """
        for registered in self.registered:
            self.begun.append(registered)
            await self._call_one(self._begin, registered)

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Call `after_create_session` of the hooks, one order after another."""
        if self._after_create_session:
            step = session.global_step.latest.step
            await self._call(self._after_create_session, session, coord, step=step)

    async def end(self, session: Session, errors: list[BaseException]) -> None:
        """Wait for the background calls, then call `end` of all hooks one by one.

        If a call fails, its error is appended to `errors`, and the next hook is called.
        """
        if self.has_background:
            errors += await self.background.end(self._grace_secs)
        for registered in self._end:
            try:
                await self._call_one(self._end, registered, session)
            except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                errors.append(error)

    async def close(self, exc: BaseException | None, errors: list[BaseException]) -> None:
        """Call `close` of all begun hooks, once and in reverse order.

        If a call fails, its error is appended to `errors`, and the next hook is called.
        """
        try:
            if self.has_background:
                errors += await self.background.end(self._grace_secs)
        finally:
            # A cancellation of the wait above is raised only when all hooks are closed.
            while self.begun:
                registered = self.begun.pop()
                try:
                    await self._call_one(self._close, registered, exc)
                except asyncio.CancelledError as error:
                    # The task that closes the session was cancelled: at the end of the grace
                    # period, or by other code. The other hooks are closed all the same.
                    cancelled = HookCancelledError(
                        f"{registered.name}.close was cancelled before it was done"
                    )
                    cancelled.__cause__ = error
                    errors.append(cancelled)
                except BaseException as error:
                    errors.append(error)

    async def _call_one(
        self,
        groups: Mapping[RegisteredHook, OrderGroup],
        registered: RegisteredHook,
        *args: Any,
    ) -> None:
        """Call a method of one hook, if the hook overrides it.

        `groups` maps each hook that overrides the method to an order group with the call of this
        hook alone.
        """
        if registered in groups:
            await self._call((groups[registered],), *args)

    async def _call(self, groups: tuple[OrderGroup, ...], *args: Any, **options: Any) -> None:
        """Call a method of hooks outside of a run, with waits of its own."""
        waits = RunWaits(current_scope.get(), current_clock().now, self._session)
        observers = self._session.observers
        await call_groups(groups, args, waits=waits, observers=observers, **options)

    def _calls(
        self, method: str, hooks: Iterable[RegisteredHook]
    ) -> dict[RegisteredHook, OrderGroup]:
        """Return for each hook that overrides a method an order group of this hook alone."""
        make_call: MakeCall = hook_call
        if method == "close":
            # Unlike the other methods, `close` always has a time limit, and is called on disabled
            # hooks, too: it releases what `begin` has opened.
            make_call = partial(hook_call, timeout=self._grace_secs, may_be_disabled=False)
        return {
            registered: OrderGroup([make_call(registered, method)], self._grace_secs)
            for registered in _overriding(hooks, method)
        }

    def _groups(
        self,
        method: str,
        hooks: Iterable[RegisteredHook],
        make_call: MakeCall = hook_call,
    ) -> tuple[OrderGroup, ...]:
        """Return the order groups of a method, with the hooks that override it.

        `make_call` returns the call of a hook: by default a call of its method.
        """
        calls = [make_call(registered, method) for registered in _overriding(hooks, method)]
        return order_groups(calls, self._grace_secs)

    def __repr__(self) -> str:
        names = ", ".join(registered.name for registered in self.registered)
        return f"<hooks: {names or 'none'}>"


def _overriding(hooks: Iterable[RegisteredHook], method: str) -> list[RegisteredHook]:
    """Return the hooks that override a method of `SessionRunHook`."""
    return [registered for registered in hooks if LIFECYCLE.overrides(registered.hook, method)]


def _ends_last(registered: RegisteredHook) -> bool:
    hook: Any = registered.hook
    return bool(hook.ends_last)


def _step_of(context: SessionRunContext, _: object) -> int:
    """Return the step of a call of `after_run`."""
    return context.global_step


def _checked_hooks(hooks: Iterable[SessionRunHook | HookRegistration]) -> Iterable[object]:
    """Yield the hooks, and raise at the first that is not a `SessionRunHook`.

    A class passes, because the registration has a better message for it.
    """
    check_hooks(hooks)
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


class Merger:
    """Merges the requests of the caller and the hooks into one, and splits the values of its run.

    The graph computes each distinct node once. From the values of the nodes, a function builds the
    parts of the result: part 0 is that of the caller, and each hook with `before_run` has one part,
    in the order of the calls. The part of a hook that fetches nothing is None.
    """

    def __init__(
        self,
        graph: Graph,
        before_run: Sequence[OrderGroup],
        after_run: Sequence[OrderGroup],
    ) -> None:
        """Take the graph, the hooks that make requests, and the hooks that get values, by order."""
        self._graph = graph
        self._names = [call.name for group in before_run for call in group.calls]
        """The name of each call of `before_run`, for messages."""
        requesting = [hook for group in before_run for hook in group.hooks]
        part_of = {hook: part for part, hook in enumerate(requesting, start=1)}
        # `_answers` appends values without results to those of the parts. A hook without
        # `before_run` has no part, and gets these, at -1.
        self._takes: list[Take] = [
            taking([part_of.get(hook, -1) for hook in group.hooks]) for group in after_run
        ]
        """Functions, one for each order group of `after_run`. Each takes the values of the hooks of
        its group out of the list of all values.
        """
        self._nones = (None,) * (len(requesting) + 1)
        self._empty_answers = self._answers(self._nones, RunRequest(None, None))
        self._merges: dict[tuple[Any, ...], tuple[tuple[Node, ...], Build]] = {}
        """A cache of merges without nested fetches: the nodes to fetch, and the function that
        builds the parts. The same merge may have two keys: the fetches of the caller and each hook;
        and the fetches of the caller with the requests of the hooks, which is quicker to look up.
        """

    def merge(self, request: RunRequest, requests: Sequence[SessionRunArgs | None]) -> RunRequest:
        """Return the request of the caller, merged with the request of each hook.

        `requests` has a request or None for each call of `before_run`. Without any request of a
        hook, the result has no `build`: its values are those of the caller.

        Raises:
            InvalidHookError: a hook has returned something else.
            FeedConflictError: a node is fed twice.
            FetchError: a name is not in the graph.
        """
        if not _has_request(requests):
            if request.options is None:
                return request
            # The hooks of each attempt get a `run_metadata` of their own, which a new request has.
            return RunRequest(request.fetches, request.feed_dict, request.options)
        # Hot path: look up the merge of the same requests. The types are checked first, because a
        # plain tuple is equal to a `SessionRunArgs`, but is rejected below.
        key = (request.fetches, *requests)
        if _REQUEST_OR_NOTHING.issuperset(map(type, requests)):
            try:
                nodes, build = self._merges[key]
            except (KeyError, TypeError):
                # The merge is new; or a request has feeds, options or nested fetches, so that it is
                # not kept or cannot be hashed.
                pass
            else:
                return RunRequest(nodes, request.feed_dict, request.options, build)
        # Otherwise check the request of each hook, and collect its fetches, feeds and options.
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
            # To unpack the tuple takes half the time of its three attributes.
            added_fetches, feed_dict, options = added
            fetches.append(added_fetches)
            if feed_dict is not None:
                feeds.append((name, feed_dict))
            if options is not None:
                hook_options.append((name, options))
        # Then merge each of the three. Feeds and options differ from run to run, so a merge with
        # them is not kept by the requests.
        is_plain = not feeds and not hook_options
        nodes, build = self._merge_fetches(tuple(fetches), key if is_plain else None)
        feed_dict = request.feed_dict
        if feeds:
            feed_dict = _merge_feeds(self._graph, [*feeds, ("the caller", feed_dict)])
        options = request.options
        if hook_options:
            options = _merge_options([("the caller", options), *hook_options])
        return RunRequest(nodes, feed_dict, options, build)

    def _merge_fetches(
        self, fetches: tuple[Any, ...], key: tuple[Any, ...] | None
    ) -> tuple[tuple[Node, ...], Build]:
        """Return the distinct nodes, and the function that builds the parts from their values.

        Without nested fetches, they are kept by the fetches, and also by `key` if it is given.
        """
        # Nested fetches are not kept: they may be equal, and the results have different shapes.
        if not _LEAF_OR_NOTHING.issuperset(map(type, fetches)):
            return self._new_merge(fetches)
        merged = self._merges.get(fetches)
        if merged is None:
            merged = self._new_merge(fetches)
            self._keep_merge(fetches, merged)
        if key is not None:
            self._keep_merge(key, merged)
        return merged

    def _keep_merge(self, key: tuple[Any, ...], merged: tuple[tuple[Node, ...], Build]) -> None:
        """Add a merge to the cache, which is emptied when it is full."""
        if len(self._merges) >= _MOST_MERGES:
            self._merges.clear()
        self._merges[key] = merged

    def _new_merge(self, fetches: tuple[Any, ...]) -> tuple[tuple[Node, ...], Build]:
        """Make the distinct nodes, and the function that builds the parts from their values.

        Args:
            fetches: what the caller fetches, followed by what each hook with `before_run` fetches,
                of which there is at least one.
        """
        # This collects the nodes that the parts need, while it makes the builder of each part.
        leaves = Leaves(self._graph)
        builders = [leaves.build(fetches[0])]
        for owner, fetched in zip(self._names, fetches[1:], strict=True):
            try:
                builders.append(_build_none if fetched is None else leaves.build(fetched))
            except FetchError as error:
                add_note(error, f"fetched by {owner}")
                raise
        build: Build = partial(_build_parts, builders)
        if LEAF_TYPES.issuperset(map(type, fetches)):
            # Hot path: if each part is a single node, this builds all parts in a quarter of the
            # time. For several places, `itemgetter` returns a tuple.
            build = operator.itemgetter(*map(leaves.place, fetches))
        return leaves.nodes, build

    def split(self, request: RunRequest, values: Any) -> tuple[Any, Answers]:
        """Split the values of a run.

        Args:
            request: the request that `merge` has returned.
            values: if the request has a `build`, what it has built: the caller's result, followed
                by a value for each hook with `before_run`. Otherwise the caller's result alone.

        Returns:
            The result for the caller, and the values for the hooks of `after_run`.
        """
        if request.build is not None:
            result, *_ = values
            return result, self._answers(values, request)
        if request.options is not None:
            # No hook has fetched anything, but all get the options and the metadata of this run.
            return values, self._answers(self._nones, request)
        # Hot path: without options, the values of hooks that fetch nothing are always the same.
        return values, self._empty_answers

    def _answers(self, parts: Sequence[Any], request: RunRequest) -> Answers:
        """Return the values of each hook of `after_run`, by order group, given all parts."""
        options = request.options
        metadata = request.run_metadata
        answers = [_new_tuple(SessionRunValues, (part, options, metadata)) for part in parts]
        # The last values are for hooks without a part.
        answers.append(_new_tuple(SessionRunValues, (None, options, metadata)))
        return [take(answers) for take in self._takes]


def _build_none(_: Sequence[Any]) -> None:
    """Build the part of a hook that fetches nothing."""


def _build_parts(builders: Sequence[Build], values: Sequence[Any]) -> list[Any]:
    """Build the parts of the caller and the hooks from the values of all nodes."""
    return [build(values) for build in builders]


def _has_request(requests: Sequence[SessionRunArgs | None]) -> bool:
    """Return whether any hook has made a request."""
    # Not `requests.count(None)`, which compares with `==`: if a hook has returned an array by
    # mistake, that compares each of its elements.
    for added in requests:  # noqa: SIM110 - a generator takes longer, in each run
        if added is not None:
            return True
    return False


def _merge_feeds(
    graph: Graph, requests: Sequence[tuple[str, Mapping[Any, Any] | None]]
) -> dict[Node, Any]:
    """Merge the feeds of several owners into a new dict by node.

    Args:
        graph: the graph.
        requests: the name of each owner, for messages, and its feeds by node or name.

    Raises:
        FeedConflictError: several owners feed the same node.
        FetchError: a name is not in the graph.
    """
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
                # Copy it, so that no list of an owner is shared with the merged options.
                merged[key] = copy.copy(value)
    return merged


def _merged_option(old: Any, new: Any) -> Any:
    """Merge two values of one option by the rules of `_merge_options`."""
    if isinstance(old, bool) and isinstance(new, bool):
        return old or new
    if isinstance(old, (int, float)) and isinstance(new, (int, float)):
        return max(old, new)
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        return [*old, *new]
    return new
