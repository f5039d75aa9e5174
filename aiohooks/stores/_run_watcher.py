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
        join_grace_secs: float,
    ) -> None:
        """The options are those of `SharedStepStore`."""
        self.snapshot: Snapshot = Snapshot(Position(1, 0))
        """The latest one."""
        self._connection = connection
        self._engine = connection.engine
        self._waits = connection.engine.link.waits
        self._members = members
        self._waits_for_successors = on_lost == "keep"
        self._grace_secs = join_grace_secs
        self._refreshing: asyncio.Task[None] | None = None
        self._refresh_wanted = False  # since the latest read began
        self.leases: LeaseWatch = LeaseWatch(self._engine.link.clock, members.process)
        self._next_read = NO_TIMER
        self._observed = False  # whether there has been a snapshot
        self._grace = NO_TIMER
        self._registration = NO_TIMER
        self._chief_may_return = False  # which this process need not have known
        # The members of a lost run that have not registered again yet.
        self._missing: dict[str, Member] = {}
        self._seen_exit = 0  # the number of the latest exit that the registry knows

    @property
    def known(self) -> Snapshot:
        """How far this process knows the run to have come."""
        known = self.snapshot._replace(position=self._waits.latest)
        chief = self._members.chief
        if chief is None or chief.term < known.term:
            return known
        return known._replace(term=chief.term, members=(chief,))

    def stop(self) -> None:
        self._grace.cancel()
        self._close_registration()
        self._next_read.cancel()

    # Reading.

    async def read(self) -> Snapshot:
        """Read the run, without the members whose leases have run out."""
        return await self._connection.call(self._read_living)

    async def _read_living(self) -> Snapshot:
        snapshot = await self._engine.read()
        self.leases.observe(snapshot.members)
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
    def may_lead(self) -> bool:
        """Whether there may be no chief but this process."""
        chief = self.snapshot.chief
        if chief is None:
            return not self._chief_may_return
        candidate = self._members.candidate
        return candidate is not None and candidate.id == chief.id

    async def wait_vacancy(self) -> None:
        """Wait until this process may request the lead, or until the store is closed.

        After a loss of data the previous chief has the time of a lease to register again.
        """
        self.observe(await self.read())
        if self.may_lead:
            return
        chief = self.snapshot.chief
        chief_name = "the previous chief" if chief is None else chief.name
        logger.info("run %s: waiting for the lead, which %s has", self._waits.run, chief_name)
        try:
            with self._waits.vacancies.added() as vacancy:
                self.schedule_read()  # the lease of the chief may run out
                await wait_for_others(vacancy)
        finally:
            self.schedule_read()  # perhaps nothing waits here any more

    # Snapshots.

    def restart_times(self) -> None:
        """Begin all times again after an outage, in which no member could be seen or register."""
        self.leases.restart()
        if self._waits.registration_open:
            self._open_registration()

    def observe(self, snapshot: Snapshot) -> None:
        """Take note of a snapshot, also of one that is out of date."""
        self._waits.observe(snapshot.position)
        before = self.snapshot
        if snapshot.run_id == before.run_id and snapshot.revision < before.revision:
            return  # a read that a newer report has overtaken
        is_first = not self._observed
        if is_first:  # another failure or run than none is nothing new
            before = before._replace(failure=snapshot.failure, run_id=snapshot.run_id)
        self._observed = True
        self.snapshot = snapshot
        self.leases.observe(snapshot.members)
        if is_first:
            self._begin_grace()
        elif snapshot.members:
            self._grace.cancel()
        failure = snapshot.failure
        if failure is not None and failure != before.failure:
            self._waits.fail(AiohooksError(failure.error), failure.position)
        self._waits.observe_term(snapshot.term, is_initialised=snapshot.is_initialised)
        self._observe_loss(before)
        self._report()
        if snapshot.losses:
            self._remove_ghost(snapshot.chief)
        if snapshot.chief is None and not self._chief_may_return:
            self._waits.vacancies.wake()
        self.schedule_read()

    def _remove_ghost(self, chief: Member | None) -> None:
        """Remove a chief of this process that has left already.

        After a loss of data, another process may have restored it without knowing that.
        """
        if chief is None or chief.process != self._members.process:
            return
        # The candidate is the only chief of this process that has not left.
        candidate = self._members.candidate
        is_live = candidate is not None and candidate.id == chief.id
        if not is_live:
            self._members.leave(chief.id, "", 0, None)

    # If the last publisher had failed or died before this store was opened, its successor may come.

    def _begin_grace(self) -> None:
        """Ignore the last exit for a while, if it was from before and not a normal one."""
        left = self.snapshot.last_exit
        if left is None or self.snapshot.members or not self._grace_secs:
            return
        if left.error or left.lost:
            self._seen_exit = left.number
            self._grace = self._engine.link.clock.call_later(self._grace_secs, self._end_grace)

    def _end_grace(self) -> None:
        self._seen_exit = 0
        self._report()

    # After a loss of data, publishers have the time of a lease to register again. No wait ends
    # meanwhile for want of a publisher.

    def _observe_loss(self, before: Snapshot) -> None:
        """Open the registration if the engine has lost the run since the snapshot `before`."""
        is_another_run = self.snapshot.run_id != before.run_id
        if is_another_run:
            self._seen_exit = 0
            self._chief_may_return = True
            for member in before.members:
                if member.process != self._members.process:
                    self._missing[member.id] = member
        if is_another_run or self.snapshot.losses > before.losses:
            self._open_registration()
        for member in self.snapshot.members:
            self._missing.pop(member.id, None)

    def _open_registration(self) -> None:
        self._close_registration()
        secs = max([self._members.lease_secs, *(member.ttl for member in self._missing.values())])
        self._registration = self._engine.link.clock.call_later(secs, self._end_registration)
        self._waits.registration_open = True

    def _end_registration(self) -> None:
        """Count the publishers that have not registered again as dead."""
        if self._connection.lost_at is not None:
            return  # they could not: `restart_times` begins the time again
        self._close_registration()
        self._chief_may_return = False
        self._waits.vacancies.wake()
        missing = tuple(self._missing.values())
        self._missing.clear()
        if not missing or self.snapshot.last_exit is not None:
            self._report()
            return
        # The run as it is now never knew them, so that nothing else reports their death. One exit
        # is enough to end the waits.
        last = missing[-1]
        step = self._waits.latest.step
        self._report_exit(LastExit(self._seen_exit, last.name, step, error="", lost=True))

    def _close_registration(self) -> None:
        self._registration.cancel()
        self._waits.registration_open = False

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
