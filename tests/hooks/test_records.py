"""JSONLinesHook: a line in a file per due step, also over interruptions, and read_records."""

from __future__ import annotations

import asyncio
import enum
import errno
import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiohooks as ah
from aiohooks.hooks import JSONLinesHook, read_records
from aiohooks.hooks._observing import Record
from aiohooks.hooks.records import _JSONLinesFile
from aiohooks.testing import ManualClock
from tests.support.checks import invalid
from tests.support.sessions import (
    counting,
    counting_graph,
    make_runs,
    train,
)
from tests.support.waiting import ticks


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of the file."""
    return tmp_path / "run.jsonl"


def steps(path: Path) -> list[int]:
    """Return the steps of the records of a file."""
    return [record["step"] for record in read_records(path)]


def contents(path: Path) -> bytes:
    """Return the bytes of a file."""
    return path.read_bytes()


def write(path: Path, content: bytes) -> None:
    """Write the bytes of a file."""
    path.write_bytes(content)


async def write_values(path: Path, values: dict[str, Any]) -> None:
    """Write a line of the values that a step returns."""

    async def step() -> dict[str, Any]:
        return values

    async with ah.AsyncMonitoredSession(step, [JSONLinesHook(path, list(values))]) as session:
        await session.run(list(values))


async def test_lines(path: Path) -> None:
    """There is a line per due step: the step, the clock's time, and the values in order; arrays
    become lists.
    """
    graph = counting_graph()
    detail = {"norms": np.array([1.5, 2.5]), "name": "ä", "ok": np.True_, "count": np.int64(3)}
    graph.operation(name="detail")(lambda: detail)
    with ManualClock() as clock:
        hook = JSONLinesHook(path, {"detail": "detail", "sum": "total"}, every=ah.Every(steps=2))
        async with ah.AsyncMonitoredSession(graph, [hook]) as session:
            for _ in range(5):
                clock.advance(1.5)
                await session.run("train")
    first, second = map(json.loads, contents(path).splitlines())
    assert list(first) == ["step", "time", "detail", "sum"]
    assert first["detail"] == {"norms": [1.5, 2.5], "name": "ä", "ok": True, "count": 3}
    assert [(line["step"], line["sum"]) for line in (first, second)] == [(2, 1), (4, 3)]
    assert second["time"] - first["time"] == pytest.approx(3.0)
    assert read_records(path) == [first, second]


class Color(enum.StrEnum):
    """A string with a repr of its own."""

    RED = "red"


class Size(enum.IntEnum):
    """A number with a repr of its own."""

    LARGE = 3


async def test_values_of_other_types(path: Path) -> None:
    """JSON stays strict: NaN and infinities are strings there and numbers when read; a subclass is
    its base class.
    """

    def refuse_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    values = {
        "nan": [math.nan, np.float32("nan")],
        "infinite": {"positive": math.inf, "negative": -math.inf},
        "enums": (Color.RED, Size.LARGE),
        "none": None,
        "text": 'a "b",\r\nc',
    }
    await write_values(path, values)
    (text,) = contents(path).splitlines()
    line = json.loads(text, parse_constant=refuse_constant)
    assert line["nan"] == ["NaN", "NaN"]
    assert line["infinite"] == {"positive": "Infinity", "negative": "-Infinity"}
    (record,) = read_records(path)
    assert all(map(math.isnan, record["nan"]))
    assert record["infinite"] == {"positive": math.inf, "negative": -math.inf}
    assert (record["enums"], record["none"], record["text"]) == (["red", 3], None, 'a "b",\r\nc')


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"thing": object()}, ("'thing'", "<object object")),
        ({"step": 3}, ("'step'",)),
    ],
)
async def test_a_value_that_cannot_be_written(path: Path, record: Any, says: Any) -> None:
    """It is an error that names its tag; so is a value with the tag of the step."""
    with invalid(*says):
        await write_values(path, record)


# -- failures


async def test_a_missing_directory(tmp_path: Path) -> None:
    """The file is opened before the first run, and an error of that is the session's."""
    with pytest.raises(FileNotFoundError):
        await train(JSONLinesHook(tmp_path / "missing" / "run", ["loss"]), runs=1)


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
        part = data[: self._room]
        self._room = 0
        return self._file.write(part) or 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_a_failed_write_leaves_no_part_of_a_line(path: Path) -> None:
    """A partial line on a full disk is removed, so that the next one is a line of its own."""
    file = _JSONLinesFile(str(path))
    file.append([{"step": 1}])
    real = file._file
    file._file = Full(real, 5)  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space left"):
        file.append([{"step": 2}])
    file.append([{"step": 3}])
    file._file = real
    file.close()
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n'


