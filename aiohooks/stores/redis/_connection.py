"""One connection to a Redis server, which answers requests in order; and what its errors mean."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from aiohooks._aio.cancel import retrieve_exception, wait_done
from aiohooks.errors import StoreRefusedError, StoreUnavailableError

_NO_RIGHTS = (
    "the user may not do that; give it the rights in docs/guides/engine-redis.md (ACL SETUSER)"
)
_OTHER_NODE = (
    "it is a node of a cluster, and the run is on another one: give the address of that node, or"
    " use a server that is not part of a cluster, as a store does not follow a slot that is moved"
)
SENTINEL = (
    "it is a Sentinel and not a server: give the address of the master, which `redis-cli -p PORT"
    " SENTINEL get-master-addr-by-name NAME` shows; a store does not follow a failover to another"
    " address"
)
# An error has the hint of the first of these with a sign that is the name of its class, or of one
# of its causes, or in its text. Clients before redis-py 6 have other names for some classes, and
# Redis 6.2 puts errors of commands into that of the script.
_REFUSED_HINTS = (
    (
        _NO_RIGHTS,
        "NoPermissionError",
        "has no permissions",
        "can't run this command",
        "can't access at least one of the keys",
    ),
    ("the server has no password; leave it out of the URL", "without any password configured"),
    (
        "wrong or missing password or user; put them in the URL: redis://user:password@host:6379",
        "AuthenticationError",
    ),
    ("the user may not connect; look at ACL LIST on the server", "AuthorizationError"),
    (
        (
            "protected mode: a server without a password takes no connections from other machines;"
            " set one (requirepass)"
        ),
        "DENIED",
    ),
    ("it has expired; renew it on the server", "certificate has expired"),
    ("it is not valid yet; is the clock of this machine right?", "certificate is not yet valid"),
    (
        "it is for another name; give a name that is in it as the host",
        "certificate is not valid for",
    ),
    (
        "its certificate does not verify; give ssl_ca_certs= the authority that signed it",
        "SSLCertVerificationError",
    ),
    (
        "it asks for a certificate of the client; give ssl_certfile= and ssl_keyfile=",
        "CERTIFICATE_REQUIRED",
    ),
    (
        "it does not speak TLS on this port; use redis://, or give its TLS port",
        "WRONG_VERSION_NUMBER",
    ),
    (
        "it is too old, or not a Redis server; Redis 6.2 or later, or Valkey, is needed",
        "unknown command",
    ),
    (
        "a command is missing there; Redis 6.2 or later, or Valkey, is needed",
        "Unknown Redis command",
    ),
    (_OTHER_NODE, "MOVED ", "MovedError", "ASK ", "AskError"),
    (
        "it is a proxy of a cluster that does not know hash tags; give the address of one node",
        "CROSSSLOT",
    ),
    ("there is no such database; leave the number out of the URL", "DB index is out of range"),
    (
        "it answers with a line of more than 64 kB; is that a Redis server?",
        "chunk is longer than limit",
        "chunk exceed the limit",
    ),
    ("a cluster has one database only; leave the number out of the URL", "SELECT is not allowed"),
)
_START_SERVER = (
    "no server is listening there; start one (redis-server {listening}), or correct the address"
)
_UNAVAILABLE_HINTS = (
    ("it is still reading its data from the disk", "BusyLoadingError"),
    (
        "it is a replica, which cannot be written to; give the address of its master",
        "ReadOnlyError",
        "read only replica",
    ),
    ("its part of the cluster is being moved to another node", "TRYAGAIN", "TryAgainError"),
    ("it is a replica that has lost its master", "MASTERDOWN", "MasterDownError"),
    ("the cluster is down", "CLUSTERDOWN", "ClusterDownError"),
    (
        "its memory is full (maxmemory); give it more, or delete what is not needed",
        "OutOfMemoryError",
        "when used memory >",
    ),
    ("it cannot write to its disk, and refuses changes until it can; look at its log", "MISCONF"),
    ("it has too few replicas (min-replicas-to-write)", "Not enough good replicas", "NOREPLICAS"),
    ("it has the most clients that it may have (maxclients)", "max number of clients"),
    ("another script keeps it busy", "is busy running a script"),
    ("it has become a replica", "UNBLOCKED"),
    (_START_SERVER, "Connect call failed", "Connection refused", "ConnectionRefusedError"),
)
# The script raises these when a key holds something else than what the script has written.
_FOREIGN_SIGNS = (
    "WRONGTYPE",
    "FOREIGN",
    "attempt to ",
    "bad argument #",
    "not an integer",
    "Expected ",
    "The ID specified",
)


def _class_names(error: BaseException) -> set[str]:
    """Return the names of the classes of an error and of its causes."""
    names: set[str] = set()
    cause: BaseException | None = error
    while cause is not None:
        names.update(kind.__name__ for kind in type(cause).__mro__)
        cause = cause.__cause__ or cause.__context__
    return names


def is_reply(error: BaseException) -> bool:
    """Return whether the server sent the error in reply to a command: the connection remains
    usable.
    """
    return any(kind.__name__ == "ResponseError" for kind in type(error).__mro__)


def is_foreign_data(error: BaseException) -> bool:
    """Return whether the server found something else than a run under the run's keys."""
    return is_reply(error) and any(sign in str(error) for sign in _FOREIGN_SIGNS)


