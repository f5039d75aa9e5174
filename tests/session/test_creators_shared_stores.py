"""Sessions of several processes: the chief leads, restores and initialises; workers wait for it and
start late; variables and step are committed together, also if the store suspends.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

import aiohooks as ah
from aiohooks._core.clock import sleep
from aiohooks.testing import ManualClock, choose, explore
from tests.support.checks import refused
from tests.support.fake_engine import FakeEngine, FakeStepStore
from tests.support.hooks import EndRecorder, PhaseHook
from tests.support.sessions import counting_graph, outcome
from tests.support.stores import local_store, locked
from tests.support.waiting import advance_clock, parked, ticks, until_true

pytestmark = pytest.mark.every_python


def chief(steps: ah.StepStore, **options: Any) -> ah.ChiefSessionCreator:
    return ah.ChiefSessionCreator(counting_graph(), global_step=steps, **options)


def worker(steps: ah.StepStore, **options: Any) -> ah.WorkerSessionCreator:
    """Make a worker in another process than its chief."""
    return ah.WorkerSessionCreator(counting_graph(), global_step=steps, **options)


def worker_here(steps: ah.StepStore) -> ah.WorkerSessionCreator:
    """Make a worker in the process of its chief."""
    return ah.WorkerSessionCreator(counting_graph(), variables=ah.Variables())


async def train(session: ah.AsyncMonitoredSession) -> None:
    """Train until the session stops."""
    while not session.should_stop():
        await session.run("train")


async def stopped(session: ah.AsyncMonitoredSession, opening: asyncio.Task[Any]) -> None:
    """Stop a session that is being opened; check that this ends its opening."""
    session.request_stop("enough")
    with refused(ah.StopRequestedError, "enough"):
        await opening
    assert session.status().state == "closed"


# -- workers and their chief


async def test_worker_gives_up_at_its_deadline(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker whose chief never comes logs that it waits, and ends at `max_wait_secs`, not
    before.
    """
    caplog.set_level("INFO", logger="aiohooks")
    async with FakeStepStore(FakeEngine()) as steps:
        entering = await parked(
            ah.AsyncMonitoredSession(worker(steps, max_wait_secs=30)).__aenter__()
        )
        await ticks(20)
        await advance_clock(clock, 29.9, 3)
        assert not entering.done()
        clock.advance(0.2)
        with refused(ah.errors.SessionNotReadyError, "has not initialised it within 30 s"):
            await entering
    assert caplog.messages == ["run default: waiting until its chief has initialized it"]


async def test_a_worker_that_comes_after_the_end() -> None:
    """A worker whose chief has finished has nothing to do: its session ends normally, without a
    step.
    """
    engine = FakeEngine()
    async with FakeStepStore(engine) as steps, ah.AsyncMonitoredSession(chief(steps)) as session:
        await session.run("train")
    async with FakeStepStore(engine) as steps:
        async with ah.AsyncMonitoredSession(worker(steps)) as late:
            assert [step async for step in late.steps("train")] == []
        assert "finished at step 1" in str(late.stop_reason)


# -- a stop ends the opening, whatever it waits for


@pytest.mark.parametrize("make_creator", [worker, worker_here, chief])
@pytest.mark.parametrize("before", [False, True])
async def test_a_stop_ends_the_wait_for_another_session(make_creator: Any, before: bool) -> None:
    """A session that waits for a chief, or for the end of another chief, ends at a stop, requested
    before or meanwhile.
    """
    engine = FakeEngine()
    recorder = EndRecorder()

    async def stop() -> None:
        if before:
            session.request_stop("enough")

    async with FakeStepStore(engine) as other, FakeStepStore(engine) as steps, other.lead():
        session = ah.AsyncMonitoredSession(
            make_creator(steps), [PhaseHook("begin", stop), recorder]
        )
        entering = await parked(session.__aenter__())
        await ticks(40)
        assert entering.done() is before
        await stopped(session, entering)
    assert recorder.calls == ["begin", "close(StopRequestedError)"]


