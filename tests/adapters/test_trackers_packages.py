"""The ready trackers, read back with the packages themselves."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlflow
import pytest
import wandb
from wandb.proto import wandb_internal_pb2

import aiohooks as ah
from aiohooks.adapters.trackers import TrackerHook
from aiohooks.adapters.trackers.mlflow import MLflowTracker
from aiohooks.adapters.trackers.tensorboard import TensorBoardTracker
from aiohooks.adapters.trackers.wandb import WandbTracker
from aiohooks.testing import FaultInjectionHook
from tests.support.event_files import scalars
from tests.support.sessions import NO_BACKOFF, counting, make_runs
from tests.support.waiting import forever, until_true

# The packages are called in threads: which loop waits makes no difference to them.
one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])
Points = list[tuple[int, float]]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let no package reach a server. What wandb has started ends with `wandb.teardown`, also if a
    test fails before.
    """
    for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY", "WANDB_SILENT"):
        monkeypatch.setenv(name, "true")
    for name, value in {"MODE": "offline", "CONSOLE": "off", "ERROR_REPORTING": "false"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    yield
    wandb.teardown()


def hook_of(tracker: Any) -> TrackerHook:
    """Make a hook that sends the loss and the total of each step."""
    return TrackerHook(tracker, ["loss", "total"], every=ah.Every(steps=1), drain_secs=60)


async def train(
    *hooks: ah.SessionRunHook, runs: int, start: int = 0, back_to: int | None = None
) -> None:
    """Make so many runs, and before the fifth one a recovery; the end waits for a package on a busy
    machine.
    """
    store = ah.MemoryStepStore(start)

    async def back() -> None:
        await until_true(
            lambda: (
                not any(
                    hook.statistics().pending for hook in hooks if isinstance(hook, TrackerHook)
                )
            )
        )
        await store.reset(2)
        raise ah.AbortedError("lost")

    faults = [] if back_to is None else [FaultInjectionHook({("before_run", 5): back})]
    async with counting(
        *hooks, *faults, global_step=store, recovery=NO_BACKOFF, stop_grace_period_secs=90
    ) as session:
        await make_runs(session, runs, "train")


# -- what a package has, as it says itself


def mlflow_tracker(folder: Path) -> MLflowTracker:
    return MLflowTracker("digits", "first", tracking_uri=folder.as_uri())


def mlflow_runs(folder: Path) -> list[Any]:
    """Return the runs of the experiment."""
    client = mlflow.MlflowClient(folder.as_uri())
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id]))


def mlflow_points(folder: Path, tag: str) -> Points:
    (run,) = mlflow_runs(folder)
    history = mlflow.MlflowClient(folder.as_uri()).get_metric_history(run.info.run_id, tag)
    assert all(metric.timestamp > 1.6e12 for metric in history)
    return [(metric.step, metric.value) for metric in history]


def wandb_tracker(folder: Path) -> WandbTracker:
    return WandbTracker(project="digits", id="first", resume="allow", dir=str(folder.parent))


def wandb_records(folder: Path, kind: str) -> Iterator[Any]:
    """Yield the records of a kind in the files of all runs, in the order of the runs: blocks of 32
    KiB, as in LevelDB's log.
    """
    wandb.teardown()
    for path in sorted(folder.parent.glob("wandb/offline-run-*/*.wandb")):
        data, position, whole = path.read_bytes(), 7, b""
        assert data.startswith(b":W&B")
        while position + 7 <= len(data):
            if 32768 - position % 32768 < 7:
                position += 32768 - position % 32768
                continue
            _, length, part = struct.unpack("<IHB", data[position : position + 7])
            position += 7 + length
            whole += data[position - length : position]
            if part in (1, 4):  # the whole, or its last part
                protocol: Any = wandb_internal_pb2  # not every version declares its contents
                record = protocol.Record()
                record.ParseFromString(whole)
                whole = b""
                if record.WhichOneof("record_type") == kind:
                    yield getattr(record, kind)


def wandb_points(folder: Path, tag: str) -> Points:
    rows = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in history.item}
        for history in wandb_records(folder, "history")
    ]
    return [
        (row["global_step"], row[tag]) for row in rows if tag in row and row["_timestamp"] > 1.6e9
    ]


