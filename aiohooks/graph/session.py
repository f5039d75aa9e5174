"""The raw session: one run of a graph's operations, all or nothing."""

from __future__ import annotations

import asyncio
import copy
import types
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from aiohooks._aio.cancel import DEFAULT_GRACE_SECS, cancel_count, current_task, shielded
from aiohooks._aio.gather import FanOut, drive
from aiohooks._validate import check_instance, check_secs
from aiohooks.checkpoint.checkpoint import Stateful
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
    """Runs the operations of a graph that a set of fetches needs, each once, independent ones together.

    A run reads each variable once, at its start. When every operation has succeeded, the new values of variables and the
    global step are committed together; a run that fails or is cancelled changes nothing. Runs of one session may overlap:
    taking turns is the monitored session's.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        global_step: StepStore | None = None,
        variables: Variables | None = None,
        grace_secs: float = DEFAULT_GRACE_SECS,
    ) -> None:
        """Opens a session; it needs no closing of its own unless you want `run` refused afterwards.

        Args:
            graph: what is run.
            global_step: where the global step is kept; its own, if left out.
            variables: the values of the variables; its own, if left out.
            grace_secs: how long a cancelled run waits for what does not end at once, such as worker threads.
        """
        check_instance(graph, Graph, "graph")
        check_instance(global_step, StepStore, "global_step", optional=True)
        check_instance(variables, Variables, "variables", optional=True)
        check_secs(grace_secs, "grace_secs")
        self.graph = graph
        self.global_step: StepStore = MemoryStepStore() if global_step is None else global_step
        self.variables: Variables = Variables() if variables is None else variables
        self.committed_step: int = self.global_step.latest.step
        """The global step as the latest run of this session left it."""
        self.grace_secs = grace_secs
        self.tracked: Mapping[str, Stateful] = {}
        """What is kept in checkpoints besides the variables: the scaffold's `tracked`."""
        self.stateful_hooks: Callable[[], Mapping[str, Stateful]] = dict
        """Gives the hooks that are kept in checkpoints too; set by the monitored session."""
        self.saver: Saver | None = None
        """Where the creator of this session restores from."""
        self.restored: Restored | None = None
        """What this session was restored from; of its `state` only the hooks' part is kept."""
        self.driven_by: FanOut | None = None
        """Set right before a run by who awaits that run through `drive` already."""
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._plans: dict[tuple[Any, tuple[Any, ...]], Plan] = {}
        self.variables.initialise({variable.name: variable.initial for variable in graph.variables})

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
        """Runs what `fetches` needs and returns its values in the same shape.

        Args:
            fetches: nodes or names, nested in lists, tuples, mappings, dataclasses at will.
            feed_dict: values by node or name, for this run only; a fed node is not computed.
            options: for subclasses that know some; ignored here.
            run_metadata: a dict into which a subclass may write.

        Raises:
            FetchError: unknown names, a placeholder that is not fed.
            GraphError: the operations cannot be ordered.
            SessionClosedError: the session is closed.
            WrongLoopError: it was used in another event loop before.
            BaseException: what an operation raised, as it is; several as one group.
        """
        fan, self.driven_by = self.driven_by, None
        if self._closed:
            raise SessionClosedError("this session is closed; use the session that the latest after_create_session got")
        if fan is None:  # else the one who drives it has looked
            loop = asyncio.get_running_loop()
            if self._loop is not loop:
                self._bind(loop)
        # The plan for a tuple of leaves (what the monitored session asks for) or a single one is found at once.
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
                    canonical_feeds(self.graph, {key: value})  # raises, and says so
        store = self.global_step
        for slot, name in plan.variables:
            values[slot] = self.variables.read(name)
        for slot in plan.step_slots:
            values[slot] = store.latest.step
        if plan.operations:
            if fan is None and not plan.is_chain:
                fan = FanOut()
                fan.base = cancel_count(current_task())
                await drive(_run_operations(self, plan, values, fan), fan)
            else:
                await _run_operations(self, plan, values, fan or FanOut())
        if plan.changes_variables or not store.inline:
            await self._commit(plan, values)
        elif plan.steps:
            self.committed_step = store.advance_nowait(plan.steps)
        else:
            self.committed_step = store.latest.step
        results = plan.result(values)
        if build is not None:
            return build(results)
        return results if kind is tuple else results[0]

    def _plan(self, fetches: Any, feed_dict: Mapping[Any, Any] | None) -> tuple[Plan, Build, Mapping[Any, Any]]:
        """Makes the plan of a run, or finds it; returns it with what shapes the result, and the feeds by node."""
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
            [(name, values[slot]) for name, slot in plan.updates],
            [(name, values[slot]) for name, slot in plan.additions],
        )
        if not plan.steps:
            self.variables.put(new)
            self.committed_step = store.latest.step
        elif store.inline:
            self.committed_step = store.advance_nowait(plan.steps)  # first, because it can be refused; one moment with the rest
            self.variables.put(new)
        else:
            # Before the step: whoever waits for it, anywhere, must find the variables of that step.
            old = {name: self.variables.read(name) for name in new}
            self.variables.put(new)
            advance = store.advance(plan.steps)
            try:
                self.committed_step = await shielded(advance, grace_secs=self.grace_secs, what="advance of the global step")
            except Exception:
                # Refused, so nothing of this run has happened. What another session has committed on top of it stays.
                self.variables.put({name: old[name] for name in new if self.variables.read(name) is new[name]})
                raise

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not None:
            raise WrongLoopError(
                "this session belongs to another event loop; make one in each loop, and share a step store by URL"
            )
        self._loop = loop

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds: the graph's "variables", the states of "tracked" objects and of "hooks", by name.

        Values of variables are the ones that are there, not copies: a commit puts new ones. The rest is copied.

        Raises:
            InvalidHookError: two hooks with a state have one name.
        """
        return {
            "variables": {variable.name: self.variables.read(variable.name) for variable in self.graph.variables},
            "tracked": {name: copy.deepcopy(one.state_dict()) for name, one in self.tracked.items()},
            "hooks": {name: copy.deepcopy(hook.state_dict()) for name, hook in self.stateful_hooks().items()},
        }

    async def aclose(self) -> None:
        """Closes the session; again is harmless. Values of shared variables and steps stay."""
        self._closed = True

    def __repr__(self) -> str:
        return f"<Session at step {self.global_step.latest.step}{', closed' if self._closed else ''}>"


async def _run_operations(session: Session, plan: Plan, values: list[Any], fan: FanOut) -> None:
    """Runs a plan's operations in turn; awaited through `drive`, together from the moment one suspends."""
    fan.piece = (_Operations, session, plan, values)
    try:
        for call, is_async, slot, name, _ in plan.operations:
            result = call(values)
            if is_async:
                result = await result
            elif type(result) is types.CoroutineType:
                _no_coroutine(name, result)
            values[slot] = result
            if fan.crew is not None:
                break
    except BaseException as error:
        await fan.failed(error)
    else:
        if fan.crew is not None:
            await fan.crew.settle(None)
    finally:
        fan.piece = fan.crew = None


