"""What a service reports of its session: plain data of limited size, every text made safe to
show.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from aiohooks._core.clock import current_clock
from aiohooks.adapters._rate import StepRate
from aiohooks.adapters.asgi._access import safe_error, safe_text
from aiohooks.adapters.asgi._lifespan import SessionRunner
from aiohooks.hooks.timing import HookTimingHook
from aiohooks.session.monitored import AsyncMonitoredSession
from aiohooks.session.status import SessionStatus

_MAX_ROWS = 50


State = Literal[
    "starting", "running", "paused", "draining", "recovering", "stopping", "finished", "failed"
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

    def __init__(
        self,
        session: AsyncMonitoredSession,
        runner: SessionRunner | None,
        *,
        title: str | None,
        timing: HookTimingHook | None,
    ) -> None:
        self.session = session
        self.runner = runner
        self._title = title or session.status().name or "session"
        self._timing = timing
        self._rate = StepRate() if runner is None else runner.rate

    def health(self) -> ServiceHealth:
        status = self.session.status()
        error = None if self.runner is None else self.runner.failure
        failure = status.failure if error is None else safe_error(error)
        # Without the source line at which an activity waits, which clients need not know.
        doing = [
            str(replace(one, where=None)) for one in [*status.doing, *status.background][:_MAX_ROWS]
        ]
        doing, *reasons = _safe(
            (doing, status.stop_reason, failure, status.pause_reason, status.drain_reason)
        )
        return ServiceHealth(
            self._state(status, failure), status.global_step, tuple(doing), *reasons
        )

    def _state(self, status: SessionStatus, failure: str | None) -> State:
        if self.runner is not None and self.runner.failure is not None:
            return "failed"
        if self.runner is not None and self.runner.ended.is_set():
            return "finished"
        is_stopping = status.stop_reason is not None
        if failure is not None and (is_stopping or status.state == "closed"):
            return "failed"
        if status.state in ("new", "opening"):
            return "stopping" if is_stopping else "starting"
        if status.state == "closed":
            return "finished"
        if status.state == "closing" or is_stopping:
            return "stopping"
        if failure is not None:
            return "recovering"
        return (
            "draining"
            if status.drain_reason is not None
            else "paused"
            if status.pause_reason is not None
            else "running"
        )

    def progress(self) -> dict[str, Any]:
        """Return all that is reported of the session."""
        status = self.session.status()
        report: dict[str, Any] = {
            "title": self._title,
            **asdict(self.health()),
            **_fields(status, "runs", "queued", "recoveries"),
            "steps_per_sec": None,
            "store": None,
            "hooks": [],
            "hook_calls": [hook._asdict() for hook in status.hooks[:_MAX_ROWS]],
            "effects": [kind._asdict() for kind in status.effects[:_MAX_ROWS]],
            "loop": None,
        }
        if status.steps is not None:
            steps = status.steps
            report["steps_per_sec"] = self._rate.update(current_clock().now(), steps.latest)
            report["store"] = {
                "run": self.session.global_step.run,
                "epoch": steps.latest.epoch,
                **_fields(steps, "waiting", "wanted", "waiting_secs", "watching"),
                "publishers": steps.publishers[:_MAX_ROWS],
            }
        if self._timing is not None:
            times = self._timing.statistics()
            fields = (
                "hook",
                "phase",
                "calls",
                "blocking_secs",
                "waiting_secs",
                "longest_block_secs",
            )
            report["hooks"] = [_fields(phase, *fields) for phase in times.phases[:_MAX_ROWS]]
            report["loop"] = _fields(times, "mean_lag_secs", "longest_lag_secs")
        safe: dict[str, Any] = _safe(report)
        return safe

    def why(self) -> dict[str, Any]:
        """Return the wait-for graph, with lines of the source."""
        safe: dict[str, Any] = _safe(json.loads(self.session.why().to_json()))
        return safe


def _safe(value: Any) -> Any:
    """Return data whose texts are safe to show, all but keys; a number that JSON does not have is
    None.
    """
    if value is None or isinstance(value, int):  # first, as most of what is reported are numbers
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        fields: dict[Any, Any] = value  # pyright: ignore[reportUnknownVariableType]
        return {key: _safe(field) for key, field in fields.items()}
    if isinstance(value, list | tuple):
        return [_safe(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    return safe_text(value)


def _fields(thing: object, *names: str) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in names}
