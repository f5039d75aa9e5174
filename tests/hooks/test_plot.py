"""Pictures of runs: what is in them, when `HistoryHook` draws one, and the command `plot`."""

from __future__ import annotations

import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.hooks._lanes import Bar, Lane, Lanes, write_trace
from aiohooks.hooks._plot import draw, lanes_figure, plot, series_figure
from aiohooks.testing import FaultInjectionHook
from tests.support.sessions import train

# matplotlib keeps the files of fonts open, for each thread that draws.
draws = pytest.mark.may_leak


def titles(panel: Any) -> tuple[str, str]:
    """Return the tag and the summary of a panel."""
    return panel.get_title(loc="left"), panel.get_title(loc="right")


def test_each_series_has_a_panel() -> None:
    """With its points, what it ends at, the least and the greatest; what is not finite is a gap, with a cross below."""
    series = {"loss": ([1, 2, 3], [3.0, math.nan, 1.0]), "none": ([], []), "rate": ([1, 2], [5.0, 7.0])}
    figure: Any = series_figure(series, "a $run$")
    loss, rate = figure.axes
    assert titles(loss) == ("loss", "last 1 · min 1 at 3 · max 3 at 1 · 1 not finite (x)")
    assert titles(rate) == ("rate", "last 7 · min 5 at 1 · max 7 at 2")
    assert [str(value) for value in loss.lines[0].get_ydata()] == ["3.0", "nan", "1.0"]
    assert (list(loss.lines[1].get_xdata()), loss.lines[1].get_marker()) == ([2], "x")
    assert [line.get_marker() for line in rate.lines] == ["o"]
    assert (rate.get_xlabel(), figure.get_suptitle()) == ("step", r"a \$run\$")


def test_a_long_series_is_smoothed() -> None:
    """By a centred moving average over the finite values around each; beyond so many panels the number of the others is said."""
    values = [float(number % 2) for number in range(201)]
    values[100] = math.inf
    figure: Any = series_figure({f"tag {number}": ([*range(201)], values) for number in range(26)}, None)
    assert len(figure.axes) == 24
    assert figure.axes[-1].get_xlabel() == "step (2 more values are not drawn)"
    exact, smooth, crosses = (line.get_ydata() for line in figure.axes[0].lines)
    assert (list(exact[:3]), list(crosses)) == ([0.0, 1.0, 0.0], [0.0])
    assert [math.isnan(value) for value in smooth[98:103]] == [False, False, True, False, False]
    assert smooth[50] == pytest.approx(4 / 9)
    assert smooth[98] == pytest.approx(4 / 8)
    assert smooth[0] == exact[0]
    assert figure.axes[0].lines[0].get_marker() == ""


LANES = Lanes(
    (
        Lane("steps", "step", (Bar("step 1", 0.0, 0.004), Bar("step 2", 0.004, 0.004, error="ValueError('x')"))),
        Lane("t" * 40, "operation", (Bar("train", 0.001, 0.002, 0.0005), Bar("eval", 0.005, None))),
    ),
    "trainer",
    ((0.001, "early"), (0.007, "late")),
)


def test_each_lane_has_a_row() -> None:
    """With its bars: dark where the loop is held, hatched where it failed, named where there is room; marks are lines."""
    figure: Any = lanes_figure(LANES)
    (panel,) = figure.axes
    rows = [[tuple(path.get_extents().bounds) for path in one.get_paths()] for one in panel.collections]
    bars, held, failed = rows[0::3], rows[1::3], rows[2::3]
    assert [[(round(x, 6), round(width, 6)) for x, _, width, _ in one] for one in bars] == [[(0, 4), (4, 4)], [(1, 2), (5, 3)]]
    assert [[(round(x, 6), round(width, 6)) for x, _, width, _ in one] for one in held] == [[], [(1, 0.5)]]
    assert [[(round(x, 6), round(width, 6)) for x, _, width, _ in one] for one in failed] == [[(4, 4)], []]
    assert {(round(y, 6), round(height, 6)) for one in rows[:3] for _, y, _, height in one} == {(-0.36, 0.72)}
    assert {(round(y, 6), round(height, 6)) for one in rows[3:] for _, y, _, height in one} == {(0.64, 0.72)}
    assert [one.get_hatch() for one in panel.collections[:3]] == [None, None, "////"]
    assert [name for name, spine in panel.spines.items() if spine.get_visible()] == ["bottom"]
    assert figure.get_size_inches().tolist() == pytest.approx([8.0, 1.25 + 2 * 0.36])
    assert [one.get_text() for one in panel.texts] == ["step 1", "step 2", "train", "eval…", " early ", " late "]
    assert [one.get_ha() for one in panel.texts[-2:]] == ["left", "right"]
    assert [round(one.get_position()[0], 6) for one in panel.texts[:4]] == [2, 6, 2, 6.5]
    assert [round(line.get_xdata()[0], 6) for line in panel.lines] == [1, 7]
    assert [one.get_text() for one in panel.get_yticklabels()] == ["steps", "t" * 31 + "…"]
    assert panel.get_xlabel() == "ms; dark: the call holds the event loop"
    assert figure.get_suptitle() == "trainer: step 1 to step 2, 8 ms"
    (background,) = panel.patches  # every other step
    assert (round(background.get_x(), 6), round(background.get_width(), 6)) == (0, 4)


