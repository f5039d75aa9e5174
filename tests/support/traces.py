"""Reading a trace by the documented rules of the Trace Event Format, and sessions whose timeline is
known to the millisecond.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import anyio.to_thread

from aiohooks._core.clock import sleep
from aiohooks.session.hook import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
)
from aiohooks.testing import ManualClock

T = TypeVar("T")

Times = list[tuple[str, int, int | None]]
"""The slices of a track: name, beginning and duration in milliseconds; None for one that had not
ended.
"""


async def played(clock: ManualClock, coro: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine, and move the time by a millisecond whenever all that can run has run, and
    no thread is waited for.
    """
    task = asyncio.create_task(coro)
    threads = anyio.to_thread.current_default_thread_limiter()
    idle_turns = 0
    while not task.done():
        await asyncio.sleep(0)
        idle_turns = 0 if threads.borrowed_tokens else idle_turns + 1
        if idle_turns > 30:
            clock.advance(0.001)
            idle_turns = 0
    return task.result()


class Slow(SessionRunHook):
    """Waits so many milliseconds in its methods; 0 does not wait."""

    def __init__(self, *, before: int = 0, after: int = 0) -> None:
        self._before = before
        self._after = after

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        if self._before:
            await sleep(self._before / 1000)
        return None

    async def after_run(self, *_: object) -> None:
        if self._after:
            await sleep(self._after / 1000)


def trace_tracks(path: Path) -> dict[str, Times]:
    """Return the slices of each track of a valid trace, in the order of the tracks, without those
    of the profiler.

    Slices without a duration are left out, and so are tracks that have no others.
    """
    events = checked_events(path)
    names = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    tracks: dict[str, Times] = {name: [] for name in names.values()}
    for event in events:
        began = round(event.get("ts", 0) / 1000)
        if event["ph"] == "X" and event["dur"] >= 500:
            tracks[names[event["tid"]]].append((event["name"], began, round(event["dur"] / 1000)))
        elif event["ph"] == "B":
            tracks[names[event["tid"]]].append((event["name"], began, None))
    return {name: slices for name, slices in tracks.items() if slices and name != "ProfilerHook"}


def checked_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace; fail if one breaks a rule of the format, or Perfetto's importer
    would drop it.
    """

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    content = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert isinstance(content, dict)
    assert content.get("displayTimeUnit") in (None, "ms", "ns")
    events: list[dict[str, Any]] = content["traceEvents"]
    named, ends = set[tuple[int, int]](), dict[tuple[int, int], list[tuple[float, float]]]()
    for event in events:
        phase, place = event["ph"], (event["pid"], event["tid"])
        assert phase in ("X", "B", "M", "i"), event
        assert isinstance(event["name"], str), event
        assert all(type(number) is int for number in place), event
        assert isinstance(event.get("args", {}), dict), event
        if phase == "M":
            key = {
                "process_name": "name",
                "thread_name": "name",
                "thread_sort_index": "sort_index",
            }[event["name"]]
            assert isinstance(event["args"][key], int if key == "sort_index" else str), event
            named.add(place)
            continue
        assert isinstance(event["cat"], str), event
        assert event["ts"] >= 0, event
        assert place in named, event
        if phase == "X":
            assert event["dur"] >= 0, event
            ends.setdefault(place, []).append((event["ts"], event["ts"] + event["dur"]))
        elif phase == "i":
            assert event["s"] in ("g", "p", "t"), event
    for (
        slices
    ) in ends.values():  # those of one thread must not overlap, unless one contains the other
        last = 0.0
        for began, end in sorted(slices):
            assert began >= last - 0.002, slices
            last = max(last, end)
    return events
