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
from aiohooks.dispatch.effects import Recorder, call_as
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
_ATTEMPTS = range(100)  # made once: every run begins with it
"""How often a run is tried while others replace the variables that it replaces; it must not be
repeated indefinitely.
"""


async def _nothing() -> None:
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class Monitor:
    """What a raw session asks of the monitored session that it is part of; by default it is part of
    none.
    """

    grace_secs: float = DEFAULT_GRACE_SECS
    stateful_hooks: Callable[[], Mapping[str, Stateful]] = dict
    state_of: Callable[[Stateful], Any] = operator.methodcaller("state_dict")
    drain_hooks: Callable[[], Awaitable[None]] = _nothing


_UNMONITORED = Monitor()


class Session:
    """Runs the operations that a set of fetches needs: each once, independent ones at the same
    time.

    A run reads each variable once, at its start. When every operation has succeeded, the new values
    of variables and the global step are committed together; a run that fails or is cancelled
    changes nothing. Runs of one session may be concurrent; only those of a monitored session take
    turns. If another run has replaced a variable that a run has read and replaces itself
    (`updates=`), its operations run once more, with the new value: no update is lost.

    From the first operation that may wait on, each has a context of its own: with what those have
    set whose results it needs. At the end, the caller's has what all have set, the last in the
    order of the operations.
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
            grace_secs: how long a cancelled run waits for what does not end immediately, such as
                worker threads. By default 10 s, or the `stop_grace_period_secs` of the monitored
                session that uses this one.
        """
        check_instance(graph, Graph, "graph")
        check_instance(global_step, StepStore, "global_step", optional=True)
        check_instance(variables, Variables, "variables", optional=True)
        check_secs(grace_secs, "grace_secs", optional=True)
        self.graph: Graph = graph
        """The graph that is run."""
        self.global_step: StepStore = MemoryStepStore() if global_step is None else global_step
        """The step store: `session.global_step.latest.step`."""
        self.variables: Variables = Variables() if variables is None else variables
        """The values of the variables: read with `variables.snapshot()`, replaced with
        `variables.assign({name: value})`.
        """
        self.committed_step: int = self.global_step.latest.step
        """The global step after the latest run of this session."""
        self.grace_secs: float = DEFAULT_GRACE_SECS if grace_secs is None else grace_secs
        """How long a cancelled run waits for what does not end immediately."""
        self._has_own_grace = grace_secs is not None
        self._monitor: Monitor = _UNMONITORED
        self.tracked: Mapping[str, Stateful] = {}
        """The objects saved in checkpoints besides the variables: the scaffold's `tracked`."""
        self.saver: Saver | None = None
        """The saver from which the creator of this session restores."""
        self.saved: bool = False
        """Whether a hook saves it in checkpoints: set it in one of your own, or a warning says that
        none does.
        """
        self.restored: Restored | None = None
        """The checkpoint that this session was restored from; its `state` has only the states of
        hooks.
        """
        self._snapshot_memory = HostMemory()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._plans: dict[tuple[Any, tuple[Any, ...], bool], Plan] = {}
        initial = {variable.name: variable.initial for variable in graph.variables}
        self._variable_names = tuple(initial)
        self._values = values_of(self.variables)
        self._values.initialise(initial)

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
        """Run what `fetches` needs and return its values in the same shape.

        The step of a step function is run whatever is fetched, unless that is nothing or the global
        step alone.

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
        if self._loop is not loop:
            if self._loop is not None:
                raise WrongLoopError(
                    "this session belongs to another event loop; make one in each loop, and share a"
                    " step store by URL"
                )
            self._loop = loop
        return await self._run(None, fetches, feed_dict)

    async def _run(
        self,
        waits: RunWaits | None,
        fetches: Any,
        feed_dict: Mapping[Any, Any] | None,
        options: object = None,
        run_metadata: object = None,
        build: Build | None = None,
    ) -> Any:
        """Make a run: by itself, or as part of what has `waits`; `build` makes the result of the
        values of a tuple of leaves.
        """
        self._check_open()
        # The plan for a tuple of leaves (what the monitored session asks for) or a single one is
        # looked up directly.
        kind: Any = type(fetches)  # pyright: ignore[reportUnknownVariableType]
        try:
            key = (fetches, () if feed_dict is None else tuple(feed_dict), waits is None)
            plan = self._plans.get(key) if kind is tuple or kind in LEAF_TYPES else None
        except TypeError:  # something unhashable inside
            plan = None
        if plan is None:
            plan, own_build, feed_dict = self._plan(fetches, feed_dict, waits is None)
            build = build or own_build
        values = plan.template.copy()
        slot = 0
        if feed_dict:
            for key in feed_dict:
                value = values[slot] = feed_dict[key]
                slot += 1  # `enumerate` costs more than the rest of the loop
                if isinstance(value, Node):
                    canonical_feeds(self.graph, feed_dict)  # raises
        operations: Sequence[PlannedOperation] = plan.operations
        scope = current_scope.get() if waits is None else waits.scope
        if scope is not None and scope.observers:
            operations = [_observed(one, scope.observers) for one in operations]
        recording: Any = (
            waits.recording if waits is not None else None if scope is None else scope.recording
        )
        mark = None
        if recording is not None:
            recording.turn = (_called_in_turn, operations, values)
            mark = (
                None if waits is None else recording.mark()
            )  # a run within another does not know what is its own
        store = self.global_step
        for _ in _ATTEMPTS:
            for slot, name in plan.variables:
                values[slot] = self._values.by_name[name]
            for slot in plan.step_slots:
                values[slot] = store.latest.step
            calls: OperationCalls | None = None
            try:
                for one in operations:
                    slot = one.slot
                    if one.may_wait:
                        calls = OperationCalls(self, operations, values, waits)
                        calls.start_ready()
                        break
                    result = one.call(values)
                    if one.is_async:
                        result = await result
                    elif type(result) is types.CoroutineType:
                        _refuse_coroutine(one.name, result)
                    values[slot] = result
            except BaseException as error:
                calls = calls or OperationCalls(self, operations, values, waits)
                calls.failed(slot, error)
            if calls is not None:
                await calls.wait()
            # Made before the commit: what cannot be made must change nothing.
            fetched = plan.take_fetched(values)
            made = build(fetched) if build is not None else fetched if kind is tuple else fetched[0]
            if not plan.changes and (store.inline or not plan.steps):
                self.committed_step = (
                    store.advance_nowait(plan.steps) if plan.steps else store.latest.step
                )
                return made
            commit = self._commit(plan, values, waits)
            if waits is not None and not store.inline:
                commit = Wait[bool](
                    "commit of the variables and the global step", waits=waits
                ).result_of(commit)
            if await commit:
                return made
            self._check_open()  # after a recovery, another session has the variables
            values[plan.number_fed :] = plan.template[plan.number_fed :]
            if recording is not None and mark is not None:
                recording.rewind(mark)
        names = ", ".join(repr(name) for _, name in plan.replaced)
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
        """Return the plan of a run, new or known, the function that shapes the result, and the
        feeds by node.
        """
        leaves = Leaves(self.graph)
        build = leaves.build(fetches)
        feeds = canonical_feeds(self.graph, feed_dict)
        nodes, fed = leaves.nodes, tuple(feeds)
        plan = self._plans.get((nodes, fed, raw))
        if plan is None:
            plan = Plan(self.graph, nodes, fed, self.grace_secs, self._step_to_run(nodes, fed, raw))
            self._keep_plan((nodes, fed, raw), plan)
        kind: Any = type(fetches)  # pyright: ignore[reportUnknownVariableType]
        flat = (
            kind is tuple
            and len(fetches) == len(nodes)
            and LEAF_TYPES.issuperset(map(type, fetches))
        )
        if (flat or kind in LEAF_TYPES) and not any(
            isinstance(key, tuple) for key in feed_dict or ()
        ):
            self._keep_plan((fetches, tuple(feed_dict or ()), raw), plan)
        return plan, build, feeds

    def _keep_plan(self, key: tuple[Any, tuple[Any, ...], bool], plan: Plan) -> None:
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        self._plans[key] = plan

    def _step_to_run(
        self, nodes: tuple[Node, ...], fed: tuple[Node, ...], raw: bool
    ) -> Operation | None:
        """Return the operation of a step function, if this is its graph and the run does not leave
        it out.

        Raises:
            FetchError: nothing would run; or what is fed is neither a parameter nor fetched, so it
                is probably misspelt.
        """
        step = self.graph.step_operation
        if step is None:
            if not nodes and not raw:
                known = [
                    name for name, node in self.graph.nodes.items() if isinstance(node, Operation)
                ]
                raise FetchError(
                    "neither the caller nor a hook fetches anything, so nothing would run;"
                    f" operations are: {known}"
                )
            return None
        results = [node for node in fed if isinstance(node, Output)]
        for node in results:
            if node not in nodes:
                raise FetchError(
                    f"{node.name!r} is fed, and is neither a parameter of step {step.name!r} nor"
                    f" fetched; {did_you_mean(node.name, step.inputs)}",
                    name=node.name,
                )
        # A hook may read the global step with a raw run.
        return None if results or (raw and {self.graph.global_step}.issuperset(nodes)) else step

    async def _commit(self, plan: Plan, values: list[Any], waits: RunWaits | None) -> bool:
        """Commit the changes of a run; return False, and change nothing, if a variable was replaced
        since the run read it.
        """
        store, variables = self.global_step, self._values
        current = variables.by_name
        for slot, name in plan.replaced:
            if (
                current[name] is not values[slot]
            ):  # values are not changed in place: another one is another object
                return False
        new = variables.prepare(plan.changes, values)
        if store.inline or not plan.steps:
            # First, as it can be refused; nothing is awaited before the new values are set.
            self.committed_step = (
                store.advance_nowait(plan.steps) if plan.steps else store.latest.step
            )
            variables.by_name.update(new)
            return True
        # Before the step: a waiter for it, in any process, must find the variables of that step.
        old = {name: current[name] for name in new}
        variables.by_name.update(new)
        # A run within another one does not know what is its own.
        scope, recording = (None, None) if waits is None else (waits.scope, waits.recording)
        attempt = None if recording is None else recording.context

        async def advance() -> None:
            # In this task: if the run is cancelled meanwhile, it is committed or undone all the
            # same.
            try:
                self.committed_step = await store.advance(plan.steps)
            except Exception:
                # The step was refused: undo this run. Values that another session has committed
                # since then stay.
                variables.by_name.update(
                    {name: old[name] for name in new if current[name] is new[name]}
                )
                raise
            if scope is not None:
                scope.committed = True
            if recording is not None:
                recording.committed = attempt

        await shielded(advance(), grace_secs=self.grace_secs, what="advance of the global step")
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the content of a checkpoint: the graph's "variables", the states of "tracked"
        objects and of "hooks", by name.

        Values of variables are not copied, as a commit replaces them; states are, tensors to the
        memory of the host.

        Raises:
            InvalidHookError: two hooks with a state have one name.
        """
        states = {
            "tracked": {name: self.state_of(one) for name, one in self.tracked.items()},
            "hooks": {name: hook.state_dict() for name, hook in self.stateful_hooks().items()},
        }
        variables = {name: self._values.by_name[name] for name in self._variable_names}
        return {"variables": variables, **snapshot(states, self._snapshot_memory)}

    def stateful_hooks(self) -> Mapping[str, Stateful]:
        """Return the hooks of the monitored session that are saved in checkpoints, by name.

        Raises:
            InvalidHookError: two of them have one name.
        """
        return self._monitor.stateful_hooks()

    def state_of(self, one: Stateful) -> Any:
        """Return the state of a tracked object for a checkpoint: of feeds that are taken ahead, the
        one behind what was used.
        """
        return self._monitor.state_of(one)

    async def drain_hooks(self) -> None:
        """Wait for the background calls of the hooks that are saved in checkpoints; call it before
        `state_dict`.
        """
        await self._monitor.drain_hooks()

    async def aclose(self) -> None:
        """Close the session; closing twice is harmless. Its variables and global step stay
        readable.
        """
        self._closed = True

    def __repr__(self) -> str:
        return (
            f"<Session at step {self.global_step.latest.step}{', closed' if self._closed else ''}>"
        )


