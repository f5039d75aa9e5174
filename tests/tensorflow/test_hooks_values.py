"""TensorFlow's own tests of the hooks that wait, feed and look (56-63 in the table), and of its NaN
guard.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any

import numpy as np
import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook, ManualClock, RecordingHook
from tests.support.checks import refused
from tests.support.sessions import NO_BACKOFF, counting, counting_graph
from tests.support.waiting import parked, ticks
from tests.tensorflow.blocks import run_block, train

pytestmark = pytest.mark.every_python

# -- waiting for a step


async def test_no_wait_for_step_zero(caplog: pytest.LogCaptureFixture) -> None:
    """With 0, and if the step is reached already, the first run begins immediately and nothing is
    logged.
    """
    caplog.set_level(logging.INFO)
    for wanted, start in ((0, 0), (1000, 1000), (1000, 2000)):
        hook = ah.hooks.GlobalStepWaiterHook(wanted)
        async with counting(hook, global_step=ah.MemoryStepStore(start)) as session:
            assert await session.run("loss") == 10
        assert hook.started_at == start
    assert caplog.records == []


async def test_wait_for_a_step(caplog: pytest.LogCaptureFixture) -> None:
    """The first run begins when any task has reached the step; no time has to pass, and it is
    logged once.

    Once released it does not wait again: not in the next runs, and not after a recovery.
    """
    caplog.set_level(logging.INFO, logger="aiohooks.hooks")
    steps = ah.MemoryStepStore()
    chief = steps.publisher("chief")
    hook = ah.hooks.GlobalStepWaiterHook(1000)
    lost = FaultInjectionHook({("before_run", 2): ah.AbortedError("lost")})
    with ManualClock():
        async with counting(hook, lost, global_step=steps, recovery=NO_BACKOFF) as session:
            running = asyncio.create_task(session.run("train"))
            for step in (0, 500, 999):
                await steps.raise_to(step)
                await ticks()
                assert not running.done()
                assert hook.started_at is None
            await steps.raise_to(1100)
            assert await running == 1
            assert hook.started_at == 1100
            await steps.reset(3)
            assert await session.run("train") == 1
            assert session.status().recoveries == 1
    chief.close(None)
    said = [record.getMessage() for record in caplog.records if record.name == "aiohooks.hooks"]
    assert said == ["waiting for global step 1000 before starting, now at 0"]


@pytest.mark.parametrize("error", [None, OSError("out of memory")], ids=["finished", "failed"])
async def test_a_wait_without_a_publisher(error: BaseException | None) -> None:
    """When the last publisher has finished, the worker stops cleanly; when it failed, the worker
    fails.
    """
    steps = ah.MemoryStepStore()
    hook = RecordingHook()
    chief = steps.publisher("chief")
    session = counting(ah.hooks.GlobalStepWaiterHook(10), hook, global_step=steps, name="worker")
    running = await parked(run_block(session, train()), 5)
    await steps.advance(4)
    chief.close(error)
    if error is None:
        await running
        assert session.stop_reason == "chief finished at step 4, wanted 10"
    else:
        with refused(ah.errors.PublisherFailedError, "chief") as caught:
            await running
        assert caught.value.__cause__ is error
    assert ("end" in hook.phases()) is (error is None)


# -- operations at the end


async def test_final_ops_have_a_shape_and_feeds() -> None:
    """Fetches of any shape, what to feed them, and the values as training left them."""
    hook = ah.hooks.FinalOpsHook({"t": ["total"], "l": "loss"}, feed_dict={"x": 7})
    nothing = ah.hooks.FinalOpsHook(None)
    async with counting(hook, nothing) as session:
        await train(3)(session)
    assert hook.final_ops_values == {"t": [3], "l": 70}
    assert nothing.final_ops_values is None


async def test_final_ops_that_read_input_fail(caplog: pytest.LogCaptureFixture) -> None:
    """The end of the input in final operations is an error and not a clean end: warned about, and
    raised by the block.

    Other hooks get their `end` all the same. A hook that is used again has forgotten its value.
    """
    graph = counting_graph()
    other = RecordingHook()
    error = ah.OutOfRangeError("no more input")
    ends = [False, True]

    @graph.operation
    def read() -> int:
        if ends.pop(0):
            raise error
        return 1

    hook = ah.hooks.FinalOpsHook("read")
    async with ah.AsyncMonitoredSession(graph, [hook]):
        pass
    assert hook.final_ops_values == 1
    with pytest.raises(ah.OutOfRangeError) as caught:
        await run_block(ah.AsyncMonitoredSession(graph, [hook, other]), train())
    assert caught.value is error
    assert other.phases()[-2:] == ["end", "close"]
    assert hook.final_ops_values is None
    assert ["they must not read input" in record.getMessage() for record in caplog.records] == [
        True
    ]


# -- feeding


async def test_a_function_feeds_each_run() -> None:
    """The function's return value is fed; it is called again for each run, and for each attempt of
    a run.
    """
    calls: list[int] = []

    def feed() -> dict[str, int]:
        calls.append(len(calls) + 1)
        return {"x": calls[-1]}

    lost = FaultInjectionHook({("before_run", 2): ah.AbortedError("lost")})
    async with counting(ah.hooks.FeedFnHook(feed), lost, recovery=NO_BACKOFF) as session:
        assert [await session.run("loss") for _ in range(3)] == [10, 30, 40]


@pytest.mark.parametrize("feeds", [None, {}, {"x": 5}], ids=repr)
async def test_the_function_may_wait_and_may_feed_nothing(feeds: Any) -> None:
    """It may be a coroutine function; None and an empty mapping feed nothing, so that the caller
    may.
    """

    async def feed() -> Any:
        await asyncio.sleep(0)
        return feeds

    async with counting(ah.hooks.FeedFnHook(feed)) as session:
        if feeds:
            assert await session.run("loss") == 50
            with refused(
                ah.errors.FeedConflictError, "'x' by FeedFnHook.before_run and the caller"
            ):
                await session.run("loss", {"x": 2})
        else:
            assert await session.run("loss", {"x": 2}) == 20


# -- guarding against what is no number

NAN = math.nan
INF = math.inf
BAD = [
    NAN,
    np.float32(NAN),
    np.array([1, NAN]),
    [[0.0], [1.0, NAN]],
    complex(0, NAN),
    INF,
    np.array([[-INF]]),
]
GOOD = [0, 1.5, np.float64(2), np.arange(6).reshape(2, 3), [[1], (2.0, True)], 1j, np.array([])]


def graph_of(values: list[Any]) -> ah.Graph:
    """Make a graph whose `loss` is one of the values after the other."""
    graph = ah.Graph()
    rest = iter(values)
    graph.train_op(name="train")(lambda loss: loss)
    graph.operation(name="loss")(lambda: next(rest))
    return graph


async def test_numbers_pass() -> None:
    """Numbers, arrays and nested lists of them are fine while all in them are finite."""
    async with ah.AsyncMonitoredSession(graph_of(GOOD), [ah.NanHook("loss")]) as session:
        await train(len(GOOD))(session)
        assert not session.should_stop()


@pytest.mark.parametrize("bad", BAD, ids=repr)
async def test_what_is_no_number_ends_the_session(bad: Any) -> None:
    """One bad number, anywhere in it, is an error that names it, its node and the step; there is no
    `end`.
    """
    hook = RecordingHook()
    with refused(
        ah.errors.NanLossDuringTrainingError, "model diverged with 'loss' = ", "at step 2"
    ) as caught:
        await run_block(
            ah.AsyncMonitoredSession(graph_of([1.0, bad]), [ah.NanHook("loss"), hook]), train(3)
        )
    assert isinstance(caught.value, RuntimeError)
    assert hook.phases().count("before_run") == 2
    assert "end" not in hook.phases()


async def test_what_is_no_number_may_stop_the_session(caplog: pytest.LogCaptureFixture) -> None:
    """With `fail_on_nan_loss=False` it warns and requests a stop: the run is finished and the end
    is clean.
    """
    hook = RecordingHook()
    guard = ah.NanHook("loss", fail_on_nan_loss=False)
    async with ah.AsyncMonitoredSession(graph_of([1.0, NAN]), [guard, hook]) as session:
        await train(2)(session)
        assert session.should_stop()
    assert session.stop_reason == "model diverged with 'loss' = nan at step 2"
    assert [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    ] == [session.stop_reason]
    assert hook.phases()[-3:] == ["after_run", "end", "close"]
