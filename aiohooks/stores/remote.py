"""The base of step stores behind a connection: it reconnects, repeats unanswered requests, and combines advances."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import functools
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, TypeVar

from aiohooks._aio.backoff import Backoff
from aiohooks._aio.cancel import wait_done
from aiohooks._aio.clock import TimerHandle, wake, wake_after
from aiohooks._aio.opening import wait_for_others
from aiohooks._validate import check_secs
from aiohooks.errors import AiohooksError, StoreDamagedError, StoreRefusedError, StoreUnavailableError, copy_error
from aiohooks.stores._protocol import Answer, EngineError, Position, Request, Snapshot, WriteKind, logger
from aiohooks.stores._waiting import resolve
from aiohooks.stores.report import RunReport
from aiohooks.stores.shared import SharedStepStore

CERTIFICATE_HINTS = (
    ("certificate has expired", "it has expired; renew it on the server"),
    ("certificate is not yet valid", "it is not valid yet; is the clock of this machine right?"),
    ("certificate is not valid for", "it is for another name; give a name that is in it as the host"),
)
"""What to do about a server's certificate, by a part of the text of its error."""

T = TypeVar("T")
_BACKOFF = Backoff(initial_secs=0.05, max_secs=5.0)


class _PendingWrite:
    """One caller's write, until it is answered."""

    __slots__ = ("amount", "answer", "kind")

    def __init__(self, kind: WriteKind, amount: int) -> None:
        self.kind: WriteKind = kind
        self.amount = amount
        # An error is a result, too: a cancelled caller does not fetch it.
        self.answer: asyncio.Future[Position | Exception] = asyncio.get_running_loop().create_future()


