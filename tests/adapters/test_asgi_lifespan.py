"""A session that lives as long as a server."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.routing import Mount

from aiohooks import AsyncMonitoredSession, MemoryStepStore, SessionRunHook
from aiohooks.adapters.asgi import SessionService
from aiohooks.errors import SessionClosedError
from aiohooks.testing import ManualClock
from tests.support.asgi import Exchange, ask, turns
from tests.support.services import Work, make, served

owner: contextvars.ContextVar[str] = contextvars.ContextVar("owner", default="nobody")


class Recorder(SessionRunHook):
    """Notes what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def begin(self) -> None:
        self.calls.append("begin")

    async def end(self, session: Any) -> None:
        self.calls.append("end")

    async def close(self, exc: BaseException | None) -> None:
        self.calls.append(f"close({type(exc).__name__})")


async def test_the_session_is_entered_run_and_left_in_one_task() -> None:
    """Cancel scopes and context variables that the loop sets around its steps can be given back by it."""
    tasks: list[asyncio.Task[Any] | None] = []
    work = Work()

    class Session(AsyncMonitoredSession):
        async def __aenter__(self) -> Any:
            tasks.append(asyncio.current_task())
            self.scope = anyio.CancelScope()
            self.scope.__enter__()
            self.token = owner.set("session")
            return await super().__aenter__()

        async def __aexit__(self, *exc: Any) -> bool:
            tasks.append(asyncio.current_task())
            owner.reset(self.token)  # ValueError in another context
            self.scope.__exit__(*exc)  # RuntimeError in another task
            return await super().__aexit__(*exc)

    async def nothing(value: float) -> dict[str, float]:
        return {"loss": value}

    async def loop(session: AsyncMonitoredSession) -> None:
        tasks.append(asyncio.current_task())
        assert owner.get() == "session"
        await work.loop(session)

    service = SessionService(Session(nothing), loop)
    async with service.lifespan():
        assert (await ask(service, "/steps/0")).status == 200
    assert len(set(tasks)) == 1
    assert tasks[0] is not asyncio.current_task()
    assert service.health().state == "finished"


async def test_the_end_of_the_server_is_a_clean_end_of_the_session() -> None:
    """When the server ends, the session stops, its hooks' `end` and `close` are called, and waits are over before."""
    recorder, work = Recorder(), Work()
    async with served(work, [recorder]) as service:
        waiting = Exchange(service, "/steps/9")
        await turns()
    assert recorder.calls == ["begin", "end", "close(NoneType)"]
    await waiting.task
    assert waiting.reply.json["message"] == "the session makes no more steps: the server shuts down"
    assert service.health().stop_reason == "the server shuts down"


async def test_a_loop_that_does_not_stop_is_cancelled_after_the_grace_period(caplog: pytest.LogCaptureFixture) -> None:
    """The server waits `grace_secs` for the loop; it is cancelled then, the hooks are closed, and a warning says so."""
    recorder = Recorder()

    async def nothing() -> None:
        pass

    async def deaf(session: AsyncMonitoredSession) -> None:
        await asyncio.Event().wait()

    with ManualClock() as clock:
        service = SessionService(AsyncMonitoredSession(nothing, [recorder]), deaf, grace_secs=7)
        lifespan = service.lifespan()
        await lifespan.__aenter__()
        await turns()
        leaving = asyncio.create_task(lifespan.__aexit__(None, None, None))
        await turns()
        clock.advance(6.9)
        await turns()
        assert not leaving.done()
        assert service.health().state == "stopping"
        clock.advance(0.1)
        await leaving
    assert recorder.calls == ["begin", "close(CancelledError)"]
    assert service.health().failure == "CancelledError: the grace period was over"
    assert "7 s after the stop; cancelling it" in caplog.text


async def test_a_cancelled_server_still_closes_the_session() -> None:
    """A server that is cancelled while it ends cancels the session, waits until it is closed, and stays cancelled."""
    recorder = Recorder()

    async def nothing() -> None:
        pass

    async def deaf(session: AsyncMonitoredSession) -> None:
        await asyncio.Event().wait()

    service = SessionService(AsyncMonitoredSession(nothing, [recorder]), deaf)

    async def server() -> None:
        async with service.lifespan():
            await turns()

    task = asyncio.create_task(server())
    await turns(60)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert recorder.calls == ["begin", "close(CancelledError)"]


