"""Waits of a session that is being opened: for other sessions and for an engine, until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Generator
from contextvars import ContextVar
from typing import Any, TypeVar

from aiohooks._aio.cancel import wait_done
from aiohooks._aio.clock import wake

T = TypeVar("T")

_until: ContextVar[Callable[[Awaitable[Any]], Awaitable[Any]] | None] = ContextVar("aiohooks_opening", default=None)


@contextlib.contextmanager
def opening_until(until: Callable[[Awaitable[Any]], Awaitable[Any]]) -> Generator[None]:
    """Await with `until`, which a stop ends, what the code of this block waits for with `wait_for_others`."""
    token = _until.set(until)
    try:
        yield
    finally:
        _until.reset(token)


async def wait_for_others(waiter: Awaitable[T]) -> T:
    """Await what only others can bring about: an engine that answers, a chief that initialises the run or leaves its lead.

    Raises:
        StopRequestedError: the session that is being opened here is asked to stop.
    """
    until = _until.get()
    result: T = await (waiter if until is None else until(waiter))
    return result


class Outages:
    """The outages of an engine, for the openings of sessions that wait for what a task of its store requests."""

    def __init__(self) -> None:
        self._current = 0
        self._waiters: set[asyncio.Future[None]] = set()

    @contextlib.contextmanager
    def outage(self) -> Generator[None]:
        """Mark the time of this block as one in which the engine does not answer."""
        self._current += 1
        for waiter in self._waiters:
            wake(waiter)
        try:
            yield
        finally:
            self._current -= 1

    async def wait_in_opening(self, answer: asyncio.Future[Any]) -> None:
        """Wait until `answer` is done, if a session is being opened here: from an outage on like `wait_for_others`.

        Before that it is no wait for others: a session whose engine answers is opened also after a stop, and its hooks see the
        end.
        """
        if _until.get() is None:
            return
        if not self._current:
            outage: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(outage)
            try:
                await asyncio.wait([answer, outage], return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._waiters.discard(outage)
        if not answer.done():
            await wait_for_others(wait_done([answer], None))
