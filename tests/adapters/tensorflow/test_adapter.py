"""What hooks of TensorFlow see in a session of this library, beside what they see in TensorFlow's
own.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow

import aiohooks as ah
from aiohooks.adapters.tensorflow import (
    AbortedError,
    OutOfRangeError,
    TensorFlowHooks,
    TensorFlowSession,
    TensorFlowSessionCreator,
    UnavailableError,
)
from aiohooks.testing import RecordingHook, check_hook, hook_checks
from tests.support.checks import invalid
from tests.support.sessions import NO_BACKOFF, doubling

tf: Any = tensorflow.compat.v1

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])


class Recording(tf.train.SessionRunHook):  # type: ignore[misc]
    """Records what it gets, and does at its calls what a test gives."""

    def __init__(self, name: str = "hook", record: list[Any] | None = None, **calls: Any) -> None:
        self.name = name
        self.record: list[Any] = [] if record is None else record
        self.calls = calls
        self.runs = 0
        self.graph: Any = None

    def note(self, phase: str, args: tuple[Any, ...], *details: Any) -> Any:
        self.record.append((self.name, phase, *details))
        return self.calls[phase](*args) if phase in self.calls else None

    def begin(self) -> None:
        self.graph = tf.get_default_graph()
        self.note("begin", (), self.graph.finalized)

    def after_create_session(self, *args: Any) -> None:
        session, coord = args
        self.note(
            "after_create_session",
            args,
            type(session),
            isinstance(coord, tf.train.Coordinator),
            self.is_current(session),
        )

    def before_run(self, context: Any) -> Any:
        self.runs += 1
        is_current = self.is_current(context.session)
        return self.note(
            "before_run", (context,), *context.original_args, context.stop_requested, is_current
        )

    def after_run(self, context: Any, values: Any) -> None:
        options = values.options
        merged = (
            options.trace_level,
            options.timeout_in_ms,
            options.report_tensor_allocations_upon_oom,
        )
        traced = bool(values.run_metadata.step_stats.dev_stats)
        self.note(
            "after_run", (context, values), values.results, merged, traced, context.stop_requested
        )

    def end(self, session: Any) -> None:
        self.note("end", (session,), self.is_current(session), float(session.run("w:0")))

    def is_current(self, session: Any) -> bool:
        return bool(tf.get_default_graph() is self.graph is session.graph and self.graph.finalized)

    def phases(self) -> list[str]:
        return [phase for name, phase, *_ in self.record if name == self.name]


def session_of(*hooks: Any, beside: Any = (), **options: Any) -> ah.AsyncMonitoredSession:
    """Return a session over the current graph, with hooks of TensorFlow and others."""
    creator = TensorFlowSessionCreator(options.pop("creator", None))
    return ah.AsyncMonitoredSession(
        creator, [TensorFlowHooks(hooks), *beside], recovery=NO_BACKOFF, **options
    )


async def train(*hooks: Any, feed_dict: Any = None, **options: Any) -> None:
    """Make one run."""
    async with session_of(*hooks, **options) as session:
        await session.run("train", feed_dict)


class Pair(NamedTuple):
    """Fetches with a shape."""

    first: Any
    rest: Any


def asking(record: list[Any]) -> list[Recording]:
    """Make hooks that ask for all kinds of things, share a record, and of which the second stops in
    its third run.
    """
    args = tf.train.SessionRunArgs
    x = tf.get_default_graph().get_tensor_by_name("x:0")
    trace = tf.RunOptions(
        trace_level=tf.RunOptions.SOFTWARE_TRACE,
        timeout_in_ms=60_000,
        report_tensor_allocations_upon_oom=True,
    )

    def stop(run_context: Any, _: Any) -> None:
        if second.runs == 3:
            run_context.request_stop()

    first = Recording(
        "first",
        record,
        before_run=lambda _: args({"loss": "loss:0", "nested": Pair(x, [x, ("train", x)])}),
    )
    second = Recording(
        "second",
        record,
        before_run=lambda _: args("loss:0", {x: 7.0}, tf.RunOptions(timeout_in_ms=5_000)),
        after_run=stop,
    )
    third = Recording("third", record, before_run=lambda _: args(None, options=trace))
    return [first, second, third, Recording("silent", record)]


async def test_hooks_see_what_they_see_in_tensorflow() -> None:
    """All calls and their arguments are those of TensorFlow's MonitoredSession: order, results,
    feeds, options, metadata.
    """
    wanted: list[Any] = []
    with tf.train.MonitoredSession(hooks=asking(wanted)) as session:
        while not session.should_stop():
            session.run(["train", "loss:0"])
    record: list[Any] = []
    async with session_of(*asking(record)) as ours:
        while not ours.should_stop():
            assert await ours.run(["train", "loss:0"]) == [None, 14.0]
    assert len(record) == len(wanted) == 4 * (1 + 1 + 3 * 2 + 1)
    for ours_noted, theirs_noted in zip(record, wanted, strict=True):
        assert ours_noted == theirs_noted
    assert ours.stop_reason == "Recording has requested it"


async def test_options_and_metadata_of_the_caller() -> None:
    """The caller's options are merged with those of the hooks, which get the metadata object that
    the caller gives.
    """
    seen: list[Any] = []
    hook = Recording(
        before_run=lambda _: tf.train.SessionRunArgs(
            None, options=tf.RunOptions(timeout_in_ms=90_000)
        ),
        after_run=lambda _, values: seen.append(values.run_metadata),
    )
    metadata = tf.RunMetadata()
    options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE, timeout_in_ms=1_000)
    async with session_of(hook) as session:
        await session.run("train", options={"run_options": [options], "run_metadata": [metadata]})
    assert seen[0] is metadata
    assert metadata.step_stats.dev_stats
    [merged] = [noted[3] for noted in hook.record if noted[1] == "after_run"]
    assert merged == (tf.RunOptions.FULL_TRACE, 90_000, False)
    assert options.timeout_in_ms == 1_000


@pytest.mark.parametrize("by_hook", [False, True])
async def test_the_end_of_the_input_is_a_clean_end(by_hook: bool) -> None:
    """TensorFlow's OutOfRangeError, out of a run or a hook, ends the session cleanly."""
    batch = tf.data.make_one_shot_iterator(tf.data.Dataset.range(3)).get_next()
    seen: list[int] = []

    def read(context: Any, _: Any) -> None:
        while by_hook:
            seen.append(context.session.run(batch))

    hook = Recording(after_run=read)
    async with session_of(hook) as session:
        while True:
            seen.append((await session.run({"batch": batch, "train": "train"}))["batch"])
    assert seen == ([1, 2] if by_hook else [0, 1, 2])
    assert hook.phases()[-1] == "end"


