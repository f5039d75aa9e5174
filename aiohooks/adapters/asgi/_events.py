"""Waiting for a session on behalf of a client: for one step, or for everything new as server-sent
events.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

from aiohooks._core.calls import limited
from aiohooks._core.cancel import retrieve_exception, wait_done
from aiohooks._core.clock import current_clock, sleep
from aiohooks.adapters.asgi._access import (
    JsonReply,
    encode_json,
    error_reply,
    safe_error,
    safe_text,
)
from aiohooks.adapters.asgi._report import SessionReporter
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

T = TypeVar("T")


async def wait_for_step(reporter: SessionReporter, wanted: int, timeout: float | None) -> JsonReply:
    """Wait until the step is reached or cannot be reached any more, or until the timeout, and
    return the reply.
    """
    session, clock = reporter.session, current_clock()
    since = clock.now()
    store: StepStore | None = None
    try:
        store = await limited(_opened_store(reporter), timeout, "opening the session")
        if store is not None and reached_reply(store, wanted) is None:
            left = None if timeout is None else max(0.0, timeout - (clock.now() - since))
            await _until_stopped(session, store.wait_for(wanted, timeout=left))
        reply = None
    except Exception as error:
        seen = _seen(wanted, store)
        if isinstance(
            error, TimeoutError if store is None else StepTimeoutError
        ):  # a background task may fail with another
            secs = round(clock.now() - since, 6)
            reply = error_reply(
                504, "timeout", f"step {wanted} was not reached in time", waited_secs=secs, **seen
            )
        else:
            reply = _failed_reply(error, seen)
    reached = None if store is None else reached_reply(store, wanted)
    return reached or reply or _ended_reply(reporter, _seen(wanted, store))


_ERRORS_OF_STORES: tuple[tuple[type[Exception], int, str], ...] = (
    (PublisherFinishedError, 410, "publisher_finished"),
    (PublisherFailedError, 503, "publisher_failed"),
    (StoreClosedError, 503, "store_closed"),
    (StoreDamagedError, 503, "store_damaged"),
    (StoreUnavailableError, 503, "store_unavailable"),
)


def _failed_reply(error: Exception, seen: dict[str, Any]) -> JsonReply | None:
    """Return the reply to a wait that an error has ended, or None if the session's own end is the
    reason.
    """
    for kind, status, code in _ERRORS_OF_STORES:
        if isinstance(error, kind):
            cause = (
                f": {safe_error(error.__cause__)}"
                if error.__cause__ and kind is PublisherFailedError
                else ""
            )
            return error_reply(
                status,
                code,
                safe_text(f"{error}{cause}"),
                retry=kind is StoreUnavailableError,
                **seen,
            )
    if isinstance(error, (StopRequestedError, SessionClosedError)):
        return None
    return error_reply(
        503, "failed", f"a background task of the session failed: {safe_error(error)}", **seen
    )


def _ended_reply(reporter: SessionReporter, seen: dict[str, Any]) -> JsonReply:
    """Return the reply to a wait for a step of a session that makes no more steps, or none yet."""
    health = reporter.health()
    if not health.ok:
        return error_reply(503, "failed", f"the session failed: {health.failure}", **seen)
    if health.state == "starting" and health.stop_reason is None:
        return error_reply(
            503, "not_started", "the session was not entered yet", retry=True, **seen
        )
    reason = health.stop_reason or "it has ended"
    return error_reply(410, "stopped", f"the session makes no more steps: {reason}", **seen)


def _seen(wanted: int, store: StepStore | None) -> dict[str, Any]:
    return {"wanted": wanted, "step": None if store is None else store.latest.step}


async def _until_stopped(session: AsyncMonitoredSession, wait: Awaitable[T]) -> T:
    """Await something; a stop or a failed background task also ends the wait. It is no activity of
    the session.
    """
    return await session.coord.wait_until_ended("a client's wait", wait)


def reached_reply(store: StepStore, wanted: int) -> JsonReply | None:
    """Return the reply to a wait for a step that is reached, or None if it is not."""
    position = store.latest
    if position.step < wanted:
        return None
    return JsonReply(200, {"step": position.step, "wanted": wanted, "epoch": position.epoch})


def store_of(session: AsyncMonitoredSession) -> StepStore | None:
    """Return the session's step store, or None while it has none."""
    try:
        return session.global_step
    except SessionClosedError:
        return None


