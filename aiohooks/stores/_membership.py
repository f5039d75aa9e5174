"""What the engine is to know of the publishers and chiefs of this process, and what it reports of
those in others.
"""

from __future__ import annotations

import math

from aiohooks._aio.clock import NO_TIMER, Clock, current_clock
from aiohooks.errors import AiohooksError, UnavailableError, is_clean_end, safe_str
from aiohooks.stores._protocol import (
    Expire,
    Fail,
    Join,
    LastExit,
    Leave,
    Member,
    Position,
    Request,
    Snapshot,
    logger,
)
from aiohooks.stores._waiting import WaitRegistry
from aiohooks.stores.publishers import Publisher, PublisherExit

_MAX_TEXT = 4_000
"""The characters of an error's text that travel: every process of the run reads them each time it
reads the run.
"""


class Members:
    """The members in this process, and the requests that the engine has not been sent yet.

    An exit or a failure is sent until it is answered, and counts once. A member is sent when it has
    changed, and again to renew its lease, after a quarter of the lease time.
    """

    __slots__ = (
        "_lease_secs",
        "_numbers",
        "_once",
        "_publishers",
        "_sent",
        "_seq",
        "chief",
        "process",
    )

    def __init__(self, process: str, lease_secs: float) -> None:
        self.process = process
        self.chief: Member | None = None
        """The lease of this process while it is the chief."""
        self._lease_secs = lease_secs
        self._numbers = 0
        self._publishers: dict[Publisher, Member] = {}
        self._once: list[Leave | Fail] = []
        self._seq = 0
        self._sent: dict[str, Member] = {}

    def new(self, name: str, ttl: float | None = None) -> Member:
        self._numbers += 1
        return Member(
            f"{self.process}/{self._numbers}", name, self._lease_secs if ttl is None else ttl
        )

    def join(self, publisher: Publisher) -> None:
        self._publishers[publisher] = self.new(publisher.name)

    def update(self, publisher: Publisher) -> bool:
        """Take note of what a publisher waits for itself, and of its trace; return whether to send
        that.

        A trace is sent for the first time, and then along with waits: one for each step would cost
        a request for each step.
        """
        member = self._publishers.get(publisher)
        if member is None:
            return False
        waits_for = publisher.waits_for
        is_first_trace = bool(publisher.trace) and not member.trace
        if member.waits_for == waits_for and not is_first_trace:
            return False
        self._publishers[publisher] = member._replace(waits_for=waits_for, trace=publisher.trace)
        return True

    def of(self, publisher: Publisher) -> Member | None:
        """Return the member that a publisher of this process is."""
        return self._publishers.get(publisher)

    def leave(self, publisher: Publisher, step: int, exc: BaseException | None) -> None:
        """Remove a publisher that leaves at `step`, with what it failed with."""
        member = self._publishers.pop(publisher, None)
        if member is not None:
            self.leave_as(member, publisher.name, step, exc)

    def leave_as(self, member: Member, name: str, step: int, exc: BaseException | None) -> None:
        """Send the exit of a member; without a name the others are not notified."""
        error = "" if exc is None or is_clean_end(exc) else _text(exc)
        self._send_once(Leave(member.id, name, step, error))

    def fail(self, exc: BaseException) -> None:
        """Send that all waits are to fail."""
        self._send_once(Fail(_text(exc)))

    def _send_once(self, request: Leave | Fail) -> None:
        self._seq += 1
        # Another writer than that of the writes of this process, as the numbers of both begin at 1.
        self._once.append(request._replace(writer=f"{self.process}/", seq=self._seq))

    @property
    def here(self) -> tuple[Member, ...]:
        """The members in this process."""
        publishers = tuple(self._publishers.values())
        return publishers if self.chief is None else (*publishers, self.chief)

    def unsent(self) -> list[Request]:
        """Return the requests that bring the engine up to date.

        Members come first: an exit of the last known publisher would end all waits.
        """
        members = [member for member in self.here if self._sent.get(member.id) != member]
        return [*map(Join, members), *self._once]

    def mark_sent(self, request: Request) -> None:
        """Take note that the engine has answered one of them."""
        if isinstance(request, Join):
            self._sent[request.member.id] = request.member
        elif isinstance(request, (Leave, Fail)):
            self._once.remove(request)
            if isinstance(request, Leave):
                self._sent.pop(request.id, None)

    def mark_unsent(self) -> None:
        """Make all members unsent: to renew their leases, or to announce them again after an
        outage.
        """
        self._sent.clear()

    def up_to_date(self, request: Request) -> Request:
        """Return the request with its member as it is now."""
        if isinstance(request, Join):
            for member in self.here:
                if member.id == request.member.id:
                    return Join(member)
        return request

    @property
    def renewal_secs(self) -> float | None:
        """In how many seconds the leases need renewal; None if there are none."""
        secs = self._lease_secs if self.chief is None else min(self._lease_secs, self.chief.ttl)
        return secs / 4 if math.isfinite(secs) and (self._sent or self.here) else None


