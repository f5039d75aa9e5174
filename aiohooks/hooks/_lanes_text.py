"""Lanes as text: `python -m aiohooks plot --terminal`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from typing import NamedTuple

from aiohooks.errors import InvalidArgumentError
from aiohooks.hooks._lanes import Lane, Lanes, is_trace, read_trace, time_unit
from aiohooks.hooks._observing import is_terminal

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
    label_width = min(_MAX_LABEL, max(len(lane.name) for lane in lanes.lanes))
    count = max(_MIN_CELLS, width - label_width - 2 - _BUSY_COLUMN)
    rows = [Row("", "", _ruler(lanes.end, count), "")]
    for lane in lanes.lanes:
        busy = lane.busy_secs(lanes.end) / lanes.end if lanes.end else 0.0
        rows.append(
            Row(_shortened(lane.name, label_width), lane.kind, _cells(lane, lanes.end, count), f"{busy:6.0%}".replace("%", " %"))
        )
    for at, name in lanes.marks:
        place = min(count - 1, int(count * at / lanes.end)) if lanes.end else 0
        rows.append(Row("", "mark", " " * place + "│", f" {name}"))
    return [Row(one.label.ljust(label_width), *one[1:]) for one in rows]


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _ruler(end: float, count: int) -> str:
    factor, unit = time_unit(end)
    places = max(2, count // 16)
    text = ""
    for number in range(places):
        column = count * number // (places - 1)
        label = f"{end * factor * number / (places - 1):.3g} {unit}"
        start = min(column, count - len(label))
        text = text.ljust(start) + label if start >= len(text) + (number > 0) else text
    return text.ljust(count)


def _cells(lane: Lane, end: float, count: int) -> str:
    covered = [[0.0, 0.0] for _ in range(count)]  # by activities of either shade
    for number, bar in enumerate(lane.bars):
        first = bar.began * count / end if end else 0.0
        last = (end if bar.secs is None else bar.began + bar.secs) * count / end if end else 0.0
        for cell in range(int(first), min(count - 1, int(last)) + 1):
            covered[cell][number % 2] += max(0.0, min(last, cell + 1) - max(first, cell))
    return "".join(_cell(even, odd) for even, odd in covered)


def _cell(even: float, odd: float) -> str:
    if even + odd >= 0.5:
        return _FULL[odd > even]
    return _PART if even + odd > 0 else " "


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
    for line in _lines(lanes, rows):
        print(line if _can_print(line) else line.translate(_ASCII))
    return 0


def _lines(lanes: Lanes, rows: list[Row]) -> Iterator[str]:
    yield lanes.heading()
    for row in rows:
        yield f"{row.label}  {row.cells}{row.rest}".rstrip()


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
