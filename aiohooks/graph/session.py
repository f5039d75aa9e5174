"""The raw session: runs of a graph's operations, each of which changes everything or nothing."""

from __future__ import annotations

import asyncio
import functools
import types
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any

from aiohooks._aio.cancel import DEFAULT_GRACE_SECS, shielded
from aiohooks._aio.contexts import changes, copy_back
from aiohooks._aio.observers import Kind, Observer, observed_call, observing
from aiohooks._aio.overlap import Overlap, RunWaits, Wait, result_now
from aiohooks._aio.run_scope import current_scope
from aiohooks._validate import check_instance, check_secs
from aiohooks.checkpoint._tensors import HostMemory, snapshot
from aiohooks.checkpoint.stateful import Stateful
from aiohooks.dispatch.calls import NO_KEYWORDS
from aiohooks.errors import (
    FetchError,
    GraphError,
    InvalidArgumentError,
    SessionClosedError,
    UpdateConflictError,
    WrongLoopError,
    did_you_mean,
    hook_cancelled_error,
)
from aiohooks.graph.fetches import LEAF_TYPES, Build, Leaves, canonical_feeds
from aiohooks.graph.graph import MISSING, Graph, Node, Operation, Output
from aiohooks.graph.plan import Plan, PlannedOperation, make_plan
from aiohooks.graph.variables import Variables
from aiohooks.stores.base import StepStore
from aiohooks.stores.memory import MemoryStepStore

if TYPE_CHECKING:
    from aiohooks.checkpoint import Restored, Saver


_MOST_PLANS = 1024
_MOST_ATTEMPTS = 100
"""How often a run is tried while others replace the variables that it replaces; it must not be repeated indefinitely."""


