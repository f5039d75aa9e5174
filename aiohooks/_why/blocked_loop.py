"""What blocks the event loop."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from time import perf_counter

from aiohooks._core.reports import logger
from aiohooks._why.tasks import Frames, loop_frames, user_location

_BLOCKED_SECS = 0.5
"""The shortest block that may be warned of. A block of twice that time always is."""


class BlockedLoopWatch(threading.Thread):
    """A thread that pings the event loop every `secs` seconds, and reports a block.

    The loop is blocked if no answer comes within `secs`. A loop that only waits is not woken, and
    never reported. A block shorter than `secs` is not noticed, and a block twice as long always is.
    The time is real time, not that of the current clock.
    """

    def __init__(
        self,
        secs: float,
        on_blocked: Callable[[Frames, float], object],
    ) -> None:
        """Create a watch of the running loop, in its thread.

        `on_blocked` is called in the watching thread, once for each block. Its arguments are the
        frames that the loop is running, the outermost first, and the seconds without an answer. The
        watch ends when it returns True.
        """
        super().__init__(name="blocked loop watch", daemon=True)
        self._secs = secs
        self._on_blocked = on_blocked
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._answered = threading.Event()
        self._stopped = threading.Event()
        self.sessions = 0
        """How many sessions use this watch."""

    def stop(self, *, wait: bool = True) -> None:
        """Stop the thread. With `wait`, block until it has ended."""
        self._stopped.set()
        self._answered.set()
        if wait and self.ident is not None:
            self.join()

    def run(self) -> None:
        """Watch the loop. Called in the thread."""
        while not self._stopped.wait(self._secs) and not self._loop.is_closed():
            if not self._frames():
                continue
            self._answered.clear()
            if self._stopped.is_set():
                # `stop` set the event just before it was cleared. A loop that joins this thread
                # would not answer.
                return
            asked_at = perf_counter()
            try:
                self._loop.call_soon_threadsafe(self._answered.set)
            except RuntimeError:
                # The loop has been closed meanwhile.
                return
            if self._answered.wait(self._secs):
                continue
            frames = self._frames()
            if frames and self._on_blocked(frames, perf_counter() - asked_at) is True:
                return
            while not self._answered.wait(self._secs) and not self._loop.is_closed():
                # It is the same block, which has been reported.
                pass

    def _frames(self) -> Frames:
        """Return the frames that the loop is running, the outermost first, or none if it waits."""
        if not self._loop.is_running():
            return ()
        stacks = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        return loop_frames(stacks.get(self._loop_thread))


_watches: dict[asyncio.AbstractEventLoop, BlockedLoopWatch] = {}
"""The watch of each loop with open sessions."""


def warn_if_blocked() -> Callable[[], None]:
    """Log a warning, once, if the running loop is blocked for long.

    Call the returned function to end this. Several sessions may share a loop.
    """
    loop = asyncio.get_running_loop()
    watch = _watches.get(loop)
    if watch is None:
        watch = _watches[loop] = BlockedLoopWatch(_BLOCKED_SECS, _warn_of_block)
        watch.start()
    watch.sessions += 1

    def end() -> None:
        watch.sessions -= 1
        if watch.sessions == 0:
            del _watches[loop]
            watch.stop(wait=False)

    return end


def _warn_of_block(frames: Frames, secs: float) -> bool:
    logger.warning(
        "the event loop has been blocked for %.1f s, at %s: nothing else can run meanwhile, no"
        " other hook, signal or time limit; await it, or call it in a thread: in_thread,"
        " BlockingHook, asyncio.to_thread (logged once; HookTimingHook finds more)",
        secs,
        user_location(frames),
    )
    return True
