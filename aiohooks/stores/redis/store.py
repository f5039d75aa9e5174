"""A step store on a Redis or Valkey server."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import secrets
from collections.abc import Callable, Generator
from typing import Any

from aiohooks._aio.clock import sleep
from aiohooks._aio.waits import Backoff
from aiohooks._validate import check_instance, check_secs
from aiohooks.errors import (
    InvalidArgumentError,
    StoreDamagedError,
    StoreRefusedError,
    StoreUnavailableError,
    missing_extra,
)
from aiohooks.stores._protocol import (
    Answer,
    Mark,
    Request,
    RunReport,
    Snapshot,
    Write,
    damaged_error,
    report_of,
)
from aiohooks.stores._run_state import RunState
from aiohooks.stores.engine import Engine, EngineLink
from aiohooks.stores.redis import _script
from aiohooks.stores.redis._connection import (
    SENTINEL,
    RedisConnection,
    explain_error,
    is_foreign_data,
    is_moved,
    is_unknown_script,
)
from aiohooks.stores.shared import SharedStepStore

try:
    import redis.asyncio.connection as client
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisError
except ImportError as _missing:
    raise missing_extra("RedisStepStore", "redis") from _missing

_GRACE_SECS = 1.0  # for the reply to a blocking read, after its heartbeat
_LONGEST_BLOCK_SECS = 7 * 86_400.0
_RACE_BACKOFF = Backoff(initial_secs=0.004, max_secs=0.1)

# redis-py's own retries would count a step twice, and on Python 3.11 its timeouts swallow
# cancellations (python/cpython#86296). The heartbeat finds dead connections.
_FIXED: dict[str, Any] = {
    "socket_timeout": None,
    "health_check_interval": 0,
    "retry_on_timeout": False,
    "decode_responses": False,
}
_TCP_DEFAULTS: dict[str, Any] = {"socket_keepalive": True}
_TLS_DEFAULTS: dict[str, Any] = {"ssl_cert_reqs": "required", "ssl_check_hostname": True}


class RedisStepStore(SharedStepStore):
    """A step store on a Redis server (6.2 or later) or a Valkey server, for processes on several
    machines.

    A process has two connections. One waits in a blocking read, which the server ends when the
    lowest step that this process waits for is reached, and not before; the other sends requests.
    Each request is one call of one script, done exactly once. docs/guides/engine-redis.md lists the
    rights that a user needs, and the promises for when a server fails.
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
        **shared: Any,
    ) -> None:
        """Create the store; it connects when it is opened.

        Args:
            url: `redis://user:password@host:6379/0`, `rediss://...` with TLS, or
                `unix:///path/to/socket`.
            run: the name of the run; runs of different names on one server never meet.
            ssl_ca_certs: a file with the certificates of the authorities to trust, for a server
                with a private one.
            ssl_certfile: a file with this client's certificate, where the server asks for one.
            ssl_keyfile: a file with its key.
            credential_provider: redis-py's, where passwords change or come from elsewhere.
            answer_timeout: after how many seconds without an answer the connection counts as dead.
            expire_secs: after how many seconds without a connected store the server deletes the
                run; more than twice the heartbeat. None keeps the run until `forget`.
            shared: see `SharedStepStore`.

        Raises:
            InvalidArgumentError: the URL or an option is invalid.
        """
        check_secs(answer_timeout, "answer_timeout", positive=True)
        check_secs(expire_secs, "expire_secs", optional=True, positive=True)
        new_connection, address = _parse_url(
            url,
            {
                "ssl_ca_certs": ssl_ca_certs,
                "ssl_certfile": ssl_certfile,
                "ssl_keyfile": ssl_keyfile,
                "credential_provider": credential_provider,
                "socket_connect_timeout": answer_timeout,
            },
        )
        super().__init__(
            RedisEngine(new_connection, address, answer_timeout, expire_secs), run=run, **shared
        )


