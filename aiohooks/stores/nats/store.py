"""A step store in NATS with JetStream: for those who must not lose an acknowledged step when a server dies.

The state of a run is the newest message of one subject. It is changed by publishing the next one, which the server takes
only if nothing came in between; the server says each message it has taken again to whoever listens. So the server knows no
waiter and no consumer, and the whole state changes in one moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import ssl
from pathlib import Path
from typing import Any

from aiohooks._validate import check_instance, check_secs
from aiohooks.errors import InvalidArgumentError, StoreRefusedError, StoreUnavailableError
from aiohooks.stores._protocol import ENGINE_ERRORS, Answer, Request, Snapshot, damaged_error, logger
from aiohooks.stores.nats._commit import Commits
from aiohooks.stores.nats._connection import Address, Wire, parse_address
from aiohooks.stores.nats._stream import (
    EXPECTED,
    ForeignMessageError,
    Head,
    Names,
    NobodyAnswersError,
    StreamGoneError,
    checked,
    head_of,
    is_missing,
    parsed,
    wrong_sequence,
)
from aiohooks.stores.remote import RemoteStepStore

_GRACE_SECS = 1.0
"""How long the server may take to answer the question whether it is there, and a broken connection to close."""
_ANSWER_SECS = 5.0
_ELECTION_SECS = 10.0
"""How long a cluster may be without a leader before this counts as an outage."""


class NatsStepStore(RemoteStepStore):
    """A step store in NATS with JetStream; `pip install 'aiohooks[nats]'`, and nats-server 2.9 or newer.

    All runs of a server share one stream, which the first store makes. With `replicas=3` on a cluster of three servers no
    step that was acknowledged is lost when one of them dies.
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
        **remote: Any,
    ) -> None:
        """Does not connect yet.

        Args:
            url: `nats://host:4222`, or `tls://`, which accepts nothing but TLS; the servers of a cluster separated by
                commas, a user before the first one.
            run: the name of the run; see `SharedStepStore`.
            stream: the name of the stream, and the first word of its subjects.
            replicas: on how many servers the stream is kept, when it is made here: 1, 3 or 5.
            forget_after_secs: after how long a run that nobody writes to is deleted, when the stream is made here; no less than
                `lease_secs`. A publisher writes that often, a store that only waits does not.
            tls: certificates to trust and to show; left out, those that the system trusts. Asks for TLS as `tls://` does.
            tls_hostname: the name in the server's certificate, if it is not that in the URL.
            user: the user, with `password`.
            password: of the user.
            token: instead of a user.
            user_credentials: a .creds file.
            nkeys_seed: a file with the seed of an nkey.
            remote: see `RemoteStepStore`: heartbeat, connect_timeout, max_outage_secs, on_lost, lease_secs, join_grace_secs.
        """
        super().__init__(run=run, **remote)
        check_instance(tls, ssl.SSLContext, "tls=", optional=True)
        check_secs(forget_after_secs, "forget_after_secs", optional=True, positive=True)
        if forget_after_secs is not None and forget_after_secs < self._lease_secs:
            raise InvalidArgumentError(
                f"forget_after_secs is {forget_after_secs!r}; give no less than lease_secs, which is {self._lease_secs:g} s: "
                "a run that is in use would be deleted"
            )
        if type(replicas) is not int or replicas not in (1, 3, 5):
            raise InvalidArgumentError(f"replicas={replicas!r}: give 1, 3 or 5")
        address = parse_address(url)
        self._address = Address(address.servers, address.needs_tls or tls is not None)
        self._names = Names(stream, run)
        self._config = self._names.config(replicas, forget_after_secs)
        given = {
            "tls": tls or (ssl.create_default_context() if address.needs_tls else None),
            "tls_hostname": tls_hostname,
            "user": user or address.user,
            "password": password or address.password,
            "token": token or address.token,
            "user_credentials": None if user_credentials is None else str(user_credentials),
            "nkeys_seed": None if nkeys_seed is None else str(nkeys_seed),
        }
        self._options = {name: value for name, value in given.items() if value is not None} | {"name": f"aiohooks {run}"}
        self._others: list[str] = []
        self._wire: Wire | None = None
        self._commits = Commits(self._clock, self._process, self._fetch, self._publish, self._learnt, self._data_lost)
        self._answer_secs = min(max(self._heartbeat, _GRACE_SECS), _ANSWER_SECS)

    # The connection.

    async def _open_connection(self) -> None:
        wire = self._wire = Wire(self._address, self._clock, self._options)
        self._commits.restart()
        servers = list(self._address.servers)
        random.shuffle(servers)
        await wire.open([*servers, *(other for other in self._others if other not in servers)], self._connect_timeout)
        self._others = wire.others
        await self._find_stream(wire)

    async def _connect(self) -> Snapshot:
        await self._open_connection()
        wire = self._wired()
        await wire.listen(self._names.news, self._hear)
        await wire.listen(self._names.elected, self._elected)
        await self._commits.refresh(self._answer_secs)
        return self._commits.snapshot()

    async def _delete_run_once(self) -> None:
        checked(await self._api("PURGE", {"filter": self._names.subject}))

    async def _find_stream(self, wire: Wire) -> None:
        try:
            found = await self._api("INFO", {})
            if is_missing(found):
                made = await self._api("CREATE", self._config)
                found = made if "error" not in made else await self._api("INFO", {})
                checked(made if is_missing(found) else found)
        except NobodyAnswersError as error:
            if wire.has_jetstream:
                raise
            raise StoreRefusedError(f"{self._address} has no JetStream; start it with `nats-server -js -sd DIR`") from error
        self._names.check(checked(found)["config"])

    async def _watch(self) -> None:
        wire = self._wired()
        leaderless: float | None = None
        while True:
            await wire.quiet(self._heartbeat if leaderless is None else min(self._heartbeat, _GRACE_SECS))
            await wire.ping(_GRACE_SECS)
            try:
                await self._commits.refresh(_GRACE_SECS)
            except StreamGoneError:
                raise  # who connects makes another one
            except StoreUnavailableError as error:
                # The link is there, the stream is not: a new leader says so, and the link is kept for that.
                now = self._clock.now()
                if leaderless is None:
                    leaderless = now
                    logger.info("run %s: %s; waiting for a leader", self.run, error)
                if wire.broken is not None or now - leaderless > _ELECTION_SECS:
                    raise
            else:
                leaderless = None

    def _wired(self) -> Wire:
        if self._wire is None:
            raise StoreUnavailableError(f"run {self.run}: no connection to {self._address} at the moment")
        return self._wire

    async def _close_connection(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            await wire.close()

    async def _disconnect(self) -> None:
        if self._wire is not None and self._wire.broken is None and not self._forgotten:
            # Nobody will ask for these answers again.
            with contextlib.suppress(*ENGINE_ERRORS, TimeoutError):
                async with asyncio.timeout(_GRACE_SECS):
                    await self._commits.change(lambda state: state.forget(self._process, self._members.exit_writer), _GRACE_SECS)
        await super()._disconnect()

    # What is heard.

    def _hear(self, data: bytes, headers: dict[str, str], last: bool) -> None:
        if "Nats-Sequence" in headers:
            try:
                self._commits.hear(int(headers["Nats-Sequence"]), data, last)
            except ForeignMessageError:
                self._wired().doubt()  # who reads the newest message says so

    def _elected(self, data: bytes, headers: dict[str, str], last: bool) -> None:
        self._wired().doubt()
        self._wake_sleepers()

    def _learnt(self, head: Head, before: Head | None) -> None:
        if not self._opened:
            return  # the first snapshot is taken by who opens
        if before is None or before.life != head.life:
            self._observe_snapshot(self._commits.snapshot())
        else:
            self._observe(head.position)

    def _data_lost(self) -> None:
        if self._wire is not None:
            self._wire.fail(StoreUnavailableError(f"run {self.run}: the data of the run is gone from {self._address}"))

    # Asking.

    async def _request_once(self, request: Request) -> Answer:
        return await self._commits.change(lambda state: state.apply(request), self._answer_secs)

    async def _read_run_once(self) -> Snapshot:
        await self._commits.refresh(self._answer_secs)
        await self._commits.bury(self._answer_secs)
        return self._commits.snapshot()

    async def _api(self, what: str, body: dict[str, Any], secs: float | None = None) -> dict[str, Any]:
        return parsed(await self._wired().ask(self._names.api(what), json.dumps(body).encode(), secs or self._answer_secs))

    async def _fetch(self, secs: float) -> Head:
        reply = await self._api("MSG.GET", {"last_by_subj": self._names.subject}, secs)
        try:
            return head_of(reply)
        except ForeignMessageError as error:
            path, delete = self._names.subject, "purge that subject"
            raise damaged_error(self.run, path, found=str(error), expected="one that begins with b'1 '", delete=delete) from error

    async def _publish(self, data: bytes, after: int) -> int | None:
        wire = self._wired()
        try:
            reply = parsed(await wire.ask(self._names.subject, data, self._answer_secs, {EXPECTED: str(after)}))
        except NobodyAnswersError:
            wire.doubt()
            raise
        return None if wrong_sequence(reply) else int(checked(reply)["seq"])
