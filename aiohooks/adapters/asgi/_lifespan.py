"""Hearing of the signals that a server owns, before the server has waited for its last request."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Generator
from types import FrameType
from typing import Any

from aiohooks._aio.cancel import shielded, wait_done
from aiohooks.adapters.asgi._access import safe_text
from aiohooks.errors import SessionClosedError, is_clean_end
from aiohooks.session.monitored import AsyncMonitoredSession

_logger = logging.getLogger("aiohooks.adapters")
Loop = Callable[[AsyncMonitoredSession], Awaitable[Any]]


class Owner:
    """Owns a session and the loop of steps in it.

    One task does all of it, because cancel scopes and context variables of whatever the session opens belong to the task
    that opened them. An error ends that task and nothing else; it is kept for whoever asks.
    """

    def __init__(self, session: AsyncMonitoredSession, loop: Loop, grace_secs: float) -> None:
        """Keeps them; nothing starts yet."""
        self._session = session
        self._loop = loop
        self._grace_secs = grace_secs
        name = session.status().name
        self._what = "the session" if name is None else f"session {safe_text(name)}"
        self._task: asyncio.Task[None] | None = None
        self.opened: asyncio.Event = asyncio.Event()
        """Set once the session is open, or will never be."""
        self.ended: asyncio.Event = asyncio.Event()
        """Set once the session has been left."""
        self.failure: BaseException | None = None
        """What it ended with, if not cleanly."""

    @property
    def started(self) -> bool:
        """Whether the task was started."""
        return self._task is not None

    def start(self) -> None:
        """Starts the task.

        Raises:
            SessionClosedError: it was started before.
        """
        if self._task is not None:
            raise SessionClosedError("this service was started before; make a new one, with a new session")
        self._task = asyncio.get_running_loop().create_task(self._live(), name="the session of a service")

    async def _live(self) -> None:
        try:
            async with self._session as session:
                self.opened.set()
                try:
                    await self._loop(session)
                except BaseException as error:
                    if not is_clean_end(error):
                        self.failure = error  # at once: closing may take its time
                    raise
        except Exception as error:
            self.failure = error
            _logger.error("%s of a service failed; the server goes on without it", self._what, exc_info=error)
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self.opened.set()
            self.ended.set()

    async def stop(self, reason: str) -> None:
        """Asks the session to stop and waits for its end: for the grace period, then cancelled, then as long again."""
        task = self._task
        assert task is not None
        self._session.request_stop(reason)
        wind_down, cancel = self._wind_down(task), functools.partial(_cancel, task)
        await shielded(wind_down, grace_secs=self._grace_secs, what="the end of a service", on_cancel=cancel)

    async def _wind_down(self, task: asyncio.Task[None]) -> None:
        if await wait_done([task], self._grace_secs):
            return
        _logger.warning("%s goes on %s s after the stop; it is cancelled", self._what, self._grace_secs)
        task.cancel("the grace period was over")
        if not await wait_done([task], self._grace_secs):
            _logger.warning("%s goes on %s s after its cancellation; ending without it", self._what, self._grace_secs)


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel("the server was cancelled")


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
