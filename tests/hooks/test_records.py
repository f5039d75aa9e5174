"""CSVHook and JSONLinesHook: one line in a file per due step, also over interruptions."""

from __future__ import annotations

import csv
import enum
import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiohooks as ah
from aiohooks.hooks._record_files import CSVFormat, JSONLinesFormat, Record, RecordFile, read_series
from aiohooks.hooks.records import CSVHook, JSONLinesHook
from aiohooks.testing import ManualClock
from tests.support.checks import refused
from tests.support.record_files import aside_of, without_time
from tests.support.sessions import counting_graph, going_back, make_runs, run_session, train

Hook = CSVHook | JSONLinesHook
both = pytest.mark.parametrize("make", [CSVHook, JSONLinesHook])


def file_of(make: Callable[..., Hook], folder: Path) -> Path:
    """Return a path with the suffix that belongs to the hook."""
    return folder / ("run.csv" if make is CSVHook else "run.jsonl")


def steps(path: Path) -> list[int]:
    """Return the steps of a file's lines."""
    return [int(line["step"]) for line in without_time(path)]


def returning(values: Any) -> Callable[[Any], Any]:
    """Return a `record_fn` that ignores what was fetched."""
    return lambda _: values


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
    await run_session(ah.AsyncMonitoredSession(graph, [JSONLinesHook(path, ["detail", "loss"])]), 1, "train")
    (line,) = path.read_text(encoding="utf-8").splitlines()
    found = json.loads(line)
    assert list(found) == ["step", "time", "detail", "loss"]
    assert found["detail"] == {"norms": [1.5, 2.5], "name": "ä", "ok": True, "count": 3}
    assert found["step"] == 1


async def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    """JSON stays strict, with texts in their place; CSV has what `float` reads. Both are read back as numbers."""

    def refuse_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": np.float32("nan")}
    as_json, as_csv = tmp_path / "run.jsonl", tmp_path / "run.csv"
    await train(JSONLinesHook(as_json, record_fn=returning({**values, "e": [math.nan]})), runs=1)
    found = json.loads(as_json.read_text(), parse_constant=refuse_constant)
    assert [found[tag] for tag in "abcde"] == ["NaN", "Infinity", "-Infinity", "NaN", ["NaN"]]
    await train(CSVHook(as_csv, record_fn=returning(values)), runs=1)
    assert as_csv.read_text().splitlines()[1].split(",")[2:] == ["nan", "inf", "-inf", "nan"]
    for path in (as_json, as_csv):
        series = read_series(str(path))
        assert [str(series[tag][1][0]) for tag in "abcd"] == ["nan", "inf", "-inf", "nan"]


class Color(enum.StrEnum):
    """A text with a repr of its own."""

    RED = "red"


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (  # line breaks, commas and quotes make no other lines or columns; None is empty
            {"record_fn": returning({"text": 'a "b",\r\nc', "none": None, "color": Color.RED})},
            {"text": 'a "b",\\r\\nc', "none": "", "color": "red"},
        ),
        ({"values": ["total", "loss"], "columns": ["loss", "total", "later"]}, {"loss": "10", "total": "0", "later": ""}),
    ],
)
async def test_csv_cells(tmp_path: Path, options: dict[str, Any], found: dict[str, str]) -> None:
    """A field has one text on one line; `columns` gives the order and the names, including those that appear later."""
    path = tmp_path / "run.csv"
    await train(CSVHook(path, **options), runs=1)
    assert without_time(path) == [{"step": "1", **found}]


async def test_csv_columns_are_fixed(tmp_path: Path) -> None:
    """An unknown column is an error that names it and the nearest known one; a missing one is empty."""
    path = tmp_path / "run.csv"
    rows = [{"loss": 1, "rate": 2}, {"loss": 3}, {"loss": 5, "rats": 6}]
    with refused(ah.errors.InvalidArgumentError, "'rats'", "not a column", "did you mean 'rate'", "columns="):
        await train(CSVHook(path, record_fn=lambda _: rows.pop(0)), runs=3)
    assert without_time(path) == [{"step": "1", "loss": "1", "rate": "2"}, {"step": "2", "loss": "3", "rate": ""}]
    # With `record_fn` and no `columns`, a resumed run uses the names in the file.
    await train(CSVHook(path, record_fn=returning({"rate": 3})), runs=1, start=2)
    assert without_time(path)[2] == {"step": "3", "loss": "", "rate": "3"}


@pytest.mark.parametrize(
    ("make", "record", "says"),
    [
        (CSVHook, {"norms": np.zeros(2)}, ("'norms'", "JSONLinesHook")),
        *((make, {"thing": object()}, ("'thing'", "<object object")) for make in (CSVHook, JSONLinesHook)),
        *((make, {"step": 3}, ("'step'",)) for make in (CSVHook, JSONLinesHook)),
        *((make, 3, ("record_fn returned 3",)) for make in (CSVHook, JSONLinesHook)),
    ],
)
async def test_a_value_that_cannot_be_written(tmp_path: Path, make: Callable[..., Hook], record: Any, says: Any) -> None:
    """It is an error that names its tag; so is a record that is no mapping, or has a step."""
    with refused(ah.errors.InvalidArgumentError, *says):
        await train(make(file_of(make, tmp_path), record_fn=returning(record)), runs=1)


