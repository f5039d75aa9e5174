"""Plots of runs, by matplotlib: the one module that imports it."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# Its keywords have no types.
from __future__ import annotations

import io
import math
import os
import sys
import threading
from collections.abc import Mapping, Sequence

from aiohooks.errors import InvalidArgumentError, missing_extra
from aiohooks.hooks._lanes import Lane, Lanes, is_trace, read_trace, time_unit
from aiohooks.hooks._observing import write_whole
from aiohooks.hooks._record_files import read_series

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no window, and no state shared with the user's own plots
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise missing_extra("the plot of a run", "matplotlib") from error

_LINE, _SMOOTH, _BAD = "#9db8d9", "#1f4e8c", "#c0392b"
_SVG_STYLE = ".plot{color:#1f2328}@media(prefers-color-scheme:dark){.plot{color:#e6edf3}}.plot text{fill:currentColor}"
_IN_SVG = {
    "<svg ": '<svg class="plot" ', "*{": ".plot *{", "#000000": "currentColor", "#111827": "currentColor", "#ffffff": "none",
    "#555555": "#7d8590", "#e6e6e6": "#80808040", "#dfe3e8": "#80808050", "#eef2f7": "#80808020",
}  # fmt: skip
"""Colors of a white page, and what takes their place where the page may be dark; the rules of the picture are for it alone."""
_PANEL_INCHES = 2.2
_MAX_PANELS = 24
_drawing = threading.Lock()  # matplotlib's fonts are shared, and not thread-safe


def draw(series: Mapping[str, tuple[Sequence[int], Sequence[float]]], path: str, title: str | None = None) -> None:
    """Draw one panel per tag, over the steps, into a PNG or SVG file, which appears when it is complete.

    A noisy series gets a smooth line. Values that are not finite are gaps, marked at the bottom of the panel.

    Raises:
        InvalidArgumentError: there is nothing to draw.
        OSError: the file cannot be written.
    """
    with _drawing:
        _write(series_figure(series, title), path)


def _write(figure: Figure, path: str) -> None:
    """Write a picture: as PNG, or where the suffix says so as SVG, which is drawn in the light or dark colors of its reader."""
    if not path.endswith(".svg"):
        return write_whole(path, FigureCanvasAgg(figure).print_png)
    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "aiohooks"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    for light, both in _IN_SVG.items():
        svg = svg.replace(light, both)
    head, end, drawn = svg.partition("<defs>")
    svg = f"{head}<style>{_SVG_STYLE}</style>{end}{drawn}"

    def write(unfinished: str) -> None:
        with open(unfinished, "w", encoding="utf-8") as file:
            file.write(svg)

    return write_whole(path, write)


def series_figure(series: Mapping[str, tuple[Sequence[int], Sequence[float]]], title: str | None) -> Figure:
    """Return the picture of these series."""
    drawn = {tag: points for tag, points in series.items() if points[0]}
    if not drawn:
        raise InvalidArgumentError("there are no numbers to draw")
    left_out = len(drawn) - _MAX_PANELS
    drawn = dict(list(drawn.items())[:_MAX_PANELS])
    figure = Figure(figsize=(9, 0.9 + _PANEL_INCHES * len(drawn)), dpi=110, layout="constrained")
    panels: list[Axes] = list(figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0])
    for panel, (tag, (steps, values)) in zip(panels, drawn.items(), strict=True):
        _fill_panel(panel, tag, steps, values)
    panels[-1].set_xlabel("step" if left_out <= 0 else f"step ({left_out} more values are not drawn)")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    if title is not None:
        figure.suptitle(_plain(title), fontsize=11)
    return figure


def _fill_panel(panel: Axes, tag: str, steps: Sequence[int], values: Sequence[float]) -> None:
    finite = [value if math.isfinite(value) else math.nan for value in values]
    smooth = _smoothed(finite)
    few = len(steps) <= 40
    color = _SMOOTH if smooth is None else _LINE
    panel.plot(steps, finite, color=color, linewidth=1.4, marker="o" if few else "", markersize=3.5)
    if smooth is not None:
        panel.plot(steps, smooth, color=_SMOOTH, linewidth=1.6)
    bad = [step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]
    if bad:
        transform = panel.get_xaxis_transform()
        panel.plot(bad, [0.0] * len(bad), "x", color=_BAD, markersize=6, transform=transform, clip_on=False, zorder=5)
    good = [(value, step) for step, value in zip(steps, finite, strict=True) if not math.isnan(value)]
    summary = f"last {values[-1]:.4g}"
    if good:
        (low, low_at), (high, high_at) = min(good), max(good)
        summary += f" · min {low:.4g} at {low_at} · max {high:.4g} at {high_at}"
    if bad:
        summary += f" · {len(bad)} not finite (x)"
    panel.set_title(_plain(tag), loc="left", fontsize=10, fontweight="bold")
    panel.set_title(summary, loc="right", fontsize=8, color="#555555")
    panel.grid(visible=True, color="#e6e6e6", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.margins(x=0.01)


def _smoothed(values: Sequence[float]) -> list[float] | None:
    """Return a centred moving average; None for a series that is too short for one. Near an end it is over fewer values."""
    half = len(values) // 50
    if half < 2:
        return None
    sums, counts = [0.0], [0]
    for value in values:
        sums.append(sums[-1] + (0.0 if math.isnan(value) else value))
        counts.append(counts[-1] + (not math.isnan(value)))
    smooth: list[float] = []
    for here, value in enumerate(values):
        reach = min(half, here, len(values) - 1 - here)  # the same to both sides: otherwise a slope would bend at its ends
        low, high = here - reach, here + reach + 1
        count = counts[high] - counts[low]
        smooth.append(math.nan if math.isnan(value) or not count else (sums[high] - sums[low]) / count)
    return smooth


# -- lanes

_COLORS = {
    "step": "#64748b",
    "feed": "#0d9488",
    "prefetch": "#14b8a6",
    "operation": "#2563eb",
    "hook": "#d97706",
    "background": "#b45309",
    "save": "#7c3aed",
    "wait": "#94a3b8",
    "recovery": "#dc2626",
}
_LANE_INCHES = 0.36
_MAX_LABELS = 400
_CHAR_INCHES = 0.066


def draw_lanes(lanes: Lanes, path: str) -> None:
    """Draw a timeline into a PNG or SVG file, which appears when it is complete: a row for each lane, over the time.

    Steps alternate in the background. The part of a call that held the event loop before it first waited is dark.

    Raises:
        OSError: the file cannot be written.
    """
    with _drawing:
        _write(lanes_figure(lanes), path)


def lanes_figure(lanes: Lanes) -> Figure:
    """Return the picture of a timeline."""
    count = len(lanes.lanes)
    factor, unit = time_unit(lanes.end)
    end = lanes.end * factor or 1.0
    width = 12.0 if sum(len(lane.bars) for lane in lanes.lanes) > 60 else 8.0  # a page shows few bars with legible text
    figure = Figure(figsize=(width, 1.25 + _LANE_INCHES * count), dpi=110, layout="constrained")
    panel: Axes = figure.add_subplot()
    panel.set_xlim(0, end)
    panel.set_ylim(count - 0.5, -0.5)
    for bar in lanes.steps[::2]:
        panel.axvspan(bar.began * factor, bar.ends(lanes.end) * factor, color="#eef2f7", linewidth=0, zorder=0)
    for row, lane in enumerate(lanes.lanes):
        _fill_lane(panel, row, lane, lanes.end, factor)
    for at, name in lanes.marks:
        panel.axvline(at * factor, color=_BAD, linewidth=1.2, linestyle=(0, (4, 2)), zorder=4)
        side = "right" if at * factor > 0.7 * end else "left"
        panel.annotate(
            f" {_plain(name)} ", (at * factor, -0.5), ha=side, va="bottom", fontsize=7.5, color=_BAD, annotation_clip=False
        )
    labels = [lane.name if len(lane.name) <= 32 else f"{lane.name[:31]}…" for lane in lanes.lanes]
    panel.set_yticks(range(count), list(map(_plain, labels)), fontsize=9)
    panel.tick_params(axis="y", length=0)
    panel.set_xlabel(f"{unit}; dark: the call holds the event loop", fontsize=8.5, color="#555555")
    panel.grid(visible=True, axis="x", color="#dfe3e8", linewidth=0.7)
    panel.set_axisbelow(True)
    panel.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle(_plain(lanes.heading()), fontsize=10.5, fontweight="bold", x=0.01, ha="left")
    return figure


def _fill_lane(panel: Axes, row: int, lane: Lane, end: float, factor: float) -> None:
    color = _COLORS.get(lane.kind, _SMOOTH)
    bars = [(bar, bar.began * factor, (bar.ends(end) - bar.began) * factor) for bar in lane.bars]
    span = (row - 0.36, 0.72)
    few = len(bars) <= _MAX_LABELS
    panel.broken_barh(
        [(began, length) for _, began, length in bars], span, facecolors=color, alpha=0.55, edgecolors="white",
        linewidth=0.8 if few else 0.0, zorder=2,
    )  # fmt: skip
    held = [(began, min(length, bar.held_secs * factor)) for bar, began, length in bars if bar.held_secs]
    panel.broken_barh(held, span, facecolors=color, linewidth=0, zorder=2.5)
    failed = [(began, length) for bar, began, length in bars if bar.error is not None]
    panel.broken_barh(failed, span, facecolors="none", edgecolors=_BAD, hatch="////", linewidth=1.4, zorder=3)
    inches = (panel.figure.bbox.width / panel.figure.dpi - 2.2) / (end * factor or 1.0)
    for bar, began, length in bars if few else ():
        text = bar.name + ("…" if bar.secs is None else "")
        if text != lane.name and len(text) * _CHAR_INCHES < length * inches:
            middle = began + length / 2
            panel.text(middle, row, _plain(text), ha="center", va="center", fontsize=7.5, color="#111827", zorder=5, clip_on=True)


def _plain(text: str) -> str:
    return text.replace("$", r"\$")


# -- the command


def plot(run: str, output: str | None = None, steps: int | None = None) -> int:
    """Draw a file of `CSVHook`, `JSONLinesHook` or `TimelineHook`: the command `python -m aiohooks plot RUN`.

    Args:
        run: the file.
        output: the file of the picture; by default beside the run's, with the suffix `.png`.
        steps: how many steps of a trace to draw, the last ones; None for all.

    Returns:
        The exit status of the command: 0, or 1 with the reason on stderr.
    """
    target = output or f"{os.path.splitext(run)[0]}.png"
    try:
        if os.path.abspath(target) == os.path.abspath(run):
            raise InvalidArgumentError(f"the picture would replace the run, {run}; give another file for it")
        if is_trace(run):
            draw_lanes(read_trace(run).last_steps(steps).without_idle(), target)
        elif steps is not None:
            raise InvalidArgumentError("--steps is for a trace of TimelineHook, and this is none; leave it out")
        else:
            draw(read_series(run), target, os.path.basename(run))
    except (InvalidArgumentError, OSError) as error:
        print(f"plot {run}: {error}", file=sys.stderr)
        return 1
    print(target)
    return 0