class Session:
    """Runs the operations that a set of fetches needs: each once, independent ones at the same time.

    A run reads each variable once, at its start. When every operation has succeeded, the new values of variables and the
    global step are committed together; a run that fails or is cancelled changes nothing. Runs of one session may overlap;
    only those of a monitored session take turns. If another run has replaced a variable that a run has read and replaces
    itself (`updates=`), its operations run once more, with the new value: no update is lost.

    From the first operation that may wait on, each has a context of its own: with what those have set whose results it needs.
    At the end, the caller's has what all have set, the last in the order of the operations.
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
            grace_secs: how long a cancelled run waits for what does not end immediately, such as worker threads. By default
                10 s, or the `stop_grace_period_secs` of the monitored session that uses this one.
        """
        check_instance(graph, Graph, "graph")
        check_instance(global_step, StepStore, "global_step", optional=True)
        check_instance(variables, Variables, "variables", optional=True)
        if grace_secs is not None:
            check_secs(grace_secs, "grace_secs")
        self.graph: Graph = graph
        """The graph that is run."""
        self.global_step: StepStore = MemoryStepStore() if global_step is None else global_step
        """The step store: `session.global_step.latest.step`."""
        self.variables: Variables = Variables() if variables is None else variables
        """The values of the variables: read with `variables.snapshot()`, replaced with `variables.assign({name: value})`."""
        self.committed_step: int = self.global_step.latest.step
        """The global step after the latest run of this session."""
        self.grace_secs: float = DEFAULT_GRACE_SECS if grace_secs is None else grace_secs
        """How long a cancelled run waits for what does not end immediately."""
        self._has_own_grace = grace_secs is not None
        self.tracked: Mapping[str, Stateful] = {}
        """The objects saved in checkpoints besides the variables: the scaffold's `tracked`."""
        self.stateful_hooks: Callable[[], Mapping[str, Stateful]] = dict
        """Internal: return the hooks that are saved in checkpoints; set by the monitored session."""
        self.state_of: Callable[[Stateful], Any] = _own_state
        """Internal: return the state of a tracked object; set by the monitored session, which may read it ahead."""
        self.drain_hooks: Callable[[], Awaitable[None]] = _nothing_to_drain
        """Internal: wait for the background calls of these hooks; set by the monitored session."""
        self.saver: Saver | None = None
        """The saver from which the creator of this session restores."""
        self.restored: Restored | None = None
        """The checkpoint that this session was restored from; its `state` has only the states of hooks."""
        self._snapshot_memory = HostMemory()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._plans: dict[tuple[Any, tuple[Any, ...], bool], Plan] = {}
        initial = {variable.name: variable.initial for variable in graph.variables}
        self._variable_names = tuple(initial)
        self.variables.initialise(initial)

    @property
    def closed(self) -> bool:
        """Whether `aclose` was called."""
        return self._closed

    async def run(
        self,
        fetches: Any,
        feed_dict: Mapping[Any, Any] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        run_metadata: dict[str, Any] | None = None,
    ) -> Any:
        """Run what `fetches` needs and return its values in the same shape.

        The step of a step function is run whatever is fetched, unless that is nothing or the global step alone.

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
                f"options is {options!r}, and this session knows none: they are for a Session subclass with a `run` of its own; "
                "for a time limit use `async with asyncio.timeout(...)`"
            )
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None:
                raise WrongLoopError(
                    "this session belongs to another event loop; make one in each loop, and share a step store by URL"
                )
            self._loop = loop
        return await self._run(None, fetches, feed_dict, raw=True)

    async def _run(
        self,
        waits: RunWaits | None,
        fetches: Any,
        feed_dict: Mapping[Any, Any] | None,
        options: object = None,
        run_metadata: object = None,
        build: Build | None = None,
        raw: bool = False,
        attempt: int = 1,
    ) -> Any:
        """Make a run, as part of what has `waits`; `build` makes the result of the values of a tuple of leaves."""
        if self._closed:
            self._check_open()
        # The plan for a tuple of leaves (what the monitored session asks for) or a single one is looked up directly.
        kind: Any = type(fetches)  # pyright: ignore[reportUnknownVariableType]
        plan = None
        if kind is tuple or kind in LEAF_TYPES:
            try:
                plan = self._plans.get((fetches, () if feed_dict is None else tuple(feed_dict), raw))
            except TypeError:  # something unhashable inside
                plan = None
        if plan is None:
            plan, own_build, feed_dict = self._plan(fetches, feed_dict, raw)
            build = build or own_build
        store = self.global_step
        values = plan.template.copy()
        if feed_dict:
            for slot, key in plan.fed:
                value = values[slot] = feed_dict[key]
                if isinstance(value, Node):
                    canonical_feeds(self.graph, {key: value})  # raises
        for slot, name in plan.variables:
            values[slot] = self.variables.read(name)
        for slot in plan.step_slots:
            values[slot] = store.latest.step
        operations: Sequence[PlannedOperation] = plan.operations
        scope = current_scope.get() if waits is None else waits.scope
        if scope is not None and scope.observers:
            operations = [_observed(one, scope.observers) if one.slot in plan.own else one for one in operations]
        calls: OperationCalls | None = None
        slot = 0
        try:
            for slot, call, is_async, may_wait, name, _ in operations:
                if may_wait:
                    calls = OperationCalls(self, operations, values, waits)
                    calls.start_ready()
                    break
                result = call(values)
                if is_async:
                    result = await result
                elif type(result) is types.CoroutineType:
                    _refuse_coroutine(name, result)
                values[slot] = result
        except BaseException as error:
            calls = calls or OperationCalls(self, operations, values, waits)
            calls.failed(slot, error)
        if calls is not None:
            await calls.wait()
        # Made before the commit: what cannot be made must change nothing.
        fetched = plan.take_fetched(values)
        made = build(fetched) if build is not None else tuple(fetched) if kind is tuple else fetched[0]
        if plan.changes_variables or not store.inline:
            commit = self._commit(plan, values)
            if waits is not None and not store.inline:
                commit = Wait[bool]("commit of the variables and the global step", waits=waits).result_of(commit)
            if not await commit:
                self._check_repeat(plan, attempt)
                return await self._run(waits, fetches, feed_dict, options, run_metadata, build, raw, attempt + 1)
        elif plan.steps:
            self.committed_step = store.advance_nowait(plan.steps)
        else:
            self.committed_step = store.latest.step
        return made

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosedError("this session is closed; use the session that the latest after_create_session got")

    def _check_repeat(self, plan: Plan, attempt: int) -> None:
        """Raise if a run is not repeated after this attempt, in which it was overtaken."""
        self._check_open()  # after a recovery, another session has the variables
        if attempt == _MOST_ATTEMPTS:
            names = ", ".join(repr(name) for _, name in plan.replaced)
            raise UpdateConflictError(
                f"this run replaces {names} (updates=), and in each of its {attempt} attempts another one had done so since it "
                "began; add to a variable with adds_to=, or let the runs take turns"
            )

    def _plan(self, fetches: Any, feed_dict: Mapping[Any, Any] | None, raw: bool) -> tuple[Plan, Build | None, Mapping[Any, Any]]:
        """Return the plan of a run, new or known, the function that shapes the result, and the feeds by node."""
        leaves = Leaves(self.graph)
        build = leaves.build(fetches)
        feeds = canonical_feeds(self.graph, feed_dict)
        nodes, fed = leaves.nodes, tuple(feeds)
        step = self.graph.step_operation
        if step is None:
            if not nodes and not raw:
                known = [name for name, node in self.graph.nodes.items() if isinstance(node, Operation)]
                raise FetchError(f"neither the caller nor a hook fetches anything, so nothing would run; operations are: {known}")
        elif self._may_skip(step, nodes, fed, raw):
            step = None
        plan = self._plans.get((nodes, fed, raw))
        if plan is None:
            plan = make_plan(self.graph, nodes, {node: node for node in fed}, self.grace_secs, step)
            self._keep_plan((nodes, fed, raw), plan)
        keys = tuple(feed_dict) if feed_dict else ()
        kind: Any = type(fetches)  # pyright: ignore[reportUnknownVariableType]
        flat = kind is tuple and len(fetches) == len(nodes) and LEAF_TYPES.issuperset(map(type, fetches))
        if (flat or kind in LEAF_TYPES) and len(keys) == len(fed):
            by_key = {node: key for node, key in zip(fed, keys, strict=True) if not isinstance(key, tuple)}
            if len(by_key) == len(keys):
                self._keep_plan((fetches, keys, raw), make_plan(self.graph, nodes, by_key, self.grace_secs, step))
        return plan, build, feeds

    def _keep_plan(self, key: tuple[Any, tuple[Any, ...], bool], plan: Plan) -> None:
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        self._plans[key] = plan

    def _may_skip(self, step: Operation, nodes: tuple[Node, ...], fed: tuple[Node, ...], raw: bool) -> bool:
        """Return whether a run may leave out the step function.

        Raises:
            FetchError: something is fed that is neither a parameter nor fetched, so it is probably misspelt.
        """
        results = [node for node in fed if isinstance(node, Output)]
        for node in results:
            if node not in nodes:
                raise FetchError(
                    f"{node.name!r} is fed, and is neither a parameter of step {step.name!r} nor fetched; "
                    f"{did_you_mean(node.name, step.inputs)}",
                    name=node.name,
                )
        # A hook may read the global step with a raw run.
        return bool(results) or (raw and {self.graph.global_step}.issuperset(nodes))

    async def _commit(self, plan: Plan, values: list[Any]) -> bool:
        """Commit the changes of a run; return False, and change nothing, if a variable was replaced since the run read it."""
        store = self.global_step
        for slot, name in plan.replaced:
            if self.variables.read(name) is not values[slot]:  # values are not changed in place: another one is another object
                return False
        new = self.variables.prepare(plan.updates, plan.additions, values)
        if not plan.steps:
            self.variables.put(new)
            self.committed_step = store.latest.step
        elif store.inline:
            self.committed_step = store.advance_nowait(plan.steps)  # first, as it can be refused; nothing is awaited before `put`
            self.variables.put(new)
        else:
            # Before the step: a waiter for it, in any process, must find the variables of that step.
            old = {name: self.variables.read(name) for name in new}
            self.variables.put(new)
            advance = store.advance(plan.steps)
            try:
                self.committed_step = await shielded(advance, grace_secs=self.grace_secs, what="advance of the global step")
            except Exception:
                # The step was refused: undo this run. Values that another session has committed since then stay.
                self.variables.put({name: old[name] for name in new if self.variables.read(name) is new[name]})
                raise
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the content of a checkpoint: the graph's "variables", the states of "tracked" objects and of "hooks", by name.

        Values of variables are not copied, as a commit replaces them; states are, tensors to the memory of the host.

        Raises:
            InvalidHookError: two hooks with a state have one name.
        """
        states = {
            "tracked": {name: self.state_of(one) for name, one in self.tracked.items()},
            "hooks": {name: hook.state_dict() for name, hook in self.stateful_hooks().items()},
        }
        variables = {name: self.variables.read(name) for name in self._variable_names}
        return {"variables": variables, **snapshot(states, self._snapshot_memory)}

    def inherit_grace_secs(self, grace_secs: float) -> None:
        """Internal: use the grace period of the monitored session, unless this one was given its own."""
        if not self._has_own_grace:
            self.grace_secs = grace_secs

    async def aclose(self) -> None:
        """Close the session; closing twice is harmless. Its variables and global step stay readable."""
        self._closed = True

    def __repr__(self) -> str:
        return f"<Session at step {self.global_step.latest.step}{', closed' if self._closed else ''}>"


