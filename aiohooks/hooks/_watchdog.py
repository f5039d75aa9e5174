"""Finding out what code blocks an event loop."""

from __future__ import annotations

import os
import sys
import threading
import time
import types
from collections import deque
from typing import NamedTuple

_MOST_BLOCKERS = 100
_LOOP = (os.path.join("asyncio", "base_events.py"), os.path.join("asyncio", "runners.py"))
_LIBRARY = (os.path.dirname(os.__file__) + os.sep, os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep)


class Blocker(NamedTuple):
    """Where an event loop stood when it had been blocked for `secs`: file, line and function; `step` was the step before."""

    where: str
    secs: float
    step: int


class Watchdog:
    """A thread that looks at the event loop's stack when the loop has not shown a sign of life for so long."""

    def __init__(self, secs: float) -> None:
        """Made in the loop's thread; `secs` is how long is too long."""
        self.blockers: deque[Blocker] = deque(maxlen=_MOST_BLOCKERS)
        """What was found, one for each time the loop was blocked, the latest last."""
        self._secs = secs
        self._loop_thread = threading.get_ident()
        self._sign = (time.perf_counter(), 0)
        self._told: tuple[float, int] | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts to watch."""
        self._sign = (time.perf_counter(), 0)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def beat(self, step: int) -> None:
        """The loop's sign of life."""
        self._sign = (time.perf_counter(), step)

    def stop(self) -> None:
        """Ends it; blocks until the thread has ended."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(self._secs / 2):
            sign = self._sign
            silent = time.perf_counter() - sign[0]
            if silent > self._secs and sign is not self._told:
                frame = sys._current_frames().get(self._loop_thread)  # pyright: ignore[reportPrivateUsage]
                where = None if frame is None else _place(frame)
                if where is not None:
                    self._told = sign
                    self.blockers.append(Blocker(where, silent, sign[1]))


def _place(innermost: types.FrameType) -> str | None:
    """Where the code is that the loop is running; None if the loop is only waiting."""
    caller = innermost.f_back
    if caller is None or _is_loop(innermost) or (innermost.f_code.co_name == "select" and _is_loop(caller)):
        return None
    place = _named(innermost)
    frame: types.FrameType | None = innermost
    while frame is not None and not _is_loop(frame):
        if not frame.f_code.co_filename.startswith((*_LIBRARY, "<")):
            return place if frame is innermost else f"{_named(frame)}, in {place}"
        frame = frame.f_back
    return place


def _is_loop(frame: types.FrameType) -> bool:
    """Whether this is the event loop itself; uvloop's has no frames, but it is called by this runner as well."""
    code = frame.f_code
    return code.co_name in ("_run_once", "run", "run_until_complete", "run_forever") and code.co_filename.endswith(_LOOP)


def _named(frame: types.FrameType) -> str:
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"
