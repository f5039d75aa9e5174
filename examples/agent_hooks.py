"""Hooks around an agent that calls tools: an audit log over HTTP, metrics that hang, a guardrail that answers first.

The model answers from a script and the server is this program's own, so no key and no network are needed. The hooks are three
classes with coroutine methods; the agent calls one object that stands for all of them. The agent runs twice: with a `HookGroup`,
and with hooks that are awaited one after the other, under the same time limit. Each run draws when which hook was active.

Usage: python examples/agent_hooks.py
"""

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from dataclasses import dataclass, field

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import aiohooks as ah

TOOL_SECS = 0.02
AUDIT_SECS = 0.1
METRICS_LIMIT_SECS = 0.1


@dataclass(frozen=True)
class ToolCall:
    """A tool that the model wants to be called."""

    tool: str
    argument: str

    def __str__(self) -> str:
        return f"{self.tool}({self.argument})"


class AgentHooks:
    """The hooks of an agent: a class with coroutine methods, and nothing else."""

    async def on_tool_start(self, call: ToolCall) -> None:
        """Look at a call before it is made."""

    async def on_tool_end(self, call: ToolCall, result: str) -> None:
        """Look at a call and its result."""

    @ah.point("first")
    async def before_tool(self, call: ToolCall) -> str | None:
        """Return a result in the tool's place, or None; of several hooks the first answer counts."""
        return None


# The agent.


class ScriptedModel:
    """A model whose answers are known: tool calls, then a sentence."""

    def __init__(self) -> None:
        self._answers: Iterator[list[ToolCall] | str] = iter(
            [
                [ToolCall("weather", "Bergen"), ToolCall("weather", "Rome")],
                [ToolCall("delete", "all files"), ToolCall("weather", "Lima")],
                "Take an umbrella to Bergen.",
            ]
        )

    async def answer(self, conversation: Sequence[str]) -> list[ToolCall] | str:
        """Return the next answer."""
        return next(self._answers)


async def call_tool(call: ToolCall, hooks: AgentHooks) -> str:
    """Make one tool call, with the hooks around it."""
    refused = await hooks.before_tool(call)
    if refused is not None:
        return refused
    await hooks.on_tool_start(call)
    await asyncio.sleep(TOOL_SECS)  # the work of the tool
    result = f"rain in {call.argument}"
    await hooks.on_tool_end(call, result)
    return result


async def run_agent(hooks: AgentHooks) -> list[str]:
    """Call the model and the tools that it asks for, those of one answer at the same time; return what was said."""
    model = ScriptedModel()
    conversation = ["Which coat do I need?"]
    while isinstance(answer := await model.answer(conversation), list):
        async with asyncio.TaskGroup() as tools:
            results = [tools.create_task(call_tool(call, hooks)) for call in answer]
        conversation += [f"{call}: {result.result()}" for call, result in zip(answer, results, strict=True)]
    return [*conversation, answer]


# The hooks.


@dataclass
class Timeline:
    """When which hook was active."""

    began: float = field(default_factory=time.perf_counter)
    rows: list[tuple[str, float, float, str]] = field(default_factory=list)

    @contextlib.contextmanager
    def row(self, name: str) -> Iterator[None]:
        """Draw the block as one row."""
        start, remark = time.perf_counter(), ""
        try:
            yield
        except asyncio.CancelledError:
            remark = " cut off"
            raise
        finally:
            self.rows.append((name, start - self.began, time.perf_counter() - self.began, remark))

    def print(self, secs: float) -> None:
        """Print the rows, a column for every 20 ms, and how long everything took."""
        for name, start, end, remark in sorted(self.rows, key=lambda row: row[1]):
            print(f"  {name:<38} {' ' * round(start * 50)}{'#' * max(1, round((end - start) * 50))}{remark}")
        # A call that begins when another one ends does not overlap it: ends sort first.
        changes = sorted([(start, 1) for _, start, _, _ in self.rows] + [(end, -1) for _, _, end, _ in self.rows])
        active = [sum(change for _, change in changes[: count + 1]) for count in range(len(changes))]
        print(f"  up to {max(active)} calls of hooks at the same time, {secs:.2f} s")


