"""TensorFlow's own hooks, each of those in the installed package, unchanged, in a session over its
graph.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import json
import logging
import os
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow

import aiohooks as ah
from aiohooks.adapters.tensorflow import TensorFlowHooks, TensorFlowSessionCreator
from tests.support.store_servers import free_port

tf: Any = tensorflow.compat.v1

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])


async def train(
    *hooks: Any, runs: int = 10, creator: Any = None, fetches: Any = "train", **options: Any
) -> ah.AsyncMonitoredSession:
    """Train until a hook stops it, or so many runs."""
    async with ah.AsyncMonitoredSession(
        TensorFlowSessionCreator(creator), [TensorFlowHooks(hooks)], **options
    ) as session:
        for _ in range(runs):
            if not session.should_stop():
                await session.run(fetches)
    return session


async def test_stop_at_step_hook() -> None:
    """It stops the session at its step, which is that of TensorFlow's graph."""
    session = await train(tf.train.StopAtStepHook(last_step=4))
    assert session.global_step.latest.step == 4
    assert session.stop_reason == "StopAtStepHook has requested it"


async def test_logging_tensor_hook(caplog: pytest.LogCaptureFixture) -> None:
    """It logs the values that it fetches: by name, by tensor, and through a formatter."""
    graph = tf.get_default_graph()
    hook = tf.train.LoggingTensorHook(
        {"loss": "loss:0", "x": graph.get_tensor_by_name("x:0")}, every_n_iter=2, at_end=True
    )
    lines: list[str] = []
    formatted = tf.train.LoggingTensorHook(
        ["loss:0"], every_n_iter=3, formatter=lambda values: lines.append(str(values)) or ""
    )
    with caplog.at_level(logging.INFO, logger="tensorflow"):
        await train(hook, formatted, runs=4)
    logged = [
        record.getMessage() for record in caplog.records if "loss = 2.0" in record.getMessage()
    ]
    assert len(logged) == 3
    assert "x = 1.0" in logged[0]
    assert len(lines) == 2


class Listener(tf.train.CheckpointSaverListener):  # type: ignore[misc]
    """Notes its calls, each with the step, and stops after a save."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        for call in ("begin", "before_save", "after_save", "end"):
            setattr(self, call, functools.partial(self.note, call))

    def note(self, call: str, *args: Any) -> bool:
        self.calls.append((call, *args[1:]))
        return call == "after_save" and args[1] >= 4


@pytest.mark.may_leak  # TensorFlow keeps the file of its events open
async def test_checkpoint_saver_hook(tmp_path: Path) -> None:
    """It saves, calls its listener, which stops the session, and the next session continues at the
    saved step and values.
    """
    listener = Listener()
    session = await train(
        tf.train.CheckpointSaverHook(str(tmp_path), save_steps=2, listeners=[listener]),
        creator=tf.train.ChiefSessionCreator(checkpoint_dir=str(tmp_path)),
    )
    assert session.stop_reason == "CheckpointSaverHook has requested it"
    saves = [(call, step) for step in (0, 2, 4) for call in ("before_save", "after_save")]
    assert listener.calls == [("begin",), *saves, ("end", 4)]
    creator = TensorFlowSessionCreator(tf.train.ChiefSessionCreator(checkpoint_dir=str(tmp_path)))
    async with ah.AsyncMonitoredSession(creator, []) as session:
        assert session.global_step.latest.step == 4
        await session.run("train")
        assert await session.run("w:0") == 5.0


@pytest.mark.may_leak
async def test_profiler_hook(tmp_path: Path) -> None:
    """It asks for a full trace by its options, and gets the metadata with it."""
    await train(tf.train.ProfilerHook(save_steps=2, output_dir=str(tmp_path)), runs=5)
    timelines = [name for name in sorted(os.listdir(tmp_path)) if name.startswith("timeline-")]
    assert len(timelines) >= 2
    with open(tmp_path / timelines[0], encoding="utf-8") as file:  # noqa: ASYNC230
        assert json.load(file)["traceEvents"]


async def test_nan_tensor_hook() -> None:
    """Its error fails the session: it comes out as it is, with the hook's name."""
    tf.divide(0.0, tf.get_default_graph().get_tensor_by_name("x:0") - 1.0, name="nan")
    with pytest.raises(tf.train.NanLossDuringTrainingError) as caught:
        await train(tf.train.NanTensorHook("nan:0"))
    assert "raised by NanTensorHook.after_run" in caught.value.__notes__


