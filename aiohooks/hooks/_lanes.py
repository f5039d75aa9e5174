"""A timeline as lanes of bars, its file, and its picture as text: `python -m aiohooks plot TRACE --terminal`.

The file is a trace that Perfetto and Chrome open, the JSON object of the Trace Event Format: complete events ("X") with times in
microseconds since its beginning, one thread for each lane, instants ("i") for what has no duration, and an open event ("B") for
what had not ended.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TextIO, cast

from aiohooks.errors import InvalidArgumentError, did_you_mean, printable
from aiohooks.hooks._observing import is_terminal, write_whole

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
        ends = [bar.ends(bar.began) for lane in self.lanes for bar in lane.bars]
        return max([0.0, *ends, *(at for at, _ in self.marks)])

    @property
    def steps(self) -> tuple[Bar, ...]:
        """The bars of the steps."""
        return next((lane.bars for lane in self.lanes if lane.kind == "step"), ())

    def heading(self) -> str:
        """Return a line about it."""
        factor, unit = time_unit(self.end)
        text = f"{self.title}: "
        if steps := self.steps:
            text += steps[0].name + (f" to {steps[-1].name}" if len(steps) > 1 else "") + ", "
        text += f"{self.end * factor:.3g} {unit}"
        if self.idle:
            text += f"; not shown, as hardly active: {', '.join(self.idle)}"
        if self.dropped:
            text += f"; {self.dropped} older activities were dropped"
        return text

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
            length = {"ph": "B"} if bar.secs is None else {"ph": "X", "dur": _micros(bar.secs)}
            args = {"held_us": None if bar.held_secs is None else _micros(bar.held_secs), "error": bar.error}
            given = {name: value for name, value in args.items() if value is not None}
            event = {**length, "name": bar.name, "cat": lane.kind, **place, "ts": _micros(bar.began)}
            yield {**event, "args": given} if given else event
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
    if '"traceEvents"' in first:
        return True
    try:
        line: object = json.loads(first)
    except (ValueError, RecursionError):
        line = None
    return path.endswith(".json") and not (isinstance(line, dict) and "step" in line)


def read_trace(path: str) -> Lanes:
    """Read the timeline in a trace of `TimelineHook`.

    Raises:
        InvalidArgumentError: the file is no trace, or has no events.
        OSError: it cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content: Any = json.load(file)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"this is no trace, as it is not JSON: {error}") from None
    whole = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    if "traceEvents" not in whole:
        found = did_you_mean("traceEvents", whole)
        raise InvalidArgumentError(f"this is no trace: there is no JSON object with 'traceEvents'; {found}")
    events, other = whole["traceEvents"], whole.get("otherData")
    if not isinstance(events, list):
        raise InvalidArgumentError(f"this is no trace: the events are {type(events).__name__}, not a list")
    reader = _Reader()
    for number, event in enumerate(cast("list[object]", events)):
        try:
            if not isinstance(event, dict):
                raise ValueError("it is not an object")
            reader.add(cast("dict[str, Any]", event))
        except (ValueError, KeyError, TypeError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise InvalidArgumentError(f"this is no valid trace: event {number} of 'traceEvents': {why}") from None
    if not any(reader.bars.values()):
        raise InvalidArgumentError("there is nothing to draw: this trace has no events with a duration")
    known: Mapping[str, Any] = cast("dict[str, Any]", other) if isinstance(other, dict) else {}
    dropped, unix_time = known.get("dropped"), known.get("unix_time")
    return Lanes(
        tuple(Lane(reader.names[tid], reader.kinds[tid], tuple(bars)) for tid, bars in reader.bars.items() if bars),
        reader.title,
        tuple(reader.marks),
        dropped if isinstance(dropped, int) else 0,
        float(unix_time) if isinstance(unix_time, (int, float)) else None,
    )


class _Reader:
    """Collects the events of a trace, which names each thread before its events."""

    def __init__(self) -> None:
        self.title = "trace"
        self.names: dict[Any, str] = {}
        self.kinds: dict[Any, str] = {}
        self.bars: dict[Any, list[Bar]] = {}
        self.marks: list[tuple[float, str]] = []

    def add(self, event: Mapping[str, Any]) -> None:
        what = event["ph"]
        if what not in ("M", "X", "B", "i"):
            return  # of another program
        name, tid, args = printable(str(event["name"])), event["tid"], event.get("args", {})
        if name == "process_name" and what == "M":
            self.title = printable(str(args["name"]))
        elif name == "thread_name" and what == "M":
            self.names[tid], self.bars[tid] = printable(str(args["name"])), []
        if what == "M":
            return
        at = _secs(event["ts"])
        if what == "i":
            self.marks.append((at, name))
            return
        secs = _secs(event["dur"]) if what == "X" else None
        if secs is not None and secs < 0:
            raise ValueError(f"it takes {secs} s")
        if tid not in self.bars:
            raise ValueError(f"thread {tid} has no name")
        held, error = args.get("held_us"), args.get("error")
        self.kinds[tid] = printable(str(event["cat"]))
        bar = Bar(name, at, secs, None if held is None else _secs(held), None if error is None else printable(str(error)))
        self.bars[tid].append(bar)


def _secs(micros: Any) -> float:
    if isinstance(micros, bool) or not isinstance(micros, (int, float)) or not math.isfinite(micros):
        raise ValueError(f"{str(micros)[:80]!r} is not a number")
    return micros / 1e6


# -- the picture as text

_MAX_LABEL = 26
_MIN_CELLS = 20
_BUSY_COLUMN = len("  100 %")
_FULL = ("█", "▓")
_PART = "░"
_ASCII = str.maketrans({"█": "#", "▓": "=", "░": ".", "│": "|", "…": "~", "µ": "u"})


class Row(NamedTuple):
    """One line: a label, the cells of a lane, and what follows these."""

    label: str
    kind: str
    cells: str
    rest: str


def text_rows(lanes: Lanes, width: int) -> list[Row]:
    """Return the lines of a picture that is `width` columns wide.

    A cell is full if an activity takes half of its time or more, and light if it takes less; the shade changes from one activity
    to the next. Behind the cells is how much of the time the lane was busy.
    """
    end = lanes.end or 1.0  # nothing in it took any time
    label_width = min(_MAX_LABEL, max(len(lane.name) for lane in lanes.lanes))
    count = max(_MIN_CELLS, width - label_width - 2 - _BUSY_COLUMN)
    rows = [Row("", "", _ruler(lanes.end, count), "")]
    for lane in lanes.lanes:
        label = lane.name if len(lane.name) <= label_width else lane.name[: label_width - 1] + "…"
        busy = f"{lane.busy_secs(lanes.end) / end:6.0%}".replace("%", " %")
        rows.append(Row(label, lane.kind, _cells(lane, end, count), busy))
    rows += [Row("", "mark", " " * min(count - 1, int(count * at / end)) + "│", f" {name}") for at, name in lanes.marks]
    return [Row(one.label.ljust(label_width), *one[1:]) for one in rows]


def _ruler(end: float, count: int) -> str:
    factor, unit = time_unit(end)
    places = max(2, count // 16)
    text = ""
    for number in range(places):
        label = f"{end * factor * number / (places - 1):.3g} {unit}"
        start = min(count * number // (places - 1), count - len(label))
        text = text.ljust(start) + label if start >= len(text) + (number > 0) else text
    return text.ljust(count)


def _cells(lane: Lane, end: float, count: int) -> str:
    covered = [[0.0, 0.0] for _ in range(count)]  # by activities of either shade
    for number, bar in enumerate(lane.bars):
        first, last = bar.began * count / end, bar.ends(end) * count / end
        for cell in range(int(first), min(count - 1, int(last)) + 1):
            covered[cell][number % 2] += max(0.0, min(last, cell + 1) - max(first, cell))
    return "".join(_FULL[odd > even] if even + odd >= 0.5 else _PART if even + odd > 0 else " " for even, odd in covered)


def plot_in_terminal(path: str, steps: int | None = None) -> int:
    """Draw a trace as text: the command `python -m aiohooks plot TRACE --terminal`.

    Args:
        path: the file.
        steps: how many steps to draw, the last ones; None for all.

    Returns:
        The exit status of the command: 0, or 1 with the reason on stderr.
    """
    try:
        if not is_trace(path):
            raise InvalidArgumentError("--terminal draws the lanes of a trace of TimelineHook, and this is none; leave it out")
        lanes = read_trace(path).last_steps(steps).without_idle()
    except (InvalidArgumentError, OSError) as error:
        print(f"plot {path}: {error}", file=sys.stderr)
        return 1
    rows = text_rows(lanes, shutil.get_terminal_size((100, 24)).columns)
    if is_terminal(sys.stdout):
        try:
            from aiohooks.hooks._rich import print_lanes
        except ImportError:
            pass
        else:
            print_lanes(lanes.heading(), rows)
            return 0
    for line in (lanes.heading(), *(f"{row.label}  {row.cells}{row.rest}".rstrip() for row in rows)):
        print(line if _can_print(line) else line.translate(_ASCII))
    return 0


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
