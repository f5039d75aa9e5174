"""A service among hostile clients (P20).

    python -m tests.fuzz.hostile_http --requests 5000

A session makes steps in a service under uvicorn; over real sockets come malformed paths, steps, queries, methods, hosts and
headers, bytes that are no HTTP, and clients that leave, reset, dawdle or do not read. Checked is: no answer is a server error,
says anything of a secret, of the code or of what a client has put into a header; nothing is left of any client; the session
goes on undisturbed, and honest clients in between are answered.
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
from tests.fuzz._hostile_requests import MARK, Request, requests

AT_ONCE = 16
PATIENCE_SECS = 60
"""A guard against hanging for ever, not a measurement."""
HONEST_EVERY = 25
"""After so many hostile requests comes an honest one."""

_STATUS = re.compile(rb"HTTP/1\.1 ([0-9]{3}) ")
_FINE = {100, 200, 307, 400, 401, 403, 404, 405, 431, 501}
"""What may be answered; 307 is the outer application's, 501 and 431 would be the server's own."""


@dataclass(slots=True)
class Report:
    """What has come of it."""

    sent: int = 0
    kinds: collections.Counter[str] = field(default_factory=collections.Counter[str])
    statuses: collections.Counter[int] = field(default_factory=collections.Counter[int])
    honest: int = 0
    steps: int = 0
    secs: float = 0.0
    violations: list[str] = field(default_factory=list[str])

    def __str__(self) -> str:
        statuses = ", ".join(f"{count} x {status}" for status, count in sorted(self.statuses.items()))
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items()))
        line = (
            f"{self.sent} hostile requests ({kinds}); answers: {statuses}; {self.honest} honest ones answered; the session made "
            f"{self.steps} steps; {len(self.violations)} violations; Python {platform.python_version()}, {self.secs:.1f} s"
        )
        return "\n".join([line, *(f"    {one}" for one in self.violations[:20])])


class Siege:
    """The service, and those who try it."""

    def __init__(self) -> None:
        """Builds it: one session, shown without a token and with one."""
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
        """Makes one request, and looks at what comes back."""
        number = self.report.sent = self.report.sent + 1
        self.report.kinds[request.kind] += 1
        try:
            async with asyncio.timeout(PATIENCE_SECS):
                answer = await self._exchange(port, request)
        except TimeoutError:
            self.report.violations.append(f"no end in {PATIENCE_SECS} s: {request.kind}, {request.data[:200]!r}")
            return
        self.check(request, answer)
        if number % HONEST_EVERY == 0:
            await self.honest(port)

    async def _exchange(self, port: int, request: Request) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        try:
            if request.behaviour == "dawdles":
                for number in range(len(request.data)):
                    writer.write(request.data[number : number + 1])
                    await asyncio.sleep(0)
            else:
                writer.write(request.data)
            if request.behaviour in ("reads", "dawdles"):
                return await reader.read()
            if request.behaviour == "stops halfway":
                writer.write_eof()
                return await reader.read()
            if request.kind == "follower":
                return await reader.read(200)
            if request.kind == "waiter":
                await self._answered(port)  # a request behind it: this one has been taken in
            if request.behaviour == "does not read":
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                await self._answered(port)
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

    def check(self, request: Request, answer: bytes) -> None:
        """Notes what must not be in an answer."""
        shown = f"{request.kind}, {request.data[:200]!r}: {answer[:300]!r}"
        statuses = [int(one) for one in _STATUS.findall(answer)]
        self.report.statuses.update(statuses)
        if any(status not in _FINE for status in statuses):
            self.report.violations.append(f"a bad status: {shown}")
        if request.kind in ("host", "method") and 200 in statuses:
            self.report.violations.append(f"it was served: {shown}")
        if answer and not statuses:
            self.report.violations.append(f"no HTTP: {shown}")
        root = str(Path(__file__).parent.parent.parent)
        for secret in (self.token, self.canary, "Traceback", root, 'File "', ".py"):
            if secret.encode() in answer:
                self.report.violations.append(f"{secret} is in an answer: {shown}")
        head = answer.partition(b"\r\n\r\n")[0].lower()
        if MARK.encode() in head or b"x-injected" in head or b"access-control" in head or b"set-cookie" in head:
            self.report.violations.append(f"a header was injected: {shown}")
        if b"evil.example" in answer:
            self.report.violations.append(f"a host was repeated: {shown}")

    # -- honest ones in between

    async def _answered(self, port: int) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /open/steps/0 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return int(answer[9:12] or 0), answer

    async def honest(self, port: int) -> None:
        """An honest client waits for the next step."""
        step = self.steps.latest.step + 1
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET /open/steps/{step} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        if not answer.startswith(b"HTTP/1.1 200 ") or f'"wanted":{step}'.encode() not in answer:
            self.report.violations.append(f"an honest client was told {answer!r}")
        self.report.honest += 1

    # -- all of them

    async def run(self, count: int, seed: int) -> None:
        """The siege, and what is left of it."""
        async with self._serving() as port:
            await self.honest(port)
            before = self._left()
            first, began = self.steps.latest.step, time.perf_counter()
            ahead = requests(count, seed, ("/open/", "/closed/", "/"))

            async def client() -> None:
                while ahead:
                    await self.send(port, ahead.pop())

            await asyncio.gather(*(client() for _ in range(AT_ONCE)))
            self.report.secs = time.perf_counter() - began
            await self._settle(port, before)
            self.report.steps = self.steps.latest.step - first
            status = self.session.status()
            if status.state != "open" or status.failure or status.stop_reason or status.recoveries:
                self.report.violations.append(f"the session was disturbed: {status}")
            if self.runs not in (status.runs, status.runs - 1):
                self.report.violations.append(f"{status.runs} runs were begun, {self.runs} steps made")
        self.report.violations += [f"logged: {line}" for line in self.wrong_lines]

    async def _settle(self, port: int, before: tuple[int, ...]) -> None:
        """The server hears of clients that have left when it next looks, and keeps idle connections for a while."""
        until = time.monotonic() + PATIENCE_SECS
        while any(now > then for now, then in zip(self._left(), before, strict=True)):
            if time.monotonic() > until:
                tasks = [repr(task.get_coro()) for task in asyncio.all_tasks()]
                self.report.violations.append(f"tasks, waiters, streams, fds are {self._left()}, were {before}: {tasks}")
                return
            await self.honest(port)

    def _left(self) -> tuple[int, ...]:
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
    await server._serve([listener])  # `serve` would take the process's signals over


class _Watch(logging.Handler):
    """Keeps what is logged as an error; what uvicorn warns of (bytes that are no HTTP) is as it should be."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(
            f"{record.name}: {record.getMessage()} {record.exc_info[1]!r}" if record.exc_info else record.getMessage()
        )


def besiege(count: int, seed: int) -> Report:
    """Makes so many hostile requests of a new service."""
    siege = Siege()
    ah.run(siege.run, count, seed)
    return siege.report


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.hostile_http",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=5000, help="how many hostile ones (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.requests < 1:
        parser.error("--requests is at least 1")
    report = besiege(options.requests, options.seed)
    print(report)
    return int(bool(report.violations) or report.sent < options.requests)


if __name__ == "__main__":
    sys.exit(main())
