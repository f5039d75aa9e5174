"""Sessions of several processes: the chief leads, restores and initialises; workers wait for it and start late."""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.stores._protocol import Expire
from aiohooks.stores.local import LocalStepStore
from aiohooks.testing import ManualClock
from tests.support.fake_engine import FakeEngine, FakeStepStore
from tests.support.hooks import EndRecorder
from tests.support.waiting import ticks, until_true

pytestmark = pytest.mark.every_python


def model() -> ah.Graph:
    graph = ah.Graph()
    graph.variable("w", 0)

    @graph.train_op(adds_to="w")
    async def train() -> int:
        return 1

    return graph


async def test_worker_waits_until_the_chief_has_initialised() -> None:
    """A worker in another process is entered when the chief's `init_fn` has ended, and then waits for its step."""
    engine = FakeEngine()
    ready = asyncio.Event()
    order: list[str] = []

    async def init(session: ah.Session) -> None:
        order.append("init")
        await ready.wait()

    async def chief() -> None:
        async with FakeStepStore(engine) as steps:
            creator = ah.ChiefSessionCreator(model(), scaffold=ah.Scaffold(init_fn=init), global_step=steps)
            async with ah.AsyncMonitoredSession(creator, [ah.StopAtStepHook(last_step=5)]) as session:
                while not session.should_stop():
                    await session.run("train")

    async def worker() -> int:
        async with FakeStepStore(engine) as steps:
            creator = ah.WorkerSessionCreator(model(), global_step=steps)
            async with ah.AsyncMonitoredSession(creator, [ah.GlobalStepWaiterHook(3)]) as session:
                order.append("worker")
                return int(await session.run("global_step"))
        raise AssertionError

    works = asyncio.ensure_future(worker())
    leads = asyncio.ensure_future(chief())
    for _ in range(50):
        await asyncio.sleep(0)
    assert order == ["init"]
    ready.set()
    assert await works >= 3
    await leads
    assert order == ["init", "worker"]


async def test_worker_gives_up_at_its_deadline() -> None:
    """A worker whose chief never comes ends at `max_wait_secs`, not before."""
    engine = FakeEngine()
    with ManualClock() as clock:
        async with FakeStepStore(engine) as steps:
            creator = ah.WorkerSessionCreator(model(), global_step=steps, max_wait_secs=30)
            entering = asyncio.ensure_future(ah.AsyncMonitoredSession(creator).__aenter__())
            for _ in range(20):
                await asyncio.sleep(0)
            clock.advance(29.9)
            await ticks(3)
            assert not entering.done()
            clock.advance(0.2)
            with pytest.raises(ah.errors.SessionNotReadyError, match="has not initialised it within 30 s"):
                await entering


def waiting_worker(engine: FakeEngine, steps: FakeStepStore) -> ah.WorkerSessionCreator:
    """A worker in another process than its chief."""
    return ah.WorkerSessionCreator(model(), global_step=steps)


def waiting_worker_here(engine: FakeEngine, steps: FakeStepStore) -> ah.WorkerSessionCreator:
    """A worker in the process of its chief."""
    return ah.WorkerSessionCreator(model(), variables=ah.Variables())


def standby_chief(engine: FakeEngine, steps: FakeStepStore) -> ah.ChiefSessionCreator:
    """A chief of a run that has one."""
    return ah.ChiefSessionCreator(model(), global_step=steps)


@pytest.mark.parametrize("make_creator", [waiting_worker, waiting_worker_here, standby_chief])
@pytest.mark.parametrize("before", [False, True])
async def test_a_stop_ends_the_wait_for_another_session(make_creator: Any, before: bool) -> None:
    """A session that waits for a chief, or for the end of another chief, ends at a stop, requested before or meanwhile."""
    engine = FakeEngine()
    recorder = EndRecorder()

    class Stops(ah.SessionRunHook):
        async def begin(self) -> None:
            if before:
                session.request_stop("enough")

    async with FakeStepStore(engine) as other, FakeStepStore(engine) as steps, other.lead():
        session = ah.AsyncMonitoredSession(make_creator(engine, steps), [Stops(), recorder])
        entering = asyncio.ensure_future(session.__aenter__())
        await ticks(40)
        assert entering.done() is before
        session.request_stop("enough")
        with pytest.raises(ah.StopRequestedError, match="enough"):
            await entering
        assert recorder.calls == ["begin", "close(StopRequestedError)"]
        assert session.status().state == "closed"


