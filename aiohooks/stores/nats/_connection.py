"""One connection to a NATS server: its address, requests and their replies, subscriptions, JetStream's errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import ParseResult, unquote, urlsplit

from aiohooks._aio.cancel import retrieve_exception, wait_done
from aiohooks._aio.clock import Clock, Waiters
from aiohooks.errors import InvalidArgumentError, StoreRefusedError, StoreUnavailableError, missing_extra
from aiohooks.stores._protocol import CERTIFICATE_HINTS, abort_transport, logger

try:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.transport import Transport
    from nats.errors import SlowConsumerError
except ImportError as _missing:
    raise missing_extra("NatsStepStore", "nats") from _missing

OLDEST_SERVER = 2, 9
"""The first versions lack republishing and comparing before setting; 2.9 is the oldest that was tried."""

_DEFAULT_PORT = 4222
_CLOSE_SECS = 1.0
_RESEND_SECS = 1.0

# Numbers of JetStream's errors.
STREAM_NOT_FOUND, MESSAGE_NOT_FOUND, _NO_REPLICAS = 10059, 10037, 10074
WRONG_SEQUENCE = 10071, 10164
_NOT_ENABLED = 10039, 10076
_STORAGE_FULL = 10002, 10023, 10028, 10047, 10077
_PASSING, _PURGE_DENIED = (10005, *_STORAGE_FULL), 10110  # 10005: a cluster that has not enough servers yet


class NoResponderError(StoreUnavailableError):
    """The server is there, and nothing answers the subject: the stream is gone, or has no leader."""


class StreamGoneError(NoResponderError):
    """The server says that there is no such stream."""


@dataclass(frozen=True, slots=True)
class Address:
    """The servers of one cluster, and the credentials in their URL; its text shows no secret."""

    servers: tuple[str, ...]
    """As host:port."""
    needs_tls: bool
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"{'tls' if self.needs_tls else 'nats'}://{','.join(self.servers)}"


def parse_address(url: str) -> Address:
    """Parse `nats://user:password@host:port,host:port`, or `tls://...`; a user without a password is a token.

    Raises:
        InvalidArgumentError: it is not such a URL.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in ("nats", "tls") or not rest:
        raise InvalidArgumentError(
            f'the URL of a NATS step store begins with nats:// or tls://, not with {scheme[:20]!r}: give "nats://host:4222"'
        )
    servers: list[str] = []
    user = password = token = None
    for each in rest.split(","):
        try:
            parts = urlsplit(f"//{each.rpartition('://')[2]}")
            host, port = parts.hostname, parts.port or _DEFAULT_PORT
        except ValueError as error:
            wrong = f"a server in the {scheme}:// URL has a port that is no number below 65536"
            raise InvalidArgumentError(f"{wrong}: give host:4222") from error
        if not host or parts.path.strip("/") or parts.query:
            # Without what was given: there may be a password in it.
            raise InvalidArgumentError(f"a server in the {scheme}:// URL is not of the form user:password@host:port")
        servers.append(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        if parts.username and user is None and token is None:
            if parts.password is None:
                token = unquote(parts.username)
            else:
                user, password = unquote(parts.username), unquote(parts.password)
    return Address(tuple(servers), scheme == "tls", user, password, token)


class _TcpTransport(Transport):
    """The client's connection over TCP or TLS. Where TLS was asked for, it writes nothing before TLS is there.

    The client has a transport of its own, which can neither refuse a server without TLS, nor be aborted.
    """

    def __init__(self, needs_tls: bool) -> None:
        self.server_info: dict[str, Any] = {}
        """What the server says first."""
        self._needs_tls = needs_tls
        self._encrypted = False
        self._reader = asyncio.StreamReader()
        self._writer: asyncio.StreamWriter | None = None
        self._bare_writer: asyncio.StreamWriter | None = None  # that TLS goes through: collecting it would close the connection

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        self.abort()  # the server that was tried before
        self.server_info, self._encrypted = {}, False
        async with asyncio.timeout(connect_timeout):
            self._reader, self._writer = await asyncio.open_connection(uri.hostname, uri.port, limit=buffer_size)

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        assert self._writer is not None
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=buffer_size)
        protocol = asyncio.StreamReaderProtocol(reader)
        hostname = uri if isinstance(uri, str) else uri.hostname
        try:
            async with asyncio.timeout(connect_timeout):
                encrypted = await loop.start_tls(self._writer.transport, protocol, ssl_context, server_hostname=hostname)
        except BaseException:
            # The streams of the bare connection are never notified that it was closed: waiting for that would not end.
            self.abort()
            raise
        assert encrypted is not None
        self._bare_writer = self._writer
        self._reader, self._writer = reader, asyncio.StreamWriter(encrypted, protocol, reader, loop)
        self._encrypted = True

    def write(self, payload: bytes) -> None:
        self.writelines([payload])

    def writelines(self, payload: list[bytes]) -> None:
        if self._needs_tls and not self._encrypted:
            raise StoreRefusedError(
                "the server does not offer TLS, which was asked for; start it with --tls, or use a nats:// URL"
            )
        # uvloop raises an error for a lost connection: it would end the client's `close` before its tasks are cancelled.
        if self._writer is not None and not self._writer.is_closing():
            self._writer.writelines(payload)

    async def read(self, buffer_size: int) -> bytes:
        return await self._reader.read(buffer_size)

    async def readline(self) -> bytes:
        line = await self._reader.readline()
        if line.startswith(b"INFO ") and not self.server_info:
            with contextlib.suppress(ValueError):
                self.server_info = json.loads(line[5:])
        return line

    async def drain(self) -> None:
        # Reading finds a lost connection as well, and the same holds for an error here.
        if self._writer is not None:
            with contextlib.suppress(ConnectionError):
                await self._writer.drain()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    async def wait_closed(self) -> None:
        if self._writer is not None:
            await self._writer.wait_closed()

    def at_eof(self) -> bool:
        return self._reader.at_eof()

    def __bool__(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride] - theirs has no annotation
        return True  # otherwise the client would make its own

    def abort(self) -> None:
        """Close the connection without waiting for anything."""
        writer, self._writer = self._writer, None
        if writer is not None:
            abort_transport(writer.transport)