def _text(exc: BaseException) -> str:
    """Return what other processes get to know of an error: its class, and its message up to a
    limit.
    """
    text = f"{type(exc).__name__}: {safe_str(exc)}"
    excess = len(text) - _MAX_TEXT
    if excess > 0:
        note = "more characters were cut off; the process that failed has them"
        text = f"{text[:_MAX_TEXT]}... ({excess:,} {note})"
    return text


class LeaseWatch:
    """For how long the members of other processes have been silent, measured by the clock of this
    process alone.

    No engine compares clocks, and none removes a member by itself: a member renews its lease by a
    heartbeat, and a process that reads the run often enough, and for the time of the lease sees no
    other heartbeat, requests its removal. Time in which the run could not be read does not count:
    no heartbeat could arrive then. Of reads that are all late, each counts as one.
    """

    __slots__ = ("_clock", "_last", "_process", "_read_at", "silent")

    def __init__(self, clock: Clock, process: str) -> None:
        self._clock = clock
        self._process = process
        self._last: tuple[Member, ...] | None = None  # of the last snapshot
        self._read_at = -math.inf
        self.silent: dict[str, tuple[Member, float, bool]] = {}
        """Each member with a lease as last seen, for how long it has been silent, and whether the
        last read was late.
        """

    def restart(self) -> None:
        """Begin all leases again: the engine was unavailable."""
        self.silent.clear()

    def observe(self, members: tuple[Member, ...]) -> None:
        """Take note of the members in a snapshot that was just read; the same object again changes
        nothing.
        """
        if members and members is self._last:
            return
        self._last = members
        now = self._clock.now()
        elapsed, self._read_at = now - self._read_at, now
        known, self.silent = self.silent, {}
        for member in members:
            if member.process != self._process and math.isfinite(member.ttl):
                before, silent, was_late = known.get(member.id, (None, 0.0, False))
                late = before is not None and elapsed > member.ttl / 2
                if (
                    before is None
                    or before.heartbeat != member.heartbeat
                    or (late and not was_late)
                ):
                    silent = 0.0
                else:
                    silent += member.ttl / 4 if late else elapsed
                self.silent[member.id] = member, silent, late

    def expired(self) -> list[Expire]:
        """Return the requests to remove the members whose leases have run out."""
        return [
            Expire(member.id, member.heartbeat)
            for member, silent, _ in self.silent.values()
            if silent >= member.ttl
        ]

    def secs_left(self, member_id: str, now: float) -> float | None:
        """Return in how many seconds the lease of a member runs out, as far as is known here; None
        without one.
        """
        if (known := self.silent.get(member_id)) is None:
            return None
        member, silent, _ = known
        return max(0.0, member.ttl - silent - (now - self._read_at))

    @property
    def read_secs(self) -> float:
        """In how many seconds to read the run again, counted from the last read, for the member
        whose lease could run out first.
        """
        next_reads = [
            min(member.ttl / 4, member.ttl - silent) for member, silent, _ in self.silent.values()
        ]
        return max(0.0, self._read_at + min(next_reads, default=0.0) - self._clock.now())


