"""The simulated network of an explored program: connections without sockets.

With the disturbance "slow", messages take time, and a partition holds all of them for 30 s. With
"failure", a connection may be lost when one side writes: both sides get a `ConnectionResetError`,
and bytes that have not arrived are gone. The port alone selects the server, on any host. Options
for sockets and TLS are ignored.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from aiohooks._core.clock import sleep
from aiohooks.testing._schedule import DELAYS

_PARTITION_SECS = 30.0
_ProtocolFactory = Callable[[], Any]
_Choose = Callable[[str, Sequence[Any], Callable[[Any], str], str], Any]
"""Chooses one of several values, as `ScheduleRun.choose`."""


class Network:
    """The servers of a program by port, and the disturbances of messages."""

    def __init__(self, loop: asyncio.AbstractEventLoop, choose: _Choose) -> None:
        """Make the network of `loop`. `choose` is the method of the `ScheduleRun`."""
        self.loop = loop
        self.servers: dict[int, _Server] = {}
        self.has_lost_connection = False
        """Whether a connection was lost. If so, the program may raise a `ConnectionError`."""
        self._choose = choose
        # The ports that a server or a client gets if the program gives none.
        self._ports = itertools.count(49_152)
        # The time of the loop at which the latest partition ends.
        self._healed_at = 0.0
        # `asyncio.start_server` and `open_connection` call these two methods of the running loop.
        vars(loop).update(
            create_connection=self.create_connection,
            create_server=self.create_server,
        )

    async def create_server(
        self,
        factory: _ProtocolFactory,
        host: Any = None,
        port: int | None = None,
        **_: Any,
    ) -> _Server:
        """Start a server. It replaces `loop.create_server`."""
        port = port or next(self._ports)
        if port in self.servers:
            raise OSError(errno.EADDRINUSE, f"port {port} is in use")
        server = _Server(self, factory, port)
        self.servers[port] = server
        return server

    async def create_connection(
        self,
        factory: _ProtocolFactory,
        host: Any = None,
        port: int = 0,
        **_: Any,
    ) -> tuple[_Transport, Any]:
        """Connect to a server. It replaces `loop.create_connection`."""
        # To connect takes as long as a message, and during a partition until its end.
        await sleep(self.arrival_time() - self.loop.time())
        server = self.servers.get(port)
        if server is None:
            raise ConnectionRefusedError(
                errno.ECONNREFUSED,
                f"no server of this program listens at {host}:{port}; an exploration has no other"
                " network",
            )
        own_address = (host, next(self._ports))
        client = _Transport(self, factory(), own_address, server.address)
        accepted = _Transport(self, server.factory(), server.address, own_address)
        client.peer = accepted
        accepted.peer = client
        # The server's side comes first. As with sockets, its handler starts before the client
        # continues.
        for transport in (accepted, client):
            transport.protocol.connection_made(transport)
        return client, client.protocol

    def arrival_time(self) -> float:
        """Return the time of the loop at which a message that is sent now arrives.

        The schedule may let a partition begin now, and chooses how long the message takes.
        """
        now = self.loop.time()
        is_partitioned = self._choose(
            "slow",
            (False, True),
            lambda _: "a partition begins",
            "partition",
        )
        if is_partitioned:
            self._healed_at = now + _PARTITION_SECS
        delay: float = self._choose(
            "slow",
            DELAYS,
            lambda secs: f"a message takes {secs:g} s",
            "message",
        )
        return max(now + delay, self._healed_at)

    def connection_error(self) -> ConnectionError | None:
        """Return an error if the schedule lets a connection be lost now, or else None."""
        is_lost = self._choose(
            "failure",
            (False, True),
            lambda _: "a connection is lost",
            "connection",
        )
        if not is_lost:
            return None
        self.has_lost_connection = True
        return ConnectionResetError(errno.ECONNRESET, "the simulated network lost the connection")


class _Server(asyncio.AbstractServer):
    """A server, as `asyncio.start_server` returns it."""

    def __init__(
        self,
        network: Network,
        factory: _ProtocolFactory,
        port: int,
    ) -> None:
        self.factory = factory
        self.address = ("127.0.0.1", port)
        # The server stands in for its only socket: a program that has given no port reads the port
        # by `server.sockets[0].getsockname()`.
        self.sockets = (self,)
        self._network = network

    def getsockname(self) -> tuple[Any, int]:
        """Return the address. The only item of `sockets` needs this method."""
        return self.address

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._network.loop

    def is_serving(self) -> bool:
        return self in self._network.servers.values()

    def close(self) -> None:
        if self.is_serving():
            del self._network.servers[self.address[1]]

    async def start_serving(self) -> None:
        """Do nothing: a server accepts connections from its beginning."""

    async def serve_forever(self) -> None:
        try:
            await self._network.loop.create_future()
        finally:
            self.close()

    async def wait_closed(self) -> None:
        # As on Python 3.11, this does not wait for the connections. Their handlers are tasks of the
        # program, which must not leave them behind.
        await asyncio.sleep(0)


class _Transport(asyncio.Transport):
    """One end of a connection."""

    peer: _Transport
    """The other end. `Network.create_connection` sets it."""

    def __init__(
        self,
        network: Network,
        protocol: Any,
        address: tuple[Any, int],
        peer_address: tuple[Any, int],
    ) -> None:
        super().__init__({"sockname": address, "peername": peer_address})
        self.protocol = protocol
        self._network = network
        self._is_disconnected = False
        # The messages to the peer that have not arrived yet, in order: each is the call of a method
        # of the peer that receives it.
        self._deliveries: deque[Callable[[], object]] = deque()
        # The time of the loop at which the last of these messages arrives. A later message does not
        # arrive before it.
        self._last_arrival = 0.0

    def is_closing(self) -> bool:
        return self._is_disconnected

    def can_write_eof(self) -> bool:
        return True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_disconnected:
            return
        error = self._network.connection_error()
        if error is None:
            # The caller may change a `bytearray` later, so the message is a copy.
            self._send(functools.partial(self.peer._receive, bytes(data)))
            return
        # Messages in both directions that have not arrived yet are lost.
        for end in (self, self.peer):
            end._deliveries.clear()
            end._disconnect(error)

    def write_eof(self) -> None:
        self._send(self.peer._receive_eof)

    def close(self) -> None:
        if not self._is_disconnected:
            self.write_eof()
            self._disconnect(None)

    def abort(self) -> None:
        self.close()

    def _send(self, receive: Callable[[], object]) -> None:
        """Let a message arrive later: at that time, `receive`, a method of the peer, is called."""
        self._deliveries.append(receive)
        # A connection keeps the order of its bytes, so no message arrives before an earlier one.
        self._last_arrival = max(self._last_arrival, self._network.arrival_time())
        self._network.loop.call_at(self._last_arrival, self._deliver)

    def _deliver(self) -> None:
        """Deliver the next message, unless the connection was lost in the meantime."""
        # There is a timer for each message. Each timer delivers the first message of the queue and
        # not its own, because timers of the same time may fire in any order.
        if self._deliveries:
            receive = self._deliveries.popleft()
            receive()

    def _receive(self, message: bytes) -> None:
        """Called when a message of the peer arrives."""
        if self._is_disconnected:
            # As with TCP, the answer to a message for a closed connection is a reset.
            self.peer._disconnect(ConnectionResetError(errno.ECONNRESET, "the peer has closed"))
        else:
            self.protocol.data_received(message)

    def _receive_eof(self) -> None:
        """Called when the peer has written its last message."""
        if self._is_disconnected:
            return
        # The protocol returns True if it still writes to the peer.
        if not self.protocol.eof_received():
            self.close()

    def _disconnect(self, error: Exception | None) -> None:
        """End this side of the connection, and notify its protocol."""
        if not self._is_disconnected:
            self._is_disconnected = True
            self._network.loop.call_soon(self.protocol.connection_lost, error)
