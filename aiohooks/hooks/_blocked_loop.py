"""Noticing that an event loop is blocked, and by what code: only another thread can."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import types
from collections.abc import Callable

_LOOP = (os.path.join("asyncio", "base_events.py"), os.path.join("asyncio", "runners.py"))
Frames = tuple[types.FrameType, ...]


class BlockedLoopWatch:
    """A thread that asks the event loop for a sign of life, once in `secs`, and tells when there was none for so long.

    The loop answers as soon as it comes to it, so a loop that only waits is never taken for a blocked one. What goes on for
    less than `secs` is not noticed, what goes on for twice as long always is. The time is the real one.
    """

    def __init__(self, secs: float, on_blocked: Callable[[Frames, float], object]) -> None:
        """Made in the loop's thread.

        Args:
            secs: how long is too long.
            on_blocked: called in the thread, once for each time the loop is blocked, with the frames that the loop is
                running, the outermost first, and for how long it has not answered.
        """
        self._secs = secs
        self._on_blocked = on_blocked
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._answered = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="blocked loop watch", daemon=True)

    def start(self) -> None:
        """Starts to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Ends it; blocks until the thread has ended."""
        self._stopped.set()
        self._answered.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(self._secs) and not self._loop.is_closed():
            self._answered.clear()
            if self._stopped.is_set():
                return  # just now: that was no answer, and a loop that waits for this thread's end would give none
            asked = time.perf_counter()
            try:
                self._loop.call_soon_threadsafe(self._answered.set)
            except RuntimeError:  # it was closed just now
                return
            if not self._answered.wait(self._secs):
                self._look(asked)
                while not self._answered.wait(self._secs) and not self._loop.is_closed():
                    pass  # the same block, which was told

    def _look(self, asked: float) -> None:
        innermost = sys._current_frames().get(self._loop_thread)  # pyright: ignore[reportPrivateUsage]
        if innermost is not None and self._loop.is_running() and (frames := running_frames(innermost)):
            self._on_blocked(frames, time.perf_counter() - asked)


def running_frames(innermost: types.FrameType) -> Frames:
    """What a loop is running, the outermost frame first; nothing if it is only waiting."""
    caller = innermost.f_back
    if caller is None or _is_loop(innermost) or (innermost.f_code.co_name == "select" and _is_loop(caller)):
        return ()
    frames: list[types.FrameType] = []
    frame: types.FrameType | None = innermost
    while frame is not None and not _is_loop(frame):
        frames.append(frame)
        frame = frame.f_back
    return tuple(reversed(frames))


def _is_loop(frame: types.FrameType) -> bool:
    """Whether this is the event loop itself; uvloop's has no frames, but it is called by this runner as well."""
    code = frame.f_code
    return code.co_name in ("_run_once", "run", "run_until_complete", "run_forever") and code.co_filename.endswith(_LOOP)
