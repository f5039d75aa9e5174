"""The step store of a Redis or Valkey server."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any, cast

from aiohooks._validate import check_secs
from aiohooks.errors import InvalidArgumentError, StoreDamagedError, StoreRefusedError, StoreUnavailableError
from aiohooks.stores._protocol import Answer, Request, Snapshot, damaged_error
from aiohooks.stores._waiting import NO_WAITER
from aiohooks.stores.redis._connection import Connection, Link, explained, is_foreign, is_no_script
from aiohooks.stores.redis._script import LUA, SHA, Keys, answer_of, arguments, cursor, entries, position_of, snapshot_of
from aiohooks.stores.remote import RemoteStepStore

try:
    import redis.asyncio.connection as client
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisError
except ImportError as _missing:
    raise ImportError("RedisStepStore needs a package that is not installed; pip install 'aiohooks[redis]'") from _missing

_GRACE_SECS = 1.0  # for the answer to a blocking read, after its heartbeat
_LONGEST_BLOCK_SECS = 7 * 86_400.0

# What the connections need to be used as they are here. Retries of the client's own would count a step twice, and on
# Python 3.11 its timeouts swallow cancellations (python/cpython#86296). Dead links are found by the heartbeat.
_FIXED: dict[str, Any] = {
    "socket_timeout": None,
    "health_check_interval": 0,
    "retry_on_timeout": False,
    "decode_responses": False,
}
_TCP_DEFAULTS: dict[str, Any] = {"socket_keepalive": True}
_TLS_DEFAULTS: dict[str, Any] = {"ssl_cert_reqs": "required", "ssl_check_hostname": True}


class RedisStepStore(RemoteStepStore):
    """A step kept by a Redis server, 6.2 or later, or a Valkey server: for processes on several machines.

    A process has two connections. On one it waits, in a blocking read that the server ends when the lowest step is there
    that somebody here waits for, and not before; on the other it asks. Every request is one call of one script, done
    exactly once. Which rights it needs, and what it promises when a server fails, is in docs/engine-redis.md.
    """

    def __init__(
        self,
        url: str,
        *,
        run: str = "default",
        ssl_ca_certs: str | None = None,
        ssl_certfile: str | None = None,
        ssl_keyfile: str | None = None,
        credential_provider: Any = None,
        answer_timeout: float = 5.0,
        expire_secs: float | None = None,
        **remote: Any,
    ) -> None:
        """Does not connect yet.

        Args:
            url: `redis://user:password@host:6379/0`, `rediss://...` with TLS, or `unix:///path/to/socket`.
            run: the name of the run; runs of different names on one server never meet.
            ssl_ca_certs: a file with the certificates of the authorities to trust, for a server with one of its own.
            ssl_certfile: a file with this client's certificate, where the server asks for one.
            ssl_keyfile: a file with its key.
            credential_provider: redis-py's, where passwords change or come from elsewhere.
            answer_timeout: after how many seconds without an answer the connection counts as dead.
            expire_secs: the server deletes the run when no store has been connected to it for so many seconds; more than
                twice the heartbeat. None: it stays until `forget`.
            remote: see `RemoteStepStore`.

        Raises:
            InvalidArgumentError: the URL is not one, or an option cannot be meant.
        """
        super().__init__(run=run, **remote)
        check_secs(answer_timeout, "answer_timeout", positive=True)
        check_secs(expire_secs, "expire_secs", optional=True, positive=True)
        if expire_secs is not None and expire_secs <= 2 * self._heartbeat:
            raise InvalidArgumentError(
                f"expire_secs is {expire_secs!r}; give more than twice the heartbeat, which is {self._heartbeat:g} s: "
                "a run that is in use would be deleted"
            )
        self._make, self._address = _connections(
            url,
            {
                "ssl_ca_certs": ssl_ca_certs,
                "ssl_certfile": ssl_certfile,
                "ssl_keyfile": ssl_keyfile,
                "credential_provider": credential_provider,
                "socket_connect_timeout": answer_timeout,
            },
        )
        self._answer_timeout = answer_timeout
        self._keep_ms = "" if expire_secs is None else str(round(expire_secs * 1000))
        self._keys = Keys(self.run)
        self._wake_key = self._keys.wake(self._process)
        self._woken = "0-0"  # the last entry seen of that stream
        self._told = "0-0"  # the last entry seen of the news
        self._asking: Link | None = None
        self._listening: Link | None = None
        self._blocked: int | None = None  # the step that the blocking read waits for, while there is one
        self._reads = 0  # how many of these there have been
        self._waking: asyncio.Task[Any] | None = None

    # The connections.

    async def _open_connection(self) -> None:
        self._told = self._woken = "0-0"  # ids of another server, perhaps
        within = min(self._answer_timeout, self._connect_timeout)
        self._asking = self._link_to_be()
        await self._asking.open(within)
        self._listening = self._link_to_be()
        await self._listening.open(within)

    async def _connect(self) -> Snapshot:
        await self._open_connection()
        assert self._listening is not None
        # Whether it may read at all is found out now.
        await self._ask(self._listening, "XREAD", "STREAMS", self._keys.stream, "$", within=self._answer_timeout)
        # A read that blocks from a given id on hears also of what came before it: nothing can be missed from here.
        return self._seen(await self._call(self._keys.all, "open"))

    def _link_to_be(self) -> Link:
        return Link(self._make(), self._address, self._spawn, self._drop)

    def _drop(self, error: BaseException) -> None:
        """Both connections end together: the link is made again as a whole."""
        for link in (self._asking, self._listening):
            if link is not None:
                link.drop(error)

    async def _close_connection(self) -> None:
        links = (self._asking, self._listening)
        self._asking = self._listening = None
        for link in links:
            if link is not None:
                await link.aclose()

    # Listening.

    async def _watch(self) -> None:
        keys = (self._keys.stream, self._keys.news, self._wake_key)
        secs = min(self._heartbeat, _LONGEST_BLOCK_SECS)
        block = ("XREAD", "BLOCK", max(1, round(secs * 1000)), "STREAMS", *keys)
        while True:
            # Who was just woken may wait again: then the read blocks for that step at once.
            await asyncio.sleep(0)
            link = self._listening
            if link is None:
                return
            self._blocked = self._waits.next_threshold
            self._reads += 1
            ids = cursor(self._waits.latest, self._blocked, NO_WAITER), self._told, self._woken
            try:
                reply = await self._ask(link, *block, *ids, within=secs + _GRACE_SECS)
            finally:
                self._blocked = None
            look = not reply
            for key, id in entries(reply):
                if key == self._keys.stream:
                    self._observe(position_of(id))
                elif key == self._keys.news:
                    look = True
                else:
                    self._woken = id
            if look:
                self._take_and_mend(await self._read_run_once())

    def _take_and_mend(self, snapshot: Snapshot) -> None:
        if snapshot.position < self._waits.latest and not self._forgotten:
            # Deleted or evicted, and the connection is still there.
            self._spawn(self._write("raise", 0), "raising an engine that has lost its data")
            self._members.announce_again()
        self._observe_snapshot(snapshot)

    def _subscribe(self, step: int | None) -> None:
        super()._subscribe(step)
        if self._waking is None and self._too_high():
            self._waking = self._spawn(self._wake(), "listening for a lower step")

    def _too_high(self) -> bool:
        return self._blocked is not None and self._waits.next_threshold < self._blocked

    async def _wake(self) -> None:
        """Ends our own blocking read: an entry in a stream cannot come too early, as CLIENT UNBLOCK could."""
        try:
            while self._too_high():
                read = self._reads
                await self._call((self._wake_key,), "wake")
                if read == self._reads:
                    return  # if it has not ended yet, it will
        except StoreUnavailableError as error:
            self._drop(error)  # the read ends with its connection, at the latest now
        finally:
            self._waking = None

    # Asking.

    async def _request_once(self, request: Request) -> Answer:
        reply = await self._call(self._keys.all, *arguments(request))
        with self._expecting(reply):
            return answer_of(reply)

    async def _read_run_once(self) -> Snapshot:
        return self._seen(await self._call(self._keys.all, "look"))

    def _seen(self, reply: Any) -> Snapshot:
        with self._expecting(reply):
            snapshot, self._told = snapshot_of(reply, self._process)
        return snapshot

    @contextlib.contextmanager
    def _expecting(self, reply: Any) -> Generator[None]:
        try:
            yield
        except (ValueError, TypeError, LookupError) as error:
            if isinstance(reply, list):  # it has called the script
                raise self._damaged(f"{reply!r:.200}") from error
            raise StoreRefusedError(f"redis at {self._address} answered {reply!r:.200}: is that a Redis server?") from error

    async def _call(self, keys: tuple[str, ...], *args: str | int) -> Any:
        link = self._asker()
        command = (len(keys), *keys, args[0], self._keep_ms, *args[1:])
        try:
            return await self._ask(link, "EVALSHA", SHA, *command, within=self._answer_timeout)
        except _UnknownScriptError:
            # A server that was started again, or SCRIPT FLUSH.
            return await self._ask(link, "EVAL", LUA, *command, within=self._answer_timeout)

    async def _ask(self, link: Link, *command: str | int, within: float) -> Any:
        try:
            return await link.ask(*command, within=within)
        except StoreUnavailableError:
            raise
        except Exception as error:
            if is_no_script(error):
                raise _UnknownScriptError from error
            if is_foreign(error):
                raise self._damaged(str(error).partition(" script:")[0]) from error
            reason = explained(error, self._address)
            if not isinstance(reason, StoreRefusedError):
                # A server that is full, or has become a replica: as good as away, until it takes requests again.
                self._drop(error)
            raise reason from error

    def _damaged(self, found: str) -> StoreDamagedError:
        path = f"redis at {self._address}, {self._keys.stream}*"
        delete = f"delete the keys {self._keys.stream}*"
        return damaged_error(self.run, path, found=found, expected="the keys of a run, of layout 1", delete=delete)

    async def _delete_run_once(self) -> None:
        await self._ask(self._asker(), "DEL", *self._keys.all, self._wake_key, within=self._answer_timeout)

    def _asker(self) -> Link:
        if self._asking is None:
            raise explained(ConnectionError("not connected at the moment"), self._address)
        return self._asking


def _connections(url: str, options: dict[str, Any]) -> tuple[Callable[[], Connection], str]:
    """A function that makes a connection, and the address for messages, without a password."""
    given: object = url
    if not isinstance(given, str):
        raise InvalidArgumentError(f"url={url!r}: give a text, like redis://host:6379")
    try:
        parsed: dict[str, Any] = dict(client.parse_url(url))
        kind: Any = parsed.pop("connection_class", client.Connection)
        usual: dict[str, Any] = {"protocol": 2}
        for parent, defaults in ((client.Connection, _TCP_DEFAULTS), (client.SSLConnection, _TLS_DEFAULTS)):
            usual.update(defaults if issubclass(kind, parent) else {})
        named = {name: value for name, value in options.items() if value is not None}
        wanted = {**usual, **parsed, **named, **_FIXED, "retry": Retry(NoBackoff(), 0)}
        make = cast("Callable[[], Connection]", functools.partial(kind, **wanted))
        make()  # so that what it does not take is said now
    except (TypeError, ValueError, RedisError) as error:
        # Not the URL itself: there may be a password in it.
        raise InvalidArgumentError(
            f"this URL or an option of it is not one for Redis: {error}; give redis://host:6379, rediss:// for TLS, "
            "or unix:///path/to/socket"
        ) from error
    return make, str(wanted.get("path") or f"{wanted.get('host', 'localhost')}:{wanted.get('port', 6379)}")


class _UnknownScriptError(Exception):
    """The server does not have the script (any more)."""