@dataclass
class Audit:
    """Sends each call and each result to an audit log."""

    server: int
    timeline: Timeline

    async def on_tool_start(self, call: ToolCall) -> None:
        """Log the call."""
        with self.timeline.row(f"Audit.on_tool_start {call}"):
            await post(self.server, "/audit", {"call": str(call)})

    async def on_tool_end(self, call: ToolCall, result: str) -> None:
        """Log the result."""
        with self.timeline.row(f"Audit.on_tool_end {call}"):
            await post(self.server, "/audit", {"call": str(call), "result": result})


@dataclass
class Metrics:
    """Counts calls, on a server that never answers."""

    server: int
    timeline: Timeline

    async def on_tool_start(self, call: ToolCall) -> None:
        """Count the call."""
        with self.timeline.row(f"Metrics.on_tool_start {call}"):
            await post(self.server, "/metrics", {"started": call.tool})

    async def on_tool_end(self, call: ToolCall, result: str) -> None:
        """Count the result."""
        with self.timeline.row(f"Metrics.on_tool_end {call}"):
            await post(self.server, "/metrics", {"ended": call.tool})


class Guardrail:
    """Refuses tools that change something."""

    async def before_tool(self, call: ToolCall) -> str | None:
        """Return the refusal, or None."""
        return "refused by the guardrail" if call.tool == "delete" else None


class InTurn(AgentHooks):
    """Calls the hooks one after the other, each call of Metrics under its time limit: what most dispatchers do."""

    def __init__(self, audit: Audit, metrics: Metrics, guardrail: Guardrail) -> None:
        self.audit, self.metrics, self.guardrail = audit, metrics, guardrail

    async def on_tool_start(self, call: ToolCall) -> None:
        await self.audit.on_tool_start(call)
        await limited(self.metrics.on_tool_start(call))

    async def on_tool_end(self, call: ToolCall, result: str) -> None:
        await self.audit.on_tool_end(call, result)
        await limited(self.metrics.on_tool_end(call, result))

    async def before_tool(self, call: ToolCall) -> str | None:
        return await self.guardrail.before_tool(call)


async def limited(call: Awaitable[None]) -> None:
    """Await a call of a hook, and give up after the time limit."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(METRICS_LIMIT_SECS):
            await call


# The server, and what speaks to it.


async def post(port: int, path: str, body: object) -> None:
    """Send one request and wait for the answer."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + data)
        status = await reader.readline()
        if b" 204 " not in status:
            raise ConnectionError(f"{path} answered {status!r}")
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def serve(records: list[object]) -> AsyncIterator[int]:
    """Serve an audit log that takes its time and metrics that never answer, and yield the port."""

    async def audit(request: Request) -> Response:
        records.append(await request.json())
        await asyncio.sleep(AUDIT_SECS)
        return Response(status_code=204)

    async def metrics(request: Request) -> Response:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        return Response(status_code=204)

    app = Starlette(routes=[Route("/audit", audit, methods=["POST"]), Route("/metrics", metrics, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", ws="none"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            await serving


class PrintLog(logging.Handler):
    """Prints what the library logs: one line each."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message without the traceback."""
        print(f"  log: {record.getMessage()}")


async def main() -> None:
    """Run the agent with the group, and with hooks in turn."""
    logging.getLogger("aiohooks").addHandler(PrintLog())
    records: list[object] = []
    async with serve(records) as port:
        print("With a HookGroup:")
        timeline = Timeline()
        metrics = ah.configure(Metrics(port, timeline), timeout=METRICS_LIMIT_SECS, on_error="log")
        async with ah.HookGroup(AgentHooks, [Audit(port, timeline), metrics, Guardrail()]) as group:
            said = await run_agent(group.hooks)
        together = time.perf_counter() - timeline.began
        timeline.print(together)

        print("One hook after the other:")
        timeline = Timeline()
        await run_agent(InTurn(Audit(port, timeline), Metrics(port, timeline), Guardrail()))
        in_turn = time.perf_counter() - timeline.began
        timeline.print(in_turn)

    print("What was said:")
    for line in said:
        print(f"  {line}")
    print(f"{len(records)} records in the audit log")
    print(f"{together:.2f} s with the group, {in_turn:.2f} s in turn")


if __name__ == "__main__":
    asyncio.run(main())
