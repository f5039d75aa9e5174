"""A step store in NATS with JetStream, for runs that must not lose an acknowledged step when a server dies.

The state of a run is the latest message of one subject. An update publishes the next message, which the server accepts only
if no other one came first; the server then republishes it to the processes of the run. So the server keeps no waiters and
no consumers, and the whole state changes in one instant.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import re
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import quote

from aiohooks._validate import check_instance, check_secs, checked_int
from aiohooks.errors import InvalidArgumentError, StoreRefusedError, StoreUnavailableError
from aiohooks.stores._protocol import ENGINE_ERRORS, Answer, Request, RunReport, Snapshot, damaged_error, logger, report_of
from aiohooks.stores._run_state import RunState
from aiohooks.stores.engine import Engine, EngineLink
from aiohooks.stores.nats._compare_and_set import NO_MESSAGE, CompareAndSet, ForeignMessageError, LatestMessage, decode_message
from aiohooks.stores.nats._connection import (
    MESSAGE_NOT_FOUND,
    STREAM_NOT_FOUND,
    WRONG_SEQUENCE,
    Address,
    NatsConnection,
    NoResponderError,
    StreamGoneError,
    check_reply,
    error_code,
    parse_address,
    parse_reply,
)
from aiohooks.stores.shared import SharedStepStore

_PING_SECS = 1.0
"""How long the server may take to answer a ping, and a store to close."""
_ANSWER_SECS = 5.0
_ELECTION_SECS = 10.0
"""How long a cluster may be without a leader before this counts as an outage."""
_EXPECTED_SEQUENCE = "Nats-Expected-Last-Subject-Sequence"
_LONGEST_TOKEN = 500
_HARMFUL_SETTINGS = {
    "mirror": "nothing could be written",
    "sources": "other streams would write into the runs",
    "subject_transform": "a run's message would get another subject",
    "sealed": "nothing could be written",
    "no_ack": "no write would be acknowledged",
    "deny_purge": "no run could be deleted",
    "max_msgs": "a new run would delete another one, or be refused",
    "max_bytes": "a write would delete another run, or be refused",
    "max_msg_size": "a longer message would be refused",
    "discard_new_per_subject": "a second write would be refused",
    "subject_delete_marker_ttl": "a run would be replaced by a marker",
    "allow_msg_counter": "every write would be refused",
}
"""Settings of a stream that must have no value, and what they would do."""


class RunSubjects:
    """The subjects of a run, in a stream that all runs share."""

    def __init__(self, stream: str, run: str) -> None:
        if not isinstance(stream, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", stream):
            raise InvalidArgumentError(f"stream={stream!r}: give a name of letters, digits, _ and -")
        # No dot, wildcard or space; different runs stay different.
        token = quote(run, safe="").replace(".", "%2E")
        if len(token) > _LONGEST_TOKEN:
            raise InvalidArgumentError(f"run={run[:50]!r}...: too long for a NATS subject; give a shorter name")
        self.stream = stream
        self.state: str = f"{stream}.run.{token}"
        """Where the run's message is published."""
        self.republished: str = f"{stream}.news.{token}"
        """Where the server republishes each message that it has stored."""
        self.elections: str = f"$JS.EVENT.ADVISORY.STREAM.LEADER_ELECTED.{stream}"
        """Where a cluster announces a new leader of the stream."""
        self._required_config: dict[str, Any] = {
            "subjects": [f"{stream}.run.*"],
            "retention": "limits",
            "max_msgs_per_subject": 1,
            "republish": {"src": f"{stream}.run.*", "dest": f"{stream}.news.{{{{wildcard(1)}}}}"},
        }

    def api(self, request: str) -> str:
        """Return the subject of a JetStream request about the stream."""
        return f"$JS.API.STREAM.{request}.{self.stream}"

    def stream_config(self, replicas: int, forget_after_secs: float | None) -> dict[str, Any]:
        """Return the configuration of a new stream."""
        return {
            "name": self.stream,
            **self._required_config,
            "storage": "file",
            "discard": "old",
            "num_replicas": replicas,
            "max_msgs": -1,
            "max_bytes": -1,
            "max_consumers": -1,
            "max_age": round((forget_after_secs or 0) * 1e9),
        }

    def check_stream(self, config: dict[str, Any], lease_secs: float) -> None:
        """Check the configuration of an existing stream.

        Raises:
            StoreRefusedError: it is not a stream of step stores with leases of this time.
        """
        wrong = [
            f"{name} is {found!r} and not {required!r}"
            for name, required in self._required_config.items()
            if (found := config.get(name)) != required
        ]
        wrong += [
            f"{name} is {found!r}: {effect}"
            for name, effect in _HARMFUL_SETTINGS.items()
            if (found := config.get(name)) and found != -1
        ]
        if 0 < (age := (config.get("max_age") or 0) / 1e9) < lease_secs:
            wrong.append(f"max_age is {age:g} s: a run in use would be deleted, whose leases are renewed within {lease_secs:g} s")
        if wrong:
            raise StoreRefusedError(
                f"the stream {self.stream} is not one for step stores: its {'; its '.join(wrong)}; take another name with "
                "stream=, or change or delete that one"
            )


