"""The drawings of docs/images that are made of figures and lists on the pages: `python -m
docs.site.pictures` writes them.

They are SVG with the colors of the system's mode. On the site they are part of the page, and take
its colors.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import NamedTuple

from tests.support.source import ROOT

DOCS = ROOT / "docs"
WIDTH, ROW = 400, 42
STYLE = (
    "<style>.chart{--ink:var(--color-foreground-primary,#1f2328)"
    ";--dim:var(--color-foreground-muted,#59636e);--bar:#9aa7b5;--ours:#2563eb}"
    "@media(prefers-color-scheme:dark)"
    "{.chart{--ink:var(--color-foreground-primary,#e6edf3)"
    ";--dim:var(--color-foreground-muted,#9198a1);--bar:#5c6773;--ours:#60a5fa}}.chart"
    " text{fill:var(--ink);font:13px system-ui,sans-serif}.chart .dim{fill:var(--dim)}.chart"
    " .title{font-weight:600}.chart rect{fill:var(--bar)}.chart .ours{fill:var(--ours)}.chart"
    " .box{fill:none;stroke:var(--dim)}</style>"
)


class Bar(NamedTuple):
    """One bar of a chart."""

    label: str
    value: float
    text: str
    is_ours: bool = False


def chart(title: str, bars: Sequence[Bar]) -> str:
    """Return horizontal bars, each with its value."""
    most = max(bar.value for bar in bars)
    room = WIDTH - 80
    lines = [_text(0, 16, title, "title")]
    for number, bar in enumerate(bars):
        y, width, kind = (
            28 + number * ROW,
            max(2.0, bar.value / most * room),
            "ours" if bar.is_ours else "theirs",
        )
        lines += [
            _text(0, y + 13, bar.label, "name"),
            f'<rect class="{kind}" x="0" y="{y + 18}" width="{width:.0f}" height="14" rx="2"/>',
            _text(round(width) + 6, y + 30, bar.text, "dim"),
        ]
    return drawing(title, 28 + len(bars) * ROW, lines)


def drawing(title: str, height: int, lines: Sequence[str]) -> str:
    """Return a picture with a title for those who do not see it."""
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    head = f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return "\n".join([head, f"<title>{html.escape(title)}</title>", STYLE, *lines, "</svg>", ""])


def dispatchers(column: int, title: str) -> str:
    """Return a column of the table of dispatchers as a chart, the smallest value first."""
    text = (
        (ROOT / "tests" / "benchmarks" / "FIGURES.md")
        .read_text(encoding="utf-8")
        .partition("<!-- figures: dispatchers -->")[2]
    )
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in re.findall(r"^\| .*(?: us) \|$", text, re.MULTILINE)
    ]
    bars: list[Bar] = []
    for cells in rows:
        name = cells[0].replace("the same", bars[-1].label.split()[0] if bars else "")
        bars.append(Bar(name, float(cells[column].split()[0]), cells[column], "aiohooks" in name))
    return chart(title, sorted(bars, key=lambda bar: bar.value))


def wakes() -> str:
    """Return how long a wake-up in another process takes, by the table of engines, beside a
    poll.
    """
    text = (DOCS / "guides" / "engines.md").read_text(encoding="utf-8")
    found = re.findall(
        r"^\| (?:\[`(\w+)`\]\S*|`(\w+)`) \|(?:[^|]*\|){3} ([\d.]+) ms \|", text, re.MULTILINE
    )
    bars = [
        Bar(first or second, float(value), f"{value} ms", True) for first, second, value in found
    ]
    return chart(
        "From advance() to a waiter in another process, in milliseconds",
        [*bars, Bar("a poll every 0.5 s, in the median", 250.0, "250 ms")],
    )


LAYERS = (
    ("adapters, testing, _command_line", "ASGI, OpenTelemetry, TensorFlow; for tests; aiohooks"),
    ("training, distributed", "monitored_training_session; launchers"),
    ("hooks", "the built-in hooks: users of the hook contract"),
    ("session", "the monitored session: run, recovery, shutdown"),
    ("graph", "one run, all or nothing; variables"),
    ("checkpoint, version_gate", "what is saved, and how; bounded staleness"),
    ("dispatch, stores", "several hooks called as one; the global step"),
    ("_why", "why something waits: what waits for what"),
    ("_core", "calls that end together; clock, shield, checks of arguments"),
    ("errors", "the error tree, and what a clean end is"),
)
"""The packages, each of which imports from those in the rows below only."""


def architecture() -> str:
    """Return the packages as layers."""
    lines: list[str] = []
    for number, (names, text) in enumerate(LAYERS):
        y = number * 46
        lines += [
            _box(1, y + 1, WIDTH - 2, 38),
            _text(12, y + 17, names, "title"),
            _text(12, y + 33, text, "dim"),
        ]
    return drawing(
        "The packages of aiohooks: each imports from those below it only", len(LAYERS) * 46, lines
    )


WAKE_UP = (
    ("Process B waits", "StepStore.wait_for(100)", "called by GlobalStepWaiterHook"),
    ("", "WaitRegistry.wait", "a future, parked under 100"),
    ("", "subscribe", "its slot in the run's file := 101"),
    ("Process A advances", "SharedStepStore.advance", "a thread waits for the lock"),
    ("", "RunDatabase.advance", "UPDATE run SET step = 100"),
    ("", "is a slot due?", "yes: write the notifying file"),
    ("Process B, by inotify", "_on_inotify", "the event loop reads the step"),
    ("", "WaitRegistry.observe", "future.set_result(100)"),
)


def wake_up() -> str:
    """Return what a step of one process does for a waiter in another, from top to bottom."""
    lines: list[str] = []
    y = x = 0
    for process, name, text in WAKE_UP:
        if process:
            x = 100 if "A" in process else 1
            lines.append(_text(x, y + 18, process, "title"))
            y += 26
        lines += [
            _box(x, y + 1, 270, 38),
            _text(x + 11, y + 17, name, "name"),
            _text(x + 11, y + 33, text, "dim"),
        ]
        y += 46
    return drawing("A step of one process ends the wait of another", y, lines)


def _box(x: int, y: int, width: int, height: int) -> str:
    return f'<rect class="box" x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>'


def _text(x: int, y: int, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{html.escape(text)}</text>'


def pictures() -> dict[str, str]:
    """Return all of them by the names of their files."""
    return {
        "architecture.svg": architecture(),
        "dispatch-concurrent.svg": dispatchers(
            1, "Two hooks that wait 50 ms each, in milliseconds"
        ),
        "dispatch-cost.svg": dispatchers(
            6, "A call of eight hooks that do not wait, in microseconds"
        ),
        "wake-up.svg": wake_up(),
        "wakes.svg": wakes(),
    }


if __name__ == "__main__":
    for name, svg in pictures().items():
        (DOCS / "images" / name).write_text(svg, encoding="utf-8")
