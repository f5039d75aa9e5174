"""Requests to an ASGI application without a server: each is a scope, a `receive` and a `send`."""

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
    """The reply to a request, as far as it was received."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""
    complete: bool = False

    @property
    def json(self) -> Any:
        """The body, parsed as JSON as strictly as in browsers."""
        return json.loads(self.body, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


class Exchange:
    """One request in progress; its client may disconnect, or not read."""

    def __init__(
        self,
        app: Any,
        path: str,
        *,
        headers: Mapping[str, str] | Iterable[tuple[bytes, bytes]] = (),
        query: str | bytes = b"",
        root_path: str = "",
        reads: bool = True,
        **scope: Any,
    ) -> None:
        """Send the request. Unless the headers are given as they are sent, it has the `host` of the
        local machine.
        """
        if isinstance(headers, Mapping) or not headers:
            named = {"host": "127.0.0.1:8000", **dict(headers)}
            headers = [(name.encode("latin-1"), value.encode()) for name, value in named.items()]
        usual = {
            "method": "GET",
            "scheme": "http",
            "http_version": "1.1",
            "client": ("127.0.0.1", 50_000),
            "server": LOCAL,
        }
        whole: dict[str, Any] = {
            **{"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, **usual, **scope},
            "path": unquote(root_path + path),
            "raw_path": (root_path + path).encode("latin-1", "replace"),
            "query_string": query if isinstance(query, bytes) else query.encode(),
            "root_path": root_path,
            "headers": list(headers),
        }
        self.reply: Reply = Reply()
        self._body_read = False
        self._disconnected = asyncio.Event()
        self._may_read = asyncio.Event()
        if reads:
            self._may_read.set()
        self.task: asyncio.Task[None] = asyncio.create_task(app(whole, self._receive, self._send))

    async def _receive(self) -> MutableMapping[str, Any]:
        if not self._body_read:
            self._body_read = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            assert self.reply.status is None
            self.reply.status = message["status"]
            self.reply.headers = {
                name.decode(): value.decode() for name, value in message["headers"]
            }
            assert len(self.reply.headers) == len(message["headers"]), "a header came twice"
        else:
            assert self.reply.status is not None
            await self._may_read.wait()
            self.reply.body += message.get("body", b"")
            self.reply.complete = not message.get("more_body", False)

    def disconnect(self) -> None:
        """Let the client disconnect."""
        self._disconnected.set()


async def ask(app: Any, path: str, **options: Any) -> Reply:
    """Send a request and wait for the complete reply."""
    exchange = Exchange(app, path, **options)
    await exchange.task
    assert exchange.reply.complete
    return exchange.reply
