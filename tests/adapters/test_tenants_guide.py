"""The program of docs/guides/tenants.md: tenants come, go and fail without touching the others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.asgi import Exchange, ask
from tests.support.pages import python_blocks
from tests.support.source import ROOT
from tests.support.waiting import ticks, until_true


class Served:
    """The program's application, between the start and the end of its lifespan."""

    def __init__(self, app: Any, tenants: list[Any]) -> None:
        self.app = app
        self.tenants = tenants
        self.may_learn = asyncio.Event()
        self.may_learn.set()

    async def status(self, path: str, method: str = "GET", query: str = "") -> int | None:
        """Send a request, and return the status of the reply."""
        return (await ask(self.app, f"/tenants{path}", method=method, query=query)).status

    async def begin(self, path: str, method: str = "GET") -> Exchange:
        """Send a request, and let it wait."""
        exchange = Exchange(self.app, f"/tenants{path}", method=method)
        await ticks(30)
        return exchange


@contextlib.asynccontextmanager
async def serving_tenants() -> AsyncIterator[Served]:
    """Serve the program, whose steps wait for `may_learn`."""
    names: dict[str, Any] = {}
    exec(python_blocks(ROOT / "docs/guides/tenants.md")[0].text, names)
    tenants: list[Any] = []
    base: Any = names["Tenant"]

    class Tenant(base):  # type: ignore[misc]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.has_ended = False
            tenants.append(self)

        async def run(self) -> None:
            await super().run()
            self.has_ended = True

        async def learn(self, value: float) -> Any:
            await served.may_learn.wait()
            return await super().learn(value)

    names["Tenant"] = Tenant
    app = names["make_app"]()
    served = Served(app, tenants)
    async with app.router.lifespan_context(app):
        yield served


async def test_a_tenant_fails_again_and_again() -> None:
    """After thousands of failures its removal still ends its pause, and the others continue."""
    async with serving_tenants() as served:
        for name in ("a", "b"):
            await served.status(f"/{name}", "PUT")
        served.tenants[0].restarts = 5_000
        await served.status("/a/values", "POST", "value=-1")
        await until_true(lambda: served.tenants[0].restarts > 5_000)
        assert await served.status("/a/session/health") == 503
        assert await served.status("/a", "DELETE") == 204
        await ticks(100)
        assert served.tenants[0].has_ended
        assert await served.status("/b/session/ready") == 200


@pytest.mark.parametrize("by", ["SIGTERM", "DELETE", "restart"])
async def test_a_client_that_waits_is_answered(by: str) -> None:
    """A client that waits for a step gets 410 at a signal, before the server ends the lifespan, at
    a removal and at a restart, of which only the last has a new session.
    """
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        async with serving_tenants() as served:
            await served.status("/a", "PUT")
            waiting = await served.begin("/a/session/steps/9")
            if by == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
            elif by == "DELETE":
                assert await served.status("/a", "DELETE") == 204
            else:
                assert await served.status("/a/restart", "POST") == 202
            await waiting.task
            assert waiting.reply.status == 410
            await ticks(60)
            assert await served.status("/a/session/ready") == (200 if by == "restart" else 404)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(received) == (1 if by == "SIGTERM" else 0)
