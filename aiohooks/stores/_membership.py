"""The publishers and the chief of this process, and how the engine gets to know them."""

from __future__ import annotations

import asyncio
import math

from aiohooks._core.cancel import wait_done
from aiohooks._core.clock import TimerHandle
from aiohooks._core.waits import Backoff
from aiohooks.errors import StoreDamagedError, StoreRefusedError, is_clean_end
from aiohooks.stores._connection import Connection
from aiohooks.stores._protocol import (
    Answer,
    Fail,
    Join,
    Leave,
    Member,
    Request,
    error_text,
    logger,
)
from aiohooks.stores.publishers import Publisher

_BACKOFF = Backoff(initial_secs=0.1, max_secs=5.0)


class Members:
    """The members in this process, and the requests that the engine has not been sent yet.

    An exit or a failure is sent until it is answered, and counts once. A member is sent when it has
    changed, and again to renew its lease.
    """

    __slots__ = (
        "_numbers",
        "_once",
        "_publishers",
        "_sent",
        "_seq",
        "candidate",
        "chief",
        "lease_secs",
        "process",
    )

    def __init__(self, process: str, lease_secs: float) -> None:
        self.process: str = process
        self.lease_secs: float = lease_secs
        self.candidate: Member | None = None
        """This process as the chief, from its request to lead until it steps down."""
        self.chief: Member | None = None
        """The same while it is the chief."""
        self._numbers = 0
        self._publishers: dict[Publisher, Member] = {}
        self._once: list[Leave | Fail] = []
        self._seq = 0
        self._sent: dict[str, Member] = {}

    def new(self, name: str) -> Member:
        self._numbers += 1
        return Member(f"{self.process}/{self._numbers}", name, self.lease_secs)

    def join(self, publisher: Publisher) -> None:
        member = self.new(publisher.name)
        publisher.member_id = member.id
        self._publishers[publisher] = member

    def update(self, publisher: Publisher) -> bool:
        """Record the step that a publisher waits for itself, and its trace. Return True if the
        engine must be notified.

        A trace changes at every step. So the first one is sent, and later ones only along with
        another step to wait for.
        """
        member = self._publishers.get(publisher)
        if member is None:
            return False
        is_first_trace = bool(publisher.trace) and not member.trace
        if publisher.waits_for == member.waits_for and not is_first_trace:
            return False
        member = member._replace(waits_for=publisher.waits_for, trace=publisher.trace)
        self._publishers[publisher] = member
        return True

    def leave(self, publisher: Publisher, step: int, exc: BaseException | None) -> None:
        """Remove a publisher that leaves at `step`, with what it failed with."""
        member = self._publishers.pop(publisher, None)
        if member is not None:
            self.leave_as(member, publisher.name, step, exc)

    def leave_as(self, member: Member, name: str, step: int, exc: BaseException | None) -> None:
        """Send the exit of a member; without a name the others are not notified."""
        error = "" if exc is None or is_clean_end(exc) else error_text(exc)
        self._send_once(Leave(member.id, name, step, error))

    def fail(self, exc: BaseException) -> None:
        """Send that all waits are to fail."""
        self._send_once(Fail(error_text(exc)))

    def _send_once(self, request: Leave | Fail) -> None:
        self._seq += 1
        # Another writer than that of the writes of this process, as the numbers of both begin at 1.
        self._once.append(request._replace(writer=f"{self.process}/", seq=self._seq))

    @property
    def here(self) -> dict[str, Member]:
        """The members in this process, by their ids."""
        members = {member.id: member for member in self._publishers.values()}
        if self.chief is not None:
            members[self.chief.id] = self.chief
        return members

    def unsent(self) -> list[Request]:
        """Return the requests that bring the engine up to date.

        Members come first: an exit of the last known publisher would end all waits.
        """
        members = self.here.values()
        joins = [Join(member) for member in members if self._sent.get(member.id) != member]
        return [*joins, *self._once]

    def mark_sent(self, request: Request) -> None:
        """Take note that the engine has answered one of them."""
        if isinstance(request, Join):
            self._sent[request.member.id] = request.member
        elif isinstance(request, (Leave, Fail)):
            self._once.remove(request)
            if isinstance(request, Leave):
                self._sent.pop(request.id, None)

    def up_to_date(self, request: Request) -> Request:
        """Return the request with its member as it is now."""
        if isinstance(request, Join):
            return Join(self.here.get(request.member.id, request.member))
        return request

    def mark_unsent(self) -> None:
        """Make all members unsent: to renew their leases, or to announce them again after an
        outage.
        """
        self._sent.clear()


