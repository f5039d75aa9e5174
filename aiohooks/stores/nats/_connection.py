"""One connection to a NATS server, and what the client for NATS leaves to others: asking, doubting, giving everything back."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from aiohooks._aio.cancel import retrieve, wait_done
from aiohooks._aio.clock import Clock
from aiohooks.errors import InvalidArgumentError, StoreRefusedError, StoreUnavailableError
from aiohooks.stores._protocol import logger
from aiohooks.stores.nats._stream import OLDEST_SERVER, NobodyAnswersError

_PORT = 4222


@dataclass(frozen=True, slots=True)
class Address:
    """Servers of one cluster, and what their URL says of the user; its text shows no secret."""

    servers: tuple[str, ...]
    """As host:port."""
    needs_tls: bool
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"{'tls' if self.needs_tls else 'nats'}://{','.join(self.servers)}"


def parse_address(url: str) -> Address:
    """Reads `nats://user:password@host:port,host:port`, or `tls://...`; a user without a password is a token.

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
            host, port = parts.hostname, parts.port or _PORT
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


try:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription
    from nats.errors import SlowConsumerError
except ImportError as error:
    raise ImportError("NatsStepStore needs a package that is not installed; pip install 'aiohooks[nats]'") from error

_CLOSE_SECS = 1.0
_AGAIN_SECS = 1.0


class _Client(Client):
    """The client of NATS, which gives no password away where TLS was asked for and a server has none; and reads headers quickly.

    What it overrides is not public: were it renamed, headers would be read by the client itself, only more slowly. The tests
    of TLS find out about the other.
    """

    needs_tls = False

    @staticmethod
    def _parse_header_lines(raw: bytes) -> dict[str, str]:
        # The server's own, which need no check of each character of their names: that takes as long as all else of a message.
        lines = (line.partition(b":") for line in raw.split(b"\r\n"))
        return {name.decode("latin-1"): value.strip().decode("latin-1") for name, colon, value in lines if colon}

    def _connect_command(self) -> bytes:
        writer = getattr(self._transport, "_io_writer", None)
        if self.needs_tls and (writer is None or writer.get_extra_info("ssl_object") is None):
            raise StoreRefusedError(
                "the server does not offer TLS, which was asked for; start it with --tls, or use a nats:// URL"
            )
        return super()._connect_command()


