"""SummarySaverHook: TensorBoard's own reader finds what was written."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiohooks as ah
from aiohooks.hooks.records import SummarySaverHook
from tests.support.checks import invalid
from tests.support.event_files import restarts, scalars
from tests.support.sessions import (
    counting,
    counting_graph,
    going_back,
    make_runs,
    run_session,
    train,
)


async def test_only_due_runs_evaluate_the_values(tmp_path: Path) -> None:
    """The values of the first run and of each step that crosses a boundary are there, under their
    tags; they are fetched for no other run.
    """
    graph = counting_graph()
    numbers = itertools.count(1)
    graph.operation(name="watched")(lambda: next(numbers))
    async with ah.AsyncMonitoredSession(
        graph, [SummarySaverHook(tmp_path, {"a/watched": "watched"}, every=ah.Every(steps=8))]
    ) as session:
        await make_runs(session, 30, "train")
    assert scalars(tmp_path, "a/watched") == [(1, 1), (8, 2), (16, 3), (24, 4)]
    assert restarts(tmp_path) == [1]


async def test_a_recovery_that_moves_the_step_back(tmp_path: Path) -> None:
    """Steps that a recovery repeats are written again, and TensorBoard drops its earlier values of
    them.
    """
    async with going_back(
        SummarySaverHook(tmp_path, ["loss"], every=ah.Every(steps=1)), at=5, to=2
    ) as session:
        await make_runs(session, 6, "train")
    assert restarts(tmp_path) == [1, 3]
    assert [step for step, _ in scalars(tmp_path, "loss")] == [1, 2, 3, 4]


async def test_an_invalid_directory_is_an_error_before_the_first_run(tmp_path: Path) -> None:
    """The file is opened with the session: an invalid directory is an error before there is
    anything to lose.
    """
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        async with counting(SummarySaverHook(tmp_path / "file" / "runs", ["loss"])):
            raise AssertionError("it must not open")


class FullDisk:
    """Makes the event files fail at the n-th write."""

    def __init__(self, failing: int) -> None:
        self.calls = 0
        self.failing = failing

    def wrap(self, write: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
        def call(records: list[Any]) -> None:
            self.calls += 1
            if self.calls == self.failing:
                raise OSError(28, "No space left on device")
            write(records)

        return call


def on_full_disk(hook: SummarySaverHook, failing: int) -> ah.SessionRunHook:
    """A hook that fills the disk of another one's writer, once that has begun."""
    disk = FullDisk(failing)

    class Fills(ah.SessionRunHook):
        order = 1

        async def after_create_session(self, *_: object) -> None:
            await self.after_run()
            hook._writer._write = disk.wrap(hook._writer._write)

        async def after_run(self, *_: object) -> None:
            # One batch per run, so that the failures are in the expected runs.
            await hook._writer.drain()

    return Fills()


@pytest.mark.parametrize("runs", [1, 4])
async def test_a_failed_write_is_raised_in_the_next_run(tmp_path: Path, runs: int) -> None:
    """The writer's own error is raised in the next run, due or not, or at the end."""
    hook = SummarySaverHook(tmp_path, ["loss"], every=ah.Every(steps=10))
    store = ah.MemoryStepStore()
    with pytest.raises(OSError, match="No space left") as caught:
        await train(hook, on_full_disk(hook, 1), runs=runs, start=store)
    assert store.latest.step == 1
    assert f"raised by the writer of the summaries in {tmp_path}" in caught.value.__notes__


async def test_failed_writes_are_logged_and_the_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With `configure(hook, on_error="log")`, and later values are written."""
    hook = SummarySaverHook(tmp_path, ["total"], every=ah.Every(steps=1))
    logging_hook = ah.configure(hook, on_error="log")
    await run_session(counting(logging_hook, on_full_disk(hook, 2)), 5, "train")
    assert "No space left on device" in caplog.text
    assert scalars(tmp_path, "total")[-2:] == [(4, 3), (5, 4)]


def test_nothing_is_written_after_a_torn_record(tmp_path: Path) -> None:
    """After a partial write a new file is started, because readers stop at a torn record."""
    from aiohooks.hooks._observing import Record
    from aiohooks.hooks._tensorboard import EventFile

    file = EventFile(str(tmp_path))
    file.open()
    assert next(tmp_path.iterdir()).stat().st_size > 0
    file.write([Record(1, 1.0, {"loss": 1.0})])
    torn = file._writer._py_recordio_writer
    torn._writer.write(b"half a record")
    torn.flush = lambda: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        file.write([Record(2, 2.0, {"loss": 2.0})])
    file.write([Record(3, 3.0, {"loss": 3.0})])
    file.close()
    torn.close()
    assert len(os.listdir(tmp_path)) == 2
    assert scalars(tmp_path, "loss")[-1] == (3, 3.0)


async def test_the_queue_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for one record, each run waits for the previous record, and all are written."""
    monkeypatch.setattr(SummarySaverHook, "_max_queue", 1)
    hook = SummarySaverHook(tmp_path, ["total"], every=ah.Every(steps=1))
    await run_session(counting(hook), 20, "train")
    assert scalars(tmp_path, "total") == [(step, step - 1) for step in range(1, 21)]


async def test_what_is_not_a_number_is_refused(tmp_path: Path) -> None:
    """A value that is not a single number is an error that names its tag and shape."""

    async def step() -> dict[str, Any]:
        return {"weights": np.zeros((2, 3))}

    hook = SummarySaverHook(tmp_path, ["weights"])
    with invalid("'weights' is a ndarray of shape (2, 3)", "give one number"):
        async with ah.AsyncMonitoredSession(step, [hook]) as session:
            await session.run("weights")


async def test_numbers_of_numpy_and_infinities(tmp_path: Path) -> None:
    """Scalars of numpy are numbers, and infinities are written."""

    async def step() -> dict[str, Any]:
        return {"norm": np.linalg.norm([6.0, 8.0]), "wrong": math.inf}

    hook = SummarySaverHook(tmp_path, ["norm", "wrong"])
    async with ah.AsyncMonitoredSession(step, [hook]) as session:
        await session.run("norm")
    assert scalars(tmp_path, "norm") == [(1, 10)]
    assert scalars(tmp_path, "wrong") == [(1, math.inf)]
