"""The threads of this process, and the calls of executors that they run."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from aiohooks._why.tasks import Frame, frames_of, is_library

Stacks = Mapping[int, Frame]
"""The innermost frame of each thread, by its ID."""


def threads() -> list[threading.Thread]:
    """Return the threads."""
    # `threading.enumerate` takes a lock, which the code that a signal has interrupted may hold.
    return [*getattr(threading, "_active", {}).values()]


def thread_of_call(call: object, stacks: Stacks) -> threading.Thread | None:
    """Return the thread that runs the call of an executor, given the frames of all threads."""
    for thread in threads():
        for frame in frames_of(stacks.get(thread.ident or 0)):
            if frame.f_code.co_name != "run" or not is_library(frame):
                continue
            # The work items of an executor have the futures of their calls, as private parts.
            work = frame.f_locals.get("self")
            if getattr(work, "future", None) is call:
                return thread
    return None