class NatsStepStore(SharedStepStore):
    """A step store in NATS with JetStream, on nats-server 2.9 or newer; `pip install 'aiohooks[nats]'`.

    All runs of a server share one stream, which the first store creates. With `replicas=3` on a cluster of three servers no
    acknowledged step is lost when one of them dies.
    """

    def __init__(
        self,
        url: str = "nats://127.0.0.1:4222",
        *,
        run: str = "default",
        stream: str = "AIOHOOKS",
        replicas: int = 1,
        forget_after_secs: float | None = None,
        tls: ssl.SSLContext | None = None,
        tls_hostname: str | None = None,
        user: str | None = None,
        password: str | None = None,
        token: str | None = None,
        user_credentials: str | Path | None = None,
        nkeys_seed: str | Path | None = None,
        **shared: Any,
    ) -> None:
        """Create the store; it connects when it is opened.

        Args:
            url: `nats://host:4222`, or `tls://`, which accepts nothing but TLS; the servers of a cluster separated by
                commas, a user before the first one.
            run: the name of the run; see `SharedStepStore`.
            stream: the name of the stream, and the first word of its subjects.
            replicas: on how many servers a stream created by this store is kept: 1, 3 or 5.
            forget_after_secs: after how many seconds without a write a stream created by this store deletes a run; no less
                than `lease_secs`. A publisher writes that often, a store that only waits does not.
            tls: certificates to trust and to show; None trusts the system's. Requires TLS as `tls://` does.
            tls_hostname: the name in the server's certificate, if it is not that in the URL.
            user: the user, with `password`.
            password: of the user.
            token: instead of a user.
            user_credentials: a .creds file.
            nkeys_seed: a file with the seed of an nkey.
            shared: see `SharedStepStore`.

        Raises:
            InvalidArgumentError: the URL or an option is invalid.
        """
        check_instance(tls, ssl.SSLContext, "tls=", optional=True)
        check_secs(forget_after_secs, "forget_after_secs", optional=True, positive=True)
        replicas = checked_int(replicas, "replicas", expected="1, 3 or 5")
        if replicas not in (1, 3, 5):
            raise InvalidArgumentError(f"replicas={replicas!r}: give 1, 3 or 5")
        address = parse_address(url)
        credentials = {
            "tls": tls or (ssl.create_default_context() if address.needs_tls else None),
            "tls_hostname": tls_hostname,
            "user": user or address.user,
            "password": password or address.password,
            "token": token or address.token,
            "user_credentials": None if user_credentials is None else str(user_credentials),
            "nkeys_seed": None if nkeys_seed is None else str(nkeys_seed),
        }
        options = {name: value for name, value in credentials.items() if value is not None}
        address = Address(address.servers, address.needs_tls or tls is not None)
        super().__init__(NatsEngine(address, options, stream, replicas, forget_after_secs), run=run, **shared)


