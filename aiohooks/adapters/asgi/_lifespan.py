"""The session's life alongside the server: one task that runs it, and the server's signals.

drain          let the session finish its current work, and take no new input
end            begin to end a session: drain it, or stop it
grace period   the time that the session has after a stop, and again after its cancellation
"""

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

from aiohooks._core.waits import shielded, wait_done
from aiohooks.adapters.asgi._access import safe_text
from aiohooks.errors import InvalidArgumentError, SessionClosedError, is_clean_end
from aiohooks.session.monitored import AsyncMonitoredSession

_logger = logging.getLogger("aiohooks.adapters")
RunFunction = Callable[[AsyncMonitoredSession], Awaitable[Any]]
"""The loop of steps of a service: a coroutine function that takes the session."""


def request_drain(session: AsyncMonitoredSession, reason: str, secs: float | None) -> None:
    """Drain a session, and stop it after `secs`, or never if this is None."""
    session.request_drain(reason)
    if secs is not None:
        session.requests.limit_drain(secs)


class SessionRunner:
    """Enters a session, calls `run_function` with it and leaves it, all in one background task.

    It is one task because the cancel scopes and context variables that a session opens belong to
    the task that opened them. An error ends that task and nothing else. It is kept in `failure`.
    """

    def __init__(
        self,
        session: AsyncMonitoredSession,
        run_function: RunFunction,
        grace_secs: float,
        drain_secs: float | None,
    ) -> None:
        self._session = session
        self._run_function = run_function
        self._grace_secs = grace_secs
        self._drain_secs = drain_secs
        # The name of the session in messages.
        name = session.status().name
        self._label = "the session" if name is None else f"session {safe_text(name)}"
        self._task: asyncio.Task[None] | None = None
        self.is_ending: bool = False
        """Whether the server has asked the session to end."""
        self._end_task: asyncio.Task[None] | None = None
        """Waits for the end of the session, and cancels `_task` if that takes too long."""
        self.opened: asyncio.Event = asyncio.Event()
        """Set once the session is open, or has failed to open."""
        self.ended: asyncio.Event = asyncio.Event()
        """Set once the session has been left."""
        self.failure: BaseException | None = None
        """The error that ended the session, unless it ended cleanly."""

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
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._run(), name="the session of a service")

    async def _run(self) -> None:
        """Run the session from its opening to its end, and keep its error."""
        try:
            async with self._session as session:
                self.opened.set()
                await self._make_steps(session)
        except BaseException as error:
            # A stop before the session was open raises an error of a clean end. That is no failure.
            if is_clean_end(error) and self._session.stop_reason is not None:
                return
            self.failure = error
            _logger.error("%s failed; the server continues without it", self._label, exc_info=error)
            # A cancellation, or an error that is to end the program.
            if not isinstance(error, Exception):
                raise
        finally:
            # Also after an error, so that no client waits for a session that never opens.
            self.opened.set()
            self.ended.set()

    async def _make_steps(self, session: AsyncMonitoredSession) -> None:
        """Await the user's function, which runs the loop of steps, and record its failure.

        `_run` sees the failure only after the session has closed, which may take some time. It is
        recorded now, so that `health` reports it in the meantime. A clean end is no failure.
        """
        try:
            steps: object = self._run_function(session)
            if not inspect.isawaitable(steps):
                raise InvalidArgumentError(
                    f"run of a SessionService is {self._run_function!r}, which returned {steps!r};"
                    " write it as `async def`"
                )
            await steps
        except BaseException as error:
            if not is_clean_end(error):
                self.failure = error
            raise

    async def wait_opened(self) -> None:
        """Wait until the session is open, or has failed to open. Do not wait before `start`.

        Raises:
            StopRequestedError: the session was asked to stop before it was open.
            Exception: a background task of a hook has failed before the session was open.
        """
        if self._task is not None and not self.opened.is_set():
            await self._session.coord.until(self.opened.wait())

    def request_end(self, reason: str) -> None:
        """Begin to end the session, and return: drain it if the service has a drain time, or else
        stop it.

        A second call stops a session that drains. A signal handler may call this, in the main
        thread, between any two operations of the event loop.
        """
        assert self._task is not None
        if self.is_ending:
            self._session.request_stop(reason)
        else:
            self._begin_end(reason)
        # The task that limits the end starts now, and not when the server calls `stop`. Before that
        # call a server waits for its clients, and these may wait for the end of the session.
        self._task.get_loop().call_soon_threadsafe(self._limited_end)

    async def stop(self, reason: str) -> None:
        """Drain the session if the service has a drain time, otherwise stop it. Wait for its end.

        A drain becomes a stop when its time is over. If the session has not ended a grace period
        after the stop, it is cancelled, and gets another grace period.
        """
        assert self._task is not None
        self._begin_end(reason)
        # `_limited_end` cancels the session when its time is over. `shielded` is for a server that
        # cancels this call: it then cancels the session without waiting for that.
        await shielded(
            wait_done([self._limited_end()], None),
            grace_secs=self._grace_secs,
            what="the end of a service",
            on_cancel=functools.partial(self._task.cancel, "the server was cancelled"),
        )

    def _begin_end(self, reason: str) -> None:
        """Drain the session if the service has a drain time, otherwise stop it."""
        self.is_ending = True
        if self._drain_secs is None:
            self._session.request_stop(reason)
        else:
            request_drain(self._session, reason, self._drain_secs)

    def _limited_end(self) -> asyncio.Task[None]:
        """Return the task that waits for the end of the session. The first call starts it."""
        if self._end_task is None:
            loop = asyncio.get_running_loop()
            self._end_task = loop.create_task(self._limit_end(), name="the end of a service")
        return self._end_task

    async def _limit_end(self) -> None:
        """Wait for the end of the session. Cancel it when the grace period after a stop is over.

        If it continues after another grace period, report that as its failure, and wait no more.
        """
        task = self._task
        assert task is not None
        # The grace period begins with the stop, which may come after a drain.
        stop = asyncio.ensure_future(self._session.coord.wait_for_stop())
        try:
            await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        if await wait_done([task], self._grace_secs):
            return
        secs = self._grace_secs
        _logger.warning("%s is still active %s s after the stop; cancelling it", self._label, secs)
        task.cancel("the grace period was over")
        if not await wait_done([task], secs):
            late = f"{self._label} is still active {secs} s after its cancellation"
            _logger.warning("%s; ending without it", late)
            self.failure = self.failure or TimeoutError(late)
            # The clients must not wait for the session either.
            self.opened.set()
            self.ended.set()


