"""Waits for others: a stop ends those of a session that is being opened, long ones are logged; and
pauses between attempts.

wait_for_others   in the opening of a session: a wait for another session, or for an engine
Outages           the same, from an outage of the engine on
LongWaitLog       a warning of what one wait is for, after a second
WaitLog           a line a minute about all waits of a store or a gate
Backoff           pauses between attempts
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohooks._core.cancel import wait_done
from aiohooks._core.clock import NO_TIMER, Clock, Waiters, current_clock
from aiohooks._core.diagnostics import logger, secs_text
from aiohooks._core.validate import check_secs

T = TypeVar("T")

_NOTICE_SECS = 1.0
_LINE_SECS = 60.0
_until: ContextVar[Callable[[Awaitable[Any]], Awaitable[Any]] | None] = ContextVar(
    "aiohooks_opening", default=None
)


@contextlib.contextmanager
def opening_until(until: Callable[[Awaitable[Any]], Awaitable[Any]]) -> Generator[None]:
    """Await with `until`, which a stop ends, what the code of this block waits for with
    `wait_for_others`.
    """
    token = _until.set(until)
    try:
        yield
    finally:
        _until.reset(token)


async def wait_for_others(waiter: Awaitable[T]) -> T:
    """Await what only others can bring about: an engine that answers, a chief that initialises the
    run or leaves its lead.

    Raises:
        StopRequestedError: the session that is being opened here is asked to stop.
    """
    until = _until.get()
    result: T = await (waiter if until is None else until(waiter))
    return result


class Outages:
    """The outages of an engine, for the openings of sessions that wait for what a task of its store
    requests.
    """

    def __init__(self) -> None:
        self._current = 0
        self._waiters = Waiters()

    @contextlib.contextmanager
    def outage(self) -> Generator[None]:
        """Mark the time of this block as one in which the engine does not answer."""
        self._current += 1
        self._waiters.wake()
        try:
            yield
        finally:
            self._current -= 1

    async def wait_in_opening(self, answer: asyncio.Future[Any]) -> None:
        """Wait until `answer` is done, if a session is being opened here: from an outage on like
        `wait_for_others`.

        Before that it is no wait for others: a session whose engine answers is opened also after a
        stop, and its hooks see the end.
        """
        if _until.get() is None:
            return
        if not self._current:
            with self._waiters.added() as outage:
                await asyncio.wait([answer, outage], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            await wait_for_others(wait_done([answer], None))


class LongWaitLog:
    """`with LongWaitLog(...): await ...` logs a warning after a second, and again when the wait is
    for something else.
    """

    __slots__ = ("_began", "_clock", "_logged", "_timer", "_waits_for", "_what")

    def __init__(self, what: str, waits_for: Callable[[], Mapping[object, str]]) -> None:
        """Start nothing yet.

        Args:
            what: the beginning of the message: the waiter, and the occasion.
            waits_for: returns what is waited for now, each with a description.
        """
        self._what = what
        self._waits_for = waits_for
        self._clock = current_clock()
        self._logged: set[object] = set()
        self._timer = NO_TIMER

    def __enter__(self) -> None:
        self._began = self._clock.now()
        self._timer = self._clock.call_later(_NOTICE_SECS, self._look)

    def _look(self) -> None:
        self._timer = self._clock.call_later(_NOTICE_SECS, self._look)
        awaited = self._waits_for()
        if not self._logged.issuperset(awaited):
            self._logged.update(awaited)
            secs = self._clock.now() - self._began
            logger.warning(
                "%s: has waited %s for %s", self._what, secs_text(secs), "; ".join(awaited.values())
            )

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


class WaitLog:
    """Logs a line for every minute that the oldest of the waits has lasted; a wait that ends
    earlier logs nothing.
    """

    __slots__ = ("_clock", "_describe", "_logged_at", "_logger", "_since", "_timer")

    def __init__(self, logger: logging.Logger, clock: Clock, describe: Callable[[], str]) -> None:
        """Start with no waits; `describe()` names the waiters, and whom they wait for; empty: there
        is nothing to log.
        """
        self._logger = logger
        self._clock = clock
        self._describe = describe
        self._since: dict[object, float] = {}  # by wait, the oldest first
        self._timer = NO_TIMER
        self._logged_at = 0.0

    def begin(self, wait: object) -> float:
        """Note that a wait begins; return when."""
        if not self._since:
            self._timer = self._clock.call_later(_LINE_SECS, self._on_timer)
        self._since[wait] = now = self._clock.now()
        return now

    def end(self, wait: object) -> None:
        """Note that it has ended; harmless if it had not begun."""
        self._since.pop(wait, None)
        if not self._since:
            self._timer.cancel()

    def _on_timer(self) -> None:
        now, oldest = self._clock.now(), next(iter(self._since.values()))
        rest = max(oldest, self._logged_at) + _LINE_SECS - now
        if rest <= 0:
            if text := self._describe():
                self._logger.info("%s, for %.0f s now", text, now - oldest)
            self._logged_at, rest = now, _LINE_SECS
        self._timer = self._clock.call_later(rest, self._on_timer)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff: pauses that double from `initial_secs` up to `max_secs`; with `jitter`,
    a random part of each.

    A pause of 0 is valid.
    """

    initial_secs: float = 0.1
    max_secs: float = 30.0
    jitter: bool = True

    def __post_init__(self) -> None:
        for name in ("initial_secs", "max_secs"):
            check_secs(getattr(self, name), name)

    def pause_secs(self, attempt: int) -> float:
        """Return the seconds to wait before attempt number `attempt`, counted from 1."""
        # The exponent is bounded, or a long series of attempts would overflow the float.
        longest = min(self.max_secs, self.initial_secs * 2.0 ** min(attempt - 1, 1000))
        return random.uniform(0, longest) if self.jitter else longest
