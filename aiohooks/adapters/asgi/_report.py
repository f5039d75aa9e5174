"""Reports of a session, and the replies to clients that wait for a step.

Reports are plain data of limited size, with texts that are safe to show: printable, without
passwords and source lines.

runner   the `SessionRunner` of a service that runs the session, or None if it only shows it
reply    the status, JSON body and headers that a client gets
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from aiohooks._core.calls import limited
from aiohooks._core.waits import retrieve_exception, wait_done
from aiohooks.adapters.asgi._access import (
    RETRY,
    JsonReply,
    error_reply,
    safe_error,
    safe_text,
)
from aiohooks.adapters.asgi._lifespan import SessionRunner
from aiohooks.errors import (
    PublisherFailedError,
    PublisherFinishedError,
    SessionClosedError,
    StopRequestedError,
    StoreClosedError,
    StoreDamagedError,
    StoreUnavailableError,
)
from aiohooks.session.monitored import AsyncMonitoredSession
from aiohooks.session.status import SessionStatus
from aiohooks.stores import StepStore

_MAX_ROWS = 50
# nginx's code for a client that has disconnected, which does not get the reply.
_CLIENT_CLOSED_REQUEST = 499
_STORE_ERRORS = (
    PublisherFailedError,
    StoreClosedError,
    StoreDamagedError,
    StoreUnavailableError,
)
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

State = Literal[
    "starting",
    "running",
    "paused",
    "draining",
    "recovering",
    "stopping",
    "finished",
    "failed",
]


@dataclass(frozen=True, slots=True)
class ServiceHealth:
    """The state of a service's session.

    Attributes:
        state: `"starting"`, `"running"`, `"paused"`, `"draining"`, `"recovering"` from a failed
            background task, `"stopping"`, `"finished"` cleanly, or `"failed"`.
        step: the global step, or None before there is a session.
        doing: current activities, and their waits.
        pause_reason: why the session is paused.
        drain_reason: why the session drains, or drained before its stop.
        stop_reason: why a stop was requested.
        failure: the error that failed the session.
    """

    state: State
    step: int | None
    doing: tuple[str, ...]
    stop_reason: str | None
    failure: str | None
    pause_reason: str | None = None
    drain_reason: str | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing has failed, for a liveness probe."""
        return self.state != "failed"

    @property
    def ready(self) -> bool:
        """Whether steps are being made, for a readiness probe."""
        return self.state == "running"


class SessionReporter:
    """Makes the reports of one session."""

    def __init__(self, session: AsyncMonitoredSession, runner: SessionRunner | None) -> None:
        self.session = session
        self.runner = runner

    def health(self) -> ServiceHealth:
        return self._health(self.session.status())

    def _health(self, status: SessionStatus) -> ServiceHealth:
        failure = status.failure
        if self.runner is not None and self.runner.failure is not None:
            failure = safe_error(self.runner.failure)
        # `where`, the source line at which an activity waits, is not for clients.
        doing = [
            safe_text(str(replace(activity, where=None)))
            for activity in [*status.doing, *status.background][:_MAX_ROWS]
        ]
        return ServiceHealth(
            state=self._state(status, failure),
            step=status.global_step,
            doing=tuple(doing),
            stop_reason=_safe(status.stop_reason),
            failure=_safe(failure),
            pause_reason=_safe(status.pause_reason),
            drain_reason=_safe(status.drain_reason),
        )

    def _state(self, status: SessionStatus, failure: str | None) -> State:
        """Return the state that a client sees. `failure` is the error of the session, or None."""
        # Only the runner has seen how its loop of steps ended.
        if self.runner is not None:
            if self.runner.failure is not None:
                return "failed"
            if self.runner.ended.is_set():
                return "finished"
        is_stopping = status.stop_reason is not None
        if failure is not None and (is_stopping or status.state == "closed"):
            return "failed"
        if status.state == "closed":
            return "finished"
        if is_stopping or status.state == "closing":
            return "stopping"
        if status.state in ("new", "opening"):
            return "starting"
        # The session is open and not stopping, so it recovers from the failure.
        if failure is not None:
            return "recovering"
        if status.drain_reason is not None:
            return "draining"
        if status.pause_reason is not None:
            return "paused"
        return "running"

    def progress(self) -> dict[str, Any]:
        """Return all that is reported of the session."""
        status = self.session.status()
        report: dict[str, Any] = {
            "name": status.name or "session",
            **asdict(self._health(status)),
            "runs": status.runs,
            "recoveries": status.recoveries,
            "hooks": [hook._asdict() for hook in status.hooks],
            "effects": [kind._asdict() for kind in status.effects],
            "store": None,
        }
        steps = status.steps
        if steps is not None:
            report["store"] = {
                "run": self.session.global_step.run,
                "epoch": steps.latest.epoch,
                **asdict(steps),
            }
        safe: dict[str, Any] = _safe(report)
        return safe