@pytest.mark.parametrize("was_open", [False, True])
@pytest.mark.parametrize("before", [False, True])
async def test_a_stop_ends_the_wait_for_an_engine(clock: ManualClock, before: bool, was_open: bool) -> None:
    """A session that waits for an engine that does not answer ends at a stop, and makes no further attempt to reach it."""
    engine = FakeEngine()
    recorder = EndRecorder()
    steps = FakeStepStore(engine)
    if was_open:
        await steps.value()
    engine.stop()
    session = ah.AsyncMonitoredSession(standby_chief(engine, steps), [recorder])
    entering = asyncio.ensure_future(session.__aenter__())
    if not before:
        await ticks(40)  # into the pause after the first attempt
    assert not entering.done()
    session.request_stop("enough")
    with pytest.raises(ah.StopRequestedError, match="enough"):
        await entering
    assert recorder.calls == ["begin", "close(StopRequestedError)"]
    closing = asyncio.ensure_future(steps.aclose())
    while not closing.done():  # it tries to announce that the session has ended
        await ticks(5)
        clock.advance(1)


async def check_that_a_stop_ends_the_opening(session: ah.AsyncMonitoredSession, engine: FakeEngine, clock: ManualClock) -> None:
    """Check that a session that waits for its engine ends at a stop; the engine is available again afterwards."""
    entering = asyncio.ensure_future(session.__aenter__())
    for _ in range(20):
        await ticks(40)
        clock.advance(1)
    assert not entering.done()
    session.request_stop("enough")
    with pytest.raises(ah.StopRequestedError, match="enough"):
        await entering
    engine.restart()
    await ticks(40)
    clock.advance(6)
    await ticks(40)


@pytest.mark.parametrize("noticed", [True, False])
@pytest.mark.parametrize("write", ["advance", "raise_to", "reset", "mark_initialised"])
async def test_a_stop_ends_the_wait_for_a_write(clock: ManualClock, write: str, noticed: bool) -> None:
    """A chief whose engine has gone away after its state was restored ends at a stop, in whatever it does, and writes nothing."""
    engine = FakeEngine()

    async def init(session: ah.Session) -> None:
        await steps.raise_to(3)
        engine.stop()
        if noticed:
            await ticks(40)
        if write != "mark_initialised":  # the chief calls that next
            await getattr(steps, write)(*[] if write == "advance" else [5])

    steps = FakeStepStore(engine)
    creator = ah.ChiefSessionCreator(model(), scaffold=ah.Scaffold(init_fn=init), global_step=steps)
    await check_that_a_stop_ends_the_opening(ah.AsyncMonitoredSession(creator), engine, clock)
    assert await steps.value() == (1, 3)
    await steps.aclose()


@pytest.mark.parametrize("call", ["lead", "advance", "raise_to", "reset", "mark_initialised"])
async def test_a_stop_ends_the_wait_for_a_lock(tmp_path: Path, call: str) -> None:
    """A chief that waits for the lock of a local run, which a stopped process may have, ends at a stop, and writes nothing."""
    steps = LocalStepStore(directory=tmp_path)
    await steps.value()
    lock = os.open(steps.directory, os.O_RDONLY)

    async def init(session: ah.Session) -> None:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if call != "mark_initialised":  # the chief calls that next
            await getattr(steps, call)(*[] if call == "advance" else [5])

    if call == "lead":
        fcntl.flock(lock, fcntl.LOCK_EX)
    creator = ah.ChiefSessionCreator(model(), scaffold=ah.Scaffold(init_fn=init), global_step=steps)
    session = ah.AsyncMonitoredSession(creator)
    entering = asyncio.ensure_future(session.__aenter__())
    await until_true(lambda: any(one.name == "aiohooks step store" for one in threading.enumerate()))
    session.request_stop("enough")
    with pytest.raises(ah.StopRequestedError, match="enough"):
        await entering
    os.close(lock)
    await steps.flush()
    assert await steps.value() == (1, 0)
    await steps.aclose()