def test_many_bars_have_no_labels() -> None:
    """Also those with room for one: they would take long to draw."""
    for count, labels in ((400, 1), (401, 0)):
        bars = [Bar("long", 0.0, 1000.0), *(Bar("s", 1000.0 + number, 1.0) for number in range(count - 1))]
        figure: Any = lanes_figure(Lanes((Lane("x", "step", tuple(bars)),)))
        assert len(figure.axes[0].texts) == labels
        assert (figure.axes[0].collections[0].get_linewidth()[0] > 0) == bool(labels)


@draws
async def test_a_history_is_drawn_however_the_session_ended(tmp_path: Path) -> None:
    """Unless it is empty; no other file is left in the directory, and nothing of the user's own plots is touched."""
    await train(ah.HistoryHook(["loss", "total"], plot=tmp_path / "whole.png"), runs=3)
    for runs in (2, 0):
        faults = FaultInjectionHook({("before_run", runs + 1): ZeroDivisionError()})
        with pytest.raises(ZeroDivisionError):
            await train(ah.HistoryHook(["loss"], plot=tmp_path / f"{runs}.png"), faults, runs=runs + 1)
    assert sorted(os.listdir(tmp_path)) == ["2.png", "whole.png"]
    assert (tmp_path / "whole.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "matplotlib.pyplot" not in sys.modules


@draws
async def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    """The error is the session's, and no partial picture is left."""
    (tmp_path / "run.png").mkdir()
    with pytest.raises(OSError, match=r"run\.png"):
        await train(ah.HistoryHook(["loss"], plot=tmp_path / "run.png"), runs=1)
    assert os.listdir(tmp_path) == ["run.png"]


@draws
@pytest.mark.parametrize("make", [ah.CSVHook, ah.JSONLinesHook])
async def test_the_command_draws_what_the_hooks_wrote(tmp_path: Path, make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """`plot` reads either file, without its texts, and writes the picture beside it, or to the given path."""
    await train(make(tmp_path / "run.log", record_fn=lambda _: {"loss": math.nan, "acc": 0.5, "note": "a text"}), runs=3)
    assert plot(str(tmp_path / "run.log"), None) == 0
    assert plot(str(tmp_path / "run.log"), str(tmp_path / "other.png")) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "run.png"), str(tmp_path / "other.png")]
    expected = tmp_path / "expected.png"
    draw({"loss": ([1, 2, 3], [math.nan] * 3), "acc": ([1, 2, 3], [0.5] * 3)}, str(expected), "run.log")
    assert (tmp_path / "run.png").read_bytes() == (tmp_path / "other.png").read_bytes() == expected.read_bytes()


@draws
def test_the_command_draws_traces(tmp_path: Path) -> None:
    """All of it, or the last steps."""
    path = str(tmp_path / "trace.json")
    write_trace(path, LANES)
    assert plot(path) == 0
    assert plot(path, str(tmp_path / "one.png"), steps=1) == 0
    pictures = [(tmp_path / name).read_bytes() for name in ("trace.png", "one.png")]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert pictures[0] != pictures[1]
    lines = tmp_path / "lines.json"  # of JSONLinesHook
    lines.write_text('{"step": 1, "time": 1.0, "loss": 2}\n')
    assert plot(str(lines)) == 0


@pytest.mark.parametrize(
    ("name", "content", "steps", "says"),
    [
        ("run.csv", None, None, "No such file"),
        ("run.csv", "hello\n", None, "is not a file of CSVHook"),
        ("run.csv", "step,time,loss\n", None, "no numbers to draw"),
        ("run.csv", "step,time,loss\n1,1.0,0.5\n", 2, "--steps is for a trace"),
        ("run.png", "", None, "would replace the run"),
    ],
)
def test_the_command_says_what_is_wrong(
    tmp_path: Path, name: str, content: str | None, steps: int | None, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that cannot be drawn gives status 1 and the reason, and no picture."""
    if content is not None:
        (tmp_path / name).write_text(content)
    assert plot(str(tmp_path / name), None, steps) == 1
    assert says in capsys.readouterr().err
    assert (tmp_path / "run.png").exists() is (name == "run.png")


def test_an_svg_has_the_colors_of_its_reader(tmp_path: Path) -> None:
    """Its lines and texts have the color of the page, light or dark; drawn again, it is the same file; its rules are its own."""
    series = {"loss": ([1, 2, 3], [3.0, 2.0, math.inf])}
    for name in ("one.svg", "other.svg"):
        draw(series, str(tmp_path / name), "run")
    one, other = ((tmp_path / name).read_text(encoding="utf-8") for name in ("one.svg", "other.svg"))
    assert one == other
    assert "currentColor" in one
    assert 'class="plot"' in one
    assert not {"#000000", "#ffffff", "#555555"} & {*re.findall(r"#[0-9a-f]{6}", one)}
    for style in re.findall(r"<style[^>]*>(.*?)</style>", one, re.DOTALL):
        assert all(rule.strip().startswith((".plot", "@media")) for rule in re.findall(r"[^{}]+(?={)", style)), style


def test_a_smooth_line_does_not_bend_at_its_ends() -> None:
    """That of a straight line is the line itself, from the first step to the last."""
    values = [float(number) for number in range(300)]
    figure: Any = series_figure({"loss": (range(300), values)}, None)
    assert [[*line.get_ydata()] for line in figure.axes[0].lines] == [values, values]
