"""TensorFlow's own hooks, unchanged, in a session over its graph."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import tensorflow

import aiohooks as ah
from aiohooks.adapters.tensorflow import TensorFlowHooks, TensorFlowSessionCreator

tf: Any = tensorflow.compat.v1

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])


async def train(*hooks: Any, runs: int = 10, creator: Any = None, fetches: Any = "train") -> ah.AsyncMonitoredSession:
    """Train until a hook stops it, or so many runs."""
    async with ah.AsyncMonitoredSession(TensorFlowSessionCreator(creator), [TensorFlowHooks(hooks)]) as session:
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
    hook = tf.train.LoggingTensorHook({"loss": "loss:0", "x": graph.get_tensor_by_name("x:0")}, every_n_iter=2, at_end=True)
    lines: list[str] = []
    formatted = tf.train.LoggingTensorHook(["loss:0"], every_n_iter=3, formatter=lambda values: lines.append(str(values)) or "")
    with caplog.at_level(logging.INFO, logger="tensorflow"):
        await train(hook, formatted, runs=4)
    logged = [record.getMessage() for record in caplog.records if "loss = 2.0" in record.getMessage()]
    assert len(logged) == 3
    assert "x = 1.0" in logged[0]
    assert len(lines) == 2


class Listener(tf.train.CheckpointSaverListener):  # type: ignore[misc]
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def begin(self) -> None:
        self.calls.append("begin")

    def before_save(self, session: Any, global_step_value: int) -> None:
        self.calls.append(("before", global_step_value))

    def after_save(self, session: Any, global_step_value: int) -> bool:
        self.calls.append(("after", global_step_value))
        return global_step_value >= 4

    def end(self, session: Any, global_step_value: int) -> None:
        self.calls.append(("end", global_step_value))


@pytest.mark.may_leak  # TensorFlow keeps the file of its events open
async def test_checkpoint_saver_hook(tmp_path: Path) -> None:
    """It saves, calls its listener, which stops the session, and the next session continues at the saved step and values."""
    listener = Listener()
    session = await train(
        tf.train.CheckpointSaverHook(str(tmp_path), save_steps=2, listeners=[listener]),
        creator=tf.train.ChiefSessionCreator(checkpoint_dir=str(tmp_path)),
    )
    assert session.stop_reason == "CheckpointSaverHook has requested it"
    assert listener.calls == [
        *("begin", ("before", 0), ("after", 0), ("before", 2), ("after", 2), ("before", 4), ("after", 4), ("end", 4))
    ]
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
    rates = [record.getMessage() for record in caplog.records if "global_step/sec" in record.getMessage()]
    assert len(rates) >= 2


class Writer:
    """Takes summaries and writes none."""

    def add_summary(self, summary: Any, step: int) -> None:
        pass


async def test_final_ops_hook() -> None:
    """It runs its operations at the end, while the session is open."""
    hook = tf.train.FinalOpsHook({"w": "w:0"})
    await train(hook, runs=3)
    assert hook.final_ops_values == {"w": 3.0}


async def test_global_step_waiter_hook() -> None:
    """It waits, in its thread, for a step that another part of the program makes meanwhile."""
    assign = tf.assign(tf.train.get_global_step(), 5)
    creator = TensorFlowSessionCreator()
    async with ah.AsyncMonitoredSession(creator, [TensorFlowHooks([tf.train.GlobalStepWaiterHook(5)])]) as session:
        raw = await session.run_step_fn(raw_session)
        run = asyncio.create_task(session.run("train"))
        await raw.run(assign)
        await run
        assert session.global_step.latest.step == 6


async def raw_session(step_context: Any) -> Any:
    return step_context.session