class Wire:
    """One connection, from `open` to the first thing that goes wrong with it."""

    def __init__(self, address: Address, clock: Clock, options: dict[str, Any]) -> None:
        self.broken: StoreUnavailableError | None = None
        self._address = address
        self._clock = clock
        self._options = options
        self._client = _Client()
        self._client.needs_tls = address.needs_tls
        self._answers: dict[str, asyncio.Future[Msg]] = {}
        self._asked = 0
        self._inbox = ""
        self._opened = False
        self._doubted = False
        self._heard = clock.now()
        self._apart_tasks: set[asyncio.Task[Any]] = set()
        self._stir: asyncio.Future[None] | None = None

    async def open(self, servers: list[str], secs: float) -> None:
        """Connects to one of them."""
        scheme = "tls" if self._address.needs_tls else "nats"
        try:
            connecting = self._client.connect(
                [f"{scheme}://{server}" for server in servers],
                error_cb=self._troubled,
                closed_cb=self._closed,
                allow_reconnect=False,
                dont_randomize=True,
                reconnect_time_wait=0,
                max_reconnect_attempts=1,  # none at all would mean for ever
                ping_interval=2**31,  # the watch asks by itself
                connect_timeout=2,  # for one server, and again soon: it may have come back meanwhile
                **self._options,
            )
            await self._apart(connecting, secs)
            self._inbox = self._client.new_inbox()
            await self._subscribe(f"{self._inbox}.*", self._answered)
        except StoreRefusedError:
            raise
        except Exception as error:
            raise self._explained(self._client.last_error or error) from error
        self._heard = self._clock.now()
        self._opened = True
        version = self._client.connected_server_version
        with contextlib.suppress(ValueError):
            if (version.major, version.minor) < OLDEST_SERVER:
                raise StoreRefusedError(
                    f"{self._address} is {version!r}; NatsStepStore needs {'.'.join(map(str, OLDEST_SERVER))}"
                )

    @property
    def others(self) -> list[str]:
        """Servers of the cluster that this one told of."""
        return [uri.netloc for uri in self._client.discovered_servers]

    @property
    def has_jetstream(self) -> bool:
        """Whether the server says that it has it."""
        return bool(getattr(self._client, "_server_info", {}).get("jetstream"))

    async def listen(self, subject: str, told: Callable[[bytes, dict[str, str], bool], None]) -> None:
        """Calls `told(data, headers, last)` for each message; `last` says that it is, for now."""

        async def heard(message: Msg) -> None:
            self._heard = self._clock.now()
            told(message.data, message.headers or {}, not subscription.pending_msgs)

        self._check()
        subscription = await self._subscribe(subject, heard)

    async def _subscribe(self, subject: str, told: Callable[[Msg], Awaitable[None]]) -> Subscription:
        client: Any = self._client
        subscription: Subscription = await client.subscribe(subject, cb=told)
        return subscription

    async def ask(self, subject: str, data: bytes, secs: float, headers: dict[str, str] | None = None) -> bytes:
        """Sends a message, again after a second, and gives the first answer to it.

        A cluster without a leader drops what it is asked: waiting for the answer would take longer than the election.

        Raises:
            NobodyAnswersError: nobody has this subject.
            StoreUnavailableError: there was no answer, or the connection is broken.
        """
        self._check()
        self._asked += 1
        number = str(self._asked)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        left = secs
        try:
            while not answer.done():
                if left <= 0:
                    self.doubt()
                    raise StoreUnavailableError(f"{self._address} has not answered within {secs:g} s")
                await self._client.publish(subject, data, reply=f"{self._inbox}.{number}", headers=headers)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(left, _AGAIN_SECS)):
                        await asyncio.shield(answer)
                left -= _AGAIN_SECS
            message = answer.result()
        except StoreUnavailableError:
            raise
        except Exception as error:
            raise self._explained(error) from error
        finally:
            del self._answers[number]
            answer.cancel()
        if not message.data and message.headers and message.headers.get("Status") == "503":
            raise NobodyAnswersError(f"{self._address} is there, but nobody answers {subject}")
        return bytes(message.data)

    async def ping(self, secs: float) -> None:
        """Finds out whether the server is there."""
        self._check()
        try:
            await self._apart(self._client.rtt(timeout=max(1, round(10 * secs))), secs)
        except Exception as error:
            self.fail(StoreUnavailableError(f"{self._address} has not answered a ping within {secs:g} s"))
            raise self.broken or error from error

    async def quiet(self, secs: float) -> None:
        """Waits until nothing was heard for `secs` seconds, or somebody has doubts."""
        while True:
            self._check()
            left = self._heard + secs - self._clock.now()
            if left <= 0 or self._doubted:
                self._doubted = False
                self._heard = self._clock.now()
                return
            stir = self._stir = asyncio.get_running_loop().create_future()
            timer = self._clock.call_later(left, self._wake)
            try:
                await stir
            finally:
                timer.cancel()

    def doubt(self) -> None:
        """Makes `quiet` return."""
        self._doubted = True
        self._wake()

    def fail(self, error: StoreUnavailableError) -> None:
        """This connection is of no use any more."""
        if self.broken is None:
            self.broken = error
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(error)
            self._wake()

    async def close(self) -> None:
        """Leaves nothing behind, whatever state the client is in."""
        self.fail(StoreUnavailableError(f"the connection to {self._address} was closed"))
        client: Any = self._client
        names = ("_reading_task", "_flusher_task", "_ping_interval_task")
        tasks = [getattr(client, name, None) for name in names]
        tasks += [getattr(subscription, "_wait_for_msgs_task", None) for subscription in client._subs.values()]
        try:
            # Where a TLS handshake has failed nobody would ever say that the connection is closed.
            await self._apart(client.close(), _CLOSE_SECS if self._opened else _CLOSE_SECS / 10)
        except Exception as error:
            logger.debug("closing a connection to %s: %s", self._address, error)
        finally:
            writer = getattr(client._transport, "_io_writer", None)
            if writer is not None:
                writer.transport.abort()
            left = [task for task in (*tasks, *self._apart_tasks) if task is not None and not task.done()]
            for task in left:
                task.cancel()
            await wait_done(left, _CLOSE_SECS)

    async def _apart(self, coro: Coroutine[Any, Any, Any], secs: float) -> None:
        """Does something of the client's in a task of its own: on Python 3.11 its `wait_for` swallows cancels."""
        task = asyncio.get_running_loop().create_task(coro)
        self._apart_tasks.add(task)
        task.add_done_callback(self._apart_tasks.discard)
        try:
            if not await wait_done([task], secs):
                raise TimeoutError(f"not done within {secs:g} s")
        except BaseException:
            task.add_done_callback(retrieve)
            task.cancel()
            raise
        task.result()

    def _wake(self) -> None:
        if self._stir is not None and not self._stir.done():
            self._stir.set_result(None)

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken
        if not self._opened:
            raise StoreUnavailableError(f"the connection to {self._address} is still being made")

    def _explained(self, error: Exception) -> StoreUnavailableError:
        said = str(error) or type(error).__name__
        low = said.lower()
        if isinstance(error, ssl.SSLCertVerificationError):
            return StoreRefusedError(
                f"the certificate of {self._address} is not trusted ({said}); give tls=ssl.create_default_context(cafile=...)"
            )
        if "authorization" in low or "authentication" in low:
            return StoreRefusedError(
                f"{self._address} does not let us in ({said}); give user= and password=, token=, user_credentials= or nkeys_seed="
            )
        if "permissions violation" in low:
            return StoreRefusedError(f"{self._address} does not allow it ({said}); give the user the rights that its page names")
        return StoreUnavailableError(f"no connection to {self._address} ({said}); is a `nats-server -js -sd DIR` running there?")

    async def _answered(self, message: Msg) -> None:
        answer = self._answers.get(message.subject.rpartition(".")[2])
        if answer is not None and not answer.done():
            answer.set_result(message)

    async def _troubled(self, error: Exception) -> None:
        if isinstance(error, SlowConsumerError):
            self.doubt()
        elif "$js.event.advisory" in str(error).lower():
            logger.debug("%s does not tell us of elections: %s", self._address, error)
        elif self._opened:
            self.fail(self._explained(error))

    async def _closed(self) -> None:
        self.fail(self._explained(self._client.last_error or ConnectionError("it was closed")))