# -- failures


@both
async def test_a_missing_directory(tmp_path: Path, make: Callable[..., Hook]) -> None:
    """The file is opened before the first run, and an error of that is the session's."""
    with pytest.raises(FileNotFoundError):
        await train(make(tmp_path / "missing" / "run", ["loss"]), runs=1)


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


@pytest.mark.parametrize(("fsync", "count"), [(True, 4), (False, 1)])
async def test_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool, count: int) -> None:
    """With `fsync` the file is synced after each write; without it at the end."""
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (synced.append(number), real(number))[1])
    await train(JSONLinesHook(tmp_path / "a.jsonl", ["loss"], fsync=fsync, max_queue=1), runs=3)
    assert len(synced) == count


@both
def test_records_that_were_not_written_when_the_process_died(tmp_path: Path, make: Callable[..., Hook]) -> None:
    """Those of a checkpoint that the file does not have are written first: after its last line, and up to the step."""
    path = file_of(make, tmp_path)
    for start, first in ((0, [1, 2]), (4, [3, 4])):
        file = RecordFile(str(path), CSVFormat(["loss"]) if make is CSVHook else JSONLinesFormat(), fsync=False)
        restored = [Record(step, 1.0, {"loss": float(step)}) for step in range(1, 6)]
        missing = file.open_at(start, restored)
        assert [record.step for record in missing] == ([] if start == 0 else first)
        file.write([record for record in restored if record.step in first] if start == 0 else missing)
        file.close()
    assert steps(path) == [1, 2, 3, 4]


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
        await train(make(path, ["loss"]), make(path, ["total"]), runs=0)
    await train(make(path, ["loss"]), runs=1)
    assert len(steps(path)) == 1


# -- interrupted runs leave the same file as uninterrupted ones


@both
async def test_a_new_run_over_an_old_file_keeps_the_old_lines_aside(tmp_path: Path, make: Callable[..., Hook]) -> None:
    """A run from step 0 starts the file again; the old lines are moved aside, with a warning."""
    path = file_of(make, tmp_path)
    await train(make(path, ["loss"]), runs=3)
    await train(make(path, ["loss"]), runs=2)
    assert steps(path) == [1, 2]
    assert aside_of(path).count("\n") == 3


@both
async def test_every_torn_tail_is_repaired(tmp_path: Path, make: Callable[..., Hook], caplog: pytest.LogCaptureFixture) -> None:
    """Whatever byte a crash ended the file at, the header's too, the next session continues with whole lines."""
    path = file_of(make, tmp_path)
    await train(make(path, ["loss"]), runs=2)
    whole = path.read_bytes()
    starts = [0] + [number + 1 for number, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(len(whole)):
        path.write_bytes(whole[:length] + (b"\0" * 5 if length not in starts else b""))
        file = RecordFile(str(path), CSVFormat(["loss"]) if make is CSVHook else JSONLinesFormat(), fsync=False)
        file.open_at(3)
        kept = max(start for start in starts if start <= length)
        assert path.read_bytes() == whole[:kept]
        file.write([Record(4, 1.0, {"loss": 1.0})])
        file.close()
        assert steps(path)[-1] == 4
        assert path.read_bytes().startswith(whole[: starts[1]]) or make is JSONLinesHook
    assert all(record.levelno == logging.WARNING and "torn by a crash" in record.getMessage() for record in caplog.records)


@both
async def test_a_recovery_that_moves_the_step_back(tmp_path: Path, make: Callable[..., Hook]) -> None:
    """Lines of steps that a recovery repeats are there once, with the repeated values."""
    path = file_of(make, tmp_path)
    async with going_back(make(path, ["loss", "total"]), at=5, to=2) as session:
        await make_runs(session, 6, "train")
    assert steps(path) == [1, 2, 3, 4]


@both
@pytest.mark.parametrize("content", ["not ours\n", "1,2\n", '{"a": 1}\n', '"unclosed\n', "\x00\x00\n"], ids=repr)
async def test_another_file_is_not_changed(tmp_path: Path, make: Callable[..., Hook], content: str) -> None:
    """A file with other contents is refused by name and line, and not changed."""
    path = file_of(make, tmp_path)
    path.write_text(content)
    with refused(ah.errors.InvalidArgumentError, str(path), "line 1", "give another path"):
        await train(make(path, ["loss"]), runs=1)
    assert path.read_text() == content


@pytest.mark.parametrize(
    ("content", "fetches", "says"),
    [
        ("step,time,loss\n1,1.0,5\n", ["loss", "total"], "its columns are 'step,time,loss' and not 'step,time,loss,total'"),
        ("step,time,loss\n1,1.0,5\n2,1\n3,1.0,5\n", ["loss"], "line 3"),  # no crash of a writer does this
        ("step,time,loss\n1,1.0,5,6\n", ["loss"], "line 2: 4 fields under 3 columns"),
    ],
)
async def test_a_damaged_file_is_not_changed(tmp_path: Path, content: str, fetches: list[str], says: str) -> None:
    """Lines with other columns, and damage in the middle, are reported and not removed."""
    path = tmp_path / "run.csv"
    path.write_text(content)
    with refused(ah.errors.InvalidArgumentError, says):
        await train(CSVHook(path, fetches), runs=1, start=3)
    assert path.read_text() == content
