"""A session that runs beside a server, and the signals of the server."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

import anyio
import pytest

from aiohooks import AsyncMonitoredSession, Graph, Variables, WorkerSessionCreator
from aiohooks.adapters.asgi import SessionService
from tests.support.hooks import EndRecorder
from tests.support.services import FeedQueue, SlowToOpen, serving, step
from tests.support.sessions import use_up
from tests.support.waiting import forever, ticks, until_true

NO_MORE = "the session makes no more steps: "
owner: contextvars.ContextVar[str] = contextvars.ContextVar("owner", default="test")


async def ignores_stop(session: AsyncMonitoredSession) -> None:
    """Continue until cancelled."""
    await forever()


async def test_the_session_is_entered_run_and_left_in_one_task() -> None:
    """Cancel scopes and context variables that are set when the session is entered can be reset
    when it is left.
    """
    tasks: list[asyncio.Task[Any] | None] = []

    class Session(AsyncMonitoredSession):
        async def __aenter__(self) -> Any:
            tasks.append(asyncio.current_task())
            self.scope = anyio.CancelScope()
            self.scope.__enter__()
            self.token = owner.set("session")
            return await super().__aenter__()

        async def __aexit__(self, *exc: Any) -> bool:
            tasks.append(asyncio.current_task())
            owner.reset(self.token)  # raises ValueError in another context
            self.scope.__exit__(*exc)  # raises RuntimeError in another task
            return await super().__aexit__(*exc)

    async def loop(session: AsyncMonitoredSession) -> None:
        tasks.append(asyncio.current_task())
        assert owner.get() == "session"
        await FeedQueue().loop(session)

    async with serving(service=SessionService(Session(step), loop)) as served:
        assert (await served.ask("/steps/0")).status == 200
    assert len(set(tasks)) == 1
    assert tasks[0] is not asyncio.current_task()
    assert served.service.health().state == "finished"


@pytest.mark.parametrize("error", [None, OSError("no port")])
async def test_the_end_of_the_server_is_a_clean_end_of_the_session(error: Exception | None) -> None:
    """The session stops, waits end, and its hooks' `end` and `close` are called; a failure of the
    server is raised then.
    """
    recorder = EndRecorder()
    with pytest.raises(OSError, match="no port") if error else contextlib.nullcontext():
        async with serving([recorder]) as served:
            waiting = await served.begin("/steps/9")
            if error is not None:
                raise error
    assert recorder.calls == ["begin", "end", "close(NoneType)"]
    await waiting.task
    assert waiting.reply.json["message"] == f"{NO_MORE}the server shuts down"
    assert served.service.health().stop_reason == "the server shuts down"


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_loop_that_does_not_stop_is_cancelled(
    cancelled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """After `grace_secs` with a warning, or when the server is cancelled meanwhile, which is
    raised; the hooks are closed.
    """
    recorder = EndRecorder()
    service = SessionService(AsyncMonitoredSession(step, [recorder]), ignores_stop, grace_secs=7)
    with pytest.raises(asyncio.CancelledError) if cancelled else contextlib.nullcontext():
        async with serving(service=service) as served:
            leaving = await served.leave()
            await served.pass_time(6.9)
            assert (leaving.done(), service.health().state) == (False, "stopping")
            leaving.cancel() if cancelled else served.clock.advance(0.1)
    assert recorder.calls == ["begin", "close(CancelledError)"]
    assert cancelled or service.health().failure == "CancelledError: the grace period was over"
    assert ("7 s after the stop; cancelling it" in caplog.text) is not cancelled


async def test_a_loop_that_is_no_coroutine_function_is_named() -> None:
    """The session fails with what to write instead."""
    no_coroutine_function: Any = lambda session: None  # noqa: E731
    service = SessionService(AsyncMonitoredSession(step), no_coroutine_function)
    async with serving(service=service):
        await ticks(20)
    assert "returned None; write it as `async def`" in str(service.health().failure)


async def test_a_failure_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A failed session is logged once with its traceback; no request adds a line, whatever its
    content.
    """
    caplog.set_level(logging.DEBUG)
    async with serving() as served:
        served.feeds.fail(OSError("out of paper"))
        await ticks(20)
        before = len(caplog.records)
        for path in ("/health", "/steps/%0aERROR%20forged", "/steps/9", "/%1b[31m"):
            await served.ask(path, headers={"user-agent": "\x1b[31m\n2026 ERROR forged"})
        assert before == len(caplog.records) == 1


# -- signals


