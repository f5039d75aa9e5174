"""One connection to a Redis server, on which requests are answered in their order."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from aiohooks._aio.cancel import wait_done
from aiohooks.errors import StoreRefusedError, StoreUnavailableError

# By the name of the client's class, or by how the server's own words begin. The first one that fits says it.
_RIGHTS = "the user may not do that; give it the rights in docs/engine-redis.md (ACL SETUSER)"
_ELSEWHERE = "it is a node of a cluster, and the run belongs to another one; give the address of that one"
_DENIALS = ("NoPermissionError", "has no permissions", "can't run this command", "can't access at least one of the keys")
_REFUSED = (
    *((sign, _RIGHTS) for sign in _DENIALS),
    ("without any password configured", "the server has no password; leave it out of the URL"),
    ("AuthenticationError", "wrong or missing password or user; put them in the URL: redis://user:password@host:6379"),
    ("AuthorizationError", "the user may not connect; look at ACL LIST on the server"),
    ("DENIED", "protected mode: a server without a password takes no connections from other machines; set one (requirepass)"),
    ("SSLCertVerificationError", "its certificate does not verify; give ssl_ca_certs= the authority that signed it"),
    ("WRONG_VERSION_NUMBER", "it does not speak TLS on this port; use redis://, or give its TLS port"),
    ("unknown command", "it is too old, or not a Redis server; Redis 6.2 or later, or Valkey, is needed"),
    ("Unknown Redis command", "a command is missing there; Redis 6.2 or later, or Valkey, is needed"),
    ("MOVED ", _ELSEWHERE),  # as clients before redis-py 6 say it
    ("MovedError", _ELSEWHERE),
    ("CROSSSLOT", "it is a proxy of a cluster that does not know hash tags; give the address of one node"),
    ("DB index is out of range", "there is no such database; leave the number out of the URL"),
    ("SELECT is not allowed", "a cluster has one database only; leave the number out of the URL"),
)
# What comes of a script that finds something else than what the script has written.
_FOREIGN = ("WRONGTYPE", "FOREIGN", "attempt to ", "bad argument #", "assertion failed", "not an integer", "Expected ")
_START = "no server is listening there; start one (redis-server --port 6379), or mend the address"
_AWAY = (
    ("BusyLoadingError", "it is still reading its data from the disk"),
    ("ReadOnlyError", "it is a replica, which cannot be written to; give the address of its master"),
    ("MASTERDOWN", "it is a replica that has lost its master"),
    ("CLUSTERDOWN", "the cluster is down"),
    ("MasterDownError", "it is a replica that has lost its master"),
    ("ClusterDownError", "the cluster is down"),
    ("OutOfMemoryError", "its memory is full (maxmemory); give it more, or delete what is not needed"),
    ("MISCONF", "it cannot write to its disk, and refuses changes until it can; look at its log"),
    ("NOREPLICAS", "it has too few replicas at the moment (min-replicas-to-write)"),
    ("max number of clients", "it has as many clients as it takes (maxclients)"),
    ("is busy running a script", "another script keeps it busy"),
    ("UNBLOCKED", "it has become a replica"),
    *((sign, _START) for sign in ("Connect call failed", "Connection refused", "ConnectionRefusedError")),
)


def _names(error: BaseException) -> set[str]:
    """The names of the classes of an error, and of what it was caused by."""
    names: set[str] = set()
    one: BaseException | None = error
    while one is not None:
        names.update(kind.__name__ for kind in type(one).__mro__)
        one = one.__cause__ or one.__context__
    return names


def is_reply(error: BaseException) -> bool:
    """Whether it was the server's answer to a request, after which the connection goes on."""
    return any(kind.__name__ == "ResponseError" for kind in type(error).__mro__)


def is_foreign(error: BaseException) -> bool:
    """Whether the server says that what is under the keys of a run is none."""
    return is_reply(error) and any(sign in str(error) for sign in _FOREIGN)


def is_no_script(error: BaseException) -> bool:
    """Whether the server does not know the script yet, or not any more."""
    return any(kind.__name__ == "NoScriptError" for kind in type(error).__mro__)


def explained(error: BaseException, address: str, *, connecting: bool = False) -> StoreUnavailableError:
    """What is raised in place of the client's error; where it came while connecting, the address may be wrong."""
    names, said = _names(error), str(error).rstrip(".") or type(error).__name__
    # An answer of the server's that nobody here knows will be the same again.
    kind: type[StoreUnavailableError] = StoreRefusedError if is_reply(error) else StoreUnavailableError
    advice = "is the server up, is this its address, and does it want TLS (rediss://) or not (redis://)?" if connecting else ""
    for possible, table in ((StoreRefusedError, _REFUSED), (StoreUnavailableError, _AWAY)):
        for sign, what_to_do in table:
            if sign in names or sign in said:
                kind, advice = possible, what_to_do
                break
        else:
            continue
        break
    found = kind(f"redis at {address}: {said}{': ' if advice else ''}{advice}")
    found.__cause__ = error
    return found


