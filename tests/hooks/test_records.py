"""CSVHook and JSONLinesHook: one line in a file per due step."""

from __future__ import annotations

import csv
import enum
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiohooks as ah
from aiohooks.hooks._record_files import JSONLinesFormat, Record, RecordFile, read_series
from aiohooks.hooks.records import CSVHook, JSONLinesHook
from aiohooks.testing import ManualClock
from tests.support.checks import refused
from tests.support.record_files import Hook, both, file_of, run, steps, without_time
from tests.support.sessions import counting_graph


async def test_csv_lines(tmp_path: Path) -> None:
    """There is a header, then a line per due step: the step, the clock's time, and the values in order."""
    path = tmp_path / "run.csv"
    with ManualClock() as clock:
        hook = CSVHook(path, {"loss": "loss", "sum": "total"}, every=ah.Every(steps=2))
        async with ah.AsyncMonitoredSession(counting_graph(), [hook]) as session:
            for _ in range(5):
                clock.advance(1.5)
                await session.run("train")
    rows = list(csv.reader(path.read_text().splitlines()))
    assert rows[0] == ["step", "time", "loss", "sum"]
    assert [[step, *values] for step, _, *values in rows[1:]] == [["2", "10", "1"], ["4", "10", "3"]]
    assert float(rows[2][1]) - float(rows[1][1]) == pytest.approx(3.0)


async def test_json_lines(tmp_path: Path) -> None:
    """There is an object per line with step and time first; values may be nested, arrays become lists."""
    path = tmp_path / "run.jsonl"
    graph = counting_graph()
    graph.operation(name="detail")(lambda: {"norms": np.array([1.5, 2.5]), "name": "ä", "ok": np.True_, "count": np.int64(3)})
    async with ah.AsyncMonitoredSession(graph, [JSONLinesHook(path, ["detail", "loss"])]) as session:
        await session.run("train")
    (line,) = path.read_text(encoding="utf-8").splitlines()
    found = json.loads(line)
    assert list(found) == ["step", "time", "detail", "loss"]
    assert found["detail"] == {"norms": [1.5, 2.5], "name": "ä", "ok": True, "count": 3}
    assert found["step"] == 1


def refuse_constant(name: str) -> None:
    """Fail on the constants that strict JSON does not have."""
    raise AssertionError(f"{name} is no JSON")


async def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    """JSON stays strict, with texts in their place; CSV has what `float` reads. Both are read back as numbers."""
    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": np.float32("nan")}
    as_json, as_csv = tmp_path / "run.jsonl", tmp_path / "run.csv"
    await run(JSONLinesHook(as_json, record_fn=lambda _: {**values, "e": [math.nan]}), 1)
    found = json.loads(as_json.read_text(), parse_constant=refuse_constant)
    assert [found[tag] for tag in "abcde"] == ["NaN", "Infinity", "-Infinity", "NaN", ["NaN"]]
    await run(CSVHook(as_csv, record_fn=lambda _: values), 1)
    assert as_csv.read_text().splitlines()[1].split(",")[2:] == ["nan", "inf", "-inf", "nan"]
    for path in (as_json, as_csv):
        series = read_series(str(path))
        assert [str(series[tag][1][0]) for tag in "abcd"] == ["nan", "inf", "-inf", "nan"]


async def test_texts_stay_on_one_line(tmp_path: Path) -> None:
    """Line breaks, commas and quotes in a text do not make other lines or columns; None is empty."""

    class Color(enum.StrEnum):
        RED = "red"

    values = {"text": 'a "b",\r\nc', "none": None, "color": Color.RED}
    path = tmp_path / "run.csv"
    await run(CSVHook(path, record_fn=lambda _: values), 2)
    assert without_time(path) == [{"step": str(step), "text": 'a "b",\\r\\nc', "none": "", "color": "red"} for step in (1, 2)]


async def test_csv_columns_are_fixed(tmp_path: Path) -> None:
    """An unknown column is an error that names it and the nearest known one; a missing one is empty."""
    path = tmp_path / "run.csv"
    rows = [{"loss": 1, "rate": 2}, {"loss": 3}, {"loss": 5, "rats": 6}]
    with refused(ah.errors.InvalidArgumentError, "'rats'", "not a column", "did you mean 'rate'", "columns="):
        await run(CSVHook(path, record_fn=lambda _: rows.pop(0)), 3)
    assert without_time(path) == [{"step": "1", "loss": "1", "rate": "2"}, {"step": "2", "loss": "3", "rate": ""}]


async def test_csv_columns_may_be_named(tmp_path: Path) -> None:
    """`columns` gives the order and the names, including those that appear later."""
    path = tmp_path / "run.csv"
    await run(CSVHook(path, ["total", "loss"], columns=["loss", "total", "later"]), 1)
    assert without_time(path) == [{"step": "1", "loss": "10", "total": "0", "later": ""}]


