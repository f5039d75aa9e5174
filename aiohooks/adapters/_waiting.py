"""Waiting for a step on behalf of a client, and what it is told in the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aiohooks._clock import current_clock
from aiohooks._errors import (
    PublisherFailedError,
    PublisherFinishedError,
    SessionClosedError,
    StepTimeoutError,
    StopRequestedError,
    StoreClosedError,
    StoreDamagedError,
    StoreUnavailableError,
)
from aiohooks._interrupt import TimeLimit
from aiohooks._monitored_session import AsyncMonitoredSession
from aiohooks.adapters._owner import Owner
from aiohooks.adapters._report import health
from aiohooks.adapters._safe_text import safe_error, safe_text
from aiohooks.stores import StepStore


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
    mark = store.latest
    return Answer(200, {"step": mark.step, "wanted": wanted, "epoch": mark.epoch}) if mark.step >= wanted else None


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
