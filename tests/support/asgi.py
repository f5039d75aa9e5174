"""Requests of an ASGI application without a server: each is a scope, a `receive` and a `send`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

LOCAL = ("127.0.0.1", 8000)


@dataclass(slots=True)
class Reply:
    """What came back."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""
    complete: bool = False

    @property
    def json(self) -> Any:
        """The body, read as JSON as strictly as browsers do."""
        return json.loads(self.body, parse_constant=lambda name: pytest_fail(f"{name} is no JSON"))

    @property
    def events(self) -> list[tuple[str, Any]]:
        """The server-sent events of the body: kind and data."""
        found: list[tuple[str, Any]] = []
        for event in self.body.decode("ascii").split("\n\n")[:-1]:
            kind, data = event.split("\n")
            assert kind.startswith("event: ")
            assert data.startswith("data: ")
            found.append((kind[7:], json.loads(data[6:])))
        return found


def pytest_fail(message: str) -> None:
    """Fails the test."""
    raise AssertionError(message)


class Exchange:
    """One request that goes on: its client may leave, or not read."""

    def __init__(
        self,
        app: Any,
        path: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | Iterable[tuple[bytes, bytes]] = (),
        server: tuple[str, int | None] | None = LOCAL,
        scheme: str = "http",
        query: str | bytes = b"",
        root_path: str = "",
        reads: bool = True,
    ) -> None:
        """Starts it. Without a `host` of its own the request has that of the local machine."""
        given = headers.items() if isinstance(headers, Mapping) else headers
        raw = [
            (name if isinstance(name, bytes) else name.encode("latin-1"), value if isinstance(value, bytes) else value.encode())
            for name, value in given
        ]
        if not isinstance(headers, Mapping) or "host" not in headers:
            raw = [(b"host", b"127.0.0.1:8000"), *raw] if isinstance(headers, Mapping) or not raw else raw
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": scheme,
            "path": unquote(root_path + path),
            "raw_path": (root_path + path).encode("latin-1", "replace"),
            "query_string": query if isinstance(query, bytes) else query.encode(),
            "root_path": root_path,
            "headers": raw,
            "client": ("127.0.0.1", 50_000),
            "server": server,
        }
        self.reply: Reply = Reply()
        self._asked = False
        self._gone = asyncio.Event()
        self._may_read = asyncio.Event()
        if reads:
            self._may_read.set()
        self.arrived: asyncio.Event = asyncio.Event()
        """Set whenever something has come back; for a test to clear."""
        self.task: asyncio.Task[None] = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> MutableMapping[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            assert self.reply.status is None
            self.reply.status = message["status"]
            self.reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            assert len(self.reply.headers) == len(message["headers"]), "a header came twice"
        else:
            assert self.reply.status is not None
            await self._may_read.wait()
            self.reply.body += message.get("body", b"")
            self.reply.complete = not message.get("more_body", False)
        self.arrived.set()

    def leave(self) -> None:
        """The client leaves."""
        self._gone.set()

    async def news(self) -> None:
        """Waits until something more has come back."""
        self.arrived.clear()
        await self.arrived.wait()


async def ask(app: Any, path: str, **options: Any) -> Reply:
    """Makes a request, and waits for the whole reply."""
    exchange = Exchange(app, path, **options)
    await exchange.task
    assert exchange.reply.complete
    return exchange.reply


async def turns(count: int = 20) -> None:
    """Lets everything go on that can go on."""
    for _ in range(count):
        await asyncio.sleep(0)
