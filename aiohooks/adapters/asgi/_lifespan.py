"""The session's life beside the server's: one task that runs it, and the server's signals."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Generator
from types import FrameType
from typing import Any

from aiohooks._core.cancel import shielded, wait_done
from aiohooks._core.clock import current_clock
from aiohooks.adapters._rate import StepRate
from aiohooks.adapters.asgi._access import safe_text
from aiohooks.errors import InvalidArgumentError, SessionClosedError, is_clean_end
from aiohooks.session.monitored import AsyncMonitoredSession

_logger = logging.getLogger("aiohooks.adapters")
Loop = Callable[[AsyncMonitoredSession], Awaitable[Any]]


class SessionRunner:
    """Enters a session, runs the loop of steps in it and leaves it, all in one background task.

    It is one task because the cancel scopes and context variables that a session opens belong to
    the task that opened them. An error ends that task and nothing else; it is kept in `failure`.
    """

    def __init__(
        self,
        session: AsyncMonitoredSession,
        loop: Loop,
        grace_secs: float,
        drain_secs: float | None = None,
    ) -> None:
        self._session = session
        self._loop = loop
        self._grace_secs = grace_secs
        self._drain_secs = drain_secs
        name = session.status().name
        self._label = "the session" if name is None else f"session {safe_text(name)}"
        self._task: asyncio.Task[None] | None = None
        self._end_requested = False
        self._ending: asyncio.Task[None] | None = None
        self.opened: asyncio.Event = asyncio.Event()
        """Set once the session is open, or has failed to open."""
        self.ended: asyncio.Event = asyncio.Event()
        """Set once the session has been left."""
        self.rate: StepRate = StepRate()
        """The rate of steps, measured from when the session was opened."""
        self.failure: BaseException | None = None
        """The error that ended the session, unless it ended cleanly."""

    @property
    def started(self) -> bool:
        return self._task is not None

    def start(self) -> None:
        """Start the task.

        Raises:
            SessionClosedError: it was started before.
        """
        if self._task is not None:
            raise SessionClosedError(
                f"the service of {self._label} was started before, and sessions are single-use;"
                " make service, session and application in a function, and call it for each server"
                " and each test (uvicorn --factory module:function)"
            )
        self._task = asyncio.get_running_loop().create_task(
            self._run(), name="the session of a service"
        )
        # The coordinator of the session lives as long as the session, from before its opening.
        self._coord = self._session.coord

    async def _run(self) -> None:
        try:
            async with self._session as session:
                self.rate.update(current_clock().now(), session.global_step.latest)
                self.opened.set()
                try:
                    loop = self._loop(session)
                    is_awaitable = inspect.isawaitable(loop)
                    if not is_awaitable:
                        raise InvalidArgumentError(
                            f"run of a SessionService is {self._loop!r}, which returned {loop!r};"
                            " write it as `async def`"
                        )
                    await loop
                except BaseException as error:
                    if not is_clean_end(error):
                        self.failure = error  # before the session closes, which may take its time
                    raise
        except Exception as error:
            if is_clean_end(error) and self._session.stop_reason is not None:
                return  # it was stopped before it was open
            self.failure = error
            _logger.error("%s failed; the server continues without it", self._label, exc_info=error)
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self.opened.set()
            self.ended.set()

    async def wait_opened(self) -> None:
        """Wait until the session is open, or has failed to open.

        Raises:
            StopRequestedError: it was asked to stop before.
            Exception: a background task that a hook has started has failed before.
        """
        await self._coord.until(self.opened.wait())

    def request_end(self, reason: str) -> None:
        """Ask the session to end, by a drain at first, if there is one; from a signal handler of
        the loop's thread as well.

        The server may wait for its clients before it calls `stop`, and these may wait for the end
        of the session.
        """
        assert self._task is not None
        if self._end_requested:
            self._session.request_stop(reason)
        else:
            self._begin_end(reason)
        self._task.get_loop().call_soon_threadsafe(self._limit_end)

    async def stop(self, reason: str) -> None:
        """Ask the session to end and wait for that; after drain and grace period, cancel it and
        wait for another grace period.
        """
        task = self._task
        assert task is not None
        self._begin_end(reason)
        cancel = functools.partial(task.cancel, "the server was cancelled")
        ending = wait_done([self._limit_end()], None)
        await shielded(
            ending, grace_secs=self._grace_secs, what="the end of a service", on_cancel=cancel
        )

    def _begin_end(self, reason: str) -> None:
        self._end_requested = True
        if self._drain_secs is None:
            self._session.request_stop(reason)
        else:
            self._session.request_drain(reason, secs=self._drain_secs)

    def _limit_end(self) -> asyncio.Task[None]:
        assert self._task is not None
        if self._ending is None:
            ending = self._wait_ended(self._task)
            self._ending = asyncio.get_running_loop().create_task(
                ending, name="the end of a service"
            )
        return self._ending

    async def _wait_ended(self, task: asyncio.Task[None]) -> None:
        stop = asyncio.ensure_future(self._coord.wait_for_stop())
        try:
            await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        if await wait_done([task], self._grace_secs):
            return
        _logger.warning(
            "%s is still active %s s after the stop; cancelling it", self._label, self._grace_secs
        )
        task.cancel("the grace period was over")
        if not await wait_done([task], self._grace_secs):
            late = f"{self._label} is still active {self._grace_secs} s after its cancellation"
            _logger.warning("%s; ending without it", late)
            self.failure = self.failure or TimeoutError(late)
            self.opened.set()
            self.ended.set()  # its clients are not to wait for it either


@contextlib.contextmanager
def notify_on_signals(callback: Callable[[str], object]) -> Generator[None]:
    """Call `callback(name)` inside the handlers of SIGINT and SIGTERM, before the handler that was
    installed before.

    A signal without a handler is left alone. Outside of the main thread, and in a forked child,
    nothing is called.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    process = os.getpid()
    replaced: list[tuple[signal.Signals, Callable[..., Any], Callable[..., Any]]] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        previous = signal.getsignal(number)
        if callable(previous):
            handler = functools.partial(_handle, previous, callback, process)
            signal.signal(number, handler)
            replaced.append((number, handler, previous))
    try:
        yield
    finally:
        for number, installed, previous in replaced:
            if (
                signal.getsignal(number) is installed
            ):  # a handler that was installed in the meantime stays
                signal.signal(number, previous)


def _handle(
    previous: Callable[..., Any],
    callback: Callable[[str], object],
    process: int,
    number: int,
    frame: FrameType | None,
) -> None:
    if os.getpid() == process:
        callback(signal.Signals(number).name)
    previous(number, frame)
