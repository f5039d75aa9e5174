"""Hostile clients of a service.

    python -m tests.fuzz.hostile_http --requests 5000

A session makes steps in a service under uvicorn. Clients send it, over real sockets, malformed paths, steps, queries, methods,
hosts and headers, and bytes that are not HTTP; they disconnect, reset, send slowly or do not read. The program checks that no
reply is a server error or contains a secret, source code or a header of the client; that no client leaves anything behind; and
that the session is not disturbed and valid requests in between are answered.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import logging
import os
import platform
import re
import secrets
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

import aiohooks as ah
from aiohooks.adapters.asgi import SessionService
from tests.fuzz.hostile_requests import MARK, Request, requests
from tests.support.waiting import HANG_SECS

CLIENTS = 16
VALID_EVERY = 25
"""The number of hostile requests after which a valid one is sent."""

_STATUS = re.compile(rb"HTTP/1\.1 ([0-9]{3}) ")
_ALLOWED = {100, 200, 307, 400, 401, 403, 404, 405, 431, 501}
"""The statuses of correct replies; 307 is the outer application's, 501 and 431 would be the server's own."""


@dataclass(slots=True)
class Report:
    """The counts and the violations of a run."""

    sent: int = 0
    kinds: collections.Counter[str] = field(default_factory=collections.Counter[str])
    statuses: collections.Counter[int] = field(default_factory=collections.Counter[int])
    valid: int = 0
    steps: int = 0
    secs: float = 0.0
    violations: list[str] = field(default_factory=list[str])

    def __str__(self) -> str:
        statuses = ", ".join(f"{count} x {status}" for status, count in sorted(self.statuses.items()))
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items()))
        line = (
            f"{self.sent} hostile requests ({kinds}); replies: {statuses}; {self.valid} valid requests answered; "
            f"the session made {self.steps} steps; {len(self.violations)} violations; "
            f"Python {platform.python_version()}, {self.secs:.1f} s"
        )
        return "\n".join([line, *(f"    {one}" for one in self.violations[:20])])


class Attack:
    """The service, of one session that is shown both without a token and with one, and its clients."""

    def __init__(self) -> None:
        self.report = Report()
        self.token = secrets.token_urlsafe(32)
        self.canary = secrets.token_hex(16)
        self.wrong_lines: list[str] = []
        self.runs = 0
        graph = ah.Graph()
        graph.variable("secret", self.canary)

        @graph.train_op
        async def step() -> float:
            done = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(0.001, done.set_result, None)  # work of a millisecond
            await done
            self.runs += 1
            return 1 / self.runs

        self.history = ah.HistoryHook({"loss": "step"})
        timing = ah.HookTimingHook(warn_secs=60)
        self.steps = ah.MemoryStepStore()
        self.session = ah.AsyncMonitoredSession(graph, timing.watch([self.history]), global_step=self.steps)
        self.open = SessionService(self.session, self._loop, history=self.history, timing=timing, refresh_secs=0.05)
        self.closed = SessionService(self.session, history=self.history, token=self.token)
        routes = [Mount("/open", self.open), Mount("/closed", self.closed)]
        self.app = Starlette(routes=routes, lifespan=self.open.lifespan)

    async def _loop(self, session: ah.AsyncMonitoredSession) -> None:
        async for _ in session.steps("step"):
            pass

    # -- one request

    async def send(self, port: int, request: Request) -> None:
        """Send one request, and check the reply."""
        number = self.report.sent = self.report.sent + 1
        self.report.kinds[request.kind] += 1
        try:
            async with asyncio.timeout(HANG_SECS):
                reply = await self._exchange(port, request)
        except TimeoutError:
            self.report.violations.append(f"no end in {HANG_SECS} s: {request.kind}, {request.data[:200]!r}")
            return
        self.check(request, reply)
        if number % VALID_EVERY == 0:
            await self.send_valid(port)

    async def _exchange(self, port: int, request: Request) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        try:
            if request.behaviour == "sends slowly":
                for number in range(len(request.data)):
                    writer.write(request.data[number : number + 1])
                    await asyncio.sleep(0)
            else:
                writer.write(request.data)
            if request.behaviour in ("reads", "sends slowly"):
                return await reader.read()
            if request.behaviour == "stops halfway":
                writer.write_eof()
                return await reader.read()
            if request.kind == "follower":
                return await reader.read(200)
            if request.kind == "waiter":
                await self._request_step(port, 0)  # when this one is answered, the first has been read
            if request.behaviour == "does not read":
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                await self._request_step(port, 0)
            return b""
        except (ConnectionError, OSError):
            return b""
        finally:
            if request.behaviour == "resets":
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.close()
            with contextlib.suppress(ConnectionError, OSError):
                await writer.wait_closed()

    def check(self, request: Request, reply: bytes) -> None:
        """Record what must not be in a reply."""
        shown = f"{request.kind}, {request.data[:200]!r}: {reply[:300]!r}"
        statuses = [int(one) for one in _STATUS.findall(reply)]
        self.report.statuses.update(statuses)
        if any(status not in _ALLOWED for status in statuses):
            self.report.violations.append(f"a bad status: {shown}")
        if request.kind in ("host", "method") and 200 in statuses:
            self.report.violations.append(f"it was served: {shown}")
        if reply and not statuses:
            self.report.violations.append(f"no HTTP: {shown}")
        root = str(Path(__file__).parent.parent.parent)
        for secret in (self.token, self.canary, "Traceback", root, 'File "', ".py"):
            if secret.encode() in reply:
                self.report.violations.append(f"{secret} is in a reply: {shown}")
        head = reply.partition(b"\r\n\r\n")[0].lower()
        if MARK.encode() in head or b"x-injected" in head or b"access-control" in head or b"set-cookie" in head:
            self.report.violations.append(f"a header was injected: {shown}")
        is_refusal = 403 in statuses and b"content-type: application/json" in head  # it names the host that is refused
        if b"evil.example" in (head if is_refusal else reply):
            self.report.violations.append(f"a host was repeated: {shown}")

    # -- valid requests in between

    async def _request_step(self, port: int, step: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET /open/steps/{step} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        reply = await reader.read()
        writer.close()
        await writer.wait_closed()
        return reply

    async def send_valid(self, port: int) -> None:
        """Wait for the next step, as a valid client does."""
        step = self.steps.latest.step + 1
        reply = await self._request_step(port, step)
        if not reply.startswith(b"HTTP/1.1 200 ") or f'"wanted":{step}'.encode() not in reply:
            self.report.violations.append(f"the reply to a valid request is {reply!r}")
        self.report.valid += 1

    # -- the whole attack

    async def run(self, count: int, seed: int) -> None:
        """Send all requests, and check what they leave behind."""
        async with self._serving() as port:
            await self.send_valid(port)
            before = self._resources()
            first, began = self.steps.latest.step, time.perf_counter()
            pending = requests(count, seed, ("/open/", "/closed/", "/"))

            async def client() -> None:
                while pending:
                    await self.send(port, pending.pop())

            await asyncio.gather(*(client() for _ in range(CLIENTS)))
            self.report.secs = time.perf_counter() - began
            await self._wait_released(port, before)
            self.report.steps = self.steps.latest.step - first
            status = self.session.status()
            if status.state != "open" or status.failure or status.stop_reason or status.recoveries:
                self.report.violations.append(f"the session was disturbed: {status}")
            if self.runs not in (status.runs, status.runs - 1):
                self.report.violations.append(f"{status.runs} runs were started, {self.runs} steps made")
        self.report.violations += [f"logged: {line}" for line in self.wrong_lines]

    async def _wait_released(self, port: int, before: tuple[int, ...]) -> None:
        """Wait until nothing is left of the clients: the server notices late that one has left, and keeps idle connections."""
        until = time.monotonic() + HANG_SECS
        while any(now > then for now, then in zip(self._resources(), before, strict=True)):
            if time.monotonic() > until:
                tasks = [repr(task.get_coro()) for task in asyncio.all_tasks()]
                self.report.violations.append(f"tasks, waiters, streams, fds are {self._resources()}, were {before}: {tasks}")
                return
            await self.send_valid(port)

    def _resources(self) -> tuple[int, ...]:
        found = self.steps.statistics()
        services = (self.open, self.closed)
        return (
            len(asyncio.all_tasks()),
            found.waiting + found.watching,
            sum(one._waiters + one._streams for one in services),
            len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0,
        )

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[int]:
        config = uvicorn.Config(self.app, log_config=None, access_log=False, timeout_keep_alive=2, timeout_graceful_shutdown=5)
        server = uvicorn.Server(config)
        watch = _Watch(self.wrong_lines)
        loggers = [logging.getLogger(name) for name in ("uvicorn.error", "aiohooks", "asyncio")]
        for logger in loggers:
            logger.addHandler(watch)
        with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
            port: int = listener.getsockname()[1]
            with contextlib.ExitStack() as stack:
                stack.callback(lambda: [logger.removeHandler(watch) for logger in loggers])
                serving = asyncio.create_task(_serve(server, listener))
                try:
                    yield port
                finally:
                    server.should_exit = True
                    await serving


async def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    await server._serve([listener])  # `serve` would handle the signals of the process


class _Watch(logging.Handler):
    """Keeps the errors that are logged; warnings of uvicorn about bytes that are not HTTP are expected."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(
            f"{record.name}: {record.getMessage()} {record.exc_info[1]!r}" if record.exc_info else record.getMessage()
        )


def attack(count: int, seed: int) -> Report:
    """Send a number of hostile requests to a new service."""
    made = Attack()
    ah.run(made.run, count, seed)
    return made.report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.hostile_http", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=5000, help="the number of hostile requests (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.requests < 1:
        parser.error("--requests must be 1 or more")
    report = attack(options.requests, options.seed)
    print(report)
    return int(bool(report.violations) or report.sent < options.requests)


if __name__ == "__main__":
    sys.exit(main())
