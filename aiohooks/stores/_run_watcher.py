"""The snapshots of a run, the leases of other processes, and what follows for waits."""

from __future__ import annotations

import asyncio
import math
from typing import Literal, NamedTuple

from aiohooks._core.clock import NO_TIMER, Clock
from aiohooks._core.waits import wait_for_others
from aiohooks.errors import AiohooksError, StoreUnavailableError, UnavailableError
from aiohooks.stores._connection import Connection
from aiohooks.stores._membership import Membership
from aiohooks.stores._protocol import (
    Expire,
    LastExit,
    Member,
    Position,
    Snapshot,
    logger,
)
from aiohooks.stores.publishers import PublisherExit

OnLost = Literal["raise", "keep"]


class Silence(NamedTuple):
    """A member of another process as it was last seen, and for how long it has been silent."""

    member: Member
    secs: float = 0.0

    def read_after(self, secs: float, member: Member) -> Silence:
        """Return the silence of the same member when it is read again, so many seconds later."""
        if member.heartbeat != self.member.heartbeat:
            return Silence(member)
        # A read that comes late does not count more than one in time: no heartbeat may have been
        # able to arrive.
        return Silence(member, self.secs + min(secs, member.ttl / 4))


class LeaseWatch:
    """Measures for how long the members of other processes have been silent.

    It uses the clock of this process alone.

    No engine compares clocks, and none removes a member by itself: a member renews its lease by a
    heartbeat, and a process that reads the run and for the time of the lease sees no other
    heartbeat requests its removal. Time in which the run was not read does not count.
    """

    def __init__(self, clock: Clock, process: str) -> None:
        """Watch the members of other processes than this one."""
        self._clock = clock
        self._process = process
        self.silences: dict[str, Silence] = {}
        """By the ids of members with a lease."""
        self._read_at = -math.inf

    def restart(self) -> None:
        """Begin all leases again: the engine was unavailable."""
        self.silences.clear()

    def observe(self, members: tuple[Member, ...]) -> None:
        """Take note of the members in a snapshot that was just read."""
        now = self._clock.now()
        elapsed_secs = now - self._read_at
        self._read_at = now
        previous = self.silences
        self.silences = {}
        for member in members:
            if member.process == self._process or not math.isfinite(member.ttl):
                continue
            if member.id in previous:
                silence = previous[member.id].read_after(elapsed_secs, member)
            else:
                silence = Silence(member)
            self.silences[member.id] = silence

    def expired(self) -> list[Expire]:
        """Return the requests to remove the members whose leases have run out.

        The engine ignores a request if the member has sent another heartbeat since.
        """
        return [
            Expire(silence.member.id, silence.member.heartbeat)
            for silence in self.silences.values()
            if silence.secs >= silence.member.ttl
        ]

    @property
    def read_secs(self) -> float | None:
        """The seconds until the next read of the run, for the lease that could run out first.

        None without a lease.
        """
        if not self.silences:
            return None
        next_reads: list[float] = []
        for silence in self.silences.values():
            ttl = silence.member.ttl
            next_reads.append(min(ttl / 4, ttl - silence.secs))
        return max(0.0, self._read_at + min(next_reads) - self._clock.now())


