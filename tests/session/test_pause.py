"""Pause and resume: no run begins meanwhile, whoever asks; a stop, a failure and a cancellation still end the wait."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock
from tests.support.checks import refused
from tests.support.hooks import PhaseHook
from tests.support.sessions import NO_BACKOFF, counting_graph
from tests.support.waiting import parked, ticks, until_true

pytestmark = pytest.mark.every_python

YIELDS: list[float | None] = [0.005, None]


async def step() -> dict[str, int]:
    return {"loss": 1}


@pytest.mark.parametrize("yield_secs", YIELDS)
async def test_no_run_begins_during_a_pause(yield_secs: float | None) -> None:
    """The first reason is kept and in the status; `resume` lets the next run begin, and a second pause holds again."""
    async with ah.AsyncMonitoredSession(step, yield_secs=yield_secs) as session:
        for number in range(1, 4):
            session.pause("the disk is full")
            session.pause("later")
            assert session.pause_reason == session.status().pause_reason == "the disk is full"
            assert "paused: the disk is full" in str(session.status())
            run = asyncio.ensure_future(session.run("loss"))
            await ticks(20)
            assert not run.done()
            assert session.status().runs == number - 1
            session.resume()
            session.resume()
            assert await run == 1
            assert session.pause_reason is None


async def test_the_run_in_progress_is_finished() -> None:
    """So is its hook's phase; those who wait for their turn behind it wait for the end of the pause, in their order."""
    gate, order = asyncio.Event(), list[int]()

    async def wait(number: int) -> None:
        await gate.wait()
        order.append(number)

    async with ah.AsyncMonitoredSession(wait) as session:
        first = await parked(session.run((), {"number": 1}))
        others = [await parked(session.run((), {"number": number})) for number in (2, 3)]
        session.pause()
        gate.set()
        await first
        await ticks(20)
        assert order == [1]
        session.resume()
        await asyncio.gather(*others)
    assert order == [1, 2, 3]


async def test_the_loop_of_steps_takes_no_feed() -> None:
    """It waits before the next element, so that a stop during the pause loses none."""
    taken: list[int] = []

    def feeds() -> Any:
        for number in range(5):
            taken.append(number)
            yield number

    async def use(number: int) -> None:
        if number == 1:
            session.pause()

    async with ah.AsyncMonitoredSession(use) as session:
        loop = asyncio.ensure_future(drain(session.steps(feeds=feeds())))
        await ticks(50)
        assert taken == [0, 1]
        session.request_stop("enough")
        await loop
    assert taken == [0, 1]


async def drain(steps: Any) -> None:
    async for _ in steps:
        pass


@pytest.mark.parametrize("queued", [False, True])
async def test_a_stop_ends_the_wait(queued: bool) -> None:
    """As everywhere: the run raises what leaves the block cleanly, and nothing of it is done."""
    async with ah.AsyncMonitoredSession(step) as session:
        session.pause()
        runs = [asyncio.ensure_future(session.run("loss")) for _ in range(1 + queued)]
        await ticks(10)
        session.request_stop("over")
        for run in runs:
            with pytest.raises(ah.errors.StopRequestedError, match="over"):
                await run
    assert session.status().runs == 0


async def test_a_wait_that_is_over_leaves_nothing() -> None:
    """However often the session is paused."""
    loop = asyncio.get_running_loop()

    def futures() -> int:
        gc.collect()
        return sum(isinstance(one, asyncio.Future) and one.get_loop() is loop for one in gc.get_objects())

    counts: set[int] = set()
    async with ah.AsyncMonitoredSession(step) as session:
        for _ in range(3):
            session.pause()
            wait = await parked(session.coord.wait_for_resume())
            session.resume()
            await wait
            del wait
            counts.add(futures())
    assert len(counts) == 1


async def test_a_cancellation_ends_the_wait() -> None:
    """Only that of its own task; the others continue to wait."""
    async with ah.AsyncMonitoredSession(step) as session:
        session.pause()
        cancelled, other = asyncio.ensure_future(session.run("loss")), asyncio.ensure_future(session.run("loss"))
        await ticks(10)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert not other.done()
        session.resume()
        assert await other == 1


