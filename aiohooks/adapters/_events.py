"""Telling a client of a session as it goes on: a server-sent event whenever there is something new."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from aiohooks._clock import current_clock
from aiohooks._interrupt import TimeLimit
from aiohooks._monitored_session import AsyncMonitoredSession
from aiohooks.adapters._owner import Owner
from aiohooks.adapters._report import encoded
from aiohooks.adapters._waiting import known_store
from aiohooks.stores import Changes, StepStore

_BEAT_SECS = 15.0
"""How long it may be silent: proxies take longer silences for a dead connection."""
_CLOSING_SECS = 1.0
"""How often it looks at a session that somebody else opens or closes: nobody tells when that is done."""
_PATIENCE_SECS = 30.0
"""How long a client may take to read what was sent."""


class Events:
    """The events of one stream: `progress` each time, `end` for the last one; the newest only, never a backlog."""

    def __init__(
        self, session: AsyncMonitoredSession, owner: Owner | None, look: Callable[[], dict[str, Any]], pause_secs: float
    ) -> None:
        """`look` gives what is told; between two events lies the pause at least."""
        self._session = session
        self._owner = owner
        self._look = look
        self._pause_secs = pause_secs
        self._store: StepStore | None = None
        self._changes: Changes | None = None

    async def tell(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Writes events until the session has ended, or the client takes too long to read one.

        Raises:
            TimeoutError: it did.
        """
        while True:
            await self._listen()
            told = self._look()
            last = self._has_ended(told)
            with TimeLimit(_PATIENCE_SECS, "the client's reading"):
                await write(b"event: %s\ndata: %s\n\n" % (b"end" if last else b"progress", encoded(told)))
            if last:
                return
            await _pause(self._pause_secs)
            with contextlib.suppress(TimeoutError), TimeLimit(_BEAT_SECS, "the next step"):
                await self._news()

    async def _listen(self) -> None:
        """From here on, and before the look, nothing new is missed."""
        store = known_store(self._session)
        if store is not None and store is not self._store and not self._session.should_stop():
            changes = store.changes()
            try:
                await anext(changes)  # the present mark
            except Exception:  # of a store that is closed: there is nothing to hear of
                return
            self._store, self._changes = store, changes

    def _has_ended(self, told: dict[str, Any]) -> bool:
        if self._owner is not None:
            return self._owner.ended.is_set()
        return told["state"] == "finished" or (told["state"] == "failed" and self._session.status().state == "closed")

    async def _news(self) -> None:
        """Waits for the next step, or for another state of the session."""
        session, owner = self._session, self._owner
        if owner is not None and (not owner.opened.is_set() or session.should_stop()):
            await (owner.ended if owner.opened.is_set() else owner.opened).wait()
            return
        store = known_store(session)
        if store is None or self._changes is None or session.should_stop():
            await _pause(_CLOSING_SECS)
            return
        with contextlib.suppress(Exception):  # it has stopped or failed: the next look says how
            await session.until(anext(self._changes))


async def _pause(secs: float) -> None:
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    timer = current_clock().call_later(secs, lambda: None if waiter.done() else waiter.set_result(None))
    try:
        await waiter
    finally:
        timer.cancel()
