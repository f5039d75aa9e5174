"""Hooks around an agent that calls tools: four that send something over HTTP, a guardrail that
refuses, metrics that hang.

The model answers from a script and the server is this program's own, so no key and no network are
needed. The hooks are classes with coroutine methods; the agent calls one object that stands for all
of them. It runs with hooks that are called concurrently, and with the same hooks awaited one after
the other. Then one of them hangs, and is cut off at its time limit.

Usage: python examples/agent_hooks.py
"""

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import aiohooks as ah

SERVICE_SECS = 0.05
LIMIT_SECS = 0.1


@dataclass(frozen=True)
class ToolCall:
    """A tool that the model wants to be called."""

    tool: str
    argument: str


class AgentHooks:
    """The hook interface of the agent: a class with coroutine methods, and nothing else."""

    async def on_tool_start(self, call: ToolCall) -> None:
        """Called before a tool is used."""

    @ah.point("first")
    async def before_tool(self, call: ToolCall) -> str | None:
        """Return a result in the tool's place, or None; of several hooks the first result
        counts.
        """
        return None


# The agent.


async def run_agent(hooks: AgentHooks) -> list[str]:
    """Call the tools that a scripted model asks for; return what was said."""
    model = [ToolCall("weather", "Bergen"), ToolCall("delete", "all files")]
    called = [await call_tool(call, hooks) for call in model]
    return ["Which coat do I need?", *called, "Take an umbrella to Bergen."]


async def call_tool(call: ToolCall, hooks: AgentHooks) -> str:
    """Make one tool call, with the hooks before it."""
    refused = await hooks.before_tool(call)
    if refused is not None:
        return f"{call.tool}({call.argument}): {refused}"
    await hooks.on_tool_start(call)
    return f"{call.tool}({call.argument}): rain"


# The hooks.


@dataclass
class Sender:
    """Sends each call to a service: an audit log, metrics, a trace, a budget."""

    path: str
    server: int

    async def on_tool_start(self, call: ToolCall) -> None:
        """Send the call, and wait for the reply."""
        data = json.dumps({"tool": call.tool}).encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length:"
            f" {len(data)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server)
        try:
            writer.write(head.encode() + data)
            if b" 204 " not in await reader.readline():
                raise ConnectionError(f"{self.path} refused the call")
        finally:
            writer.close()


class Guardrail:
    """Refuses tools that change something."""

    async def before_tool(self, call: ToolCall) -> str | None:
        """Return the refusal, or None."""
        return "refused by the guardrail" if call.tool == "delete" else None


class InTurn(AgentHooks):
    """Awaits the hooks one after the other: what most dispatchers do."""

    def __init__(self, senders: Sequence[Sender], guardrail: Guardrail) -> None:
        self.senders = senders
        self.before_tool = guardrail.before_tool  # type: ignore[method-assign]

    async def on_tool_start(self, call: ToolCall) -> None:
        for sender in self.senders:
            await sender.on_tool_start(call)


# The services.


@contextlib.asynccontextmanager
async def serve(received: list[str]) -> AsyncIterator[int]:
    """Serve paths that reply after a while, and `/hangs`, which never does; yield the port."""

    async def reply(request: Request) -> Response:
        received.append(request.url.path)
        if request.url.path == "/hangs":
            while (await request.receive())["type"] != "http.disconnect":
                pass
        await asyncio.sleep(SERVICE_SECS)
        return Response(status_code=204)

    app = Starlette(routes=[Route("/{service}", reply, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", ws="none"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            await serving


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Print how long the block took."""
    began = time.perf_counter()
    yield
    print(f"{time.perf_counter() - began:.2f} s {what}")


class PrintLog(logging.Handler):
    """Prints the beginning of what the library logs."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"log: {record.getMessage():.80}...")


async def main() -> None:
    """Run the agent with hooks that are called concurrently, in turn, and with one that hangs."""
    logging.getLogger("aiohooks").addHandler(PrintLog())
    received: list[str] = []
    async with serve(received) as port:
        senders = [Sender(path, port) for path in ("/audit", "/metrics", "/trace", "/budget")]
        await senders[0].on_tool_start(ToolCall("none", "the server is warm then"))
        with timed(
            f"with {len(senders)} hooks that wait {SERVICE_SECS:g} s each, called concurrently"
        ):
            said = await run_agent(ah.compose(AgentHooks, [*senders, Guardrail()]))
        with timed("with the same hooks, awaited in turn"):
            await run_agent(InTurn(senders, Guardrail()))

        hanging = ah.configure(Sender("/hangs", port), timeout=LIMIT_SECS, on_error="log")
        with timed(f"with one more that hangs, and has a time limit of {LIMIT_SECS:g} s"):
            await run_agent(ah.compose(AgentHooks, [*senders, hanging, Guardrail()]))
    print(f"{len(received)} calls were sent\n" + "\n".join(said))


if __name__ == "__main__":
    asyncio.run(main())