async def test_a_stop_before_a_request_to_the_engine() -> None:
    """After a stop, a session whose step is in an engine is not opened, also if the engine
    answers. A session that waits for nothing is, and its hooks see its end.
    """

    async def calls(steps: ah.StepStore) -> list[str]:
        async def stop() -> None:
            session.request_stop("enough")

        recorder = EndRecorder()
        session = ah.AsyncMonitoredSession(chief(steps), [PhaseHook("begin", stop), recorder])
        error = await outcome(session)
        assert (error is None) is isinstance(steps, ah.MemoryStepStore)
        return recorder.calls

    assert await calls(ah.MemoryStepStore()) == ["begin", "end", "close(NoneType)"]
    async with FakeStepStore(FakeEngine()) as steps:
        assert await calls(steps) == ["begin", "close(StopRequestedError)"]


@contextlib.asynccontextmanager
async def stopped_while_away(
    creator: ah.session.SessionCreator, engine: FakeEngine, clock: ManualClock
) -> AsyncIterator[None]:
    """Check that a session that waits for its engine ends at a stop; the engine is available again
    in the block.
    """
    session = ah.AsyncMonitoredSession(creator)
    entering = await parked(session.__aenter__())
    for _ in range(20):
        await ticks(40)
        clock.advance(1)
    assert not entering.done()
    await stopped(session, entering)
    engine.restart()
    await ticks(40)
    await advance_clock(clock, 6, 40)
    yield


@pytest.mark.parametrize("noticed", [True, False])
@pytest.mark.parametrize("write", ["advance", "raise_to", "reset", "mark_initialised"])
async def test_a_stop_ends_the_wait_for_a_write(
    clock: ManualClock, write: str, noticed: bool
) -> None:
    """A chief whose engine has gone away after its state was restored ends at a stop, in whatever
    it does, and writes nothing.
    """
    engine = FakeEngine()

    async def init(session: ah.Session) -> None:
        await steps.raise_to(3)
        engine.stop()
        if noticed:
            await ticks(40)
        if write != "mark_initialised":  # the chief calls that next
            await getattr(steps, write)(*[] if write == "advance" else [5])

    async with (
        FakeStepStore(engine) as steps,
        stopped_while_away(chief(steps, scaffold=ah.Scaffold(init_fn=init)), engine, clock),
    ):
        assert await steps.value() == (1, 3)


@pytest.mark.parametrize("call", ["lead", "advance", "raise_to", "reset", "mark_initialised"])
async def test_a_stop_ends_the_wait_for_a_lock(tmp_path: Path, call: str) -> None:
    """A chief that waits for the lock of a local run, which a stopped process may have, ends at a
    stop; its write may count.
    """
    steps = local_store(directory=tmp_path)
    await steps.value()
    lock = contextlib.ExitStack()

    async def init(session: ah.Session) -> None:
        lock.enter_context(locked(steps))
        if call != "mark_initialised":  # the chief calls that next
            await getattr(steps, call)(*[] if call == "advance" else [5])

    if call == "lead":
        lock.enter_context(locked(steps))
    session = ah.AsyncMonitoredSession(chief(steps, scaffold=ah.Scaffold(init_fn=init)))
    entering = asyncio.create_task(session.__aenter__())
    await until_true(
        lambda: any(thread.name == "aiohooks step store" for thread in threading.enumerate())
    )
    await stopped(session, entering)
    lock.close()
    await steps.flush()
    written = {"advance": (1, 1), "raise_to": (1, 5), "reset": (2, 5)}.get(call, (1, 0))
    assert await steps.value() in ((1, 0), written)
    await steps.aclose()


# -- a step store that suspends