class NatsConnection:
    """One connection, from `open` to its first failure; it is never repaired, but replaced by another one.

    `broken_by` is the failure, None while there was none.
    """

    def __init__(self, address: Address, clock: Clock, options: dict[str, Any]) -> None:
        self.broken_by: StoreUnavailableError | None = None
        self._address = address
        self._clock = clock
        self._options = options
        self._transport = _TcpTransport(address.needs_tls)
        self._client: Any = Client()
        if not hasattr(self._client, "_transport"):
            # The only private attribute of the client that is used. Without it the client would connect by its own transport.
            raise StoreRefusedError("this version of nats-py cannot be used by NatsStepStore; pip install 'nats-py==2.16'")
        self._client._transport = self._transport
        self._replies: dict[str, asyncio.Future[Msg]] = {}
        self._request_count = 0
        self._inbox = ""
        self._opened = False
        self._client_closed = asyncio.Event()
        self._last_received = clock.now()
        self._check_wanted = False
        self._idle_waiters = Waiters()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def open(self, servers: list[str], secs: float) -> None:
        """Connect to the first of `servers` that accepts, within so many seconds.

        Raises:
            StoreUnavailableError: no server accepts the connection, or the server refuses it.
        """
        scheme = "tls" if self._address.needs_tls else "nats"
        try:
            connecting = self._client.connect(
                [f"{scheme}://{server}" for server in servers],
                error_cb=self._on_error,
                closed_cb=self._on_closed,
                allow_reconnect=False,
                dont_randomize=True,
                reconnect_time_wait=0,
                max_reconnect_attempts=1,  # 0 would mean indefinitely
                ping_interval=2**31,  # `ping` is called instead
                connect_timeout=2,  # for one server; it is tried again soon, and may have come back by then
                **self._options,
            )
            await self._run_in_task(connecting, secs)
            self._inbox = self._client.new_inbox()
            await self._client.subscribe(f"{self._inbox}.*", cb=self._on_reply)
        except StoreRefusedError:
            raise
        except Exception as error:
            raise self._explain_error(self._client.last_error or error) from error
        self._last_received = self._clock.now()
        self._opened = True
        version = self._client.connected_server_version
        with contextlib.suppress(ValueError):
            if (version.major, version.minor) < OLDEST_SERVER:
                raise StoreRefusedError(
                    f"{self._address} is {version!r}; NatsStepStore needs {'.'.join(map(str, OLDEST_SERVER))}"
                )

    @property
    def discovered_servers(self) -> list[str]:
        """Further servers of the cluster, as this one names them."""
        return [uri.netloc for uri in self._client.discovered_servers]

    @property
    def has_jetstream(self) -> bool:
        return bool(self._transport.server_info.get("jetstream"))

    async def subscribe(self, subject: str, on_message: Callable[[bytes, dict[str, str], bool], None]) -> None:
        """Call `on_message(data, headers, is_last)` for each message; `is_last` unless another one is already queued."""

        async def receive(message: Msg) -> None:
            self._last_received = self._clock.now()
            on_message(message.data, message.headers or {}, not subscription.pending_msgs)

        self._check_usable()
        subscription = await self._client.subscribe(subject, cb=receive)

    async def request(self, subject: str, data: bytes, secs: float, headers: dict[str, str] | None = None) -> bytes:
        """Send a message, again after each second, and return the first reply.

        A cluster without a leader drops requests: without sending again, the reply would take longer than the election.

        Raises:
            NoResponderError: nothing answers this subject.
            StoreUnavailableError: there was no reply, or the connection is broken.
        """
        self._check_usable()
        self._check_size(len(data), headers or {})
        self._request_count += 1
        number = str(self._request_count)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        left = secs
        try:
            while not reply.done():
                if left <= 0:
                    self.check_now()
                    raise StoreUnavailableError(f"{self._address} has not answered within {secs:g} s")
                await self._client.publish(subject, data, reply=f"{self._inbox}.{number}", headers=headers)
                await asyncio.wait([reply], timeout=min(left, _RESEND_SECS))
                left -= _RESEND_SECS
            message = reply.result()
        except StoreUnavailableError:
            raise
        except Exception as error:
            raise self._explain_error(error) from error
        finally:
            del self._replies[number]
            reply.cancel()
        if not message.data and message.headers and message.headers.get("Status") == "503":
            raise NoResponderError(f"{self._address} is there, but nothing answers {subject}")
        return bytes(message.data)

    def _check_size(self, size: int, headers: dict[str, str]) -> None:
        """Refuse a message that the server would answer by closing the connection: it counts the headers as well."""
        if headers:
            size += len("NATS/1.0\r\n\r\n") + sum(len(f"{name}: {value}\r\n") for name, value in headers.items())
        if size > (limit := self._client.max_payload):
            raise StoreRefusedError(
                f"{self._address} takes no message of more than {limit:,} bytes (max_payload), and one of the run would have "
                f"{size:,}; give the server a larger limit, or the run fewer publishers"
            )

    async def ping(self, secs: float) -> None:
        """Check that the server answers, within so many seconds; otherwise the connection is broken."""
        self._check_usable()
        try:
            await self._run_in_task(self._client.rtt(timeout=max(1, round(10 * secs))), secs)
        except Exception as error:
            self.fail(StoreUnavailableError(f"{self._address} has not answered a ping within {secs:g} s"))
            raise self.broken_by or error from error

    async def wait_idle(self, secs: float) -> None:
        """Wait until no message has arrived for `secs` seconds, or `check_now` was called."""
        while True:
            self._check_usable()
            left = self._last_received + secs - self._clock.now()
            if left <= 0 or self._check_wanted:
                self._check_wanted = False
                self._last_received = self._clock.now()
                return
            await self._idle_waiters.wait(left, self._clock)

    def check_now(self) -> None:
        """End `wait_idle`: the connection, or what this process knows of the run, is to be checked."""
        self._check_wanted = True
        self._idle_waiters.wake()

    def fail(self, error: StoreUnavailableError) -> None:
        """Mark the connection as broken, and end its requests; the first error counts."""
        if self.broken_by is None:
            self.broken_by = error
            for reply in self._replies.values():
                if not reply.done():
                    reply.set_exception(error)
            self._idle_waiters.wake()

    async def close(self) -> None:
        """Close the connection, whatever state the client is in; nothing of it is left in this process."""
        if self.broken_by is not None:
            self._transport.abort()
        self.fail(StoreUnavailableError(f"the connection to {self._address} was closed"))
        for task in (unfinished := tuple(self._tasks)):
            task.cancel()
        closing = asyncio.get_running_loop().create_task(self._close_client())
        closing.add_done_callback(retrieve_exception)
        try:
            # TLS would wait half a minute for a goodbye where the other side is gone.
            if not await wait_done([*unfinished, closing], _CLOSE_SECS):
                self._transport.abort()
                await wait_done([closing], _CLOSE_SECS)
        finally:
            self._transport.abort()
            closing.cancel()
            # The client has cancelled its tasks, and does not wait for them.
            for _ in range(3):
                await asyncio.sleep(0)

    async def _close_client(self) -> None:
        if self._client.is_closed:
            await self._client_closed.wait()  # it has closed itself, or is about to
        else:
            await self._client.close()

    async def _run_in_task(self, coro: Coroutine[Any, Any, Any], secs: float) -> None:
        """Await one of the client's coroutines in a task: on Python 3.11 its `wait_for` swallows cancellations."""
        task = asyncio.get_running_loop().create_task(coro)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            if not await wait_done([task], secs):
                raise TimeoutError(f"not done within {secs:g} s")
        except BaseException:
            task.add_done_callback(retrieve_exception)
            task.cancel()
            raise
        task.result()

    def _check_usable(self) -> None:
        if self.broken_by is not None:
            raise self.broken_by
        if not self._opened:
            raise StoreUnavailableError(f"the connection to {self._address} is still being made")

    def _explain_error(self, error: Exception) -> StoreUnavailableError:
        text = str(error) or type(error).__name__
        low = text.lower()
        if isinstance(error, ssl.SSLCertVerificationError):
            hints = (hint for sign, hint in CERTIFICATE_HINTS if sign in text)
            hint = next(hints, "give tls=ssl.create_default_context(cafile=...)")
            return StoreRefusedError(f"the certificate of {self._address} is not trusted ({text}): {hint}")
        if "authorization" in low or "authentication" in low:
            return StoreRefusedError(
                f"{self._address} refuses the user ({text}); give user= and password=, token=, user_credentials= or nkeys_seed="
            )
        if "permissions violation" in low:
            return StoreRefusedError(
                f"{self._address} does not allow it ({text}); give the user the rights in docs/guides/engine-nats.md"
            )
        port = self._address.servers[0].rpartition(":")[2]
        hint = f"is a `nats-server -p {port} -js -sd DIR` running there?"
        return StoreUnavailableError(f"no connection to {self._address} ({text}); {hint}")

    async def _on_reply(self, message: Msg) -> None:
        reply = self._replies.get(message.subject.rpartition(".")[2])
        if reply is not None and not reply.done():
            reply.set_result(message)

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, SlowConsumerError):
            self.check_now()
        elif "$js.event.advisory" in str(error).lower():
            logger.debug("%s does not announce elections to this user: %s", self._address, error)
        elif self._opened:
            self.fail(self._explain_error(error))

    async def _on_closed(self) -> None:
        self._client_closed.set()
        self.fail(self._explain_error(self._client.last_error or ConnectionError("it was closed")))


