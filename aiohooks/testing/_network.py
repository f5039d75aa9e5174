"""A network inside of an explored program: connections without sockets, which the schedule slows
down, loses and partitions.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from aiohooks.testing._schedule_run import DELAYS, ScheduleRun, current_run

_PARTITION_SECS = 30.0
_ProtocolFactory = Callable[[], Any]


@contextlib.contextmanager
def simulated_network() -> Generator[None]:
    """Let `asyncio.start_server` and `open_connection` use a simulated network while the block is
    active, in an exploration.

    Under `"slow"`, messages take time, and a partition holds all of them for 30 s. Under
    `"failure"`, a connection is lost as one side writes: both sides get a `ConnectionResetError`,
    and what was under way is gone. A server is found by its port, whatever the host. Options for
    sockets and TLS are ignored. Outside of an exploration the block uses the real network.

    Example: `with simulated_network(): await asyncio.open_connection("127.0.0.1", 80)`.
    """
    run = current_run.get()
    if run is None:
        yield
        return
    network = _Network(run)
    # The functions for streams look these two up in the running loop.
    methods = {
        "create_connection": network.create_connection,
        "create_server": network.create_server,
    }
    attributes = vars(asyncio.get_running_loop())
    attributes.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del attributes[name]


class _Network:
    """The servers, and what the schedule does to messages."""

    def __init__(self, run: ScheduleRun) -> None:
        self.loop = asyncio.get_running_loop()
        self.servers: dict[int, _Server] = {}
        self._run = run
        self._ports = itertools.count(49_152)
        self._healed_at = 0.0

    async def create_server(
        self, factory: _ProtocolFactory, host: Any = None, port: int | None = None, **_: Any
    ) -> _Server:
        port = port or next(self._ports)
        if port in self.servers:
            raise OSError(errno.EADDRINUSE, f"port {port} is in use")
        self.servers[port] = _Server(self, factory, (host or "127.0.0.1", port))
        return self.servers[port]

    async def create_connection(
        self, factory: _ProtocolFactory, host: Any = None, port: int = 0, **_: Any
    ) -> tuple[_Transport, Any]:
        await asyncio.sleep(self.arrival_time() - self.loop.time())
        server = self.servers.get(port)
        if server is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"no server listens at {host}:{port}")
        addresses = [(host, next(self._ports)), server.address]
        client = _Transport(self, factory(), *addresses)
        accepted = _Transport(self, server.factory(), *reversed(addresses))
        client.peer = accepted
        accepted.peer = client
        for transport in (accepted, client):
            transport.get_protocol().connection_made(transport)
        return client, client.get_protocol()

    def arrival_time(self) -> float:
        """Return when a message arrives that is sent now."""
        now = self.loop.time()
        if self._run.choose("slow", (False, True), lambda _: "a partition begins", "partition"):
            self._healed_at = now + _PARTITION_SECS
        delay = self._run.choose(
            "slow", DELAYS, lambda secs: f"a message takes {secs:g} s", "message"
        )
        return max(now + delay, self._healed_at)

    def connection_error(self) -> ConnectionError | None:
        """Return the error with which a connection is lost now, if it is."""
        if not self._run.choose(
            "failure", (False, True), lambda _: "a connection is lost", "connection"
        ):
            return None
        error = ConnectionResetError(errno.ECONNRESET, "the simulated network lost the connection")
        self._run.injected(error)
        self._run.loses_connections = True
        return error


class _Server(asyncio.AbstractServer):
    """What `asyncio.start_server` returns."""

    def __init__(
        self, network: _Network, factory: _ProtocolFactory, address: tuple[str, int]
    ) -> None:
        self.factory = factory
        self.address = address
        self.sockets = (self,)
        self._network = network

    def getsockname(self) -> tuple[str, int]:
        """Return the address, as the only item of `sockets`."""
        return self.address

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._network.loop

    def is_serving(self) -> bool:
        return self._network.servers.get(self.address[1]) is self

    def close(self) -> None:
        if self.is_serving():
            del self._network.servers[self.address[1]]

    async def start_serving(self) -> None:
        """Do nothing: it accepts connections from the beginning."""

    async def serve_forever(self) -> None:
        try:
            await self._network.loop.create_future()
        finally:
            self.close()

    async def wait_closed(self) -> None:
        await asyncio.sleep(0)


class _Transport(asyncio.Transport):
    """One end of a connection."""

    peer: _Transport

    def __init__(
        self, network: _Network, protocol: Any, address: tuple[Any, int], peer: tuple[Any, int]
    ) -> None:
        super().__init__({"sockname": address, "peername": peer})
        self._network = network
        self._protocol = protocol
        self._is_closing = False
        self._is_disconnected = False
        self._under_way: deque[Callable[[], object]] = deque()
        self._last_arrival = 0.0

    def get_protocol(self) -> Any:
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def is_closing(self) -> bool:
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing:
            return
        error = self._network.connection_error()
        if error is None:
            message = bytes(data)
            self._send(lambda: self.peer._receive(message))
            return
        for end in (self, self.peer):
            end._under_way.clear()
            end._disconnect(error)

    def write_eof(self) -> None:
        self._send(self.peer._receive_eof)

    def close(self) -> None:
        if not self._is_closing:
            self.write_eof()
            self._disconnect(None)

    def abort(self) -> None:
        self.close()

    def _send(self, receive: Callable[[], object]) -> None:
        self._under_way.append(receive)
        self._last_arrival = max(self._last_arrival, self._network.arrival_time())
        self._network.loop.call_at(self._last_arrival, self._deliver)

    def _deliver(self) -> None:
        # Timers of the same time have no order, so the first message arrives, whichever fires.
        if self._under_way:
            self._under_way.popleft()()

    def _receive(self, message: bytes) -> None:
        if not self._is_disconnected:
            self._protocol.data_received(message)
        else:
            self.peer._disconnect(ConnectionResetError(errno.ECONNRESET, "the peer has closed"))

    def _receive_eof(self) -> None:
        if not self._is_disconnected and not self._protocol.eof_received():
            self.close()

    def _disconnect(self, error: Exception | None) -> None:
        self._is_closing = True
        if not self._is_disconnected:
            self._is_disconnected = True
            self._network.loop.call_soon(self._protocol.connection_lost, error)
