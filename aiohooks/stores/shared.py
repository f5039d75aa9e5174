"""Step stores whose run is outside this process, in an engine: opening, outages, leases, the
chief's term, combined writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import os
import secrets
import socket
from asyncio import get_running_loop
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, Literal, NoReturn, Self, TypeVar

from aiohooks._aio.cancel import new_task, shielded, wait_done
from aiohooks._aio.clock import NO_TIMER, TimerHandle, Waiters, current_clock, monotonic_now
from aiohooks._aio.fork import call_after_fork
from aiohooks._aio.waiters import resolve
from aiohooks._aio.waits import Backoff, Outages, wait_for_others
from aiohooks._diagnostics import Awaited, secs_text
from aiohooks._validate import check_choice, check_secs
from aiohooks.errors import (
    AiohooksError,
    InvalidArgumentError,
    StaleTermError,
    StoreClosedError,
    StoreDamagedError,
    StoreRefusedError,
    StoreResetError,
    StoreUnavailableError,
    copy_error,
)
from aiohooks.stores._membership import LeaseWatch, Members, RunWatcher
from aiohooks.stores._protocol import (
    ENGINE_ERRORS,
    MAX_STEP,
    Answer,
    EngineError,
    Lead,
    Mark,
    Member,
    Position,
    Request,
    RunReport,
    Snapshot,
    Term,
    Write,
    WriteKind,
    checked_step,
    logger,
)
from aiohooks.stores.base import OPEN_BY_URL, StepStore
from aiohooks.stores.engine import Engine, EngineLink
from aiohooks.stores.publishers import Publisher

T = TypeVar("T")
_CLOSE_SECS = 5.0
"""How long closing waits for the engine; leases that could not be given back run out."""
_CONNECT_BACKOFF = Backoff(initial_secs=0.05, max_secs=5.0)
_ANNOUNCE_BACKOFF = Backoff(initial_secs=0.1, max_secs=5.0)

OnLost = Literal["raise", "keep"]


class _PendingWrite:
    """One caller's write, until it is answered."""

    __slots__ = ("amount", "answer", "kind")

    def __init__(self, kind: WriteKind, amount: int) -> None:
        self.kind: WriteKind = kind
        self.amount = amount
        # An error is a result, too: a cancelled caller does not fetch it.
        self.answer: asyncio.Future[Position | Exception] = get_running_loop().create_future()


class _Job:
    """Work that a task of the store does when it is wanted, one run at a time."""

    def __init__(
        self,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        work: Callable[[], Coroutine[Any, Any, None]],
        what: str,
    ) -> None:
        self.task: asyncio.Task[None] | None = None
        self._spawn = spawn
        self._work = work
        self._what = what

    def start(self) -> asyncio.Task[None]:
        """Start the work unless it is being done; return its task."""
        if self.task is None:
            self.task = self._spawn(self._run(), self._what)
        return self.task

    async def _run(self) -> None:
        try:
            await self._work()
        finally:
            self.task = None


