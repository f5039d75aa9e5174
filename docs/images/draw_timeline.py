"""Draw a trace of ProfilerHook as Perfetto shows it.

Usage: python docs/images/draw_timeline.py timeline/timeline-7.json docs/images/timeline.svg
"""

import json
import sys
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any

WIDTH = 1000
NAMES_WIDTH = 200
RULER_HEIGHT = 24
TRACK_HEIGHT = 26
SLICE_HEIGHT = 20
CHARACTER_WIDTH = 6.6
TICKS = 6
LEAST_SHARE = 0.01
"""Tracks that are busy for a smaller share of the time are left out."""
STYLE = "font: 11px Roboto, 'Helvetica Neue', Arial, sans-serif"
SLICE_COLORS = (
    "#5b8bd6",
    "#c0504d",
    "#6a9e4f",
    "#8a63b8",
    "#d08a2f",
    "#3f9aa5",
    "#a85b8f",
    "#7d7d45",
)


def text(x: float, y: float, content: str, color: str, anchor: str = "start") -> str:
    """Return a text element."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{color}">{escape(content)}</text>'


def rectangle(x: float, y: float, width: float, height: float, color: str) -> str:
    """Return a filled rectangle."""
    size = f'width="{width:.1f}" height="{height:.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{color}"/>'


def ruler(duration: float, height: float) -> list[str]:
    """Return the header with times in milliseconds, and a vertical line at each."""
    elements = [rectangle(0, 0, WIDTH, RULER_HEIGHT, "#262f3c")]
    for tick in range(TICKS):
        x = NAMES_WIDTH + (WIDTH - NAMES_WIDTH) * tick / TICKS
        elements.append(text(x + 4, 16, f"{duration / 1000 * tick / TICKS:.0f} ms", "#cdd5df"))
        elements.append(rectangle(x, RULER_HEIGHT, 1, height - RULER_HEIGHT, "#dfe3e8"))
    return elements


def shown_tracks(events: list[dict[str, Any]]) -> dict[int, str]:
    """Return the names of the tracks that are busy for some of the time, by number."""
    slices = [event for event in events if event["ph"] == "X"]
    busy = Counter[int]()
    for event in slices:
        busy[event["tid"]] += event["dur"]
    least = LEAST_SHARE * duration_of(slices)
    return {
        event["tid"]: event["args"]["name"]
        for event in events
        if event["name"] == "thread_name" and busy[event["tid"]] > least
    }


def duration_of(slices: list[dict[str, Any]]) -> float:
    """Return the end of the last slice, in microseconds."""
    end: float = max(event["ts"] + event["dur"] for event in slices)
    return end


def draw(events: list[dict[str, Any]]) -> str:
    """Return the picture: a row for each track, and a slice for each activity."""
    tracks = shown_tracks(events)
    slices = [event for event in events if event["ph"] == "X" and event["tid"] in tracks]
    duration = duration_of(slices)
    height = RULER_HEIGHT + TRACK_HEIGHT * len(tracks)
    elements = [rectangle(0, 0, WIDTH, height, "#ffffff")]
    tops = {}
    for position, (number, name) in enumerate(tracks.items()):
        tops[number] = RULER_HEIGHT + TRACK_HEIGHT * position
        elements.append(rectangle(0, tops[number], NAMES_WIDTH, TRACK_HEIGHT - 1, "#f3f5f8"))
        elements.append(text(10, tops[number] + 17, name, "#3c4650"))
    elements += ruler(duration, height)
    colors: dict[str, str] = {}
    for event in slices:
        # As in Perfetto, slices of one name have one color.
        color = colors.setdefault(event["name"], SLICE_COLORS[len(colors) % len(SLICE_COLORS)])
        elements += activity(event, tops[event["tid"]], (WIDTH - NAMES_WIDTH) / duration, color)
    body = "\n".join(elements)
    size = f'viewBox="0 0 {WIDTH} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{STYLE}">\n{body}\n</svg>\n'


def activity(event: dict[str, Any], top: float, scale: float, color: str) -> list[str]:
    """Return the slice of an activity, with its name if there is room."""
    x = NAMES_WIDTH + event["ts"] * scale
    width = max(1.0, event["dur"] * scale - 1)
    elements = [rectangle(x, top + 3, width, SLICE_HEIGHT, color)]
    if len(event["name"]) * CHARACTER_WIDTH < width:
        elements.append(text(x + width / 2, top + 17, event["name"], "#ffffff", "middle"))
    return elements


def main() -> None:
    """Read the trace, and write the picture."""
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    trace, picture = map(Path, sys.argv[1:])
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    picture.write_text(draw(events), encoding="utf-8")


if __name__ == "__main__":
    main()
