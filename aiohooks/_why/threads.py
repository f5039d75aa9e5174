"""What threads wait for, and the calls of executors that they run."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Mapping
from typing import Any

from aiohooks._core.reports import Awaited
from aiohooks._why.primitives import class_name
from aiohooks._why.tasks import Frame, Frames, frames_of, is_library

Stacks = Mapping[int, Frame]
"""The innermost frame of each thread, by its ID."""


def threads() -> list[threading.Thread]:
    """Return the threads."""
    # `threading.enumerate` takes a lock, which the code that a signal has interrupted may hold.
    return [*getattr(threading, "_active", {}).values()]


def thread_wait(frames: Frames) -> Any:
    """Return the thread, the future or the other object for which a thread waits.

    A lock that is taken without a method in Python, such as by `with`, is not found.
    """
    for frame in reversed(frames):
        if not is_library(frame):
            return None
        owner: Any = frame.f_locals.get("self")
        match owner, frame.f_code.co_name:
            case threading.Thread(), ("join" | "_wait_for_tstate_lock"):
                return owner
            case concurrent.futures.Future(), ("result" | "exception"):
                return owner  # pyright: ignore[reportUnknownVariableType]
            case threading.Event(), "wait":
                return Awaited(
                    "event",
                    class_name(owner),
                    "not set",
                    key=owner,
                )
            case queue.Queue(), ("get" | "put" | "join"):
                used: queue.Queue[Any] = owner  # pyright: ignore[reportUnknownVariableType]
                detail = f"{used.qsize()} of {used.maxsize or 'any number'}"
                return Awaited(
                    "queue",
                    class_name(used),
                    detail,
                    key=used,
                )
            case _:
                continue
    return None


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