async def _opened_store(reporter: SessionReporter) -> StepStore | None:
    """Wait until the session is open and return its step store, or None if it does not open, or is
    to stop.
    """
    runner = reporter.runner
    if runner is not None and runner.started and not runner.opened.is_set():
        try:
            await runner.wait_opened()
        except Exception:  # a stop or a failure, which the caller reports
            return None
    return store_of(reporter.session)


Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T], disconnected: T) -> T:
    """Return the result of `work`, or `disconnected` if the client has disconnected: the work is
    cancelled then.

    It runs in a task of its own, so that it is known whose cancellation ended it: it may call the
    code of others, such as middleware. Only this function may read from `receive` while it lasts.
    """
    loop = asyncio.get_running_loop()
    working, listener = loop.create_task(work), loop.create_task(_wait_disconnected(receive))
    try:
        await asyncio.wait([working, listener], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (working, listener):
            task.cancel()
            task.add_done_callback(retrieve_exception)
        await wait_done([working, listener], None)
    if (
        not listener.cancelled()
        and (error := listener.exception()) is not None
        and working.cancelled()
    ):
        raise error
    return disconnected if working.cancelled() else working.result()


async def _wait_disconnected(receive: Receive) -> None:
    with contextlib.suppress(OSError):  # some servers raise it for a disconnect
        while (await receive())["type"] != "http.disconnect":
            pass  # a request body, which is ignored


_KEEPALIVE_SECS = 15.0
"""The longest silence on a stream: proxies close connections that are silent for longer."""
_POLL_SECS = 1.0
"""How often a session that is entered elsewhere is checked while it opens or closes, of which there
is no notification.
"""
_WRITE_TIMEOUT_SECS = 30.0
"""How long a client may take to read an event."""


async def write_events(
    reporter: SessionReporter,
    refresh_secs: float,
    write: Callable[[bytes], Coroutine[Any, Any, None]],
) -> None:
    """Write `progress` events until the session has ended, then one `end`: always the newest state,
    never a backlog.

    Raises:
        TimeoutError: the client takes too long to read an event.
    """
    store: StepStore | None = None
    changes: Changes | None = None
    while True:
        current = store_of(reporter.session)
        if current is not None and current is not store and not reporter.session.should_stop():
            # Subscribed before the report is made, so that no change is missed.
            with contextlib.suppress(Exception):  # a closed store has no more changes
                subscription = current.changes()
                await anext(subscription)  # the current position
                store, changes = current, subscription
        report = reporter.progress()
        last = _has_ended(reporter, report["state"])
        event = write(
            b"event: %s\ndata: %s\n\n" % (b"end" if last else b"progress", encode_json(report))
        )
        await limited(event, _WRITE_TIMEOUT_SECS, "writing an event")
        if last:
            return
        await sleep(refresh_secs)
        with contextlib.suppress(TimeoutError):
            await limited(_wait_for_change(reporter, changes), _KEEPALIVE_SECS, "the next step")


def _has_ended(reporter: SessionReporter, state: str) -> bool:
    if reporter.runner is not None:
        return reporter.runner.ended.is_set()
    return state == "finished" or (
        state == "failed" and reporter.session.status().state == "closed"
    )


async def _wait_for_change(reporter: SessionReporter, changes: Changes | None) -> None:
    """Wait for the next step, or for another state of the session."""
    session, runner = reporter.session, reporter.runner
    if runner is not None and not runner.opened.is_set() and session.stop_reason is None:
        with contextlib.suppress(Exception):  # a stop or a failure: the next report says which
            await runner.wait_opened()
    elif runner is not None and session.should_stop():
        await runner.ended.wait()
    elif store_of(session) is None or changes is None or session.should_stop():
        await sleep(_POLL_SECS)
    else:
        with contextlib.suppress(Exception):
            await _until_stopped(session, anext(changes))
