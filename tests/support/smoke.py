"""Uses the library and its extras as a first program would: `python -P tests/support/smoke.py
NAME[=URL] ...`.

    core, uvloop, checkpoint, ...     the core, or an extra of pyproject.toml; redis needs the URL
                                      of a server

It imports the installed library, the extra and the standard library only: `python -m
tests.support.versions` and `.ci/packages` run it where nothing else is installed.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import aiohooks as ah

FOLDER = Path(tempfile.gettempdir())
"""Where a smoke program writes; replaced by a folder of its own."""


Program = Callable[..., Coroutine[Any, Any, None]]
PROGRAMS: dict[str, Program] = {}
"""By the name of the extra."""


def program(run: Program) -> Program:
    """Register a program."""
    PROGRAMS[run.__name__] = run
    return run


async def step(batch: float) -> dict[str, float]:
    """One step of a training."""
    return {"loss": 1.0 / batch}


async def train(
    *hooks: ah.SessionRunHook, source: Any = step, last_step: int = 3
) -> ah.MemoryStepStore:
    """Run some steps with hooks; return where they are counted."""
    steps = ah.MemoryStepStore()
    async with ah.AsyncMonitoredSession(
        source, [*hooks, ah.StopAtStepHook(last_step=last_step)], global_step=steps
    ) as session:
        while not session.should_stop():
            await session.run("loss", {"batch": session.global_step.latest.step + 1.0})
    return steps


@program
async def core() -> None:
    """A hook group, a session, and a wait for a step."""

    class Lifecycle:
        async def on_start(self, name: str) -> None: ...

    class Greeter(Lifecycle):
        greeted: list[str]

        async def on_start(self, name: str) -> None:
            await asyncio.sleep(0)
            self.greeted = [name]

    greeters = Greeter(), Greeter()
    async with ah.HookGroup(Lifecycle, greeters) as group:
        await group.hooks.on_start("you")
    assert [greeter.greeted for greeter in greeters] == [["you"], ["you"]]

    records = ah.hooks.JSONLinesHook(FOLDER / "records.jsonl", ["loss"])
    waiter = asyncio.create_task((steps := ah.MemoryStepStore()).wait_for(2))
    assert (await train(records)).latest.step == 3
    assert [record["step"] for record in ah.hooks.read_records(records.path)] == [1, 2, 3]
    await steps.advance(2)
    assert await waiter == 2
    await steps.aclose()


@program
async def uvloop() -> None:
    """`aiohooks.run` runs on uvloop; this runs in it."""
    assert type(asyncio.get_running_loop()).__module__.startswith("uvloop")
    await train()


@program
async def checkpoint() -> None:
    """A session saves, and another one continues from there."""
    import numpy as np

    graph = ah.Graph()
    graph.placeholder("batch")
    graph.variable("weights", np.zeros(3, np.float32))

    @graph.train_op(adds_to="weights")
    async def loss(batch: float) -> Any:
        return np.ones(3, np.float32)

    for last in (2, 4):
        creator = ah.ChiefSessionCreator(graph, checkpoint_dir=FOLDER / "checkpoints")
        async with ah.AsyncMonitoredSession(
            creator, [ah.CheckpointSaverHook(every=ah.Every(steps=1))]
        ) as session:
            for _ in range(2):
                await session.run("loss", {"batch": 1.0})
            assert session.global_step.latest.step == last
            if last == 2:
                weights = await session.run("weights", {"batch": 1.0})
                assert weights.tolist() == [last] * 3


@program
async def tensorflow() -> None:
    """A hook of TensorFlow stops a session over its graph."""
    import tensorflow

    from aiohooks.adapters.tensorflow import TensorFlowHooks, TensorFlowSessionCreator

    tf: Any = tensorflow.compat.v1
    with tf.Graph().as_default():
        train = tf.assign_add(tf.train.get_or_create_global_step(), 1)
        hooks = TensorFlowHooks([tf.train.StopAtStepHook(last_step=2)])
        async with ah.AsyncMonitoredSession(TensorFlowSessionCreator(), [hooks]) as session:
            while not session.should_stop():
                await session.run(train)
    assert session.global_step.latest.step == 2


@program
async def rich() -> None:
    """A progress bar is drawn."""
    file = io.StringIO()
    await train(ah.hooks.ProgressHook(["loss"], total=3, file=file))
    assert "3" in file.getvalue()


@program
async def tensorboard() -> None:
    """Values are written as events."""
    await train(ah.hooks.SummarySaverHook(FOLDER / "events", ["loss"], every=ah.Every(steps=1)))
    assert list((FOLDER / "events").iterdir())


@program
async def fsspec() -> None:
    """A state is copied to another file system, and restored from there."""
    mirror = FOLDER / "mirror"
    mirror.mkdir(parents=True)
    for name, restores in (("here", False), ("elsewhere", True)):
        async with ah.checkpoint.Saver(FOLDER / name, mirror=str(mirror)) as saver:
            if restores:
                restored = await saver.restore()
                assert restored is not None
                assert restored.state == {"weights": 1.5}
            else:
                await saver.save({"weights": 1.5}, 1)


@program
async def ray() -> None:
    """A step is counted, and waited for, in a cluster of this machine."""
    import ray as cluster

    cluster.init(
        num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
    try:
        await use_store("ray://")
    finally:
        cluster.shutdown()


async def use_store(url: str) -> None:
    async with ah.open_step_store(url, run=f"smoke-{os.getpid()}") as steps:
        waiter = asyncio.create_task(steps.wait_for(2, timeout=30))
        assert await steps.advance(2) == 2
        assert await waiter == 2


PROGRAMS["redis"] = use_store


@program
async def opentelemetry() -> None:
    """Runs are spans; without the SDK they go nowhere."""
    from aiohooks.adapters.opentelemetry import OpenTelemetryHook

    await train(OpenTelemetryHook())


@program
async def prometheus() -> None:
    """A session is in the exposition."""
    from prometheus_client import CollectorRegistry, generate_latest

    from aiohooks.adapters.prometheus import PrometheusHook

    seen: list[bytes] = []
    registry = CollectorRegistry()
    hook = PrometheusHook(registry=registry)

    class Scraper(ah.SessionRunHook):
        async def after_run(self, *_: object) -> None:
            seen.append(generate_latest(registry))

    await train(hook, Scraper())
    assert b"aiohooks" in seen[-1]


async def track(tracker: Any) -> None:
    """Log each step."""
    from aiohooks.adapters.trackers import TrackerHook

    await train(TrackerHook(tracker, ["loss"], every=ah.Every(steps=1), drain_secs=60))


@program
async def mlflow() -> None:
    """Metrics are logged to a folder."""
    from aiohooks.adapters.trackers.mlflow import MLflowTracker

    os.environ |= {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    tracker = MLflowTracker("smoke", "first", tracking_uri=(FOLDER / "mlruns").as_uri())
    await track(tracker)
    assert list((FOLDER / "mlruns").rglob("loss"))


@program
async def wandb() -> None:
    """Metrics are logged to a folder."""
    from aiohooks.adapters.trackers.wandb import WandbTracker

    os.environ |= {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_CONSOLE": "off",
        "WANDB_ERROR_REPORTING": "false",
    }
    tracker = WandbTracker(project="smoke", dir=str(FOLDER))
    await track(tracker)
    assert list(FOLDER.rglob("*.wandb"))  # noqa: ASYNC240 - nothing else runs here


@program
async def asgi() -> None:
    """A service replies that its session is in order, without a server between."""
    from aiohooks.adapters.asgi import SessionService

    async def until_stopped(session: ah.AsyncMonitoredSession) -> None:
        await session.coord.wait_for_stop()

    service = SessionService(ah.AsyncMonitoredSession(step, name="smoke"), until_stopped)
    sent: list[Any] = []
    scope: Any = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": "/health",
        "raw_path": b"/health",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"127.0.0.1")],
        "client": ("127.0.0.1", 50_000),
        "server": ("127.0.0.1", 8000),
    }

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async with service.lifespan():
        await service(scope, receive, send)
    assert sent[0]["status"] == 200, sent
    assert "state" in json.loads(sent[1]["body"]), sent


def main(arguments: Sequence[str]) -> None:
    """Run the programs of these names in turn, each in a folder of its own."""
    global FOLDER
    for argument in arguments:
        name, _, url = argument.partition("=")
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            FOLDER = Path(folder)
            ah.run(PROGRAMS[name], *([url] if url else []))
        print(f"{name}: in order")


if __name__ == "__main__":
    main(sys.argv[1:])
