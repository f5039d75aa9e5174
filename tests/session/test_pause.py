"""Pause and resume: no run begins meanwhile, whoever asks; a stop, a failure and a cancellation
still end the wait.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock
from tests.support.sessions import (
    doubling,
    outcome,
)
from tests.support.waiting import advance_clock, fail, parked, ticks, until_true

pytestmark = pytest.mark.every_python


@pytest.mark.parametrize("yield_secs", [0.005, None])
async def test_no_run_begins_during_a_pause(yield_secs: float | None) -> None:
    """The first reason is kept and in the status; `resume` lets the next run begin, and a second
    pause holds again.
    """
    session = doubling(yield_secs=yield_secs)
    session.pause("not open yet")
    async with session:
        for number in range(1, 4):
            session.pause("later")
            assert (
                session.pause_reason
                == session.status().pause_reason
                == ("not open yet" if number == 1 else "later")
            )
            assert f"paused: {session.pause_reason}" in str(session.status())
            run = await parked(session.run("loss"), 20)
            assert (run.done(), session.status().runs) == (False, number - 1)
            session.resume()
            session.resume()
            assert (await run, session.pause_reason) == (2, None)


async def test_the_run_in_progress_is_finished() -> None:
    """So is its hook's phase; those who wait for their turn behind it wait for the end of the
    pause, in their order.
    """
    gate = asyncio.Event()
    order = list[int]()

    async def wait(number: int) -> None:
        await gate.wait()
        order.append(number)

    async with ah.AsyncMonitoredSession(wait) as session:
        first, *others = [await parked(session.run((), {"number": number})) for number in (1, 2, 3)]
        session.pause()
        gate.set()
        await first
        await ticks(20)
        assert order == [1]
        session.resume()
        await asyncio.gather(*others)
    assert order == [1, 2, 3]


@pytest.mark.parametrize("how", ["stop", "failure", "close"])
async def test_what_ends_the_wait(how: str) -> None:
    """For all who wait: the run raises what leaves the block cleanly, or the failure of a task, and
    nothing of it is done.
    """

    async def use(_: object) -> None:
        session.pause()
        runs = [asyncio.ensure_future(session.run("loss")) for _ in range(2)]
        await ticks(10)
        if how == "close":
            await session.aclose()
        elif how == "failure":
            session.start_soon(fail, ZeroDivisionError())
        else:
            session.request_stop("over")
        raised.extend(await asyncio.gather(*runs, return_exceptions=True))

    raised: list[BaseException] = []
    session = doubling()
    assert isinstance(await outcome(session, use), ZeroDivisionError | None)
    expected = {"stop": (ah.StopRequestedError,), "failure": (ZeroDivisionError,)}
    ends = expected.get(how, (ah.StopRequestedError, ah.errors.SessionClosedError))
    assert [isinstance(error, ends) for error in raised] == [True, True]
    assert session.status().runs == 0


async def test_a_pause_by_a_thread_holds_the_next_run() -> None:
    """It does so even if the loop has had no turn since the pause."""
    async with doubling() as session:
        thread = threading.Thread(target=session.coord.pause, args=("no space",))
        thread.start()
        thread.join()
        asyncio.get_running_loop().call_soon(session.resume)
        await session.run("loss")
        assert session.coord.pause_reason is None


@pytest.mark.plain_tasks
async def test_signals_pause_and_resume() -> None:
    """Signal handlers of the loop pause and resume a session; a stop by signal ends the pause."""
    policy = ah.SignalPolicy(signals=(signal.SIGTERM,))
    loop = asyncio.get_running_loop()
    async with doubling(handle_signals=policy) as session:
        loop.add_signal_handler(signal.SIGUSR1, session.pause, "SIGUSR1 received")
        loop.add_signal_handler(signal.SIGUSR2, session.resume)
        for _ in range(4):
            os.kill(os.getpid(), signal.SIGUSR1)
            await until_true(lambda: session.pause_reason == "SIGUSR1 received")
            os.kill(os.getpid(), signal.SIGUSR2)
            await until_true(lambda: session.pause_reason is None)
        assert not session.should_stop()
        os.kill(os.getpid(), signal.SIGUSR1)
        await until_true(lambda: session.pause_reason)
        run = asyncio.ensure_future(session.run("loss"))
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(ah.errors.StopRequestedError, match="SIGTERM received"):
            await run
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        loop.remove_signal_handler(number)
    assert session.stop_signal == signal.SIGTERM


async def test_a_pause_is_no_stall(clock: ManualClock) -> None:
    """A watchdog does not report what waits because of it."""
    watchdog = ah.hooks.WatchdogHook(10.0, wait_secs=10.0)
    async with doubling(watchdog) as session:
        await session.run("loss")
        session.pause()
        run = await parked(session.run("loss"))
        for _ in range(5):
            await advance_clock(clock, 20, 10)
        assert not watchdog.stalls
        session.resume()
        await run
