"""Small programs whose every phase suspends, with a record of the calls: the scenarios of the sweep."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohooks as ah
from tests.support.hooks import EveryPhaseHook
from tests.support.waiting import ticks

LAST_STEP = 4
NO_PAUSE = ah.RecoveryPolicy(backoff=ah.Backoff(initial_secs=0.0005, jitter=False))


class SuspendingHook(EveryPhaseHook):
    """Counts its calls, and suspends in each."""

    def __init__(self, fixture: Fixture, suspensions: int) -> None:
        self.calls: Counter[str] = Counter()
        self._fixture = fixture
        self._suspensions = suspensions

    async def in_phase(self, phase: str, *args: Any) -> None:
        if phase == "end" and self._fixture.cancelled:
            if args[0] in self._fixture.late:
                self._fixture.problems.append("end was called after the second signal")
            self._fixture.late.append(args[0])  # one call may have been started: before Python 3.12 it begins a turn later
        self.calls[phase] += 1
        await ticks(self._suspensions)


@dataclass(slots=True, eq=False)
class Entry:
    """One session of a scenario, and how its block was left."""

    session: ah.AsyncMonitoredSession
    hooks: list[SuspendingHook]
    left: BaseException | str | None = None
    """The error that the block raised, or "cleanly", or "unopened" if a stop came before it was entered; None before."""


@dataclass(slots=True, eq=False)
class Fixture:
    """What one run of a scenario runs with."""

    rng: random.Random
    scratch: Path
    entries: list[Entry] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    cancelled: bool = False
    """Whether the second signal has been delivered."""
    late: list[ah.Session] = field(default_factory=list)
    """The sessions of which a hook's `end` was called after that."""

    def hooks(self, count: int = 3) -> list[SuspendingHook]:
        """Return hooks that suspend a random number of times in each call."""
        return [SuspendingHook(self, self.rng.randrange(4)) for _ in range(count)]

    async def run(self, entry: Entry, body: Callable[[ah.AsyncMonitoredSession], Coroutine[Any, Any, None]]) -> None:
        """Enter the session and run the body in it."""
        self.entries.append(entry)
        try:
            async with entry.session as session:
                await body(session)
        except ah.StopRequestedError:
            entry.left = "unopened"  # it waited for another session
            return
        except BaseException as error:
            entry.left = error
            raise
        entry.left = "cleanly"

    def directory(self) -> Path:
        """Make a directory for checkpoints."""
        return Path(tempfile.mkdtemp(dir=self.scratch))


Scenario = Callable[[Fixture], Coroutine[Any, Any, None]]


def graph_of(step: Callable[..., Any] | None = None, *, thread: bool = False) -> ah.Graph:
    """Return a graph with a variable that counts the steps."""
    graph = ah.Graph()
    graph.variable("total", 0)

    if thread:

        @graph.train_op(adds_to="total", thread=True, name="train")
        def train_in_thread() -> int:
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
    """Run three steps and leave the block without a stop."""
    for _ in range(3):
        if not session.should_stop():
            await session.run("train")


async def until_stopped(session: ah.AsyncMonitoredSession) -> None:
    """Run steps until the stop."""
    async for _ in session.steps("train"):
        await ticks(1)


async def plain(fixture: Fixture) -> None:
    """Three hooks, four steps."""
    hooks = fixture.hooks()
    session = ah.AsyncMonitoredSession(graph_of(), [*hooks, ah.StopAtStepHook(last_step=LAST_STEP)], handle_signals=True)
    await fixture.run(Entry(session, hooks), until_stopped)


async def unstopped(fixture: Fixture) -> None:
    """Three hooks, and an end without a stop."""
    hooks = fixture.hooks()
    await fixture.run(Entry(ah.AsyncMonitoredSession(graph_of(), hooks, handle_signals=True), hooks), some_steps)


async def saving(fixture: Fixture) -> None:
    """Checkpoints at the start, at every second step and at the end."""
    directory, hooks = fixture.directory(), fixture.hooks(2)
    saver = ah.CheckpointSaverHook(every=ah.Every(steps=2), background=fixture.rng.random() < 0.5)
    creator = ah.ChiefSessionCreator(graph_of(), checkpoint_dir=directory)
    session = ah.AsyncMonitoredSession(creator, [*hooks, saver, ah.StopAtStepHook(last_step=LAST_STEP)], handle_signals=True)
    entry = Entry(session, hooks)
    await fixture.run(entry, until_stopped)
    if entry.left == "cleanly":
        restored = await ah.Saver(directory).restore()
        step = session.global_step.latest.step
        if restored is None or restored.checkpoint.step != step:
            fixture.problems.append(f"the last save is {restored!r}, and the session ended at step {step}")