@pytest.fixture
def server() -> Iterator[list[int]]:
    """The signals that a server has received, which has its own handlers, as uvicorn does."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    yield received
    for number, handler in before.items():
        assert signal.getsignal(number) is handle, "the server's handler is installed again"
        signal.signal(number, handler)


async def receive(number: signal.Signals = signal.SIGTERM) -> None:
    """Let this process receive a signal."""
    os.kill(os.getpid(), number)
    await ticks(20)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("opens", [False, True])
async def test_a_signal_ends_waits_before_the_server_ends(
    server: list[int], number: signal.Signals, opens: bool
) -> None:
    """The server gets it, and the session stops immediately, also while it opens: clients are
    answered, with its reason.
    """
    hook = SlowToOpen()
    async with serving([hook] if opens else [], opened=not opens) as served:
        waiting = await served.begin("/steps/9")
        await receive(number)
        await waiting.task
        for reply in (waiting.reply, await served.ask("/steps/9")):
            assert (reply.status, reply.json["error"]) == (410, "stopped")
            assert reply.json["message"] == f"{NO_MORE}the server received {number.name}"
        assert served.service.health().state == ("stopping" if opens else "finished")
        hook.released.set()
    assert (served.service.health().state, server) == ("finished", [number])


async def test_a_signal_while_a_worker_waits_for_its_chief(
    server: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """The session of the worker ends, and with it the waits of its clients."""
    session = AsyncMonitoredSession(WorkerSessionCreator(Graph(), variables=Variables()))
    async with serving(opened=False, service=SessionService(session, FeedQueue().loop)) as served:
        waiting = await served.begin("/steps/1")
        await receive()
        await until_true(lambda: server)
        await waiting.task
        assert waiting.reply.json["message"] == f"{NO_MORE}the server received SIGTERM"
    assert caplog.records == []


class Stubborn(SlowToOpen):
    """One that ignores its cancellation, too."""

    async def begin(self) -> None:
        while not self.released.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await super().begin()


@pytest.mark.parametrize("hook_class", [SlowToOpen, Stubborn])
async def test_the_grace_period_begins_at_the_signal(
    server: list[int], hook_class: type[SlowToOpen], caplog: pytest.LogCaptureFixture
) -> None:
    """A session that does not end is cancelled after `grace_secs`, and given up after as long
    again.
    """
    hook = hook_class()
    async with serving([hook], opened=False, grace_secs=7) as served:
        await receive()
        await until_true(lambda: served.service.health().stop_reason)
        await served.pass_time(6.9)
        assert served.service.health().state == "stopping"
        for secs in (0.2, 7.0, 0.5):
            await served.pass_time(secs)
        assert served.service.health().state == "failed"
        hook.released.set()
    assert served.service._runner is not None
    assert served.service._runner._task is not None
    await asyncio.wait([served.service._runner._task])
    assert "cancelling it" in caplog.text
    assert ("ending without it" in caplog.text) is (hook_class is Stubborn)


class Draining:
    """A service over a queue of three values, of which the first step waits for a test."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[int] = asyncio.Queue()
        self.released = asyncio.Event()
        self.used: list[int] = []
        self.session = AsyncMonitoredSession(self.step)
        self.service = SessionService(self.session, self.loop, drain_secs=30, grace_secs=7)

    async def step(self, value: int) -> None:
        await self.released.wait()
        self.used.append(value)

    async def loop(self, session: AsyncMonitoredSession) -> None:
        for value in range(3):
            self.queue.put_nowait(value)
        await use_up(session.steps(feeds=self.queue))


@pytest.mark.parametrize("by_signal", [True, False])
async def test_the_end_of_the_server_drains_the_session(server: list[int], by_signal: bool) -> None:
    """With `drain_secs` what is under way is finished, whether a signal came before or the server
    just ends.
    """
    drained = Draining()
    async with serving(service=drained.service) as served:
        waiting = await served.begin("/steps/9")
        if by_signal:
            await receive()
            await until_true(lambda: drained.service.health().state == "draining")
        leaving = await served.leave()
        assert (drained.service.health().state, waiting.task.done(), leaving.done()) == (
            "draining",
            False,
            False,
        )
        drained.released.set()
        await leaving
        await waiting.task
    reason = "the server received SIGTERM" if by_signal else "the server shuts down"
    assert waiting.reply.json["message"] == f"{NO_MORE}{reason}"
    assert (drained.used, drained.service.health().stop_reason) == ([0, 1, 2], reason)


@pytest.mark.parametrize("requested", [None, "before a signal"])
async def test_a_second_signal_ends_the_drain_of_a_service(
    server: list[int], requested: str | None
) -> None:
    """It is the stop then, also of a drain that a client or a hook has requested before; clients
    are answered.
    """
    drained = Draining()
    async with serving(service=drained.service) as served:
        waiting = await served.begin("/steps/9")
        if requested is not None:
            drained.session.request_drain(requested)

        def is_in(state: str) -> bool:
            return drained.service.health().state == state

        for state in ("draining", "stopping"):
            await receive()
            await until_true(functools.partial(is_in, state))
            assert served.clock.pending
        await waiting.task
        drained.released.set()
    assert drained.used == [0]
    reason = "the server received SIGTERM"
    assert (drained.session.drain_reason, drained.session.stop_reason) == (
        requested or reason,
        reason,
    )