class Package(NamedTuple):
    """A package: how a tracker is made, what is read back, and the totals after a recovery and
    after another session.
    """

    tracker: Callable[[Path], Any]
    points: Callable[[Path, str], Points]
    recovered: Points
    continued: Points


KEPT = [(1, 0.0), (2, 1.0), (3, 2.0), (4, 3.0), (5, 6.0)]
PACKAGES = {
    "mlflow": Package(mlflow_tracker, mlflow_points, KEPT, [*KEPT, (6, 2.0)]),
    "wandb": Package(wandb_tracker, wandb_points, KEPT, [*KEPT, (6, 2.0)]),
    "tensorboard": Package(
        *(TensorBoardTracker, scalars),  # which drops what is made again
        [(1, 0.0), (2, 1.0), (3, 4.0), (4, 5.0), (5, 6.0)],
        [(1, 0.0), (2, 1.0), (3, 4.0), (4, 0.0), (5, 1.0), (6, 2.0)],
    ),
}
EACH = pytest.mark.parametrize(
    "package",
    [
        pytest.param(package, id=name, marks=[pytest.mark.slow] if name == "wandb" else [])
        for name, package in PACKAGES.items()
    ],
)


@EACH
@one_loop
async def test_each_step_is_there_once(package: Package, tmp_path: Path) -> None:
    """With its time, also a step that a recovery and a later session make again."""
    folder = tmp_path / "package"
    tracker = package.tracker(folder)
    await train(hook_of(tracker), runs=7, back_to=2)
    if package.tracker is not wandb_tracker:  # offline, another process does not know what is there
        assert package.points(folder, "total") == package.recovered
        tracker = package.tracker(folder)
    await train(hook_of(tracker), runs=3, start=3)
    assert package.points(folder, "total") == package.continued
    assert sorted(step for step, _ in package.points(folder, "loss")) == [1, 2, 3, 4, 5, 6]
    if package.tracker is mlflow_tracker:
        (run,) = mlflow_runs(folder)
        assert (run.info.status, run.info.run_name, run.info.run_id) == (
            "FINISHED",
            "first",
            tracker.run_id,
        )
        assert run.data.tags["aiohooks.step"] == "6"


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
@one_loop
async def test_mlflow_has_the_end_of_the_run(tmp_path: Path, how: str) -> None:
    """A session that fails says so, and one that is cancelled."""
    hook, waiting = hook_of(mlflow_tracker(tmp_path)), asyncio.Event()

    async def end() -> None:
        await until_true(lambda: hook.statistics().sent == 1)
        if how == "fails":
            raise ZeroDivisionError
        waiting.set()
        await forever()

    session = asyncio.create_task(train(hook, FaultInjectionHook({("before_run", 2): end}), runs=2))
    if how == "is cancelled":
        await waiting.wait()
        session.cancel()
    with pytest.raises(ZeroDivisionError if how == "fails" else asyncio.CancelledError):
        await session
    assert [run.info.status for run in mlflow_runs(tmp_path)] == [
        "FAILED" if how == "fails" else "KILLED"
    ]


@one_loop
async def test_a_server_that_cannot_be_reached_costs_nothing(tmp_path: Path) -> None:
    """The metrics are in the records of a `JSONLinesHook`, from which they can be sent later."""
    hook = hook_of(MLflowTracker("digits", "first", tracking_uri="no-such-scheme://host"))
    path = tmp_path / "metrics.jsonl"
    await train(hook, ah.hooks.JSONLinesHook(path, ["total"]), runs=3)
    assert "no-such-scheme" in (hook.statistics().error or "")
    tracker = mlflow_tracker(tmp_path / "mlruns")
    for record in ah.hooks.read_records(path):
        step, time = record.pop("step"), record.pop("time")
        tracker.log_metrics(record, step, time)
    assert mlflow_points(tmp_path / "mlruns", "total") == [(1, 0), (2, 1), (3, 2)]


def test_a_tracker_names_what_it_writes_to() -> None:
    """In messages, by its `repr`."""
    assert repr(MLflowTracker("digits", "first")) == "MLflowTracker('digits', 'first')"
    assert repr(WandbTracker(project="digits")) == "WandbTracker('digits')"
    assert repr(TensorBoardTracker("/events")) == "TensorBoardTracker('/events')"