def failing(phase: str, error: Exception, at: int) -> Recording:
    """Make a hook that raises the error in its n-th run."""

    def fail(*_: Any) -> None:
        if hook.runs == at:
            raise error

    hook = Recording()
    hook.calls[phase] = fail
    return hook


@pytest.mark.may_leak  # TensorFlow keeps the file of its events open
@pytest.mark.parametrize("phase", ["before_run", "after_run"])
@pytest.mark.parametrize("kind", [tf.errors.AbortedError, tf.errors.UnavailableError])
async def test_it_recovers_from_the_checkpoint(tmp_path: Path, kind: Any, phase: str) -> None:
    """After AbortedError and UnavailableError TensorFlow restores its checkpoint, and the global
    step is set back.
    """
    folder = str(tmp_path)
    hook = failing(phase, kind(None, None, "lost"), at=6)
    saver = tf.train.CheckpointSaverHook(folder, save_steps=2)
    steps: list[tuple[int, int, float]] = []
    async with session_of(
        hook, saver, creator=tf.train.ChiefSessionCreator(checkpoint_dir=folder)
    ) as session:
        for _ in range(8):
            value = (await session.run({"w": "w:0", "train": "train"}))["w"]
            steps.append((*session.global_step.latest, float(value)))
        assert session.status().recoveries == 1
    assert [step for _, step, _ in steps] == [1, 2, 3, 4, 5, 5, 6, 7]
    assert [epoch for epoch, _, _ in steps] == [1, 1, 1, 1, 1, 2, 2, 2]
    assert steps[5][2] in (
        4.0,
        5.0,
    )  # read before or after the update of the same run, which was restored to step 4
    assert hook.phases().count("after_create_session") == 2
    assert hook.phases().count("end") == 1


async def test_errors_are_those_of_both() -> None:
    """An error is one of TensorFlow and of this library, has TensorFlow's message, and can be
    pickled.
    """
    for kind in (OutOfRangeError, AbortedError, UnavailableError):
        error: Any = kind(None, None, "over there")
        ours, theirs = kind.__bases__
        code = error.error_code
        assert isinstance(error, ours)
        assert isinstance(error, theirs)
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.error_code) == (kind, "over there", code)


async def test_end_of_every_hook_is_called() -> None:
    """An error in one `end` takes it from no other hook; several come as a group."""

    def fail(_: Any) -> None:
        raise OSError("disk full")

    hooks = [Recording(end=fail), Recording(), Recording(end=fail)]
    with pytest.raises(ExceptionGroup) as caught:
        await train(*hooks)
    assert [str(error) for error in caught.value.exceptions] == ["disk full", "disk full"]
    assert all(hook.phases()[-1] == "end" for hook in hooks)
    with pytest.raises(OSError, match="disk full"):
        await train(*hooks[:2])


