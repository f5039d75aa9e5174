"""Injected bugs: exploration must find each, or it proves nothing.

Small coroutines first, then sessions, stores, savers, gates and hooks with a bug in them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from types import ModuleType
from typing import Any

import aiohooks as ah
from aiohooks._core.queue import Queue
from aiohooks.dispatch.background import CallQueue
from aiohooks.graph.graph import values_of
from aiohooks.session import lifecycle
from aiohooks.session.hook import HookSet
from aiohooks.stores._protocol import Answer, Leave, Request, Write
from tests.fuzz._harness import Bug, Method
from tests.fuzz.explored.checkpoints import CheckpointFixture, WatchedSaver
from tests.fuzz.explored.evaluations import WatchedEvaluator, check_every_step_evaluated, evaluator
from tests.fuzz.explored.fixture import (
    EVERY_STEP,
    Action,
    Body,
    Broken,
    Fixture,
    ScriptedSessionCreator,
    SessionScenario,
    advance_slowly,
    await_to_the_end,
    fails,
    soon,
    two_steps,
    two_steps_with,
)
from tests.fuzz.explored.hook_groups import Quiet, calls_after_failures
from tests.fuzz.explored.stores import StoreFixture, WatchedConnection, WatchedStore, lead_and_train
from tests.fuzz.explored.version_gates import gate_of
from tests.support.waiting import forever, ticks

FAULTY: dict[str, tuple[SessionScenario, str]] = {}
"""By name: the scenario, and the violation that must be found."""


def faulty(
    finding: str, fixture: type[Fixture] = Fixture, **options: Any
) -> Callable[[Body], None]:
    def add(body: Body) -> None:
        defaults = {
            "hooks": 0,
            "parallel": not options,
        }  # sessions have hooks, and their tasks take turns
        scenario = SessionScenario(body.__name__, body, fixture=fixture, **{**defaults, **options})
        FAULTY[body.__name__] = scenario, finding

    return add


# -- small coroutines, without a library: what `explore` finds by itself is for its own tests


async def work(fixture: Fixture) -> None:
    for _ in range(2):
        await asyncio.sleep(0)
        await soon()


@faulty("cancel count: cancelling() grew by 0 over 1")
async def takes_back_what_is_not_its_own(fixture: Fixture) -> None:
    try:
        await work(fixture)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        asyncio.Task.uncancel(task)  # past the counting
        raise


@faulty("cancellation: raised CancelledError")
async def interrupts_itself_and_forgets(fixture: Fixture) -> None:
    """Its own cancel comes out."""
    task = asyncio.current_task()
    assert task is not None
    await work(fixture)
    asyncio.Task.cancel(task)  # past the counting
    await soon()


# -- sessions


class LeakyStore(ah.MemoryStepStore):
    """A cancelled wait stays parked."""

    async def wait_for(self, step: int, **options: Any) -> int:
        return await asyncio.shield(asyncio.ensure_future(super().wait_for(step, **options)))


@faulty("leak: the store still has")
async def waiter_is_left(fixture: Fixture) -> None:
    store = fixture.store = LeakyStore()

    async def waiter() -> None:
        await store.wait_for(2)

    await fixture.run_together(waiter=waiter, helper=lambda: advance_slowly(fixture, 2))


class SessionLeakingCreator(ScriptedSessionCreator):
    """Loses a session that it has opened already."""

    async def create_session(self) -> ah.Session:
        session = ah.Session(
            self.graph, global_step=self.fixture.store, variables=self.fixture.variables
        )
        self.fixture.sessions.append(session)
        await self.fixture.perform("create")
        return session


@faulty("begin/close: session 0 was not closed", hooks=1)
async def session_is_lost(fixture: Fixture) -> None:
    fixture.actions["create"] = lambda _: soon()
    async with ah.AsyncMonitoredSession(
        SessionLeakingCreator(fixture), hooks=fixture.hooks
    ) as session:
        await fixture.run(session)


@faulty("all or nothing: the variable is 1 at step 0", hooks=1)
async def half_of_a_commit_shows(fixture: Fixture) -> None:
    async def early(call: int) -> None:
        fixture.variables.assign({"w": call})
        await soon()
        fixture.variables.assign({"w": call - 1})

    fixture.actions["train"] = early
    await two_steps(fixture)


@faulty("begin/close: h0.close while later still runs", hooks=1)
async def work_runs_into_the_closing(fixture: Fixture) -> None:
    async def start(call: int) -> None:
        asyncio.get_running_loop().create_task(fixture.perform("later"), name="orphan")

    fixture.actions["later"] = lambda _: ticks(40)
    fixture.actions["h0.after_run"] = start
    await two_steps(fixture)


@faulty("lost cancellation: h1.before_run was cancelled by others", hooks=2)
async def child_vanishes(fixture: Fixture) -> None:
    """A hook whose own task swallows its cancellation, so that it cannot be told apart."""

    async def swallow(call: int) -> None:
        try:
            await soon()
        except asyncio.CancelledError:
            if fixture.probe.children:
                return
            raise

    fixture.actions["h0.before_run"] = lambda _: soon()
    fixture.actions["h1.before_run"] = swallow
    await two_steps(fixture)


# -- in the library: how hooks begin and close


def library_bug(owner: type | ModuleType, name: str, **actions: Action) -> Callable[[Method], None]:
    """Register a replacement of `owner.name`, as `Bug` has it."""

    def add(replacement: Method) -> None:
        bug = Bug(owner, name, replacement)

        async def body(fixture: Fixture) -> None:
            with bug.injected():
                await two_steps_with(**actions)(fixture)

        FAULTY[replacement.__name__] = (
            SessionScenario(replacement.__name__, body),
            "begin/close: begun",
        )

    return add


@library_bug(HookSet, "begin")
async def hooks_are_registered_late(begin: Method, self: HookSet) -> None:
    """A hook counts as begun one await after its `begin` has begun."""
    for one in self.registered:
        await self._call_one(self._begin, one)
        self.begun.append(one)


@library_bug(HookSet, "close", h1_close=fails(Broken))
async def closing_stops_at_an_error(close: Method, self: HookSet, exc: Any, errors: Any) -> None:
    """The first failing `close` ends the closing."""
    while self.begun:
        await self._call_one(self._close, self.begun.pop(), exc)


@library_bug(lifecycle, "shielded_task")
async def closing_is_not_shielded(
    shielded_task: Method, closing: Coroutine[Any, Any, None], **options: Any
) -> Any:
    """A cancel of the caller goes into the closing."""
    task = asyncio.ensure_future(closing)
    await task
    return task


# -- stores


async def advance_once(fixture: StoreFixture) -> None:
    """Advance in a process."""
    async with fixture.process("one") as process:
        await fixture.advance(process.store)


class CancelSwallowingStore(WatchedStore):
    async def advance(self, by: int = 1) -> int:
        try:
            return await super().advance(by)
        except asyncio.CancelledError:
            return self.latest.step


@faulty("cancellation: cancelled", StoreFixture)
async def advance_swallows_a_cancel(fixture: StoreFixture) -> None:
    fixture.make_store = CancelSwallowingStore
    await advance_once(fixture)


class UncancellableStore(WatchedStore):
    def __init__(self, fixture: StoreFixture, **options: Any) -> None:
        super().__init__(fixture, **options)
        self._real_send_all = self._writes._send_all
        self._writes._send_all = self._send_all  # type: ignore[method-assign]

    async def _send_all(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await self._real_send_all()
        with contextlib.suppress(asyncio.CancelledError):
            await forever()
        await self.fixture.pause("writing", 200)


@faulty("leak: task 'step store default: writing' outlived", StoreFixture)
async def writing_outlives_the_store(fixture: StoreFixture) -> None:
    """The task of the writes swallows the cancel of the closing store."""
    fixture.make_store = UncancellableStore
    await advance_once(fixture)


class ResendingConnection(WatchedConnection):
    async def request(self, request: Request) -> Answer:
        answer = await super().request(request)
        if isinstance(request, Write):
            answer = await super().request(request._replace(seq=request.seq + 1))
        return answer


@faulty("exactly once: advance 0 was counted 2 times", StoreFixture)
async def write_is_sent_again_as_a_new_one(fixture: StoreFixture) -> None:
    fixture.make_connection = ResendingConnection
    await advance_once(fixture)


@faulty("exactly once: the variables are 1, the step is 0", StoreFixture)
async def commit_is_not_shielded(fixture: StoreFixture) -> None:
    async with fixture.process("one") as process:
        values_of(process.variables).initialize({"w": 0})
        process.variables.assign({"w": 1})
        await process.store.advance()


class LeadKeepingConnection(WatchedConnection):
    async def request(self, request: Request) -> Answer:
        if isinstance(request, Leave) and self.fixture.probe.delivered:
            return Answer("ok", self.link.waits.latest, 0)
        return await super().request(request)


@faulty("leak: the engine still has", StoreFixture)
async def lead_is_not_given_back(fixture: StoreFixture) -> None:
    fixture.make_connection = LeadKeepingConnection
    async with fixture.process("chief") as process:
        await lead_and_train(fixture, process, 1)


class KeptConnection(WatchedConnection):
    async def disconnect(self) -> None:
        """Do not."""


@faulty("is still connected", StoreFixture)
async def closing_keeps_the_connection(fixture: StoreFixture) -> None:
    fixture.make_connection = KeptConnection
    async with fixture.process("one"):
        await soon()


class TimerLeakingConnection(WatchedConnection):
    async def disconnect(self) -> None:
        await super().disconnect()
        self.link.clock.call_later(60.0, lambda: None)


@faulty("timers are left", StoreFixture)
async def disconnecting_leaves_a_timer(fixture: StoreFixture) -> None:
    fixture.make_connection = TimerLeakingConnection
    async with fixture.process("one") as process:
        fixture.outage(1)
        await process.store.value()


# -- checkpoints


class FileLeakingSaver(WatchedSaver):
    async def save(self, state: Any, step: int, *, metrics: Any = None) -> ah.checkpoint.Checkpoint:
        try:
            return await super().save(state, step, metrics=metrics)
        except asyncio.CancelledError:
            (self.fixture.path / ".tmp-step-000000000001.000001").mkdir()
            raise


class StepMixingSaver(WatchedSaver):
    async def save(self, state: Any, step: int, *, metrics: Any = None) -> ah.checkpoint.Checkpoint:
        state["variables"]["w"] = self.fixture.step + 1
        return await super().save(state, step, metrics=metrics)


class PrematureSaver(WatchedSaver):
    async def save(self, state: Any, step: int, *, metrics: Any = None) -> ah.checkpoint.Checkpoint:
        state["variables"]["w"] += 7
        return await super().save(state, step + 7, metrics=metrics)


def _saver_bug(kind: type[WatchedSaver], finding: str, name: str, *, closes: bool = True) -> None:
    async def body(fixture: CheckpointFixture) -> None:
        saver = kind(fixture)
        try:
            async with fixture.open(
                fixture.session(ah.CheckpointSaverHook(every=EVERY_STEP), saver=saver)
            ) as session:
                await fixture.run(session)
        finally:
            if closes or not fixture.probe.delivered:
                await await_to_the_end(saver.aclose)
            else:
                asyncio.get_running_loop().call_soon(saver._directory.close)  # too late

    body.__name__ = name
    faulty(finding, CheckpointFixture)(body)


_saver_bug(FileLeakingSaver, "left in the directory", "cancelled_save_leaves_a_file")
_saver_bug(StepMixingSaver, "has the variable of step", "checkpoint_mixes_two_steps")
_saver_bug(PrematureSaver, "which was never committed", "checkpoint_of_a_step_that_never_was")
_saver_bug(
    WatchedSaver,
    "another writer, perhaps in this",
    "directory_is_not_given_back",
    closes=False,
)


# -- gates, evaluations, watchdogs


@faulty("1 entering")
async def place_at_the_gate_is_lost(fixture: Fixture) -> None:
    """A producer that is admitted and cancelled in the same tick does not give its place back."""
    versions = ah.MemoryStepStore()

    async def enter() -> None:
        async with gate.admit():
            await fixture.pause("enter", 2)

    async def publish() -> None:
        for _ in range(6):
            await fixture.pause("publish", 2)
            await versions.advance()

    async with gate_of(fixture, versions, max_lag=0, per_version=2) as gate:
        gate._ledger.return_place = lambda: None  # type: ignore[method-assign]
        await fixture.run_together(
            one=enter, two=enter, three=enter, four=enter, helper_trainer=publish
        )


class EvaluationDroppingHook(WatchedEvaluator):
    async def _evaluate(self, evaluation: ah.hooks.Evaluation) -> None:
        try:
            await super()._evaluate(evaluation)
        except asyncio.CancelledError:
            self._queue.items.popleft()
            raise


@faulty("evaluated were")
async def cancelled_evaluation_is_forgotten(fixture: Fixture) -> None:
    fixture.actions["evaluation"] = lambda _: soon()
    hook = evaluator(fixture, mode="background")
    hook.__class__ = EvaluationDroppingHook
    async with fixture.open(hooks=[hook]) as session:
        await fixture.run(session)
        await fixture.run(session)
    check_every_step_evaluated(fixture, hook)


class TimerLeakingWatchdog(ah.hooks.WatchdogHook):
    async def close(self, exc: BaseException | None) -> None:
        """Leave the timer running."""


@faulty("timers are left")
async def watchdog_watches_on(fixture: Fixture) -> None:
    async with fixture.open(hooks=[TimerLeakingWatchdog(20)]) as session:
        await fixture.run(session)


def _raises_before_it_adds(put_nowait: Method, self: CallQueue, item: object) -> Any:
    self.check()
    return put_nowait(self, item)


_CHECKED_TOO_EARLY = Bug(Queue, "put_nowait", _raises_before_it_adds)


@faulty("background: of 3 calls", expect=(Broken, ExceptionGroup))
async def call_that_raises_an_earlier_failure_is_lost(fixture: Fixture) -> None:
    with _CHECKED_TOO_EARLY.injected():
        await calls_after_failures(fixture, Quiet(fixture, "b0"))