async def test_a_stop_ends_the_wait_for_the_publishers(clock: ManualClock) -> None:
    """A worker whose publishers have all left looks for new ones first: its engine has gone away, and it ends at a stop."""
    engine = FakeEngine()
    async with FakeStepStore(engine) as steps, FakeStepStore(engine) as chief:
        await steps.value()
        with chief.publisher("chief"):
            await chief.flush()
            await steps.value()
        await chief.flush()
        with pytest.raises(ah.errors.PublisherFinishedError):
            await steps.wait_for(1)
        engine.stop()
        await check_that_a_stop_ends_the_opening(ah.AsyncMonitoredSession(waiting_worker(engine, steps)), engine, clock)


async def test_a_stop_before_a_lead_that_is_free() -> None:
    """A chief that need not wait for anybody is opened, also after a stop: its hooks see the end of the session."""
    engine = FakeEngine()

    class Stops(ah.SessionRunHook):
        async def begin(self) -> None:
            session.request_stop("enough")

    recorder = EndRecorder()
    async with FakeStepStore(engine) as steps:
        session = ah.AsyncMonitoredSession(standby_chief(engine, steps), [Stops(), recorder])
        async with session:
            assert session.should_stop()
    assert "end" in recorder.calls


async def test_a_worker_that_comes_after_the_end() -> None:
    """A worker whose chief has finished, and has no successor, is notified, and does not train on."""
    engine = FakeEngine()
    async with FakeStepStore(engine) as steps, ah.AsyncMonitoredSession(standby_chief(engine, steps)) as session:
        await session.run("train")
    with ManualClock() as clock:
        async with FakeStepStore(engine) as steps:
            worker = ah.AsyncMonitoredSession(waiting_worker(engine, steps))
            entering = asyncio.ensure_future(worker.__aenter__())
            await ticks(40)
            assert not entering.done(), "a successor may come"
            clock.advance(30.1)
            with pytest.raises(ah.errors.PublisherFinishedError, match="finished at step 1"):
                await entering


async def test_restarted_chief_takes_a_new_term_restores_and_resets(tmp_path: Path) -> None:
    """The chief fails at step 7 with a checkpoint of step 5: the next one starts a new epoch at 5; waiters keep waiting."""
    engine = FakeEngine()

    async def chief(last: int) -> None:
        async with FakeStepStore(engine) as steps:
            hooks = [ah.StopAtStepHook(last_step=12), ah.CheckpointSaverHook(every=ah.Every(steps=5), background=False)]
            creator = ah.ChiefSessionCreator(model(), checkpoint_dir=tmp_path, global_step=steps)
            async with ah.AsyncMonitoredSession(creator, hooks) as session:
                while not session.should_stop():
                    if steps.latest.step == last:
                        raise ValueError("the chief is ill")
                    await session.run("train")

    async with FakeStepStore(engine, on_lost="keep") as steps:
        peer = steps.publisher("a worker at work")
        keeps = asyncio.ensure_future(steps.wait_for(11))
        waiter = asyncio.ensure_future(steps.wait_for(11, on_reset="raise"))
        with pytest.raises(ValueError, match="ill"):
            await chief(7)
        assert (await steps.value()) == (1, 7)
        await chief(-1)
        assert await keeps == 12 or keeps.result() >= 11
        with pytest.raises(ah.errors.StepResetError) as caught:
            await waiter
        assert (caught.value.old, caught.value.new) == ((1, 7), (2, 5))
        assert engine.runs["default"].term == 2
        assert (await steps.value()) == (2, 12)
        peer.close()