class _SignalHandler:
    """Calls the callbacks of all services, and then the handler that was installed before."""

    def __init__(self, previous: Callable[[int, FrameType | None], object]) -> None:
        self.previous = previous
        self.callbacks: list[Callable[[str], object]] = []
        self._process = os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # A forked child has no session that could end.
        if os.getpid() == self._process:
            for callback in tuple(self.callbacks):
                callback(signal.Signals(number).name)
        self.previous(number, frame)


@contextlib.contextmanager
def notify_on_signals(callback: Callable[[str], object]) -> Generator[None]:
    """Call `callback(name)` at SIGINT and SIGTERM, before the handler that was installed before.

    A signal without a handler is left alone. Outside of the main thread nothing is called. Services
    may begin and end in any order, because they share one handler.
    """
    handlers: dict[signal.Signals, _SignalHandler] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            # The first service installs the shared handler, and later ones use it.
            if callable(handler) and not isinstance(handler, _SignalHandler):
                handler = _SignalHandler(handler)
                signal.signal(number, handler)
            if isinstance(handler, _SignalHandler):
                handler.callbacks.append(callback)
                handlers[number] = handler
    try:
        yield
    finally:
        for number, shared in handlers.items():
            shared.callbacks.remove(callback)
            # A handler that other code has installed in the meantime stays.
            is_installed: bool = signal.getsignal(number) is shared
            if is_installed and not shared.callbacks:
                signal.signal(number, shared.previous)