class Announcements:
    """Sends the members of a process to the engine: when they have changed, and to renew leases."""

    def __init__(self, members: Members, connection: Connection) -> None:
        self.members: Members = members
        self._connection = connection
        self._engine = connection.engine
        self._sending: asyncio.Task[None] | None = None
        self._stopped = False
        self._failures = 0  # in a row
        self._renewal: TimerHandle | None = None
        self._renewed_at = 0.0

    @property
    def is_sending(self) -> bool:
        return self._sending is not None and not self._sending.done()

    def send(self) -> None:
        """Start sending the pending changes to the engine in the background.

        This also opens the store. If an attempt to open it has failed, the next one is left to
        `_renew`, which pauses before it.
        """
        is_left_to_renew = self._failures > 0 and not self._connection.is_open
        if not is_left_to_renew:
            self._start_sending()

    def send_again(self) -> None:
        """Send the engine all members: to renew their leases, or because it may have lost them."""
        self.members.mark_unsent()
        self._start_sending()

    def _start_sending(self) -> None:
        if self.members.unsent() and not self._stopped:
            self._sending = self._connection.tasks.ensure_running(
                self._sending, self._send_all, "announcing publishers"
            )

    async def flush(self, timeout: float | None) -> None:
        """Wait until the engine knows the members, `timeout` seconds at most."""
        if self._sending is None:
            return
        if timeout is None:
            await self._connection.outages.wait_in_opening(self._sending)
        await wait_done([self._sending], timeout)

    def stop(self) -> None:
        """Send nothing any more."""
        self._stopped = True
        self._cancel_renewal()
        if self._sending is not None:
            self._sending.cancel()

    async def _send_all(self) -> None:
        """Send until the engine knows all, and plan the next renewal."""
        try:
            while requests := self.members.unsent():
                for request in requests:
                    await self._send(request)
                    self.members.mark_sent(request)
                self._renewed_at = self._engine.link.clock.now()
        except Exception as error:
            # Errors that no engine should raise are caught as well: otherwise no lease would be
            # renewed any more.
            self._on_failure(error)
            return
        self._failures = 0
        if not self.members.here:
            self._cancel_renewal()
        # Not later than planned: members that change often would keep the others from renewal.
        elif self._renewal is None:
            self._renew_in(self.members.lease_secs / 4)

    async def _send(self, request: Request) -> None:
        async def request_current() -> Answer:
            # The member may have changed during an outage: after a loss it is not ready any more.
            return await self._engine.request(self.members.up_to_date(request))

        await self._connection.call(request_current)

    def _on_failure(self, error: Exception) -> None:
        """Log that the engine does not know all, and plan the next attempt."""
        self._failures += 1
        outlook = ""
        if self._may_succeed_later(error):
            outlook = ", trying again"
            self._cancel_renewal()
            self._renew_in(_BACKOFF.pause_secs(self._failures))
        log = logger.info if self._failures > 1 else logger.warning
        run = self._engine.link.run
        log("run %s: could not announce its publishers%s: %s", run, outlook, error)

    def _may_succeed_later(self, error: Exception) -> bool:
        """Return whether sending is tried again after an error."""
        if isinstance(error, StoreDamagedError) or self._connection.has_failed:
            return False
        if self._connection.is_open:
            return True
        # A first connection that was refused would be refused again. The engine has never known
        # publishers that left before there was a connection.
        return bool(self.members.here) and not isinstance(error, StoreRefusedError)

    def _renew_in(self, secs: float) -> None:
        if math.isfinite(secs):
            self._renewal = self._engine.link.clock.call_later(secs, self._renew)

    def _cancel_renewal(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None

    def _renew(self) -> None:
        """Send all members again, and warn if that comes too late."""
        self._renewal = None
        if self._connection.has_failed:
            return
        silent_secs = self._engine.link.clock.now() - self._renewed_at
        if silent_secs > self.members.lease_secs and not self._failures:
            logger.warning(
                "run %s: no lease was renewed for %.1f s, as the event loop was blocked or the"
                " process stopped, and each lasts %g s: other processes may have found it dead; run"
                " what blocks in a thread, or give a longer lease_secs=",
                self._engine.link.run,
                silent_secs,
                self.members.lease_secs,
            )
        self.send_again()
        # Sending may take long where members change often.
        self._renew_in(self.members.lease_secs / 4)
