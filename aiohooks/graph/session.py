"""The raw session: runs of a graph's operations, each of which changes everything or nothing."""

from __future__ import annotations

import asyncio
import copy
import types
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from aiohooks._aio.cancel import DEFAULT_GRACE_SECS, drive, shielded
from aiohooks._aio.gather import Batch, LazyGather
from aiohooks._validate import check_instance, check_secs
from aiohooks.checkpoint.checkpoint import Stateful
from aiohooks.dispatch.calls import hook_cancelled_error
from aiohooks.errors import GraphError, SessionClosedError, WrongLoopError
from aiohooks.graph.fetches import LEAF_TYPES, Build, Leaves, canonical_feeds
from aiohooks.graph.graph import MISSING, Graph, Node
from aiohooks.graph.plan import Plan, make_plan
from aiohooks.graph.variables import Variables
from aiohooks.stores.base import StepStore
from aiohooks.stores.memory import MemoryStepStore

if TYPE_CHECKING:
    from aiohooks.checkpoint import Restored, Saver


_MOST_PLANS = 1024


class Session:
    """Runs the operations that a set of fetches needs: each once, independent ones at the same time.

    A run reads each variable once, at its start. When every operation has succeeded, the new values of variables and the
    global step are committed together; a run that fails or is cancelled changes nothing. Runs of one session may overlap;
    only those of a monitored session take turns.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        global_step: StepStore | None = None,
        variables: Variables | None = None,
        grace_secs: float = DEFAULT_GRACE_SECS,
    ) -> None:
        """Open a session. It holds no resources; closing it only makes `run` raise.

        Args:
            graph: the graph to run.
            global_step: the store of the global step; by default one of its own.
            variables: the values of the variables; by default its own.
            grace_secs: how long a cancelled run waits for what does not end immediately, such as worker threads.
        """
        check_instance(graph, Graph, "graph")
        check_instance(global_step, StepStore, "global_step", optional=True)
        check_instance(variables, Variables, "variables", optional=True)
        check_secs(grace_secs, "grace_secs")
        self.graph = graph
        self.global_step: StepStore = MemoryStepStore() if global_step is None else global_step
        self.variables: Variables = Variables() if variables is None else variables
        self.committed_step: int = self.global_step.latest.step
        """The global step after the latest run of this session."""
        self.grace_secs = grace_secs
        self.tracked: Mapping[str, Stateful] = {}
        """The objects saved in checkpoints besides the variables: the scaffold's `tracked`."""
        self.stateful_hooks: Callable[[], Mapping[str, Stateful]] = dict
        """Internal: return the hooks that are saved in checkpoints; set by the monitored session."""
        self.saver: Saver | None = None
        """The saver from which the creator of this session restores."""
        self.restored: Restored | None = None
        """The checkpoint that this session was restored from; its `state` has only the states of hooks."""
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._plans: dict[tuple[Any, tuple[Any, ...]], Plan] = {}
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

        Args:
            fetches: nodes or names, nested in lists, tuples, mappings and dataclasses.
            feed_dict: values by node or name, for this run only; a fed node is not computed.
            options: ignored here; for sessions with a `run` of their own.
            run_metadata: a dict into which such a session may write.

        Raises:
            FetchError: a name is unknown, or a placeholder is not fed.
            GraphError: the operations cannot be ordered.
            SessionClosedError: the session is closed.
            WrongLoopError: the session was used in another event loop before.
            BaseException: the error of an operation, unchanged; several as one group.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None:
                raise WrongLoopError(
                    "this session belongs to another event loop; make one in each loop, and share a step store by URL"
                )
            self._loop = loop
        gather = LazyGather()
        try:
            return await drive(self._run(gather, fetches, feed_dict), gather)
        finally:
            gather.reset()

    async def _run(
        self,
        gather: LazyGather,
        fetches: Any,
        feed_dict: Mapping[Any, Any] | None,
        options: object = None,
        run_metadata: object = None,
    ) -> Any:
        if self._closed:
            raise SessionClosedError("this session is closed; use the session that the latest after_create_session got")
        # The plan for a tuple of leaves (what the monitored session asks for) or a single one is looked up directly.
        build: Build | None = None
        kind: Any = type(fetches)  # pyright: ignore[reportUnknownVariableType]
        plan = None
        if kind is tuple or kind in LEAF_TYPES:
            try:
                plan = self._plans.get((fetches, tuple(feed_dict) if feed_dict else ()))
            except TypeError:  # something unhashable inside
                plan = None
        if plan is None:
            plan, build, feed_dict = self._plan(fetches, feed_dict)
        values = plan.template.copy()
        if feed_dict:
            for slot, key in plan.fed:
                value = values[slot] = feed_dict[key]
                if isinstance(value, Node):
                    canonical_feeds(self.graph, {key: value})  # raises
        store = self.global_step
        for slot, name in plan.variables:
            values[slot] = self.variables.read(name)
        for slot in plan.step_slots:
            values[slot] = store.latest.step
        gather.batch = OperationCalls(self, plan, values)
        failure: BaseException | None = None
        try:
            for call, is_async, slot, name, _ in plan.operations:
                result = call(values)
                if is_async:
                    result = await result
                elif type(result) is types.CoroutineType:
                    _refuse_coroutine(name, result)
                values[slot] = result
                if gather.overlap is not None:
                    break
        except BaseException as error:
            failure = error
        try:
            if failure is not None or gather.overlap is not None:
                await gather.finish(failure)
        finally:
            failure = gather.batch = None
        if plan.changes_variables or not store.inline:
            await self._commit(plan, values)
        elif plan.steps:
            self.committed_step = store.advance_nowait(plan.steps)
        else:
            self.committed_step = store.latest.step
        results = tuple(plan.take_fetched(values))
        if build is not None:
            return build(results)
        return results if kind is tuple else results[0]

    def _plan(self, fetches: Any, feed_dict: Mapping[Any, Any] | None) -> tuple[Plan, Build, Mapping[Any, Any]]:
        """Return the plan of a run, new or known, the function that shapes the result, and the feeds by node."""
        leaves = Leaves(self.graph)
        build = leaves.build(fetches)
        feeds = canonical_feeds(self.graph, feed_dict)
        nodes, fed = leaves.nodes, tuple(feeds)
        plan = self._plans.get((nodes, fed))
        if plan is None:
            plan = self._plans[nodes, fed] = make_plan(self.graph, nodes, {node: node for node in fed}, self.grace_secs)
        keys = tuple(feed_dict) if feed_dict else ()
        kind: Any = type(fetches)  # pyright: ignore[reportUnknownVariableType]
        flat = kind is tuple and len(fetches) == len(nodes) and LEAF_TYPES.issuperset(map(type, fetches))
        if (flat or kind in LEAF_TYPES) and len(keys) == len(fed):
            by_key = {node: key for node, key in zip(fed, keys, strict=True) if not isinstance(key, tuple)}
            if len(by_key) == len(keys):
                if len(self._plans) >= _MOST_PLANS:
                    self._plans.clear()
                self._plans[fetches, keys] = make_plan(self.graph, nodes, by_key, self.grace_secs)
        return plan, build, feeds

    async def _commit(self, plan: Plan, values: list[Any]) -> None:
        store = self.global_step
        new = self.variables.prepare(
            [(name, values[slot]) for name, slot in plan.updates], [(name, values[slot]) for name, slot in plan.additions]
        )
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

    def state_dict(self) -> dict[str, Any]:
        """Return the content of a checkpoint: the graph's "variables", the states of "tracked" objects and of "hooks", by name.

        Values of variables are not copied, as a commit replaces them; states are.

        Raises:
            InvalidHookError: two hooks with a state have one name.
        """
        return {
            "variables": {name: self.variables.read(name) for name in self._variable_names},
            "tracked": {name: copy.deepcopy(one.state_dict()) for name, one in self.tracked.items()},
            "hooks": {name: copy.deepcopy(hook.state_dict()) for name, hook in self.stateful_hooks().items()},
        }

    async def aclose(self) -> None:
        """Close the session; closing twice is harmless. Values of shared variables and steps stay."""
        self._closed = True

    def __repr__(self) -> str:
        return f"<Session at step {self.global_step.latest.step}{', closed' if self._closed else ''}>"