_Outcome = tuple[Any, BaseException | None]


def packed(command: Sequence[str | int]) -> bytes:
    """A request as it is sent. The client's own way takes four times as long, and there is one for each step."""
    parts = [b"*%d\r\n" % len(command)]
    for one in command:
        data = str(one).encode(errors="backslashreplace")
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


class Connection(Protocol):
    """What is used of a connection of the client's."""

    async def connect(self) -> Any:
        """Connects and authenticates."""
        ...

    async def send_packed_command(self, command: bytes) -> Any:
        """Writes one request."""
        ...

    async def read_response(self) -> Any:
        """Reads one answer; raises one that is an error."""
        ...

    async def disconnect(self, nowait: bool = False) -> Any:
        """Closes the connection."""
        ...


class Link:
    """A connection, and a task that reads its answers: a caller that is cancelled leaves the others undisturbed.

    Deadlines are the event loop's own time, whatever the clock of a test: this is about the network.
    """

    def __init__(
        self,
        connection: Connection,
        address: str,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[Any]],
        dropped: Callable[[BaseException], None],
    ) -> None:
        """Does not connect yet; `dropped` is told why the connection is lost."""
        self._connection = connection
        self._address = address
        self._spawn = spawn
        self._dropped = dropped
        self._asked: deque[asyncio.Future[_Outcome]] = deque()
        self._reader: asyncio.Task[Any] | None = None
        self._lost: BaseException | None = None

    async def open(self, within: float) -> None:
        """Connects and authenticates, within so many seconds.

        Raises:
            StoreUnavailableError: it is not there, or says no.
        """
        try:
            async with asyncio.timeout(within):
                await self._connection.connect()
        except TimeoutError as error:
            self._lost = TimeoutError(f"no answer within {within:g} s")
            raise explained(self._lost, self._address, connecting=True) from error
        except Exception as error:
            self._lost = error
            raise explained(error, self._address, connecting=True) from error
        if self._lost is not None:  # dropped meanwhile
            await self._disconnect()
            raise self._error()
        self._reader = self._spawn(self._read(), f"reading from {self._address}")

    async def ask(self, *command: str | int, within: float) -> Any:
        """Sends a command and waits for its answer.

        Raises:
            StoreUnavailableError: the connection is lost, or there was no answer within so many seconds and now it is.
            Exception: the answer was an error; it is the client's.
        """
        if self._lost is not None or self._reader is None:
            raise self._error()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_Outcome] = loop.create_future()
        late = loop.call_later(within, self._expire, within)
        # Nothing suspends between this and the writing, so that the answers come in the order of what waits for them.
        self._asked.append(answer)
        try:
            await self._connection.send_packed_command(packed(command))
            reply, error = await answer
        except Exception as error:
            self.drop(error)
            raise self._error() from error
        finally:
            late.cancel()
        if error is None:
            return reply
        if is_reply(error):
            raise error
        raise self._error()

    def drop(self, error: BaseException) -> None:
        """Ends the connection at once, because of `error`; harmless when it has ended."""
        if self._lost is not None:
            return
        self._lost = error
        for answer in self._asked:
            if not answer.done():
                answer.set_result((None, error))
        self._asked.clear()
        # A TLS connection would try to say goodbye, for half a minute where nobody listens any more.
        transport = getattr(getattr(self._connection, "_writer", None), "transport", None)
        if transport is not None:
            transport.abort()
        if self._reader is not None:
            self._reader.cancel()
        self._dropped(error)

    async def aclose(self) -> None:
        """Ends the connection and waits until nothing is left of it here."""
        self.drop(ConnectionAbortedError("closed on this side"))
        if self._reader is not None:
            await wait_done([self._reader], None)
        await self._disconnect()

    def _error(self) -> StoreUnavailableError:
        return explained(self._lost or ConnectionError("not connected"), self._address)

    def _expire(self, within: float) -> None:
        self.drop(TimeoutError(f"no answer within {within:g} s"))

    async def _read(self) -> None:
        try:
            while True:
                reply, error = None, None
                try:
                    reply = await self._connection.read_response()
                except Exception as raised:
                    if not is_reply(raised):
                        self.drop(raised)
                        return
                    error = raised
                if self._asked:
                    answer = self._asked.popleft()
                    if not answer.done():
                        answer.set_result((reply, error))
        finally:
            self.drop(ConnectionAbortedError("closed on this side"))
            await self._disconnect()

    async def _disconnect(self) -> None:
        with contextlib.suppress(Exception):  # it is broken already
            await self._connection.disconnect(nowait=True)