class RedisEngine(Engine):
    """A run on a server: one connection with a blocking read, and one for requests."""

    def __init__(
        self,
        new_connection: Callable[[], Any],
        address: str,
        answer_timeout: float,
        expire_secs: float | None,
    ) -> None:
        """Connect later; `new_connection` creates a connection of the client's, `address` is for
        messages.
        """
        self._new_client_connection = new_connection
        self._address = address
        self._answer_timeout = answer_timeout
        self._expire_secs = expire_secs
        self._keep_ms = "" if expire_secs is None else str(round(expire_secs * 1000))
        # the last entry seen of the stream that ends this process's own blocking read
        self._last_wake = "0-0"
        self._run = _script.FoundRun(
            "", "", RunState()
        )  # as last read; the one before, while a connection is made
        self._requests: RedisConnection | None = None
        self._reads: RedisConnection | None = None
        self._blocked_for: float | None = None  # the step that the current blocking read waits for
        self._read_count = 0  # blocking reads so far
        self._waking: asyncio.Task[Any] | None = None

    def attach(self, link: EngineLink) -> None:
        super().attach(link)
        if self._expire_secs is not None and self._expire_secs <= 2 * link.heartbeat:
            raise InvalidArgumentError(
                f"expire_secs is {self._expire_secs!r}; give more than twice the heartbeat, which"
                f" is {link.heartbeat:g} s: a run that is in use would be deleted"
            )
        self._keys = _script.Keys(link.run)
        self._wake_key = self._keys.wake(link.process)

    # The connections.

    async def _open_connection(self) -> None:
        self._last_wake = "0-0"  # this may be another server
        within = self._open_secs
        together: list[RedisConnection] = []
        self._requests = self._new_connection(together)
        await self._requests.open(within)
        self._reads = self._new_connection(together)
        await self._reads.open(within)

    @property
    def _open_secs(self) -> float:
        return min(self._answer_timeout, self.link.connect_timeout)

    async def connect(self, known: Mark) -> Snapshot:
        await self._open_connection()
        assert self._reads is not None
        with self._ends_if_moved():
            # A user without the right to read is refused now, not at the first wait.
            try:
                await self._execute(
                    self._reads,
                    "XREAD",
                    "STREAMS",
                    self._keys.positions,
                    "$",
                    within=self._answer_timeout,
                )
            except StoreRefusedError:
                if await self._is_sentinel(self._reads):
                    raise StoreRefusedError(f"redis at {self._address}: {SENTINEL}") from None
                raise
            # Nothing after this snapshot is missed: a blocking read from a given id also returns
            # earlier entries beyond it.
            self._run = await self._find_run(known)
        return self._run.state.snapshot(self._run.run_id)

    @contextlib.contextmanager
    def _ends_if_moved(self) -> Generator[None]:
        """End all calls and waits where the server says, to a store that has been open, that the
        run is on another node.
        """
        try:
            yield
        except StoreRefusedError as error:
            if self._run.run_id and is_moved(error):
                self.link.fail(error)
            raise

    async def _find_run(self, known: Mark) -> _script.FoundRun:
        """Read the run, after making it if it is not there, or if the server has lost what this
        process knows of it.
        """
        # The id of the run that has what this process knows, empty if it knows nothing.
        informed_id = self._run.run_id
        while True:
            found = await self._read_state()
            is_lost = not found.run_id or self._is_older(found)
            if not is_lost and informed_id in ("", found.run_id):
                return found
            state, run_id = found.state.copy(), found.run_id
            if is_lost:
                state, run_id = RunState(), secrets.token_hex(8)
            if informed_id:
                state.succeed(known)
            # A part of the run may be left, which this process does not know.
            if is_lost and found.state.mark != state.mark:
                state.succeed(found.state.mark)
            if await self._swap(found, run_id, state) and informed_id:
                informed_id = run_id

    def _is_older(self, found: _script.FoundRun) -> bool:
        """Return whether the server has the run as it was before this process last read it, from an
        older copy of its data.
        """
        return found.run_id == self._run.run_id and (
            int(found.version) < int(self._run.version) or found.state.position < self.link.latest
        )

    async def _is_sentinel(self, connection: RedisConnection) -> bool:
        try:
            role = await self._execute(connection, "ROLE", within=self._answer_timeout)
        except (
            StoreUnavailableError,
            StoreDamagedError,
        ):  # without the right to ask: what was refused says more
            return False
        return isinstance(role, list) and role[:1] == [b"sentinel"]

    def _new_connection(self, together: list[RedisConnection]) -> RedisConnection:
        return RedisConnection(
            self._new_client_connection(), self._address, self.link.spawn, together
        )

    def _drop_connections(self, error: BaseException) -> None:
        if self._requests is not None:
            self._requests.drop(error)

    async def disconnect(self) -> None:
        connections = (self._requests, self._reads)
        self._requests = self._reads = None
        for connection in connections:
            if connection is not None:
                await connection.aclose()

    # The blocking read.

    async def watch(self) -> None:
        keys = (self._keys.positions, self._keys.changes, self._wake_key)
        secs = min(self.link.heartbeat, _LONGEST_BLOCK_SECS)
        blocking_read = ("XREAD", "BLOCK", max(1, round(secs * 1000)), "STREAMS", *keys)
        while True:
            # A waiter that was just woken may wait again: let it, so that this read already blocks
            # for its next step.
            await asyncio.sleep(0)
            connection = self._reads
            if connection is None:
                return
            threshold = self.link.threshold
            self._blocked_for = math.inf if threshold is None else threshold
            self._read_count += 1
            after = (
                _script.read_after(self.link.latest, threshold),
                self._run.last_change,
                self._last_wake,
            )
            try:
                with self._ends_if_moved():
                    reply = await self._execute(
                        connection, *blocking_read, *after, within=secs + _GRACE_SECS
                    )
            finally:
                self._blocked_for = None
            refresh = not reply
            with self._unexpected_reply(reply):
                for key, entry_id, fields in _script.latest_entries(reply):
                    if key == self._keys.positions:
                        self._observe_entry(entry_id, fields)
                    elif key == self._keys.changes:
                        refresh = True
                    else:
                        self._last_wake = entry_id
            if refresh:
                self.link.observe(await self.read())

    def _observe_entry(self, entry_id: str, fields: dict[str, str]) -> None:
        if fields.get("run") != self._run.run_id:
            raise self._data_lost()
        self.link.observe(_script.parse_position(entry_id))

    def subscribe(self, step: int | None) -> None:
        if self._waking is None and self._is_blocked_too_high():
            self._waking = self.link.spawn(self._end_blocking_read(), "waiting for a lower step")

    def _is_blocked_too_high(self) -> bool:
        step = self.link.threshold
        return self._blocked_for is not None and step is not None and step < self._blocked_for

    async def _end_blocking_read(self) -> None:
        # By an entry in a stream that it reads: CLIENT UNBLOCK could arrive before the read, and
        # would do nothing.
        try:
            while self._is_blocked_too_high():
                read_count = self._read_count
                await self._call_script((self._wake_key,), "wake", "")
                if read_count == self._read_count:
                    return  # its reply is on the way
        except StoreUnavailableError as error:
            self._drop_connections(error)  # which ends the read as well
        finally:
            self._waking = None

    # Requests.

    async def request(self, request: Request) -> Answer:
        if isinstance(request, Write):
            return await self._write_once(request)
        lost_races = 0
        while True:
            run = await self._read_run_state()
            state = run.state.copy()
            answer = state.apply(request)
            if await self._swap(run, run.run_id, state):
                return answer
            lost_races += 1
            await sleep(_RACE_BACKOFF.pause_secs(lost_races), self.link.clock)

    async def _write_once(self, write: Write) -> Answer:
        reply = await self._call_script(
            self._keys.all, "write", self._run.run_id, *_script.write_arguments(write)
        )
        with self._unexpected_reply(reply):
            answer = _script.parse_answer(reply)
        if answer.status == "lost":
            raise self._data_lost()
        return answer

    async def read(self) -> Snapshot:
        run = await self._read_run_state()
        return run.state.snapshot(run.run_id)

    async def _read_run_state(self) -> _script.FoundRun:
        """Read the run that this process knows."""
        found = await self._read_state()
        if found.run_id != self._run.run_id:
            raise self._data_lost()
        if int(found.version) >= int(self._run.version):
            self._run = found
        return found

    async def _read_state(self) -> _script.FoundRun:
        """Read the run, whichever it is."""
        reply = await self._call_script(self._keys.all, "read", self._run.run_id)
        with self._unexpected_reply(reply):
            return _script.parse_read(reply)

    async def _swap(self, found: _script.FoundRun, run_id: str, state: RunState) -> bool:
        """Replace the state of the run that was found; return whether no other process was
        faster.
        """
        if run_id == found.run_id and state.dump() == found.state.dump():
            return True
        arguments = _script.swap_arguments(found, run_id, state)
        reply = await self._call_script(self._keys.all, "swap", found.run_id, *arguments)
        with self._unexpected_reply(reply):
            return int(reply) > 0

    def _data_lost(self) -> StoreUnavailableError:
        """Return the error for a run that is gone, older, or another one, after ending the
        connections: connecting makes it again.
        """
        error = StoreUnavailableError(
            f"run {self.link.run}: the data of the run is gone from redis at {self._address}"
        )
        self._drop_connections(error)
        return error

    @contextlib.contextmanager
    def _unexpected_reply(self, reply: Any) -> Generator[None]:
        try:
            yield
        except (ValueError, TypeError, LookupError) as error:
            if isinstance(reply, list):  # it comes from the script
                raise self._damaged_error(f"{reply!r:.200}") from error
            raise StoreRefusedError(
                f"redis at {self._address} answered {reply!r:.200}: is that a Redis server?"
            ) from error

    async def _call_script(
        self, keys: tuple[str, ...], *args: str | int, on: RedisConnection | None = None
    ) -> Any:
        connection = on or self._request_connection()
        command = (len(keys), *keys, args[0], self._keep_ms, *args[1:])
        try:
            return await self._execute(
                connection, "EVALSHA", _script.SCRIPT_SHA, *command, within=self._answer_timeout
            )
        except StoreRefusedError as error:
            if not is_unknown_script(error.__cause__):
                raise
            # The server was restarted, or SCRIPT FLUSH.
            return await self._execute(
                connection, "EVAL", _script.SCRIPT, *command, within=self._answer_timeout
            )

    async def _execute(
        self, connection: RedisConnection, *command: str | int, within: float
    ) -> Any:
        try:
            return await connection.execute(*command, within=within)
        except StoreUnavailableError:
            raise
        except Exception as error:
            if is_foreign_data(error):
                text = str(error).partition(" script:")[0]
                raise self._damaged_error(text.partition("FOREIGN ")[2] or text) from error
            explained = explain_error(error, self._address)
            if not isinstance(explained, StoreRefusedError):
                # A server that is full, or has become a replica, counts as lost until it takes
                # requests again.
                self._drop_connections(error)
            raise explained from error

    def _damaged_error(self, found: str) -> StoreDamagedError:
        keys = f"{self._keys.positions}*"
        return damaged_error(
            self.link.run,
            f"redis at {self._address}, {keys}",
            found=found,
            expected="the keys of a run, of layout 3",
            delete=f"delete the keys {keys}",
        )

    async def inspect(self) -> RunReport | None:
        connection = self._new_connection([])
        try:
            await connection.open(self._open_secs)
            reply = await self._call_script(self._keys.all, "inspect", "", on=connection)
            with self._unexpected_reply(reply):
                found = _script.parse_read(reply)
        finally:
            await connection.aclose()
        return report_of(self.link.run, found.state.snapshot()) if found.run_id else None

    async def delete(self) -> None:
        if self._requests is None:
            await self._open_connection()
        command = ("DEL", *self._keys.all, self._wake_key)
        await self._execute(self._request_connection(), *command, within=self._answer_timeout)

    def _request_connection(self) -> RedisConnection:
        if self._requests is None:
            raise explain_error(ConnectionError("not connected"), self._address)
        return self._requests