GatheredRun = Callable[
    [LazyGather, Any, "Mapping[Any, Any] | None", "Mapping[str, Any] | None", "dict[str, Any] | None"], Awaitable[Any]
]
"""`Session.run` as part of its caller's gather. The arguments: gather, fetches, feeds, options, metadata."""


def gathered_run(session: Session) -> GatheredRun:
    """Return a function that runs `session` as part of its caller's gather.

    An overridden `run` is called instead, without the gather.
    """
    if type(session) is Session and "run" not in vars(session):
        return session._run  # pyright: ignore[reportPrivateUsage]

    def run(gather: LazyGather, fetches: Any, feed_dict: Any, options: Any, run_metadata: Any) -> Awaitable[Any]:
        if options is None:
            return session.run(fetches, feed_dict=feed_dict)
        return session.run(fetches, feed_dict=feed_dict, options=options, run_metadata=run_metadata)

    return run


def _refuse_coroutine(name: str, result: Any) -> Any:
    if type(result) is types.CoroutineType:
        result.close()
        raise GraphError(f"operation {name!r} is a plain function that returned a coroutine; write it as `async def`")
    return result


class OperationCalls(Batch):
    """The operations of one run, as a `Batch` of the lazy gather: each can start when its inputs are known."""

    __slots__ = ("_left", "_plan", "_session", "_values")

    has_dependencies = True

    def __init__(self, session: Session, plan: Plan, values: list[Any]) -> None:
        self._session = session
        self._plan = plan
        self._values = values
        self._left: list[int] | None = None

    @property
    def grace_secs(self) -> float:
        return self._session.grace_secs

    def ready(self) -> Iterable[int]:
        operations, values = self._plan.operations, self._values
        if self._left is None:
            self._left = list(range(self.current() + 1, len(operations)))
        ready = [one for one in self._left if all(values[slot] is not MISSING for slot in operations[one].inputs)]
        self._left = [one for one in self._left if one not in ready]
        return ready

    async def start(self, number: int) -> Any:
        operation = self._plan.operations[number]
        result = operation.call(self._values)
        return await result if operation.is_async else _refuse_coroutine(operation.name, result)

    def current(self) -> int:
        for number, operation in enumerate(self._plan.operations):
            if self._values[operation.slot] is MISSING:
                return number
        raise AssertionError("no operation is running")

    def store(self, number: int, result: Any) -> None:
        self._values[self._plan.operations[number].slot] = result

    def name(self, number: int) -> str:
        return self._plan.operations[number].name

    def describe(self, number: int) -> str:
        return f"operation {self.name(number)!r} at step {self._session.global_step.latest.step + 1}"

    def cancelled_error(self, number: int, cause: BaseException) -> BaseException:
        return hook_cancelled_error(self.describe(number), cause)
