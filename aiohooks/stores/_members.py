"""The members of a run: the publishers and the chief of this process, and those of the others."""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import Literal

from aiohooks._core.cancel import wait_done
from aiohooks._core.clock import NO_TIMER, sleep
from aiohooks._core.waits import Backoff, wait_for_others
from aiohooks.errors import AiohooksError, UnavailableError, is_clean_end
from aiohooks.stores._connection import Connection
from aiohooks.stores._protocol import (
    Expire,
    Join,
    LastExit,
    Leave,
    Member,
    Request,
    Snapshot,
    error_text,
    logger,
)
from aiohooks.stores.publishers import Publisher, PublisherExit

OnLost = Literal["raise", "keep"]
_BACKOFF = Backoff(initial_secs=0.1, max_secs=5.0)
_MOST_BEATS = 4  # of a process during its lease


class Members:
    """The members of a run.

    A member of this process is sent to the engine when it has changed, and again to renew its
    lease. An exit is sent until it is answered, and counts once.

    No engine compares clocks, and none removes a member by itself. Each process renews its leases
    four times in their time. As often it reads the run, if there are other members, and requests
    the removal of those that have shown no heartbeat for the time of their lease. Time in which it
    does not read does not count.
    """

    def __init__(self, connection: Connection, *, lease_secs: float, on_lost: OnLost) -> None:
        """Announce nothing yet; `on_lost` is as for `SharedStepStore`."""
        link = connection.engine.link
        self.process: str = link.process
        self.here: dict[str, Member] = {}
        """The members that the engine is to know, by their ids."""
        self.candidate: Member | None = None
        """This process as the chief, from its request to lead until it steps down."""
        self._connection = connection
        self._engine = connection.engine
        self._clock = link.clock
        self._waits = link.waits
        self._lease_secs = lease_secs
        self._waits_for_successors = on_lost == "keep"
        self._reserved_until = 0.0  # the lead of a lost run, for its chief
        self._numbers = itertools.count(1)  # of members and exits
        self._sent: dict[str, Member] = {}  # as the engine knows them
        self._exits: list[Leave] = []  # that the engine has not answered yet
        self._sending: asyncio.Task[None] | None = None
        self._stopped = False
        self._failures = 0  # in a row
        self._retry = NO_TIMER
        self._renewing: asyncio.Task[None] | None = None
        # How often the members of others have been read again with the same heartbeat.
        self._silent_reads: dict[tuple[str, int], int] = {}
        self._refreshing: asyncio.Task[None] | None = None
        self._refresh_wanted = False  # since the latest read began

    # The members of this process.

    @property
    def chief(self) -> Member | None:
        """This process as the chief, while it leads."""
        return None if self.candidate is None else self.here.get(self.candidate.id)

    def new(self, name: str) -> Member:
        return Member(f"{self.process}/{next(self._numbers)}", name, self._lease_secs)

    def put(self, member: Member) -> None:
        """Announce a member that is new or has changed."""
        self.here[member.id] = member
        self._send_soon()

    def join(self, publisher: Publisher) -> None:
        member = self.new(publisher.name)
        publisher.member_id = member.id
        self.put(member)

    def update(self, publisher: Publisher) -> None:
        """Announce the step that a publisher waits for itself."""
        member = self.here.get(publisher.member_id)
        if member is not None and member.waits_for != publisher.waits_for:
            self.put(member._replace(waits_for=publisher.waits_for))

    def leave(self, member_id: str, name: str, step: int, exc: BaseException | None) -> None:
        """Announce that a member has left at `step`, and the error that it failed with.

        Without a name the waits of other processes do not get this exit.
        """
        self.here.pop(member_id, None)
        error = "" if exc is None or is_clean_end(exc) else error_text(exc)
        number = next(self._numbers)
        self._exits.append(Leave(member_id, name, step, error, f"{self.process}/", number))
        # The engine is not connected only to learn that a member has left.
        if self._connection.is_open or self.is_sending:
            self._send_soon()

    # Announcing them.

    @property
    def is_sending(self) -> bool:
        return self._sending is not None and not self._sending.done()

    def send_again(self) -> None:
        """Send the engine all members: to renew their leases, or because it may have lost them."""
        self._sent.clear()
        self._send_soon()

    def _send_soon(self) -> None:
        """Start sending the pending changes in the background, which also opens the store."""
        if self._unsent() and not self._stopped:
            self._sending = self._connection.tasks.ensure_running(
                self._sending, self._send_all, "announcing publishers"
            )

    async def flush(self, timeout: float | None) -> None:
        """Wait until the engine knows the members, `timeout` seconds at most."""
        if self._sending is not None:
            await wait_done([self._sending], timeout)

    def stop(self) -> None:
        """Send nothing any more."""
        self._stopped = True
        self._retry.cancel()
        if self._sending is not None:
            self._sending.cancel()

    def _unsent(self) -> list[Request]:
        """Return the requests that bring the engine up to date.

        Members come first: an exit of the last known publisher would end all waits.
        """
        members = self.here.values()
        joins = [Join(member) for member in members if self._sent.get(member.id) != member]
        return [*joins, *self._exits]

    async def _send_all(self) -> None:
        """Send until the engine knows all, and try again later if that fails."""
        try:
            while self._unsent():
                await self._connection.call(self._send_next)
            self._failures = 0
        except Exception as error:
            # Errors that no engine should raise are caught as well: otherwise no lease would be
            # renewed any more.
            self._on_failure(error)

    async def _send_next(self) -> None:
        # Chosen anew after an outage: the member may have changed meanwhile.
        for request in self._unsent()[:1]:
            await self._engine.request(request)
            if isinstance(request, Join):
                self._sent[request.member.id] = request.member
            elif isinstance(request, Leave):
                self._exits.remove(request)
                self._sent.pop(request.id, None)

    def _on_failure(self, error: Exception) -> None:
        """Log that the engine does not know all, and plan the next attempt."""
        self._failures += 1
        if self._connection.is_open:  # otherwise the call that opens it sends them
            pause_secs = _BACKOFF.pause_secs(self._failures)
            self._retry.cancel()
            self._retry = self._clock.call_later(pause_secs, self._send_soon)
        log = logger.info if self._failures > 1 else logger.warning
        log("run %s: could not announce its publishers: %s", self._waits.run, error)

    # Leases.

    def begin_leases(self) -> None:
        """Begin all leases of others again: the engine was unavailable."""
        self._silent_reads.clear()
        if math.isfinite(self._lease_secs):
            self._renewing = self._connection.tasks.ensure_running(
                self._renewing, self._keep_leases, "leases"
            )

    async def _keep_leases(self) -> None:
        """Renew the leases of this process, and find those of others that have run out."""
        while True:
            began = self._clock.now()
            await sleep(self._lease_secs / _MOST_BEATS, self._clock)
            slept_secs = self._clock.now() - began
            if self.here and slept_secs > self._lease_secs:
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
                # Errors that no engine should raise are caught as well: otherwise no lease would
                # be renewed any more.
                logger.warning("run %s: could not read the leases: %s", self._waits.run, error)

    async def _expire_silent(self) -> None:
        """Read the run, and request the removal of the members whose leases have run out.

        The engine ignores a request if the member has sent another heartbeat since.
        """
        self.observe(await self._engine.read())
        previous = self._silent_reads
        self._silent_reads = {}
        for member in self._others:
            lease = (member.id, member.heartbeat)
            reads = previous.get(lease, -1) + 1
            self._silent_reads[lease] = reads
            # Not fewer than it sends heartbeats: before a single read none may have been able to
            # arrive.
            if reads >= _MOST_BEATS * max(1.0, member.ttl / self._lease_secs):
                await self._engine.request(Expire(*lease))

    # Snapshots of the run.

    async def read(self) -> Snapshot:
        """Read the run."""
        return await self._connection.call(self._engine.read)

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
        snapshot = self._waits.snapshot
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

    def observe(self, snapshot: Snapshot) -> None:
        """Take note of a snapshot, also of one that is out of date."""
        waits = self._waits
        waits.observe(snapshot.position)
        before = waits.snapshot
        is_another_run = snapshot.run_id != before.run_id
        if snapshot.revision < before.revision and not is_another_run:
            return  # a read that a newer report has overtaken
        waits.observe_run(snapshot)
        waits.others = self._other_publishers
        left = snapshot.last_exit
        is_new = is_another_run or left != before.last_exit
        if before.revision < 0 and left is not None and (left.error or left.lost):
            is_new = False  # it failed before this store was opened: its successor may come
        if left is not None and is_new:
            waits.last_exit = self._publisher_exit(left)
        waits.check_reachable()
        if snapshot.chief is None:
            waits.vacancies.wake()

    def reserve_lead(self) -> None:
        """Leave the lead of a lost run to its chief for one lease.

        A chief whose term is unknown here may not have noticed the loss yet.
        """
        if self._waits.snapshot.leader != self.process:
            self._reserved_until = self._clock.now() + self._lease_secs

    @property
    def may_lead(self) -> bool:
        """Whether this process may request the lead, as far as is known here."""
        return self._waits.snapshot.chief is None and self._clock.now() >= self._reserved_until

    async def wait_vacancy(self) -> None:
        """Wait until this process may request the lead, or until the store is closed."""
        self.observe(await self.read())
        if self.may_lead:
            return
        logger.info("run %s: waiting for the lead", self._waits.run)
        secs = None
        if self._waits.snapshot.chief is None:
            secs = self._reserved_until - self._clock.now()
        await wait_for_others(self._waits.vacancies.wait(secs, self._clock))

    def _publisher_exit(self, left: LastExit) -> PublisherExit | None:
        """Return how the last publisher left; None if waits stay for its successor."""
        error: AiohooksError | None = None
        if left.lost:
            run = self._waits.run
            logger.warning(
                "run %s: %s was found dead, last seen at step %d", run, left.name, left.step
            )
            if self._waits_for_successors:
                return None
            error = UnavailableError(
                f"{left.name} was found dead: its lease ran out, or its process was gone"
            )
        elif left.error:
            error = AiohooksError(left.error)
        own = self._waits.last_exit
        if own is not None and not own.is_remote and (own.name, own.step) == (left.name, left.step):
            return own  # the exit of this process, which has the error itself
        return PublisherExit(left.name, left.step, error, is_remote=True)

    @property
    def _others(self) -> list[Member]:
        """The members of other processes."""
        members = self._waits.snapshot.members
        return [member for member in members if member.process != self.process]

    @property
    def _other_publishers(self) -> tuple[Member, ...]:
        """The members of other processes, each process with a publisher without its chief."""
        members = self._others
        publishing = {member.process for member in members if not member.term}
        return tuple(
            member for member in members if not member.term or member.process not in publishing
        )