class SlowStore(ah.MemoryStepStore):
    """A store whose `advance` suspends, as a remote engine's does; it may refuse the first one."""

    inline: ClassVar[bool] = False

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.asked: list[int] = []
        self.error = error

    async def advance(self, by: int = 1) -> int:
        self.asked.append(by)
        await self.gate.wait()
        if self.error is not None and len(self.asked) == 1:
            raise self.error
        return await super().advance(by)


async def test_a_run_that_read_what_was_undone_is_repeated() -> None:
    """Variables are there before their step; a run that had read those of a step that was refused
    begins again.
    """
    graph = ah.Graph()
    read = list[int]()
    gate = asyncio.Event()
    graph.placeholder("waits")
    graph.variable("v", 1)

    @graph.train_op(updates="v")
    async def double(v: int, waits: bool) -> int:
        read.append(v)
        if waits:
            await gate.wait()
        return 2 * v

    session = ah.Session(graph, global_step=(store := SlowStore(ah.UnavailableError("no"))))
    refused = await parked(session.run("double", {"waits": False}))
    await until_true(lambda: store.asked)
    waiting = await parked(session.run("double", {"waits": True}))
    await until_true(lambda: len(read) == 2)
    store.gate.set()
    with pytest.raises(ah.UnavailableError):
        await refused
    gate.set()
    assert await waiting == session.variables.snapshot()["v"] == 2
    assert read == [1, 2, 1]


class UnreliableStore(ah.MemoryStepStore):
    """A store whose `advance` takes its time, or is refused."""

    inline: ClassVar[bool] = False

    async def advance(self, by: int = 1) -> int:
        await sleep(choose(0, 0.01))
        if choose(False, True):
            raise OSError("refused")
        step = await super().advance(by)
        await sleep(choose(0, 0.01))
        return step


async def train_with_time_limits() -> None:
    """Make runs that fail, and some that a time limit ends anywhere; in the end all agree about
    which of them count.
    """
    store = UnreliableStore()
    graph = counting_graph()
    read = list[int]()
    raw = list[ah.Session]()
    loops: list[Any] = []

    @graph.train_op(adds_to="total", name="record")
    async def record(x: int) -> int:
        ah.effect("recorded", x)
        await sleep(choose(0, 0.01))
        return 1

    delivered: list[str] = []

    async def deliver(effect: ah.hooks.Effect) -> None:
        await sleep(choose(0, 0.01))
        delivered.append(effect.key)

    async def feeds() -> AsyncIterator[dict[str, int]]:
        for number in range(6):
            read.append(number)
            yield {"x": number}

    @ah.hook("after_create_session")
    async def keep(session: ah.Session, coord: ah.Coordinator) -> None:
        raw.append(session)

    effects = ah.hooks.EffectsHook({"recorded": deliver}, run="r", when="commit")
    session = ah.AsyncMonitoredSession(
        graph,
        [keep, effects, ah.StopAtStepHook(last_step=5)],
        global_step=store,
        stop_grace_period_secs=1e6,
    )
    try:
        async with session:
            steps = session.steps("record", feeds=feeds(), prefetch=choose(0, 1))
            loops.append(steps)
            ended = False
            while not ended:
                with contextlib.suppress(TimeoutError, OSError):
                    async with asyncio.timeout(choose(None, 0.015)):
                        ended = await anext(steps, None) is None
    finally:
        (status,) = effects.status()
        counted = [opened.variables.snapshot()["total"] for opened in raw]
        counted += [len(read) - len(steps.unused) for steps in loops]
        counted += [len(delivered) + status.pending]
        assert {*counted} == {store.latest.step}, counted


@pytest.mark.asyncio(loop_factories=["asyncio"])  # what is explored has a loop of its own
async def test_variables_feeds_and_effects_are_those_of_the_step() -> None:
    """However runs end: in any order, refused, cancelled, stopped, or at a time limit."""
    explored = await explore(train_with_time_limits, seeds=60)
    assert explored.disturbances.keys() >= {"cancel", "choice"}
