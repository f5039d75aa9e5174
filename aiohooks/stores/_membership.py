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
    Join,
    Leave,
    Member,
    Request,
    error_text,
    logger,
)
from aiohooks.stores.publishers import Publisher

_BACKOFF = Backoff(initial_secs=0.1, max_secs=5.0)


class Membership:
    """The members in this process, and the task that announces them to the engine.

    A member is sent when it has changed, and again to renew its lease. An exit is sent until
    it is answered, and counts once.
    """

    def __init__(self, connection: Connection, lease_secs: float) -> None:
        self.process: str = connection.engine.link.process
        self.lease_secs: float = lease_secs
        self.here: dict[str, Member] = {}
        """The members that the engine is to know, by their ids."""
        self.candidate: Member | None = None
        """This process as the chief, from its request to lead until it steps down."""
        self._connection = connection
        self._engine = connection.engine
        self._numbers = 0
        self._sent: dict[str, Member] = {}  # as the engine knows them
        self._once: list[Leave] = []  # what the engine has not answered yet
        self._seq = 0
        self._sending: asyncio.Task[None] | None = None
        self._stopped = False
        self._failures = 0  # in a row
        self._renewal: TimerHandle | None = None
        self._renewed_at = 0.0

    # The members.

    @property
    def chief(self) -> Member | None:
        """This process as the chief, while it leads."""
        return None if self.candidate is None else self.here.get(self.candidate.id)

    def new(self, name: str) -> Member:
        self._numbers += 1
        return Member(f"{self.process}/{self._numbers}", name, self.lease_secs)

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

        Without a name the others are not notified.
        """
        self.here.pop(member_id, None)
        error = "" if exc is None or is_clean_end(exc) else error_text(exc)
        self._seq += 1
        # Another writer than that of the writes of this process, as the numbers of both begin at 1.
        self._once.append(Leave(member_id, name, step, error, f"{self.process}/", self._seq))
        self._send_soon()

    def _unsent(self) -> list[Request]:
        """Return the requests that bring the engine up to date.

        Members come first: an exit of the last known publisher would end all waits.
        """
        members = self.here.values()
        joins = [Join(member) for member in members if self._sent.get(member.id) != member]
        return [*joins, *self._once]

    def _mark_sent(self, request: Request) -> None:
        """Take note that the engine has answered one of them."""
        if isinstance(request, Join):
            self._sent[request.member.id] = request.member
        elif isinstance(request, Leave):
            self._once.remove(request)
            self._sent.pop(request.id, None)

    # Announcing them.

    @property
    def is_sending(self) -> bool:
        return self._sending is not None and not self._sending.done()

    def _send_soon(self) -> None:
        """Start sending the pending changes to the engine in the background.

        This also opens the store. If an attempt to open it has failed, the next one is left to
        `_renew`, which pauses before it.
        """
        is_left_to_renew = self._failures > 0 and not self._connection.is_open
        if not is_left_to_renew:
            self._start_sending()

    def send_again(self) -> None:
        """Send the engine all members: to renew their leases, or because it may have lost them."""
        self._sent.clear()
        self._start_sending()

    def _start_sending(self) -> None:
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
        self._cancel_renewal()
        if self._sending is not None:
            self._sending.cancel()

    async def _send_all(self) -> None:
        """Send until the engine knows all, and plan the next renewal."""
        try:
            while requests := self._unsent():
                for request in requests:
                    await self._send(request)
                    self._mark_sent(request)
                self._renewed_at = self._engine.link.clock.now()
        except Exception as error:
            # Errors that no engine should raise are caught as well: otherwise no lease would be
            # renewed any more.
            self._on_failure(error)
            return
        self._failures = 0
        if not self.here:
            self._cancel_renewal()
        # Not later than planned: members that change often would keep the others from renewal.
        elif self._renewal is None:
            self._renew_in(self.lease_secs / 4)

    async def _send(self, request: Request) -> None:
        async def request_current() -> Answer:
            current = request
            # The member may have changed during an outage: after a loss it is not ready any more.
            if isinstance(request, Join):
                current = Join(self.here.get(request.member.id, request.member))
            return await self._engine.request(current)

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
        return bool(self.here) and not isinstance(error, StoreRefusedError)

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
        if silent_secs > self.lease_secs and not self._failures:
            logger.warning(
                "run %s: no lease was renewed for %.1f s, as the event loop was blocked or the"
                " process stopped, and each lasts %g s: other processes may have found it dead; run"
                " what blocks in a thread, or give a longer lease_secs=",
                self._engine.link.run,
                silent_secs,
                self.lease_secs,
            )
        self.send_again()
        # Sending may take long where members change often.
        self._renew_in(self.lease_secs / 4)
