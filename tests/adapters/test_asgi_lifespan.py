"""A session that runs beside a server, and the signals of the server."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import anyio
import pytest

from aiohooks import AsyncMonitoredSession, Graph, Variables, WorkerSessionCreator
from aiohooks.adapters.asgi import SessionService
from aiohooks.adapters.asgi._lifespan import notify_on_signals
from aiohooks.errors import SessionClosedError
from aiohooks.testing import ManualClock
from tests.support.asgi import Exchange, ask
from tests.support.hooks import EndRecorder
from tests.support.services import FeedQueue, SlowToOpen, make_service, running_service
from tests.support.waiting import ticks, until_true

owner: contextvars.ContextVar[str] = contextvars.ContextVar("owner", default="test")


async def nothing() -> None:
    """Make a step."""


async def ignores_stop(session: AsyncMonitoredSession) -> None:
    """Continue until cancelled."""
    await asyncio.Event().wait()


async def test_the_session_is_entered_run_and_left_in_one_task() -> None:
    """Cancel scopes and context variables that are set when the session is entered can be reset when it is left."""
    tasks: list[asyncio.Task[Any] | None] = []
    feeds = FeedQueue()

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

    async def nothing(value: float) -> dict[str, float]:
        return {"loss": value}

    async def loop(session: AsyncMonitoredSession) -> None:
        tasks.append(asyncio.current_task())
        assert owner.get() == "session"
        await feeds.loop(session)

    service = SessionService(Session(nothing), loop)
    async with service.lifespan():
        assert (await ask(service, "/steps/0")).status == 200
    assert len(set(tasks)) == 1
    assert tasks[0] is not asyncio.current_task()
    assert service.health().state == "finished"


async def test_the_end_of_the_server_is_a_clean_end_of_the_session() -> None:
    """When the server ends, the session stops, waits end, and its hooks' `end` and `close` are called."""
    recorder, feeds = EndRecorder(), FeedQueue()
    async with running_service(feeds, [recorder]) as service:
        waiting = Exchange(service, "/steps/9")
        await ticks(20)
    assert recorder.calls == ["begin", "end", "close(NoneType)"]
    await waiting.task
    assert waiting.reply.json["message"] == "the session makes no more steps: the server shuts down"
    assert service.health().stop_reason == "the server shuts down"


async def test_a_loop_that_does_not_stop_is_cancelled_after_the_grace_period(caplog: pytest.LogCaptureFixture) -> None:
    """The server waits `grace_secs` for the loop; then it is cancelled with a warning, and the hooks are closed."""
    recorder = EndRecorder()

    with ManualClock() as clock:
        service = SessionService(AsyncMonitoredSession(nothing, [recorder]), ignores_stop, grace_secs=7)
        lifespan = service.lifespan()
        await lifespan.__aenter__()
        await ticks(20)
        leaving = asyncio.create_task(lifespan.__aexit__(None, None, None))
        await ticks(20)
        clock.advance(6.9)
        await ticks(20)
        assert not leaving.done()
        assert service.health().state == "stopping"
        clock.advance(0.1)
        await leaving
    assert recorder.calls == ["begin", "close(CancelledError)"]
    assert service.health().failure == "CancelledError: the grace period was over"
    assert "7 s after the stop; cancelling it" in caplog.text


async def test_a_cancelled_server_still_closes_the_session() -> None:
    """A server that is cancelled while it ends cancels the session, waits until it is closed, and raises the cancellation."""
    recorder = EndRecorder()

    service = SessionService(AsyncMonitoredSession(nothing, [recorder]), ignores_stop)

    async def server() -> None:
        async with service.lifespan():
            await ticks(20)

    task = asyncio.create_task(server())
    await ticks(60)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert recorder.calls == ["begin", "close(CancelledError)"]


async def test_a_server_that_fails_ends_the_session_too() -> None:
    """An error inside the server's lifespan is raised after the session was left."""
    recorder = EndRecorder()
    service = make_service(FeedQueue(), [recorder])

    async def server() -> None:
        async with service.lifespan():
            await ticks(20)
            raise OSError("no port")

    with pytest.raises(OSError, match="no port"):
        await server()
    assert recorder.calls == ["begin", "end", "close(NoneType)"]


