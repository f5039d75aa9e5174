"""The ready trackers, read back with the packages themselves."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from wandb.proto import wandb_internal_pb2

import aiohooks as ah
from aiohooks.adapters.trackers import TrackerHook, send_unsent
from aiohooks.adapters.trackers.mlflow import MLflowTracker
from aiohooks.adapters.trackers.tensorboard import TensorBoardTracker
from aiohooks.adapters.trackers.wandb import WandbTracker
from aiohooks.errors import InvalidArgumentError
from aiohooks.testing import FaultInjectionHook
from tests.support.checks import refused
from tests.support.hooks import PhaseHook
from tests.support.sessions import NO_BACKOFF, counting_graph
from tests.support.waiting import until_true

Points = list[tuple[int, float]]

# The packages are called in threads: which loop waits makes no difference to them.
one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def hook_of(tracker: Any, folder: Path) -> TrackerHook:
    """Make a hook that sends the loss and the total of each step."""
    return TrackerHook(tracker, ["loss", "total"], every=ah.Every(steps=1), unsent_path=folder / "unsent.jsonl", drain_secs=60)


async def train(*hooks: ah.SessionRunHook, runs: int, start: int = 0) -> None:
    """Make so many runs; the end waits for a package on a busy machine."""
    store = ah.MemoryStepStore(start)
    async with ah.AsyncMonitoredSession(counting_graph(), hooks, global_step=store, stop_grace_period_secs=90) as session:
        for _ in range(runs):
            await session.run("train")


async def run_set_back(hook: TrackerHook) -> None:
    """Make steps 1 to 4, again 3 and 4 after a recovery, and 5; everything is sent before the recovery."""
    store = ah.MemoryStepStore()

    async def back() -> None:
        await until_true(lambda: not hook.statistics().pending)
        await store.reset(2)
        raise ah.AbortedError("lost")

    hooks = [hook, FaultInjectionHook({("before_run", 5): back})]
    async with ah.AsyncMonitoredSession(
        counting_graph(), hooks, global_step=store, recovery=NO_BACKOFF, stop_grace_period_secs=90
    ) as session:
        for _ in range(7):
            await session.run("train")


# -- MLflow


def mlflow_runs(folder: Path) -> list[Any]:
    """Return the runs of the experiment."""
    client = mlflow.MlflowClient(folder.as_uri())
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id]))


def mlflow_points(folder: Path, tag: str) -> Points:
    """Return the steps and values of a metric in the one run that there is."""
    (run,) = mlflow_runs(folder)
    history = mlflow.MlflowClient(folder.as_uri()).get_metric_history(run.info.run_id, tag)
    assert all(metric.timestamp > 1.6e12 for metric in history)
    return [(metric.step, metric.value) for metric in history]


def mlflow_tracker(folder: Path) -> MLflowTracker:
    """Make a tracker of a run in a folder."""
    return MLflowTracker("digits", "first", tracking_uri=folder.as_uri())


@one_loop
async def test_mlflow_has_what_was_sent(tmp_path: Path) -> None:
    """Every step is there once, also those that a recovery and another process have made again; the run is finished."""
    await run_set_back(hook_of(mlflow_tracker(tmp_path / "mlruns"), tmp_path))
    assert mlflow_points(tmp_path / "mlruns", "loss") == [(step, 10) for step in range(1, 6)]
    tracker = mlflow_tracker(tmp_path / "mlruns")
    await train(hook_of(tracker, tmp_path), runs=3, start=3)
    assert mlflow_points(tmp_path / "mlruns", "loss") == [(step, 10) for step in range(1, 7)]
    (run,) = mlflow_runs(tmp_path / "mlruns")
    assert (run.info.status, run.info.run_name, run.info.run_id) == ("FINISHED", "first", tracker.run_id)
    assert run.data.tags["aiohooks.step"] == "6"


@one_loop
async def test_mlflow_has_the_end_of_the_run(tmp_path: Path) -> None:
    """A session that fails says so, and one that is cancelled."""
    with pytest.raises(ZeroDivisionError):
        await train(
            hook_of(mlflow_tracker(tmp_path), tmp_path), FaultInjectionHook({("before_run", 2): ZeroDivisionError()}), runs=2
        )
    assert [run.info.status for run in mlflow_runs(tmp_path)] == ["FAILED"]
    waiting = asyncio.Event()
    hook = hook_of(mlflow_tracker(tmp_path), tmp_path)

    async def wait() -> None:
        await until_true(lambda: hook.statistics().sent == 2)
        waiting.set()
        await asyncio.Event().wait()

    session = asyncio.create_task(train(hook, FaultInjectionHook({("before_run", 3): wait}), runs=3, start=1))
    await waiting.wait()
    session.cancel()
    with pytest.raises(asyncio.CancelledError):
        await session
    assert [run.info.status for run in mlflow_runs(tmp_path)] == ["KILLED"]


@one_loop
async def test_what_mlflow_did_not_get_is_sent_later(tmp_path: Path) -> None:
    """A server that refuses connections costs the session nothing; the file is sent to a store that works."""
    closed = MLflowTracker("digits", "first", tracking_uri="no-such-scheme://host")
    hook = hook_of(closed, tmp_path)
    await train(hook, runs=3)
    assert "no-such-scheme" in (hook.statistics().error or "")
    assert send_unsent(tmp_path / "unsent.jsonl", mlflow_tracker(tmp_path / "mlruns")) == 3
    assert mlflow_points(tmp_path / "mlruns", "total") == [(1, 0), (2, 1), (3, 2)]


@one_loop
async def test_late_metrics_do_not_open_an_mlflow_run_again(tmp_path: Path) -> None:
    """What is sent later changes neither the status of the run nor its last step."""
    await train(hook_of(mlflow_tracker(tmp_path / "mlruns"), tmp_path), runs=3)
    line = {"step": 1, "time": 1.7e9, "metrics": {"late": 0.5}}
    send_file(tmp_path / "unsent.jsonl", line, mlflow_tracker(tmp_path / "mlruns"))
    (run,) = mlflow_runs(tmp_path / "mlruns")
    assert mlflow_points(tmp_path / "mlruns", "late") == [(1, 0.5)]
    assert (run.info.status, run.data.tags["aiohooks.step"]) == ("FINISHED", "3")


def send_file(path: Path, line: dict[str, Any], tracker: Any) -> None:
    """Send a file of one line."""
    path.write_text(json.dumps(line) + "\n")
    assert send_unsent(path, tracker) == 1


@pytest.mark.parametrize("name", ["", "it's", 7])
def test_names_that_mlflow_cannot_search_are_refused(name: Any) -> None:
    """The error names the argument."""
    with refused(InvalidArgumentError, "run_name", repr(name)):
        MLflowTracker("digits", name)
    assert repr(MLflowTracker("digits", "first")) == "MLflowTracker('digits', 'first')"


# -- Weights & Biases


@pytest.fixture
def wandb_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for runs. The package's own process and threads end with `wandb.teardown`, also if a test fails before."""
    yield tmp_path
    wandb.teardown()


