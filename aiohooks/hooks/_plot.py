"""Plots of runs, by matplotlib: the one module that imports it."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# Its keywords have no types.
from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Mapping, Sequence

from aiohooks.errors import InvalidArgumentError, missing_extra
from aiohooks.hooks._observing import write_whole
from aiohooks.hooks.records import read_series

try:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no window, and no state shared with the user's own plots
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise missing_extra("the plot of a run", "matplotlib") from error

_LINE, _SMOOTH, _BAD = "#9db8d9", "#1f4e8c", "#c0392b"
_PANEL_INCHES = 2.2
_MAX_PANELS = 24
_drawing = threading.Lock()  # matplotlib's fonts are shared, and not thread-safe


def draw(series: Mapping[str, tuple[Sequence[int], Sequence[float]]], path: str, title: str | None = None) -> None:
    """Draw one panel per tag, over the steps, into a PNG file, which appears when it is complete.

    A noisy series gets a smooth line. Values that are not finite are gaps, marked at the bottom of the panel.

    Raises:
        InvalidArgumentError: there is nothing to draw.
        OSError: the file cannot be written.
    """
    drawn = {tag: points for tag, points in series.items() if points[0]}
    if not drawn:
        raise InvalidArgumentError("there are no numbers to draw")
    left_out = len(drawn) - _MAX_PANELS
    drawn = dict(list(drawn.items())[:_MAX_PANELS])
    with _drawing:
        figure = Figure(figsize=(9, 0.9 + _PANEL_INCHES * len(drawn)), dpi=110, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        panels: list[Axes] = list(figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0])
        for panel, (tag, (steps, values)) in zip(panels, drawn.items(), strict=True):
            _fill_panel(panel, tag, steps, values)
        panels[-1].set_xlabel("step" if left_out <= 0 else f"step ({left_out} more values are not drawn)")
        panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        if title is not None:
            figure.suptitle(title.replace("$", r"\$"), fontsize=11)
        write_whole(path, canvas.print_png)


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
    panel.set_title(tag.replace("$", r"\$"), loc="left", fontsize=10, fontweight="bold")
    panel.set_title(summary, loc="right", fontsize=8, color="#555555")
    panel.grid(visible=True, color="#e6e6e6", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.margins(x=0.01)


def _smoothed(values: Sequence[float]) -> list[float] | None:
    """Return a centred moving average; None for a series that is too short for one."""
    half = len(values) // 50
    if half < 2:
        return None
    sums, counts = [0.0], [0]
    for value in values:
        sums.append(sums[-1] + (0.0 if math.isnan(value) else value))
        counts.append(counts[-1] + (not math.isnan(value)))
    smooth: list[float] = []
    for here, value in enumerate(values):
        low, high = max(0, here - half), min(len(values), here + half + 1)
        count = counts[high] - counts[low]
        smooth.append(math.nan if math.isnan(value) or not count else (sums[high] - sums[low]) / count)
    return smooth


def plot(run: str, output: str | None = None) -> int:
    """Draw a file of `CSVHook` or `JSONLinesHook`: the command `python -m aiohooks plot RUN`.

    Args:
        run: the file.
        output: the file of the picture; by default beside the run's, with the suffix `.png`.

    Returns:
        The exit status of the command: 0, or 1 with the reason on stderr.
    """
    target = output or f"{os.path.splitext(run)[0]}.png"
    try:
        if os.path.abspath(target) == os.path.abspath(run):
            raise InvalidArgumentError(f"the picture would replace the run, {run}; give another file for it")
        draw(read_series(run), target, os.path.basename(run))
    except (InvalidArgumentError, OSError) as error:
        print(f"plot {run}: {error}", file=sys.stderr)
        return 1
    print(target)
    return 0