class WithThread:
    """A hook with a thread that its coordinator knows, as input pipelines have them."""

    def __init__(self, work: Callable[[Any], None]) -> None:
        self.hook = Recording(after_create_session=self.start)
        self.work = work
        self.ended = 0

    def start(self, session: Any, coord: Any) -> None:
        def run() -> None:
            with coord.stop_on_exception():
                self.work(coord)
            self.ended += 1

        thread = threading.Thread(target=run)
        coord.register_thread(thread)
        thread.start()


async def test_threads_learn_of_the_end_and_are_joined() -> None:
    """`should_stop` and `wait_for_stop` of TensorFlow's coordinator end the threads of hooks, which
    are waited for.
    """
    threads = WithThread(lambda coord: coord.wait_for_stop())
    await train(threads.hook)
    assert threads.ended == 1
    async with session_of(threads.hook) as session:
        session.request_stop("by the caller")
    assert threads.ended == 2


@pytest.mark.parametrize("kind", [OSError, tf.errors.AbortedError])
async def test_the_error_of_a_thread_is_that_of_the_session(kind: Any) -> None:
    """It ends a wait and is raised once, the same object, without `end`; or a new session has a
    coordinator and threads.
    """
    errors = [
        OSError("the reader failed")
        if kind is OSError
        else kind(None, None, "the reader was moved")
    ]
    (error,) = errors

    def work(coord: Any) -> None:
        if errors:
            raise errors.pop()
        coord.wait_for_stop()

    threads = WithThread(work)
    with (
        pytest.raises(OSError, match="the reader failed")
        if kind is OSError
        else contextlib.nullcontext() as caught
    ):
        async with session_of(threads.hook) as session:
            while not session.status().recoveries:
                await session.run("train")
                await session.until(asyncio.sleep(0))
    if caught is not None:
        assert caught.value is error
        assert not any("and then" in note for note in error.__notes__)
        assert "end" not in threads.hook.phases()
    else:
        assert threads.hook.phases().count("after_create_session") == threads.ended == 2


@pytest.mark.filterwarnings("ignore")
async def test_queue_runners_are_started_and_joined() -> None:
    """Queue runners of the graph feed the runs, and the end of their queue is a clean end."""
    item = tf.train.input_producer([1, 2, 3], num_epochs=1, shuffle=False).dequeue()
    seen: list[int] = []
    async with session_of() as session:
        while True:
            seen.append(int(await session.run(item)))
    assert seen == [1, 2, 3]


async def test_the_event_loop_continues_during_a_run() -> None:
    """A run that blocks waits in a thread: here for what the event loop does. A cancel waits for
    it, and then passes.
    """
    started, go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def wait() -> Any:
        loop.call_soon_threadsafe(started.set)
        go.wait()
        return np.float32(1.0)

    blocked = tf.py_func(wait, [], tf.float32)
    async with session_of() as session:
        run = asyncio.create_task(session.run(blocked))
        await started.wait()
        go.set()
        assert await run == 1.0

        started.clear()
        go.clear()
        run = asyncio.create_task(session.run([blocked, "train"]))
        await started.wait()
        run.cancel()
        await asyncio.sleep(0)
        assert not run.done()
        go.set()
        await asyncio.wait([run])
        assert run.cancelled()


async def test_the_graph_is_finalized_while_it_is_used() -> None:
    """`begin` may add operations; then the graph is finalized, and after the session it can be
    added to again.
    """
    graph = tf.get_default_graph()
    added: list[Any] = []
    hook = Recording(
        begin=lambda: added.append(tf.constant(3.0, name="three")),
        before_run=lambda _: tf.train.SessionRunArgs(added[0]),
    )
    async with session_of(hook) as session:
        assert graph.finalized
        await session.run("train")
    assert not graph.finalized
    assert [noted[2] for noted in hook.record if noted[1] == "after_run"] == [3.0]
    graph.finalize()
    async with session_of() as session:
        await session.run("train")
    assert graph.finalized


async def test_feeds_do_not_conflict() -> None:
    """Two hooks that feed a tensor, or a hook and the caller, are refused, by name and by
    tensor.
    """
    x = tf.get_default_graph().get_tensor_by_name("x:0")

    def feeding(key: Any) -> Recording:
        return Recording(before_run=lambda _: tf.train.SessionRunArgs(None, {key: 2.0}))

    await train(feeding(x))
    with pytest.raises(
        ah.errors.FeedConflictError, match="Recording feeds x:0, which another hook feeds as well"
    ):
        await train(feeding(x), feeding("x:0"))
    with pytest.raises(
        ah.errors.FeedConflictError, match=r"'x:0' by TensorFlowHooks.before_run and the caller"
    ):
        await train(feeding(x), feed_dict={"x:0": 3.0})


