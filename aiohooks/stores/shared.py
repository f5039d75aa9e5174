"""Step stores whose run is outside this process, in an engine."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import socket
from asyncio import get_running_loop
from collections.abc import AsyncGenerator
from typing import NoReturn, Self

from aiohooks._core.activity import Awaited, active
from aiohooks._core.clock import current_clock
from aiohooks._core.fork import call_after_fork
from aiohooks._core.validate import check_choice, check_secs
from aiohooks._core.waits import shielded, wait_done, wait_for_others
from aiohooks.errors import InvalidArgumentError, StoreDamagedError, StoreResetError
from aiohooks.stores._connection import Connection, Writes
from aiohooks.stores._members import Members, OnLost
from aiohooks.stores._protocol import (
    MAX_STEP,
    Answer,
    Lead,
    Member,
    Position,
    Report,
    Snapshot,
    Term,
    checked_step,
    closed_error,
    logger,
)
from aiohooks.stores.base import OPEN_BY_URL, StepStore, awaited_member
from aiohooks.stores.engine import Engine, EngineLink, StoreTasks
from aiohooks.stores.publishers import Publisher

_CLOSE_SECS = 5.0
"""The time that closing gives the engine. Leases of members that could not leave run out later."""

_LEASE_SECS = 10.0
_HEARTBEAT = 15.0


class SharedStepStore(StepStore):
    """A store that several processes share, over an engine.

    Each process opens its own store, with the same address and run.

    The first call that needs the engine opens the store, or `async with` does. Closing the store
    announces to the other processes that its publishers have left. Publishers and the chief hold
    leases: when their process dies, the waiters of all processes are notified.

    The store reconnects after a lost connection, with growing pauses and jitter. Meanwhile waits
    continue, and requests are repeated until they are answered. Each takes effect exactly once.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        run: str = "default",
        on_lost: OnLost = "raise",
        lease_secs: float = _LEASE_SECS,
        heartbeat: float = _HEARTBEAT,
        connect_timeout: float | None = None,
    ) -> None:
        """Check the options. Connect later.

        `lease_secs`, `heartbeat` and `connect_timeout` are for an engine behind a connection.

        Args:
            engine: the place where the run is kept. An engine belongs to one store.
            run: the name of the run. Stores of different runs never meet.
            on_lost: what a wait does if a publisher was found dead and no other publisher can reach
                the step: "raise" `PublisherFailedError`, or "keep" waiting for a successor.
            lease_secs: the time, or up to a quarter more, after which a process that does not renew
                its leases counts as dead. The event loop renews them, so give more than the longest
                time for which the loop is blocked. A longer block is logged at WARNING.
            heartbeat: after how many seconds of silence to test the connection for notifications. A
                connection that died silently is detected within a second more.
            connect_timeout: how many seconds the first connection may take, with all its attempts,
                10 by default, 60 on Ray.
        """
        # Waits call the engine's `subscribe` directly, without a layer in between.
        super().__init__(Position(1, 0), run=run, subscribe=engine.subscribe)
        check_choice(on_lost, "on_lost", "raise", "keep")
        check_secs(lease_secs, "lease_secs", positive=True)
        check_secs(heartbeat, "heartbeat", positive=True)
        check_secs(connect_timeout, "connect_timeout", optional=True, positive=True)
        if not engine.remote:
            if (lease_secs, heartbeat, connect_timeout) != (_LEASE_SECS, _HEARTBEAT, None):
                raise InvalidArgumentError(
                    "lease_secs, heartbeat and connect_timeout are for an engine behind a"
                    f" connection: leave them out for {engine!r}"
                )
            lease_secs = math.inf  # the engine itself removes the members of dead processes
        # The random word distinguishes several stores of one process.
        process = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._engine = engine
        engine.attach(
            EngineLink(
                run=self.run,
                process=process,
                clock=current_clock(),
                heartbeat=heartbeat,
                connect_timeout=connect_timeout or engine.connect_timeout,
                waits=self._waits,
                tasks=StoreTasks(self.run),
                observe=self._observe_report,
            )
        )
        self._connection = Connection(engine, connect=self._connect, lease_secs=lease_secs)
        self._members = Members(self._connection, lease_secs=lease_secs, on_lost=on_lost)
        self._writes = Writes(self._connection)
        self._shutdown_done: asyncio.Future[None] | None = None  # made when closing begins
        call_after_fork(self._waits)

    # The position.

    async def value(self) -> Position:
        self._check_loop()
        snapshot = await self._members.read()
        self._members.observe(snapshot)
        return self._waits.latest

    async def advance(self, by: int = 1) -> int:
        """See `StepStore.advance`; waits while the engine is unavailable."""
        # Hot path, once per step of each session: it calls other functions only where needed.
        if type(by) is not int or not 1 <= by <= MAX_STEP:
            by = checked_step(by, "advance by", least=1)
        waits = self._waits
        if self._loop is not get_running_loop() or waits.forked:
            self._check_loop()
        writes = self._writes
        # A local engine can usually advance without a request.
        if not self._engine.remote and writes.can_skip_queue:
            try:
                position = self._engine.advance_nowait(by, waits.latest, writes.term)
            except StoreDamagedError as error:
                self._connection.fail(error)
                raise
            if position is not None:
                waits.observe(position)
                return position.step
        position = await writes.write("advance", by)
        return position.step

    async def raise_to(self, step: int) -> int:
        step = checked_step(step, "raise to step")
        self._check_loop()
        position = await self._writes.write("raise", step)
        return position.step

    async def reset(self, step: int) -> Position:
        step = checked_step(step, "reset to step")
        self._check_loop()
        return await self._writes.write("reset", step)

    def acknowledge_loss(self) -> StoreResetError | None:
        loss = self._writes.loss
        self._writes.loss = None
        return loss

    # Waits.

    async def _prepare_wait(self, step: int) -> None:
        if not self._connection.is_open:
            await self._connection.wait()
        if self._writes.term:
            # This process is the chief. After a loss, the others wait until it has restored the
            # run, so it must not wait for them.
            self._writes.check_loss()
        # The engine may have reported nothing since the last wait. So if this wait would fail, read
        # the run first: another process may have moved the step or registered a publisher.
        if self._waits.unreachable_error is not None and step > self._waits.latest.step:
            refresh_task = self._members.refresh()
            await wait_for_others(wait_done([refresh_task], secs=None))

    def _on_unreachable(self) -> None:
        # Another process may have moved the step or registered a publisher since the last report.
        # So read the run: the read ends the waits if still none can succeed.
        self._members.refresh()

    # Publishers.

    def publisher(self, name: str) -> Publisher:
        """See `StepStore.publisher`.

        The store opens, and announces the publisher to the other processes, in the background.
        `flush` waits for that. If the store cannot be opened, the call that opens it later
        announces the publisher.
        """
        publisher = super().publisher(name)
        self._members.join(publisher)
        return publisher

    def _leave(self, publisher: Publisher, exc: BaseException | None) -> None:
        super()._leave(publisher, exc)
        step = self._waits.latest.step
        self._members.leave(publisher.member_id, publisher.name, step, exc)

    def _on_publisher_changed(self, publisher: Publisher) -> None:
        self._members.update(publisher)

    async def flush(self, timeout: float | None = None) -> None:
        await wait_for_others(self._members.flush(timeout))

    # The chief.

    @contextlib.asynccontextmanager
    async def lead(self) -> AsyncGenerator[Term]:
        """Wait until this process is the chief. On leaving the block it steps down."""
        self._check_loop()
        if self._members.candidate is not None:
            raise InvalidArgumentError(
                f"{self!r} leads already, or is about to: leave that block first, or open another"
                " store for a standby chief"
            )
        member = self._members.new_member(f"chief {self._members.process}")
        self._members.candidate = member
        try:
            term = await self._request_lead(member)
            self._writes.term = term
            chief = member._replace(term=term)
            snapshot = self._waits.snapshot
            # Record this process as the chief before it is announced. If the engine loses the run
            # in between, this process then continues it with a chief, and no other process finds
            # the lead free.
            self._waits.observe_run(
                snapshot._replace(
                    term=term,
                    leader=chief.process,
                    ready=False,
                    members=(*snapshot.members, chief),
                )
            )
            self._members.announce(chief)
            yield Term(term)
        except BaseException as error:
            # Step down even after a cancelled request, which the engine may have granted.
            self._step_down(error)
            raise
        self._step_down(None)

    async def _request_lead(self, member: Member) -> int:
        """Request the lead until it is granted, and return the term.

        Wait while another process is the chief.
        """

        async def request() -> Answer | None:
            # The connection repeats this after an outage. If the run was lost in it, the lead may
            # be reserved for the chief of the lost run. Then wait again.
            if not self._members.may_lead:
                return None
            return await self._engine.request(Lead(member))

        while True:
            with active("wait", f"the lead of {self.run}", self._awaited_lead):
                await self._members.wait_vacancy()
            self._check_loop()  # the store may have been closed meanwhile
            answer = await self._connection.call(request)
            self._check_loop()
            if answer is not None and answer.status == "ok":
                return answer.term

    async def mark_initialised(self) -> None:
        self._check_loop()
        self._writes.check_loss()
        chief = self._members.chief
        if chief is None:
            raise self._not_leading_error()
        self._members.announce(chief._replace(ready=True))
        await self.flush()
        self._check_loop()  # the store may have been closed meanwhile
        # If the run was lost meanwhile, the run that replaces it is not initialized.
        self._writes.check_loss()

    def _step_down(self, failure: BaseException | None) -> None:
        """Give up the lead, or the request for the lead, if there is one.

        `failure` is the error that has ended the lead, if any.
        """
        candidate = self._members.candidate
        if candidate is None:
            return
        has_led = self._writes.term > 0
        has_published = self._waits.registered or self._waits.has_left
        # An exit with a name ends waits in other processes, whose errors contain the name. If this
        # process has or had a publisher, leave that to the exit of the publisher.
        name = "chief" if has_led and not has_published else ""
        self._members.candidate = None
        self._writes.term = 0
        self._members.leave(candidate.id, name, self._waits.latest.step, failure)

    # The connection.

    def _observe_report(self, report: Report) -> None:
        """Record a report of the engine, and wake the waits that it concerns."""
        if isinstance(report, Position):
            self._waits.observe(report)
        elif isinstance(report, Snapshot):
            self._members.observe(report)
        else:
            self._connection.fail(report)

    async def _connect(self) -> None:
        """Connect the engine, record its snapshot, and announce the members of this process again.

        If the snapshot has another id than the previous one, its run replaces a lost run.
        """
        previous_run_id = self._waits.snapshot.run_id
        snapshot = await self._engine.connect()
        has_connected_before = previous_run_id != ""
        if has_connected_before and snapshot.run_id != previous_run_id:
            self._record_loss(snapshot.position)
        self._members.begin_leases()
        self._members.observe(snapshot)
        self._members.send_again()

    def _record_loss(self, new: Position) -> None:
        """Make writes fail until the loss of the run is acknowledged.

        Reserve the lead for the chief of the lost run. If this process is the chief, end its waits.
        """
        old = self._waits.latest
        message = (
            f"the engine has lost the run {self.run}, which was at step {old.step} of epoch"
            f" {old.epoch}: it continues from step {new.step} of epoch {new.epoch}; restore what"
            " belongs to it from a checkpoint"
        )
        logger.warning(message)
        self._writes.loss = StoreResetError(message, old=old, new=new)
        self._members.reserve_lead()
        chief = self._members.chief
        if chief is not None:
            # The other processes wait until this process has restored the run. If it waited for
            # their publishers meanwhile, no process could continue.
            self._members.announce(chief._replace(ready=False))
            self._waits.abort(self._writes.loss)

    # Opening and closing.

    async def __aenter__(self) -> Self:
        self._check_loop()
        try:
            await self._connection.wait()
        except asyncio.CancelledError:
            # Close the store, because the caller does not get it and cannot close it. Otherwise the
            # connection would still be made.
            await self.aclose()
            raise
        return self

    async def forget(self) -> None:
        """Delete the run from the engine, even if it is damaged, and close this store.

        Close all other stores of the run first, because an open store would create the run again.

        Raises:
            StoreUnavailableError: the run could not be deleted.
        """
        self._check_loop()
        try:
            with contextlib.suppress(StoreDamagedError):  # a damaged run is deleted, too
                await self._connection.wait()
            await self._leave_all()
            await self._end_calls()  # before the deletion: a call could make the run again
            await self._engine.delete()
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """See `StepStore.aclose`; announces within 5 s that the members of this process leave."""
        if self._shutdown_done is not None:
            # Another task is closing the store, or has closed it: wait until it has finished.
            await wait_done([self._shutdown_done], secs=None)
        if self._waits.closed:
            return
        await super().aclose()
        self._shutdown_done = get_running_loop().create_future()
        await shielded(
            self._shut_down(self._shutdown_done),
            grace_secs=_CLOSE_SECS,
            what=f"closing the step store {self.run}",
        )

    async def _shut_down(self, done: asyncio.Future[None]) -> None:
        """Close all parts of the store, and let other callers of `aclose` continue."""
        try:
            await self._leave_all()  # first, because it needs the connection
            await self._end_calls()
            await self._engine.close()
        finally:
            done.set_result(None)

    async def _end_calls(self) -> None:
        """End all calls, writes and tasks with the error of a closed store."""
        self._connection.stop(closed_error(self.run))
        await self._connection.tasks.cancel(_CLOSE_SECS)
        self._writes.close()

    async def _leave_all(self) -> None:
        """Close the publishers of this process, step down, and announce that within 5 s."""
        for publisher in tuple(self._waits.registered):
            publisher.close()
        self._step_down(None)
        await self._members.flush(_CLOSE_SECS)
        self._members.stop()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be pickled: {OPEN_BY_URL}")

    # Reports.

    def _awaited_lead(self) -> Awaited:
        """Describe a wait for the lead, for reports such as `why`."""
        chief = self._waits.snapshot.chief
        return Awaited(
            "lead",
            f"the lead of {self.run}",
            by=lambda: [] if chief is None else [awaited_member(chief)],
        )

    @property
    def _graph_key(self) -> str:
        return self._waits.snapshot.run_id or super()._graph_key
