"""The members of this process: its publishers and its chief's lease, and telling the engine of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from aiohooks._clock import Clock, TimerHandle
from aiohooks._errors import StoreDamagedError, is_clean_end
from aiohooks._shield import wait_done
from aiohooks.stores._damage import ENGINE_ERRORS
from aiohooks.stores._progress import logger
from aiohooks.stores._publishers import Publisher
from aiohooks.stores._view import Fail, Join, Leave, Member, Request


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
        "chief",
        "going",
        "process",
        "teller",
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
        """Nobody has joined; nobody is told before `going` is set."""
        self.process = process
        self.teller = f"{process}/"
        """As whom it tells what counts once however often it is sent."""
        self.going = False
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
        self._once.append(request._replace(writer=self.teller, seq=self._seq))
        self.announce()

    def announce(self) -> None:
        """Tells the engine what it does not know yet."""
        if self.going and self._telling is None and self._untold():
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
        self.going = False
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
        if self.going and self._renewal is None and (self._told or self._untold()) and math.isfinite(secs):
            self._renewal = self._clock.call_later(secs / 4, self._renew)

    def _renew(self) -> None:
        self._renewal = None
        self.announce_again()


def _text(exc: BaseException | None) -> str:
    return f"{type(exc).__name__}: {exc}"
