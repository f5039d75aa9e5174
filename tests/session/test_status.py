"""`session.status()`: active hooks and operations, waits and their start, at every stage of a session's life."""

from __future__ import annotations

import asyncio
import gc
import pickle
import weakref

import pytest

import aiohooks as ah
from aiohooks.hooks.global_step_waiter import GlobalStepWaiterHook
from aiohooks.testing import FaultInjectionHook, ManualClock
from tests.support.hooks import PhaseHook
from tests.support.sessions import NO_BACKOFF, counting_graph, do_nothing, double
from tests.support.waiting import forever, parked, ticks

pytestmark = pytest.mark.every_python


class Gate:
    """An event to wait for, with a line of its own in a stack."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    async def pass_through(self, *_: object) -> None:
        await self.opened.wait()


def named(status: ah.session.SessionStatus) -> list[tuple[str, float | None]]:
    return [(one.what, one.secs) for one in status.doing]


@pytest.mark.parametrize("phase", ["begin", "after_create_session", "before_run", "after_run", "end", "close"])
async def test_the_active_hook_is_named(phase: str, clock: ManualClock) -> None:
    """In every phase the status names the hook that is active, since when, and the line at which it waits."""
    clock.advance(100)
    gate = Gate()
    hook = PhaseHook(phase, gate.pass_through)
    session = ah.AsyncMonitoredSession(double, [ah.SessionRunHook(), hook], name="chief")

    async def main() -> None:
        async with session:
            await session.run("loss")

    task = asyncio.create_task(main())
    await ticks(20)
    clock.advance(3.5)
    status = session.status()
    (doing,) = status.doing
    assert doing.what.startswith(f"PhaseHook.{phase}")
    assert doing.secs == 3.5
    assert doing.hook is hook
    assert doing.where is not None
    assert f"Gate.pass_through ({__file__}:" in doing.where
    assert "Event.wait" in doing.where
    assert str(doing) in str(status)
    assert str(status).startswith(f"session chief: {status.state} for 3.5 s")
    gate.opened.set()
    await task
    assert session.status().doing == ()
    assert session.status().state_secs is None


async def test_all_active_hooks_are_named(clock: ManualClock) -> None:
    """Of hooks that overlap those are named that have not ended, with their numbers and the step."""
    slow, quick = Gate(), Gate()
    hooks = [PhaseHook("before_run", gate.pass_through) for gate in (slow, quick, slow)]
    async with ah.AsyncMonitoredSession(double, hooks) as session:
        run = asyncio.create_task(session.run("loss"))
        await ticks()
        clock.advance(1)
        assert named(session.status()) == [(f"PhaseHook#{number}.before_run at step 1", 1.0) for number in (1, 2, 3)]
        quick.opened.set()
        await ticks()
        clock.advance(1)
        assert named(session.status()) == [(f"PhaseHook#{number}.before_run at step 1", 2.0) for number in (1, 3)]
        assert session.status().run_secs == 2.0
        assert all(one.task is not run and one.where is not None for one in session.status().doing)
        slow.opened.set()
        await run


@pytest.mark.parametrize("hooked", [False, True])
async def test_the_active_operation_is_named(clock: ManualClock, hooked: bool) -> None:
    """The active operation is named, with hooks and without, with the line of the step at which it waits."""
    gate = Gate()

    async def step() -> None:
        await gate.pass_through()

    hooks = [PhaseHook("after_run", do_nothing)] if hooked else []
    async with ah.AsyncMonitoredSession(step, hooks) as session:
        run = asyncio.create_task(session.run("step"))
        await ticks()
        clock.advance(0.25)
        assert [one.secs for one in session.status().doing] == [0.25]
        clock.advance(1.75)
        (doing,) = session.status().doing
        assert (doing.what, doing.secs) == ("operation 'step' at step 1", 2.0)
        assert doing.where is not None
        assert "Gate.pass_through" in doing.where
        assert "at step 0, in run 1 for 2 s" in str(session.status())
        gate.opened.set()
        await run


async def test_a_wait_for_a_step_says_which(clock: ManualClock) -> None:
    """A wait for a step is shown with the step, the latest step seen, and the publishers."""
    steps = ah.MemoryStepStore(3, run="digits")
    with steps.publisher("chief"):
        async with ah.AsyncMonitoredSession(double, [GlobalStepWaiterHook(10)], global_step=steps, name="worker") as session:
            run = asyncio.create_task(session.run("loss"))
            await ticks()
            clock.advance(60)
            (doing,) = session.status().doing
            assert doing.awaits == "step 10 of digits"
            text = str(session.status())
            assert "GlobalStepWaiterHook.before_run at step 4 for 60 s, waiting for step 10 of digits" in text
            assert "last seen 3, published by chief" in text
            assert "1 waiter for 60 s, the next one due at step 10" in text
            await steps.raise_to(10)
            await run


async def test_the_block_and_the_background_tasks(clock: ManualClock) -> None:
    """Between runs the status says where the session's block waits, and where each background task does."""
    gate = Gate()
    queue: asyncio.Queue[int] = asyncio.Queue()

    async def producer() -> None:
        await gate.pass_through()
        queue.put_nowait(1)

    async def block(session: ah.AsyncMonitoredSession) -> None:
        async with session:
            task = session.start_soon(producer, name="producer")
            await queue.get()
            await task

    session = ah.AsyncMonitoredSession(double)
    running = asyncio.create_task(block(session))
    await ticks()
    (doing,), (background,) = session.status().doing, session.status().background
    assert (doing.what, background.what) == ("the session's block", "background task 'producer'")
    assert doing.where is not None
    assert "block (" in doing.where
    assert "Queue.get" in doing.where
    assert background.where is not None
    assert "Gate.pass_through" in background.where
    gate.opened.set()
    await running


