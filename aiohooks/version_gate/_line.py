"""The line in front of a version gate: who waits there, in order. The first one listens to the store for all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohooks._clock import Clock
from aiohooks._errors import AiohooksError, StepResetError
from aiohooks._interrupt import Interrupt, running_task
from aiohooks.stores import StepStore

Until = Callable[[Awaitable[Any]], Awaitable[Any]]
"""Awaits something that a stop ends too, as `session.until` and `coord.until` do."""


class _Place:
    """Where somebody stands, and how to wake who does."""

    __slots__ = ("called", "expired", "future", "interrupt", "let_in")

    def __init__(self) -> None:
        self.let_in = False
        self.expired = False
        self.called = False  # to ask the store, which had an error for another one
        self.future: asyncio.Future[None] | None = None
        self.interrupt: Interrupt | None = None  # of the one who listens

    def wake(self) -> None:
        if self.interrupt is not None:
            self.interrupt.fire("the line moves")
        elif self.future is not None and not self.future.done():
            self.future.set_result(None)

    def expire(self) -> None:
        self.expired = True
        self.wake()


class Line:
    """Everybody waits in a task of their own, so nothing is left behind when one is cancelled, or gets the store's error.

    While anybody waits, one of them listens to the store, or has been woken to do so.
    """

    __slots__ = ("_clock", "_listener", "_look", "_places", "_versions")

    def __init__(self, versions: StepStore, clock: Clock, look: Callable[[], None]) -> None:
        """`look` is called when there may be news; it calls `let_in_first` as often as there is room."""
        self._versions = versions
        self._clock = clock
        self._look = look
        self._places: dict[_Place, None] = {}
        self._listener: _Place | None = None

    def __len__(self) -> int:
        return len(self._places)

    def let_in_first(self) -> None:
        """Lets the first one in, who leaves the line at once."""
        place = next(iter(self._places))
        del self._places[place]
        place.let_in = True
        place.wake()

    async def wait(
        self, secs: float | None, until: Until | None, *, late: Callable[[], Exception], give_back: Callable[[], None]
    ) -> None:
        """Waits at the end of the line until let in.

        Args:
            secs: how long at most; `late()` is raised then.
            until: see `Until`.
            late: makes that error.
            give_back: called if this was let in and raises all the same.
        """
        place = _Place()
        self._places[place] = None
        timer = None if secs is None else self._clock.call_later(secs, place.expire)
        try:
            standing = self._stand(place, late)
            await (standing if until is None else until(standing))
        except BaseException:
            if place.let_in:
                give_back()
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self._places.pop(place, None)
            if self._listener is None and self._places:
                next(iter(self._places)).wake()  # to listen in its turn

    async def _stand(self, place: _Place, late: Callable[[], Exception]) -> None:
        while not place.let_in:
            if place.expired:
                raise late()
            if self._listener is None:
                await self._listen(place)
            else:
                place.future = asyncio.get_running_loop().create_future()
                try:
                    await place.future
                finally:
                    place.future = None

    async def _listen(self, place: _Place) -> None:
        """Waits for the next version or the next reset, unless there is room already or `place` is woken."""
        self._look()
        if place.let_in:
            return
        self._listener = place
        place.interrupt = interrupt = Interrupt(running_task())
        try:
            await self._versions.wait_for(self._versions.latest.step + 1, on_reset="raise")
        except StepResetError:
            pass
        except asyncio.CancelledError:
            if interrupt.settle() or not interrupt.fired:
                raise
        except AiohooksError as error:
            error.add_note(f"{len(self._places)} waited for room in the version gate of {self._versions.run}")
            if not place.called:  # else whoever called it has called them all
                for other in self._places:  # each asks the store, and gets an error of its own
                    other.called = True
                    other.wake()
            raise
        finally:
            interrupt.settle()
            self._listener = place.interrupt = None
        self._look()
