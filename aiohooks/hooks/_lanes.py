"""A timeline as lanes of bars, and its file: a trace that Perfetto and Chrome open.

The file is the JSON object of the Trace Event Format: complete events ("X") with times in microseconds since its beginning, one
thread for each lane, instants ("i") for what has no duration, and an open event ("B") for what had not ended.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TextIO, cast

from aiohooks.errors import InvalidArgumentError, did_you_mean, printable
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


@dataclass(frozen=True, slots=True)
class Lane:
    """The bars of one thing, which do not overlap, in order.

    Attributes:
        name: its name.
        kind: the category of its bars.
        bars: the bars.
    """

    name: str
    kind: str
    bars: tuple[Bar, ...]

    def busy_secs(self, end: float) -> float:
        """Return the sum of its bars; those that had not ended are counted up to `end`."""
        return sum(end - bar.began if bar.secs is None else bar.secs for bar in self.bars)


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
        idle: the names of lanes that are left out, because they are hardly ever busy.
    """

    lanes: tuple[Lane, ...]
    title: str = "session"
    marks: tuple[tuple[float, str], ...] = ()
    dropped: int = 0
    unix_time: float | None = None
    first_step: int = 0
    idle: tuple[str, ...] = ()

    @property
    def end(self) -> float:
        """The end of the last bar, in seconds since the beginning."""
        ends = [bar.began + (bar.secs or 0.0) for lane in self.lanes for bar in lane.bars]
        return max([0.0, *ends, *(at for at, _ in self.marks)])

    def heading(self) -> str:
        """Return a line about it."""
        factor, unit = time_unit(self.end)
        text = f"{self.title}: {self.end * factor:.3g} {unit}"
        steps = [bar for lane in self.lanes if lane.kind == "step" for bar in lane.bars]
        if steps:
            text += f", {steps[0].name}" + (f" to {steps[-1].name}" if len(steps) > 1 else "")
        if self.idle:
            text += f"; busy less than {_IDLE_SHARE:.1%}: {', '.join(self.idle)}"
        if self.dropped:
            text += f"; {self.dropped} older activities were dropped"
        return text

    def last_steps(self, count: int | None) -> Lanes:
        """Return the part of it from the beginning of the last `count` steps on; None for all of it."""
        steps = next((lane.bars for lane in self.lanes if lane.kind == "step"), ())
        if count is None or len(steps) <= count:
            return self
        origin = steps[-count].began
        lanes = [
            replace(
                lane, bars=tuple(_clipped(bar, origin) for bar in lane.bars if bar.secs is None or bar.began + bar.secs > origin)
            )
            for lane in self.lanes
        ]
        marks = tuple((at - origin, name) for at, name in self.marks if at >= origin)
        return replace(self, lanes=tuple(lane for lane in lanes if lane.bars), marks=marks, dropped=0)

    def without_idle(self) -> Lanes:
        """Return it without the lanes that are hardly ever busy: their names alone."""
        least = _IDLE_SHARE * self.end
        idle = [lane for lane in self.lanes if lane.kind != "step" and lane.busy_secs(self.end) < least]
        return replace(self, lanes=tuple(lane for lane in self.lanes if lane not in idle), idle=tuple(lane.name for lane in idle))


def _clipped(bar: Bar, origin: float) -> Bar:
    """Return the part of a bar after `origin`, which is the beginning from then on."""
    cut = max(0.0, origin - bar.began)
    return replace(
        bar,
        began=bar.began + cut - origin,
        secs=None if bar.secs is None else bar.secs - cut,
        held_secs=None if bar.held_secs is None else max(0.0, bar.held_secs - cut),
    )


def time_unit(secs: float) -> tuple[float, str]:
    """Return the unit for an axis of this length: the factor from seconds, and its name."""
    return (1.0, "s") if secs >= 1 else (1e3, "ms") if secs >= 1e-3 else (1e6, "µs")


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
            event: dict[str, Any] = {"ph": "X", "name": bar.name, "cat": lane.kind, **place, "ts": _micros(bar.began)}
            if bar.secs is None:
                event["ph"] = "B"
            else:
                event["dur"] = _micros(bar.secs)
            args: dict[str, Any] = {}
            if bar.held_secs is not None:
                args["held_us"] = _micros(bar.held_secs)
            if bar.error is not None:
                args["error"] = bar.error
            if args:
                event["args"] = args
            yield event
    for at, name in lanes.marks:
        yield {"ph": "i", "name": name, "cat": "mark", "pid": _PROCESS, "tid": 1, "ts": _micros(at), "s": "p"}


def _micros(secs: float) -> float:
    return round(secs * 1e6, 3)


