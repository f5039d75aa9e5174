"""What a service tells of its session: plain data of known size, every text made safe to show."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from aiohooks.adapters.asgi._access import safe_error, safe_text
from aiohooks.adapters.asgi._lifespan import Owner
from aiohooks.hooks.history import HistoryHook
from aiohooks.hooks.timing import HookTimingHook
from aiohooks.session.monitored import AsyncMonitoredSession
from aiohooks.session.status import Activity
from aiohooks.stores import Position

State = Literal["starting", "running", "recovering", "stopping", "finished", "failed"]

_MOST_POINTS = 240
_MOST_ROWS = 50
_WINDOW_SECS = 10.0
_LEAST_SECS = 0.2


@dataclass(frozen=True, slots=True)
class ServiceHealth:
    """How a service's session is, in one word and in a few.

    Attributes:
        state: `"starting"`, `"running"`, `"recovering"` from a failed background task, `"stopping"`, `"finished"` cleanly, or
            `"failed"`.
        step: the global step; None before there is a session.
        doing: what goes on, and what is waited for.
        stop_reason: why a stop was asked for.
        failure: what failed.
    """

    state: State
    step: int | None
    doing: tuple[str, ...]
    stop_reason: str | None
    failure: str | None

    @property
    def ok(self) -> bool:
        """Whether nothing has failed: what a liveness probe asks."""
        return self.state != "failed"

    @property
    def ready(self) -> bool:
        """Whether steps are being made: what a readiness probe asks."""
        return self.state == "running"


def health(session: AsyncMonitoredSession, owner: Owner | None) -> ServiceHealth:
    """How the session is now."""
    status = session.status()
    failure = status.failure
    if owner is not None and owner.failure is not None:
        failure = safe_error(owner.failure)
    state: State
    if owner is not None and owner.failure is not None:
        state = "failed"
    elif owner is not None and owner.ended.is_set():
        state = "finished"
    elif status.failure is not None and (status.stop_reason is not None or status.state == "closed"):
        state = "failed"
    elif status.state in ("new", "opening"):
        state = "starting"
    elif status.state == "closed":
        state = "finished"
    elif status.state == "closing" or status.stop_reason is not None:
        state = "stopping"
    else:
        state = "running" if status.failure is None else "recovering"
    return ServiceHealth(
        state=state,
        step=status.global_step,
        doing=tuple(_activities([*status.doing, *status.background])),
        stop_reason=None if status.stop_reason is None else safe_text(status.stop_reason),
        failure=None if failure is None else safe_text(failure),
    )


def _activities(found: Sequence[Activity]) -> Iterable[str]:
    for one in found[:_MOST_ROWS]:  # the line of code where it waits is nobody else's business
        lasting = "" if one.secs is None else f" for {one.secs:.3g} s"
        yield safe_text(one.what + lasting + ("" if one.awaits is None else f", waiting for {one.awaits}"))


class Rate:
    """Steps per second over the last seconds, by those who look: nothing is measured while nobody does."""

    def __init__(self) -> None:
        """Nobody has looked yet."""
        self._seen: deque[tuple[float, Position]] = deque()
        self._rate: float | None = None

    def at(self, now: float, position: Position) -> float | None:
        """The rate now; None until it has been looked at for a while."""
        seen = self._seen
        if seen and seen[-1][1].epoch != position.epoch:  # across a reset the difference says nothing
            seen.clear()
        if not seen or now - seen[-1][0] >= _LEAST_SECS:
            seen.append((now, position))
            while len(seen) > 2 and now - seen[1][0] >= _WINDOW_SECS:
                seen.popleft()
            elapsed = now - seen[0][0]
            self._rate = (position.step - seen[0][1].step) / elapsed if elapsed > 0 else None
        return self._rate


def progress(
    session: AsyncMonitoredSession,
    owner: Owner | None,
    rate: Rate,
    now: float,
    *,
    title: str,
    history: HistoryHook | None,
    timing: HookTimingHook | None,
) -> dict[str, Any]:
    """All there is to tell."""
    found, status = health(session, owner), session.status()
    told: dict[str, Any] = {
        "title": safe_text(title),
        "state": found.state,
        "step": found.step,
        "doing": list(found.doing),
        "stop_reason": found.stop_reason,
        "failure": found.failure,
        "runs": status.runs,
        "queued": status.queued,
        "recoveries": status.recoveries,
        "steps_per_sec": None,
        "store": None,
        "values": {} if history is None else _values(history),
        "hooks": [],
        "loop": None,
    }
    if status.steps is not None:
        steps = status.steps
        told["steps_per_sec"] = _finite(rate.at(now, steps.latest))
        told["store"] = {
            "run": safe_text(session.global_step.run),
            "epoch": steps.latest.epoch,
            "waiting": steps.waiting,
            "wanted": steps.wanted,
            "waiting_secs": _finite(steps.waiting_secs),
            "watching": steps.watching,
            "publishers": [safe_text(name) for name in steps.publishers[:_MOST_ROWS]],
        }
    if timing is not None:
        times = timing.statistics()
        told["hooks"] = [
            {
                "hook": safe_text(one.hook),
                "phase": one.phase,
                "calls": one.calls,
                "blocking_secs": _finite(one.blocking_secs),
                "waiting_secs": _finite(one.waiting_secs),
                "longest_block_secs": _finite(one.longest_block_secs),
            }
            for one in times.phases[:_MOST_ROWS]
        ]
        told["loop"] = {"mean_lag_secs": _finite(times.mean_lag_secs), "longest_lag_secs": _finite(times.longest_lag_secs)}
    return told


def _values(history: HistoryHook) -> dict[str, Any]:
    """At most so many points of each tag, spread over the whole run; the last one always."""
    stride = -(-len(history.steps) // _MOST_POINTS) or 1
    part = slice((len(history.steps) - 1) % stride if history.steps else 0, None, stride)
    steps = history.steps[part]
    return {
        safe_text(tag): {"steps": steps, "values": [_finite(value) for value in kept[part]]}
        for tag, kept in list(history.values.items())[:_MOST_ROWS]
    }


def _finite(value: float | None) -> float | int | None:
    """JSON knows neither infinity nor what is not a number."""
    return value if value is not None and math.isfinite(value) else None


def encoded(told: dict[str, Any]) -> bytes:
    """As JSON in one line of ASCII, which means nothing in HTML either."""
    text = json.dumps(told, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026").encode("ascii")
