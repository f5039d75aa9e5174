"""What P14 sends signals to: small programs whose every phase suspends, with a record of what was called."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohooks as ah

LAST_STEP = 4
NO_PAUSE = ah.RecoveryPolicy(backoff=ah.Backoff(initial_secs=0.0005, jitter=False))


async def ticks(count: int) -> None:
    """Suspends so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


class Busy(ah.SessionRunHook):
    """Counts its calls, and suspends in each."""

    def __init__(self, stage: Stage, in_turn: int) -> None:
        self.calls: Counter[str] = Counter()
        self._stage = stage
        self._ticks = in_turn

    async def _at(self, phase: str) -> None:
        self.calls[phase] += 1
        if phase == "end" and self._stage.cut:
            self._stage.problems.append("end was called after the second signal")
        await ticks(self._ticks)

    async def begin(self) -> None:
        await self._at("begin")

    async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
        await self._at("after_create_session")

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        await self._at("before_run")

    async def after_run(self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
        await self._at("after_run")

    async def end(self, session: ah.Session) -> None:
        await self._at("end")

    async def close(self, exc: BaseException | None) -> None:
        await self._at("close")


@dataclass(slots=True, eq=False)
class Act:
    """One session of a scenario."""

    session: ah.AsyncMonitoredSession
    hooks: list[Busy]
    left: BaseException | str | None = None
    """How its block was left: an error, or "well"."""


@dataclass(slots=True, eq=False)
class Stage:
    """One run of a scenario."""

    rng: random.Random
    scratch: Path
    acts: list[Act] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    cut: bool = False
    """Whether the second signal has been delivered."""

    def busy(self, count: int = 3) -> list[Busy]:
        """Hooks that suspend, more or less often."""
        return [Busy(self, self.rng.randrange(4)) for _ in range(count)]

    async def play(self, act: Act, body: Callable[[ah.AsyncMonitoredSession], Coroutine[Any, Any, None]]) -> None:
        """Enters the session and runs the body in it."""
        self.acts.append(act)
        try:
            async with act.session as session:
                await body(session)
        except BaseException as error:
            act.left = error
            raise
        act.left = "well"

    def directory(self) -> Path:
        """A new one for checkpoints."""
        return Path(tempfile.mkdtemp(dir=self.scratch))


Scenario = Callable[[Stage], Coroutine[Any, Any, None]]


def graph_of(step: Callable[..., Any] | None = None, *, thread: bool = False) -> ah.Graph:
    """A variable that counts the steps."""
    graph = ah.Graph()
    graph.variable("total", 0)

    if thread:

        @graph.train_op(adds_to="total", thread=True, name="train")
        def train_in_a_thread() -> int:
            return 1
    else:

        @graph.train_op(adds_to="total")
        async def train() -> int:
            await ticks(2)
            if step is not None:
                await step()
            return 1

    return graph


async def some_steps(session: ah.AsyncMonitoredSession) -> None:
    """Three steps, and then the block is left: nobody asks for a stop."""
    for _ in range(3):
        if not session.should_stop():
            await session.run("train")


async def to_the_end(session: ah.AsyncMonitoredSession) -> None:
    """Steps until the stop."""
    async for _ in session.steps("train"):
        await ticks(1)


async def plain(stage: Stage) -> None:
    """Three hooks, four steps."""
    hooks = stage.busy()
    session = ah.AsyncMonitoredSession(graph_of(), [*hooks, ah.StopAtStepHook(last_step=LAST_STEP)], handle_signals=True)
    await stage.play(Act(session, hooks), to_the_end)


async def unstopped(stage: Stage) -> None:
    """Three hooks, and an end that no stop has asked for."""
    hooks = stage.busy()
    await stage.play(Act(ah.AsyncMonitoredSession(graph_of(), hooks, handle_signals=True), hooks), some_steps)


async def saving(stage: Stage) -> None:
    """Checkpoints at the beginning, at every second step and at the end."""
    directory, hooks = stage.directory(), stage.busy(2)
    saver = ah.CheckpointSaverHook(every=ah.Every(steps=2), background=stage.rng.random() < 0.5)
    creator = ah.ChiefSessionCreator(graph_of(), checkpoint_dir=directory)
    session = ah.AsyncMonitoredSession(creator, [*hooks, saver, ah.StopAtStepHook(last_step=LAST_STEP)], handle_signals=True)
    act = Act(session, hooks)
    await stage.play(act, to_the_end)
    if act.left == "well":
        restored = await ah.Saver(directory).restore()
        step = session.global_step.latest.step
        if restored is None or restored.checkpoint.step != step:
            stage.problems.append(f"the last save is {restored!r}, and the session ended at step {step}")


async def recovering(stage: Stage) -> None:
    """A step that fails twice, and one session after the other."""
    failures = [ah.AbortedError("gone"), ah.UnavailableError("away")]

    async def fail() -> None:
        if failures:
            raise failures.pop()

    hooks = stage.busy()
    session = ah.AsyncMonitoredSession(
        graph_of(fail), [*hooks, ah.StopAtStepHook(last_step=2)], recovery=NO_PAUSE, handle_signals=True
    )
    await stage.play(Act(session, hooks), to_the_end)


async def waiting(stage: Stage) -> None:
    """A wait that only a stop, or this scenario's own patience, ends."""
    hooks = stage.busy(1)
    steps = ah.MemoryStepStore()
    session = ah.AsyncMonitoredSession(
        graph_of(), [*hooks, ah.GlobalStepWaiterHook(wait_until_step=10**6)], global_step=steps, handle_signals=True
    )

    async def body(session: ah.AsyncMonitoredSession) -> None:
        async def give_up() -> None:
            await ticks(30)
            session.request_stop("patience is at its end")

        session.start_soon(give_up)
        await to_the_end(session)

    await stage.play(Act(session, hooks), body)


async def producing(stage: Stage) -> None:
    """A background task feeds the steps through a queue."""
    hooks = stage.busy(2)
    batches: asyncio.Queue[int] = asyncio.Queue(maxsize=1)

    async def step(batch: int) -> dict[str, int]:
        await ticks(1)
        return {"loss": batch}

    async def body(session: ah.AsyncMonitoredSession) -> None:
        async def produce() -> None:
            for batch in range(3):
                await session.until(batches.put(batch))
            await session.until(batches.join())
            session.request_stop("all used")

        session.start_soon(produce)
        while not session.should_stop():
            batch = await session.until(batches.get())
            await session.run("loss", {"batch": batch})
            batches.task_done()

    await stage.play(Act(ah.AsyncMonitoredSession(step, hooks, handle_signals=True), hooks), body)


async def together(stage: Stage) -> None:
    """A chief and two workers, in tasks of one group."""
    graph, steps, variables = graph_of(), ah.MemoryStepStore(), ah.Variables()

    async def work(number: int) -> None:
        hooks = stage.busy(2)
        kind = ah.WorkerSessionCreator if number else ah.ChiefSessionCreator
        session = ah.AsyncMonitoredSession(
            kind(graph, global_step=steps, variables=variables),
            [*hooks, ah.GlobalStepWaiterHook(number), ah.StopAtStepHook(last_step=2 * LAST_STEP)],
            handle_signals=True,
            name=f"worker {number}",
        )
        await stage.play(Act(session, hooks), to_the_end)

    async with asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(work(number))


async def threads(stage: Stage) -> None:
    """An operation in a worker thread."""
    hooks = stage.busy(1)
    session = ah.AsyncMonitoredSession(graph_of(thread=True), [*hooks, ah.StopAtStepHook(last_step=2)], handle_signals=True)
    await stage.play(Act(session, hooks), to_the_end)


async def in_a_task(stage: Stage) -> None:
    """A session that another task than its own runs, and that is closed by hand."""
    hooks = stage.busy(2)
    session = ah.AsyncMonitoredSession(graph_of(), [*hooks, ah.StopAtStepHook(last_step=2)], handle_signals=True)

    async def body(session: ah.AsyncMonitoredSession) -> None:
        running = asyncio.create_task(to_the_end(session))
        try:
            await running
        finally:
            running.cancel()
            await asyncio.wait([running])
        await session.aclose()

    await stage.play(Act(session, hooks), body)


SCENARIOS: tuple[Scenario, ...] = (plain, unstopped, saving, recovering, waiting, producing, together, threads, in_a_task)