class NatsEngine(Engine):
    """A run as the latest message of a subject, and one connection."""

    def __init__(
        self, address: Address, options: dict[str, Any], stream: str, replicas: int, forget_after_secs: float | None
    ) -> None:
        """Connect later; `options` are the credentials, for the client."""
        self._address = address
        self._options = options
        self._stream = stream
        self._replicas = replicas
        self._forget_after_secs = forget_after_secs
        self._discovered_servers: list[str] = []
        self._connection: NatsConnection | None = None
        self._is_connected = False
        self._was_connected = False
        self._is_deleted = False
        self._writes_fail = False
        self._found_foreign = False  # a message that is not the server's

    def attach(self, link: EngineLink) -> None:
        super().attach(link)
        secs = self._forget_after_secs
        if secs is not None and secs < link.lease_secs:
            raise InvalidArgumentError(
                f"forget_after_secs is {secs!r}; give no less than lease_secs, which is {link.lease_secs:g} s: "
                "a run that is in use would be deleted"
            )
        self._subjects = RunSubjects(self._stream, link.run)
        self._stream_config = self._subjects.stream_config(self._replicas, secs)
        self._options |= {"name": f"aiohooks {link.run}"}
        self._answer_secs = min(max(link.heartbeat, _PING_SECS), _ANSWER_SECS)
        self._state = CompareAndSet(
            link.clock,
            fetch=self._fetch_message,
            publish=self._publish_message,
            on_latest=self._on_latest,
            on_data_lost=self._on_data_lost,
            recover=lambda state, backup: state.recover(link.process, link.known(), backup.answers),
        )

    # The connection.

    async def _open_connection(self) -> None:
        connection = self._connection = NatsConnection(self._address, self.link.clock, self._options)
        self._state.reset()
        await connection.open(self._servers(), self.link.connect_timeout)
        self._discovered_servers = connection.discovered_servers
        await self._ensure_stream()

    def _servers(self) -> list[str]:
        """Return the servers to try, those of the URL in a random order first."""
        servers = list(self._address.servers)
        random.shuffle(servers)
        return servers + [server for server in self._discovered_servers if server not in servers]

    async def connect(self) -> Snapshot:
        await self._open_connection()
        connection = self._current_connection()
        await connection.subscribe(self._subjects.republished, self._on_message)
        await connection.subscribe(self._subjects.elections, self._on_election)
        await self._state.refresh(self._answer_secs)
        if self._state.data_lost or self._writes_fail:  # this fails where the server still takes no writes
            await self._state.update(RunState.begin_revision, self._answer_secs)
        self._is_connected = self._was_connected = True
        return self._state.snapshot()

    async def delete(self) -> None:
        self._is_deleted = True
        if self._connection is None:
            await self._open_connection()
        check_reply(await self._request_api("PURGE", {"filter": self._subjects.state}))

    async def _ensure_stream(self) -> None:
        """Check the stream, or create it."""
        found = await self._request_api("INFO", {})
        if error_code(found) == STREAM_NOT_FOUND:
            created = await self._request_api("CREATE", self._stream_config)
            # Another process may have created it meanwhile.
            found = created if "error" not in created else await self._request_api("INFO", {})
            check_reply(created if error_code(found) == STREAM_NOT_FOUND else found)
        try:
            self._subjects.check_stream(check_reply(found)["config"], self.link.lease_secs)
        except StoreRefusedError as error:
            if self._was_connected:  # it was changed meanwhile
                self.link.fail(error)
            raise

    async def watch(self) -> None:
        connection, heartbeat = self._current_connection(), self.link.heartbeat
        leaderless_since: float | None = None
        while True:
            await connection.wait_idle(heartbeat if leaderless_since is None else min(heartbeat, _PING_SECS))
            await connection.ping(_PING_SECS)
            try:
                await self._state.refresh(_PING_SECS)
            except StreamGoneError:
                raise  # connecting again creates another one
            except StoreUnavailableError as error:
                # The server answers, the stream does not. The new leader is announced on this connection: keep it.
                now = self.link.clock.now()
                if leaderless_since is None:
                    leaderless_since = now
                    logger.info("run %s: %s; waiting for a leader", self.link.run, error)
                if connection.broken_by is not None or now - leaderless_since > _ELECTION_SECS:
                    raise
            else:
                leaderless_since = None

    def _current_connection(self) -> NatsConnection:
        if self._connection is None:
            raise StoreUnavailableError(f"run {self.link.run}: not connected to {self._address}")
        return self._connection

    async def disconnect(self) -> None:
        self._is_connected = False
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def close(self) -> None:
        if self._connection is not None and self._connection.broken_by is None and not self._is_deleted:
            # This process will not repeat a request any more: its answers need not be kept.
            with contextlib.suppress(*ENGINE_ERRORS, TimeoutError):
                async with asyncio.timeout(_PING_SECS):
                    await self._state.update(lambda state: state.forget(self.link.process), _PING_SECS)
        await self.disconnect()

    # Messages.

    def _on_message(self, data: bytes, headers: dict[str, str], is_last: bool) -> None:
        if "Nats-Sequence" in headers:
            try:
                self._state.receive(int(headers["Nats-Sequence"]), data, is_last)
            except (ForeignMessageError, ValueError) as error:
                log = logger.info if self._found_foreign else logger.warning
                log("run %s: ignored what others have published to %s: %s", self.link.run, self._subjects.republished, error)
                self._found_foreign = True
                self._current_connection().check_now()  # reading the latest message raises it if it is damage

    def _on_election(self, data: bytes, headers: dict[str, str], is_last: bool) -> None:
        self._current_connection().check_now()
        self.link.retry_now()

    def _on_latest(self, latest: LatestMessage, before: LatestMessage | None) -> None:
        if not self._is_connected or self._state.data_lost:
            return  # connecting observes the first snapshot
        if before is None or before.revision_key != latest.revision_key:
            self.link.observe_snapshot(self._state.snapshot())
        else:
            self.link.observe(latest.position)

    def _on_data_lost(self) -> None:
        if self._connection is not None:
            self._connection.fail(self._data_lost_error())

    def _data_lost_error(self) -> StoreUnavailableError:
        return StoreUnavailableError(f"run {self.link.run}: the data of the run is gone from {self._address}")

    # Requests.

    async def request(self, request: Request) -> Answer:
        return await self._state.update(lambda state: state.apply(request), self._answer_secs)

    async def read(self) -> Snapshot:
        await self._state.refresh(self._answer_secs)
        if self._state.data_lost:
            raise self._data_lost_error()
        return self._state.snapshot()

    async def _request_api(
        self, request: str, body: dict[str, Any], secs: float = 0.0, connection: NatsConnection | None = None
    ) -> dict[str, Any]:
        connection = connection or self._current_connection()
        data = json.dumps(body).encode()
        try:
            return parse_reply(await connection.request(self._subjects.api(request), data, secs or self._answer_secs))
        except NoResponderError as error:
            if connection.has_jetstream:
                raise
            hint = "start it with `nats-server -js -sd DIR`"
            raise StoreRefusedError(f"{self._address} has no JetStream; {hint}") from error

    async def _fetch_message(self, secs: float) -> LatestMessage:
        return self._latest_message(await self._request_api("MSG.GET", {"last_by_subj": self._subjects.state}, secs))

    def _latest_message(self, reply: dict[str, Any]) -> LatestMessage:
        """Return the message in a reply to MSG.GET."""
        if error_code(reply) == MESSAGE_NOT_FOUND:
            return NO_MESSAGE
        message = check_reply(reply)["message"]
        try:
            return decode_message(int(message["seq"]), base64.b64decode(message.get("data") or ""))
        except ForeignMessageError as error:
            raise damaged_error(
                self.link.run,
                self._subjects.state,
                found=str(error),
                expected="one that begins with b'1 '",
                delete="purge that subject",
            ) from error

    async def inspect(self) -> RunReport | None:
        connection = NatsConnection(self._address, self.link.clock, self._options)
        body = {"last_by_subj": self._subjects.state}
        try:
            await connection.open(self._servers(), self.link.connect_timeout)
            reply = await self._request_api("MSG.GET", body, connection=connection)
            if error_code(reply) == STREAM_NOT_FOUND:  # no store was ever opened there
                return None
            latest = self._latest_message(reply)
        finally:
            await connection.close()
        return None if latest is NO_MESSAGE else report_of(self.link.run, latest.state.snapshot())

    async def _publish_message(self, data: bytes, after: int) -> int | None:
        """Publish the run's next message, and return its number; None if `after` is not the number of the latest one."""
        connection = self._current_connection()
        headers = {_EXPECTED_SEQUENCE: str(after)}
        try:
            reply = parse_reply(await connection.request(self._subjects.state, data, self._answer_secs, headers))
        except NoResponderError:
            connection.check_now()
            raise
        if error_code(reply) in WRONG_SEQUENCE:
            return None
        try:
            number = int(check_reply(reply)["seq"])
        except StoreRefusedError:
            raise
        except StoreUnavailableError as error:
            # A server that is full still answers reads. It counts as lost until it takes writes again: leases are not judged.
            self._writes_fail = True
            connection.fail(error)
            raise
        self._writes_fail = False
        return number