async def test_a_server_that_fails_ends_the_session_too() -> None:
    """An error inside the server's lifespan passes, and the session is left before."""
    recorder = Recorder()
    service = make(Work(), [recorder])

    async def server() -> None:
        async with service.lifespan():
            await turns()
            raise OSError("no port")

    with pytest.raises(OSError, match="no port"):
        await server()
    assert recorder.calls == ["begin", "end", "close(NoneType)"]


async def test_a_lifespan_is_entered_once() -> None:
    """A session is entered once, so its service is too."""
    service = make(Work())
    async with service.lifespan():
        with pytest.raises(SessionClosedError, match="started before"):
            async with service.lifespan():
                pass
        assert (await ask(service, "/health")).status == 200


async def run_lifespan(app: Any) -> tuple[asyncio.Queue[Any], asyncio.Queue[Any], asyncio.Task[None]]:
    """Speaks the lifespan protocol, as a server does."""
    incoming: asyncio.Queue[Any] = asyncio.Queue()
    outgoing: asyncio.Queue[Any] = asyncio.Queue()
    scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
    task = asyncio.create_task(app(scope, incoming.get, outgoing.put))
    incoming.put_nowait({"type": "lifespan.startup"})
    assert (await outgoing.get())["type"] == "lifespan.startup.complete"
    return incoming, outgoing, task


@pytest.mark.parametrize("shape", ["alone", "mounted", "inside another lifespan"])
async def test_it_fits_into_an_application(shape: str) -> None:
    """A service is an application by itself, or is mounted in one that has its lifespan, alone or among others."""
    work = Work()
    service = make(work)

    @contextlib.asynccontextmanager
    async def everything(app: Any) -> AsyncIterator[None]:
        async with service.lifespan(app):
            yield

    app: Any = service
    path = ""
    if shape != "alone":
        lifespan: Any = service.lifespan if shape == "mounted" else everything
        app, path = Starlette(routes=[Mount("/training", service)], lifespan=lifespan), "/training"
    incoming, outgoing, task = await run_lifespan(app)
    work.give(1.0)
    assert (await ask(app, f"{path}/steps/1")).json["step"] == 1
    page = await ask(app, f"{path}/")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert (await ask(app, f"{path}/page.js")).status == 200
    incoming.put_nowait({"type": "lifespan.shutdown"})
    assert (await outgoing.get())["type"] == "lifespan.shutdown.complete"
    await task
    assert service.health().state == "finished"


async def test_it_works_behind_a_middleware_with_cancel_scopes() -> None:
    """Starlette's own kind of middleware runs an application in a task group: answers, leaving and the end are the same."""

    async def dispatch(request: Any, call_next: Any) -> Any:
        return await call_next(request)

    work = Work()
    service = make(work, refresh_secs=0.001)
    app = Starlette(routes=[Mount("/training", service)], middleware=[Middleware(BaseHTTPMiddleware, dispatch=dispatch)])
    async with service.lifespan():
        leaving = [Exchange(app, f"/training/{path}") for path in ("steps/9", "events", "steps/9")]
        staying = [Exchange(app, f"/training/{path}") for path in ("steps/1", "events", "steps/9")]
        await leaving[1].news()
        await turns()
        for one in leaving:
            one.leave()
        work.give(1.0)
        await asyncio.gather(*(one.task for one in leaving), staying[0].task)
        assert staying[0].reply.json["step"] == 1
        assert (await ask(app, "/training/progress")).json["store"]["waiting"] == 1
    await asyncio.gather(*(one.task for one in staying))
    assert staying[1].reply.events[-1][0] == "end"
    assert staying[2].reply.status == 410


async def test_two_services_share_an_application() -> None:
    """Two sessions of one process have a service each, and may share a store."""
    store = MemoryStepStore()
    works = Work(), Work()
    async with served(works[0], store=store) as one, served(works[1], store=store) as other:
        waiting = Exchange(one, "/steps/1")
        await turns()
        works[1].give(1.0)
        await waiting.task
        assert waiting.reply.status == 200
        assert (await ask(other, "/steps/1")).status == 200


async def test_trouble_is_logged_once_where_it_belongs(caplog: pytest.LogCaptureFixture) -> None:
    """A failed session is logged once with its traceback; no request adds a line, whatever is in it."""
    caplog.set_level(logging.DEBUG)
    work = Work()
    async with served(work) as service:
        work.fail(OSError("out of paper"))
        await turns()
        before = len(caplog.records)
        hostile = functools.partial(ask, service, headers={"user-agent": "\x1b[31m\n2026 ERROR forged"})
        for path in ("/health", "/steps/%0aERROR%20forged", "/steps/9", "/%1b[31m"):
            await hostile(path)
        assert before == len(caplog.records) == 1