def is_unknown_script(error: BaseException | None) -> bool:
    """Return whether the server does not have the script (any more)."""
    return any(kind.__name__ == "NoScriptError" for kind in type(error).__mro__)


def explain_error(
    error: BaseException, address: str, *, connecting: bool = False
) -> StoreUnavailableError:
    """Return the store's error for one of the client's; while connecting, the address may be
    wrong.
    """
    names, text = _class_names(error), str(error).rstrip(".") or type(error).__name__
    # The server would repeat an unknown error reply.
    kind: type[StoreUnavailableError] = (
        StoreRefusedError if is_reply(error) else StoreUnavailableError
    )
    hint = (
        "is the server up, is this its address, and does it want TLS (rediss://) or not (redis://)?"
        if connecting
        else ""
    )
    found = (
        (kind, hint)
        for kind, hints in (
            (StoreRefusedError, _REFUSED_HINTS),
            (StoreUnavailableError, _UNAVAILABLE_HINTS),
        )
        for hint, *signs in hints
        if any(sign in names or sign in text for sign in signs)
    )
    kind, hint = next(found, (kind, hint))
    if hint == _START_SERVER:
        hint = hint.format(
            listening=(
                f"--unixsocket {address}"
                if "/" in address
                else f"--port {address.rpartition(':')[2]}"
            )
        )
    explained = kind(f"redis at {address}: {text}{': ' if hint else ''}{hint}")
    explained.__cause__ = error
    return explained


def is_moved(error: BaseException) -> bool:
    """Return whether the server is a node of a cluster that does not have the run, or will not have
    it any more.
    """
    return str(error).endswith(_OTHER_NODE)


_Outcome = tuple[Any, BaseException | None]


def _pack_command(command: Sequence[str | int]) -> bytes:
    """Encode a command. The client's own encoder takes four times as long, and each step needs one
    command.
    """
    parts = [b"*%d\r\n" % len(command)]
    for argument in command:
        data = str(argument).encode(errors="backslashreplace")
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


def _abort_transport(transport: asyncio.WriteTransport) -> None:
    """Close a connection without waiting for anything."""
    with contextlib.suppress(
        AttributeError
    ):  # Python 3.11.2, which Debian 12 has, raises it where TLS has ended already
        transport.abort()


