"""starlette: several middlewares of the dispatch style in one."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

import aiohooks as ah

pytestmark = pytest.mark.every_python
user: contextvars.ContextVar[str] = contextvars.ContextVar("user")


class HTTPHooks:
    """What may be done around a request; `on_request` of all hooks overlaps, `dispatch` is
    nested.
    """

    async def on_request(self, request: Request) -> None:
        """Look at a request before it is answered."""

    @ah.point("wrap")
    async def dispatch(
        self, request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        """Answer a request."""
        await self.on_request(request)
        return await call_next(request)


async def get(hooks: HTTPHooks, *paths: str) -> list[httpx.Response]:
    """Get pages of an application with the hooks, all at the same time."""

    async def page(request: Request) -> Response:
        return PlainTextResponse(f"{request.url.path} for {user.get('no one')}")

    app = Starlette(
        routes=[Route("/{name}", page)],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=hooks.dispatch)],
    )
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        return await asyncio.gather(*(client.get(path) for path in paths))


async def test_dispatch_is_nested_and_requests_run_beside_each_other() -> None:
    """One `BaseHTTPMiddleware` calls all hooks: what one does is around what the next does, for
    both requests.
    """

    class Header(BaseHTTPMiddleware):
        def __init__(self, text: str) -> None:
            self.text = text

        async def dispatch(self, request: Request, call_next: Any) -> Response:
            await barrier.wait()
            response: Response = await call_next(request)
            response.headers["x-hooks"] = response.headers.get("x-hooks", "") + self.text
            return response

    barrier = asyncio.Barrier(2)
    answers = await get(ah.compose(HTTPHooks, [Header("a"), Header("b")]), "/x", "/y")
    assert [(answer.text, answer.headers["x-hooks"]) for answer in answers] == [
        ("/x for no one", "ba"),
        ("/y for no one", "ba"),
    ]
