"""A NATS server with JetStream for the simulation, and nats-py's client: the store and its connection are the library's own."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, NamedTuple

from aiohooks.stores.nats._connection import MESSAGE_NOT_FOUND, STREAM_NOT_FOUND, WRONG_SEQUENCE, NatsConnection, parse_address
from aiohooks.stores.nats.store import NatsEngine
from tests.fuzz.simulation.disk import Disk
from tests.fuzz.simulation.network import Connection, Network
from tests.fuzz.simulation.virtual_time import Process


class Stream(NamedTuple):
    """The stream, as it is on the disk: its configuration, and the only message of its only run."""

    config: dict[str, Any] | None = None
    seq: int = 0
    data: bytes = b""


class NatsServer:
    """One stream with one run, and the subscriptions to what it republishes."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.stream = Stream()
        self.disk: Disk[Stream] = Disk(network.world, self.stream)
        self._subscribed: dict[Connection, set[str]] = {}

    def on_message(self, connection: Connection, message: tuple[Any, ...]) -> None:
        kind, subject, *rest = message
        if kind == "SUB":
            self._subscribed.setdefault(connection, set()).add(subject)
        elif kind == "PING":
            connection.reply(("PONG",))
        else:
            data, reply_to, headers = rest
            connection.reply(("MSG", reply_to, json.dumps(self._answer(subject, data, headers or {})).encode(), None))

    def on_closed(self, connection: Connection) -> None:
        self._subscribed.pop(connection, None)

    def _answer(self, subject: str, data: bytes, headers: dict[str, str]) -> dict[str, Any]:
        stream = self.stream
        if subject.startswith("$JS.API.STREAM.CREATE"):
            if stream.config is None:
                self._write(Stream(json.loads(data)))
            return {"config": self.stream.config}
        if stream.config is None:
            return _error(STREAM_NOT_FOUND)
        if subject.startswith("$JS.API.STREAM.INFO"):
            return {"config": stream.config}
        if subject.startswith("$JS.API.STREAM.MSG.GET"):
            if not stream.data:
                return _error(MESSAGE_NOT_FOUND)
            return {"message": {"seq": stream.seq, "data": base64.b64encode(stream.data).decode()}}
        if subject.startswith("$JS.API.STREAM.PURGE"):
            self._write(stream._replace(data=b""))
            return {"success": True}
        if int(headers["Nats-Expected-Last-Subject-Sequence"]) != (stream.seq if stream.data else 0):
            return _error(WRONG_SEQUENCE[0])
        self._write(stream._replace(seq=stream.seq + 1, data=data))
        republished = subject.replace(".run.", ".news.")
        for connection, subjects in self._subscribed.items():
            if republished in subjects:
                connection.reply(("MSG", republished, data, {"Nats-Sequence": str(self.stream.seq)}))
        return {"seq": self.stream.seq}

    def _write(self, stream: Stream) -> None:
        self.stream = stream
        self.disk.write(stream)

    # Faults.

    def lose_data(self) -> None:
        """Delete the stream, while the connections stay."""
        self.disk.lose()
        self.stream = Stream()

    def restart(self, *, lost_secs: float = 0.0) -> None:
        """Start again with what is on the disk, without the changes of the last `lost_secs`."""
        self.stream = self.disk.read(lost_secs)
        self.network.start_server()


def _error(code: int) -> dict[str, Any]:
    return {"error": {"err_code": code, "description": "simulated"}}


def _finish(callback: Coroutine[Any, Any, None]) -> None:
    """Run a callback that never suspends."""
    with contextlib.suppress(StopIteration):
        callback.send(None)


class _Client:
    """What `NatsConnection` uses of nats-py."""

    max_payload = 1 << 20

    def __init__(self, network: Network, process: Process) -> None:
        self._network, self._process = network, process
        self._connection: Connection | None = None
        self._callbacks: dict[str, Callable[[Any], Coroutine[Any, Any, None]]] = {}
        self._pongs: list[Any] = []
        self.is_closed = False
        self.last_error: Exception | None = None
        self.discovered_servers: list[Any] = []
        self.connected_server_version = SimpleNamespace(major=2, minor=15)

    async def connect(self, servers: list[str], *, error_cb: Any, closed_cb: Any, **options: Any) -> None:
        self._on_error, self._on_closed = error_cb, closed_cb
        connection = self._connection = await self._network.connect(self._process)
        connection.on_message, connection.on_lost = self._receive, self._lose

    def _receive(self, message: tuple[Any, ...]) -> None:
        kind, *rest = message
        if kind == "PONG":
            for pong in self._pongs:
                if not pong.done():
                    pong.set_result(None)
            self._pongs.clear()
            return
        subject, data, headers = rest
        callback = self._callbacks.get(subject) or self._callbacks.get(f"{subject.rpartition('.')[0]}.*")
        if callback is not None:
            _finish(callback(SimpleNamespace(subject=subject, data=data, headers=headers)))

    def _lose(self) -> None:
        self.last_error = ConnectionError("nats: unexpected EOF")
        self.is_closed = True
        _finish(self._on_error(self.last_error))
        _finish(self._on_closed())

    def new_inbox(self) -> str:
        return "_INBOX.simulated"

    async def subscribe(self, subject: str, cb: Callable[[Any], Coroutine[Any, Any, None]]) -> Any:
        self._callbacks[subject] = cb
        self._send("SUB", subject)
        return SimpleNamespace(pending_msgs=0)

    async def publish(self, subject: str, data: bytes, *, reply: str, headers: dict[str, str] | None) -> None:
        self._send("PUB", subject, data, reply, headers)

    async def rtt(self, timeout: float) -> None:
        pong = self._process.create_future()
        self._pongs.append(pong)
        self._send("PING", "")
        await pong

    def _send(self, *message: Any) -> None:
        if self._connection is None or not self._connection.client_open:
            raise ConnectionError("nats: connection closed")
        self._connection.send(message)

    async def close(self) -> None:
        self.is_closed = True
        if self._connection is not None:
            self._connection.close()
        if hasattr(self, "_on_closed"):
            await self._on_closed()


class SimulatedNatsConnection(NatsConnection):
    """The library's connection, with nats-py's client replaced."""

    def __init__(self, network: Network, *args: Any) -> None:
        super().__init__(*args)
        process = asyncio.get_running_loop()
        assert isinstance(process, Process)
        self._client = _Client(network, process)


def simulated_nats_engine(network: Network, process: Process) -> NatsEngine:
    """Return the store's engine, whose connections `cluster` replaces."""
    return NatsEngine(parse_address("nats://simulated:1"), {}, "AIOHOOKS", 1, None)