class Broken(Full):
    """A file to which one byte is written, and then none, without an error."""

    def write(self, data: memoryview) -> int:
        self._room = self._room or 0
        written: int = self._file.write(data[: self._room])
        self._room = 0
        return written


def test_a_write_of_nothing_is_an_error(path: Path) -> None:
    """It is not tried again without end, and leaves no part of a line."""
    file = _JSONLinesFile(str(path))
    file.append([{"step": 1}])
    real = file._file
    file._file = Broken(real, 1)  # type: ignore[assignment]
    with pytest.raises(OSError, match="nothing was written") as raised:
        file.append([{"step": 2}])
    assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(path))
    file._file = real
    file.close()
    assert path.read_text() == '{"step": 1}\n'


async def test_the_file_is_synced_at_the_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and not after each write."""
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (synced.append(number), real(number))[1])
    await train(JSONLinesHook(path, ["loss"]), runs=3)
    assert len(synced) == 1


async def test_two_writers_of_one_file(path: Path) -> None:
    """The second hook with the same path is an error before either has written; afterwards the file
    is free again.
    """
    with invalid("is being written by another hook or process; give each of them"):
        await train(JSONLinesHook(path, ["loss"]), JSONLinesHook(path, ["total"]), runs=0)
    await train(JSONLinesHook(path, ["loss"]), runs=1)
    assert steps(path) == [1]


@pytest.mark.parametrize(
    "content", [b"not ours\n", b"1,2\n", b'{"a": 1}\n', b'{"stop": 1}\n', b"\0\1\n"], ids=repr
)
async def test_another_file_is_not_changed(path: Path, content: bytes) -> None:
    """A file with other contents is neither changed nor read; the error has its path."""
    write(path, content)
    with invalid(str(path), "not a file of JSONLinesHook", "give another path"):
        await train(JSONLinesHook(path, ["loss"]), runs=1)
    with invalid(str(path)):
        read_records(path)
    assert contents(path) == content


@pytest.mark.parametrize(
    "damaged", ['{"step": 2, "ti\n', "[2]\n", "{}\n", '{"step": "2"}\n', "\xff\n"], ids=repr
)
def test_a_damaged_line(path: Path, damaged: str) -> None:
    """Damage that is not at the end of a session, where a crash leaves it, is an error with the
    number of the line.
    """
    path.write_text(
        '{"step": 1, "time": 1.0}\n' + damaged + '{"step": 3, "time": 1.0}\n', encoding="latin-1"
    )
    with invalid(f"{path}: line 2 is damaged"):
        read_records(path)


# -- interrupted runs leave the same records as uninterrupted ones


@pytest.mark.parametrize("tail", [b"", b"\0" * 5], ids=["torn", "zeros"])
async def test_every_torn_tail(path: Path, tail: bytes) -> None:
    """Whatever byte a crash ended the file at, in a first session or a later one, whole lines are
    read and continued.
    """
    await train(JSONLinesHook(path, ["loss"]), runs=2)
    await train(JSONLinesHook(path, ["loss"]), runs=1, start=1)
    whole = contents(path)
    for length in range(len(whole) + 1):
        write(path, whole[:length] + tail)
        kept = steps(path)
        file = _JSONLinesFile(str(path))
        for step in (2, 3):  # the next session is cut, too
            file.open_at(step)
            file.close()
        file.write([Record(4, 1.0, {"loss": 1.0})])
        file.close()
        assert contents(path).startswith(whole[:length] + tail)
        assert steps(path) == [*kept, 4], length


async def test_a_save_waits_until_the_lines_are_written(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state is taken when the lines of its step and of all earlier ones are in the file."""
    may_write = threading.Event()
    write_records = _JSONLinesFile.write

    def write_late(self: _JSONLinesFile, records: list[Record]) -> None:
        may_write.wait()
        write_records(self, records)

    monkeypatch.setattr(_JSONLinesFile, "write", write_late)
    every = ah.Every(steps=3)
    saving = ah.CheckpointSaverHook(tmp_path / "saved", every=every, save_on_begin=False)
    try:
        async with counting(saving, JSONLinesHook(path, ["loss"])) as session:
            await make_runs(session, 2, "train")
            third = asyncio.create_task(session.run("train"))
            await ticks(30)
            assert not third.done()
            assert contents(path) == b""
            may_write.set()
            await third
            assert steps(path) == [1, 2, 3]
    finally:
        may_write.set()
