"""A timeline as lanes of bars, and its file.

The file is a trace that Perfetto and Chrome open, the JSON object of the Trace Event Format: complete events ("X") with times in
microseconds since its beginning, one thread for each lane, instants ("i") for what has no duration, and an open event ("B") for
what had not ended.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TextIO

from aiohooks.hooks._observing import write_whole

_PROCESS = 1
_IDLE_SHARE = 0.002
"""A lane that is busy for a smaller share of the time is not drawn."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One activity of a lane.

    Attributes:
        name: what it is.
        began: seconds since the beginning of the timeline.
        secs: how long it took; None if it had not ended.
        held_secs: how long it held the event loop before it first waited; None if that was not measured.
        error: how it failed; None if it did not.
    """

    name: str
    began: float
    secs: float | None
    held_secs: float | None = None
    error: str | None = None

    def ends(self, end: float) -> float:
        """Return its end; `end` if it had not ended."""
        return end if self.secs is None else self.began + self.secs


@dataclass(frozen=True, slots=True)
class Lane:
    """The bars of one thing, one at a time, in order; `kind` is the category of its bars."""

    name: str
    kind: str
    bars: tuple[Bar, ...]

    def busy_secs(self, end: float) -> float:
        """Return the sum of its bars; those that had not ended are counted up to `end`."""
        return sum(bar.ends(end) - bar.began for bar in self.bars)


@dataclass(frozen=True, slots=True)
class Lanes:
    """A timeline.

    Attributes:
        lanes: the lanes, from top to bottom.
        title: the name of the session.
        marks: what happened without a duration: seconds since the beginning, and the name.
        dropped: how many older bars were dropped, because there were too many.
        unix_time: when it begins; None if that is not known.
        first_step: the first step in it.
    """

    lanes: tuple[Lane, ...]
    title: str = "session"
    marks: tuple[tuple[float, str], ...] = ()
    dropped: int = 0
    unix_time: float | None = None
    first_step: int = 0

    @property
    def end(self) -> float:
        """The end of the last bar, in seconds since the beginning."""
        ends = [bar.ends(bar.began) for lane in self.lanes for bar in lane.bars]
        return max([0.0, *ends, *(at for at, _ in self.marks)])

    @property
    def steps(self) -> tuple[Bar, ...]:
        """The bars of the steps."""
        return next((lane.bars for lane in self.lanes if lane.kind == "step"), ())

    def last_steps(self, count: int | None) -> Lanes:
        """Return the part of it from the beginning of the last `count` steps on; None for all of it."""
        steps = self.steps
        if count is None or len(steps) <= count:
            return self
        origin = steps[-count].began
        lanes = [
            replace(lane, bars=tuple(_clipped(bar, origin) for bar in lane.bars if bar.ends(math.inf) > origin))
            for lane in self.lanes
        ]
        marks = tuple((at - origin, name) for at, name in self.marks if at >= origin)
        return replace(self, lanes=tuple(lane for lane in lanes if lane.bars), marks=marks, dropped=0)

    def without_idle(self) -> Lanes:
        """Return it without the lanes that are hardly ever busy."""
        least = _IDLE_SHARE * self.end
        idle = [lane for lane in self.lanes if lane.kind != "step" and lane.busy_secs(self.end) < least]
        return replace(self, lanes=tuple(lane for lane in self.lanes if lane not in idle))


def _clipped(bar: Bar, origin: float) -> Bar:
    """Return the part of a bar after `origin`, which is the beginning from then on."""
    cut = max(0.0, origin - bar.began)
    return replace(
        bar,
        began=bar.began + cut - origin,
        secs=None if bar.secs is None else bar.secs - cut,
        held_secs=None if bar.held_secs is None else max(0.0, bar.held_secs - cut),
    )


# -- the file


def write_trace(path: str, lanes: Lanes) -> None:
    """Write a trace, which appears when it is complete; make its directory if it is missing."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)

    def write(unfinished: str) -> None:
        with open(unfinished, "w", encoding="utf-8") as file:
            _write_events(file, lanes)

    write_whole(path, write)


def _write_events(file: TextIO, lanes: Lanes) -> None:
    other = {"unix_time": lanes.unix_time, "dropped": lanes.dropped}
    file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(other)}, "traceEvents": [\n')
    separator = ""
    for event in _events(lanes):  # one by one: the encoder holds the interpreter's lock until it is done
        file.write(separator + json.dumps(event))
        separator = ",\n"
    file.write("\n]}\n")


def _events(lanes: Lanes) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": _PROCESS, "tid": 0, "args": {"name": lanes.title}}
    for number, lane in enumerate(lanes.lanes, 1):
        place = {"pid": _PROCESS, "tid": number}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": lane.name}}
        yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": number}}
        for bar in lane.bars:
            length = {"ph": "B"} if bar.secs is None else {"ph": "X", "dur": _micros(bar.secs)}
            args = {"held_us": None if bar.held_secs is None else _micros(bar.held_secs), "error": bar.error}
            given = {name: value for name, value in args.items() if value is not None}
            event = {**length, "name": bar.name, "cat": lane.kind, **place, "ts": _micros(bar.began)}
            yield {**event, "args": given} if given else event
    for at, name in lanes.marks:
        yield {"ph": "i", "name": name, "cat": "mark", "pid": _PROCESS, "tid": 1, "ts": _micros(at), "s": "p"}


def _micros(secs: float) -> float:
    return round(secs * 1e6, 3)