async def test_csv_takes_no_arrays(tmp_path: Path) -> None:
    """A field has one value."""
    with refused(ah.errors.InvalidArgumentError, "'norms'", "JSONLinesHook"):
        await run(CSVHook(tmp_path / "run.csv", record_fn=lambda _: {"norms": np.zeros(2)}), 1)


@both
async def test_a_value_that_cannot_be_written(tmp_path: Path, make: Callable[..., Hook]) -> None:
    """An object that is not a number or text is an error that names its tag."""
    with refused(ah.errors.InvalidArgumentError, "'thing'", "<object object"):
        await run(make(file_of(make, tmp_path), record_fn=lambda _: {"thing": object()}), 1)


# -- failures


@both
async def test_a_missing_directory(tmp_path: Path, make: Callable[..., Hook]) -> None:
    """The file is opened before the first run, and an error of that is the session's."""
    with pytest.raises(FileNotFoundError):
        await run(make(tmp_path / "missing" / "run", ["loss"]), 1)


class Full:
    """A file whose disk is full during one write, which is partial."""

    def __init__(self, file: Any, room: int) -> None:
        self._file = file
        self._room: int | None = room

    def write(self, data: memoryview) -> int:
        if self._room is None:
            written: int = self._file.write(data)
            return written
        if self._room == 0:
            self._room = None
            raise OSError(28, "No space left on device")
        part, self._room = data[: self._room], 0
        return self._file.write(part) or 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Any:
        return self._file.__enter__()

    def __exit__(self, *args: object) -> None:
        self._file.__exit__(*args)


def test_a_failed_write_leaves_no_part_of_a_line(tmp_path: Path) -> None:
    """A partial line on a full disk is removed, so that the next one is a line of its own."""
    path = tmp_path / "run.jsonl"
    file = RecordFile(str(path), JSONLinesFormat(), fsync=True)
    file.open_at(0)
    file.write([Record(1, 1.0, {})])
    real = file._file
    file._file = Full(real, 5)  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space left"):
        file.write([Record(2, 2.0, {})])
    file.write([Record(3, 3.0, {})])
    file._file = real
    file.close()
    assert steps(path) == [1, 3]


async def test_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `fsync` the file is synced after each write; without it at the end."""
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (synced.append(number), real(number))[1])
    await run(JSONLinesHook(tmp_path / "a.jsonl", ["loss"], fsync=True, max_queue=1), 3)
    assert len(synced) == 4
    synced.clear()
    await run(JSONLinesHook(tmp_path / "b.jsonl", ["loss"]), 3)
    assert len(synced) == 1


@both
async def test_a_step_in_the_record_is_refused(tmp_path: Path, make: Callable[..., Hook]) -> None:
    """The result of `record_fn` must be a mapping without the step."""
    with refused(ah.errors.InvalidArgumentError, "'step'"):
        await run(make(file_of(make, tmp_path), record_fn=lambda _: {"step": 3}), 1)
    with refused(ah.errors.InvalidArgumentError, "record_fn returned 3"):
        await run(make(file_of(make, tmp_path), record_fn=lambda _: 3), 1)


def test_reading_another_file(tmp_path: Path) -> None:
    """Reading a file of another kind is an error that says so; a torn last line is ignored."""
    path = tmp_path / "other"
    path.write_text("hello\nworld\n")
    with refused(ah.errors.InvalidArgumentError, f"{path} is not a file of CSVHook or JSONLinesHook"):
        read_series(str(path))
    path.write_text('{"step": 1, "time": 2.0, "a": {"b": 1.5}, "c": "text"}\n{"step": 2, "ti')
    assert read_series(str(path)) == {"a.b": ([1], [1.5])}


def test_the_name_of_the_state(tmp_path: Path) -> None:
    """The states of several files of one session have different names; a name may be given."""
    names = [make(tmp_path / file, ["loss"]).name for make in (CSVHook, JSONLinesHook) for file in ("a", "b")]
    assert names == ["CSVHook(a)", "CSVHook(b)", "JSONLinesHook(a)", "JSONLinesHook(b)"]
    assert CSVHook(tmp_path / "a", ["loss"], name="mine").name == "mine"


@both
async def test_two_writers_of_one_file_are_refused(make: Callable[..., Hook], tmp_path: Path) -> None:
    """The second hook with the same path is refused before either has lost a line; afterwards the file is free again."""
    path = file_of(make, tmp_path)
    with pytest.raises(ah.errors.InvalidArgumentError, match="is being written by another hook or process; give each of them"):
        async with ah.AsyncMonitoredSession(counting_graph(), [make(path, ["loss"]), make(path, ["total"])]):
            raise AssertionError("it was entered")
    async with ah.AsyncMonitoredSession(counting_graph(), [make(path, ["loss"])]) as session:
        await session.run("train")
    assert len(steps(path)) == 1