class RunWatcher:
    """Reads the run, compares its snapshots, and passes what is new to the registry of waits."""

    def __init__(
        self,
        connection: Connection,
        members: Membership,
        *,
        on_lost: OnLost,
        return_secs: float,
    ) -> None:
        """Watch the run of a store.

        Args:
            connection: the connection to the engine.
            members: the members of this process.
            on_lost: as for `SharedStepStore`.
            return_secs: the time in which a publisher may have a successor, or register again after
                the engine has lost its data.
        """
        self.snapshot: Snapshot = Snapshot(Position(1, 0))
        """The latest one."""
        self._connection = connection
        self._engine = connection.engine
        self._waits = connection.engine.link.waits
        self._members = members
        self._waits_for_successors = on_lost == "keep"
        # No member of the run: its lease is the time in which others may register again, which
        # passes as that of every lease does, while the run is read.
        self._registration = Member("", "registration", return_secs)
        self._refreshing: asyncio.Task[None] | None = None
        self._refresh_wanted = False  # since the latest read began
        self.leases: LeaseWatch = LeaseWatch(self._engine.link.clock, members.process)
        self._next_read = NO_TIMER
        self._observed = False  # whether there has been a snapshot
        # Whether a chief in another process may still register again after a loss.
        self._lead_is_reserved = False
        # The members of lost runs in other processes, which may register again.
        self._missing: tuple[Member, ...] = ()
        self._seen_exit = 0  # the number of the latest exit that the registry knows

    def stop(self) -> None:
        self._next_read.cancel()

    # Reading.

    async def read(self) -> Snapshot:
        """Read the run, without the members whose leases have run out."""
        return await self._connection.call(self._read_living)

    async def _read_living(self) -> Snapshot:
        snapshot = await self._engine.read()
        self._observe_leases(snapshot)
        expired = self.leases.expired()
        if not expired:
            return snapshot
        try:
            for request in expired:
                await self._engine.request(request)
        except StoreUnavailableError:
            # They may not have been able to renew their leases, either.
            self.leases.restart()
            raise
        return await self._engine.read()

    def refresh(self) -> asyncio.Task[None]:
        """Read the run in a task, which fails the waits if they cannot succeed.

        Concurrent callers share it.
        """
        self._refresh_wanted = True
        self._refreshing = self._connection.tasks.ensure_running(
            self._refreshing, self._refresh, "reading the run"
        )
        return self._refreshing

    async def _refresh(self) -> None:
        snapshot = self.snapshot
        try:
            while self._refresh_wanted:  # what was read before the request does not answer it
                self._refresh_wanted = False
                snapshot = await self.read()
            self.observe(snapshot)
            self._waits.fail_unreachable()
        except Exception as error:
            # Errors that no engine should raise are caught as well: otherwise waits might not end.
            logger.warning("run %s: could not read the publishers: %s", self._waits.run, error)
            if self._waits.unreachable is not None and isinstance(error, AiohooksError):
                self._waits.abort(error)
            self.schedule_read(least_secs=self._members.lease_secs / 4)

    def schedule_read(self, least_secs: float = 0.0) -> None:
        """Schedule the next read of the run, which shows which leases were renewed.

        `observe` calls this again. Without a wait here there is no read.
        """
        self._next_read.cancel()
        secs = self.leases.read_secs
        if secs is not None and (self._waits.waiting or self._waits.vacancies):
            secs = max(secs, least_secs)
            self._next_read = self._engine.link.clock.call_later(secs, self.refresh)

    @property
    def is_vacant(self) -> bool:
        """Whether this process may request the lead: there is no chief, as far as is known here."""
        return self.snapshot.chief is None and not self._lead_is_reserved

    async def wait_vacancy(self) -> None:
        """Wait until this process may request the lead, or until the store is closed."""
        self.observe(await self.read())
        if self.is_vacant:
            return
        logger.info("run %s: waiting for the lead", self._waits.run)
        try:
            with self._waits.vacancies.added() as vacancy:
                self.schedule_read()  # the lease of the chief may run out
                await wait_for_others(vacancy)
        finally:
            self.schedule_read()  # perhaps nothing waits here any more

    # Snapshots.

    def observe(self, snapshot: Snapshot) -> None:
        """Take note of a snapshot, also of one that is out of date."""
        self._waits.observe(snapshot.position)
        before = self.snapshot
        if snapshot.run_id == before.run_id and snapshot.revision < before.revision:
            return  # a read that a newer report has overtaken
        is_first = not self._observed
        self._observed = True
        self.snapshot = snapshot
        is_initialised = snapshot.is_initialised
        self._waits.observe_term(snapshot.term, snapshot.leader, is_initialised=is_initialised)
        if is_first:
            self._await_successor()
        elif snapshot.run_id != before.run_id:
            self._await_members(before.members)
        self._observe_leases(snapshot)
        self._report()
        if self.is_vacant:
            self._waits.vacancies.wake()
        self.schedule_read()

    # No wait ends for want of a publisher while one may still register.

    def _await_successor(self) -> None:
        """Let the publisher that failed before this store was opened have a successor."""
        left = self.snapshot.last_exit
        if left is not None and not self.snapshot.members and (left.error or left.lost):
            self._seen_exit = left.number
            self._waits.registration_open = True

    def _await_members(self, lost: tuple[Member, ...]) -> None:
        """Let the members of a run that the engine has lost register again."""
        here = self._members.process
        self._missing += tuple(member for member in lost if member.process != here)
        self._seen_exit = 0
        self._waits.registration_open = True
        self._lead_is_reserved = self._waits.leader != here

    def _observe_leases(self, snapshot: Snapshot) -> None:
        """Note which members were renewed, and end the registration when its time is up."""
        registration = (self._registration,) * self._waits.registration_open
        self.leases.observe((*snapshot.members, *registration))
        if Expire(self._registration.id, 0) in self.leases.expired():
            self._end_registration()

    def _end_registration(self) -> None:
        """Count the processes that have not registered again as dead."""
        self._waits.registration_open = False
        self._lead_is_reserved = False
        members = self.snapshot.members
        returned = {member.process for member in members}
        missing = [member for member in self._missing if member.process not in returned]
        self._missing = ()
        if not members:
            self._seen_exit = 0
        if missing and self.snapshot.last_exit is None:
            # The run as it is now never knew it, so that nothing else reports its death.
            step = self._waits.latest.step
            self._report_exit(LastExit(0, missing[-1].name, step, error="", lost=True))

    # The publishers of other processes, and how the last one left.

    def _report(self) -> None:
        """Pass the publishers to the registry of waits, and the last exit if it is new."""
        left = self.snapshot.last_exit
        if left is None or left.number <= self._seen_exit:
            self._waits.observe_others(self._other_publishers, None, lost=False)
            return
        self._seen_exit = left.number
        self._report_exit(left)

    def _report_exit(self, left: LastExit) -> None:
        if left.lost:
            logger.warning(
                "run %s: %s was found dead, last seen at step %d",
                self._waits.run,
                left.name,
                left.step,
            )
        publisher_exit = self._publisher_exit(left)
        self._waits.observe_others(self._other_publishers, publisher_exit, lost=left.lost)

    def _publisher_exit(self, left: LastExit) -> PublisherExit | None:
        """Return how the last publisher left; None if waits stay for its successor."""
        own = self._waits.publishers.last_exit
        if own is not None and not own.is_remote and (own.name, own.step) == (left.name, left.step):
            return own  # the exit of this process, which has the error itself
        if left.lost and self._waits_for_successors:
            return None
        error: AiohooksError | None = None
        if left.lost:
            error = UnavailableError(
                f"{left.name} was found dead: its lease ran out, or its process was gone"
            )
        elif left.error:
            error = AiohooksError(left.error)
        return PublisherExit(left.name, left.step, error, is_remote=True)

    @property
    def _other_publishers(self) -> tuple[Member, ...]:
        """The members of other processes, each process with a publisher without its chief."""
        here = self._members.process
        members = [member for member in self.snapshot.members if member.process != here]
        publishing = {member.process for member in members if not member.term}
        return tuple(
            member for member in members if not member.term or member.process not in publishing
        )