def _no_coroutine(name: str, result: Any) -> Any:
    if type(result) is types.CoroutineType:
        result.close()
        raise GraphError(f"operation {name!r} is a plain function that returned a coroutine; write it as `async def`")
    return result


class _Operations:
    """A plan's operations as work that overlaps: each can start when its inputs are there."""

    __slots__ = ("_left", "_plan", "_session", "_values", "grace_secs", "has_order", "has_timeouts")

    def __init__(self, session: Session, plan: Plan, values: list[Any]) -> None:
        self.grace_secs = session.grace_secs
        self.has_order = True
        self.has_timeouts = False
        self._session = session
        self._plan = plan
        self._values = values
        self._left = [number for number in range(len(plan.operations)) if number > self.current()]

    def startable(self) -> Iterable[int]:
        operations, values = self._plan.operations, self._values
        ready = [one for one in self._left if all(values[slot] is not MISSING for slot in operations[one].inputs)]
        self._left = [one for one in self._left if one not in ready]
        return ready

    async def start(self, number: int) -> Any:
        operation = self._plan.operations[number]
        result = operation.call(self._values)
        return await result if operation.is_async else _no_coroutine(operation.name, result)

    def current(self) -> int:
        for number, operation in enumerate(self._plan.operations):
            if self._values[operation.slot] is MISSING:
                return number
        return len(self._plan.operations) - 1  # a result is MISSING itself: cannot be

    def store(self, number: int, result: Any) -> None:
        self._values[self._plan.operations[number].slot] = result

    def name(self, number: int) -> str:
        return self._plan.operations[number].name

    def describe(self, number: int) -> str:
        return f"operation {self.name(number)!r} at step {self._session.global_step.latest.step + 1}"

    def timeout_secs(self, number: int) -> float | None:
        return None

    def forgives(self, number: int, error: BaseException) -> bool:
        return False

    def complete(self) -> None:
        pass