async def test_a_failed_background_task_ends_the_wait() -> None:
    """Its error comes out of the run that waits; one that is recovered from waits for the end of the pause."""

    async def fail(error: Exception) -> None:
        raise error

    async def failing() -> None:
        async with ah.AsyncMonitoredSession(step) as session:
            session.pause()
            session.start_soon(fail, ZeroDivisionError())
            await session.run("loss")

    with pytest.raises(ZeroDivisionError):
        await failing()
    async with ah.AsyncMonitoredSession(counting_graph(), recovery=NO_BACKOFF) as session:
        session.pause()
        session.coord.start_soon(fail, ah.errors.AbortedError())
        run = asyncio.ensure_future(session.run("loss"))
        await ticks(20)
        assert not run.done()
        assert session.status().recoveries == 0
        session.resume()
        await run
        assert session.status().recoveries == 1


async def test_leaving_the_block_during_a_pause() -> None:
    """The session ends; a run of another task ends with it, without an error of its own."""
    async with ah.AsyncMonitoredSession(step) as session:
        session.pause()
        run = asyncio.ensure_future(session.run("loss"))
        await ticks(10)
    with contextlib.suppress(ah.errors.StopRequestedError, ah.errors.SessionClosedError):
        await run
    assert session.status().runs == 0


async def test_a_hook_pauses_the_session() -> None:
    """Through its coordinator, also from another thread; a task of the session may wait for the end as a run does."""
    resumed: list[int] = []

    async def wait(coord: ah.Coordinator) -> None:
        await coord.wait_for_resume()
        resumed.append(1)

    async def pause(run_context: ah.SessionRunContext) -> None:
        assert run_context.coord is not None
        await asyncio.to_thread(run_context.coord.pause, "no space")
        run_context.coord.start_soon(wait, run_context.coord)

    async with ah.AsyncMonitoredSession(step, [PhaseHook("before_run", pause)]) as session:
        await session.run("loss")
        assert session.coord.pause_reason == "no space"
        again = await parked(session.run("loss"))
        await ticks(10)
        assert not again.done()
        assert not resumed
        thread = threading.Thread(target=session.resume)
        thread.start()
        await again
        thread.join()
        await until_true(lambda: resumed)
        session.resume()
    assert session.status().runs == 2


async def test_a_pause_before_the_session_opens() -> None:
    """It holds the first run."""
    session = ah.AsyncMonitoredSession(step)
    session.pause("not yet")
    async with session:
        run = asyncio.ensure_future(session.run("loss"))
        await ticks(10)
        assert not run.done()
        session.resume()
        await run


def test_its_arguments() -> None:
    """The reason is a text; the signals of a policy are different ones that can be handled."""
    wrong: Any = 3
    with refused(ah.errors.InvalidArgumentError, "reason is 3", "str"):
        ah.AsyncMonitoredSession(step).pause(wrong)
    both: dict[str, Any] = {"pause": signal.SIGUSR1, "resume": signal.SIGUSR1}
    for options in ({"pause": signal.SIGTERM}, {"pause": signal.SIGKILL}, {"pause": 10}, both):
        with refused(ah.errors.InvalidArgumentError, "give a signal of its own"):
            ah.SignalPolicy(**options)


@pytest.mark.plain_tasks
async def test_signals_pause_and_resume() -> None:
    """They stop nothing, however many come; the signals for a stop work as before, during a pause as well."""
    policy = ah.SignalPolicy(signals=(signal.SIGTERM,), pause=signal.SIGUSR1, resume=signal.SIGUSR2)
    before = [signal.getsignal(number) for number in policy.handled]
    async with ah.AsyncMonitoredSession(step, handle_signals=policy) as session:
        for _ in range(4):
            os.kill(os.getpid(), signal.SIGUSR1)
            await until_true(lambda: session.pause_reason == "SIGUSR1 received")
            os.kill(os.getpid(), signal.SIGUSR2)
            await until_true(lambda: session.pause_reason is None)
        assert not session.should_stop()
        assert await session.run("loss") == 1
        os.kill(os.getpid(), signal.SIGUSR1)
        await until_true(lambda: session.pause_reason)
        run = asyncio.ensure_future(session.run("loss"))
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(ah.errors.StopRequestedError, match="SIGTERM received"):
            await run
    assert session.stop_signal == signal.SIGTERM
    assert [signal.getsignal(number) for number in policy.handled] == before


async def test_a_pause_is_no_stall(clock: ManualClock) -> None:
    """A watchdog does not report what waits because of it."""
    watchdog = ah.WatchdogHook(10.0, wait_secs=10.0)
    async with ah.AsyncMonitoredSession(step, [watchdog]) as session:
        await session.run("loss")
        session.pause()
        run = await parked(session.run("loss"))
        for _ in range(5):
            clock.advance(20)
            await ticks(10)
        assert not watchdog.stalls
        session.resume()
        await run
