"""An interrupted run leaves the same file as an uninterrupted one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

import aiohooks as ah
from aiohooks.hooks._record_files import CSVFormat, JSONLinesFormat, Record, RecordFile
from aiohooks.hooks.records import CSVHook, JSONLinesHook
from tests.support.checks import refused
from tests.support.record_files import Hook, aside_of, both, file_of, run, steps, without_time
from tests.support.sessions import going_back


@both
async def test_a_new_run_over_an_old_file_keeps_the_old_lines_aside(tmp_path: Path, make: Callable[..., Hook]) -> None:
    """A run from step 0 starts the file again; the old lines are moved aside, with a warning."""
    path = file_of(make, tmp_path)
    await run(make(path, ["loss"]), 3)
    await run(make(path, ["loss"]), 2, x=7)
    assert steps(path) == [1, 2]
    assert aside_of(path).count("\n") == 3


@both
async def test_every_torn_tail_is_repaired(tmp_path: Path, make: Callable[..., Hook], caplog: pytest.LogCaptureFixture) -> None:
    """Whatever byte a crash ended the file at, the next session continues with whole lines."""
    path = file_of(make, tmp_path)
    await run(make(path, ["loss"]), 3)
    whole = path.read_bytes()
    starts = [0] + [number + 1 for number, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(starts[-3], len(whole)):
        path.write_bytes(whole[:length] + (b"\0" * 5 if length not in starts else b""))
        form = CSVFormat(["loss"]) if make is CSVHook else JSONLinesFormat()
        file = RecordFile(str(path), form, fsync=False)
        file.open_at(3)
        kept = max(start for start in starts if start <= length)
        assert path.read_bytes() == whole[:kept]
        file.write([Record(4, 1.0, {"loss": 1.0})])
        file.close()
        assert steps(path)[-1] == 4
    assert all(record.levelno == logging.WARNING and "torn by a crash" in record.getMessage() for record in caplog.records)


async def test_a_torn_header_is_repaired(tmp_path: Path) -> None:
    """A file with a partial header, left by a crash, is started again."""
    path = tmp_path / "run.csv"
    path.write_text("step,ti")
    await run(CSVHook(path, ["loss"]), 1)
    assert path.read_text().startswith("step,time,loss\n1,")


@both
async def test_a_recovery_that_moves_the_step_back(tmp_path: Path, make: Callable[..., Hook]) -> None:
    """Lines of steps that a recovery repeats are there once, with the repeated values."""
    path = file_of(make, tmp_path)
    async with going_back(make(path, ["loss", "total"]), at=5, to=2) as session:
        for _ in range(6):
            await session.run("train")
    assert steps(path) == [1, 2, 3, 4]


@both
@pytest.mark.parametrize("content", ["not ours\n", "1,2\n", '{"a": 1}\n', '"unclosed\n', "\x00\x00\n"], ids=repr)
async def test_another_file_is_not_changed(tmp_path: Path, make: Callable[..., Hook], content: str) -> None:
    """A file with other contents is refused by name and line, and not changed."""
    path = file_of(make, tmp_path)
    path.write_text(content)
    with refused(ah.errors.InvalidArgumentError, str(path), "line 1", "give another path"):
        await run(make(path, ["loss"]), 1)
    assert path.read_text() == content


async def test_a_file_with_other_columns_is_not_changed(tmp_path: Path) -> None:
    """Lines with other columns are not written under the old names."""
    path = tmp_path / "run.csv"
    await run(CSVHook(path, ["loss"]), 1)
    before = path.read_text()
    with refused(ah.errors.InvalidArgumentError, "its columns are 'step,time,loss' and not 'step,time,loss,total'"):
        await run(CSVHook(path, ["loss", "total"]), 1, start=1)
    assert path.read_text() == before


async def test_columns_of_the_file_are_used(tmp_path: Path) -> None:
    """With `record_fn` and no `columns`, a resumed run uses the names in the file."""
    path = tmp_path / "run.csv"
    await run(CSVHook(path, record_fn=lambda _: {"a": 1, "b": 2}), 1)
    await run(CSVHook(path, record_fn=lambda _: {"b": 3}), 1, start=1)
    assert without_time(path) == [{"step": "1", "a": "1", "b": "2"}, {"step": "2", "a": "", "b": "3"}]


async def test_a_damaged_line_in_the_middle_is_refused(tmp_path: Path) -> None:
    """Damage that no crash of a writer causes is not removed, but reported."""
    path = tmp_path / "run.jsonl"
    await run(JSONLinesHook(path, ["loss"]), 3)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + '{"step": 2, "time"\n' + lines[2])
    with refused(ah.errors.InvalidArgumentError, "line 2"):
        await run(JSONLinesHook(path, ["loss"]), 1, start=3)
