"""Reports of a session: plain data of limited size, with texts that are safe to show."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from aiohooks._core.clock import current_clock
from aiohooks.adapters._rate import StepRate
from aiohooks.adapters.asgi._access import safe_error, safe_text
from aiohooks.adapters.asgi._lifespan import SessionRunner
from aiohooks.session.monitored import AsyncMonitoredSession
from aiohooks.session.status import SessionStatus

_MAX_ROWS = 50

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
        step: the global step; None before there is a session.
        doing: current activities, and what they wait for.
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
        self._rate = StepRate()

    def health(self) -> ServiceHealth:
        return self._health(self.session.status())

    def _health(self, status: SessionStatus) -> ServiceHealth:
        failure = status.failure
        if self.runner is not None and self.runner.failure is not None:
            failure = safe_error(self.runner.failure)
        # Clients need not know the source line at which an activity waits.
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
        runner = self.runner
        if runner is not None and runner.failure is not None:
            return "failed"
        if runner is not None and runner.ended.is_set():
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
            "steps_per_sec": None,
            "store": None,
        }
        steps = status.steps
        if steps is not None:
            report["steps_per_sec"] = self._rate.update(current_clock().now(), steps.latest)
            report["store"] = {
                "run": self.session.global_step.run,
                "epoch": steps.latest.epoch,
                **asdict(steps),
            }
        safe: dict[str, Any] = _safe(report)
        return safe


def _safe(value: Any) -> Any:
    """Return data in short lists, with texts that are safe to show and numbers that JSON has."""
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
