"""What type checkers make of the public API; judged by mypy and pyright, never run.

A line with `type: ignore` is wrong use: the checkers must refuse it, and they complain about an
ignore without need.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, assert_type

import aiohooks as ah


class MyHook(ah.SessionRunHook):
    """A hook that overrides everything."""

    order = 1
    timeout = 5.0
    on_error = "log"

    async def begin(self) -> None: ...

    async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
        assert_type(await session.run("loss"), Any)
        assert_type(coord.should_stop(), bool)
        assert_type(await coord.wait_for_stop(1.0), bool)

    async def before_run(self, run_context: ah.SessionRunContext) -> ah.SessionRunArgs | None:
        assert_type(run_context.original_args, ah.SessionRunArgs)
        assert_type(run_context.session, ah.Session)
        assert_type(run_context.stop_requested, bool)
        assert_type(run_context.global_step, int)
        assert_type(run_context.attempt, int)
        return ah.SessionRunArgs({"loss": "loss"}, feed_dict={"x": 1})

    async def after_run(
        self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
    ) -> None:
        assert_type(run_values.results, Any)
        run_context.request_stop("enough")

    async def end(self, session: ah.Session) -> None: ...

    async def close(self, exc: BaseException | None) -> None: ...


class PlainHook(ah.SessionRunHook):
    """A plain function where a coroutine is needed."""

    def before_run(self, run_context: ah.SessionRunContext) -> None: ...  # type: ignore[override]


def graphs() -> None:
    """A graph and what its methods give."""
    graph = ah.Graph()
    assert_type(graph.placeholder("x"), ah.graph.Placeholder)
    assert_type(graph.placeholder("y", default=1), ah.graph.Placeholder)
    assert_type(graph.variable("w", 0.0), ah.graph.Variable)
    assert_type(graph.finalized, bool)
    assert_type(ah.graph.get_default_graph(), ah.Graph)

    @graph.operation
    async def loss(x: float, w: float) -> float:
        return x * w

    @graph.train_op(adds_to="w", steps=2)
    def train(loss: float) -> float:
        return -loss

    assert_type(loss, ah.graph.Operation[float])
    assert_type(train, ah.graph.Operation[float])
    with graph.as_default():
        pass
    graph.operation(3)  # type: ignore[call-overload]
    assert_type(graph.operation(lambda: 1), ah.graph.Operation[int])
    anything: ah.graph.Operation = loss  # as before it had a type of its own
    assert_type(graph.train_op(anything), ah.graph.Operation[Any])
    graph.operation(loss, name="again")  # type: ignore[call-overload]
    assert_type(graph.operation(ah.in_thread(len)), ah.graph.Operation[int])


class LossHook(ah.SessionRunHook):
    """A hook that says what it fetches, and has names of its own for what it is given."""

    def __init__(self, loss: ah.graph.Operation[float]) -> None:
        self.loss = loss

    async def before_run(self, ctx: ah.SessionRunContext) -> ah.SessionRunArgs:
        assert_type(await ctx.session.run(self.loss), float)
        return ah.SessionRunArgs(self.loss)

    async def after_run(
        self, ctx: ah.SessionRunContext, values: ah.SessionRunValues[float]
    ) -> None:
        assert_type(values.results, float)

    async def end(self, raw: ah.Session) -> None: ...


class WrongHook(ah.SessionRunHook):
    """Methods that cannot take what the session gives."""

    async def before_run(self) -> None: ...  # type: ignore[override]
    async def end(self, session: int) -> None: ...  # type: ignore[override]


async def fetched(
    session: ah.AsyncMonitoredSession,
    raw: ah.Session,
    loss: ah.graph.Operation[float],
    names: ah.graph.Operation[list[str]],
) -> None:
    """What is fetched has the type of the operation; of several, and of names, nothing is known."""
    assert_type(await session.run(loss), float)
    assert_type(await session.run(loss, {"x": 1.0}, {"trace": True}), float)
    assert_type(await session.run((loss, names)), Any)
    assert_type(await session.run({"loss": loss}), Any)
    assert_type(await raw.run(loss), float)
    assert_type(await raw.run(loss, feed_dict={"x": 1.0}), float)
    assert_type(await raw.run([names, loss]), Any)
    async for value in session.steps(loss, feeds=range(3), prefetch=2):
        assert_type(value, float)
    assert_type(session.steps((loss, names)), ah.session.Steps[Any])
    assert_type(session.steps(), ah.session.Steps[Any])
    assert_type(await anext(session.steps(loss)), float)
    session.steps(loss, prefech=2)  # type: ignore[call-overload]
    await session.run(loss, 3)  # type: ignore[call-overload]


async def load(path: str, shard: int = 0, *, fast: bool = False) -> bytes:
    """A coroutine function for the background."""
    return b""


def started(session: ah.AsyncMonitoredSession, coord: ah.Coordinator) -> None:
    """What `start_soon` is given is what the function takes."""
    assert_type(session.start_soon(load, "x", name="load"), asyncio.Task[bytes])
    assert_type(coord.start_soon(load, "x", 1), asyncio.Task[bytes])
    session.start_soon(lambda: load("x", fast=True))
    session.start_soon(load)  # type: ignore[arg-type]
    session.start_soon(load, 1)  # type: ignore[arg-type]
    coord.start_soon(load, "x", 1, 2)  # type: ignore[arg-type]


async def train_step(batch: int) -> Mapping[str, float]:
    """A coroutine function as the step."""
    return {"loss": float(batch)}


async def sessions(source: ah.Graph | ah.session.SessionCreator | Callable[[int], Any]) -> None:
    """A monitored session and what its methods give."""
    hook = MyHook()
    registered = ah.configure(hook, order=-1, timeout=None, on_error="log")
    assert_type(registered, ah.dispatch.HookRegistration)
    ah.configure(hook, on_error="ignore")  # type: ignore[arg-type]
    ah.configure(hook, -1)  # type: ignore[call-arg, arg-type, unused-ignore]
    policy = ah.RecoveryPolicy((OSError,), max_attempts=3, backoff=ah.Backoff(jitter=False))
    async with ah.AsyncMonitoredSession(
        source, [hook, registered], recovery=policy, handle_signals=True
    ) as session:
        assert_type(session, ah.AsyncMonitoredSession)
        assert_type(await session.run("loss", feed_dict={"batch": 3}), Any)
        assert_type(session.should_stop(), bool)
        assert_type(session.graph, ah.Graph)
        assert_type(session.coord, ah.Coordinator)
        assert_type(session.global_step, ah.StepStore)
        assert_type(session.status(), ah.session.SessionStatus)
        assert_type(session.why(), ah.session.WaitGraph)
        assert_type(session.why().deadlocks, tuple[tuple[ah.session.WaitNode, ...], ...])
        assert_type(await session.until(train_step(1)), Mapping[str, float])
        assert_type(await session.run_step_fn(step_fn), int)
        async for values in session.steps(["loss"], feeds=range(3)):
            assert_type(values, Any)
        session.start_soon(train_step, 3, name="background")
        session.start_soon(len, "3")  # type: ignore[arg-type]
        await session.until(3)  # type: ignore[arg-type]
        assert_type(await session.aclose(), None)
    async with ah.session.AsyncSingularMonitoredSession(train_step) as singular:
        assert_type(singular, ah.session.AsyncSingularMonitoredSession)
        assert_type(singular.raw_session(), ah.Session | None)
    ah.AsyncMonitoredSession(train_step, [3])  # type: ignore[list-item]
    ah.AsyncMonitoredSession(len)  # type: ignore[arg-type]
    ah.AsyncMonitoredSession(train_step, [], ah.MemoryStepStore())  # type: ignore[call-arg]


async def step_fn(step_context: ah.session.StepContext) -> int:
    """What `run_step_fn` calls."""
    assert_type(step_context.session, ah.Session)
    assert_type(await step_context.run_with_hooks("loss"), Any)
    step_context.request_stop()
    return 3


class OwnCreator:
    """A session creator is a protocol: any class of this shape is one."""

    @property
    def graph(self) -> ah.Graph:
        """The graph of its sessions."""
        return ah.graph.get_default_graph()

    async def create_session(self) -> ah.Session:
        """Makes a session."""
        return ah.Session(self.graph, global_step=ah.MemoryStepStore(), variables=ah.Variables())


async def creators() -> None:
    """The session creators."""
    graph = ah.Graph()
    creator: ah.session.SessionCreator = OwnCreator()
    creator = ah.ChiefSessionCreator(graph, scaffold=ah.Scaffold())
    creator = ah.WorkerSessionCreator(graph, max_wait_secs=60.0)
    assert_type(await creator.create_session(), ah.Session)
    await sessions(creator)


async def stores(store: ah.StepStore) -> None:
    """A step store and what its methods give."""
    assert_type(store.latest, ah.stores.Position)
    assert_type(await store.value(), ah.stores.Position)
    assert_type(await store.advance(), int)
    assert_type(await store.raise_to(7), int)
    assert_type(await store.wait_for(9, timeout=1.0, on_reset="raise"), int)
    async for position in store.changes():
        assert_type(position, ah.stores.Position)
        assert_type(position.step, int)
    await store.reset(3)
    await store.wait_for(9, on_reset="drop")  # type: ignore[arg-type]
    await store.wait_for("9")  # type: ignore[arg-type]
    await store.wait_for(9, 1.0)  # type: ignore[call-arg]
    await store.aclose()
    with ah.MemoryStepStore(3).publisher("chief"):
        pass


def hooks() -> list[ah.SessionRunHook]:
    """The built-in hooks with their arguments."""
    every = ah.Every(steps=100, secs=60, at=(1, 10))
    ah.Every(100)  # type: ignore[call-arg]
    ah.StopAtStepHook(100)  # type: ignore[call-arg]
    return [
        ah.StopAtStepHook(last_step=100),
        ah.hooks.GlobalStepWaiterHook(3, timeout=60.0),
        ah.LoggingHook({"loss": "loss"}, every=every),
        ah.hooks.StepCounterHook(every),
        ah.NanHook("loss", fail_on_nan_loss=False),
        ah.hooks.FeedFnHook(lambda: {"x": 1}),
        ah.hooks.FinalOpsHook({"accuracy": "accuracy"}),
        ah.hooks.BlockingHook(object()),
    ]


async def variables() -> None:
    """The values of variables."""
    values = ah.Variables()
    assert_type(values.ready, bool)
    await values.wait_ready(timeout=1.0)
    assert_type(values.snapshot(), dict[str, Any])


def running() -> None:
    """`run` gives what the main coroutine returns, and passes on its arguments."""
    assert_type(ah.run(train_step, 3), Mapping[str, float])
    ah.run(train_step(3))  # type: ignore[arg-type]


def errors(error: ah.errors.StepTimeoutError, reset: ah.errors.StepResetError) -> None:
    """What errors know."""
    assert_type(error.wanted, int)
    assert_type(error.seen, int)
    assert_type(error.waited_secs, float)
    assert_type(reset.old, tuple[int, int])
    caught: TimeoutError = error
    assert_type(caught.__traceback__, TracebackType | None)


class AgentHooks:
    """A lifecycle of a user."""

    async def on_start(self, name: str) -> None: ...

    @ah.point("first")
    async def decide(self, name: str, *, times: int = 1) -> float | None: ...


async def check_hook_groups(hooks: list[object]) -> None:
    """A group stands for an object of its class, to the type checkers as well."""
    async with ah.HookGroup(
        AgentHooks, [*hooks, ah.configure(object(), background=True, max_pending=3)]
    ) as group:
        assert_type(group, ah.HookGroup[AgentHooks])
        assert_type(group.hooks, AgentHooks)
        assert_type(await group.hooks.decide("x"), float | None)
        assert_type(await group.hooks.decide("x", times=2), float | None)
        await group.hooks.on_start(5)  # type: ignore[arg-type]
        await group.hooks.on_strt("x")  # type: ignore[attr-defined]

        @group.on(AgentHooks.on_start)
        async def log(name: str) -> None: ...

        @group.on(AgentHooks.decide, order=1, on_error="log")
        def at_random(who: str, *, times: int = 1) -> float:
            return 0.5

        assert_type(at_random("x"), float)
        group.on(AgentHooks.on_start, log, timeout=1.0)
        group.on(AgentHooks.on_start, tiemout=1.0)(log)  # type: ignore[call-overload]
        group.on(AgentHooks.on_start, on_error="ignore")(log)  # type: ignore[call-overload]
        group.on(MyHook.begin, log)  # type: ignore[arg-type]
        group.on("on_start", log)  # type: ignore[call-overload]
        assert_type(group.status(), list[ah.dispatch.HookStatus])
        assert_type(ah.compose(AgentHooks, hooks, results={"decide": "first"}), AgentHooks)
        ah.point("last")  # type: ignore[arg-type]


def check_effects(run_context: ah.SessionRunContext) -> None:
    """A handler is a coroutine function of one effect."""

    async def send(effect: ah.hooks.Effect) -> int:
        assert_type(effect.key, str)
        assert_type(effect.step, int)
        return 0

    ah.hooks.EffectsHook({"publish": send}, run="r", when="commit", max_pending=3)
    ah.hooks.EffectsHook({"publish": send})  # type: ignore[call-arg]
    ah.hooks.EffectsHook({"publish": print}, run="r")  # type: ignore[dict-item]
    ah.hooks.EffectsHook({"publish": send}, run="r", when="later")  # type: ignore[arg-type]
    ah.effect("publish", {"version": 1}, recorder="trainer")
    run_context.effect("publish")
    run_context.effect("publish", None, "trainer")  # type: ignore[call-arg]


async def sign(request: str) -> None:
    """A function of a composition."""


def count(text: str) -> int:
    """Another one, with another name of its parameter."""
    return len(text)


async def functions() -> None:
    """A composition takes the arguments of its functions, where these are of one kind."""
    signed = ah.compose_functions([sign, sign])
    await signed("request")
    await signed(1)  # type: ignore[arg-type]
    await signed()  # type: ignore[call-arg]
    await ah.compose_functions([sign, count])("request")
    await ah.compose_functions([sign, ah.configure(count, once=True)])("request")
    ah.compose_functions([sign], results=ah.chain(argument="request"))