async def test_hooks_of_this_library_work_beside_them() -> None:
    """They fetch and feed by TensorFlow's names, and get raw runs of the session."""
    sparse = tf.sparse.from_dense([0.0, 3.0])
    losses: list[float] = []
    raw: list[Any] = []

    class Reads(ah.SessionRunHook):
        async def after_run(self, run_context: Any, run_values: Any) -> None:
            assert isinstance(run_context.session, TensorFlowSession)
            raw.append(
                await run_context.session.run(
                    ["w:0", run_context.session.graph.global_step, sparse]
                )
            )

    async def record(context: ah.SessionRunContext, values: ah.SessionRunValues) -> None:
        losses.append(values.results)

    recorder = ah.hook("after_run", fetches="loss:0")(record)
    async with session_of(beside=[recorder, Reads(), ah.StopAtStepHook(last_step=2)]) as session:
        async for loss in session.steps(
            ["loss:0", "train"], feeds=[{"x:0": 1.0}, {"x:0": 2.0}, {"x:0": 3.0}]
        ):
            assert loss[0] in (2.0, 4.0)
    assert losses == [2.0, 4.0]
    assert [(w, step) for w, step, _ in raw] == [(1.0, 1), (3.0, 2)]
    assert list(raw[0][2].values) == [3.0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            ("loss", 2.0),
            ("loss:0", 2.0),
            ("train", None),
            ("w", 0.0),
            ("resource", 5.0),
            ("local", 6.0),
        ],
        *[("global_step", 0), ("scope/count", 7), ("table", None)],
    ],
)
async def test_a_name_means_its_value(name: str, value: object) -> None:
    """The tensor of an operation with one output, a variable, or the global step; None only where
    there is no value.
    """
    tf.get_variable("resource", initializer=5.0, use_resource=True)
    tf.get_variable(
        "local", initializer=6.0, use_resource=True, collections=[tf.GraphKeys.LOCAL_VARIABLES]
    )
    with tf.name_scope("scope"):
        tf.constant(7, name="count")
    tf.raw_ops.HashTableV2(key_dtype=tf.string, value_dtype=tf.int64, name="table")
    asks = RecordingHook(fetches=name)
    async with session_of(beside=[asks]) as session:
        assert await session.run(name) == value
    assert asks.results == [value]


@pytest.mark.parametrize("name", ["loss", "loss:0"])
async def test_a_loss_that_is_nan_is_found_by_name(name: str) -> None:
    """A hook of this library gets the value, however the loss is named."""
    with pytest.raises(ah.errors.NanLossDuringTrainingError, match=f"'{name}' = nan"):
        await train(feed_dict={"x": float("nan")}, beside=[ah.NanHook(name)])


async def test_what_does_not_fit_is_refused() -> None:
    """Names that are unknown or of several tensors, operations of this library, and hooks of
    TensorFlow in another session.
    """
    tf.split(tf.constant([1.0, 2.0]), 2, name="halves")
    async with session_of() as session:
        with pytest.raises(ah.errors.FetchError, match="'lost' is not in the graph of TensorFlow"):
            await session.run("lost")
        with pytest.raises(
            ah.errors.FetchError,
            match="'halves' is an operation with 2 outputs; name one, such as 'halves:0'",
        ):
            await session.run("halves")
        with pytest.raises(ah.errors.GraphError, match="add an operation of TensorFlow"):
            session.graph.placeholder("y")
    with pytest.raises(
        ah.errors.InvalidHookError, match="for the session of a TensorFlowSessionCreator"
    ):
        await doubling(TensorFlowHooks([Recording()])).__aenter__()


@pytest.mark.parametrize("check", hook_checks())
async def test_it_is_a_good_hook(check: str) -> None:
    """`TensorFlowHooks` passes the conformance suite of hooks, in sessions over a TensorFlow
    graph.
    """
    ask = tf.train.SessionRunArgs("loss:0", {"x:0": 2.0})
    await check_hook(
        lambda: TensorFlowHooks([Recording(before_run=lambda _: ask), Recording()]),
        check,
        make_source=TensorFlowSessionCreator,
        fetches="train",
    )


@pytest.mark.parametrize(
    ("hooks", "says"),
    [
        ([RecordingHook()], "hooks has RecordingHook"),
        ([tf.train.StopAtStepHook], "hooks has <class"),
        (
            tf.train.StopAtStepHook(last_step=1),
            "give a list of objects of SessionRunHook of tensorflow",
        ),
    ],
)
async def test_what_is_no_hook_of_tensorflow_is_refused(hooks: Any, says: str) -> None:
    """When the hooks are given, with the value and what to give."""
    with invalid(says):
        TensorFlowHooks(hooks)
