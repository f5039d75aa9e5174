"""A TCP proxy that fails on demand, between a step store and its server.

    async with Proxy.to(server.port) as proxy:
        f"redis://127.0.0.1:{proxy.port}"
        proxy.cut()                    # all connections are reset, new ones refused, until heal()
        proxy.black_hole()             # nothing passes, without a notice, until heal()
        proxy.cut_in_message(7)        # the next answer and its connection end after 7 bytes
        proxy.drop_answer()            # the answer to the next request is lost

A connection that a black hole has swallowed stays dead; `heal` lets new ones pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any


class _End(asyncio.Protocol):
    """One end of a connection through the proxy; passes its data to the other end."""

    def __init__(self, proxy: Proxy, pair: _Pair, *, server: bool) -> None:
        self.proxy = proxy
        self.pair = pair
        self.server = server
        self.transport: Any = None
        self.held: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        if not self.server:
            self.pair.accepted(self)
        for data in self.held:
            self.transport.write(data)
        self.held.clear()

    def data_received(self, data: bytes) -> None:
        self.pair.passes(self, data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.pair.lost(self)

    def write(self, data: bytes) -> None:
        if self.transport is None:
            self.held.append(data)
        else:
            self.transport.write(data)

    def reset(self) -> None:
        if self.transport is None:
            return
        with contextlib.suppress(OSError, AttributeError):
            # By RST, as from a router that has been restarted.
            self.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
        self.transport.abort()


class _Pair:
    """A connection through the proxy: its two ends, and whether it still passes data."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.client = _End(proxy, self, server=False)
        self.server = _End(proxy, self, server=True)
        self.dead = False
        self.answer_lost = False

    def accepted(self, client: _End) -> None:
        proxy = self.proxy
        if proxy.refuses:
            client.reset()
            return
        proxy.pairs[self] = None
        self.dead = proxy.swallows
        if not self.dead:
            proxy.spawn(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: self.server, "127.0.0.1", self.proxy.target)
        except OSError:
            self.cut()
        else:
            if self not in self.proxy.pairs:
                self.server.reset()

    def passes(self, end: _End, data: bytes) -> None:
        proxy = self.proxy
        if self.dead:
            return
        if end is self.client:
            if proxy.loses_answer:
                proxy.loses_answer = False
                self.answer_lost = True
            self.server.write(data)
            return
        if self.answer_lost:
            self.cut()
            return
        if proxy.most_bytes is not None:
            most, proxy.most_bytes = proxy.most_bytes, None
            self.client.write(data[:most])
            # Not by a reset, which could overtake the written data.
            self.client.transport.close()
            self.server.reset()
            return
        self.client.write(data)

    def lost(self, end: _End) -> None:
        self.proxy.pairs.pop(self, None)
        if self.dead:
            # The end of one side does not pass a black hole.
            return
        other = self.client if end is self.server else self.server
        if other.transport is not None:
            other.transport.close()

    def cut(self) -> None:
        self.proxy.pairs.pop(self, None)
        self.dead = True
        self.client.reset()
        self.server.reset()


class Proxy:
    """Listens on its own port and passes data to the target; see the module."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self.pairs: dict[_Pair, None] = {}
        self.refuses = False
        self.swallows = False
        self.most_bytes: int | None = None
        self.loses_answer = False
        self._dead: list[_Pair] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, target: int) -> AsyncIterator[Proxy]:
        """Run a proxy to this port of the loopback for the block."""
        proxy = cls(target)
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(lambda: _Pair(proxy).client, "127.0.0.1", 0)
        proxy.port = listener.sockets[0].getsockname()[1]
        try:
            yield proxy
        finally:
            listener.close()
            proxy.end_all()
            await listener.wait_closed()
            tasks = tuple(proxy._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def spawn(self, coro: Any) -> None:
        """Start a task that ends with the proxy."""
        task = asyncio.get_running_loop().create_task(coro)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cut(self) -> None:
        """Reset all connections, and refuse new ones until `heal`."""
        self.refuses = True
        for pair in tuple(self.pairs):
            pair.cut()

    def black_hole(self) -> None:
        """Let nothing pass any more, without closing anything."""
        self.swallows = True
        for pair in self.pairs:
            pair.dead = True
            self._dead.append(pair)

    def cut_in_message(self, most_bytes: int) -> None:
        """Cut the next answer off after so many bytes."""
        self.most_bytes = most_bytes

    def drop_answer(self) -> None:
        """Let the next request reach the server, and lose its answer."""
        self.loses_answer = True

    def heal(self) -> None:
        """Let new connections pass again, and plan no further faults."""
        self.refuses = self.swallows = self.loses_answer = False
        self.most_bytes = None

    def end_all(self) -> None:
        """End all connections, also the server's side of those that a black hole has swallowed."""
        for pair in (*self.pairs, *self._dead):
            pair.cut()
