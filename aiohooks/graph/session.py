"""The raw session: runs of a graph's operations, each of which changes everything or nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import operator
import types
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, NoReturn, overload

from aiohooks._aio.cancel import DEFAULT_GRACE_SECS, shielded
from aiohooks._aio.contexts import changes, copy_back, current_scope
from aiohooks._aio.observers import Observer, observed_call, observing
from aiohooks._aio.overlap import Overlap, RunWaits, Wait, result_now
from aiohooks._validate import check_instance, check_secs
from aiohooks.checkpoint.stateful import HostMemory, Stateful, snapshot
from aiohooks.dispatch.calls import NO_KEYWORDS
from aiohooks.errors import (
    FetchError,
    GraphError,
    InvalidArgumentError,
    SessionClosedError,
    UpdateConflictError,
    WrongLoopError,
    did_you_mean,
)
from aiohooks.graph.graph import (
    MISSING,
    A,
    B,
    C,
    D,
    FeedDict,
    Four,
    Graph,
    Node,
    Operation,
    Options,
    Output,
    Three,
    Two,
)
from aiohooks.graph.plan import LEAF_TYPES, Build, Leaves, Plan, PlannedOperation, canonical_feeds
from aiohooks.graph.variables import Variables, values_of
from aiohooks.stores.base import StepStore
from aiohooks.stores.memory import MemoryStepStore

if TYPE_CHECKING:
    from aiohooks.checkpoint import Restored, Saver


_MOST_PLANS = 1024
_FIRST = operator.itemgetter(0)
"""Builds the result of a single leaf."""
# A constant, as every run begins with it.
_ATTEMPTS = range(100)
"""The attempts of a run that other runs overtake; it must not be repeated indefinitely."""


@dataclasses.dataclass(frozen=True)
class Monitor:
    """What a raw session needs of the monitored session that it is part of."""

    grace_secs: float
    stateful_hooks: Callable[[], Mapping[str, Stateful]]
    state_of: Callable[[Stateful], Any]
    drain_hooks: Callable[[], Awaitable[None]]


class Session:
    """Runs the operations that a set of fetches needs: each once, independent ones concurrently.

    A run reads each variable once, at its start. When every operation has succeeded, the new values
    of variables and the global step are committed together; a run that fails or is cancelled
    changes nothing. Runs of one session may be concurrent; only those of a monitored session take
    turns. If another run has replaced a variable that a run has read and replaces itself
    (`updates=`), its operations run once more, with the new value: no update is lost.

    The first operation that may wait and the later ones have contexts of their own: with the
    context variables that are set by the operations whose results they need. At the end, the
    caller's context has the variables that all of them have set; the last operation wins.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        global_step: StepStore | None = None,
        variables: Variables | None = None,
        grace_secs: float | None = None,
    ) -> None:
        """Open a session. It holds no resources; closing it only makes `run` raise.

        Args:
            graph: the graph to run.
            global_step: the store of the global step; by default one of its own.
            variables: the values of the variables; by default its own.
            grace_secs: how long a cancelled run waits for calls that do not end immediately, such
                as those in worker threads. By default 10 s, or the `stop_grace_period_secs` of the
                monitored session that uses this one.
        """
        check_instance(graph, Graph, "graph")
        check_instance(global_step, StepStore, "global_step", optional=True)
        check_instance(variables, Variables, "variables", optional=True)
        check_secs(grace_secs, "grace_secs", optional=True)
        self.graph: Graph = graph
        """The graph that is run."""
        self.global_step: StepStore = MemoryStepStore() if global_step is None else global_step
        """The step store: `session.global_step.latest.step`."""
        self.variables: Variables = variables or Variables()
        """The values of the variables; see `variables.snapshot` and `variables.assign`."""
        self.committed_step: int = self.global_step.latest.step
        """The global step after the latest run of this session."""
        self.grace_secs: float = DEFAULT_GRACE_SECS if grace_secs is None else grace_secs
        """How long a cancelled run waits for calls that do not end immediately."""
        self._has_own_grace = grace_secs is not None
        self._monitor: Monitor | None = None
        self.tracked: Mapping[str, Stateful] = {}
        """The objects saved in checkpoints besides the variables: the scaffold's `tracked`."""
        self.saver: Saver | None = None
        """The saver from which the creator of this session restores."""
        self.saved: bool = False
        """Whether a hook saves the session in checkpoints; set it in a hook of your own that does.

        Otherwise a warning says that no hook does.
        """
        self.restored: Restored | None = None
        """The restored checkpoint of this session; its `state` has only the states of hooks."""
        self._snapshot_memory = HostMemory()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._plans: dict[tuple[Any, tuple[Any, ...], bool], Plan] = {}
        initial = {variable.name: variable.initial for variable in graph.variables}
        # Variables that are added to the graph later have no values here.
        self._variable_names = tuple(initial)
        self._values = values_of(self.variables)
        self._values.initialize(initial)

    @property
    def closed(self) -> bool:
        """Whether `aclose` was called."""
        return self._closed

    @overload
    async def run(self, fetches: Node[A], feed_dict: FeedDict = None) -> A: ...
    @overload
    async def run(self, fetches: Two[A, B], feed_dict: FeedDict = None) -> tuple[A, B]: ...
    @overload
    async def run(self, fetches: Three[A, B, C], feed_dict: FeedDict = None) -> tuple[A, B, C]: ...
    @overload
    async def run(
        self, fetches: Four[A, B, C, D], feed_dict: FeedDict = None
    ) -> tuple[A, B, C, D]: ...
    @overload
    async def run(
        self,
        fetches: Any,
        feed_dict: FeedDict = None,
        *,
        options: Options = None,
        run_metadata: dict[str, Any] | None = None,
    ) -> Any: ...
    async def run(
        self,
        fetches: Any,
        feed_dict: FeedDict = None,
        *,
        options: Options = None,
        run_metadata: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operations that `fetches` needs, and return the values in the same shape.

        A step function is run whatever is fetched, unless that is nothing or the global step alone.

        Args:
            fetches: nodes or names, nested in lists, tuples, mappings and dataclasses.
            feed_dict: values by node or name, for this run only; a fed node is not computed.
            options: not accepted here; for sessions with a `run` of their own.
            run_metadata: a dict into which such a session may write.

        Raises:
            FetchError: a name is unknown, or a placeholder is not fed.
            GraphError: the operations cannot be ordered.
            InvalidArgumentError: options are given.
            SessionClosedError: the session is closed.
            UpdateConflictError: other runs kept replacing a variable that this one replaces.
            WrongLoopError: the session was used in another event loop before.
            BaseException: the error of an operation, unchanged; several as one group.
        """
        if options:
            raise InvalidArgumentError(
                f"options is {options!r}, and this session knows none: they are for a Session"
                " subclass with a `run` of its own; for a time limit use `async with"
                " asyncio.timeout(...)`"
            )
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise WrongLoopError(
                "this session belongs to another event loop; make one in each loop, and share a"
                " step store by URL"
            )
        return await self._run(None, fetches, feed_dict)

    def _run(
        self,
        waits: RunWaits | None,
        fetches: Any,
        feed_dict: Mapping[Any, Any] | None,
        options: object = None,
        run_metadata: object = None,
        build: Build | None = None,
    ) -> Awaitable[Any]:
        """Make a run: by itself, or as part of the run that has `waits`.

        If the caller gives `build`, that builds the result from the values of a tuple of leaves.
        """
        if self._closed:
            self._check_open()  # raises
        plan = None
        own_build: Build = _FIRST
        # A leaf or a tuple of leaves, as the monitored session fetches, is looked up as it is.
        kind: Any = type(fetches)  # pyright: ignore[reportUnknownVariableType]
        if kind is tuple or kind in LEAF_TYPES:
            try:
                fed_keys = () if feed_dict is None else tuple(feed_dict)
                plan = self._plans.get((fetches, fed_keys, waits is None))
            except TypeError:
                # A part cannot be hashed, such as a list in a tuple.
                plan = None
            if kind is tuple:
                own_build = tuple
        if plan is None:
            plan, own_build, feed_dict = self._plan(fetches, feed_dict, waits is None)
        given: list[Any] = [MISSING]
        if feed_dict:
            for value in feed_dict.values():
                given.append(value)
                if isinstance(value, Node):
                    canonical_feeds(self.graph, feed_dict)  # raises
        return self._run_plan(plan, build or own_build, given, waits)

    async def _run_plan(
        self, plan: Plan, build: Build, given: list[Any], waits: RunWaits | None
    ) -> Any:
        """Call the operations of a plan and commit their results, until no other run interferes."""
        for _ in _ATTEMPTS:
            values = given + plan.template
            values[0] = self.global_step.latest.step
            for slot, name in plan.variables:
                values[slot] = self._values.by_name[name]
            operations: Sequence[PlannedOperation] = plan.operations
            scope = current_scope.get()
            if scope is not None and scope.observers:
                operations = [_observed(operation, scope.observers) for operation in operations]
            calls: OperationCalls | None = None
            slot = 0
            try:
                for operation in operations:
                    slot = operation.slot
                    if operation.may_wait:
                        calls = OperationCalls(self, operations, values, waits)
                        calls.start_ready()
                        break
                    result = operation.call(values)
                    if operation.is_async:
                        result = await result
                    elif type(result) is types.CoroutineType:
                        _reject_coroutine(operation.name, result)
                    values[slot] = result
            except BaseException as error:
                calls = calls or OperationCalls(self, operations, values, waits)
                calls.failed(slot, error)
            if calls is not None:
                await calls.wait()
            # Built before the commit: if it cannot be built, the run must change nothing.
            result = build(plan.take_fetched(values))
            store = self.global_step
            # Spelled out here, as most runs of a step function end so.
            if not plan.changes and (store.inline or not plan.steps):
                self.committed_step = (
                    store.advance_nowait(plan.steps) if plan.steps else store.latest.step
                )
                return result
            if await self._commit(plan, values, waits):
                return result
            # After a recovery another session has the variables.
            self._check_open()
            _drop_effects(waits)
        names = ", ".join(map(repr, plan.replaced))
        raise UpdateConflictError(
            f"this run replaces {names} (updates=), and in each of its {len(_ATTEMPTS)} attempts"
            " another one had done so since it began; add to a variable with adds_to=, or let the"
            " runs take turns"
        )

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosedError(
                "this session is closed; use the session that the latest after_create_session got"
            )

    def _plan(
        self, fetches: Any, feed_dict: Mapping[Any, Any] | None, raw: bool
    ) -> tuple[Plan, Build, Mapping[Node, Any]]:
        """Return the plan of a run, the function that builds its result, and the feeds by node.

        Nested fetches and feeds have the plan of the tuple of their nodes. `raw` says that the run
        is not part of a monitored one.
        """
        leaves = Leaves(self.graph)
        build = leaves.build(fetches)
        feeds = canonical_feeds(self.graph, feed_dict)
        nodes = leaves.nodes
        request: Any = (nodes, tuple(feeds), raw)
        parts: Any = (fetches,)
        if type(fetches) is tuple:
            parts = fetches  # pyright: ignore[reportUnknownVariableType]
        fed_keys = tuple(feed_dict or ())
        # A tuple with a repeated leaf counts as nested: it has more parts than the plan has nodes.
        if len(parts) == len(nodes) and LEAF_TYPES.issuperset(map(type, (*parts, *fed_keys))):
            request = (fetches, fed_keys, raw)
        if request not in self._plans:
            step = self._step_to_run(nodes, tuple(feeds), raw)
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[request] = Plan(self.graph, nodes, feeds, self.grace_secs, step)
        return self._plans[request], build, feeds

    def _step_to_run(
        self, nodes: tuple[Node, ...], fed: tuple[Node, ...], raw: bool
    ) -> Operation | None:
        """Return the operation of a step function, unless the run leaves it out.

        Raises:
            FetchError: nothing would run; or a fed name is neither a parameter nor fetched, so it
                is probably misspelt.
        """
        step = self.graph.step_operation
        if step is None:
            if nodes or raw:
                return None
            known = [name for name, node in self.graph.nodes.items() if isinstance(node, Operation)]
            raise FetchError(
                "neither the caller nor a hook fetches anything, so nothing would run;"
                f" operations are: {known}"
            )
        results = [node for node in fed if isinstance(node, Output)]
        for node in results:
            if node not in nodes:
                raise FetchError(
                    f"{node.name!r} is fed, and is neither a parameter of step {step.name!r} nor"
                    f" fetched; {did_you_mean(node.name, step.inputs)}",
                    name=node.name,
                )
        # A hook may read the global step with a raw run.
        if results or (raw and {self.graph.global_step}.issuperset(nodes)):
            return None
        return step

    def _commit(self, plan: Plan, values: list[Any], waits: RunWaits | None) -> Awaitable[bool]:
        """Commit the changes of a run; return false, and change nothing, if it was overtaken.

        A run is overtaken if a variable that it replaces was replaced since the run read it.
        """
        commit = self._commit_changes(plan, values, waits)
        if not plan.steps or self.global_step.inline:
            return commit
        return Wait[bool]("commit of the variables and the global step", waits=waits).result_of(
            commit
        )

    async def _commit_changes(self, plan: Plan, values: list[Any], waits: RunWaits | None) -> bool:
        by_name = self._values.by_name
        for slot, name in plan.variables:
            # Values are not changed in place: another value is another object.
            if name in plan.replaced and by_name[name] is not values[slot]:
                return False
        new = self._values.prepare(plan.changes, values)
        store = self.global_step
        if not plan.steps or store.inline:
            # First, as the store may reject the step; nothing is awaited before the values are set.
            self.committed_step = (
                store.advance_nowait(plan.steps) if plan.steps else store.latest.step
            )
            by_name.update(new)
            return True
        # Before the step: a waiter for it, in any process, must find the variables of that step.
        old = {name: by_name[name] for name in new}
        by_name.update(new)
        waits = waits or RunWaits()
        scope = waits.scope
        attempt = None if scope is None else scope.attempt

        async def advance() -> None:
            # In this task: if the run is cancelled meanwhile, it is committed or undone all the
            # same.
            try:
                self.committed_step = await store.advance(plan.steps)
            except Exception:
                # Values that another session has committed since then stay.
                by_name.update({name: old[name] for name in new if by_name[name] is new[name]})
                raise
            if scope is not None:
                scope.committed = True
            if attempt is not None:
                attempt.committed = True

        await shielded(advance(), grace_secs=self.grace_secs, what="advance of the global step")
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the content of a checkpoint.

        It has the graph's "variables", and the states of "tracked" objects and of "hooks", by name.
        Values of variables are not copied, because a commit replaces a value and never modifies
        it. States are copied, their tensors to the memory of the host.

        Raises:
            InvalidHookError: two stateful hooks have the same name.
        """
        states = {
            "tracked": {name: self.state_of(tracked) for name, tracked in self.tracked.items()},
            "hooks": {name: hook.state_dict() for name, hook in self.stateful_hooks().items()},
        }
        # One call for both: tensors that share memory share it in the copy.
        copies = snapshot(states, self._snapshot_memory)
        return {
            "variables": {name: self._values.by_name[name] for name in self._variable_names},
            "tracked": copies["tracked"],
            "hooks": copies["hooks"],
        }

    def stateful_hooks(self) -> Mapping[str, Stateful]:
        """Return the hooks of the monitored session that are saved in checkpoints, by name.

        Raises:
            InvalidHookError: two of them have one name.
        """
        if self._monitor is None:
            return {}
        return self._monitor.stateful_hooks()

    def state_of(self, tracked: Stateful) -> Any:
        """Return the state of a tracked object for a checkpoint.

        For feeds that are prefetched it is the state after the last element that was used.
        """
        if self._monitor is None:
            return tracked.state_dict()
        return self._monitor.state_of(tracked)

    async def drain_hooks(self) -> None:
        """Wait for the background calls of the hooks that are saved in checkpoints.

        Call it before `state_dict`.
        """
        if self._monitor is not None:
            await self._monitor.drain_hooks()

    async def aclose(self) -> None:
        """Close the session; closing twice is harmless.

        Its variables and global step stay readable.
        """
        self._closed = True

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        return f"<Session at step {self.global_step.latest.step}{closed}>"


GatheredRun = Callable[..., Awaitable[Any]]
"""`Session.run` as part of another run.

The arguments: its waits, fetches, feeds, options, metadata, and a `Build` if wanted.
"""


def monitored_run(session: Session, monitor: Monitor) -> GatheredRun:
    """Make a session part of a monitored one; return the function that runs it as part of a run.

    An overridden `run` is called as one wait.
    """
    # A session creator may return a session of another class.
    if isinstance(session, Session):  # pyright: ignore[reportUnnecessaryIsInstance]
        session._monitor = monitor  # pyright: ignore[reportPrivateUsage]
        if not session._has_own_grace:  # pyright: ignore[reportPrivateUsage]
            session.grace_secs = monitor.grace_secs
    if getattr(type(session), "run", None) is Session.run and "run" not in vars(session):
        return session._run  # pyright: ignore[reportPrivateUsage]

    async def run(
        waits: RunWaits,
        fetches: Any,
        feed_dict: Any,
        options: Any,
        run_metadata: Any,
        build: Build | None = None,
    ) -> Any:
        further = {} if options is None else {"options": options, "run_metadata": run_metadata}
        wait = Wait[Any]("run of the session", waits=waits)
        values = await wait.result_of(session.run(fetches, feed_dict=feed_dict, **further))
        if build is not None:
            values = build(values)
        return values

    return run


def was_fed(session: object) -> bool:
    """Return whether runs of a session were fed, as far as their plans are kept."""
    if not isinstance(session, Session):
        return False
    plans = session._plans  # pyright: ignore[reportPrivateUsage]
    return any(fed for _, fed, _ in plans)


def _drop_effects(waits: RunWaits | None) -> None:
    """Drop the effects that operations of a monitored run have recorded, as they are repeated."""
    # A run within another run does not know which of the recorded effects are its own.
    if waits is not None and waits.scope is not None and waits.scope.attempt is not None:
        attempt = waits.scope.attempt
        del attempt.effects[attempt.effects_before_run :]


def _reject_coroutine(name: str, coro: Any) -> NoReturn:
    coro.close()
    raise GraphError(
        f"operation {name!r} is a plain function that returned a coroutine; write it as `async def`"
    )


def _observed(operation: PlannedOperation, observers: Sequence[Observer]) -> PlannedOperation:
    """Return an operation of the graph with `observers` that are notified of its call."""
    if not operation.of_graph:
        return operation
    if operation.is_async:
        call = functools.partial(
            observed_call, operation.call, "operation", operation.name, observers
        )
        return dataclasses.replace(operation, call=call)

    def observed(values: list[Any]) -> Any:
        with observing(observers, "operation", operation.name):
            return operation.call(values)

    return dataclasses.replace(operation, call=observed)


class OperationCalls(Overlap):
    """The calls of a run from the first operation that may wait, or has failed; numbered by slot.

    A call starts when its inputs are ready, in a context with what the operations that it needs
    have set.
    """

    kind = "operation"

    def __init__(
        self,
        session: Session,
        operations: Sequence[PlannedOperation],
        values: list[Any],
        waits: RunWaits | None,
    ) -> None:
        super().__init__(values, session.grace_secs, waits)
        self._session = session
        self._operations = operations
        self._caller = copy_context()
        self._call_contexts: dict[int, tuple[Context, Context]] = {}
        """The context of each call, as it was before the call and as it is."""
        self._setters: dict[int, set[int]] = {}
        """The calls that each call depends on and that have set something in their contexts."""

    def start_ready(self) -> None:
        """Start the operations whose inputs are ready, in the order of the plan."""
        values = self.results
        for operation in self._operations:
            if self.failing:
                return
            slot = operation.slot
            is_called = slot in self._call_contexts or values[slot] is not MISSING
            if not is_called and all(values[needed] is not MISSING for needed in operation.inputs):
                self._start(operation)

    def _start(self, operation: PlannedOperation) -> None:
        slot = operation.slot
        call = operation.call
        values = self.results
        context = self._context(operation)
        if operation.may_wait:
            self.start(slot, call, (values,), NO_KEYWORDS, operation.name, context=context)
            return
        try:
            result = context.run(call, values)
            if operation.is_async:
                result = context.run(result_now, result)
            elif type(result) is types.CoroutineType:
                _reject_coroutine(operation.name, result)
            values[slot] = result
        except BaseException as error:
            self.failed(slot, error)

    def succeeded(self, number: int) -> None:
        self.start_ready()

    def _context(self, operation: PlannedOperation) -> Context:
        """Return a new context for a call, with what its inputs' operations have set."""
        setters: set[int] = set()
        for needed in operation.inputs:
            if needed in self._call_contexts:
                setters |= self._setters[needed]
                if changes(*self._call_contexts[needed]):
                    setters.add(needed)
        before = self._caller
        if setters:
            before = before.copy()
            before.run(copy_back, [self._call_contexts[slot] for slot in sorted(setters)])
        context = before.copy()
        self._call_contexts[operation.slot] = (before, context)
        self._setters[operation.slot] = setters
        return context

    def finish(self) -> None:
        self._contexts = [self._call_contexts[slot] for slot in sorted(self._call_contexts)]
        super().finish()

    def describe(self, number: int) -> str:
        name = next(operation.name for operation in self._operations if operation.slot == number)
        return f"operation {name!r} at step {self._session.global_step.latest.step + 1}"
