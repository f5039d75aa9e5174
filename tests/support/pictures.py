"""The drawings of docs/images that are made of figures and lists on the pages: `python -m tests.support.pictures` writes them.

They are SVG with the colors of the system's mode. On the site they are part of the page, and take its colors.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import NamedTuple

from tests.support.source import ROOT

DOCS = ROOT / "docs"
WIDTH, LABELS, ROW = 720, 250, 26
STYLE = (
    "<style>.chart{--ink:var(--color-foreground-primary,#1f2328);--dim:var(--color-foreground-muted,#59636e);"
    "--bar:#9aa7b5;--ours:#2563eb}"
    "@media(prefers-color-scheme:dark){.chart{--ink:var(--color-foreground-primary,#e6edf3);"
    "--dim:var(--color-foreground-muted,#9198a1);--bar:#5c6773;--ours:#60a5fa}}"
    ".chart text{fill:var(--ink);font:13px system-ui,sans-serif}.chart .dim{fill:var(--dim)}.chart .title{font-weight:600}"
    ".chart rect{fill:var(--bar)}.chart .ours{fill:var(--ours)}.chart .box{fill:none;stroke:var(--dim)}</style>"
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
    room = WIDTH - LABELS - 90
    lines = [f'<text class="title" x="0" y="16">{html.escape(title)}</text>']
    for number, bar in enumerate(bars, 1):
        y, width, kind = number * ROW, max(2.0, bar.value / most * room), "ours" if bar.is_ours else "theirs"
        lines += [
            f'<text x="{LABELS - 8}" y="{y + 17}" text-anchor="end">{html.escape(bar.label)}</text>',
            f'<rect class="{kind}" x="{LABELS}" y="{y + 4}" width="{width:.0f}" height="18" rx="2"/>',
            f'<text class="dim" x="{LABELS + width + 6:.0f}" y="{y + 17}">{html.escape(bar.text)}</text>',
        ]
    return drawing(title, WIDTH, (len(bars) + 1) * ROW, lines)


def drawing(title: str, width: int, height: int, lines: Sequence[str]) -> str:
    """Return a picture with a title for those who do not see it."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return "\n".join([head, f"<title>{html.escape(title)}</title>", STYLE, *lines, "</svg>", ""])


def dispatchers(column: int, title: str) -> str:
    """Return a column of the table of dispatchers as a chart, the smallest value first."""
    text = (DOCS / "reference" / "benchmarks.md").read_text(encoding="utf-8").partition("<!-- figures: dispatchers -->")[2]
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")] for line in re.findall(r"^\| .*(?: us) \|$", text, re.MULTILINE)
    ]
    bars: list[Bar] = []
    for cells in rows:
        name = cells[0].replace("the same", bars[-1].label.split()[0] if bars else "")
        bars.append(Bar(name, float(cells[column].split()[0]), cells[column], "aiohooks" in name))
    return chart(title, sorted(bars, key=lambda bar: bar.value))


def wakes() -> str:
    """Return how long a wake-up in another process takes, by the table of engines, beside a poll."""
    text = (DOCS / "guides" / "engines.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| (?:\[`(\w+)`\]\S*|`(\w+)`) \|(?:[^|]*\|){3} ([\d.]+) ms \|", text, re.MULTILINE)
    bars = [Bar(first or second, float(value), f"{value} ms", True) for first, second, value in found]
    return chart(
        "From advance() to a waiter in another process, in milliseconds",
        [*bars, Bar("a poll every 0.5 s, in the median", 250.0, "250 ms")],
    )


LAYERS = (
    ("_command_line, adapters, testing", "the command aiohooks; ASGI, OpenTelemetry, Prometheus, trainers; helpers for tests"),
    ("distributed, training", "launchers; monitored_training_session"),
    ("hooks", "the built-in hooks: users of the public hook contract"),
    ("session", "the monitored session: run, recovery, stop, shutdown"),
    ("graph, checkpoint, version_gate", "one run, all or nothing; what is saved; bounded staleness"),
    ("dispatch, stores", "several hooks called as one; the global step, over processes: local, Redis, NATS, Ray"),
    ("_aio", "what asyncio lacks: clock, tasks and contexts of calls, shield, backoff"),
    ("errors, _validate, _diagnostics", "the error tree; checks of arguments; where tasks wait"),
)
"""The packages, each of which imports from those below it only."""


def architecture() -> str:
    """Return the packages as layers."""
    lines: list[str] = []
    for number, (names, text) in enumerate(LAYERS):
        y = number * 46
        lines += [
            f'<rect class="box" x="1" y="{y + 1}" width="{WIDTH - 2}" height="38" rx="4"/>',
            f'<text class="title" x="12" y="{y + 17}">{html.escape(names)}</text>',
            f'<text class="dim" x="12" y="{y + 33}">{html.escape(text)}</text>',
        ]
    return drawing("The packages of aiohooks: each imports from those below it only", WIDTH, len(LAYERS) * 46, lines)


def pictures() -> dict[str, str]:
    """Return all of them by the names of their files."""
    return {
        "architecture.svg": architecture(),
        "dispatch-concurrent.svg": dispatchers(1, "Two hooks that wait 50 ms each, in milliseconds"),
        "dispatch-cost.svg": dispatchers(6, "A call of eight hooks that do not wait, in microseconds"),
        "wakes.svg": wakes(),
    }


if __name__ == "__main__":
    for name, svg in pictures().items():
        (DOCS / "images" / name).write_text(svg, encoding="utf-8")