def is_trace(path: str) -> bool:
    """Return whether a file looks like a trace, and not like lines of values.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        first = file.readline(1 << 16)
    if '"traceEvents"' in first or first.lstrip().startswith("["):
        return True
    try:
        line: object = json.loads(first)
    except (ValueError, RecursionError):
        line = None
    return path.endswith(".json") and not (isinstance(line, dict) and "step" in line)


def read_trace(path: str) -> Lanes:
    """Read the timeline in a trace, of `TimelineHook` or of another program.

    Raises:
        InvalidArgumentError: the file is no trace, or has no events.
        OSError: it cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content: Any = json.load(file)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"this is no trace, as it is not JSON: {error}") from None
    other: Any = {}
    if isinstance(content, dict):
        whole = cast("dict[str, Any]", content)
        if "traceEvents" not in whole:
            found = did_you_mean("traceEvents", whole)
            raise InvalidArgumentError(f"this is no trace: the JSON object has no 'traceEvents'; {found}")
        other, content = whole.get("otherData"), whole["traceEvents"]
    if not isinstance(content, list):
        raise InvalidArgumentError(f"this is no trace: the events are {type(content).__name__}, not a list")
    reader = _Reader()
    for number, event in enumerate(cast("list[object]", content)):
        try:
            if not isinstance(event, dict):
                raise ValueError("it is not an object")
            reader.add(cast("dict[str, Any]", event))
        except (ValueError, KeyError, TypeError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise InvalidArgumentError(f"this is no valid trace: event {number} of 'traceEvents': {why}") from None
    return reader.lanes(cast("dict[str, Any]", other) if isinstance(other, dict) else {})


@dataclass(slots=True)
class _Thread:
    name: str
    index: float = math.inf
    kind: str = ""
    bars: list[Bar] = field(default_factory=list[Bar])
    open: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])


class _Reader:
    """Collects the events of a trace."""

    def __init__(self) -> None:
        self._threads: dict[tuple[Any, Any], _Thread] = {}
        self._marks: list[tuple[float, str]] = []
        self._title: str | None = None

    def add(self, event: Mapping[str, Any]) -> None:
        kind = event["ph"]
        if kind not in ("X", "B", "E", "M", "i", "I"):
            return  # counters, flows and the like are not drawn
        thread = self._thread(event)
        args: Any = event.get("args")
        given = cast("dict[str, Any]", args) if isinstance(args, dict) else {}
        if kind == "M":
            if event["name"] == "thread_name":
                thread.name = printable(str(given["name"]))
            elif event["name"] == "thread_sort_index":
                thread.index = _number(given["sort_index"])
            elif event["name"] == "process_name":
                self._title = printable(str(given["name"]))
            return
        at = _number(event["ts"]) / 1e6
        if kind == "E":
            if thread.open:
                name, began = thread.open.pop()
                thread.bars.append(Bar(name, began, max(0.0, at - began)))
            return
        name = printable(str(event["name"]))
        if kind == "B":
            thread.kind = thread.kind or printable(str(event.get("cat", "")))
            thread.open.append((name, at))
        elif kind == "X":
            thread.kind = thread.kind or printable(str(event.get("cat", "")))
            held, error = given.get("held_us"), given.get("error")
            secs = _number(event.get("dur", 0)) / 1e6
            if secs < 0:
                raise ValueError(f"it takes {secs} s")
            held_secs = None if held is None else _number(held) / 1e6
            thread.bars.append(Bar(name, at, secs, held_secs, None if error is None else printable(str(error))))
        else:
            self._marks.append((at, name))

    def _thread(self, event: Mapping[str, Any]) -> _Thread:
        place = event["pid"], event.get("tid", 0)
        if place not in self._threads:
            self._threads[place] = _Thread(f"{printable(str(place[0]))}/{printable(str(place[1]))}")
        return self._threads[place]

    def lanes(self, other: Mapping[str, Any]) -> Lanes:
        threads = sorted((one for one in self._threads.values() if one.bars or one.open), key=lambda one: one.index)
        if not threads:
            raise InvalidArgumentError("there is nothing to draw: this trace has no events with a duration")
        for one in threads:
            one.bars += [Bar(name, began, None) for name, began in one.open]
            one.bars.sort(key=lambda bar: bar.began)
        first = min(one.bars[0].began for one in threads)
        first = min([first, *(at for at, _ in self._marks)])
        made = tuple(
            Lane(
                one.name,
                one.kind,
                tuple(Bar(bar.name, bar.began - first, bar.secs, bar.held_secs, bar.error) for bar in one.bars),
            )
            for one in threads
        )
        marks = tuple(sorted((at - first, name) for at, name in self._marks))
        dropped, unix_time = other.get("dropped"), other.get("unix_time")
        return Lanes(
            made,
            self._title or "trace",
            marks,
            dropped if isinstance(dropped, int) else 0,
            float(unix_time) if isinstance(unix_time, (int, float)) else None,
        )


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{str(value)[:80]!r} is not a number")
    return float(value)