# Replies of JetStream.


def parse_reply(data: bytes) -> dict[str, Any]:
    """Parse a reply of JetStream, which may be an error.

    Raises:
        StoreUnavailableError: it is not a reply of JetStream.
    """
    try:
        reply: Any = json.loads(data)
        if isinstance(reply, dict):
            return cast("dict[str, Any]", reply)
    except ValueError:
        pass
    raise StoreUnavailableError(f"the NATS server gave an answer that is not JetStream's: {data[:100]!r}")


def error_code(reply: dict[str, Any]) -> int:
    """Return the number of the error in a reply; 0 if there is none."""
    return int(reply["error"].get("err_code", -1)) if "error" in reply else 0


def check_reply(reply: dict[str, Any]) -> dict[str, Any]:
    """Return the reply unless it is an error.

    Raises:
        StoreUnavailableError: it is an error.
    """
    code = error_code(reply)
    if not code:
        return reply
    text = f"{reply['error'].get('description', 'no reason given')} (error {code})"
    if code in _NOT_ENABLED:
        raise StoreRefusedError(
            f"{text}: JetStream is not enabled for this account; start the server with `nats-server -js -sd DIR`"
        )
    if code == _NO_REPLICAS:
        raise StoreRefusedError(f"{text}: it is one server, no cluster; leave out replicas=")
    if code == STREAM_NOT_FOUND:
        raise StreamGoneError(f"{text}: the stream is gone")
    if code == _PURGE_DENIED or (400 <= reply["error"].get("code", 0) < 429 and code not in _PASSING):  # as in HTTP
        raise StoreRefusedError(f"the NATS server refuses it: {text}; look at the stream's settings (`nats stream info`)")
    hint = ": its storage is full; give it more (max_file_store), or delete what is not needed" if code in _STORAGE_FULL else ""
    raise StoreUnavailableError(f"the NATS server says: {text}{hint}")