class RedisConnection:
    """A connection of redis-py's, with a task that reads the replies: a cancelled caller leaves the
    others undisturbed.

    Used of redis-py are `connect` with `redis_connect_func`, `on_connect`, `send_packed_command`,
    `read_response`, `disconnect`. Deadlines are measured by the event loop, not by the store's
    clock: they are about the network. The connections of one list (`together`) are made together,
    and the loss of one is that of all.
    """

    def __init__(
        self,
        client: Any,
        address: str,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[Any]],
        together: list[RedisConnection],
    ) -> None:
        self._client = client
        client.redis_connect_func = self._shake_hands
        self._writer: asyncio.StreamWriter | None = None
        self._address = address
        self._spawn = spawn
        self._together = together
        together.append(self)
        self._replies: deque[asyncio.Future[_Outcome]] = deque()
        self._reader: asyncio.Task[Any] | None = None
        self._lost_by: BaseException | None = None

    async def open(self, within: float) -> None:
        """Connect and authenticate, within so many seconds.

        Raises:
            StoreUnavailableError: the server is not there, or refuses the connection.
        """
        try:
            async with asyncio.timeout(within):
                await self._client.connect()
        except TimeoutError as error:
            self._lost_by = TimeoutError(f"no answer within {within:g} s")
            await self._disconnect()
            raise explain_error(self._lost_by, self._address, connecting=True) from error
        except Exception as error:
            self._lost_by = error
            await self._disconnect()  # redis-py leaves what was reset during the handshake
            raise explain_error(error, self._address, connecting=True) from error
        if self._lost_by is not None:  # dropped meanwhile
            await self._disconnect()
            raise self._lost_error()
        self._reader = self._spawn(self._read_replies(), f"reading from {self._address}")

    async def execute(self, *command: str | int, within: float) -> Any:
        """Send a command and return the reply. A command without a reply after `within` seconds
        ends the connection.

        Raises:
            StoreUnavailableError: the connection is lost.
            Exception: the reply was an error; it is redis-py's.
        """
        if self._lost_by is not None or self._reader is None:
            raise self._lost_error()
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[_Outcome] = loop.create_future()
        timer = loop.call_later(
            within, lambda: self.drop(TimeoutError(f"no answer within {within:g} s"))
        )
        # Nothing may suspend between this and the writing: replies come in the order of the
        # commands.
        self._replies.append(outcome)
        try:
            await self._client.send_packed_command(_pack_command(command))
            reply, error = await outcome
        except Exception as error:
            self.drop(error)
            raise self._lost_error() from error
        finally:
            timer.cancel()
        if error is None:
            return reply
        if is_reply(error):
            raise error
        raise self._lost_error()

    def drop(self, error: BaseException) -> None:
        """End the connection without waiting, because of `error`; the first error counts."""
        if self._lost_by is not None:
            return
        self._lost_by = error
        for outcome in self._replies:
            if not outcome.done():
                outcome.set_result((None, error))
        self._replies.clear()
        # A TLS connection would try to say goodbye for half a minute where the other side is gone.
        if self._writer is not None:
            _abort_transport(self._writer.transport)
        if self._reader is not None:
            self._reader.cancel()
        for other in self._together:
            other.drop(error)

    async def aclose(self) -> None:
        """End the connection, and wait until nothing is left of it in this process."""
        self.drop(ConnectionAbortedError("closed on this side"))
        if self._reader is not None:
            await wait_done([self._reader], None)
        await self._disconnect()

    def _lost_error(self) -> StoreUnavailableError:
        return explain_error(self._lost_by or ConnectionError("not connected"), self._address)

    async def _read_replies(self) -> None:
        try:
            while True:
                reply, error = None, None
                try:
                    reply = await self._client.read_response()
                except Exception as raised:
                    if not is_reply(raised):
                        self.drop(raised)
                        return
                    error = raised
                if self._replies:
                    outcome = self._replies.popleft()
                    if not outcome.done():
                        outcome.set_result((reply, error))
        finally:
            self.drop(ConnectionAbortedError("closed on this side"))
            await self._disconnect()

    async def _shake_hands(self, client: Any) -> None:
        # redis-py forgets the writer where reading fails.
        self._writer = client._writer
        await client.on_connect()

    async def _disconnect(self) -> None:
        with contextlib.suppress(Exception):  # it is broken already
            await self._client.disconnect(nowait=True)
        if self._writer is not None:
            _abort_transport(self._writer.transport)
            # In a task: a cancel of this one would cancel the future of the streams, and with it
            # whoever waits for that next.
            closed = asyncio.ensure_future(self._writer.wait_closed())
            closed.add_done_callback(retrieve_exception)
            await wait_done([closed], None)