GatheredRun = Callable[..., Awaitable[Any]]
"""`Session.run` as part of another run. The arguments: its waits, fetches, feeds, options, metadata; a build if wanted."""


def gathered_run(session: Session) -> GatheredRun:
    """Return a function that runs `session` as part of another run; an overridden `run` is called instead, as one wait."""
    if getattr(type(session), "run", None) is Session.run and "run" not in vars(session):
        return session._run  # pyright: ignore[reportPrivateUsage]

    async def run(
        waits: RunWaits | None, fetches: Any, feed_dict: Any, options: Any, run_metadata: Any, build: Build | None = None
    ) -> Any:
        further = {} if options is None else {"options": options, "run_metadata": run_metadata}
        coro = session.run(fetches, feed_dict=feed_dict, **further)
        values = await (coro if waits is None else Wait[Any]("run of the session", waits=waits).result_of(coro))
        return values if build is None else build(values)

    return run


def _own_state(one: Stateful) -> Any:
    """Return the state that an object itself gives: a session that is used alone reads nothing ahead."""
    return one.state_dict()


async def _nothing_to_drain() -> None:
    """Wait for no hook: a session that is used alone has none."""


def _refuse_coroutine(name: str, result: Any) -> Any:
    if type(result) is types.CoroutineType:
        result.close()
        raise GraphError(f"operation {name!r} is a plain function that returned a coroutine; write it as `async def`")
    return result


