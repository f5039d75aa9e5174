"""HistoryHook: values kept in memory, and the plot of a run."""

from __future__ import annotations

import math
import os
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiohooks as ah
from aiohooks.hooks.history import HistoryHook
from aiohooks.hooks.records import CSVHook, JSONLinesHook
from aiohooks.testing import FaultInjectionHook
from tests.support.hooks import RestoringHook
from tests.support.sessions import counting_graph, going_back, train


async def test_numbers_by_step() -> None:
    """The due steps are kept, with one plain number for each under its tag."""
    graph = counting_graph()
    graph.operation(name="arrays")(lambda total: np.array([total], dtype=np.float32))
    hook = HistoryHook({"sum": "total", "arrays": "arrays"}, every=ah.Every(steps=2))
    async with ah.AsyncMonitoredSession(graph, [hook]) as session:
        for _ in range(7):
            await session.run("train")
    assert hook.steps == [2, 4, 6]
    assert hook.values == {"sum": [1, 3, 5], "arrays": [1.0, 3.0, 5.0]}
    assert [type(value) for value in hook.values["arrays"]] == [float] * 3


@pytest.mark.parametrize(
    ("on_full", "most", "runs", "steps"),
    [
        ("drop_oldest", 5, 11, [7, 8, 9, 10, 11]),
        ("thin", 5, 11, [4, 7, 9, 10, 11]),
        ("thin", 10, 200, [1, 184, 189, 192, 194, 196, 197, 198, 199, 200]),
    ],
)
async def test_it_is_bounded(on_full: Any, most: int, runs: int, steps: list[int]) -> None:
    """It keeps at most `max_length` steps: the latest, or a thinned history that spans the run; always the newest."""
    hook = HistoryHook(["total"], max_length=most, on_full=on_full)
    lengths: list[int] = []

    class Looks(ah.SessionRunHook):
        async def after_run(self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
            lengths.append(len(hook.steps))
            assert hook.steps[-1] == run_context.global_step

    await train(hook, Looks(), runs=runs)
    assert max(lengths) == most
    assert hook.steps == steps
    assert hook.values["total"] == [step - 1 for step in hook.steps]


async def test_tags_may_change_between_checkpoints() -> None:
    """A tag that the checkpoint did not have is None in its steps; one that is not kept any more is dropped."""
    hook = HistoryHook(["total"])
    await train(hook, RestoringHook(hook, {"steps": [1, 2], "values": {"loss": [5, 6]}}), runs=1, start=2)
    assert (hook.steps, hook.values) == ([1, 2, 3], {"total": [None, None, 0]})


async def test_a_recovery_that_moves_the_step_back() -> None:
    """Steps that a recovery repeats are there once."""
    hook = HistoryHook(["loss"])
    async with going_back(hook, at=5, to=2) as session:
        for _ in range(6):
            await session.run("train")
    assert hook.steps == [1, 2, 3, 4]


# -- the plot

# matplotlib keeps the files of fonts open, for each thread that draws.
draws = pytest.mark.may_leak


def size_of(picture: Path) -> tuple[int, int]:
    """Return width and height of a PNG."""
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


@draws
async def test_it_draws_a_picture_at_the_end(tmp_path: Path) -> None:
    """There is one panel per tag, so more tags make a higher picture; no other file is left in the directory."""
    await train(HistoryHook(["loss"], plot=tmp_path / "one.png"), runs=3)
    await train(HistoryHook(["loss", "total"], plot=tmp_path / "two.png"), runs=3)
    (width, one), (same, two) = size_of(tmp_path / "one.png"), size_of(tmp_path / "two.png")
    assert width == same
    assert one < two
    assert sorted(os.listdir(tmp_path)) == ["one.png", "two.png"]
    assert "matplotlib.pyplot" not in sys.modules


@draws
async def test_a_failed_run_has_a_picture(tmp_path: Path) -> None:
    """The picture is drawn however the session ended, unless the history is empty."""
    for runs in (2, 0):
        faults = FaultInjectionHook({("before_run", runs + 1): ZeroDivisionError()})
        with pytest.raises(ZeroDivisionError):
            await train(HistoryHook(["loss"], plot=tmp_path / f"{runs}.png"), faults, runs=runs + 1)
    assert os.listdir(tmp_path) == ["2.png"]


@draws
async def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    """The error is the session's, and no partial picture is left."""
    (tmp_path / "run.png").mkdir()
    with pytest.raises(OSError, match=r"run\.png"):
        await train(HistoryHook(["loss"], plot=tmp_path / "run.png"), runs=1)
    assert os.listdir(tmp_path) == ["run.png"]


@draws
@pytest.mark.parametrize("make", [CSVHook, JSONLinesHook])
async def test_the_command_draws_what_the_hooks_wrote(tmp_path: Path, make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """`plot` reads either file and writes the picture beside it, or to the given path."""
    from aiohooks.hooks._plot import plot

    await train(make(tmp_path / "run.log", record_fn=lambda _: {"loss": math.nan, "acc": 0.5, "note": "a text"}), runs=3)
    assert plot(str(tmp_path / "run.log"), None) == 0
    assert plot(str(tmp_path / "run.log"), str(tmp_path / "other.png")) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "run.png"), str(tmp_path / "other.png")]
    assert (tmp_path / "run.png").read_bytes() == (tmp_path / "other.png").read_bytes()
    assert size_of(tmp_path / "run.png")[1] > 500  # two panels: the text has none


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("run.csv", None, "No such file"),
        ("run.csv", "hello\n", "is not a file of CSVHook"),
        ("run.csv", "step,time,loss\n", "no numbers to draw"),
        ("run.png", "", "would replace the run"),
    ],
)
def test_the_command_says_what_is_wrong(
    tmp_path: Path, name: str, content: str | None, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that cannot be drawn gives status 1 and the reason, and no picture."""
    from aiohooks.hooks._plot import plot

    if content is not None:
        (tmp_path / name).write_text(content)
    assert plot(str(tmp_path / name), None) == 1
    assert says in capsys.readouterr().err
    assert (tmp_path / "run.png").exists() is (name == "run.png")
