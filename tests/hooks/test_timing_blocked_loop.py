"""BlockedLoopWatch: the code that it names, and how its thread ends."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from aiohooks._why.tasks import BlockedLoopWatch, Frames
from tests.support.waiting import HANG_SECS


async def test_a_block_is_reported_once() -> None:
    """A block is reported once, however long it lasts, and the next block again."""
    reported: list[Frames] = []
    asked = threading.Semaphore(0)

    class Counted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            done = super().wait(timeout)
            asked.release()
            return done

    def wait_until_asked_again() -> None:
        while asked.acquire(blocking=False):
            pass
        for _ in range(5):
            asked.acquire()

    watch = BlockedLoopWatch(0.005, lambda frames, secs: reported.append(frames))
    watch._answered = Counted()
    before = 0
    watch.start()
    for _ in range(2):
        wait_until_asked_again()
        # On a busy machine, the turn of the loop between the blocks may be reported as well.
        count = len(reported)
        assert count > before
        wait_until_asked_again()
        assert len(reported) == count
        before = count
        answered = asyncio.Event()
        asyncio.get_running_loop().call_later(0, answered.set)
        await answered.wait()
    watch.stop()
    assert all(frames[-1].f_code.co_name for frames in reported)


def test_the_thread_ends_with_its_loop(caplog: pytest.LogCaptureFixture) -> None:
    """A loop that is not running is not blocked, and a closed one needs no watch."""
    caplog.set_level(logging.ERROR)
    reported: list[Frames] = []
    loop = asyncio.new_event_loop()

    async def make() -> BlockedLoopWatch:
        return BlockedLoopWatch(0.005, lambda frames, secs: reported.append(frames))

    watch = loop.run_until_complete(make())
    watch.start()
    assert not watch._stopped.wait(0.05)  # the loop is not running meanwhile
    loop.close()
    watch.join(HANG_SECS)
    assert not watch.is_alive()
    assert reported == []
    watch.stop()


async def test_stopping_a_watch_that_was_not_started() -> None:
    """Nothing is waited for."""
    BlockedLoopWatch(1, lambda frames, secs: None).stop()


async def test_a_loop_that_waits_is_not_blocked() -> None:
    """A loop that has nothing to do is not woken, and never reported as blocked."""

    class Counted(threading.Event):
        checks = 0

        def wait(self, timeout: float | None = None) -> bool:
            self.checks += 1
            if self.checks > 3:
                loop.call_soon_threadsafe(enough.set)
            return super().wait(0.05)

    enough = asyncio.Event()
    loop = asyncio.get_running_loop()
    reported: list[object] = []
    watch = BlockedLoopWatch(HANG_SECS, lambda *found: reported.append(found))
    watch._stopped = Counted()
    watch.start()
    await enough.wait()
    watch.stop()
    assert reported == []


async def test_a_watch_is_stopped_while_it_pings() -> None:
    """Stopping ends the thread even if the loop, which joins it, cannot answer the coming ping."""
    asks = threading.Event()
    stopped = threading.Event()

    class Late(threading.Event):
        def set(self) -> None:
            super().set()
            stopped.set()

        def clear(self) -> None:
            asks.set()
            stopped.wait()
            super().clear()

    watch = BlockedLoopWatch(0.01, lambda *_: None)
    watch._answered = Late()
    watch.start()
    asks.wait()
    stopping = threading.Thread(target=watch.stop, daemon=True)
    stopping.start()
    stopping.join(HANG_SECS)  # the loop is blocked meanwhile
    assert not stopping.is_alive()