def wandb_records(folder: Path) -> Iterator[Any]:
    """Yield the records in the files of all runs, in the order of the runs: blocks of 32 KiB, as in LevelDB's log."""
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, position, whole = path.read_bytes(), 7, b""
        assert data.startswith(b":W&B")
        while position + 7 <= len(data):
            if 32768 - position % 32768 < 7:
                position += 32768 - position % 32768
                continue
            _, length, kind = struct.unpack("<IHB", data[position : position + 7])
            position += 7 + length
            whole += data[position - length : position]
            if kind in (1, 4):  # the whole, or its last part
                record: Any = wandb_internal_pb2.Record()  # type: ignore[attr-defined,unused-ignore]
                record.ParseFromString(whole)
                whole = b""
                yield record


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    """Return what was logged."""
    return [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in wandb_records(folder)
        if record.WhichOneof("record_type") == "history"
    ]


def wandb_points(folder: Path, tag: str) -> Points:
    """Return the steps and values of a metric."""
    return [(row["global_step"], row[tag]) for row in wandb_history(folder)]


@pytest.mark.slow
@one_loop
async def test_wandb_has_what_was_sent(wandb_folder: Path) -> None:
    """Every step is there once, with its time, also those that a recovery has made again."""
    tracker = WandbTracker(project="digits", dir=str(wandb_folder))
    await run_set_back(hook_of(tracker, wandb_folder))
    wandb.teardown()
    assert wandb_points(wandb_folder, "total") == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 6)]
    times = [row["_timestamp"] for row in wandb_history(wandb_folder)]
    assert times == sorted(times)
    exits = [record.exit.exit_code for record in wandb_records(wandb_folder) if record.WhichOneof("record_type") == "exit"]
    assert exits == [0]
    assert repr(tracker) == "WandbTracker('digits')"