def _safe(value: Any) -> Any:
    """Return a copy of plain data for JSON: with short lists, texts that are safe to show, and None
    in place of NaN and infinities.
    """
    match value:
        case str():
            return safe_text(value)
        case float():
            return value if math.isfinite(value) else None
        case dict():
            fields: dict[Any, Any] = value  # pyright: ignore[reportUnknownVariableType]
            return {key: _safe(field) for key, field in fields.items()}
        case list() | tuple():
            items: list[Any] = [*value]  # pyright: ignore[reportUnknownVariableType]
            return [_safe(item) for item in items[:_MAX_ROWS]]
        case _:
            return value


# Waits for a step on behalf of clients.


def reached_reply(session: AsyncMonitoredSession, wanted: int) -> JsonReply | None:
    """Return the reply to a wait for a step if the step is reached, otherwise None."""
    store = _store_of(session)
    if store is None or store.latest.step < wanted:
        return None
    position = store.latest
    return JsonReply(200, {"step": position.step, "wanted": wanted, "epoch": position.epoch})


async def wait_for_step(
    reporter: SessionReporter,
    wanted: int,
    timeout: float | None,
) -> JsonReply:
    """Wait until a step is reached, until it cannot be reached anymore, or until the timeout.

    Return the reply. An error of the session is a reply, too, and is not raised.
    """
    wait = _reply_after_wait(reporter, wanted)
    if timeout is not None:
        wait = limited(wait, timeout, "a client's wait")
    try:
        reply = await wait
    except TimeoutError:
        reply = error_reply(504, "timeout", f"step {wanted} was not reached in time")
    # Add to an error how far the session has got.
    if reply.status != 200:
        store = _store_of(reporter.session)
        reply.body["wanted"] = wanted
        reply.body["step"] = None if store is None else store.latest.step
    return reply


async def _reply_after_wait(reporter: SessionReporter, wanted: int) -> JsonReply:
    """Wait for a step without a time limit, and return the reply."""
    session = reporter.session
    if reporter.runner is not None:
        # A session has no step store before it is open. If it was stopped, or failed to open, the
        # last line reports that.
        with contextlib.suppress(Exception):
            await reporter.runner.wait_opened()
    store = _store_of(session)
    failure: Exception | None = None
    if store is not None:
        try:
            # A stop of the session or a failed background task ends this wait, too, with an error.
            await session.coord.wait_until_ended("a client's wait", store.wait_for(wanted))
        except Exception as error:
            failure = error
    return reached_reply(session, wanted) or _unreached_reply(reporter, failure)


def _unreached_reply(reporter: SessionReporter, error: Exception | None) -> JsonReply:
    """Return the reply to a wait that has ended before the step, perhaps by an error."""
    # This class comes first, because it is a subclass of `StopRequestedError`.
    if isinstance(error, PublisherFinishedError):
        return error_reply(410, "publisher_finished", safe_text(str(error)))
    if isinstance(error, _STORE_ERRORS):
        return error_reply(503, "store_failed", _store_error_text(error))
    if error is None or isinstance(error, (StopRequestedError, SessionClosedError)):
        return _ended_reply(reporter)
    text = f"a background task of the session failed: {safe_error(error)}"
    return error_reply(503, "failed", text)


def _store_error_text(error: Exception) -> str:
    """Return the text of an error, with its cause if a publisher has failed: the cause is the error
    of that publisher.
    """
    text = safe_text(str(error))
    if isinstance(error, PublisherFailedError) and error.__cause__ is not None:
        return f"{text}: {safe_error(error.__cause__)}"
    return text


def _ended_reply(reporter: SessionReporter) -> JsonReply:
    """Return the reply to a wait for a step of a session that makes no more steps, or none yet."""
    runner = reporter.runner
    reason = reporter.session.stop_reason
    is_ending = runner is not None and runner.is_ending and runner.failure is None
    # The health is read only if it is needed. It lists the waits of all clients, and when a server
    # ends, each of thousands of clients gets such a reply.
    if reason is None or not is_ending:
        health = reporter.health()
        if not health.ok:
            return error_reply(503, "failed", f"the session failed: {health.failure}")
        if health.state == "starting" and reason is None:
            return error_reply(503, "not_started", "the session was not entered yet", RETRY)
        reason = reason or "it has ended"
    message = f"the session makes no more steps: {safe_text(reason)}"
    return error_reply(410, "stopped", message)


def _store_of(session: AsyncMonitoredSession) -> StepStore | None:
    """Return the session's step store, or None while it has none."""
    try:
        return session.global_step
    except SessionClosedError:
        return None


async def while_connected(
    receive: Receive,
    wait: Coroutine[Any, Any, JsonReply],
) -> JsonReply:
    """Return the reply of a wait, which is cancelled when the client disconnects."""
    loop = asyncio.get_running_loop()
    waiting = loop.create_task(wait)
    listener = loop.create_task(_wait_disconnected(receive))
    tasks = [waiting, listener]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
            task.add_done_callback(retrieve_exception)
        await wait_done(tasks, None)
    if waiting.cancelled():
        return JsonReply(_CLIENT_CLOSED_REQUEST)
    return waiting.result()


async def _wait_disconnected(receive: Receive) -> None:
    # Some servers raise an `OSError` for a disconnect. Other messages, such as a body of the
    # request, are ignored.
    with contextlib.suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            pass
