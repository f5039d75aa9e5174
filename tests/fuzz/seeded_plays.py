"""Bugs on purpose, in plays: a store, a creator, a hook or the whole session is a faulty one, and the sweep must find it.

`Director` brackets hooks as a session does, in a few lines that can be told to do it wrong. The numbers in brackets are those
of the mutant zoo in `reference/reliability.md` B.4, the names those of its section E.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohooks as ah
from tests.fuzz.playbook import advance_slowly, fails, two_steps
from tests.fuzz.seeded_coroutines import FAULTY, SOUND
from tests.fuzz.stage import Stage, StageHook, StageScenario, soon


def faulty_play(finding: str, **options: Any) -> Callable[[Callable[[Stage], Awaitable[None]]], None]:
    def add(play: Callable[[Stage], Awaitable[None]]) -> None:
        FAULTY[play.__name__] = (StageScenario(play.__name__, play, **options), finding)

    return add


class LeakyStore(ah.MemoryStepStore):
    """(20): a cancelled wait stays parked."""

    async def wait_for(self, step: int, **options: Any) -> int:
        return await asyncio.shield(asyncio.ensure_future(super().wait_for(step, **options)))


@faulty_play("I9: the store still has", hooks=0)
async def waiter_is_left(stage: Stage) -> None:
    store = stage.store = LeakyStore()

    async def waiter() -> None:
        await store.wait_for(2)

    await stage.together(waiter=waiter, helper=lambda: advance_slowly(stage, 2))


class ForgetfulCreator:
    """Lets go of a session that it has opened already."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.graph = stage.graph

    async def create_session(self) -> ah.Session:
        session = ah.Session(self.graph, global_step=self.stage.store, variables=self.stage.variables)
        self.stage.sessions.append(session)
        await self.stage.perform("create")
        return session


@faulty_play("I1: session 0 was not closed", hooks=1)
async def session_is_lost(stage: Stage) -> None:
    stage.acts["create"] = lambda _: soon()
    async with ah.AsyncMonitoredSession(ForgetfulCreator(stage), hooks=stage.hooks) as session:
        await stage.run(session)


@faulty_play("all or nothing: the variable is 1 at step 0", hooks=1)
async def half_of_a_commit_shows(stage: Stage) -> None:
    async def early(call: int) -> None:
        stage.variables.assign({"w": call})
        await soon()
        stage.variables.assign({"w": call - 1})

    stage.acts["train"] = early
    await two_steps(stage)


@faulty_play("I9: task 'orphan' outlived", hooks=1)
async def hook_leaves_a_task(stage: Stage) -> None:
    async def leak(call: int) -> None:
        child = asyncio.get_running_loop().create_task(stage.pause("orphan", 9), name="orphan")
        await soon()
        await child

    stage.acts["h0.before_run"] = leak
    await two_steps(stage)


@faulty_play("I12: h1.before_run was cancelled by others", hooks=2)
async def child_vanishes(stage: Stage) -> None:
    """(E-14): a hook whose own task swallows its cancellation, so that nobody can tell."""

    async def deaf(call: int) -> None:
        try:
            await soon()
        except asyncio.CancelledError:
            if stage.probe.children:
                return
            raise

    stage.acts["h0.before_run"] = lambda _: soon()
    stage.acts["h1.before_run"] = deaf
    await two_steps(stage)


@dataclass
class Director:
    """Brackets a stage's hooks as a session does; correct unless told otherwise."""

    stage: Stage
    registers_late: bool = False
    """(1): a hook counts as begun one await after its `begin` has begun."""
    stops_at_error: bool = False
    """`end_stops_at_error`: the first failing `close` ends the closing."""
    unshielded: bool = False
    """A cancel during the closing ends it."""
    leaves_siblings: bool = False
    """(31): the siblings of a failed hook are cancelled and not awaited."""

    async def play(self) -> None:
        begun: list[StageHook] = []
        try:
            for hook in self.stage.hooks:
                assert isinstance(hook, StageHook)
                if not self.registers_late:
                    begun.append(hook)
                await hook.begin()
                if self.registers_late:
                    begun.append(hook)
            await self.before_run(begun)
        finally:
            if self.unshielded:
                await self.close(begun)
            else:
                await self.shielded(begun)

    async def before_run(self, begun: list[StageHook]) -> None:
        loop = asyncio.get_running_loop()
        context: Any = None
        tasks = [loop.create_task(hook.before_run(context), name="sibling") for hook in begun]
        cancel: asyncio.CancelledError | None = None
        while not all(task.done() for task in tasks):
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError as error:
                cancel = cancel or error
            failed = any(task.done() and (task.cancelled() or task.exception()) for task in tasks)
            if cancel or failed:
                for task in tasks:
                    task.cancel()
                if self.leaves_siblings:
                    break
        if cancel is not None:
            raise cancel
        for task in tasks:
            if task.cancelled():
                raise ah.errors.HookCancelledError
            if task.done():
                task.result()

    async def shielded(self, begun: list[StageHook]) -> None:
        task = asyncio.get_running_loop().create_task(self.close(begun), name="closing")
        cancel: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as again:
                cancel = cancel or again
        error = None if task.cancelled() else task.exception()
        if cancel is not None:
            raise cancel
        if error is not None:
            raise error

    async def close(self, begun: list[StageHook]) -> None:
        for hook in reversed(begun):
            try:
                await hook.close(None)
            except BaseException:
                if self.stops_at_error or self.unshielded:
                    raise


async def slow_to_die(call: int) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        for _ in range(9):
            await asyncio.sleep(0)


def _directed(name: str, finding: str, **faults: bool) -> None:
    async def play(stage: Stage) -> None:
        if faults.get("stops_at_error"):
            stage.acts["h1.close"] = fails(ValueError)
        if faults.get("leaves_siblings"):
            stage.acts["h1.before_run"] = fails(ValueError)
            stage.acts["h0.before_run"] = slow_to_die
        await Director(stage, **faults).play()

    expect = ValueError if faults.get("leaves_siblings") or faults.get("stops_at_error") else None
    FAULTY[name] = (StageScenario(name, play, expect=expect), finding)


async def _directed_well(stage: Stage) -> None:
    await Director(stage).play()


SOUND.append(StageScenario("directed well", _directed_well))
_directed("registers late", "I1: begun", registers_late=True)
_directed("closing stops at an error", "I1: begun", stops_at_error=True)
_directed("closing is not shielded", "I1: begun", unshielded=True)
_directed("siblings are left", "I1: h2.close while h0.before_run still runs", leaves_siblings=True)