def _parse_url(url: str, options: dict[str, Any]) -> tuple[Callable[[], Any], str]:
    """Return a function that creates a connection, and the address for messages, without a
    password.
    """
    check_instance(url, str, "url")
    try:
        parsed: dict[str, Any] = dict(client.parse_url(url))
        kind: Any = parsed.pop("connection_class", client.Connection)
        defaults: dict[str, Any] = {"protocol": 2}
        for parent, its_defaults in (
            (client.Connection, _TCP_DEFAULTS),
            (client.SSLConnection, _TLS_DEFAULTS),
        ):
            defaults.update(its_defaults if issubclass(kind, parent) else {})
        chosen = {name: value for name, value in options.items() if value is not None}
        settings: dict[str, Any] = {
            **defaults,
            **parsed,
            **chosen,
            **_FIXED,
            "retry": Retry(NoBackoff(), 0),
        }
        for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
            # While connecting, the error of a file and that of a server that is away would look the
            # same.
            if (path := settings.get(name)) is not None and not os.access(path, os.R_OK):
                raise ValueError(
                    f"{name} is {os.fspath(path)!r}, and there is no such file that this process"
                    " may read"
                )
        new_connection: Callable[[], Any] = functools.partial(kind, **settings)
        new_connection()  # redis-py refuses unknown and invalid options here
    except (TypeError, ValueError, RedisError) as error:
        # Not the URL itself: there may be a password in it.
        raise InvalidArgumentError(
            f"this URL or an option of it is not one for Redis: {error}; give redis://host:6379,"
            " rediss:// for TLS, or unix:///path/to/socket"
        ) from error
    return new_connection, str(
        settings.get("path") or f"{settings.get('host', 'localhost')}:{settings.get('port', 6379)}"
    )