class SharedStepStore(StepStore):
    """A store that several processes share, over an engine. Each process opens its own, by the same
    address and run.

    It is opened by the first call that needs it, or by `async with`; closing it lets the others
    know that its publishers have left. Publishers and the chief hold leases: when their process
    dies, the waiters of all processes are notified.

    A lost connection is made again, after growing pauses with jitter; waits continue meanwhile, and
    requests are repeated until they are answered: each takes effect exactly once. `max_outage_secs`
    bounds both.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        run: str = "default",
        on_lost: OnLost = "raise",
        join_grace_secs: float = 30.0,
        lease_secs: float = 10.0,
        heartbeat: float = 15.0,
        connect_timeout: float | None = None,
        max_outage_secs: float | None = None,
    ) -> None:
        """Check the options; connect later. Those from `lease_secs` on are for an engine behind a
        connection.

        Args:
            engine: where the run is; of this store alone.
            run: the name of the run; stores of different runs never meet.
            on_lost: what happens to waiters when a publisher was found dead and no other could
                reach their step: "raise" `PublisherFailedError`, or "keep" waiting for its
                successor.
            join_grace_secs: how long to wait for publishers if all had left before this store was
                opened.
            lease_secs: for how long a process that has stopped renewing its leases counts as alive.
                They are renewed by the event loop, so give more than the longest time for which the
                loop is blocked; a longer one is logged at WARNING.
            heartbeat: after how many seconds of silence the connection for notifications is tested:
                one that is dead without a signal is detected within this time and a second more.
            connect_timeout: how many seconds the first connection may take, with all its attempts;
                10 by default, 60 on Ray.
            max_outage_secs: after how long an outage waits and writes end with
                `StoreUnavailableError`; None: they continue.
        """
        super().__init__(Position(1, 0), run=run)
        check_choice(on_lost, "on_lost", "raise", "keep")
        check_secs(join_grace_secs, "join_grace_secs")
        check_secs(lease_secs, "lease_secs", positive=True)
        check_secs(heartbeat, "heartbeat", positive=True)
        check_secs(connect_timeout, "connect_timeout", optional=True, positive=True)
        check_secs(max_outage_secs, "max_outage_secs", optional=True, positive=True)
        self._clock = current_clock()
        self._engine = engine
        self._lease_secs = lease_secs if engine.remote else math.inf
        if connect_timeout is None:
            connect_timeout = engine.connect_timeout
        self._connect_timeout = connect_timeout if engine.remote else 0.0
        self._max_outage_secs = max_outage_secs
        self._process = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._tasks: dict[asyncio.Task[Any], None] = {}
        # Opening and closing.
        self._opening: asyncio.Task[None] | None = None
        self._opened = False
        self._closing = False
        self._forgotten = False
        # The connection.
        self._outages = Outages()
        self._keeping_connection: asyncio.Task[None] | None = None
        self._disconnected_at: float | None = None
        self._sleepers = Waiters()  # for the connection
        self._outage_limit = NO_TIMER
        # What ends all calls and waits; for good if it is damage.
        self._failure: EngineError | None = None
        self._activity = 0  # answers and reports of the engine
        # Writes.
        self._loss: StoreResetError | None = None  # of the run, until it is acknowledged
        self._seq = 0
        self._pending_writes: deque[_PendingWrite] = deque()
        self._writing = _Job(self._spawn, self._write_all, "writing")
        # The chief of this process, from the request to lead on.
        self._term = 0
        self._leader: Member | None = None
        self._left_before_lead = 0
        self._vacancies = Waiters()
        # The members of this process, and their announcement.
        self._members = Members(self._process, self._lease_secs)
        self._announces = True
        self._announcing = _Job(self._spawn, self._announce_all, "announcing publishers")
        self._failed_announcements = 0  # in a row
        self._renewal: TimerHandle | None = None
        self._renewal_due = 0.0
        self._renewed_at = 0.0
        # The members of other processes.
        self._leases = LeaseWatch(self._clock, self._process)
        self._watcher = RunWatcher(
            self._waits,
            self._process,
            keep=on_lost == "keep",
            join_grace_secs=join_grace_secs,
            lease_secs=self._lease_secs,
        )
        self._refreshing = _Job(self._spawn, self._refresh_until_current, "reading the run")
        self._refresh_wanted = False  # since the latest read began
        self._expiry = NO_TIMER
        call_after_fork(self._waits)
        engine.attach(
            EngineLink(
                run=run,
                process=self._process,
                clock=self._clock,
                heartbeat=heartbeat,
                connect_timeout=connect_timeout,
                waits=self._waits,
                observe=self._observe_report,
                fail=self._end_all,
                spawn=self._spawn,
                outage=self._outages.outage,
            )
        )

    # The contract.

    async def inspect(self) -> RunReport | None:
        """See `StepStore.inspect`.

        Raises:
            StoreUnavailableError: the engine is unavailable or refuses.
            StoreDamagedError: what is there is no run.
        """

        async def inspect() -> RunReport | None:
            self._check_not_closing()
            return await self._engine.inspect()

        self._enter()
        return await self._retry_connecting(inspect)

    async def value(self) -> Position:
        await self._ensure_open()
        self._observe_snapshot(await self._read_run())
        return self._waits.latest

    async def advance(self, by: int = 1) -> int:
        """See `StepStore.advance`; waits while the engine is unavailable."""
        # Once per step of every session, so this is kept fast.
        if type(by) is not int or by < 1:
            by = checked_step(by, "advance by", least=1)
        waits = self._waits
        if (
            not self._opened
            or self._closing
            or self._loop is not get_running_loop()
            or waits.forked
        ):
            await self._ensure_open()
        # This must not overtake other writes, and a loss must be acknowledged first.
        is_free = self._writing.task is None and self._loss is None
        if is_free and not self._engine.remote:
            try:
                position = self._engine.advance_nowait(by, waits.latest, self._term)
            except StoreDamagedError as error:
                self._end_all(error)
                raise
            if position is not None:
                waits.observe(position)
                return position.step
        return (await self._write("advance", by)).step

    async def raise_to(self, step: int) -> int:
        step = checked_step(step, "raise to step")
        await self._ensure_open()
        return (await self._write("raise", step)).step

    async def reset(self, step: int) -> Position:
        step = checked_step(step, "reset to step")
        await self._ensure_open()
        return await self._write("reset", step)

    async def _before_wait(self, step: int) -> None:
        if not self._opened:
            await self._ensure_open()
        if self._term:
            self._check_loss()
        if self._waits.unreachable is not None and step > self._waits.latest.step:
            await self._refresh()

    async def mark_initialised(self) -> None:
        await self._ensure_open()
        self._check_loss()
        chief = self._members.chief
        if chief is None:
            raise self._not_leading_error()
        self._members.chief = chief._replace(ready=True)
        self._announce()
        await self.flush()
        self._check_loss()  # of a loss during the flush: the new run is not initialised

    def acknowledge_loss(self) -> StoreResetError | None:
        loss, self._loss = self._loss, None
        return loss

    def publisher(self, name: str) -> Publisher:
        """See `StepStore.publisher`; the store is opened, and the other processes notified, in the
        background: see `flush`.
        """
        self._check_not_closing()
        publisher = super().publisher(name)
        self._members.join(publisher)
        self._announce()
        return publisher

    def _leave(self, publisher: Publisher, exc: BaseException | None) -> None:
        super()._leave(publisher, exc)
        self._members.leave(publisher, self._waits.latest.step, exc)
        self._announce()

    def awaited_by(self, method: str, arguments: Mapping[str, Any]) -> Awaited | None:
        if method in (
            "advance",
            "raise_to",
            "reset",
            "value",
            "mark_initialised",
            "flush",
            "__aenter__",
        ):
            return Awaited(
                "store",
                f"{self._label} of {self.run}",
                ", ".join(self._notes()) or "no answer yet",
            )
        if method == "_wait_vacancy" and (chief := self._watcher.snapshot.chief) is not None:
            return Awaited(
                "lead", f"the lead of {self.run}", by=lambda: [self._awaited_member(chief)]
            )
        return super().awaited_by(method, arguments)

    def awaited_publisher(self, publisher: Publisher) -> str | None:
        member = self._members.of(publisher)
        return None if member is None else f"publisher {member.id}"

    @property
    def _identity(self) -> str:
        return self._watcher.snapshot.run_id or super()._identity

    @property
    def _label(self) -> str:
        return f"{type(self).__name__} over {type(self._engine).__name__}"

    def _notes(self) -> Iterable[str]:
        if self._disconnected_at is not None:
            yield (
                "its engine has been away for"
                f" {secs_text(monotonic_now()() - self._disconnected_at)}"
            )

    def _awaited_member(self, member: Member, lease: str = "") -> Awaited:
        if (secs := self._leases.secs_left(member.id, monotonic_now()())) is not None:
            lease = (
                f"its lease of {member.ttl:g} s runs out in {secs_text(secs)}, if it is not renewed"
            )
        return super()._awaited_member(member, lease)

    def _on_publisher_changed(self, publisher: Publisher) -> None:
        if self._members.update(publisher):
            self._announce()

    def fail(self, exc: BaseException) -> None:
        super().fail(exc)
        self._members.fail(exc)
        self._announce()

    async def flush(self, timeout: float | None = None) -> None:
        announcing = self._announcing.task
        if announcing is not None:
            if timeout is None:
                await self._outages.wait_in_opening(announcing)
            await wait_done([announcing], timeout)

    # Opening and closing.

    async def __aenter__(self) -> Self:
        try:
            await self._ensure_open()
        except asyncio.CancelledError:
            await self.aclose()  # the opening would continue, and the caller has nothing to close
            raise
        return self

    async def _ensure_open(self) -> None:
        self._enter()
        if not (self._opened or self._closing):
            await wait_for_others(self._wait_opened())
            self._enter()
        self._check_not_closing()

    async def _wait_opened(self) -> None:
        """Wait for the opening, which begins here if it has not begun."""
        if self._opening is None:
            self._opening = self._spawn(self._open(), "opening")
        opening = self._opening
        await wait_done([opening], None)
        if opening.cancelled():
            raise self._closed_error()
        if (error := opening.exception()) is not None:
            raise error

    def _check_not_closing(self) -> None:
        if self._closing:
            raise self._closed_error()

    async def _connect(self) -> Snapshot:
        try:
            return await self._engine.connect(self._known())
        except StoreUnavailableError:
            await self._engine.disconnect()
            raise

    async def _open(self) -> None:
        try:
            self._observe_snapshot(await self._retry_connecting(self._connect))
        except BaseException:
            await self._release_engine()
            raise
        if self._engine.remote:
            self._keeping_connection = self._spawn(self._keep_connection(), "connection")
        self._opened = True
        self._announce()

    async def forget(self) -> None:
        """Delete the run, with its step, from the engine, also a damaged one, and close this store.

        Call it when all other stores of the run are closed: an open one would bring the run back.

        Raises:
            StoreUnavailableError: it could not be deleted.
        """
        try:
            await self._ensure_open()
        except StoreDamagedError as error:
            logger.info("run %s: deleting what cannot be read: %s", self.run, error)
        self._leave_all()
        await self.flush(_CLOSE_SECS)
        self._stop_announcing()
        self._forgotten = True
        try:
            await self._delete_run()
        finally:
            await self.aclose()

    async def _delete_run(self) -> None:
        if self._opened:
            with contextlib.suppress(StoreDamagedError):  # there is no connection to a damaged run
                return await self._retry(self._engine.delete)
        if self._keeping_connection is not None:
            self._keeping_connection.cancel()
            await wait_done([self._keeping_connection], None)
        await self._engine.delete()

    async def aclose(self) -> None:
        """See `StepStore.aclose`; lets the engine know within 5 s that this process has left."""
        if self._waits.closed:
            return
        self._enter()
        self._leave_all()
        await shielded(
            self._shut_down(), grace_secs=_CLOSE_SECS, what=f"closing the step store {self.run}"
        )

    def _leave_all(self) -> None:
        self._closing = True
        for publisher in self._waits.publishers.here:
            publisher.close()
        self._step_down(None)

    async def _shut_down(self) -> None:
        await self.flush(_CLOSE_SECS)
        self._stop_announcing()
        self._opened = False
        await super().aclose()
        self._watcher.stop()
        self._watch_leases()
        self._vacancies.wake()
        late = tuple(self._tasks)
        for task in late:
            task.cancel()
        await wait_done(late, _CLOSE_SECS)
        await self._release_engine()

    async def _release_engine(self) -> None:
        self._end_outage()
        for write in self._pending_writes:
            resolve(write.answer, self._closed_error())
        self._pending_writes.clear()
        self._sleepers.wake()  # they find the store closed
        await self._engine.close()

    # The connection.

    @property
    def outage_secs(self) -> float | None:
        """For how long the connection has been lost; None while it is there, or before it was
        made.
        """
        return None if self._disconnected_at is None else self._clock.now() - self._disconnected_at

    async def _retry_connecting(self, connect: Callable[[], Awaitable[T]]) -> T:
        """Call `connect` until it succeeds, within `connect_timeout` seconds; the last error is
        raised.
        """
        began, attempt = self._clock.now(), 0
        while True:
            try:
                return await connect()
            except StoreUnavailableError as error:
                attempt += 1
                pause = _CONNECT_BACKOFF.pause_secs(attempt)
                if (
                    isinstance(error, StoreRefusedError)
                    or self._clock.now() + pause - began > self._connect_timeout
                ):
                    raise
                logger.info("run %s: %s; trying again", self.run, error)
            await self._backoff_sleep(pause)

    async def _keep_connection(self) -> None:
        """Connect again whenever the connection is lost, until the run is found damaged."""
        attempt = 0
        while True:
            activity = self._activity
            began = math.inf
            try:
                if self._disconnected_at is not None:
                    self._on_reconnect(await self._engine.connect(self._known()))
                began = self._clock.now()
                await self._engine.watch()
                raise StoreUnavailableError(f"{self!r}: the engine ended the connection")
            except StoreDamagedError as error:
                self._end_all(error)
            except Exception as error:
                # Also one that no engine should raise: waits would never end.
                # A connection that fails as soon as it is made is retried less and less often; one
                # that was of use, immediately.
                lasted_secs = self._clock.now() - began
                if self._activity != activity or lasted_secs > _CONNECT_BACKOFF.max_secs:
                    attempt = 0
                if not self._is_damaged:
                    self._on_disconnect(error)
            await self._engine.disconnect()
            if self._is_damaged:
                return
            attempt += 1
            await self._backoff_sleep(self._pause_secs(attempt))

    @property
    def _is_damaged(self) -> bool:
        return isinstance(self._failure, StoreDamagedError)

    def _end_all(self, error: EngineError) -> None:
        """End all calls and waits with an error; see `EngineLink.fail`."""
        if self._is_damaged:  # which is final
            return
        self._failure = error
        self._abort_waits(error)
        self._sleepers.wake()  # calls that are about to be tried again
        if isinstance(error, StoreDamagedError):
            logger.error("run %s: %s", self.run, error)
            self._spawn(self._engine.disconnect(), "closing the connection to a damaged run")

    def _pause_secs(self, attempt: int) -> float:
        """Return the pause before an attempt; a process with a lease makes one before the lease can
        run out.
        """
        return min(_CONNECT_BACKOFF.pause_secs(attempt), self._members.renewal_secs or math.inf)

    async def _backoff_sleep(self, secs: float) -> None:
        """Wait until the connection is back, `secs` at most."""
        with self._outages.outage():
            await self._sleepers.wait(secs, self._clock)

    def _on_disconnect(self, error: Exception) -> None:
        if self._disconnected_at is not None:
            logger.info(
                "run %s: still disconnected after %.0f s: %s", self.run, self.outage_secs, error
            )
            return
        self._disconnected_at = self._clock.now()
        self._watcher.pause_hold()
        log = logger.info if self._forgotten else logger.warning
        log("run %s: the connection is lost, trying again: %s", self.run, error)
        if self._max_outage_secs is not None:
            late = StoreUnavailableError(
                f"run {self.run}: no connection for {self._max_outage_secs} s: {self!r}"
            )
            self._outage_limit = self._clock.call_later(
                self._max_outage_secs, lambda: self._end_all(late)
            )

    def _on_reconnect(self, snapshot: Snapshot) -> None:
        logger.info("run %s: connected again after %.1f s", self.run, self.outage_secs or 0.0)
        self._end_outage()
        self._failure = None
        self._waits.clear_failure()
        self._leases.restart()
        if self._watcher.snapshot.run_id not in ("", snapshot.run_id):
            self._note_loss(snapshot.position)
        self._watcher.restart_hold()
        self._observe_snapshot(snapshot)
        self._announce_again()
        self._sleepers.wake()

    def _note_loss(self, new: Position) -> None:
        """Take note that the engine has lost the run: writes fail until that is acknowledged.

        So do the waits of a chief: everybody else waits for it to restore the run.
        """
        old = self._waits.latest
        message = (
            f"the engine has lost the run {self.run}, which was at step {old.step} of epoch"
            f" {old.epoch}: it continues from step {new.step} of epoch {new.epoch}; restore what"
            " belongs to it from a checkpoint"
        )
        logger.warning(message)
        self._loss = StoreResetError(message, old=old, new=new)
        if self._members.chief is not None:
            self._members.chief = self._members.chief._replace(ready=False)
            self._waits.abort(self._loss)
            self._waits.clear_failure()

    def _check_loss(self) -> None:
        """Raise the error of a loss that was not acknowledged yet."""
        if self._loss is not None:
            raise copy_error(self._loss)

    def _end_outage(self) -> None:
        self._disconnected_at = None
        self._outage_limit.cancel()

    # Requests.

    async def _request(self, request: Request) -> Answer:
        # The member may have changed during an outage. After a loss it is not ready any more.
        return await self._retry(lambda: self._engine.request(self._members.up_to_date(request)))

    async def _read_run(self) -> Snapshot:
        """Read the run, without the members whose leases have run out."""
        snapshot = await self._retry(self._engine.read)
        self._leases.observe(snapshot.members)
        if expired := self._leases.expired():
            try:
                for request in expired:
                    self._check_connected()
                    await self._engine.request(request)
            except StoreRefusedError:
                raise
            except StoreUnavailableError:
                # Not repeated: what was found before an outage says nothing after it, when all
                # members are announced again.
                self._leases.restart()
            snapshot = await self._retry(self._engine.read)
        return snapshot

    async def _retry(
        self, ask: Callable[[], Awaitable[T]], writes: list[_PendingWrite] | None = None
    ) -> T:
        """Call `ask` until there is an answer, or until no caller waits for one of `writes` any
        more.
        """
        attempt = 0
        while True:
            try:
                self._check_connected()
                answer = await ask()
            except StoreDamagedError as error:
                self._end_all(error)
                raise
            except StoreUnavailableError as error:
                if self._waits.closed:
                    raise self._closed_error() from None
                refuses = isinstance(error, (StoreRefusedError, StoreResetError))
                is_final = refuses or not self._engine.remote
                if self._failure is not None and (self._is_damaged or not is_final):
                    raise copy_error(self._failure) from None
                is_wanted = writes is None or any(not write.answer.done() for write in writes)
                if is_final or not is_wanted:
                    raise
            else:
                self._activity += 1
                return answer
            attempt += 1
            await wait_for_others(self._backoff_sleep(self._pause_secs(attempt)))
            if self._waits.closed:
                raise self._closed_error()

    def _check_connected(self) -> None:
        """Raise while a connection is made: the engine may have an older copy of the run until
        `connect` is complete.
        """
        if self._disconnected_at is not None:
            raise StoreUnavailableError(f"run {self.run}: not connected: {self!r}")

    # Writes: concurrent advances are combined into one request.

    async def _write(self, kind: WriteKind, amount: int) -> Position:
        write = _PendingWrite(kind, amount)
        self._pending_writes.append(write)
        self._writing.start()
        try:
            await self._outages.wait_in_opening(write.answer)
            answer = await write.answer
        finally:
            write.answer.cancel()  # a stop has ended the wait
        if isinstance(answer, Position):
            return answer
        raise answer

    async def _write_all(self) -> None:
        while self._pending_writes:
            batch = self._next_batch()
            if batch:
                await self._write_batch(batch)

    def _next_batch(self) -> list[_PendingWrite]:
        """Return the next write with the advances that follow it, if it is an advance."""
        pending = self._pending_writes
        batch = [pending.popleft()]
        while pending and batch[0].kind == pending[0].kind == "advance":
            batch.append(pending.popleft())
        # A caller that was cancelled before anything was sent has written nothing.
        return [write for write in batch if not write.answer.done()]

    async def _write_batch(self, batch: list[_PendingWrite]) -> None:
        self._seq += 1
        request = Write(
            batch[0].kind,
            sum(write.amount for write in batch),
            self._waits.latest,
            self._term,
            self._process,
            self._seq,
        )

        async def send() -> Answer:
            self._check_loss()
            return await self._engine.request(request)

        try:
            epoch, step = self._written(request, await self._retry(send, batch))
        except asyncio.CancelledError:  # the store is closed
            for write in batch:
                resolve(write.answer, self._closed_error())
            raise
        except Exception as error:
            # Also one that no engine should raise: the callers would wait indefinitely.
            for write in batch:
                copied = copy_error(error) if isinstance(error, AiohooksError) else error
                resolve(write.answer, copied)
            return
        if request.kind != "advance":
            resolve(batch[0].answer, Position(epoch, step))
            return
        step -= request.amount
        for write in batch:
            step += write.amount
            resolve(write.answer, Position(epoch, step))

    def _written(self, write: Write, answer: Answer) -> Position:
        """Return the position that a write has led to, after taking note of it."""
        position = answer.position
        if answer.status == "stale":
            raise StaleTermError(
                f"the term {write.term} of this process over {self.run} has ended, {answer.term}"
                f" has begun at step {position.step}: its lease had run out, and another chief took"
                " over, or may; stop, or start again",
                term=write.term,
                newest=answer.term,
            )
        if answer.status == "lost":
            raise StoreUnavailableError(
                f"run {self.run}: the engine has an older copy of it, at step {position.step}"
            )
        if answer.status == "full":
            checked_step(MAX_STEP + 1, f"{write.kind} by {write.amount} would lead to step")
        self._observe(position)
        return position

    # The chief.

    @contextlib.asynccontextmanager
    async def lead(self, ttl: float | None = None) -> AsyncGenerator[Term]:
        """See `StepStore.lead`; on leaving the block this process steps down."""
        check_secs(ttl, "ttl", optional=True, positive=True)
        await self._ensure_open()
        if self._leader is not None:
            raise InvalidArgumentError(
                f"{self!r} leads already, or is about to: leave that block first"
            )
        # Without a connection, the engine itself finds that the chief has died.
        lease_secs = ttl if self._engine.remote else None
        member = self._members.new(f"chief {self._process}", lease_secs)
        self._leader = member
        self._left_before_lead = self._waits.publishers.left_here
        try:
            answer = await self._request_lead(member)
            self._term = answer.term
            self._members.chief = member._replace(term=answer.term)
            self._announce()
            yield Term(answer.term)
        except BaseException as error:
            # Also if it was cancelled before the answer: the lead may have been granted.
            self._step_down(error)
            raise
        self._step_down(None)

    async def _request_lead(self, member: Member) -> Answer:
        """Request the lead until there is no other chief."""
        while True:
            answer = await self._request(Lead(member))
            self._check_not_closing()  # the store may have begun to close meanwhile
            if answer.status == "ok":
                return answer
            await self._wait_vacancy()
            self._check_not_closing()

    def _step_down(self, failure: BaseException | None) -> None:
        leader = self._leader
        if leader is None:
            return
        has_led = self._term > 0
        self._leader = None
        self._term = 0
        self._members.chief = None
        publishers = self._waits.publishers
        # The publishers of this process, if it has or had any, report how it left.
        had_publisher = bool(publishers.here) or publishers.left_here > self._left_before_lead
        name = "chief" if has_led and not had_publisher else ""
        self._members.leave_as(leader, name, self._waits.latest.step, failure)
        self._announce()

    async def _wait_vacancy(self) -> None:
        """Wait until there may be no chief, or until the store is closed."""
        self._observe_snapshot(await self._read_run())
        chief = self._watcher.snapshot.chief
        if chief is None:
            return
        logger.info("run %s: waiting for the lead, which %s has", self.run, chief.name)
        try:
            with self._vacancies.added() as vacancy:
                self._watch_leases()
                await wait_for_others(vacancy)
        finally:
            self._watch_leases()

    def _abort_waits(self, error: AiohooksError) -> None:
        """End all waits with an error of the engine; a wait for the lead asks the engine again, and
        gets the error from it.
        """
        self._waits.abort(error)
        self._vacancies.wake()

    # Announcing the members of this process to the engine.

    def _announce(self) -> None:
        """Send the engine in the background what it does not know yet of the members of this
        process.

        A store that is not open yet is opened for it, unless it is being closed, or that has
        failed.
        """
        if self._opened or not (self._closing or self._failed_announcements):
            self._start_announcing()

    def _start_announcing(self) -> None:
        if self._announces and self._members.unsent():
            self._announcing.start()

    def _announce_again(self) -> None:
        """Send the engine all members: to renew their leases, or because it may have lost them."""
        self._members.mark_unsent()
        self._announce()

    async def _announce_all(self) -> None:
        pause_secs = None
        try:
            if not self._opened:
                await self._wait_opened()
            while self._announces and (requests := self._members.unsent()):
                for request in requests:
                    await self._request(request)
                    self._members.mark_sent(request)
            self._failed_announcements = 0
            pause_secs = self._members.renewal_secs
        except ENGINE_ERRORS as error:
            self._failed_announcements += 1
            if self._is_damaged:
                self._announces = False
            # A refusal would be repeated, unless it is one of a request: its disk is full.
            elif self._opened or not isinstance(error, StoreRefusedError):
                pause_secs = _ANNOUNCE_BACKOFF.pause_secs(self._failed_announcements)
            log = logger.info if self._failed_announcements > 1 else logger.warning
            outlook = "" if pause_secs is None else ", trying again"
            log("run %s: could not announce its publishers%s: %s", self.run, outlook, error)
        self._renewed_at = self._clock.now()
        if pause_secs is None or not self._announces:
            self._stop_renewing()
        else:
            # Not later than before: members that change often would keep all from renewal.
            due = self._renewed_at + pause_secs
            if self._renewal is None or due < self._renewal_due:
                self._stop_renewing()
                self._renewal = self._clock.call_later(pause_secs, self._renew)
                self._renewal_due = due

    def _renew(self) -> None:
        self._renewal = None
        if self._failed_announcements:
            # Who has left before the store could be opened was never known.
            if self._opened or self._members.here:
                self._start_announcing()
            return
        silent_secs = self._clock.now() - self._renewed_at
        lease_secs = 4 * (self._members.renewal_secs or math.inf)
        if silent_secs > lease_secs:
            logger.warning(
                "run %s: no lease was renewed for %.1f s, as the event loop was blocked or the"
                " process stopped, and each lasts %g s: other processes may have found it dead; run"
                " what blocks in a thread, or give a longer lease_secs=",
                self.run,
                silent_secs,
                lease_secs,
            )
        self._announce_again()

    def _stop_announcing(self) -> None:
        self._announces = False
        self._stop_renewing()

    def _stop_renewing(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None

    # Snapshots of the run.

    def _known(self) -> Mark:
        """Return how far this process knows the run to have come, for an engine that has lost
        it.
        """
        snapshot = self._watcher.snapshot
        if self._term and self._term >= snapshot.term:
            return Mark(self._waits.latest, self._term, self._members.chief)
        return Mark(self._waits.latest, snapshot.term, snapshot.chief)

    def _observe_report(self, report: Position | Snapshot) -> None:
        """See `EngineLink.observe`."""
        self._activity += 1
        if isinstance(report, Snapshot):
            self._observe_snapshot(report)
        else:
            self._waits.observe(report)

    def _observe_snapshot(self, snapshot: Snapshot) -> None:
        """Take note of what the engine reports; called in the event loop, also with snapshots that
        are out of date.
        """
        self._observe(snapshot.position)
        known = self._watcher.snapshot
        if snapshot.run_id == known.run_id and snapshot.revision < known.revision:
            return  # a read that a newer report has overtaken
        self._leases.observe(snapshot.members)
        self._watcher.observe(snapshot)
        chief = self._watcher.snapshot.chief
        if chief is None:
            self._vacancies.wake()
        elif snapshot.losses and chief.process == self._process:
            self._leave_ghost(chief)
        self._watch_leases()

    def _leave_ghost(self, chief: Member) -> None:
        """Let a chief of this process leave that has left before, if another process has brought it
        back after a loss.
        """
        if self._leader is None or self._leader.id != chief.id:
            self._members.leave_as(chief, "", 0, None)
            self._announce()

    async def _refresh(self) -> None:
        """Read the run before a wait that would fail: nothing is reported while nothing waits.
        Concurrent callers share it.
        """
        self._enter()
        if (refreshing := self._start_refresh()) is not None:
            await self._outages.wait_in_opening(refreshing)
            await wait_done([refreshing], None)

    def _start_refresh(self) -> asyncio.Task[None] | None:
        """Read the run in a task, which fails the waits if they cannot succeed; None without an
        engine.
        """
        self._refresh_wanted = True
        return self._refreshing.start() if self._opened else self._refreshing.task

    async def _refresh_until_current(self) -> None:
        try:
            snapshot = self._watcher.snapshot
            while self._refresh_wanted:  # what was read before the request does not answer it
                self._refresh_wanted = False
                snapshot = await self._read_run()
            self._waits.clear_failure(by_engine=True)  # the engine answers again
            self._observe_snapshot(snapshot)
            self._waits.fail_unreachable()
        except (*ENGINE_ERRORS, StoreClosedError) as error:
            logger.warning("run %s: could not read the publishers: %s", self.run, error)
            if self._waits.unreachable is not None:
                self._abort_waits(error)

    def _on_unreachable(self) -> None:
        # Other processes may have moved the step or registered a publisher, which is not known here
        # yet.
        self._start_refresh()

    def _subscribe(self, step: int | None) -> None:
        if self._engine.remote:
            self._watch_leases()
        self._engine.subscribe(step)

    def _watch_leases(self) -> None:
        """Read the run regularly, to see which leases were renewed, for as long as there is a wait
        here.
        """
        self._expiry.cancel()
        is_wanted = self._waits.waiting or self._vacancies
        if self._opened and is_wanted and self._leases.silent:
            self._expiry = self._clock.call_later(self._leases.read_secs, self._start_refresh)

    # Tasks and copies.

    def _spawn(self, coro: Coroutine[Any, Any, Any], what: str) -> asyncio.Task[Any]:
        """Start a task of the store's own: in no session's context, cancelled with the store."""
        task = new_task(coro, f"step store {self.run}: {what}", contextvars.Context())
        self._tasks[task] = None
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if task is self._opening:
            self._opening = (
                None  # the next call tries again, also if no call has waited for this one
            )
        else:
            logger.error("%s failed", task.get_name(), exc_info=error)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be pickled: {OPEN_BY_URL}")
