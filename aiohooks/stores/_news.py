"""News of other processes: who publishes there, how the last one left, and when a lease may have run out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from aiohooks._clock import Clock, TimerHandle
from aiohooks._errors import AiohooksError, StoreClosedError, UnavailableError
from aiohooks.stores._damage import ENGINE_ERRORS
from aiohooks.stores._mark import Mark
from aiohooks.stores._progress import logger
from aiohooks.stores._publishers import Departure
from aiohooks.stores._room import WaitingRoom
from aiohooks.stores._view import Departed, View


class News:
    """Takes the engine's views of a run, and tells the waiting room what follows from them."""

    __slots__ = (
        "_clock",
        "_doubts",
        "_expiry",
        "_grace",
        "_grace_secs",
        "_keep",
        "_look",
        "_looking",
        "_process",
        "_room",
        "_run",
        "_seen",
        "_spawn",
        "_take",
        "_vacancies",
        "going",
        "taken",
        "view",
    )

    def __init__(
        self,
        run: str,
        process: str,
        room: WaitingRoom,
        clock: Clock,
        *,
        keep: bool,
        join_grace_secs: float,
        look: Callable[[], Awaitable[View]],
        take: Callable[[View], None],
        spawn: Callable[[Coroutine[Any, Any, Any], str], asyncio.Task[Any]],
    ) -> None:
        """`keep`: waiters stay for the successor of a publisher that was found dead. `look` reads the run anew, for `take`."""
        self.view = View(Mark(1, 0))
        """The latest one."""
        self.taken = False
        """Whether there has been any."""
        self.going = False
        """Whether there is an engine that can be looked at."""
        self._run = run
        self._process = process
        self._room = room
        self._clock = clock
        self._keep = keep
        self._grace_secs = join_grace_secs
        self._look = look
        self._take = take
        self._spawn = spawn
        self._doubts = False  # since the latest look began
        self._looking: asyncio.Task[None] | None = None
        self._seen = 0  # the latest departure that the room was told of
        self._grace: TimerHandle | None = None
        self._expiry: TimerHandle | None = None
        self._vacancies: dict[asyncio.Future[None], None] = {}

    def take(self, view: View) -> None:
        """Takes note of what the engine tells, also of something that is out of date."""
        old, self.view = self.view, view
        first, self.taken = not self.taken, True
        if first and view.departed is not None and not view.members and self._grace_secs > 0:
            # All have left before: is that the end, or are the next ones still to come?
            self._seen = view.departed.number
            self._grace = self._clock.call_later(self._grace_secs, self._nobody_came)
        elif view.members and self._grace is not None:
            self._grace.cancel()
            self._grace = None
        if view.failure is not None and view.failure != old.failure and not first:
            self._room.fail(AiohooksError(view.failure.error), view.failure.mark)
        self._room.initialised(view.ready)
        self._tell()
        if not any(member.reign for member in view.members):
            self._end_vacancies()
        self.watch_leases()

    def watch_leases(self) -> None:
        """Looks again when a lease of another process may have run out, while somebody here waits."""
        secs = self.view.expires_secs
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if secs is not None and self.going and (self._room.waiting or self._vacancies):
            self._expiry = self._clock.call_later(secs + 0.001, self._expired)

    def look_again(self) -> asyncio.Task[None] | None:
        """Has a task ask the engine how things are now, which ends the waits if they have no hope; None without an engine."""
        self._doubts = True
        if self._looking is None and self.going:
            self._looking = self._spawn(self._look_until_sure(), "looking who is there")
        return self._looking

    async def _look_until_sure(self) -> None:
        try:
            view = self.view
            while self._doubts:  # what was read before one does not settle it
                self._doubts = False
                view = await self._look()
            self._take(view)
            self._room.end_hopeless()
        except (*ENGINE_ERRORS, StoreClosedError) as error:
            logger.warning("run %s: could not find out who is there: %s", self._run, error)
            if self._room.hopeless:
                self._room.break_off(error)
        finally:
            self._looking = None

    async def vacancy(self) -> None:
        """Waits until there may be no chief, or until it is stopped."""
        self._take(await self._look())
        chief = next((member for member in self.view.members if member.reign), None)
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
        self.going = False
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
        view = self.view
        publishing = {member.process for member in view.members if not member.reign}
        elsewhere = tuple(
            member
            for member in view.members
            # A chief whose process has a publisher is no one more.
            if member.process != self._process and (not member.reign or member.process not in publishing)
        )
        departed, departure, lost = view.departed, None, False
        if departed is not None and departed.number > self._seen:
            self._seen = departed.number
            lost = departed.lost
            if lost:
                logger.warning("run %s: %s was found dead, last seen at step %d", self._run, departed.name, departed.step)
            own = self._room.publishers.departure
            if own is not None and not own.elsewhere and (own.name, own.step) == (departed.name, departed.step):
                departure = own  # what was told of this process comes back: here its error itself is known
            elif not (lost and self._keep):
                departure = Departure(departed.name, departed.step, _error_of(departed), elsewhere=True)
        self._room.elsewhere(elsewhere, departure, lost=lost)

    def _nobody_came(self) -> None:
        self._grace = None
        self._seen = 0
        self._tell()

    def _expired(self) -> None:
        self._expiry = None
        self.look_again()


def _error_of(departed: Departed) -> AiohooksError | None:
    if departed.lost:
        return UnavailableError(f"{departed.name} was found dead: its lease ran out, or its process was gone")
    return AiohooksError(departed.error) if departed.error else None
