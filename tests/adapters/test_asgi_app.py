"""The service as an ASGI application: its arguments, and its place in other applications."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from aiohooks import AsyncMonitoredSession
from aiohooks.adapters.asgi import SessionService
from aiohooks.errors import InvalidArgumentError, SessionClosedError
from tests.support.asgi import Exchange, ask
from tests.support.pages import python_blocks
from tests.support.services import FeedQueue, make_service, step
from tests.support.source import ROOT
from tests.support.waiting import ticks


@contextlib.asynccontextmanager
async def lifespan_of(app: Any) -> AsyncIterator[None]:
    """Start and end the application's lifespan, as a server does."""
    incoming, outgoing = asyncio.Queue[Any](), asyncio.Queue[Any]()
    scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
    task = asyncio.create_task(app(scope, incoming.get, outgoing.put))
    incoming.put_nowait({"type": "lifespan.startup"})
    assert (await outgoing.get())["type"] == "lifespan.startup.complete"
    yield
    incoming.put_nowait({"type": "lifespan.shutdown"})
    assert (await outgoing.get())["type"] == "lifespan.shutdown.complete"
    await task


@pytest.mark.parametrize("shape", ["alone", "mounted", "inside another lifespan", "in FastAPI"])
async def test_a_service_in_an_application(shape: str) -> None:
    """A service is an application by itself, or is mounted in one whose lifespan is, or contains,
    the service's.
    """
    feeds = FeedQueue()
    service = make_service(feeds)

    @contextlib.asynccontextmanager
    async def outer(app: Any) -> AsyncIterator[None]:
        async with service.lifespan(app):
            yield

    app: Any = service
    path = "" if shape == "alone" else "/training"
    if shape == "in FastAPI":
        app = FastAPI(lifespan=service.lifespan)
        app.mount(path, service)
    elif shape != "alone":
        lifespan: Any = service.lifespan if shape == "mounted" else outer
        app = Starlette(routes=[Mount(path, service)], lifespan=lifespan)
    async with lifespan_of(app):
        feeds.put(1.0)
        assert (await ask(app, f"{path}/steps/1")).json["step"] == 1
        page = await ask(app, f"{path}/")
        assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert (await ask(app, f"{path}/page.js")).status == 200
        waiting = Exchange(app, f"{path}/steps/2")
        await ticks(20)
    await waiting.task
    assert waiting.reply.json["message"] == "the session makes no more steps: the server shuts down"
    assert service.health().state == "finished"


@pytest.mark.parametrize(
    "wrong",
    [
        *({name: 5} for name in ("session", "run")),
        *({"allowed_hosts": [host]} for host in ("*.example.com", "example.com:80")),
        {"grace_secs": -1},
        {"drain_secs": -1},
    ],
    ids=lambda wrong: "-".join(f"{name}={value}"[:30] for name, value in wrong.items()),
)
def test_invalid_arguments_are_refused(wrong: dict[str, Any]) -> None:
    """The error names the argument and what to give."""
    arguments: dict[str, Any] = {"session": AsyncMonitoredSession(step), **wrong}
    with pytest.raises(InvalidArgumentError, match="give"):
        SessionService(**arguments)


@pytest.mark.parametrize("page", ["fastapi", "services"])
def test_the_application_of_a_guide_is_made_for_each_server(page: str) -> None:
    """Its function makes as many as are needed; one that is entered again says so."""
    make_app = program_of(page)["make_app"]
    for _ in range(2):
        with TestClient(make_app()) as client:
            assert client.get("/training/steps/0").status_code == 200
    with pytest.raises(SessionClosedError, match="started before"), client:
        pass


def test_the_application_of_the_guide_takes_nothing_after_a_failure() -> None:
    """A value for a session that has failed is refused with 503, as no step would use it."""
    with TestClient(program_of("fastapi")["make_app"]()) as client:
        assert client.post("/values", params={"value": "nan"}).status_code == 202
        assert client.get("/training/steps/9").json()["error"] == "failed"
        refused = client.post("/values", params={"value": 1})
        assert (refused.status_code, client.get("/training/health").status_code) == (503, 503)
        assert refused.json() == {"detail": "the training has ended; /training/health says why"}


def program_of(page: str) -> dict[str, Any]:
    """Run the first block of a guide and return its names."""
    names: dict[str, Any] = {}
    exec(python_blocks(ROOT / f"docs/guides/{page}.md")[0].text, names)
    return names
