"""What blocks the event loop."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from time import perf_counter

from aiohooks._why.tasks import Frames, loop_frames


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
        frames that the loop is running, the outermost first, and the seconds without an answer.
        """
        super().__init__(name="blocked loop watch", daemon=True)
        self._secs = secs
        self._on_blocked = on_blocked
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._answered = threading.Event()
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Stop the thread, and block until it has ended."""
        self._stopped.set()
        self._answered.set()
        if self.ident is not None:
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
            if frames:
                self._on_blocked(frames, perf_counter() - asked_at)
            while not self._answered.wait(self._secs) and not self._loop.is_closed():
                # It is the same block, which has been reported.
                pass

    def _frames(self) -> Frames:
        """Return the frames that the loop is running, the outermost first, or none if it waits."""
        if not self._loop.is_running():
            return ()
        stacks = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        return loop_frames(stacks.get(self._loop_thread))
