"""Bugs on purpose, in stores, savers, gates and the like: the plays about them must find each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import aiohooks as ah
from aiohooks.stores._protocol import Answer, Leave, Request, Write
from tests.fuzz.playbook import finish, let_time_pass
from tests.fuzz.plays_of_checkpoints import EVERY_STEP, PATIENCE_SECS, CheckpointStage, StageSaver
from tests.fuzz.plays_of_gates import gate_of
from tests.fuzz.plays_of_services import check_evaluated, evaluator, no_timers
from tests.fuzz.plays_of_stores import lead_and_train
from tests.fuzz.seeded_coroutines import FAULTY
from tests.fuzz.stage import Stage, StageScenario, soon
from tests.fuzz.stage_of_stores import StageStore, StoreStage


def faulty_on(stage: type[Stage], finding: str, **options: Any) -> Callable[[Callable[[Any], Awaitable[None]]], None]:
    def add(play: Callable[[Any], Awaitable[None]]) -> None:
        options.setdefault("manual", stage is StoreStage)
        FAULTY[play.__name__] = (StageScenario(play.__name__, play, stage=stage, hooks=0, parallel=True, **options), finding)

    return add


# -- stores


class Swallowing(StageStore):
    async def _write(self, kind: Any, amount: int) -> Any:
        try:
            return await super()._write(kind, amount)
        except asyncio.CancelledError:
            return self.latest


@faulty_on(StoreStage, "I7: cancelled")
async def advance_swallows_a_cancel(stage: StoreStage) -> None:
    stage.make_store = Swallowing
    async with stage.process("one") as process:
        await stage.advance(process.store)


class Deaf(StageStore):
    async def _write_all(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await super()._write_all()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await self.stage.pause("deaf", 200)


@faulty_on(StoreStage, "I9: task 'step store default: writing' outlived")
async def writing_outlives_the_store(stage: StoreStage) -> None:
    """`_write_all` swallows the cancel with which the store ends."""
    stage.make_store = Deaf
    async with stage.process("one") as process:
        stage.pass_time()
        await stage.advance(process.store)


class Doubling(StageStore):
    async def _request_once(self, request: Request) -> Answer:
        answer = await super()._request_once(request)
        if isinstance(request, Write):
            answer = await super()._request_once(self._next_write(request.kind, request.amount))
        return answer


@faulty_on(StoreStage, "exactly once: advance 0 was counted 2 times")
async def write_is_sent_again_as_a_new_one(stage: StoreStage) -> None:
    stage.make_store = Doubling
    async with stage.process("one") as process:
        await stage.advance(process.store)


@faulty_on(StoreStage, "exactly once: the variables are 1, the step is 0")
async def commit_is_not_shielded(stage: StoreStage) -> None:
    async with stage.process("one") as process:
        process.variables.initialise({"w": 0})
        process.variables.assign({"w": 1})
        await process.store.advance()


class Clinging(StageStore):
    async def _request(self, request: Request) -> Answer:
        if isinstance(request, Leave) and self.stage.probe.fired:
            return Answer("ok", self.latest, 0, 0)
        return await super()._request(request)


@faulty_on(StoreStage, "I9: the engine still has")
async def lead_is_not_given_back(stage: StoreStage) -> None:
    stage.make_store = Clinging
    async with stage.process("chief") as process:
        await lead_and_train(stage, process, 1)


class HoldingOn(StageStore):
    async def _close_connection(self) -> None:
        """Does not."""


@faulty_on(StoreStage, "is still connected")
async def closing_keeps_the_connection(stage: StoreStage) -> None:
    stage.make_store = HoldingOn
    async with stage.process("one"):
        await soon()


class Napping(StageStore):
    async def _backoff_sleep(self, secs: float) -> None:
        woken = asyncio.get_running_loop().create_future()
        self._clock.call_later(secs, lambda: woken.done() or woken.set_result(None))
        await woken


@faulty_on(StoreStage, "1 timers are left")
async def pause_leaves_its_timer(stage: StoreStage) -> None:
    stage.make_store = Napping
    async with stage.process("one") as process:
        stage.outage(2)
        try:
            await process.store.value()
        finally:
            stage.stands_still = True


# -- checkpoints


class Littering(StageSaver):
    async def save(self, state: Any, step: int, *, metrics: Any = None) -> ah.checkpoint.Checkpoint:
        try:
            return await super().save(state, step, metrics=metrics)
        except asyncio.CancelledError:
            (self.stage.path / ".tmp-step-000000000001.000001").mkdir()
            raise


class Mixing(StageSaver):
    async def save(self, state: Any, step: int, *, metrics: Any = None) -> ah.checkpoint.Checkpoint:
        state["variables"]["w"] = self.stage.step + 1
        return await super().save(state, step, metrics=metrics)


class Early(StageSaver):
    async def save(self, state: Any, step: int, *, metrics: Any = None) -> ah.checkpoint.Checkpoint:
        state["variables"]["w"] += 7
        return await super().save(state, step + 7, metrics=metrics)


def _saver_that(kind: type[StageSaver], finding: str, name: str, *, closes: bool = True) -> None:
    async def play(stage: CheckpointStage) -> None:
        saver = kind(stage)
        try:
            async with stage.open(stage.session(ah.CheckpointSaverHook(every=EVERY_STEP), saver=saver)) as session:
                await stage.run(session)
        finally:
            if closes or not stage.probe.fired:
                await finish(saver.aclose)
            else:
                asyncio.get_running_loop().call_soon(saver._directory.close)  # too late

    play.__name__ = name
    faulty_on(CheckpointStage, finding, hang_secs=PATIENCE_SECS)(play)


_saver_that(Littering, "left in the directory", "cancelled_save_leaves_a_file")
_saver_that(Mixing, "has the variable of step", "checkpoint_mixes_two_steps")
_saver_that(Early, "which was never committed", "checkpoint_of_a_step_that_never_was")
_saver_that(StageSaver, "is in use by this process itself", "directory_is_not_given_back", closes=False)


# -- gates, evaluations, watchdogs


@faulty_on(Stage, "1 coming")
async def place_at_the_gate_is_lost(stage: Stage) -> None:
    """Who was let in and cancelled in one moment does not give the place back."""
    versions = ah.MemoryStepStore()

    async def enter() -> None:
        async with gate.admit():
            await stage.pause("enter", 2)

    async def publish() -> None:
        for _ in range(6):
            await stage.pause("publish", 2)
            await versions.advance()

    async with gate_of(stage, versions, max_lag=0, per_version=2) as gate:
        gate._give_back = lambda: None  # type: ignore[method-assign]
        await stage.together(one=enter, two=enter, three=enter, four=enter, helper_trainer=publish)


class Forgetting(ah.EvaluatorHook):
    async def _evaluate_first(self) -> None:
        try:
            await super()._evaluate_first()
        except asyncio.CancelledError:
            self._pending.popleft()
            raise


@faulty_on(Stage, "evaluated were")
async def cancelled_evaluation_is_forgotten(stage: Stage) -> None:
    stage.acts["evaluation"] = lambda _: soon()
    hook = evaluator(stage, mode="background")
    hook.__class__ = Forgetting
    async with stage.open(hooks=[hook]) as session:
        await stage.run(session)
        await stage.run(session)
    check_evaluated(stage, hook)


class Watching(ah.WatchdogHook):
    async def close(self, exc: BaseException | None) -> None:
        """Watches on."""


@faulty_on(Stage, "1 timers are left", manual=True)
async def watchdog_watches_on(stage: Stage) -> None:
    let_time_pass(stage, 50, 1)
    try:
        async with stage.open(hooks=[Watching(20)]) as session:
            await stage.run(session)
    finally:
        no_timers(stage)