async def test_step_counter_hook(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It logs the rate of steps."""
    with caplog.at_level(logging.INFO, logger="tensorflow"):
        await train(tf.train.StepCounterHook(every_n_steps=2, summary_writer=Writer()), runs=7)
    rates = [
        record.getMessage() for record in caplog.records if "global_step/sec" in record.getMessage()
    ]
    assert len(rates) >= 2


class Writer:
    """Keeps summaries, and takes whatever else is written."""

    def __init__(self) -> None:
        self.written: list[tuple[Any, int]] = []

    def add_summary(self, summary: Any, step: int) -> None:
        self.written.append((summary, step))

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


async def test_final_ops_hook() -> None:
    """It runs its operations at the end, while the session is open."""
    hook = tf.train.FinalOpsHook({"w": "w:0"})
    await train(hook, runs=3)
    assert hook.final_ops_values == {"w": 3.0}


async def test_global_step_waiter_hook() -> None:
    """It waits, in its thread, for a step that another part of the program makes meanwhile."""
    assign = tf.assign(tf.train.get_global_step(), 5)
    creator = TensorFlowSessionCreator()
    async with ah.AsyncMonitoredSession(
        creator, [TensorFlowHooks([tf.train.GlobalStepWaiterHook(5)])]
    ) as session:
        raw = await session.run_step_fn(raw_session)
        run = asyncio.create_task(session.run("train"))
        await raw.run(assign)
        await run
        assert session.global_step.latest.step == 6


async def raw_session(step_context: Any) -> Any:
    return step_context.session


async def test_summary_saver_hook() -> None:
    """It fetches the summaries of its steps and writes them."""
    writer = Writer()
    summary = tf.summary.scalar("loss", tf.get_default_graph().get_tensor_by_name("loss:0"))
    await train(
        tf.train.SummarySaverHook(save_steps=2, summary_writer=writer, summary_op=summary), runs=4
    )
    summaries = [
        (tf.Summary.FromString(text), step)
        for text, step in writer.written
        if isinstance(text, bytes)
    ]
    assert [(written.value[0].simple_value, step) for written, step in summaries] == [
        (2.0, 1),
        (2.0, 3),
    ]


async def test_feed_fn_hook() -> None:
    """What it feeds is fed in each run."""
    final = tf.train.FinalOpsHook("w:0")
    await train(tf.train.FeedFnHook(lambda: {"x:0": 3.0}), final, runs=4)
    assert final.final_ops_values == 12.0


async def test_multi_step_stop_at_step_hook() -> None:
    """It says by a variable how many steps the next run is to make, which it sets between the
    runs.
    """
    hooks = source("training.basic_session_run_hooks")
    steps = hooks.get_or_create_steps_per_run_variable()
    several = tf.assign_add(tf.train.get_global_step(), tf.cast(steps, tf.int64))
    session = await train(
        hooks._MultiStepStopAtStepHook(last_step=5, steps_per_run=2), fetches=several
    )
    assert session.global_step.latest.step == 5
    assert session.stop_reason == "_MultiStepStopAtStepHook has requested it"


@pytest.mark.parametrize("name", ["_StopAfterNEvalsHook", "_MultiStepStopAfterNEvalsHook"])
async def test_stop_after_n_evals_hook(name: str) -> None:
    """It counts evaluations, and ends the session after so many."""
    evaluation = source("training.evaluation")
    evaluated = evaluation._get_or_create_eval_step()
    updates = [tf.assign_add(evaluated, 1)]
    hook = getattr(evaluation, name)(2)
    hook._set_evals_completed_tensor(evaluation._get_latest_eval_step_value(updates))
    final = tf.train.FinalOpsHook(evaluated.read_value())
    session = await train(hook, final, fetches=updates)
    assert final.final_ops_values == 2
    assert session.stop_reason == f"{name} has requested it"


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # its thread waits for the next gradient
async def test_sync_replicas_optimizer_hook() -> None:
    """It initialises the optimizer and starts a queue, whose thread applies the gradients."""
    optimizer = tf.train.SyncReplicasOptimizer(
        tf.train.GradientDescentOptimizer(0.25), replicas_to_aggregate=1
    )
    v = tf.get_variable("v", initializer=1.0, use_resource=False)
    minimize = optimizer.minimize(v * v, global_step=tf.train.get_global_step())
    hook, final = optimizer.make_session_run_hook(is_chief=True), tf.train.FinalOpsHook("v:0")
    assert type(hook).__name__ == "_SyncReplicasOptimizerHook"
    await train(hook, final, runs=3, fetches=minimize, stop_grace_period_secs=0.1)
    assert final.final_ops_values < 1.0
    for thread in threading.enumerate():
        if "QueueRunner" in thread.name:
            thread.join()


async def test_cloud_tpu_preempted_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread asks for the state of the TPU, and is joined at the end; there is no TPU here."""
    preempted_hook = source("tpu.preempted_hook")
    asked, sleeping = threading.Event(), threading.Event()

    class Client:
        def recoverable(self) -> bool:
            asked.set()
            return True

    def sleep(secs: float) -> None:
        sleeping.wait(0.01)

    monkeypatch.setattr(preempted_hook.tpu_cluster_resolver, "is_running_in_gce", lambda: True)
    monkeypatch.setattr(preempted_hook, "time", SimpleNamespace(sleep=sleep))
    await train(
        preempted_hook.CloudTPUPreemptedHook(SimpleNamespace(_cloud_tpu_client=Client())), runs=2
    )
    assert asked.is_set()


@pytest.mark.may_leak
async def test_dumping_debug_hook(tmp_path: Path) -> None:
    """It writes the tensors of each run into a folder."""
    await train(source("debug.wrappers.hooks").DumpingDebugHook(str(tmp_path / "dump")), runs=2)
    runs = list((tmp_path / "dump").iterdir())
    assert len(runs) == 2
    assert all(list(run.rglob("AssignAdd*")) for run in runs)


@pytest.mark.may_leak
async def test_local_cli_debug_hook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its command line is asked before and after each run, and shows the tensors of the run."""
    prompts: list[str] = []
    monkeypatch.setattr("builtins.input", lambda prompt: prompts.append(prompt) or "run")
    hook = source("debug.wrappers.hooks").LocalCLIDebugHook(
        dump_root=str(tmp_path / "dump"), config_file_path=str(tmp_path / "config")
    )
    await train(hook, runs=2)
    assert prompts == ["tfdbg> "] * 3
    assert "run-end: run #2: 1 fetch; 0 feeds" in capsys.readouterr().out


@pytest.mark.may_leak
@pytest.mark.parametrize("name", ["GrpcDebugHook", "TensorBoardDebugHook"])
async def test_grpc_debug_hooks(name: str) -> None:
    """They send the graph of each run, and what is watched, to a server."""
    server = source("debug.lib.grpc_debug_server")
    hooks = source("debug.wrappers.hooks")
    received: set[str] = set()

    class Stream(server.EventListenerBaseStreamHandler):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            for event in ("core_metadata_event", "graph_def", "value_event"):
                setattr(self, f"on_{event}", lambda *_, event=event: received.add(event))

    class Servicer(server.EventListenerBaseServicer):  # type: ignore[misc, name-defined]
        def SendTracebacks(self, request: Any, context: Any) -> Any:
            received.add("traceback")
            return server.debug_service_pb2.EventReply()

        SendSourceFiles = SendTracebacks

    port = free_port()
    servicer = Servicer(port, Stream)
    thread = threading.Thread(target=servicer.run_server)
    thread.start()
    try:
        if name == "GrpcDebugHook":
            hook = hooks.GrpcDebugHook(
                f"localhost:{port}", watch_fn=lambda fetches, feeds: hooks.framework.WatchOptions()
            )
        else:
            hook = hooks.TensorBoardDebugHook(f"localhost:{port}")
        await train(hook, runs=2)
    finally:
        servicer.stop_server().wait()
        thread.join()
    assert received == {
        "core_metadata_event",
        "graph_def",
        "value_event" if name == "GrpcDebugHook" else "traceback",
    }


async def test_each_hook_that_tensorflow_has_is_run() -> None:
    """Each class of a hook in the source of the installed package is in a test of this file."""
    found: set[str] = set()
    for file in Path(tensorflow.__file__).parent.glob("python/**/*.py"):
        text = file.read_text(encoding="utf-8")
        if "SessionRunHook" in text:
            found |= set(re.findall(r"^class (\w+)\((?:\w+\.)?\w*Hook\)", text, re.MULTILINE))
    tests = inspect.getsource(sys.modules[__name__])
    assert len(found) >= 17
    assert [name for name in sorted(found) if not re.search(rf"\b{name}\b", tests)] == []


def source(module: str) -> Any:
    """Import a module of TensorFlow that `tf.compat.v1` does not have."""
    return importlib.import_module(f"tensorflow.python.{module}")