async def test_chief_whose_lease_expired_is_refused() -> None:
    """Its lease expires while it does not run; another chief leads; its next step is refused and changes nothing."""
    engine = FakeEngine()
    with ManualClock():
        async with FakeStepStore(engine) as old, FakeStepStore(engine) as new:
            session = ah.AsyncMonitoredSession(ah.ChiefSessionCreator(model(), global_step=old))

            async def comes_back() -> None:
                async with session:
                    await session.run("train")
                    await old.flush()
                    for member in tuple(engine.runs["default"].members.values()):  # its process was stopped for a long time
                        engine.apply("default", Expire(member.id, member.heartbeat))
                    async with new.lead():
                        await new.advance()
                        await session.run("train")

            with pytest.raises(ah.errors.StaleTermError) as caught:
                await comes_back()
            assert (caught.value.term, caught.value.newest) == (1, 2)
            assert (await new.value()).step == 2


async def test_refused_step_leaves_the_variables() -> None:
    """An advance that the store refuses takes the run's variables back."""

    class Refusing(FakeStepStore):
        async def advance(self, by: int = 1) -> int:
            raise ah.errors.StaleTermError("no", term=1, newest=2)

    variables = ah.Variables()
    async with Refusing(FakeEngine()) as steps:
        with pytest.raises(ah.errors.StaleTermError):
            async with ah.AsyncMonitoredSession(model(), global_step=steps, variables=variables) as session:
                await session.run("train")
        assert variables.snapshot() == {"w": 0}


async def test_end_of_a_session_is_known_in_other_processes() -> None:
    """A worker that waits beyond the chief's last step ends cleanly, and its `stop_reason` says why."""
    engine = FakeEngine()

    async def worker() -> str | None:
        async with FakeStepStore(engine) as steps:
            hooks = [ah.GlobalStepWaiterHook(100)]
            session = ah.AsyncMonitoredSession(model(), hooks, global_step=steps)
            async with session:
                await session.run("train")
                raise AssertionError("it was started")
            return str(session.stop_reason)

    works = asyncio.ensure_future(worker())
    async with FakeStepStore(engine) as steps:
        creator = ah.ChiefSessionCreator(model(), global_step=steps)
        async with ah.AsyncMonitoredSession(creator, [ah.StopAtStepHook(last_step=3)], name="chief") as session:
            while not session.should_stop():
                await session.run("train")
        # The store is still open: that the session ended is enough.
        reason = await works
        assert reason is not None
        assert "chief finished at step 3, wanted 100" in reason


@pytest.mark.parametrize(
    ("name", "known_as"), [("trainer", "trainer"), (None, "main of process {pid} on ")], ids=["its name", "its task and process"]
)
async def test_name_of_a_session_in_other_processes(name: str | None, known_as: str) -> None:
    """Other processes see a session by its name, or else by those of its task and its process: each has a Task-1."""
    engine = FakeEngine()
    task = asyncio.current_task()
    assert task is not None
    task.set_name("main")
    here, there = FakeStepStore(engine), FakeStepStore(engine)
    async with here, there, ah.AsyncMonitoredSession(model(), global_step=here, name=name):
        await here.flush()
        await there.value()
        assert str(there).partition("published by ")[2].startswith(known_as.format(pid=os.getpid()))


async def test_a_restore_resets_a_store_that_had_lost_its_data_meanwhile(tmp_path: Path) -> None:
    """Another process has brought back the step of the checkpoint; one that knows a later step must not raise it."""
    for engine in (FakeEngine(), lost := FakeEngine()):
        async with FakeStepStore(engine) as steps, FakeStepStore(engine) as other:

            class Slow(ah.Saver):
                async def restore(
                    self, step: int | None = None, *, missing_ok: bool = False, other: ah.StepStore = other
                ) -> ah.checkpoint.Restored | None:
                    await other.raise_to(3)
                    return await super().restore(step, missing_ok=missing_ok)

            saver = ah.Saver(tmp_path) if engine is not lost else Slow(tmp_path)
            creator = ah.ChiefSessionCreator(model(), checkpoint_dir=saver, global_step=steps)
            async with ah.AsyncMonitoredSession(creator, [ah.CheckpointSaverHook()]) as session:
                if engine is not lost:
                    for _ in range(3):
                        await session.run("train")
                else:
                    assert (await other.value()) == (2, 3)
            await saver.aclose()
