"""Rows about other engines, where they are installed: pytorch-ignite and TensorFlow's
MonitoredSession.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohooks as ah
from tests.benchmarks.measure import Counts, Figure, Lane, Setup, compared, imported, repeated
from tests.benchmarks.rows_hooks import HOOKS, NoOpHook


async def nothing(batch: int) -> None:
    """The step."""


def _stepping(session: ah.AsyncMonitoredSession) -> Lane:
    return repeated(partial(session.run, "nothing", {"batch": 1}))


@asynccontextmanager
async def against_ignite(counts: Counts) -> AsyncIterator[Setup]:
    """An iteration of pytorch-ignite's engine, with handlers of one event and of two."""
    engines = imported("pytorch-ignite", "ignite.engine")
    completed, started = engines.Events.ITERATION_COMPLETED, engines.Events.ITERATION_STARTED
    async with ah.AsyncMonitoredSession(nothing, [NoOpHook() for _ in range(HOOKS)]) as session:
        yield Setup(
            {
                "aiohooks": _stepping(session),
                "one event": _iterating(engines.Engine, completed),
                "two events": _iterating(engines.Engine, completed, started),
            },
            [
                Figure(
                    "a run with 5 no-op hooks / an iteration of pytorch-ignite with 5 handlers",
                    1.0,
                    "aiohooks",
                    "one event",
                ),
                Figure(
                    "the same / 5 handlers before and 5 after the iteration",
                    1.0,
                    "aiohooks",
                    "two events",
                ),
            ],
        )


def _iterating(new_engine: Callable[[Callable[..., Any]], Any], *events: Any) -> Lane:
    engine = new_engine(lambda engine, batch: None)
    for event in events:
        for _ in range(HOOKS):
            engine.add_event_handler(event, lambda engine: None)

    def secs_of(iterations: int) -> float:
        began = time.perf_counter()
        engine.run(range(iterations))
        return time.perf_counter() - began

    async def lane(times: int) -> float:
        beginning_and_end = secs_of(1)  # of an epoch: not part of an iteration
        return secs_of(times + 1) - beginning_and_end

    return lane


@asynccontextmanager
async def against_tensorflow(counts: Counts) -> AsyncIterator[Setup]:
    """A run of TensorFlow's MonitoredSession, whose train operation only adds to the global
    step.
    """
    tf = _tensorflow()
    async with ah.AsyncMonitoredSession(nothing, [NoOpHook() for _ in range(HOOKS)]) as session:
        with tf.Graph().as_default():
            train = tf.assign_add(tf.train.get_or_create_global_step(), 1)
            with tf.train.MonitoredSession(hooks=_no_op_hooks(tf)) as original:
                yield compared(
                    "a run with 5 no-op hooks / TensorFlow's MonitoredSession with 5 no-op hooks",
                    0.2,
                    _stepping(session),
                    _running(original, train),
                )


@asynccontextmanager
async def tensorflow_hooks(counts: Counts) -> AsyncIterator[Setup]:
    """Five no-op hooks of TensorFlow over its graph, in a session of this library and in its
    own.
    """
    tf = _tensorflow()
    adapter = importlib.import_module("aiohooks.adapters.tensorflow")
    with tf.Graph().as_default():
        empty = tf.assign_add(tf.train.get_or_create_global_step(), 1)
        matrix = tf.random.normal((1000, 1000))
        step = tf.group(tf.matmul(matrix, matrix), empty)
        hooks = adapter.TensorFlowHooks(_no_op_hooks(tf))
        async with ah.AsyncMonitoredSession(adapter.TensorFlowSessionCreator(), [hooks]) as session:
            with tf.train.MonitoredSession(hooks=_no_op_hooks(tf)) as original:
                yield compared(
                    "a step over TensorFlow's graph with 5 no-op hooks of TensorFlow / in its"
                    " MonitoredSession",
                    1.2,
                    repeated(partial(session.run, step)),
                    _running(original, step),
                    most_times=200,
                )


def _tensorflow() -> Any:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    tf = imported("tensorflow", "tensorflow").compat.v1
    tf.logging.set_verbosity(tf.logging.ERROR)
    return tf


def _no_op_hooks(tf: Any) -> list[Any]:
    class NoOp(tf.train.SessionRunHook):  # type: ignore[misc]
        def before_run(self, run_context: Any) -> None:
            pass

        def after_run(self, run_context: Any, run_values: Any) -> None:
            pass

    return [NoOp() for _ in range(HOOKS)]


def _running(session: Any, train: Any) -> Lane:
    async def lane(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            session.run(train)
        return time.perf_counter() - began

    return lane
