"""Telling a client of a session as it goes on: a server-sent event whenever there is something new."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from aiohooks._aio.cancel import CancelScope, TimeLimit, current_task, wait_done
from aiohooks._aio.clock import current_clock
from aiohooks.adapters.asgi._access import safe_error, safe_text
from aiohooks.adapters.asgi._lifespan import Owner
from aiohooks.adapters.asgi._report import encoded, health
from aiohooks.errors import (
    PublisherFailedError,
    PublisherFinishedError,
    SessionClosedError,
    StepTimeoutError,
    StopRequestedError,
    StoreClosedError,
    StoreDamagedError,
    StoreUnavailableError,
)
from aiohooks.session.monitored import AsyncMonitoredSession
from aiohooks.stores import Changes, StepStore


@dataclass(frozen=True, slots=True)
class Answer:
    """A status, and a body for JSON; `retry` says that asking again soon makes sense."""

    status: int
    body: dict[str, Any] = field(default_factory=dict[str, Any])
    retry: bool = False


def failed(status: int, error: str, message: str, *, retry: bool = False, **more: Any) -> Answer:
    """An answer that says what is wrong: in one word for programs, in a sentence for people."""
    return Answer(status, {"error": error, "message": message, **more}, retry)


async def reached(session: AsyncMonitoredSession, owner: Owner | None, wanted: int, timeout: float | None) -> Answer:
    """Waits until the step is reached, or can be reached no more, or the time is up."""
    clock = current_clock()
    since = clock.now()
    try:
        with TimeLimit(timeout, "opening the session"):
            store = await _store(session, owner)
    except TimeoutError:
        return _late(wanted, None, since, clock.now())
    if store is None:
        return _over(session, owner, wanted, None)
    answer = arrived(store, wanted)
    if answer is not None:
        return answer
    left = None if timeout is None else max(0.0, timeout - (clock.now() - since))
    try:
        await session.until(store.wait_for(wanted, timeout=left))
    except StepTimeoutError:
        answer = _late(wanted, store, since, clock.now())
    except PublisherFinishedError as error:
        answer = failed(410, "publisher_finished", safe_text(str(error)), **_seen(wanted, store))
    except PublisherFailedError as error:
        answer = failed(503, "publisher_failed", safe_text(_with_cause(error)), **_seen(wanted, store))
    except StoreClosedError as error:
        answer = failed(503, "store_closed", safe_text(str(error)), **_seen(wanted, store))
    except StoreDamagedError as error:
        answer = failed(503, "store_damaged", safe_text(str(error)), **_seen(wanted, store))
    except StoreUnavailableError as error:
        answer = failed(503, "store_unavailable", safe_text(str(error)), retry=True, **_seen(wanted, store))
    except (StopRequestedError, SessionClosedError):
        answer = _over(session, owner, wanted, store)
    except Exception as error:  # a background task's
        answer = failed(503, "failed", f"a background task of the session failed: {safe_error(error)}", **_seen(wanted, store))
    return arrived(store, wanted) or answer or _over(session, owner, wanted, store)


def arrived(store: StepStore, wanted: int) -> Answer | None:
    """The good answer, if the step is reached already."""
    position = store.latest
    return Answer(200, {"step": position.step, "wanted": wanted, "epoch": position.epoch}) if position.step >= wanted else None


def known_store(session: AsyncMonitoredSession) -> StepStore | None:
    """The session's step store, if there is one yet."""
    try:
        return session.global_step
    except SessionClosedError:
        return None


async def _store(session: AsyncMonitoredSession, owner: Owner | None) -> StepStore | None:
    """The session's step store, once it is open; None if it will not be."""
    store = known_store(session)
    if owner is not None and owner.started and (store is None or session.status().state == "opening"):
        await owner.opened.wait()
        store = known_store(session)
    return store


def _over(session: AsyncMonitoredSession, owner: Owner | None, wanted: int, store: StepStore | None) -> Answer:
    """What is said when the session makes no more steps, or none yet."""
    found = health(session, owner)
    more = _seen(wanted, store)
    if not found.ok:
        return failed(503, "failed", f"the session failed: {found.failure}", **more)
    if found.state == "starting":
        return failed(503, "not_started", "the session was not entered yet", retry=True, **more)
    reason = found.stop_reason or "it has ended"
    return failed(410, "stopped", f"the session makes no more steps: {reason}", **more)


def _late(wanted: int, store: StepStore | None, since: float, now: float) -> Answer:
    message = f"step {wanted} was not reached in time"
    return failed(504, "timeout", message, waited_secs=round(now - since, 6), **_seen(wanted, store))


def _seen(wanted: int, store: StepStore | None) -> dict[str, Any]:
    return {"wanted": wanted, "step": None if store is None else store.latest.step}


def _with_cause(error: BaseException) -> str:
    return str(error) if error.__cause__ is None else f"{error}: {safe_error(error.__cause__)}"


Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class WhileConnected:
    """A block that ends when the client leaves: `async with WhileConnected(receive) as client: ...`, then `client.left`.

    A cancel from outside passes as it is.
    """

    __slots__ = ("_interrupt", "_listener", "_over", "_receive", "left")

    def __init__(self, receive: Receive) -> None:
        """Takes the request's `receive`; nobody else may read from it meanwhile."""
        self._receive = receive
        self._over = False
        self.left = False
        """Whether the block ended because the client had left."""

    async def __aenter__(self) -> Self:
        self._interrupt = CancelScope(current_task())
        self._listener = asyncio.get_running_loop().create_task(self._listen())
        return self

    async def _listen(self) -> None:
        try:
            while (await self._receive())["type"] != "http.disconnect":
                pass  # a body that nobody asked for
        except OSError:
            pass  # a server may say it in this way, too
        if not self._over:
            self._interrupt.fire("the client has left")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._over = True
        outer = self._interrupt.settle()
        self.left = self._interrupt.fired and not outer and isinstance(error, asyncio.CancelledError)
        self._listener.cancel()
        await wait_done([self._listener], None)
        if not self._listener.cancelled() and (failed := self._listener.exception()) is not None and error is None:
            raise failed
        return self.left


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
                await anext(changes)  # the present position
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
