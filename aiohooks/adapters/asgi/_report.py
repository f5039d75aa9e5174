"""What a service reports of its session: plain data of limited size, every text made safe to show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from aiohooks._aio.clock import current_clock
from aiohooks.adapters._step_rate import StepRate
from aiohooks.adapters.asgi._access import safe_error, safe_text
from aiohooks.hooks.history import HistoryHook
from aiohooks.hooks.timeline import TimelineHook
from aiohooks.hooks.timing import HookTimingHook
from aiohooks.session.monitored import AsyncMonitoredSession
from aiohooks.session.status import Activity

if TYPE_CHECKING:
    from aiohooks.adapters.asgi._lifespan import SessionRunner

State = Literal["starting", "running", "paused", "draining", "recovering", "stopping", "finished", "failed"]

_MAX_POINTS = 240
_MAX_ROWS = 50
_LAST_STEPS = 8
_MAX_LANES = 24
_MAX_BARS = 600


@dataclass(frozen=True, slots=True)
class ServiceHealth:
    """The state of a service's session.

    Attributes:
        state: `"starting"`, `"running"`, `"paused"`, `"draining"`, `"recovering"` from a failed background task,
            `"stopping"`, `"finished"` cleanly, or `"failed"`.
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
        history: HistoryHook | None,
        timing: HookTimingHook | None,
        timeline: TimelineHook | None,
    ) -> None:
        self.session = session
        self.runner = runner
        self._title = title or session.status().name or "session"
        self._history = history
        self._timing = timing
        self._timeline = timeline
        self._rate = StepRate()

    def health(self) -> ServiceHealth:
        status = self.session.status()
        error = None if self.runner is None else self.runner.failure
        failure = status.failure if error is None else safe_error(error)
        state: State
        if error is not None:
            state = "failed"
        elif self.runner is not None and self.runner.ended.is_set():
            state = "finished"
        elif failure is not None and (status.stop_reason is not None or status.state == "closed"):
            state = "failed"
        elif status.state in ("new", "opening"):
            state = "starting" if status.stop_reason is None else "stopping"
        elif status.state == "closed":
            state = "finished"
        elif status.state == "closing" or status.stop_reason is not None:
            state = "stopping"
        elif failure is not None:
            state = "recovering"
        else:
            paused, draining = status.pause_reason is not None, status.drain_reason is not None
            state = "draining" if draining else "paused" if paused else "running"
        return ServiceHealth(
            state=state,
            step=status.global_step,
            doing=_describe([*status.doing, *status.background]),
            stop_reason=None if status.stop_reason is None else safe_text(status.stop_reason),
            failure=None if failure is None else safe_text(failure),
            pause_reason=None if status.pause_reason is None else safe_text(status.pause_reason),
            drain_reason=None if status.drain_reason is None else safe_text(status.drain_reason),
        )

    def progress(self) -> dict[str, Any]:
        """Return all that is reported of the session."""
        health, status = self.health(), self.session.status()
        report: dict[str, Any] = {
            "title": safe_text(self._title),
            **asdict(health),
            "runs": status.runs,
            "queued": status.queued,
            "recoveries": status.recoveries,
            "steps_per_sec": None,
            "store": None,
            "values": {} if self._history is None else _thinned_values(self._history),
            "hooks": [],
            "hook_calls": [
                {**one._asdict(), "name": safe_text(one.name), "last_error": one.last_error and safe_text(one.last_error)}
                for one in status.hooks[:_MAX_ROWS]
            ],
            "loop": None,
            "timeline": None if self._timeline is None else _last_steps(self._timeline),
        }
        if status.steps is not None:
            steps = status.steps
            first = None if self.runner is None else self.runner.first_position
            report["steps_per_sec"] = _finite(self._rate.update(current_clock().now(), steps.latest, first))
            report["store"] = {
                "run": safe_text(self.session.global_step.run),
                "epoch": steps.latest.epoch,
                "waiting": steps.waiting,
                "wanted": steps.wanted,
                "waiting_secs": _finite(steps.waiting_secs),
                "watching": steps.watching,
                "publishers": [safe_text(name) for name in steps.publishers[:_MAX_ROWS]],
            }
        if self._timing is not None:
            times = self._timing.statistics()
            report["hooks"] = [
                {
                    "hook": safe_text(phase.hook),
                    "phase": phase.phase,
                    "calls": phase.calls,
                    "blocking_secs": _finite(phase.blocking_secs),
                    "waiting_secs": _finite(phase.waiting_secs),
                    "longest_block_secs": _finite(phase.longest_block_secs),
                }
                for phase in times.phases[:_MAX_ROWS]
            ]
            report["loop"] = {"mean_lag_secs": _finite(times.mean_lag_secs), "longest_lag_secs": _finite(times.longest_lag_secs)}
        return report


def _describe(activities: Sequence[Activity]) -> tuple[str, ...]:
    # Without the source line at which an activity waits, which clients need not know.
    return tuple(
        safe_text(
            activity.what
            + ("" if activity.secs is None else f" for {activity.secs:.3g} s")
            + ("" if activity.awaits is None else f", waiting for {activity.awaits}")
        )
        for activity in activities[:_MAX_ROWS]
    )


def _last_steps(timeline: TimelineHook) -> dict[str, Any]:
    """Return the lanes of the last steps; a bar is its beginning and its length in seconds, its name, and whether it failed."""
    lanes = timeline.lanes(_LAST_STEPS)
    secs = lanes.end
    left = _MAX_BARS
    rows: list[dict[str, Any]] = []
    for lane in lanes.without_idle().lanes[:_MAX_LANES]:
        bars = lane.bars[-left:] if left else ()
        left -= len(bars)
        rows.append(
            {
                "name": safe_text(lane.name),
                "kind": lane.kind,
                "busy": _finite(lane.busy_secs(secs) / secs if secs else 0.0),
                "bars": [
                    [
                        round(bar.began, 6),
                        round(secs - bar.began if bar.secs is None else bar.secs, 6),
                        safe_text(bar.name),
                        bar.error is not None,
                    ]
                    for bar in bars
                ],
            }
        )
    return {"secs": secs, "lanes": rows}


def _thinned_values(history: HistoryHook) -> dict[str, Any]:
    """Return a limited number of points for each tag, spread over the whole run and ending with the last one."""
    stride = -(-len(history.steps) // _MAX_POINTS) or 1
    part = slice((len(history.steps) - 1) % stride if history.steps else 0, None, stride)
    steps = history.steps[part]
    return {
        safe_text(tag): {"steps": steps, "values": [_finite(value) for value in values[part]]}
        for tag, values in list(history.values.items())[:_MAX_ROWS]
    }


def _finite(value: float | None) -> float | int | None:
    # JSON has neither infinity nor NaN.
    return value if value is not None and math.isfinite(value) else None