GatheredRun = Callable[..., Awaitable[Any]]
"""`Session.run` as part of another run. The arguments: its waits, fetches, feeds, options,
metadata; a build if wanted.
"""


def monitored_run(session: Session, monitor: Monitor) -> GatheredRun:
    """Make a session part of a monitored one; return what runs it as part of a run of that.

    An overridden `run` is called as one wait.
    """
    if isinstance(session, Session):  # pyright: ignore[reportUnnecessaryIsInstance] - a creator may make others
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
        return values if build is None else build(values)

    return run


def was_fed(session: object) -> bool:
    """Return whether runs of a session were fed, as far as their plans are remembered."""
    return isinstance(session, Session) and any(fed for _, fed, _ in session._plans)  # pyright: ignore[reportPrivateUsage]


def _refuse_coroutine(name: str, coro: Any) -> NoReturn:
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


def _called_in_turn(operations: Sequence[PlannedOperation], values: Sequence[Any]) -> Recorder:
    """Return the operation that is called now: the first without a value."""
    return next((one.name for one in operations if values[one.slot] is MISSING), "step"), 0


class OperationCalls(Overlap):
    """The operations of a run from the first that may wait on, or the one that has failed; the
    number of each is its slot.

    Each starts when the results that it needs are there, in a context with what the operations that
    it needs have set.
    """

    __slots__ = ("_caller", "_made", "_operations", "_recording", "_session", "_setters")

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
        scope = current_scope.get()
        self._recording = None if scope is None else scope.recording
        self._made: dict[int, tuple[Context, Context]] = {}
        self._setters: dict[
            int, set[int]
        ] = {}  # those of the operations before each that have set something

    def start_ready(self) -> None:
        """Start the operations that have all they need, in order of the plan."""
        values = self.results
        for one in self._operations:
            slot = one.slot
            if self.failing:
                return
            if (
                slot in self._made
                or values[slot] is not MISSING
                or any(values[needed] is MISSING for needed in one.inputs)
            ):
                continue
            context = self._context(one)
            if one.may_wait:
                call = (
                    one.call
                    if self._recording is None
                    else functools.partial(call_as, (one.name, 0), one.call)
                )
                self.start(slot, call, (values,), NO_KEYWORDS, one.name, context=context)
                continue
            if self._recording is not None:
                self._recording.turn = (tuple, (one.name, 0))
            try:
                result = context.run(one.call, values)
                if one.is_async:
                    result = context.run(result_now, result)
                elif type(result) is types.CoroutineType:
                    _refuse_coroutine(one.name, result)
                values[slot] = result
            except BaseException as error:
                self.failed(slot, error)

    def succeeded(self, number: int) -> None:
        self.start_ready()

    def _context(self, one: PlannedOperation) -> Context:
        setters: set[int] = set()
        for needed in one.inputs:
            if needed in self._made:
                setters |= self._setters[needed]
                if changes(*self._made[needed]):
                    setters.add(needed)
        before = self._caller
        if setters:
            before = before.copy()
            before.run(copy_back, [self._made[slot] for slot in sorted(setters)])
        context = before.copy()
        self._made[one.slot], self._setters[one.slot] = (before, context), setters
        return context

    def finish(self) -> None:
        self._contexts = [self._made[slot] for slot in sorted(self._made)]
        super().finish()

    def describe(self, number: int) -> str:
        name = next(one.name for one in self._operations if one.slot == number)
        return f"operation {name!r} at step {self._session.global_step.latest.step + 1}"
