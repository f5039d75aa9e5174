"""A step store behind a connection: it connects again for ever, repeats what was not answered, and combines advances."""

from __future__ import annotations

import abc
import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from aiohooks._aio.clock import TimerHandle
from aiohooks._validate import check_secs
from aiohooks.errors import AiohooksError, StoreDamagedError, StoreRefusedError, StoreUnavailableError, another
from aiohooks.stores._protocol import Answer, Position, Request, Snapshot, logger
from aiohooks.stores.shared import Kind, SharedStepStore

T = TypeVar("T")
_PAUSE_SECS = 0.05, 5.0
"""Between two tries: the first one, and the longest."""


class _Call:
    """One caller's write, until it is answered."""

    __slots__ = ("amount", "answer", "kind")

    def __init__(self, kind: Kind, amount: int) -> None:
        self.kind: Kind = kind
        self.amount = amount
        # An error is a result as well: nobody may come to fetch it.
        self.answer: asyncio.Future[Position | Exception] = asyncio.get_running_loop().create_future()


class RemoteStepStore(SharedStepStore):
    """What all stores behind a connection have in common.

    The connection is made again whenever it is lost, after growing pauses with jitter; waits go on meanwhile, and writes are
    repeated until they are answered: each is done exactly once. `max_outage_secs` puts an end to both.

    For engines: the methods that follow do one thing once, and raise `StoreUnavailableError` when the connection fails or
    says no, `StoreDamagedError` when what they find is no run. Nothing is tried again after that one.

    `_watch` reports what it hears with `_observe_snapshot` and `_observe`.
    """

    def __init__(
        self,
        *,
        run: str,
        heartbeat: float = 15.0,
        connect_timeout: float = 10.0,
        max_outage_secs: float | None = None,
        **shared: Any,
    ) -> None:
        """Does not connect yet.

        Args:
            run: see `SharedStepStore`.
            heartbeat: after how many seconds of silence the connection that hears of changes is tried out: a link that is
                dead without a word is known within this time and a second more.
            connect_timeout: how many seconds the first connection may take, with all its tries.
            max_outage_secs: after how long an outage waits and writes end with `StoreUnavailableError`; None: they go on.
            shared: see `SharedStepStore`.
        """
        super().__init__(run=run, **shared)
        check_secs(heartbeat, "heartbeat", positive=True)
        check_secs(connect_timeout, "connect_timeout", positive=True)
        check_secs(max_outage_secs, "max_outage_secs", optional=True, positive=True)
        self._heartbeat = heartbeat
        self._connect_timeout = connect_timeout
        self._max_outage_secs = max_outage_secs
        self._link: asyncio.Task[None] | None = None
        self._away_since: float | None = None
        self._reconnected: dict[asyncio.Future[None], None] = {}
        self._calls: deque[_Call] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._outage: TimerHandle | None = None
        self._given_up = False
        self._damage: StoreDamagedError | None = None
        self._answers = 0

    # What an engine does.

    @abc.abstractmethod
    async def _open_connection(self) -> None:
        """Connects, and leaves the run alone."""

    @abc.abstractmethod
    async def _connect(self) -> Snapshot:
        """Connects, subscribes, and then reads the run, which it makes if it is not there."""

    @abc.abstractmethod
    async def _watch(self) -> None:
        """Reports positions and snapshots until the connection fails."""

    @abc.abstractmethod
    async def _request_once(self, request: Request) -> Answer:
        """Sends a request once; the engine knows a repeated one."""

    @abc.abstractmethod
    async def _read_run_once(self) -> Snapshot:
        """Reads the run once, after finding out which leases have run out."""

    @abc.abstractmethod
    async def _delete_run_once(self) -> None:
        """Deletes the run once, whatever it holds."""

    @abc.abstractmethod
    async def _close_connection(self) -> None:
        """Gives back the connection, also after a failed `_connect`; never raises for one that is broken."""

    # The connection.

    @property
    def outage_secs(self) -> float | None:
        """For how long the connection has been lost; None while it is there, or before it was made."""
        return None if self._away_since is None else self._clock.now() - self._away_since

    async def _open(self) -> None:
        began = self._clock.now()
        pause = _PAUSE_SECS[0]
        while True:
            try:
                snapshot = await self._connect()
            except StoreUnavailableError as error:
                await self._close_connection()
                if isinstance(error, StoreRefusedError) or self._clock.now() + pause - began > self._connect_timeout:
                    raise
                logger.info("run %s: %s; trying again", self.run, error)
                pause = await self._pause(pause)
            else:
                break
        self._observe_snapshot(snapshot)
        self._link = self._spawn(self._keep_link(), "connection")

    async def _keep_link(self) -> None:
        pause = _PAUSE_SECS[0]
        connected, since, got = True, self._clock.now(), self._got()
        while True:
            try:
                if not connected:
                    snapshot = await self._connect()
                    self._on_reconnect(snapshot)
                    connected, since, got = True, self._clock.now(), self._got()
                await self._watch()
                raise StoreUnavailableError(f"{self!r}: the engine ended the connection")
            except StoreUnavailableError as error:
                # One that fails as soon as it is made is tried less and less often; one that was of use, at once.
                if connected and (self._got() != got or self._clock.now() - since > _PAUSE_SECS[1]):
                    pause = _PAUSE_SECS[0]
                connected = False
                self._on_disconnect(error)
                await self._close_connection()
            except StoreDamagedError as error:
                logger.error("run %s: %s", self.run, error)
                self._damage = error
                self._waits.abort(error)
                await self._close_connection()
                self._wake_sleepers()
                return
            pause = await self._pause(pause)

    def _got(self) -> tuple[int, Position]:
        """Changes with whatever a connection is of use for: an answer, and news."""
        return self._answers, self._waits.latest

    async def _pause(self, secs: float) -> float:
        """Waits for a moment, not the same in all processes, and returns how long the next one is."""
        await self._backoff_sleep(secs * random.uniform(0.5, 1.0))
        return min(2 * secs, _PAUSE_SECS[1])

    async def _backoff_sleep(self, secs: float) -> None:
        """Until the connection is back, `secs` at most."""
        nap: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reconnected[nap] = None
        timer = self._clock.call_later(secs, lambda: None if nap.done() else nap.set_result(None))
        try:
            await nap
        finally:
            timer.cancel()
            del self._reconnected[nap]

    def _on_disconnect(self, error: StoreUnavailableError) -> None:
        if self._away_since is not None:
            logger.info("run %s: still away after %.0f s: %s", self.run, self.outage_secs, error)
            return
        self._away_since = self._clock.now()
        log = logger.info if self._forgotten else logger.warning
        log("run %s: the connection is lost, trying again: %s", self.run, error)
        if self._max_outage_secs is not None:
            self._outage = self._clock.call_later(self._max_outage_secs, self._give_up)

    def _give_up(self) -> None:
        self._given_up = True
        self._waits.abort(self._outage_error())
        self._wake_sleepers()

    def _outage_error(self) -> StoreUnavailableError:
        return StoreUnavailableError(f"run {self.run}: no connection for {self._max_outage_secs} s: {self!r}")

    def _on_reconnect(self, snapshot: Snapshot) -> None:
        logger.info("run %s: connected again after %.1f s", self.run, self.outage_secs or 0.0)
        self._away_since = None
        self._given_up = False
        if self._outage is not None:
            self._outage.cancel()
            self._outage = None
        self._waits.clear_failure()
        behind = snapshot.position < self._waits.latest
        self._observe_snapshot(snapshot)
        self._members.announce_again()
        if behind and not self._forgotten:
            logger.warning(
                "run %s: the engine came back at %s, behind %s: raised", self.run, snapshot.position, self._waits.latest
            )
            self._spawn(self._write("raise", 0), "raising an engine that came back empty")
        self._wake_sleepers()

    def _wake_sleepers(self) -> None:
        for nap in self._reconnected:
            if not nap.done():
                nap.set_result(None)

    async def _disconnect(self) -> None:
        if self._outage is not None:
            self._outage.cancel()
            self._outage = None
        self._away_since = None
        for call in self._calls:
            if not call.answer.done():
                call.answer.set_result(self._closed_error())
        self._calls.clear()
        self._wake_sleepers()  # of those who insist: they hear that it is closed
        await self._close_connection()

    async def _delete_run(self) -> None:
        if self._link is not None and self._damage is None:
            await self._retry(self._delete_run_once, lambda: True)
        else:  # no connection is kept to what is damaged
            await self._open_connection()
            await self._delete_run_once()

    # Asking.

    async def _read_run(self) -> Snapshot:
        return await self._retry(self._read_run_once, lambda: True)

    async def _request(self, request: Request) -> Answer:
        return await self._retry(lambda: self._request_once(request), lambda: True)

    async def _retry(self, ask: Callable[[], Awaitable[T]], wanted: Callable[[], bool]) -> T:
        """Asks until there is an answer, for as long as it is `wanted`."""
        pause = _PAUSE_SECS[0]
        while True:
            try:
                answer = await ask()
            except StoreRefusedError:
                raise  # it would say the same again
            except StoreUnavailableError:
                if self._waits.closed:
                    raise self._closed_error() from None
                if self._damage is not None:
                    raise another(self._damage) from None
                if self._given_up:
                    raise self._outage_error() from None
                if not wanted():
                    raise
            else:
                self._answers += 1
                return answer
            pause = await self._pause(pause)
            if self._waits.closed:
                raise self._closed_error()

    # Writing: what several tasks want at the same time is one request.

    async def _write(self, kind: Kind, amount: int) -> Position:
        call = _Call(kind, amount)
        self._calls.append(call)
        if self._writing is None:
            self._writing = self._spawn(self._write_all(), "writing")
        answer = await call.answer
        if isinstance(answer, Position):
            return answer
        raise answer

    async def _write_all(self) -> None:
        try:
            while self._calls:
                batch = [self._calls.popleft()]
                if batch[0].kind == "advance":
                    while self._calls and self._calls[0].kind == "advance":
                        batch.append(self._calls.popleft())
                # A caller that was cancelled before anything was sent has written nothing.
                batch = [call for call in batch if not call.answer.done()]
                if batch:
                    await self._write_batch(batch)
        finally:
            self._writing = None

    async def _write_batch(self, batch: list[_Call]) -> None:
        write = self._next_write(batch[0].kind, sum(call.amount for call in batch))
        try:
            answer = await self._retry(lambda: self._request_once(write), lambda: any(not call.answer.done() for call in batch))
            epoch, step = self._written(write, answer)
        except asyncio.CancelledError:  # the store is closed
            for call in batch:
                if not call.answer.done():
                    call.answer.set_result(self._closed_error())
            raise
        except Exception as error:  # also one that no engine should raise: who waits would wait for ever
            for call in batch:
                if not call.answer.done():
                    call.answer.set_result(another(error) if isinstance(error, AiohooksError) else error)
            return
        if write.kind == "advance":
            step -= write.amount
        for call in batch:
            step += call.amount if write.kind == "advance" else 0
            if not call.answer.done():
                call.answer.set_result(Position(epoch, step))
