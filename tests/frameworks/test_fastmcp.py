"""FastMCP: one middleware that stands for several."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import pytest
from fastmcp import Client, FastMCP
from fastmcp.exceptions import AuthorizationError
from fastmcp.server.middleware import Middleware
from mcp import MCPError

import aiohooks as ah

pytestmark = pytest.mark.every_python
user: contextvars.ContextVar[str] = contextvars.ContextVar("user")


def client(middleware: Middleware) -> Client[Any]:
    """Make a client of a server with one tool and one resource; both are in this process."""
    server = FastMCP("forecaster", middleware=[middleware])

    @server.tool
    async def weather(city: str) -> str:
        return f"rain in {city} for {user.get('no one')}"

    @server.resource("data://stations")
    async def stations() -> str:
        return "Bergen"

    return Client(server)


async def test_middlewares_are_nested_and_calls_run_beside_each_other() -> None:
    """With `"wrap"` the first middleware is outside; two tool calls are inside at the same time,
    and see its variables.
    """
    order: list[str] = []

    class Outside(Middleware):
        async def on_call_tool(self, context: Any, call_next: Any) -> Any:
            user.set("ada")
            order.append("out")
            await barrier.wait()
            return await call_next(context)

    class Inside:
        async def on_call_tool(self, context: Any, call_next: Any) -> Any:
            order.append("in")
            return await call_next(context)

    barrier = asyncio.Barrier(2)
    async with client(ah.compose(Middleware, [Outside(), Inside()], results="wrap")) as caller:
        answers = await asyncio.gather(
            *(caller.call_tool("weather", {"city": city}) for city in ("Bergen", "Rome"))
        )
    assert [answer.data for answer in answers] == ["rain in Bergen for ada", "rain in Rome for ada"]
    assert order == ["out", "out", "in", "in"]


async def test_a_check_is_not_bypassed() -> None:
    """A middleware that wraps the reading does not keep another one's check from being called."""
    denied = AuthorizationError("not yours")

    class Deny(Middleware):
        async def check_resource_access(self, context: Any) -> None:
            raise denied

    class Log(Middleware):
        async def on_read_resource(self, context: Any, call_next: Any) -> Any:
            with pytest.raises(AuthorizationError) as caught:
                await call_next(context)
            errors.append(caught.value)
            raise caught.value

    errors: list[Exception] = []
    async with client(ah.compose(Middleware, [Log(), Deny()], results="wrap")) as caller:
        with pytest.raises(MCPError):
            await caller.read_resource("data://stations")
    assert errors == [denied]