async def test_a_lifespan_is_entered_once() -> None:
    """A session is entered once, so the lifespan of its service is too."""
    service = make_service(FeedQueue())
    async with service.lifespan():
        with pytest.raises(SessionClosedError, match=r"session trainer was started before.* in a function"):
            async with service.lifespan():
                pass
        assert (await ask(service, "/health")).status == 200


async def test_a_loop_that_is_no_coroutine_function_is_named() -> None:
    """The session fails with what to write instead."""

    def loop(session: AsyncMonitoredSession) -> None:
        pass

    service = SessionService(AsyncMonitoredSession(nothing), loop)  # type: ignore[arg-type]
    async with service.lifespan():
        await ticks(20)
    assert "returned None; write it as `async def`" in str(service.health().failure)


async def test_a_failure_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A failed session is logged once with its traceback; no request adds a line, whatever its content."""
    caplog.set_level(logging.DEBUG)
    feeds = FeedQueue()
    async with running_service(feeds) as service:
        feeds.fail(OSError("out of paper"))
        await ticks(20)
        before = len(caplog.records)
        hostile = functools.partial(ask, service, headers={"user-agent": "\x1b[31m\n2026 ERROR forged"})
        for path in ("/health", "/steps/%0aERROR%20forged", "/steps/9", "/%1b[31m"):
            await hostile(path)
        assert before == len(caplog.records) == 1


@pytest.fixture
def server() -> Iterator[list[int]]:
    """The signals that a server has received, which has its own handlers, as uvicorn does."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {each: signal.signal(each, handle) for each in (signal.SIGINT, signal.SIGTERM)}
    yield received
    for each, handler in before.items():
        assert signal.getsignal(each) is handle, "the server's handler is installed again"
        signal.signal(each, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_waits_before_the_server_ends(server: list[int], number: signal.Signals) -> None:
    """The server gets its signal, and the session stops immediately: the clients that the server waits for are answered."""
    service = make_service(FeedQueue())
    async with service.lifespan():
        waiting = Exchange(service, "/steps/9")
        await ticks(20)
        os.kill(os.getpid(), number)
        await waiting.task
        assert waiting.reply.json["message"] == f"the session makes no more steps: the server received {number.name}"
        assert server == [number]


async def test_a_signal_while_the_session_opens(server: list[int]) -> None:
    """Clients that wait for a session that is still opening are answered at the signal, with its reason."""
    hook = SlowToOpen()
    service = make_service(FeedQueue(), [hook])
    async with service.lifespan():
        waiting = Exchange(service, "/steps/9")
        await ticks(20)
        assert service.health().state == "starting"
        os.kill(os.getpid(), signal.SIGTERM)
        await waiting.task
        for reply in (waiting.reply, await ask(service, "/steps/9")):
            assert (reply.status, reply.json["error"]) == (410, "stopped")
            assert reply.json["message"] == "the session makes no more steps: the server received SIGTERM"
        assert service.health().state == "stopping"
        hook.released.set()
    assert (service.health().state, server) == ("finished", [signal.SIGTERM])


async def test_a_signal_while_a_worker_waits_for_its_chief(server: list[int], caplog: pytest.LogCaptureFixture) -> None:
    """The session of the worker ends, and with it the streams of its events: the server need not wait for anything."""
    worker = WorkerSessionCreator(Graph(), variables=Variables())
    service = SessionService(AsyncMonitoredSession(worker), FeedQueue().loop)
    with ManualClock() as clock:
        async with service.lifespan():
            stream = Exchange(service, "/events")
            await ticks(20)
            clock.advance(0.5)
            await ticks(20)
            os.kill(os.getpid(), signal.SIGTERM)
            await until_true(lambda: server)
            await ticks(20)
            clock.advance(0.5)
            await stream.task
            assert stream.reply.events[-1][1]["state"] == "finished"
            assert stream.reply.events[-1][1]["stop_reason"] == "the server received SIGTERM"
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
    """A session that does not end holds up the streams, for which the server waits, for `grace_secs` twice at the most."""
    hook = hook_class()
    with ManualClock() as clock:
        service = make_service(FeedQueue(), [hook], grace_secs=7)
        async with service.lifespan():
            stream = Exchange(service, "/events")
            await ticks(20)
            os.kill(os.getpid(), signal.SIGTERM)
            await until_true(lambda: service.health().stop_reason)
            await ticks(20)
            clock.advance(6.9)
            await ticks(20)
            assert not stream.task.done()
            for secs in (0.2, 7.0, 0.5):
                clock.advance(secs)
                await ticks(20)
            await stream.task
            assert stream.reply.events[-1][0] == "end"
            hook.released.set()
        assert service._runner is not None
        assert service._runner._task is not None
        await asyncio.wait([service._runner._task])
    assert "cancelling it" in caplog.text
    assert ("ending without it" in caplog.text) is (hook_class is Stubborn)


async def test_a_signal_ends_steps_that_compute(server: list[int]) -> None:
    """Steps that never wait end with the one that the signal fell into."""
    steps = 0

    async def step() -> dict[str, int]:
        nonlocal steps
        steps += 1
        if steps == 3:
            signal.raise_signal(signal.SIGTERM)
        return {"loss": steps}

    async def train(session: AsyncMonitoredSession) -> None:
        while steps < 9 and not session.should_stop():
            await session.run("loss")

    service = SessionService(AsyncMonitoredSession(step), train)
    async with service.lifespan():
        await ticks(20)
    assert (steps, server) == (3, [signal.SIGTERM])
    assert service.health().stop_reason == "the server received SIGTERM"


async def test_without_stop_on_signals(server: list[int]) -> None:
    """With `stop_on_signals=False` the session continues until the server ends it."""
    service = make_service(FeedQueue(), stop_on_signals=False)
    async with service.lifespan():
        await ticks(20)
        os.kill(os.getpid(), signal.SIGTERM)
        await ticks(20)
        assert service.health().state == "running"
        assert server == [signal.SIGTERM]


class Draining:
    """A loop over a queue whose steps wait for a test."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[int] = asyncio.Queue()
        self.released = asyncio.Event()
        self.used: list[int] = []

    async def step(self, value: int) -> None:
        await self.released.wait()
        self.used.append(value)

    async def loop(self, session: AsyncMonitoredSession) -> None:
        async for _ in session.steps(feeds=self.queue):
            pass


@pytest.mark.parametrize("by_signal", [True, False])
async def test_the_end_of_the_server_drains_the_session(server: list[int], by_signal: bool) -> None:
    """With `drain_secs` what is under way is finished, whether a signal came before or the server just ends."""
    feeds = Draining()
    service = SessionService(AsyncMonitoredSession(feeds.step), feeds.loop, drain_secs=30)
    lifespan = service.lifespan()
    await lifespan.__aenter__()
    for value in range(3):
        feeds.queue.put_nowait(value)
    waiting = Exchange(service, "/steps/9")
    await ticks(20)
    if by_signal:
        os.kill(os.getpid(), signal.SIGTERM)
        await until_true(lambda: service.health().state == "draining")
    leaving = asyncio.create_task(lifespan.__aexit__(None, None, None))
    await ticks(20)
    assert (service.health().state, waiting.task.done(), leaving.done()) == ("draining", False, False)
    feeds.released.set()
    await leaving
    await waiting.task
    reason = "the server received SIGTERM" if by_signal else "the server shuts down"
    assert waiting.reply.json["message"] == f"the session makes no more steps: {reason}"
    assert (feeds.used, service.health().stop_reason) == ([0, 1, 2], reason)


async def test_a_signal_during_a_drain_limits_it(server: list[int]) -> None:
    """A drain that a client or a hook has requested continues, as at a first signal; the second one is a stop."""
    feeds = Draining()
    session = AsyncMonitoredSession(feeds.step)
    with ManualClock() as clock:
        service = SessionService(session, feeds.loop, drain_secs=30)
        async with service.lifespan():
            feeds.queue.put_nowait(0)
            await ticks(20)
            session.request_drain("before a signal")
            os.kill(os.getpid(), signal.SIGTERM)
            await until_true(lambda: clock.pending)
            assert service.health().state == "draining"
            os.kill(os.getpid(), signal.SIGTERM)
            await until_true(session.should_stop)
            feeds.released.set()
    assert (session.drain_reason, session.stop_reason) == ("before a signal", "the server received SIGTERM")


async def test_a_second_signal_ends_the_drain_of_a_service(server: list[int]) -> None:
    """It is the stop then, and clients are answered."""
    feeds = Draining()
    service = SessionService(AsyncMonitoredSession(feeds.step), feeds.loop, drain_secs=30)
    async with service.lifespan():
        for value in range(3):
            feeds.queue.put_nowait(value)
        waiting = Exchange(service, "/steps/9")
        await ticks(20)
        for state in ("draining", "stopping"):
            os.kill(os.getpid(), signal.SIGTERM)
            await until_true(lambda state=state: service.health().state == state)  # type: ignore[misc]
        await waiting.task
        feeds.released.set()
    assert feeds.used == [0]


@pytest.mark.parametrize("limited", [True, False])
async def test_the_drain_of_a_service_is_limited(limited: bool, caplog: pytest.LogCaptureFixture) -> None:
    """After `drain_secs` it is a stop, also of a drain without a limit; after `grace_secs` more the session is cancelled."""
    feeds = Draining()
    session = AsyncMonitoredSession(feeds.step)
    with ManualClock() as clock:
        service = SessionService(session, feeds.loop, drain_secs=30, grace_secs=7)
        lifespan = service.lifespan()
        await lifespan.__aenter__()
        feeds.queue.put_nowait(1)
        await ticks(20)
        if not limited:
            session.request_drain("enough")
        leaving = asyncio.create_task(lifespan.__aexit__(None, None, None))
        await ticks(20)
        clock.advance(29)
        await ticks(20)
        assert service.health().state == "draining"
        clock.advance(1)
        await ticks(20)
        assert service.health().state == "stopping"
        assert "the drain took longer than 30 s" in (session.stop_reason or "")
        clock.advance(6)
        await ticks(20)
        assert not leaving.done()
        clock.advance(1)
        await leaving
    assert "still active 7 s after the stop; cancelling it" in caplog.text


async def test_a_signal_without_a_handler_is_left_alone() -> None:
    """A signal that would end the process still does."""
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with notify_on_signals(print):
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_a_handler_installed_in_the_block_stays(server: list[int]) -> None:
    """A handler that other code installs inside the block stays installed."""

    def other(number: int, frame: FrameType | None) -> None:
        pass

    mine = signal.getsignal(signal.SIGTERM)
    with notify_on_signals(print):
        signal.signal(signal.SIGTERM, other)
    assert signal.getsignal(signal.SIGTERM) is other
    signal.signal(signal.SIGTERM, mine)


async def test_signals_outside_the_main_thread() -> None:
    """A server in another thread than the main one works without signals."""
    before = signal.getsignal(signal.SIGTERM)
    same: list[bool] = []

    async def inside() -> None:
        with notify_on_signals(print):
            same.append(signal.getsignal(signal.SIGTERM) is before)

    thread = threading.Thread(target=lambda: asyncio.run(inside()))
    thread.start()
    await asyncio.to_thread(thread.join)
    assert same == [True]


async def test_a_forked_child_does_not_write_into_its_parents_loop(server: list[int]) -> None:
    """In a forked child only the server's handler is called."""
    received: list[str] = []
    with notify_on_signals(received.append):
        handler = signal.getsignal(signal.SIGTERM)
        assert callable(handler)
        child = os.fork()
        if child == 0:
            handler(signal.SIGTERM, None)
            os._exit(len(server))
        _, status = os.waitpid(child, 0)  # noqa: ASYNC222 - the child ends by itself
        assert os.waitstatus_to_exitcode(status) == 1
        await ticks(20)
        assert received == []
