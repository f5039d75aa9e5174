"""Hostile clients of a service.

    python -m tests.fuzz.hostile_http --requests 5000

A session makes steps in a service under uvicorn. Clients send it, over real sockets, malformed
paths, steps, queries, methods, hosts and headers, and bytes that are not HTTP; they disconnect,
reset, send slowly or do not read. The program checks that no reply is a server error or contains a
secret, source code or a header of the client; that no client leaves anything behind; and that the
session is not disturbed and valid requests in between are answered.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import platform
import random
import re
import secrets
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal, NamedTuple
from urllib.parse import quote

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

import aiohooks as ah
from aiohooks.adapters.asgi import SessionService
from tests.fuzz._harness import command
from tests.support.source import ROOT
from tests.support.waiting import HANG_SECS

CLIENTS = 16
VALID_EVERY = 25
"""The number of hostile requests after which a valid one is sent."""
MARK = "hostile-position"
"""Part of every invented header; it must not be in a header of the reply."""

ENDPOINTS = (
    "health",
    "ready",
    "progress",
    "steps/0",
    "steps/1",
    "",
    "page.js",
    "page.css",
    "nowhere",
)
PATHS = (
    "../../../../etc/passwd",
    "..%2f..%2f..%2fetc%2fpasswd",
    "%2e%2e/%2e%2e/",
    "....//....//etc/passwd",
    "/etc/passwd",
    "\\..\\..\\windows",
    "page.js/../../app.py",
    "page.js%00.html",
    "_page/index.html",
    "steps/1/../../health",
    "steps/",
    "steps",
    "steps//1",
    "steps/1/",
    "steps/1;a=b",
    "steps/%31",
    "health%0d%0aX-Injected:%20" + MARK,
    "%0d%0a%0d%0a<script>",
    "steps/%3Cscript%3Ealert(1)%3C/script%3E",
    "%ff%fe",
    "%c0%ae%c0%ae/",
    "%u002e",
    "?" * 2000,
    "a" * 50_000,
    "/" * 3000,
    ".git/config",
    "__class__",
    "{0.__class__}",
    "%s%s%n",
    "$(id)",
    "`id`",
    "' OR 1=1 --",
    "server-status",
    "favicon.ico",
)
STEPS = (
    "-1",
    "-0",
    "+1",
    "1e3",
    "1.5",
    "0x10",
    "NaN",
    "inf",
    "null",
    "true",
    "9" * 17,
    "9" * 4301,
    "9" * 30_000,
    "9007199254740992",
    "18446744073709551616",
    "-9223372036854775809",
    "٣",
    "²",
    "Ⅷ",
    "\uff11\uff12",
    "\u202e1",
    "1\u0000",
    "😀",
    "1_000",
    " 1",
    "1 ",
    "[1]",
    "{}",
    "1,2",
    "%00",
    "1\n",
    "1\r\nX-Injected: " + MARK,
)
QUERIES = (
    "timeout=-1",
    "timeout=nan",
    "timeout=inf",
    "timeout=1e309",
    "timeout=",
    "timeout=x",
    "timeout=1&timeout=2",
    "timeout=٣",
    "timeout=" + "9" * 5000,
    "timeout=0x1",
    "timeout=1;drop",
    "timeout[]=1",
    "timeout=0",
    "timeout=0.0",
    "timeout=%00",
    "&" * 5000,
    "a=b&" * 5000,
    "=" * 3000,
    "timeout=1%0d%0aX-Injected: " + MARK,
    "%",
    "%%%",
    "timeout=86401",
)
METHODS = (
    "POST",
    "PUT",
    "DELETE",
    "PATCH",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "PROPFIND",
    "get",
    "GETT",
    "G",
    "X" * 3000,
    "PRI",
    "MKCOL",
)
HOSTS = (
    "evil.example",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "localhost@evil.example",
    "evil.example#localhost",
    "localhost:80:80",
    "localhost:",
    "localhost:99999999",
    "2130706433",
    "0x7f000001",
    "127.1",
    "[::1",
    "::1",
    "",
    " ",
    "*",
    "null",
    "localhost/../",
    "localhost\tx",
    "localhost,evil.example",
    "a" * 5000,
    "ⓛocalhost",
    "xn--lcalhost-",
    ".localhost",
    "localhost.",
)
HEADERS = (
    "Origin: http://evil.example",
    "Origin: null",
    "Origin: http://localhost.evil.example",
    "Sec-Fetch-Site: cross-site",
    "Sec-Fetch-Site: same-site",
    "Sec-Fetch-Site: Same-Origin",
    "Host: evil.example",
    "Host: localhost",
    "Content-Length: -1",
    "Content-Length: 99999999999999999999",
    "Content-Length: 5\r\nContent-Length: 6",
    "Transfer-Encoding: chunked",
    "Transfer-Encoding: chunked, identity\r\nContent-Length: 3",
    "Expect: 100-continue",
    "Upgrade: websocket\r\nConnection: Upgrade",
    "Upgrade: h2c",
    "Range: bytes=0-0,1-1,2-2," * 100,
    "X-Forwarded-For: 127.0.0.1",
    "X-Forwarded-Host: evil.example",
    "X-Forwarded-Proto: https",
    "X-HTTP-Method-Override: DELETE",
    "Cookie: " + "a=b; " * 3000,
    "Authorization: Bearer ",
    "Authorization: Basic dGVzdDp0ZXN0",
    "Authorization: Bearer " + "x" * 5000,
    "Accept: " + "*/*, " * 3000,
    "X-Big: " + "b" * 70_000,
    "X-Nul: a\0b",
    "X-Bare: a\rb",
    " folded",
    "NoColon",
    ": empty",
    "X-Space : a",
    "If-None-Match: *",
    "TE: trailers",
    "Via: " + MARK,
    "User-Agent: \x1b[31m" + MARK,
    "X-Latin: \xe9\xff",
    "X-Many: a\r\n" * 90 + "X-Many: b",
    "Referer: http://evil.example/" + MARK,
)
RAW = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /\r\n\r\n",
    b"\0" * 200,
    b"\r\n" * 500,
    b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
    b"GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\xff" * 1000,
    b"GET / HTTP/1.1 HTTP/1.1\r\n\r\n",
    b"SSH-2.0-OpenSSH_9.2\r\n",
    b"*1\r\n$4\r\nINFO\r\n",
    b"GET  /  HTTP/1.1\r\n\r\n",
    b"A" * 100_000,
)


# The requests.

Behaviour = Literal["reads", "leaves", "resets", "stops halfway", "does not read", "sends slowly"]
HASTY: tuple[Behaviour, ...] = ("leaves", "resets", "does not read")


class Request(NamedTuple):
    """The bytes to send, and the behaviour of the sender."""

    kind: str
    data: bytes
    behaviour: Behaviour = "reads"


def _head(method: str, path: str, *more: str, host: str = "localhost", close: bool = True) -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: {host}",
        *more,
        *(["Connection: close"] if close else []),
    ]
    return "\r\n".join(lines).encode("utf-8", "surrogatepass") + b"\r\n\r\n"


Made = bytes | tuple[bytes, Behaviour]
"""The bytes of a client that reads, or of one that behaves otherwise."""


def _path(order: random.Random, base: str) -> Made:
    text = order.choice(PATHS)
    if order.random() < 0.3:
        text = quote(bytes(order.randrange(256) for _ in range(order.randrange(1, 60))))
    return _head(order.choice(("GET", "HEAD")), base + text)


def _method(order: random.Random, base: str) -> Made:
    body = order.choice((b"", b"body"))
    return (
        _head(
            order.choice(METHODS),
            base + order.choice(ENDPOINTS),
            *(["Content-Length: 4"] if body else []),
        )
        + body
    )


def _header(order: random.Random, base: str) -> Made:
    more = order.sample(HEADERS, order.randrange(1, 4))
    data = _head("GET", base + order.choice(ENDPOINTS), *more)
    # A header may announce a body, which is not sent: then the client leaves.
    return data, "leaves" if "Length" in "".join(more) else "reads"


def _raw(order: random.Random, base: str) -> Made:
    data = order.choice(RAW)
    return (
        order.randbytes(order.randrange(1, 3000)) if order.random() < 0.3 else data
    ), "stops halfway"


def _broken(order: random.Random, base: str) -> Made:
    data = bytearray(_head("GET", base + order.choice(ENDPOINTS), order.choice(HEADERS)))
    for _ in range(order.randrange(1, 6)):
        data[order.randrange(len(data))] = order.randrange(256)
    return bytes(data), "stops halfway"


def _half(order: random.Random, base: str) -> Made:
    data = _head("GET", base + order.choice(ENDPOINTS))
    return data[: order.randrange(1, len(data) - 1)], "stops halfway"


def _pipelined(order: random.Random, base: str) -> Made:
    first = b"".join(
        _head("GET", base + order.choice(("health", "steps/0", "page.js")), close=False)
        for _ in range(20)
    )
    behaviours: tuple[Behaviour, ...] = ("reads", "leaves")
    return first + _head("GET", f"{base}health"), order.choice(behaviours)


MAKERS: dict[str, Callable[[random.Random, str], Made]] = {
    "path": _path,
    "step": lambda order, base: _head(
        "GET", f"{base}steps/{order.choice((str, quote))(order.choice(STEPS))}"
    ),
    # The step is reached already, so a query that is accepted is answered immediately as well.
    "query": lambda order, base: _head(
        "GET", f"{base}steps/{order.choice('01')}?{quote(order.choice(QUERIES), safe='=&%')}"
    ),
    "method": _method,
    "host": lambda order, base: _head(
        order.choice(("GET", "HEAD", "POST")),
        base + order.choice(ENDPOINTS),
        host=order.choice(HOSTS),
    ),
    "header": _header,
    "raw": _raw,
    "broken": _broken,
    "waiter": lambda order, base: (
        _head("GET", f"{base}steps/{order.randrange(10**9, 2**53)}"),
        order.choice(HASTY),
    ),
    "half": _half,
    "slow": lambda order, base: (_head("GET", f"{base}steps/0"), "sends slowly"),
    "pipelined": _pipelined,
}
"""By the kind of request."""


def requests(count: int, seed: int, bases: tuple[str, ...]) -> list[Request]:
    """Return `count` requests, equally many of each kind, in random order."""
    order, made, makers = random.Random(seed), list[Request](), list(MAKERS.items())
    for number in range(count):
        kind, make = makers[number % len(makers)]
        data = make(order, order.choice(bases))
        made.append(Request(kind, *(data if isinstance(data, tuple) else (data,))))
    order.shuffle(made)
    return made


# The attack.

_STATUS = re.compile(rb"HTTP/1\.1 ([0-9]{3}) ")
_ALLOWED = {100, 200, 307, 400, 401, 403, 404, 405, 431, 501}
"""The statuses of correct replies; 307 is the outer application's, 501 and 431 would be the
server's own.
"""


class Attack(logging.Handler):
    """The service of a session, and its clients; what they count and find.

    As a handler it keeps the errors that are logged; warnings of uvicorn about bytes that are not
    HTTP are expected.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.kinds: collections.Counter[str] = collections.Counter()
        self.statuses: collections.Counter[int] = collections.Counter()
        self.violations: list[str] = []
        self.valid = self.made = 0
        self.secs = 0.0
        self.canary = secrets.token_hex(16)
        self.runs = 0
        graph = ah.Graph()
        graph.variable("secret", self.canary)

        @graph.train_op
        async def step() -> float:
            done = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(
                0.001, done.set_result, None
            )  # work of a millisecond
            await done
            self.runs += 1
            return 1 / self.runs

        self.steps = ah.MemoryStepStore()
        self.session = ah.AsyncMonitoredSession(graph, [ah.NanHook("step")], global_step=self.steps)
        self.open = SessionService(self.session, self._loop)
        routes = [Mount("/open", self.open)]
        self.app = Starlette(routes=routes, lifespan=self.open.lifespan)

    async def _loop(self, session: ah.AsyncMonitoredSession) -> None:
        async for _ in session.steps("step"):
            pass

    # -- one request

    async def send(self, port: int, request: Request) -> None:
        """Send one request, and check the reply."""
        self.kinds[request.kind] += 1
        number = self.kinds.total()
        try:
            async with asyncio.timeout(HANG_SECS):
                reply = await self._exchange(port, request)
        except TimeoutError:
            self.violations.append(
                f"no end in {HANG_SECS} s: {request.kind}, {request.data[:200]!r}"
            )
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
            if request.kind == "waiter":
                await self._request_step(
                    port, 0
                )  # when this one is answered, the first has been read
            if request.behaviour == "does not read":
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                await self._request_step(port, 0)
            return b""
        except (ConnectionError, OSError):
            return b""
        finally:
            if request.behaviour == "resets":
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, linger
                )
            writer.close()
            with contextlib.suppress(ConnectionError, OSError):
                await writer.wait_closed()

    def check(self, request: Request, reply: bytes) -> None:
        """Record what must not be in a reply."""
        shown = f"{request.kind}, {request.data[:200]!r}: {reply[:300]!r}"
        statuses = [int(one) for one in _STATUS.findall(reply)]
        self.statuses.update(statuses)
        if any(status not in _ALLOWED for status in statuses):
            self.violations.append(f"a bad status: {shown}")
        if request.kind in ("host", "method") and 200 in statuses:
            self.violations.append(f"it was served: {shown}")
        if reply and not statuses:
            self.violations.append(f"no HTTP: {shown}")
        for secret in (self.canary, "Traceback", str(ROOT), 'File "', ".py"):
            if secret.encode() in reply:
                self.violations.append(f"{secret} is in a reply: {shown}")
        head = reply.partition(b"\r\n\r\n")[0].lower()
        if (
            MARK.encode() in head
            or b"x-injected" in head
            or b"access-control" in head
            or b"set-cookie" in head
        ):
            self.violations.append(f"a header was injected: {shown}")
        is_refusal = (
            403 in statuses and b"content-type: application/json" in head
        )  # it names the host that is refused
        if b"evil.example" in (head if is_refusal else reply):
            self.violations.append(f"a host was repeated: {shown}")

    # -- valid requests in between

    async def _request_step(self, port: int, step: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        headers = "Host: localhost\r\nConnection: close\r\n\r\n"
        writer.write(f"GET /open/steps/{step} HTTP/1.1\r\n{headers}".encode())
        reply = await reader.read()
        writer.close()
        await writer.wait_closed()
        return reply

    async def send_valid(self, port: int) -> None:
        """Wait for the next step, as a valid client does."""
        step = self.steps.latest.step + 1
        reply = await self._request_step(port, step)
        if not reply.startswith(b"HTTP/1.1 200 ") or f'"wanted":{step}'.encode() not in reply:
            self.violations.append(f"the reply to a valid request is {reply!r}")
        self.valid += 1

    # -- the whole attack

    async def run(self, count: int, seed: int) -> None:
        """Send all requests, and check what they leave behind."""
        async with self._serving() as port:
            await self.send_valid(port)
            before = self._resources()
            first, began = self.steps.latest.step, time.perf_counter()
            pending = requests(count, seed, ("/open/", "/"))

            async def client() -> None:
                while pending:
                    await self.send(port, pending.pop())

            await asyncio.gather(*(client() for _ in range(CLIENTS)))
            self.secs = time.perf_counter() - began
            await self._wait_released(port, before)
            self.made = self.steps.latest.step - first
            status = self.session.status()
            if status.state != "open" or status.failure or status.stop_reason or status.recoveries:
                self.violations.append(f"the session was disturbed: {status}")
            if self.runs not in (status.runs, status.runs - 1):
                self.violations.append(f"{status.runs} runs were started, {self.runs} steps made")

    async def _wait_released(self, port: int, before: tuple[int, ...]) -> None:
        """Wait until nothing is left of the clients: the server notices late that one has left, and
        keeps idle connections.
        """
        until = time.monotonic() + HANG_SECS
        while any(now > then for now, then in zip(self._resources(), before, strict=True)):
            if time.monotonic() > until:
                tasks = [repr(task.get_coro()) for task in asyncio.all_tasks()]
                self.violations.append(
                    f"tasks, waits, waiters, fds are {self._resources()}, were {before}: {tasks}"
                )
                return
            await self.send_valid(port)

    def _resources(self) -> tuple[int, ...]:
        found = self.steps.statistics()
        return (
            len(asyncio.all_tasks()),
            found.waiting + found.watching,
            self.open._waiters,
            len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0,
        )

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[int]:
        config = uvicorn.Config(
            self.app,
            log_config=None,
            access_log=False,
            timeout_keep_alive=2,
            timeout_graceful_shutdown=5,
        )
        server = uvicorn.Server(config)
        loggers = [logging.getLogger(name) for name in ("uvicorn.error", "aiohooks", "asyncio")]
        with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
            for logger in loggers:
                logger.addHandler(self)
            serving = asyncio.create_task(_serve(server, listener))
            try:
                yield listener.getsockname()[1]
            finally:
                server.should_exit = True
                await serving
                for logger in loggers:
                    logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        error = f" {record.exc_info[1]!r}" if record.exc_info else ""
        self.violations.append(f"logged: {record.name}: {record.getMessage()}{error}")

    def __str__(self) -> str:
        statuses = ", ".join(
            f"{count} x {status}" for status, count in sorted(self.statuses.items())
        )
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items()))
        line = (
            f"{self.kinds.total()} hostile requests ({kinds}); replies: {statuses}; {self.valid}"
            f" valid requests answered; the session made {self.made} steps; {len(self.violations)}"
            f" violations; Python {platform.python_version()}, {self.secs:.1f} s"
        )
        return "\n".join([line, *(f"    {one}" for one in self.violations[:20])])


async def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    await server._serve([listener])  # `serve` would handle the signals of the process


def attack(count: int, seed: int) -> Attack:
    """Send a number of hostile requests to a new service."""
    made = Attack()
    ah.run(made.run, count, seed)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = command("hostile_http", __doc__)
    parser.add_argument(
        "--requests",
        type=int,
        default=5000,
        help="the number of hostile requests (default %(default)s)",
    )
    options = parser.parse_args(arguments)
    found = attack(options.requests, options.seed)
    print(found)
    return int(bool(found.violations) or found.kinds.total() < options.requests)


if __name__ == "__main__":
    sys.exit(main())