def _observed(operation: PlannedOperation, observers: Sequence[Observer]) -> PlannedOperation:
    """Return the operation with `observers` that are notified of its call."""
    how = observed_call if operation.is_async else _observed_function
    return operation._replace(call=functools.partial(how, operation.call, "operation", operation.name, observers))


def _observed_function(
    call: Callable[[list[Any]], Any], kind: Kind, what: str, observers: Sequence[Observer], values: Any
) -> Any:
    with observing(observers, kind, what):
        return call(values)


def _call_now(operation: PlannedOperation, values: list[Any]) -> Any:
    """Call an operation that cannot wait, where nothing can be awaited."""
    result = operation.call(values)
    return result_now(result) if operation.is_async else _refuse_coroutine(operation.name, result)


class OperationCalls(Overlap):
    """The operations of a run from the first that may wait on, or the one that has failed; the number of each is its slot.

    Each starts when the results that it needs are there, in a context with what the operations that it needs have set.
    """

    __slots__ = ("_caller", "_made", "_operations", "_session", "_setters", "_unstarted")

    def __init__(
        self, session: Session, operations: Sequence[PlannedOperation], values: list[Any], waits: RunWaits | None
    ) -> None:
        super().__init__(values, session.grace_secs, waits)
        self._session = session
        self._operations = operations
        self._unstarted = {one.slot: one for one in operations if values[one.slot] is MISSING}
        self._caller = copy_context()
        self._made: dict[int, tuple[Context, Context]] = {}
        self._setters: dict[int, set[int]] = {}  # those of the operations before each that have set something

    def start_ready(self) -> None:
        """Start the operations that have all they need, in order of the plan."""
        values = self.results
        for slot, one in [*self._unstarted.items()]:
            if self.failing:
                return
            if slot not in self._unstarted or any(values[needed] is MISSING for needed in one.inputs):
                continue
            del self._unstarted[slot]
            context = self._context(one)
            if one.may_wait:
                self.start(slot, one.call, (values,), NO_KEYWORDS, one.name, context=context)
                continue
            try:
                values[slot] = context.run(_call_now, one, values)
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

    def cancelled_error(self, number: int, cause: BaseException) -> BaseException:
        return hook_cancelled_error(self.describe(number), cause)
