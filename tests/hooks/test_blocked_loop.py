"""The thread that notices that an event loop is blocked: whom it names, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

import aiohooks as ah
from aiohooks.hooks.timing import BlockedLoopWatch, Frames
from aiohooks.hooks.watchdog import WatchdogHook


async def test_code_that_is_no_hook_is_named_by_its_place() -> None:
    """A step that blocks the loop is named by function, file and line."""
    watchdog = WatchdogHook(1000, blocked_secs=0.01)

    async def stubborn_step() -> None:
        while not watchdog.stalls:
            pass

    async with ah.AsyncMonitoredSession(stubborn_step, [watchdog]) as session:
        await session.run("stubborn_step")
    what = watchdog.stalls[0].what
    assert "stubborn_step" in what
    assert __file__ in what


async def test_a_block_is_told_once() -> None:
    """However long it lasts, a block is told once, and the next one again."""
    told: list[Frames] = []
    asked = threading.Semaphore(0)

    class Counted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            done = super().wait(timeout)
            asked.release()
            return done

    watch = BlockedLoopWatch(0.005, lambda frames, secs: told.append(frames))
    watch._answered = Counted()
    watch.start()
    for blocks in (1, 2):
        while len(told) < blocks:
            pass
        while asked.acquire(blocking=False):
            pass
        for _ in range(5):
            asked.acquire()  # it has looked again
        assert len(told) == blocks
        answered = asyncio.Event()
        asyncio.get_running_loop().call_later(0, answered.set)
        await answered.wait()
    watch.stop()
    assert all(frames[-1].f_code.co_name for frames in told)


def test_the_thread_ends_with_its_loop(caplog: pytest.LogCaptureFixture) -> None:
    """A loop that is not running is not blocked, and one that was closed needs no watch."""
    caplog.set_level(logging.ERROR)
    told: list[Frames] = []
    loop = asyncio.new_event_loop()

    async def start() -> BlockedLoopWatch:
        watch = BlockedLoopWatch(0.005, lambda frames, secs: told.append(frames))
        watch.start()
        return watch

    watch = loop.run_until_complete(start())
    assert not watch._stopped.wait(0.05)  # the loop stands still meanwhile
    loop.close()
    watch._thread.join(30)
    assert not watch._thread.is_alive()
    assert told == []
    watch.stop()


async def test_stopping_what_was_not_started_is_harmless() -> None:
    """Nothing is waited for then."""
    BlockedLoopWatch(1, lambda frames, secs: None).stop()