async def recovering(fixture: Fixture) -> None:
    """A step that fails twice, with a new session after each failure."""
    failures = [ah.AbortedError("gone"), ah.UnavailableError("away")]

    async def fail() -> None:
        if failures:
            raise failures.pop()

    hooks = fixture.hooks()
    session = ah.AsyncMonitoredSession(
        graph_of(fail), [*hooks, ah.StopAtStepHook(last_step=2)], recovery=NO_PAUSE, handle_signals=True
    )
    await fixture.run(Entry(session, hooks), until_stopped)


async def waiting(fixture: Fixture) -> None:
    """A wait that only a stop ends: a signal's, or the scenario's own after a while."""
    hooks = fixture.hooks(1)
    steps = ah.MemoryStepStore()
    session = ah.AsyncMonitoredSession(
        graph_of(), [*hooks, ah.GlobalStepWaiterHook(wait_until_step=10**6)], global_step=steps, handle_signals=True
    )

    async def body(session: ah.AsyncMonitoredSession) -> None:
        async def give_up() -> None:
            await ticks(30)
            session.request_stop("no signal came")

        session.start_soon(give_up)
        await until_stopped(session)

    await fixture.run(Entry(session, hooks), body)


async def producing(fixture: Fixture) -> None:
    """A background task feeds the steps through a queue."""
    hooks = fixture.hooks(2)
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

    await fixture.run(Entry(ah.AsyncMonitoredSession(step, hooks, handle_signals=True), hooks), body)


async def draining(fixture: Fixture) -> None:
    """Elements are taken ahead; the first signal lets them be used, and the second one is a stop."""
    hooks, taken, used = fixture.hooks(2), list[int](), list[int]()

    async def batches() -> AsyncIterator[int]:
        for batch in range(LAST_STEP):
            await ticks(fixture.rng.randrange(3))
            taken.append(batch)
            yield batch

    async def step(batch: int) -> dict[str, int]:
        await ticks(1)
        return {"loss": batch}

    async def body(session: ah.AsyncMonitoredSession) -> None:
        steps = session.steps("loss", feeds=batches(), prefetch=2)
        async for batch in steps:
            used.append(batch)
        if taken != [*used, *steps.unused]:
            fixture.problems.append(f"{taken} were taken, {used} used, and {steps.unused} left")

    session = ah.AsyncMonitoredSession(step, hooks, handle_signals=ah.SignalPolicy(drain_secs=60))
    await fixture.run(Entry(session, hooks), body)


async def together(fixture: Fixture) -> None:
    """A chief and two workers, as tasks of one group."""
    graph, steps, variables = graph_of(), ah.MemoryStepStore(), ah.Variables()

    async def work(number: int) -> None:
        hooks = fixture.hooks(2)
        kind = ah.WorkerSessionCreator if number else ah.ChiefSessionCreator
        session = ah.AsyncMonitoredSession(
            kind(graph, global_step=steps, variables=variables),
            [*hooks, ah.GlobalStepWaiterHook(number), ah.StopAtStepHook(last_step=2 * LAST_STEP)],
            handle_signals=True,
            name=f"worker {number}",
        )
        await fixture.run(Entry(session, hooks), until_stopped)

    async with asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(work(number))


async def threads(fixture: Fixture) -> None:
    """An operation in a worker thread."""
    hooks = fixture.hooks(1)
    session = ah.AsyncMonitoredSession(graph_of(thread=True), [*hooks, ah.StopAtStepHook(last_step=2)], handle_signals=True)
    await fixture.run(Entry(session, hooks), until_stopped)


async def in_a_task(fixture: Fixture) -> None:
    """A session whose steps run in another task than its own, and that is closed by `aclose`."""
    hooks = fixture.hooks(2)
    session = ah.AsyncMonitoredSession(graph_of(), [*hooks, ah.StopAtStepHook(last_step=2)], handle_signals=True)

    async def body(session: ah.AsyncMonitoredSession) -> None:
        running = asyncio.create_task(until_stopped(session))
        try:
            await running
        finally:
            running.cancel()
            await asyncio.wait([running])
        await session.aclose()

    await fixture.run(Entry(session, hooks), body)


SCENARIOS: tuple[Scenario, ...] = (
    plain,
    unstopped,
    saving,
    recovering,
    waiting,
    producing,
    draining,
    together,
    threads,
    in_a_task,
)
