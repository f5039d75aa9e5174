"""The original's oddities (O1-O68 in the table), where ours does the better thing: stopping,
ending, background work.

Those that a test elsewhere has are named in tests/tensorflow/ORIGINAL_TESTS.md, and not here again.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook, ManualClock, RecordingHook
from tests.support.hooks import PhaseHook
from tests.support.sessions import counting, counting_graph, forever_step, use_up
from tests.support.waiting import ticks
from tests.tensorflow.blocks import MakeSession, both_kinds, run_block

pytestmark = pytest.mark.every_python


# -- clean ends


PLACES = [
    "step function",
    "plain operation",
    "plain operation beside another",
    "thread",
    "plain hook",
    "feeds",
    "feeds taken ahead",
    "feeds of a thread",
]


@pytest.mark.parametrize("raised_in", PLACES)
async def test_a_next_that_finds_nothing_is_a_failure(raised_in: str) -> None:
    """O1: what Python makes of a StopIteration inside a coroutine or a generator is no end of the
    work, and what the library calls plainly is no other.
    """

    def take(*_: object) -> Any:
        return next(iter(()))

    async def take_async(*_: object) -> Any:
        return take()

    def feeds() -> Iterator[Any]:
        yield {"x": 1}
        yield take()

    class Plain:
        def after_run(self, *_: object) -> None:
            take()

    graph, recorder = counting_graph(), RecordingHook()
    graph.operation(name="plain")(lambda: take())
    graph.operation(name="waiting")(forever_step)
    graph.operation(name="thread")(ah.in_thread(lambda: take()))

    async def loop(**options: Any) -> None:
        await use_up(session.steps("train", feeds=feeds(), **options))

    uses: dict[str, Callable[[], Awaitable[Any]]] = {
        "step function": lambda: session.run_step_fn(take_async),
        "plain operation": lambda: session.run("plain"),
        "plain operation beside another": lambda: session.run(["waiting", "plain"]),
        "thread": lambda: session.run("thread"),
        "plain hook": lambda: session.run("train"),
        "feeds": loop,
        "feeds taken ahead": lambda: loop(prefetch=2),
        "feeds of a thread": lambda: loop(thread=True),
    }
    hooks = [ah.hooks.BlockingHook(Plain())] if raised_in == "plain hook" else []
    session = ah.AsyncMonitoredSession(graph, [recorder, *hooks])

    async def use() -> None:
        async with session:
            await uses[raised_in]()
            raise AssertionError("the block must be left")

    with pytest.raises(RuntimeError, match="raised StopIteration"):
        await use()
    assert "end" not in recorder.phases()


@pytest.mark.parametrize("kind", ["block", "iterator", "feed_fn", "plain before_run"])
async def test_the_idiom_of_the_original_is_a_clean_end(kind: str) -> None:
    """O1: StopIteration in the block itself, and of a plain function that is called for the next
    feed, ends the feeds.
    """
    left = iter([1, 2])

    class Reads:
        def before_run(self, run_context: Any) -> ah.SessionRunArgs:
            return ah.SessionRunArgs(None, {"x": next(left)})

    hook = {
        "feed_fn": ah.hooks.FeedFnHook(lambda: {"x": next(left)}),
        "plain before_run": ah.hooks.BlockingHook(Reads()),
    }.get(kind)
    recorder = RecordingHook()
    async with counting(recorder, *([hook] if hook else [])) as session:
        if kind == "iterator":
            await use_up(session.steps("train", feeds=({"x": one} for one in left)))
        while kind != "iterator":
            await session.run("train", {"x": next(left)} if kind == "block" else None)
    assert recorder.phases()[-2:] == ["end", "close"]
    assert session.global_step.latest.step == 2


async def test_a_loop_says_which_error_of_a_run_has_ended_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A StopAsyncIteration out of a hook or a step ends an `async for` as its own end does: the
    reason has the difference.
    """

    async def no_more(*_: object) -> None:
        raise StopAsyncIteration("no more")

    caplog.set_level(logging.INFO, "aiohooks")
    async with counting(PhaseHook("before_run", no_more)) as session:
        await use_up(session.steps("train"))
    assert session.stop_reason == "a run ended with StopAsyncIteration('no more')"
    assert any(str(session.stop_reason) in message for message in caplog.messages)


class NoMoreFiles(ah.OutOfRangeError):
    """An end of the input by another name."""


class Enough(StopAsyncIteration):
    """Another end of the input."""


@both_kinds
@pytest.mark.parametrize(
    "error",
    [NoMoreFiles("a"), Enough("b"), ExceptionGroup("both", [NoMoreFiles(), Enough()])],
    ids=repr,
)
async def test_subclasses_are_clean_ends_too(make: MakeSession, error: Exception) -> None:
    """O2: what counts is `isinstance`; a group of nothing but clean ends is one."""
    hook = RecordingHook()
    async with make(
        counting_graph(), [hook, FaultInjectionHook({("before_run", 1): error})]
    ) as session:
        await session.run("train")
    assert hook.phases()[-2:] == ["end", "close"]


# -- background work


@both_kinds
@pytest.mark.parametrize("body_continues", [False, True])
async def test_the_end_of_the_input_in_a_task_is_a_stop(
    make: MakeSession, body_continues: bool
) -> None:
    """O42: a task that reaches the end of its input stops the session, cleanly, as the body
    would.
    """
    hook = RecordingHook()

    async def read() -> None:
        raise ah.OutOfRangeError("end of file")

    async with make(counting_graph(), [hook]) as session:
        session.start_soon(read, name="reader")
        await ticks()
        assert session.should_stop()
        if body_continues:
            await session.run("train")
            raise AssertionError("the run must not begin")
    assert "background task 'reader' ended: OutOfRangeError('end of file')" in (
        session.stop_reason or ""
    )
    assert hook.phases() == ["begin", "after_create_session", "end", "close"]


async def test_a_keyboard_interrupt_ends_immediately() -> None:
    """O65: so does a KeyboardInterrupt of the body."""
    hook = RecordingHook()

    async def body(session: ah.AsyncMonitoredSession) -> None:
        session.start_soon(asyncio.Event().wait)
        raise KeyboardInterrupt

    with ManualClock(), pytest.raises(KeyboardInterrupt):
        await run_block(counting(hook), body)
    assert hook.phases() == ["begin", "after_create_session", "close"]


async def test_a_forgotten_session_is_warned_about() -> None:
    """O64: a session that is dropped while it is open is a ResourceWarning."""
    opened = [await ah.AsyncMonitoredSession(ah.Graph()).__aenter__()]

    def forget() -> None:
        opened.clear()
        gc.collect()

    with pytest.warns(ResourceWarning, match="was never closed; use `async with`"):
        forget()
