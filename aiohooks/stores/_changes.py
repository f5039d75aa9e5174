"""The marks of a store as they come, the newest only."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Self

from aiohooks._errors import AiohooksError, PublisherFinishedError
from aiohooks.stores._mark import Mark

# See `_waiters.Waiter`; None: look at the mark.
Watch = asyncio.Future[AiohooksError | None]


class Changes:
    """An iterator over a store's marks: the current one first, then the newest whenever it has changed.

    Marks that came and went between two steps of the iteration are left out; there is never a backlog. It ends when the
    publishers have finished and nothing more can come; when they failed, or the store was closed, it raises what a
    `wait_for` would raise. It holds nothing while nobody waits on it, so it may be dropped at any time.
    """

    __slots__ = ("_closed", "_next", "_seen", "_watches")

    def __init__(self, next_mark: Callable[[Mark | None, dict[Watch, None]], Awaitable[Mark]]) -> None:
        """Made by `StepStore.changes`."""
        self._next = next_mark
        self._seen: Mark | None = None
        self._watches: dict[Watch, None] = {}
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Mark:
        if self._closed:
            raise StopAsyncIteration
        try:
            mark = await self._next(self._seen, self._watches)
        except PublisherFinishedError:
            self._closed = True
            raise StopAsyncIteration from None
        if self._closed:  # by `aclose`, meanwhile
            raise StopAsyncIteration
        self._seen = mark
        return mark

    async def aclose(self) -> None:
        """Ends the iteration, also for a task that waits on it now; harmless when called twice."""
        self._closed = True
        for watch in self._watches:
            if not watch.done():
                watch.set_result(None)

    def __repr__(self) -> str:
        return f"<Changes after {self._seen}{', closed' if self._closed else ''}>"