@pytest.mark.slow
@one_loop
async def test_wandb_continues_a_run_of_its_id(wandb_folder: Path) -> None:
    """A session in turn sends no step again, and one that fails says so; a run without an id is a new one."""
    tracker = WandbTracker(project="digits", id="first", resume="allow", dir=str(wandb_folder))
    await train(hook_of(tracker, wandb_folder), runs=3)
    faults = FaultInjectionHook({("before_run", 4): ZeroDivisionError()})
    with pytest.raises(ZeroDivisionError):
        await train(hook_of(tracker, wandb_folder), faults, runs=4, start=2)
    wandb.teardown()
    assert sorted(step for step, _ in wandb_points(wandb_folder, "loss")) == [1, 2, 3, 4, 5]
    exits = [record.exit.exit_code for record in wandb_records(wandb_folder) if record.WhichOneof("record_type") == "exit"]
    assert sorted(exits) == [0, 1]


@pytest.mark.slow
@one_loop
async def test_the_run_of_wandb_is_there_for_others(wandb_folder: Path) -> None:
    """`tracker.run` is the run while it is open."""
    tracker = WandbTracker(project="digits", dir=str(wandb_folder))
    hook = hook_of(tracker, wandb_folder)
    runs: list[Any] = []

    async def look(context: ah.SessionRunContext, values: object) -> None:
        if context.global_step == 2:
            await until_true(lambda: hook.statistics().sent == 1)
            runs.append(tracker.run)

    await train(hook, PhaseHook("after_run", look), runs=2)
    wandb.teardown()
    assert runs[0].project == "digits"
    assert tracker.run is None


# -- TensorBoard


def tensorboard_points(folder: Path, tag: str) -> Points:
    """Return what TensorBoard shows of a metric, without what was dropped."""
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    if tag in accumulator.Tags()["scalars"]:
        return [(event.step, event.value) for event in accumulator.Scalars(tag)]
    return [(event.step, event.tensor_proto.float_val[0]) for event in accumulator.Tensors(tag)]


@one_loop
async def test_tensorboard_shows_what_was_sent(tmp_path: Path) -> None:
    """A recovery, and another process, replace the steps that they make again."""
    folder = tmp_path / "events"
    await run_set_back(hook_of(TensorBoardTracker(folder), tmp_path))
    assert tensorboard_points(folder, "total") == [(1, 0), (2, 1), (3, 4), (4, 5), (5, 6)]
    await train(hook_of(TensorBoardTracker(folder), tmp_path), runs=3, start=3)
    assert tensorboard_points(folder, "total") == [(1, 0), (2, 1), (3, 4), (4, 0), (5, 1), (6, 2)]
    assert repr(TensorBoardTracker(folder)) == f"TensorBoardTracker({str(folder)!r})"


@one_loop
async def test_metrics_that_are_sent_late_drop_nothing_in_tensorboard(tmp_path: Path) -> None:
    """Steps of before are added to what is there."""
    folder = tmp_path / "events"
    await train(hook_of(TensorBoardTracker(folder), tmp_path), runs=3)
    send_file(tmp_path / "unsent.jsonl", {"step": 1, "time": 1.7e9, "metrics": {"late": 0.5}}, TensorBoardTracker(folder))
    assert tensorboard_points(folder, "late") == [(1, 0.5)]
    assert [step for step, _ in tensorboard_points(folder, "loss")] == [1, 2, 3]