class RunWatcher:
    """Compares the engine's snapshots of a run, and passes what is new to the registry of waits."""

    __slots__ = (
        "_clock",
        "_grace",
        "_grace_secs",
        "_hold",
        "_keep",
        "_lease_secs",
        "_missing",
        "_observed",
        "_process",
        "_seen_exit",
        "_waits",
        "snapshot",
    )

    def __init__(
        self,
        waits: WaitRegistry,
        process: str,
        *,
        keep: bool,
        join_grace_secs: float,
        lease_secs: float,
    ) -> None:
        """With `keep`, waiters stay for the successor of a publisher that was found dead."""
        self.snapshot = Snapshot(Position(1, 0))
        """The latest one."""
        self._observed = False  # whether there has been one
        self._waits = waits
        self._clock = current_clock()
        self._process = process
        self._keep = keep
        self._grace_secs = join_grace_secs
        self._lease_secs = lease_secs
        self._grace = NO_TIMER
        self._hold = NO_TIMER
        # The members of a run that the engine has lost which have not registered again yet.
        self._missing: dict[str, Member] = {}
        self._seen_exit = 0  # the number of the latest exit that the registry knows

    def observe(self, snapshot: Snapshot) -> None:
        """Take note of a snapshot, also of one that is out of date."""
        is_first = not self._observed
        before = self.snapshot
        if is_first:  # another failure or run than none is nothing new
            before = before._replace(failure=snapshot.failure, run_id=snapshot.run_id)
        self._observed = True
        self.snapshot = snapshot
        if is_first:
            self._begin_grace()
        elif snapshot.members:
            self._grace.cancel()
        failure = snapshot.failure
        if failure is not None and failure != before.failure:
            self._waits.fail(AiohooksError(failure.error), failure.position)
        # Without a living member nothing is initialised any more: the run has ended, or its chief
        # will be restarted.
        is_alive = bool(snapshot.members) or snapshot.last_exit is None
        self._waits.set_initialised(snapshot.ready and is_alive)
        self._observe_loss(before)
        self._report()

    # All have left before this store was opened, the last one not normally: its successor may
    # come.

    def _begin_grace(self) -> None:
        left = self.snapshot.last_exit
        if left is None or self.snapshot.members or not self._grace_secs:
            return
        if left.error or left.lost:
            self._seen_exit = left.number
            self._grace = self._clock.call_later(self._grace_secs, self._end_grace)

    def _end_grace(self) -> None:
        self._seen_exit = 0
        self._report()

    # After a loss of data, all waits continue until each publisher could register again.

    def _observe_loss(self, before: Snapshot) -> None:
        is_another_run = self.snapshot.run_id != before.run_id
        if is_another_run:
            self._seen_exit = 0
            for member in before.members:
                if member.process != self._process:
                    self._missing[member.id] = member
        if is_another_run or self.snapshot.losses > before.losses:
            self._hold_waits()
        for member in self.snapshot.members:
            self._missing.pop(member.id, None)

    def _hold_waits(self) -> None:
        self._stop_hold()
        secs = max([self._lease_secs, *(member.ttl for member in self._missing.values())])
        self._hold = self._clock.call_later(secs, self._end_hold)
        self._waits.holds = True

    def pause_hold(self) -> None:
        """The engine is unavailable: let the time stand still, in which none could register."""
        self._hold.cancel()

    def restart_hold(self) -> None:
        """Begin the time again after an outage."""
        if self._waits.holds:
            self._hold_waits()

    def _end_hold(self) -> None:
        self._stop_hold()
        missing = tuple(self._missing.values())
        self._missing.clear()
        if missing and self.snapshot.last_exit is None:
            # The run that lost them cannot say that they are dead.
            step = self._waits.latest.step
            self._report_exit(LastExit(self._seen_exit, missing[-1].name, step, "", lost=True))
        else:
            self._report()

    def _stop_hold(self) -> None:
        self._hold.cancel()
        self._waits.holds = False

    def stop(self) -> None:
        self._grace.cancel()
        self._stop_hold()

    # The publishers of other processes, and how the last one left.

    def _report(self) -> None:
        left = self.snapshot.last_exit
        if left is None or left.number <= self._seen_exit:
            self._waits.observe_others(self._others, None, lost=False)
        else:
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
        own = self._waits.publishers.last_exit
        last_exit = None
        if own is not None and not own.is_remote and (own.name, own.step) == (left.name, left.step):
            last_exit = own  # this process's own exit, which has the error itself
        elif not (left.lost and self._keep):
            last_exit = PublisherExit(left.name, left.step, _error_of(left), is_remote=True)
        self._waits.observe_others(self._others, last_exit, lost=left.lost)

    @property
    def _others(self) -> tuple[Member, ...]:
        members = [member for member in self.snapshot.members if member.process != self._process]
        # A chief in a process that has a publisher does not count a second time.
        publishing = {member.process for member in members if not member.term}
        return tuple(
            member for member in members if not member.term or member.process not in publishing
        )


def _error_of(left: LastExit) -> AiohooksError | None:
    if left.lost:
        return UnavailableError(
            f"{left.name} was found dead: its lease ran out, or its process was gone"
        )
    return AiohooksError(left.error) if left.error else None
