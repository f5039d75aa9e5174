"""What threads wait for, and the calls of executors that they run."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
import types
from collections.abc import Mapping, Sequence
from typing import Any

from aiohooks._core.reports import Awaited
from aiohooks._why.primitives import class_name
from aiohooks._why.tasks import frames_of, is_library


def threads() -> list[threading.Thread]:
    """Return the threads."""
    # `threading.enumerate` takes a lock, which the code that a signal has interrupted may hold.
    return [*getattr(threading, "_active", {}).values()]


def thread_wait(frames: Sequence[types.FrameType]) -> Any:
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
                return Awaited("event", class_name(owner), "not set", key=owner)
            case queue.Queue(), ("get" | "put" | "join"):
                used: queue.Queue[Any] = owner  # pyright: ignore[reportUnknownVariableType]
                detail = f"{used.qsize()} of {used.maxsize or 'any number'}"
                return Awaited("queue", class_name(used), detail, key=used)
            case _:
                continue
    return None


def thread_of_call(
    call: concurrent.futures.Future[Any],
    stacks: Mapping[int, types.FrameType],
) -> int | None:
    """Return the ID of the thread that runs a call of an executor, given the stacks of threads."""
    for ident, innermost in stacks.items():
        for frame in frames_of(innermost):
            if frame.f_code.co_name != "run" or not is_library(frame):
                continue
            # An executor has no public way to the thread of a call, which is in its work items.
            if getattr(frame.f_locals.get("self"), "future", None) is call:
                return ident
    return None