class RemoteStepStore(SharedStepStore):
    """The base of stores behind a connection.

    A lost connection is made again, after growing pauses with jitter; waits continue meanwhile, and requests are repeated
    until they are answered: each takes effect exactly once. `max_outage_secs` bounds both.

    For engines: each of the following methods does one thing once. It raises `StoreUnavailableError` when the connection fails
    or the engine refuses, `StoreDamagedError` when what it finds is no run. After a `StoreDamagedError` nothing is repeated.
    `_watch` reports to `_observe_snapshot` and `_observe`.
    """

    _loss_note: ClassVar[str] = "; advances of processes that have not seen each other's since the loss may count once"
    """What may be wrong with the step after the engine has lost its data."""

    def __init__(
        self,
        *,
        run: str,
        heartbeat: float = 15.0,
        connect_timeout: float = 10.0,
        max_outage_secs: float | None = None,
        **shared: Any,
    ) -> None:
        """Check the options; connect later.

        Args:
            run: see `SharedStepStore`.
            heartbeat: after how many seconds of silence the connection for notifications is tested: one that is dead without
                a signal is detected within this time and a second more.
            connect_timeout: how many seconds the first connection may take, with all its attempts.
            max_outage_secs: after how long an outage waits and writes end with `StoreUnavailableError`; None: they continue.
            shared: see `SharedStepStore`.
        """
        super().__init__(run=run, **shared)
        check_secs(heartbeat, "heartbeat", positive=True)
        check_secs(connect_timeout, "connect_timeout", positive=True)
        check_secs(max_outage_secs, "max_outage_secs", optional=True, positive=True)
        self._heartbeat = heartbeat
        self._connect_timeout = connect_timeout
        self._max_outage_secs = max_outage_secs
        self._keeping_connection: asyncio.Task[None] | None = None
        self._disconnected_at: float | None = None
        self._sleepers: set[asyncio.Future[None]] = set()
        self._pending_writes: deque[_PendingWrite] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._outage_limit: TimerHandle | None = None
        self._failure: EngineError | None = None  # what ends all calls and waits; for good if it is damage
        self._answers = 0

    # What an engine implements.

    @abc.abstractmethod
    async def _open_connection(self) -> None:
        """Connect, and leave the run alone."""

    @abc.abstractmethod
    async def _connect(self) -> Snapshot:
        """Connect, subscribe, and then read the run; make the run if it is not there.

        If it is another one than before (`Snapshot.run_id`), the engine has lost its data: first it gets `_known()`, by
        `RunState.recover`. Requests and reports of a run with another id than that must fail.
        """

    @abc.abstractmethod
    async def _watch(self) -> None:
        """Report positions and snapshots until the connection fails."""

    @abc.abstractmethod
    async def _request_once(self, request: Request) -> Answer:
        """Send a request once; the engine recognizes a repeated one."""

    @abc.abstractmethod
    async def _read_run_once(self) -> Snapshot:
        """Read the run once."""

    @abc.abstractmethod
    async def _inspect_once(self) -> RunReport | None:
        """Read the run over a connection of its own, which is closed afterwards; change nothing."""

    @abc.abstractmethod
    async def _delete_run_once(self) -> None:
        """Delete the run once, whatever it holds."""

    @abc.abstractmethod
    async def _close_connection(self) -> None:
        """Close the connection, also after a failed `_connect`; never raise for a broken one."""

    # The connection.

    @property
    def outage_secs(self) -> float | None:
        """For how long the connection has been lost; None while it is there, or before it was made."""
        return None if self._disconnected_at is None else self._clock.now() - self._disconnected_at

    async def _open(self) -> None:
        async def connect() -> Snapshot:
            try:
                return await self._connect()
            except StoreUnavailableError:
                await self._close_connection()
                raise

        self._observe_snapshot(await self._retry_connecting(connect))
        self._keeping_connection = self._spawn(self._keep_connection(), "connection")

    async def _inspect(self) -> RunReport | None:
        async def inspect() -> RunReport | None:
            self._check_not_closing()
            return await self._inspect_once()

        return await self._retry_connecting(inspect)

    async def _retry_connecting(self, connect: Callable[[], Awaitable[T]]) -> T:
        """Call `connect` until it succeeds, within `connect_timeout` seconds; the last error is raised."""
        began, attempt = self._clock.now(), 0
        while True:
            try:
                return await connect()
            except StoreUnavailableError as error:
                attempt += 1
                pause = _BACKOFF.pause_secs(attempt)
                if isinstance(error, StoreRefusedError) or self._clock.now() + pause - began > self._connect_timeout:
                    raise
                logger.info("run %s: %s; trying again", self.run, error)
            await self._backoff_sleep(pause)

    async def _keep_connection(self) -> None:
        attempt, connected = 0, True
        since, activity = self._clock.now(), self._activity()
        while True:
            try:
                if not connected:
                    snapshot = await self._connect()
                    self._on_reconnect(snapshot)
                    connected = True
                    since, activity = self._clock.now(), self._activity()
                await self._watch()
                raise StoreUnavailableError(f"{self!r}: the engine ended the connection")
            except StoreUnavailableError as error:
                # A connection that fails as soon as it is made is retried less and less often; one that was of use, immediately.
                if connected and (self._activity() != activity or self._clock.now() - since > _BACKOFF.max_secs):
                    attempt = 0
                connected = False
                if not self._is_damaged:
                    self._on_disconnect(error)
                await self._close_connection()
            except StoreDamagedError as error:
                self._end_by_damage(error)
                await self._close_connection()
            if self._is_damaged:
                return
            attempt += 1
            await self._backoff_sleep(self._pause_secs(attempt))

    def _end_by_damage(self, error: StoreDamagedError) -> None:
        """End all calls and waits, and the connection: whoever finds that what is there is no run, finds it for all."""
        if not self._is_damaged:
            logger.error("run %s: %s", self.run, error)
            self._end_all(error)
            self._spawn(self._close_connection(), "closing the connection to a damaged run")

    @property
    def _is_damaged(self) -> bool:
        return isinstance(self._failure, StoreDamagedError)

    def _end_all(self, error: EngineError) -> None:
        """End calls and waits with `error`: for good if it is damage, otherwise until a connection can be made."""
        if not self._is_damaged:
            self._failure = error
            self._abort_waits(error)
            self._wake_sleepers()

    def _pause_secs(self, attempt: int) -> float:
        """Return the pause before an attempt; a process with a lease makes one before the lease can run out."""
        return min(_BACKOFF.pause_secs(attempt), self._members.renewal_secs or math.inf)

    def _activity(self) -> tuple[int, Position]:
        """Return a value that changes with every use of the connection: an answer, or a new position."""
        return self._answers, self._waits.latest

    async def _backoff_sleep(self, secs: float) -> None:
        """Wait until the connection is back, `secs` at most."""
        sleeper: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.add(sleeper)
        timer = wake_after(sleeper, secs, self._clock)
        try:
            with self._outages.outage():
                await sleeper
        finally:
            timer.cancel()
            self._sleepers.discard(sleeper)

    def _wake_sleepers(self) -> None:
        for sleeper in self._sleepers:
            wake(sleeper)

    def _on_disconnect(self, error: StoreUnavailableError) -> None:
        if self._disconnected_at is not None:
            logger.info("run %s: still disconnected after %.0f s: %s", self.run, self.outage_secs, error)
            return
        self._disconnected_at = self._clock.now()
        log = logger.info if self._forgotten else logger.warning
        log("run %s: the connection is lost, trying again: %s", self.run, error)
        if self._max_outage_secs is not None:
            late = StoreUnavailableError(f"run {self.run}: no connection for {self._max_outage_secs} s: {self!r}")
            self._outage_limit = self._clock.call_later(self._max_outage_secs, functools.partial(self._end_all, late))

    def _on_reconnect(self, snapshot: Snapshot) -> None:
        logger.info("run %s: connected again after %.1f s", self.run, self.outage_secs or 0.0)
        self._end_outage()
        self._failure = None
        self._waits.clear_failure()
        self._leases.restart()
        known = self._snapshot
        if known.run_id not in ("", snapshot.run_id):
            logger.warning("run %s: the engine has lost its data; it gets what is known here%s", self.run, self._loss_note)
            self._watcher.hold(max([self._lease_secs, *(member.ttl for member in known.members)]))
            self._members.repeat_last_exit()
        self._observe_snapshot(snapshot)
        self._announce_again()
        self._wake_sleepers()

    def _end_outage(self) -> None:
        self._disconnected_at = None
        if self._outage_limit is not None:
            self._outage_limit.cancel()
            self._outage_limit = None

    async def _disconnect(self) -> None:
        self._end_outage()
        for write in self._pending_writes:
            resolve(write.answer, self._closed_error())
        self._pending_writes.clear()
        self._wake_sleepers()  # they find the store closed
        await self._close_connection()

    async def _delete_run(self) -> None:
        if self._keeping_connection is not None:
            with contextlib.suppress(StoreDamagedError):  # there is no connection to a damaged run
                return await self._retry(self._delete_run_once)
            self._keeping_connection.cancel()
            await wait_done([self._keeping_connection], None)
        await self._open_connection()
        await self._delete_run_once()

    # Requests.

    async def _read_run(self) -> Snapshot:
        snapshot = await self._retry(self._read_run_once)
        self._leases.observe(snapshot.members)
        if expired := self._leases.expired():
            try:
                for request in expired:
                    self._check_connected()
                    await self._request_once(request)
            except StoreRefusedError:
                raise
            except StoreUnavailableError:
                # Not repeated: what was found before an outage says nothing after it, when all members are announced again.
                self._leases.restart()
            snapshot = await self._retry(self._read_run_once)
        return snapshot

    async def _request(self, request: Request) -> Answer:
        return await self._retry(functools.partial(self._request_once, request))

    async def _retry(self, ask: Callable[[], Awaitable[T]], writes: list[_PendingWrite] | None = None) -> T:
        """Call `ask` until there is an answer, or until no caller waits for one of `writes` any more."""
        attempt = 0
        while True:
            try:
                self._check_connected()
                answer = await ask()
            except StoreRefusedError:
                raise  # it would be refused again
            except StoreDamagedError as error:
                self._end_by_damage(error)
                raise
            except StoreUnavailableError:
                if self._waits.closed:
                    raise self._closed_error() from None
                if self._failure is not None:
                    raise copy_error(self._failure) from None
                if writes is not None and all(write.answer.done() for write in writes):
                    raise
            else:
                self._answers += 1
                return answer
            attempt += 1
            await wait_for_others(self._backoff_sleep(self._pause_secs(attempt)))
            if self._waits.closed:
                raise self._closed_error()

    def _check_connected(self) -> None:
        """Raise while a connection is made: the engine may have an older copy of the run until `_connect` is complete."""
        if self._disconnected_at is not None:
            raise StoreUnavailableError(f"run {self.run}: not connected: {self!r}")

    # Writing: concurrent advances are combined into one request.

    async def _write(self, kind: WriteKind, amount: int) -> Position:
        write = _PendingWrite(kind, amount)
        self._pending_writes.append(write)
        if self._writing is None:
            self._writing = self._spawn(self._write_all(), "writing")
        try:
            await self._outages.wait_in_opening(write.answer)
            answer = await write.answer
        finally:
            write.answer.cancel()  # a stop has ended the wait
        if isinstance(answer, Position):
            return answer
        raise answer

    async def _write_all(self) -> None:
        pending = self._pending_writes
        try:
            while pending:
                batch = [pending.popleft()]
                if batch[0].kind == "advance":
                    while pending and pending[0].kind == "advance":
                        batch.append(pending.popleft())
                # A caller that was cancelled before anything was sent has written nothing.
                batch = [write for write in batch if not write.answer.done()]
                if batch:
                    await self._write_batch(batch)
        finally:
            self._writing = None

    async def _write_batch(self, batch: list[_PendingWrite]) -> None:
        write = self._next_write(batch[0].kind, sum(one.amount for one in batch))
        try:
            answer = await self._retry(functools.partial(self._request_once, write), batch)
            epoch, step = self._written(write, answer)
        except asyncio.CancelledError:  # the store is closed
            for one in batch:
                resolve(one.answer, self._closed_error())
            raise
        except Exception as error:  # also one that no engine should raise: the callers would wait indefinitely
            for one in batch:
                resolve(one.answer, copy_error(error) if isinstance(error, AiohooksError) else error)
            return
        if write.kind == "advance":
            step -= write.amount
        for one in batch:
            step += one.amount if write.kind == "advance" else 0
            resolve(one.answer, Position(epoch, step))
