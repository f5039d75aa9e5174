"""Hearing of the signals that a server owns, before the server has waited for its last request."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def hearing_signals(heard: Callable[[str], object]) -> Generator[None]:
    """Calls `heard(name)` in the loop at SIGINT and SIGTERM, and at once the handler that was there: the signal is its own.

    A signal that nobody handles is left alone, and so is everything outside of the main thread and in a forked child.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, process = asyncio.get_running_loop(), os.getpid()
    replaced: dict[signal.Signals, tuple[Callable[..., Any], Callable[..., Any]]] = {}
    for each in _SIGNALS:
        owner = signal.getsignal(each)
        if callable(owner):
            handler = _passing_on(owner, heard, loop, process)
            signal.signal(each, handler)
            replaced[each] = handler, owner
    try:
        yield
    finally:
        for each, (handler, owner) in replaced.items():
            if signal.getsignal(each) is handler:  # else somebody has taken it over meanwhile
                signal.signal(each, owner)


def _passing_on(
    owner: Callable[..., Any], heard: Callable[[str], object], loop: asyncio.AbstractEventLoop, process: int
) -> Callable[[int, FrameType | None], None]:
    def handler(number: int, frame: FrameType | None) -> None:
        # Not here and now: this is between any two instructions of whatever runs.
        if os.getpid() == process and not loop.is_closed():
            loop.call_soon_threadsafe(heard, signal.Signals(number).name)
        owner(number, frame)

    return handler
