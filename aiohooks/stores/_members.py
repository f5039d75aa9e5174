"""The members of a run: the publishers and the chief of this process and of other processes."""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import Literal

from aiohooks._core.clock import NO_TIMER, sleep
from aiohooks._core.waits import Backoff, wait_done, wait_for_others
from aiohooks.errors import AiohooksError, UnavailableError, is_clean_end
from aiohooks.stores._connection import Connection
from aiohooks.stores._protocol import (
    Expire,
    Join,
    LastExit,
    Leave,
    Member,
    Snapshot,
    error_text,
    logger,
)
from aiohooks.stores.publishers import Publisher, PublisherExit

OnLost = Literal["raise", "keep"]
_BACKOFF = Backoff(initial_secs=0.1, max_secs=5.0)
_RENEWALS_PER_LEASE = 4


class Members:
    """The members of a run.

    This process sends a member of its own to the engine when the member has changed, and again to
    renew its lease. It sends an exit until the engine answers, and the exit counts once.

    Leases need no common clock, and an engine with leases removes no member by itself. Each process
    renews its leases four times in the time of a lease. Equally often it reads the run, if there
    are members of other processes. It requests the removal of a member whose heartbeat has not
    changed for the time of the member's lease. Time in which it cannot read does not count.
    """

    def __init__(self, connection: Connection, *, lease_secs: float, on_lost: OnLost) -> None:
        """Announce nothing yet. `on_lost` is as for `SharedStepStore`."""
        link = connection.engine.link
        self.process = link.process
        self.own_members: dict[str, Member] = {}
        """The members of this process, by their ids."""
        self.candidate: Member | None = None
        """The member of this process that leads, or has requested the lead. It is None before the
        request, and after this process has stepped down.
        """
        self._connection = connection
        self._engine = connection.engine
        self._clock = link.clock
        self._waits = link.waits
        self._lease_secs = lease_secs
        self._waits_for_successors = on_lost == "keep"
        # Until this time, the lead of a lost run is reserved for its chief.
        self._lead_reserved_until = 0.0
        self._numbers = itertools.count(1)  # for members and exits alike
        # The members of this process as they were last sent.
        self._sent: dict[str, Member] = {}
        # The exits that the engine has not answered yet.
        self._exits: list[Leave] = []
        self._send_task: asyncio.Task[None] | None = None
        self._stopped = False
        self._failures = 0  # how often in a row sending has failed
        self._retry_timer = NO_TIMER
        self._lease_task: asyncio.Task[None] | None = None
        # The number of reads since a member was first read with its current heartbeat. The key is
        # the request for its removal, which has the id and the heartbeat.
        self._silent_reads: dict[Expire, int] = {}
        self._refresh_task: asyncio.Task[None] | None = None
        self._refresh_wanted = False  # whether `refresh` was called since the latest read began

    # The members of this process.

    @property
    def chief(self) -> Member | None:
        """The member with which this process leads, or None if this process is not the chief."""
        return None if self.candidate is None else self.own_members.get(self.candidate.id)

    def new_member(self, name: str) -> Member:
        """Return a new member of this process, not announced yet."""
        return Member(f"{self.process}/{next(self._numbers)}", name, self._lease_secs)

    def announce(self, member: Member) -> None:
        """Send the engine a member of this process that is new or has changed."""
        self.own_members[member.id] = member
        self._send_soon()

    def join(self, publisher: Publisher) -> None:
        """Announce a new publisher."""
        member = self.new_member(publisher.name)
        publisher.member_id = member.id
        self.announce(member)

    def update(self, publisher: Publisher) -> None:
        """Announce the step that a publisher itself waits for, if this step has changed."""
        member = self.own_members.get(publisher.member_id)
        if member is not None and member.waits_for != publisher.waits_for:
            self.announce(member._replace(waits_for=publisher.waits_for))

    def leave(self, member_id: str, name: str, step: int, exc: BaseException | None) -> None:
        """Announce the exit of a member at `step`, with the error that it failed with, if any.

        An exit with an empty name only removes the member. It ends no waits in other processes.
        """
        self.own_members.pop(member_id, None)
        error = "" if exc is None or is_clean_end(exc) else error_text(exc)
        number = next(self._numbers)
        leave = Leave(member_id, name, step, error, writer=f"{self.process}/", seq=number)
        self._exits.append(leave)
        # Sending opens the store. Do not open it only to announce an exit.
        if self._connection.is_open or self.is_sending:
            self._send_soon()

    # Sending members and exits.

    @property
    def is_sending(self) -> bool:
        """Whether members and exits are being sent."""
        return self._send_task is not None and not self._send_task.done()

    def send_again(self) -> None:
        """Send all members of this process again.

        This renews their leases, and restores them in an engine that has lost them.
        """
        self._sent.clear()
        self._send_soon()

    def _send_soon(self) -> None:
        """Start to send the pending requests, if any, in a task. It also opens the store."""
        if self._unsent() and not self._stopped:
            self._send_task = self._connection.tasks.ensure_running(
                self._send_task, self._send_all, "announcing publishers"
            )

    async def flush(self, timeout: float | None) -> None:
        """Wait until the pending requests are sent, `timeout` seconds at most."""
        if self._send_task is not None:
            await wait_done([self._send_task], timeout)

    def stop(self) -> None:
        """Stop sending: pending requests are dropped."""
        self._stopped = True
        self._retry_timer.cancel()
        if self._send_task is not None:
            self._send_task.cancel()

    def _unsent(self) -> list[Join | Leave]:
        """Return the pending requests: of members that are new or have changed, then of exits.

        Members come first, so that the others learn of a new publisher before the exit of an old
        one, which could otherwise end their waits.
        """
        members = self.own_members.values()
        joins = [Join(member) for member in members if self._sent.get(member.id) != member]
        return [*joins, *self._exits]

    async def _send_all(self) -> None:
        """Send all pending requests. If that fails, try again later."""
        try:
            while self._unsent():
                await self._connection.call(self._send_next)
            self._failures = 0
        except Exception as error:
            # Any error, even one that no engine should raise: otherwise no lease would be renewed
            # any more.
            self._on_failure(error)

    async def _send_next(self) -> None:
        """Send the first pending request."""
        # Choose the request here, because the connection calls this again after an outage, and a
        # member may have changed or left meanwhile.
        pending = self._unsent()
        if not pending:
            return
        request = pending[0]
        await self._engine.request(request)
        if isinstance(request, Join):
            self._sent[request.member.id] = request.member
        else:
            self._exits.remove(request)
            self._sent.pop(request.id, None)

    def _on_failure(self, error: Exception) -> None:
        """Log that members or exits could not be sent. Try again later if the store is open."""
        self._failures += 1
        # If the store is not open, the call that opens it later sends them.
        if self._connection.is_open:
            pause_secs = _BACKOFF.pause_secs(self._failures)
            self._retry_timer.cancel()
            self._retry_timer = self._clock.call_later(pause_secs, self._send_soon)
        log = logger.info if self._failures > 1 else logger.warning
        log("run %s: could not announce its publishers: %s", self._waits.run, error)

    # Leases.

    def begin_leases(self) -> None:
        """Let the leases of other processes begin now, and start the task that keeps leases.

        Called after each connection, because no lease could be renewed during an outage.
        """
        self._silent_reads.clear()
        # Leases are infinite if the engine itself removes the members of dead processes.
        if math.isfinite(self._lease_secs):
            self._lease_task = self._connection.tasks.ensure_running(
                self._lease_task, self._keep_leases, "leases"
            )

    async def _keep_leases(self) -> None:
        """Renew the leases of this process, and end expired leases of others."""
        while True:
            began = self._clock.now()
            await sleep(self._lease_secs / _RENEWALS_PER_LEASE, self._clock)
            slept_secs = self._clock.now() - began
            if self.own_members and slept_secs > self._lease_secs:
                logger.warning(
                    "run %s: no lease was renewed for %.1f s, as the event loop was blocked or the"
                    " process stopped, and each lasts %g s: other processes may have found it dead;"
                    " run what blocks in a thread, or give a longer lease_secs=",
                    self._waits.run,
                    slept_secs,
                    self._lease_secs,
                )
            self.send_again()
            try:
                if self._others:
                    await self._connection.call(self._expire_silent)
            except Exception as error:
                # Any error, even one that no engine should raise: otherwise no lease would be
                # renewed any more.
                logger.warning("run %s: could not read the leases: %s", self._waits.run, error)

    async def _expire_silent(self) -> None:
        """Read the run, and request the removal of the members whose leases have run out.

        The engine ignores a request if the member has been renewed since the read.
        """
        self.observe(await self._engine.read())
        previous = self._silent_reads
        self._silent_reads = {}
        for member in self._others:
            removal = Expire(member.id, member.heartbeat)
            # The first read with this heartbeat has the number 0, because the lease begins with it.
            silent_reads = previous.get(removal, -1) + 1
            self._silent_reads[removal] = silent_reads
            # The lease of a member may be longer than the leases of this process: then it lasts for
            # more reads. If it is shorter, it lasts for four reads as well: between fewer reads, a
            # renewal may not have been able to arrive.
            leases = max(1.0, member.ttl / self._lease_secs)
            if silent_reads >= _RENEWALS_PER_LEASE * leases:
                await self._engine.request(removal)

    # Snapshots of the run.

    async def read(self) -> Snapshot:
        """Read the run. The caller passes the snapshot to `observe`."""
        return await self._connection.call(self._engine.read)

    def refresh(self) -> asyncio.Task[None]:
        """Start a task that reads the run and then ends the waits if none can succeed. Return it.

        Concurrent callers share the task.
        """
        self._refresh_wanted = True
        self._refresh_task = self._connection.tasks.ensure_running(
            self._refresh_task, self._refresh, "reading the run"
        )
        return self._refresh_task

    async def _refresh(self) -> None:
        """Read the run, and end the waits if none can succeed.

        If `refresh` was called during the read, read the run again: its caller needs a later state.
        """
        snapshot = self._waits.snapshot
        try:
            while self._refresh_wanted:
                self._refresh_wanted = False
                snapshot = await self.read()
            self.observe(snapshot)
            self._waits.fail_unreachable()
        except Exception as error:
            # Any error, even one that no engine should raise: otherwise the waits might never end.
            logger.warning("run %s: could not read the publishers: %s", self._waits.run, error)
            if self._waits.unreachable_error is not None and isinstance(error, AiohooksError):
                self._waits.abort(error)

    def observe(self, snapshot: Snapshot) -> None:
        """Record a snapshot that was read or reported, and wake the waits that it concerns.

        Of a snapshot that is older than the latest one, only the position counts.
        """
        waits = self._waits
        waits.observe(snapshot.position)
        previous = waits.snapshot
        is_new_run = snapshot.run_id != previous.run_id
        if not is_new_run and snapshot.revision < previous.revision:
            return
        waits.observe_run(snapshot)
        waits.other_publishers = self._other_publishers
        last_exit = snapshot.last_exit
        if last_exit is not None and (is_new_run or last_exit != previous.last_exit):
            has_failed = last_exit.error or last_exit.lost
            is_first_snapshot = previous.revision < 0
            # Ignore a failure from before this process has connected: this process may be the
            # successor of the member that failed, or wait for the successor.
            if not (is_first_snapshot and has_failed):
                waits.last_exit = self._publisher_exit(last_exit)
        waits.check_reachable()
        if snapshot.chief is None:
            waits.vacancies.wake()

    def reserve_lead(self) -> None:
        """Reserve the lead for the chief of the lost run, for the time of a lease.

        The chief may not have connected again yet. In the chief's process, do nothing.
        """
        if self._waits.snapshot.leader != self.process:
            self._lead_reserved_until = self._clock.now() + self._lease_secs

    @property
    def may_lead(self) -> bool:
        """Whether this process may request the lead: it is free and not reserved."""
        return self._waits.snapshot.chief is None and self._clock.now() >= self._lead_reserved_until

    async def wait_vacancy(self) -> None:
        """Read the run. If the lead is not free, wait until it may be, or the store is closed."""
        self.observe(await self.read())
        if self.may_lead:
            return
        logger.info("run %s: waiting for the lead", self._waits.run)
        secs = None  # wait until the chief leaves
        if self._waits.snapshot.chief is None:
            # The lead is only reserved. Nothing is reported when the reservation ends.
            secs = self._lead_reserved_until - self._clock.now()
        await wait_for_others(self._waits.vacancies.wait(secs, self._clock))

    def _publisher_exit(self, last_exit: LastExit) -> PublisherExit | None:
        """Convert an exit that the engine reports to the exit that ends the waits.

        Return None if the waits continue until a successor registers.
        """
        name = last_exit.name
        step = last_exit.step
        error: AiohooksError | None = None
        if last_exit.lost:
            run = self._waits.run
            logger.warning("run %s: %s was found dead, last seen at step %d", run, name, step)
            if self._waits_for_successors:
                return None
            error = UnavailableError(
                f"{name} was found dead: its lease ran out, or its process was gone"
            )
        elif last_exit.error:
            error = AiohooksError(last_exit.error)
        own_exit = self._waits.last_exit
        # The engine also reports the exits of this process, but only with the text of the error. So
        # keep the exit of this process, which has the exception. The comparison ignores errors.
        if own_exit == PublisherExit(name, step):
            return own_exit
        return PublisherExit(name, step, error, is_remote=True)

    @property
    def _others(self) -> list[Member]:
        """The members of other processes."""
        members = self._waits.snapshot.members
        return [member for member in members if member.process != self.process]

    @property
    def _other_publishers(self) -> tuple[Member, ...]:
        """The members of other processes that may advance the run: publishers and the chief.

        The chief is left out if its process has a publisher as well: no process counts twice.
        """
        members = self._others
        # The processes with a publisher. A member with a term is a chief, and no publisher.
        publishing = {member.process for member in members if not member.term}
        return tuple(
            member for member in members if not member.term or member.process not in publishing
        )
