"""The recorded scenarios: what a line of the file holds, and how its calls are numbered.

A line is `{"id": ..., "scenario": {...}, "expected": {...}}`. A call is `[caller, phase, n]`, in
`after_run` with what the hook got as a fourth item unless that is None.
"""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Any, TypedDict

TRACES = Path(__file__).with_name("traces.jsonl")
FAN_OUT_PHASES = frozenset({"after_create_session", "before_run", "after_run"})

Call = list[Any]
Actions = dict[tuple[str, str, int], list[str]]


class HookPlan(TypedDict):
    """One hook of a scenario; `plan` is a list of `[phase, n, action]`."""

    name: str
    plan: list[tuple[str, int, str]]
    fetch: Any
    feed: dict[str, Any] | None


Body = TypedDict("Body", {"steps": int, "feed_w": bool, "fetch": Any, "raise": str | None})


class Scenario(TypedDict):
    """A scenario: `run` is a list of `[n, error]` for the n-th run of the raw session."""

    session: str
    hooks: list[HookPlan]
    run: list[tuple[int, str]]
    body: Body


class Expected(TypedDict):
    """The original's calls and results."""

    trace: list[Call]
    runs: list[Any]
    raised: str | None
    raised_by: str | None


class Record(TypedDict):
    """One line of the file."""

    id: str
    scenario: Scenario
    expected: Expected


class Mode(enum.StrEnum):
    """How to replay a scenario."""

    PLAIN = "plain"
    """No coroutine suspends: calls, their order and their results are the original's."""
    SUSPENDING = "suspending"
    """Everything suspends once; calls are numbered by round."""
    FREE = "free"
    """Everything suspends and every action acts, by each hook's own count: only what holds at every
    end is checked.
    """


def load() -> list[Record]:
    """Load the records."""
    with TRACES.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def rounds(record: Record) -> dict[tuple[str, str, int], int]:
    """Return the round of each recorded call of a hook; a round begins with the call of the first
    hook.
    """
    hooks = record["scenario"]["hooks"]
    first = hooks[0]["name"] if hooks else None
    current: dict[str, int] = {}
    found: dict[tuple[str, str, int], int] = {}
    for caller, phase, n, *_ in record["expected"]["trace"]:
        if caller == first:
            current[phase] = n
        if caller not in ("session", "body"):
            found[caller, phase, n] = current[phase]
    return found


def actions(record: Record, mode: Mode) -> Actions:
    """What each hook does in its n-th call of a phase; n is a round when suspending, else the
    hook's own count.

    Outside free replays actions of calls that the original never made are left out: here they could
    be made (hooks of a phase overlap) and would tell something that the original never knew.
    """
    number = rounds(record)
    found: Actions = {}
    for hook in record["scenario"]["hooks"]:
        for phase, n, action in hook["plan"]:
            call = (hook["name"], phase, n)
            if mode is Mode.FREE:
                found.setdefault(call, []).append(action)
            elif call in number:
                count = number[call] if mode is Mode.SUSPENDING else n
                found.setdefault((hook["name"], phase, count), []).append(action)
    return found


def expected_trace(record: Record, mode: Mode) -> list[Call]:
    """Return the recorded calls, numbered by round when suspending."""
    trace = record["expected"]["trace"]
    if mode is not Mode.SUSPENDING:
        return trace
    number = rounds(record)
    return [
        [caller, phase, number.get((caller, phase, n), n), *rest]
        for caller, phase, n, *rest in trace
    ]


def comparable(record: Record, mode: Mode, got: list[Call]) -> list[Call]:
    """The replay's calls without those of hooks behind the failing one, in a round that the
    original broke off.

    The original calls the hooks of a phase in turn, so an error, or a conflict of feeds, keeps it
    from calling the later ones; here they may have been started. When nothing suspends that is only
    so for conflicts: they are found after the phase.
    """
    order = [hook["name"] for hook in record["scenario"]["hooks"]]
    if mode is Mode.SUSPENDING:
        reached: dict[tuple[str, int], int] = {}
        for caller, phase, n, *_ in expected_trace(record, mode):
            if phase in FAN_OUT_PHASES:
                reached[phase, n] = order.index(caller)
        return [
            call
            for call in got
            if call[1] not in FAN_OUT_PHASES
            or order.index(call[0]) <= reached.get((call[1], call[2]), len(order))
        ]
    trace = record["expected"]["trace"]
    if record["expected"]["raised"] == "RuntimeError" and trace[-1][1] == "before_run":
        later = order[order.index(trace[-1][0]) + 1 :]
        if [call[:2] for call in got[len(trace) :]] == [[name, "before_run"] for name in later]:
            return got[: len(trace)]
    return got