async def test_a_session_that_is_created_says_so(clock: ManualClock) -> None:
    """While no hook is active, the status names what the session waits for."""
    gate = Gate()
    scaffold = ah.Scaffold(init_fn=gate.pass_through)
    session = ah.AsyncMonitoredSession(ah.ChiefSessionCreator(counting_graph(), scaffold=scaffold))
    opening = asyncio.create_task(session.__aenter__())
    await ticks()
    (doing,) = session.status().doing
    assert doing.what == "creating the session"
    assert doing.where is not None
    assert "Gate.pass_through" in doing.where
    gate.opened.set()
    await opening
    await session.aclose()


async def test_waiting_for_a_task_says_which(clock: ManualClock) -> None:
    """A wait for another task is named by that task."""
    gate = Gate()
    other = asyncio.create_task(gate.pass_through(), name="the other")

    async def step() -> None:
        await other

    async with ah.AsyncMonitoredSession(step) as session:
        run = asyncio.create_task(session.run("step"))
        await ticks()
        assert session.status().doing[0].awaits == "task 'the other'"
        gate.opened.set()
        await run


async def test_queue_stop_and_failure_are_shown() -> None:
    """Runs that wait for the lock, the stop and its reason, recoveries and a failure are in the text."""
    gate = Gate()
    texts: list[str] = []

    async def main() -> None:
        faults = FaultInjectionHook({("before_run", 1): ah.AbortedError("lost")})
        hooks = [faults, PhaseHook("after_run", gate.pass_through)]
        async with ah.AsyncMonitoredSession(double, hooks, recovery=NO_BACKOFF) as session:
            runs = [asyncio.create_task(session.run("loss")) for _ in range(3)]
            await ticks(30)
            session.request_stop("enough")
            texts.append(str(session.status()))
            gate.opened.set()
            await asyncio.gather(*runs, return_exceptions=True)
            session.coord.request_stop(OSError("died"))
            texts.append(str(session.status()))

    with pytest.raises(OSError, match="died"):
        await main()
    for line in ("waiting for their turn to run: 2", "recovered: 1 times", "stop requested: enough"):
        assert line in texts[0]
    assert "failed: OSError('died')" in texts[1]


async def test_a_coordinator_has_the_status_too(clock: ManualClock) -> None:
    """The coordinator that hooks get has the same status; alone it has an empty one."""
    assert ah.Coordinator().status() is None
    seen: list[ah.session.SessionStatus | None] = []

    class Curious(ah.SessionRunHook):
        async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
            seen.append(coord.status())

    async with ah.AsyncMonitoredSession(double, [Curious()], name="me") as session:
        assert session.coord.status() == session.status()
    assert seen[0] is not None
    assert (seen[0].state, seen[0].name) == ("opening", "me")


async def test_a_status_outside_the_block_is_a_value() -> None:
    """Before and after the block a status has no tasks in it: it can be kept, compared and pickled."""
    session = ah.AsyncMonitoredSession(double)
    assert str(session.status()) == "session: new"
    async with session:
        await session.run("loss")
    status = session.status()
    assert pickle.loads(pickle.dumps(status)) == status
    assert str(status).startswith("session: closed, at step 1")


async def test_a_closed_session_refers_to_no_task() -> None:
    """It may be kept for its status: the task that had it, with all that this refers to, is freed."""
    session = ah.AsyncMonitoredSession(double)

    async def main() -> None:
        async with session:
            await session.run("loss")

    task = asyncio.create_task(main())
    freed = weakref.ref(task)
    await asyncio.wait([task])
    del task
    gc.collect()
    assert freed() is None
    assert session.status().state == "closed"


async def test_a_session_that_has_not_begun_does_nothing() -> None:
    """Its status can be asked for before it is entered."""
    status = ah.AsyncMonitoredSession(double, name="chief").status()
    assert (status.doing, status.runs, status.queued, status.running) == ((), 0, 0, False)


async def test_a_run_that_was_cancelled_is_not_queued() -> None:
    """While the run before it continues, however often others have waited for their turn and left."""
    async with ah.AsyncMonitoredSession(double, [PhaseHook("before_run", forever)]) as session:
        running = await parked(session.run("loss"))
        for _ in range(3):
            waiting = await parked(session.run("loss"))
            assert session.status().queued == 1
            waiting.cancel()
            await asyncio.wait([waiting])
        assert session.status().queued == 0
        running.cancel()
        await asyncio.wait([running])
