"""RunWatcher of other processes: who publishes there, how the last one left, and when a lease may have run out."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from aiohooks._aio.cancel import wait_done
from aiohooks._aio.clock import Clock, TimerHandle
from aiohooks.errors import AiohooksError, StoreClosedError, StoreDamagedError, UnavailableError, is_clean_end
from aiohooks.stores._protocol import ENGINE_ERRORS, Fail, Join, LastExit, Leave, Member, Position, Request, Snapshot, logger
from aiohooks.stores._publishers import Publisher, PublisherExit
from aiohooks.stores._waiting import WaitRegistry


class Members:
    """Who of this process may advance the run, and what of it the engine has been told.

    Telling goes on in the background, one request after the other, until the engine knows all; what it knows is told again
    after a quarter of the lease time, which renews the leases.
    """

    __slots__ = (
        "_clock",
        "_lease_secs",
        "_numbers",
        "_once",
        "_publishers",
        "_renewal",
        "_request",
        "_run",
        "_seq",
        "_spawn",
        "_telling",
        "_told",
        "active",
        "chief",
        "exit_writer",
        "process",
    )

    def __init__(
        self,
        run: str,
        process: str,
        lease_secs: float,
        clock: Clock,
        request: Callable[[Request], Awaitable[Any]],
        spawn: Callable[[Coroutine[Any, Any, Any], str], asyncio.Task[Any]],
    ) -> None:
        """Nobody has joined; nobody is told before `active` is set."""
        self.process = process
        self.exit_writer = f"{process}/"
        """As whom it tells what counts once however often it is sent."""
        self.active = False
        """Whether there is an engine to tell."""
        self.chief: Member | None = None
        """The lease of this process, while it is the chief; see `announce`."""
        self._run = run
        self._lease_secs = lease_secs
        self._clock = clock
        self._request = request
        self._spawn = spawn
        self._numbers = 0
        self._publishers: dict[Publisher, Member] = {}
        self._once: list[Leave | Fail] = []
        self._seq = 0
        self._told: dict[str, Member] = {}
        self._telling: asyncio.Task[None] | None = None
        self._renewal: TimerHandle | None = None

    def new(self, name: str, ttl: float | None = None) -> Member:
        """A member that nobody knows of yet."""
        self._numbers += 1
        return Member(f"{self.process}/{self._numbers}", name, self._lease_secs if ttl is None else ttl)

    @property
    def publish(self) -> bool:
        """Whether there is a publisher."""
        return bool(self._publishers)

    def join(self, publisher: Publisher) -> None:
        """Takes in a publisher."""
        self._publishers[publisher] = self.new(publisher.name)
        self.announce()

    def waits_changed(self, publisher: Publisher) -> None:
        """Takes note of what a publisher waits for itself."""
        member = self._publishers.get(publisher)
        if member is not None and member.waits_for != (waits_for := publisher.waits_for):
            self._publishers[publisher] = member._replace(waits_for=waits_for)
            self.announce()

    def leave(self, publisher: Publisher, step: int, exc: BaseException | None) -> None:
        """Lets a publisher leave, at a step, with what it failed with."""
        member = self._publishers.pop(publisher, None)
        if member is not None:
            self.take_leave(member, publisher.name, step, exc)

    def take_leave(self, member: Member, name: str, step: int, exc: BaseException | None) -> None:
        """Lets a member leave; without a name, silently."""
        failed = exc is not None and not is_clean_end(exc)
        self._tell_once(Leave(member.id, name, step, _text(exc) if failed else ""))

    def fail(self, exc: BaseException) -> None:
        """Ends the waits of all processes."""
        self._tell_once(Fail(_text(exc)))

    def _tell_once(self, request: Leave | Fail) -> None:
        self._seq += 1
        self._once.append(request._replace(writer=self.exit_writer, seq=self._seq))
        self.announce()

    def announce(self) -> None:
        """Tells the engine what it does not know yet."""
        if self.active and self._telling is None and self._untold():
            self._telling = self._spawn(self._tell(), "telling of publishers")

    def announce_again(self) -> None:
        """Tells the engine everything: it may have forgotten."""
        self._told.clear()
        self.announce()

    async def flush(self, secs: float | None = None) -> None:
        """Waits until the engine knows, `secs` seconds at most."""
        if self._telling is not None:
            await wait_done([self._telling], secs)

    def stop(self) -> None:
        """Tells nobody any more."""
        self.active = False
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None

    def _untold(self) -> list[Request]:
        members = [*self._publishers.values(), *([] if self.chief is None else [self.chief])]
        return [*(Join(member) for member in members if self._told.get(member.id) != member), *self._once]

    async def _tell(self) -> None:
        try:
            while requests := self._untold():
                for request in requests:
                    await self._request(request)
                    if isinstance(request, Join):
                        self._told[request.member.id] = request.member
                    elif isinstance(request, (Leave, Fail)):
                        self._once.remove(request)
                        if isinstance(request, Leave):
                            self._told.pop(request.id, None)
        except ENGINE_ERRORS as error:
            logger.warning("run %s: could not tell the engine who publishes: %s", self._run, error)
            if isinstance(error, StoreDamagedError):
                self.stop()
        finally:
            self._telling = None
            self._plan_renewal()

    def _plan_renewal(self) -> None:
        secs = self._lease_secs if self.chief is None else min(self._lease_secs, self.chief.ttl)
        if self.active and self._renewal is None and (self._told or self._untold()) and math.isfinite(secs):
            self._renewal = self._clock.call_later(secs / 4, self._renew)

    def _renew(self) -> None:
        self._renewal = None
        self.announce_again()


def _text(exc: BaseException | None) -> str:
    return f"{type(exc).__name__}: {exc}"


class RunWatcher:
    """Takes the engine's snapshots of a run, and tells the waiting room what follows from them."""

    __slots__ = (
        "_clock",
        "_doubts",
        "_expiry",
        "_grace",
        "_grace_secs",
        "_keep",
        "_looking",
        "_observe_snapshot",
        "_process",
        "_read_run",
        "_run",
        "_seen",
        "_spawn",
        "_vacancies",
        "_waits",
        "active",
        "has_snapshot",
        "snapshot",
    )

    def __init__(
        self,
        run: str,
        process: str,
        waits: WaitRegistry,
        clock: Clock,
        *,
        keep: bool,
        join_grace_secs: float,
        look: Callable[[], Awaitable[Snapshot]],
        take: Callable[[Snapshot], None],
        spawn: Callable[[Coroutine[Any, Any, Any], str], asyncio.Task[Any]],
    ) -> None:
        """`keep`: waiters stay for the successor of a publisher that was found dead. `look` reads the run anew, for `take`."""
        self.snapshot = Snapshot(Position(1, 0))
        """The latest one."""
        self.has_snapshot = False
        """Whether there has been any."""
        self.active = False
        """Whether there is an engine that can be looked at."""
        self._run = run
        self._process = process
        self._waits = waits
        self._clock = clock
        self._keep = keep
        self._grace_secs = join_grace_secs
        self._read_run = look
        self._observe_snapshot = take
        self._spawn = spawn
        self._doubts = False  # since the latest look began
        self._looking: asyncio.Task[None] | None = None
        self._seen = 0  # the latest departure that the room was told of
        self._grace: TimerHandle | None = None
        self._expiry: TimerHandle | None = None
        self._vacancies: dict[asyncio.Future[None], None] = {}

    def take(self, snapshot: Snapshot) -> None:
        """Takes note of what the engine tells, also of something that is out of date."""
        old, self.snapshot = self.snapshot, snapshot
        first, self.has_snapshot = not self.has_snapshot, True
        if first and snapshot.last_exit is not None and not snapshot.members and self._grace_secs > 0:
            # All have left before: is that the end, or are the next ones still to come?
            self._seen = snapshot.last_exit.number
            self._grace = self._clock.call_later(self._grace_secs, self._nobody_came)
        elif snapshot.members and self._grace is not None:
            self._grace.cancel()
            self._grace = None
        if snapshot.failure is not None and snapshot.failure != old.failure and not first:
            self._waits.fail(AiohooksError(snapshot.failure.error), snapshot.failure.position)
        self._waits.initialised(snapshot.ready)
        self._tell()
        if not any(member.term for member in snapshot.members):
            self._end_vacancies()
        self.watch_leases()

    def watch_leases(self) -> None:
        """Looks again when a lease of another process may have run out, while somebody here waits."""
        secs = self.snapshot.expires_secs
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if secs is not None and self.active and (self._waits.waiting or self._vacancies):
            self._expiry = self._clock.call_later(secs + 0.001, self._expired)

    def refresh(self) -> asyncio.Task[None] | None:
        """Has a task ask the engine how things are now, which ends the waits if they have no hope; None without an engine."""
        self._doubts = True
        if self._looking is None and self.active:
            self._looking = self._spawn(self._look_until_sure(), "looking who is there")
        return self._looking

    async def _look_until_sure(self) -> None:
        try:
            snapshot = self.snapshot
            while self._doubts:  # what was read before one does not settle it
                self._doubts = False
                snapshot = await self._read_run()
            self._observe_snapshot(snapshot)
            self._waits.fail_unreachable()
        except (*ENGINE_ERRORS, StoreClosedError) as error:
            logger.warning("run %s: could not find out who is there: %s", self._run, error)
            if self._waits.unreachable:
                self._waits.abort(error)
        finally:
            self._looking = None

    async def vacancy(self) -> None:
        """Waits until there may be no chief, or until it is stopped."""
        self._observe_snapshot(await self._read_run())
        chief = next((member for member in self.snapshot.members if member.term), None)
        if chief is None:
            return
        logger.info("run %s: waiting for the lead, which %s has", self._run, chief.name)
        vacancy: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._vacancies[vacancy] = None
        try:
            self.watch_leases()
            await vacancy
        finally:
            del self._vacancies[vacancy]
            self.watch_leases()

    def stop(self) -> None:
        """Looks no more."""
        self.active = False
        for timer in (self._expiry, self._grace):
            if timer is not None:
                timer.cancel()
        self._expiry = self._grace = None
        self._end_vacancies()

    def _end_vacancies(self) -> None:
        for vacancy in self._vacancies:
            if not vacancy.done():
                vacancy.set_result(None)

    def _tell(self) -> None:
        """Tells the room who publishes in other processes, and how the last one there left."""
        snapshot = self.snapshot
        publishing = {member.process for member in snapshot.members if not member.term}
        others = tuple(
            member
            for member in snapshot.members
            # A chief whose process has a publisher is no one more.
            if member.process != self._process and (not member.term or member.process not in publishing)
        )
        last_exit, departure, lost = snapshot.last_exit, None, False
        if last_exit is not None and last_exit.number > self._seen:
            self._seen = last_exit.number
            lost = last_exit.lost
            if lost:
                logger.warning("run %s: %s was found dead, last seen at step %d", self._run, last_exit.name, last_exit.step)
            own = self._waits.publishers.last_exit
            if own is not None and not own.is_remote and (own.name, own.step) == (last_exit.name, last_exit.step):
                departure = own  # what was told of this process comes back: here its error itself is known
            elif not (lost and self._keep):
                departure = PublisherExit(last_exit.name, last_exit.step, _error_of(last_exit), is_remote=True)
        self._waits.observe_others(others, departure, lost=lost)

    def _nobody_came(self) -> None:
        self._grace = None
        self._seen = 0
        self._tell()

    def _expired(self) -> None:
        self._expiry = None
        self.refresh()


def _error_of(last_exit: LastExit) -> AiohooksError | None:
    if last_exit.lost:
        return UnavailableError(f"{last_exit.name} was found dead: its lease ran out, or its process was gone")
    return AiohooksError(last_exit.error) if last_exit.error else None
