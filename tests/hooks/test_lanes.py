"""Lanes: reading a trace back, and drawing it as text."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from aiohooks.errors import InvalidArgumentError
from aiohooks.hooks._lanes import Bar, Lane, Lanes, is_trace, plot_in_terminal, read_trace, text_rows, write_trace
from tests.support.extras import hide

LANES = Lanes(
    (
        Lane("steps", "step", (Bar("step 1", 0.0, 0.004), Bar("step 2", 0.004, 0.004, error="ValueError('x')"))),
        Lane("train", "operation", (Bar("train", 0.001, 0.002, 0.0005), Bar("train", 0.005, None))),
        Lane("Upload", "hook", (Bar("before_run", 0.0, 0.001),)),
        Lane("Quick", "hook", (Bar("before_run", 0.0, 0.000001), Bar("after_run", 0.002, 0.0))),
    ),
    "trainer",
    ((0.004, "recovery from AbortedError"),),
    dropped=3,
    unix_time=5.0,
)


def test_a_trace_is_read_back(tmp_path: Path) -> None:
    """What was written is read: lanes in order, times, errors, marks, what had not ended, and what was dropped."""
    path = str(tmp_path / "new" / "trace.json")
    write_trace(path, LANES)
    assert is_trace(path)
    found = read_trace(path)
    assert [(lane.name, lane.kind) for lane in found.lanes] == [(lane.name, lane.kind) for lane in LANES.lanes]
    for lane, expected in zip(found.lanes, LANES.lanes, strict=True):
        for bar, wanted in zip(lane.bars, expected.bars, strict=True):
            assert (bar.name, bar.error) == (wanted.name, wanted.error)
            assert (bar.began, bar.secs, bar.held_secs) == pytest.approx((wanted.began, wanted.secs, wanted.held_secs))
    assert (found.title, found.dropped, found.unix_time) == ("trainer", 3, 5.0)
    assert found.marks == ((pytest.approx(0.004), "recovery from AbortedError"),)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "this is no trace, as it is not JSON"),
        ('{"traceEvents": [', "this is no trace, as it is not JSON"),
        ('{"step": 1}', "this is no trace: there is no JSON object with 'traceEvents'"),
        ("5", "this is no trace: there is no JSON object with 'traceEvents'"),
        ('{"traceEvents": 5}', "the events are int, not a list"),
        ('{"traceEvents": []}', "there is nothing to draw"),
        ('{"traceEvents": [{"ph": "C"}]}', "there is nothing to draw"),
        ('{"traceEvents": [5]}', "event 0 of 'traceEvents': it is not an object"),
        ('{"traceEvents": [{"name": "a"}]}', "event 0 of 'traceEvents': it has no 'ph'"),
        ('{"traceEvents": [{"ph": "X", "name": "a", "tid": 1, "ts": 1, "dur": 1}]}', "event 0 of 'traceEvents': thread 1 has "),
        ('{"traceEvents": [{"ph": "X", "name": "a", "tid": 1, "ts": "1"}]}', "event 0 of 'traceEvents': '1' is not a number"),
        ('{"traceEvents": [{"ph": "X", "name": "a", "tid": 1, "ts": NaN}]}', "'nan' is not a number"),
        ('{"traceEvents": [{"ph": "X", "name": "a", "tid": 1, "ts": 1, "dur": -1}]}', "it takes -1e-06 s"),
        ('{"traceEvents": [{"ph": "B", "name": "a", "tid": [], "ts": 1}]}', "unhashable"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, content: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused with the reason, and the commands say it with the file, and status 1."""
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(InvalidArgumentError, match=re.escape(says)):
        read_trace(str(path))
    assert plot_in_terminal(str(path)) == 1
    assert capsys.readouterr().err.startswith(f"plot {path}: ")


def test_as_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each lane, over the time, with how busy it is; idle lanes are named; the shade changes with each bar."""
    path = str(tmp_path / "trace.json")
    write_trace(path, LANES)
    monkeypatch.setenv("COLUMNS", "47")
    assert plot_in_terminal(path) == 0
    assert capsys.readouterr().out.splitlines() == [
        "trainer: step 1 to step 2, 8 ms; not shown, as hardly active: Quick; 3 older activities were dropped",
        "        0 ms                        8 ms",
        f"steps   {'█' * 16}{'▓' * 16}  100 %",
        f"train       {'█' * 8}        {'▓' * 12}   62 %",
        f"Upload  ████{' ' * 28}   12 %",
        f"        {' ' * 16}│ recovery from AbortedError",
    ]
    assert plot_in_terminal(path, 1) == 0
    assert capsys.readouterr().out.splitlines()[2:4] == [f"steps  {'█' * 33}  100 %", f"train  {' ' * 8}{'█' * 25}   75 %"]


class Terminal(io.TextIOWrapper):
    """A terminal with an encoding."""

    def __init__(self, encoding: str) -> None:
        self.shown = io.BytesIO()
        super().__init__(self.shown, encoding=encoding, write_through=True)

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("has_rich", "encoding", "cells"), [(True, "utf-8", "▓▓▓▓"), (False, "utf-8", "▓▓▓▓"), (False, "ascii", "####====")]
)
def test_on_a_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_rich: bool, encoding: str, cells: str) -> None:
    """With rich the lanes have colours; without it the same is printed plainly, with what the terminal's encoding has."""
    path = str(tmp_path / "trace.json")
    write_trace(path, LANES)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not has_rich:
        hide(monkeypatch, "rich", "aiohooks.hooks._rich")
    monkeypatch.setattr(sys, "stdout", out := Terminal(encoding))
    assert plot_in_terminal(path) == 0
    shown = out.shown.getvalue().decode(encoding)
    assert ("\x1b[" in shown) == has_rich
    assert cells in shown


def test_long_names_are_shortened() -> None:
    """Every row has the same width, whatever the names are."""
    lanes = Lanes((Lane("x" * 100, "hook", (Bar("a", 0.0, 1.0),)), Lane("y", "hook", (Bar("a", 0.0, 0.2),))))
    rows = text_rows(lanes, 80)
    assert [len(f"{row.label}  {row.cells}{row.rest}") for row in rows[1:]] == [80, 80]
    assert rows[1].label.endswith("…")


def test_the_cells() -> None:
    """A cell is full from a half on; the ruler has a label at every sixteenth cell or so."""
    lanes = Lanes((Lane("l", "hook", (Bar("a", 0.0, 0.5), Bar("b", 1.0, 0.49), Bar("c", 2.0, 46.0))),))
    rows = text_rows(lanes, 48 + len("l" + "  " + "  100 %"))
    assert rows[0].cells == f"{'0 s':24}{'24 s':20}48 s"
    assert rows[1].cells[:4] == "█░██"


def test_without_a_duration() -> None:
    """What took no time at all can be drawn."""
    lanes = Lanes((Lane("steps", "step", (Bar("step 1", 0.0, 0.0),)),))
    assert text_rows(lanes, 40)[1].label == "steps"
    assert lanes.last_steps(1) == lanes
    assert (LANES.dropped, LANES.last_steps(1).dropped) == (3, 0)


def test_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is no trace is said, with status 1."""
    run = tmp_path / "run.csv"
    run.write_text("step,time,loss\n1,1.0,0.5\n")
    assert plot_in_terminal(str(run)) == 1
    assert "--terminal draws the lanes of a trace" in capsys.readouterr().err
    assert plot_in_terminal(str(tmp_path / "none.json")) == 1
    assert "No such file" in capsys.readouterr().err
