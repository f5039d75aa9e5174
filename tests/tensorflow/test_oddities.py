"""The original's oddities (O1-O68 in the table), where ours does the better thing: stopping,
ending, background work, and what hooks may be.

Those that a test elsewhere has are named in tests/tensorflow/ORIGINAL_TESTS.md, and not here again.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook, RecordingHook
from tests.support.hooks import PhaseHook, RequestingHook
from tests.support.sessions import (
    NO_BACKOFF,
    counting,
    counting_graph,
    forever_step,
    run_session,
    use_up,
)
from tests.support.waiting import ticks
from tests.tensorflow.blocks import ONE_RUN, DyingCreator, MakeSession, both_kinds, run_block, train

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

    graph = counting_graph()
    recorder = RecordingHook()
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
            await use_up(session.steps("train", feeds=({"x": number} for number in left)))
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


async def test_a_forgotten_session_is_warned_about() -> None:
    """O64: a session that is dropped while it is open is a ResourceWarning."""
    opened = [await ah.AsyncMonitoredSession(ah.Graph()).__aenter__()]

    def forget() -> None:
        opened.clear()
        gc.collect()

    with pytest.warns(ResourceWarning, match="was never closed; use `async with`"):
        forget()


# -- ends that fail


@pytest.mark.parametrize(
    "kind",
    [ah.OutOfRangeError, StopAsyncIteration, ah.AbortedError],
    ids=lambda kind: kind.__name__,
)
async def test_an_error_of_end_is_an_error(kind: type[Exception]) -> None:
    """O7, O33: an error of `end` is never suppressed or recovered from; a note says where it comes
    from.
    """
    error = kind("in end")
    hook = FaultInjectionHook({("end", 1): error})
    with pytest.raises(kind) as caught:
        await run_block(counting(hook, recovery=NO_BACKOFF), train())
    assert caught.value is error
    assert error.__notes__[0] == "raised by FaultInjectionHook.end"
    assert hook.closed_with == [error]


@pytest.mark.parametrize(
    "phase", ["begin", "after_create_session", "before_run", "after_run", "end", "close"]
)
async def test_an_error_says_which_hook_raised_it(phase: str) -> None:
    """O33: the error stays the same object, and a note has the hook, its phase, and in a run the
    step.
    """
    error = OSError("no")
    with pytest.raises(OSError, match="no"):
        await run_block(
            counting(FaultInjectionHook({(phase, 1): error})),
            train(),
        )
    step = {
        "after_create_session": " at step 0",
        "before_run": " at step 1",
        "after_run": " at step 1",
    }.get(phase, "")
    assert error.__notes__[0] == f"raised by FaultInjectionHook.{phase}{step}"


class BadlyClosed(DyingCreator):
    """Makes sessions whose `aclose` fails."""

    async def create_session(self) -> ah.Session:
        session = await super().create_session()

        async def aclose() -> None:
            raise OSError("cannot close")

        session.aclose = aclose  # type: ignore[method-assign]
        return session


async def test_an_error_of_closing_is_not_hidden(caplog: pytest.LogCaptureFixture) -> None:
    """O44: closing a session that fails is raised at a clean end, noted on the error of another,
    logged in a recovery.
    """
    hook = RecordingHook()
    error = ValueError("body")
    with pytest.raises(OSError, match="cannot close"):
        await run_block(ah.AsyncMonitoredSession(BadlyClosed([9]), [hook]), train())
    assert hook.phases()[-2:] == ["end", "close"]

    async def body(session: ah.AsyncMonitoredSession) -> None:
        raise error

    with pytest.raises(ValueError, match="body"):
        await run_block(ah.AsyncMonitoredSession(BadlyClosed([9])), body)
    assert error.__notes__ == ["and then: OSError('cannot close')"]
    caplog.clear()

    async def recover(session: ah.AsyncMonitoredSession) -> None:
        await train(2)(session)
        assert "closing its raw session failed" in caplog.text
        await session.aclose()

    with pytest.raises(OSError, match="cannot close"):
        await run_block(ah.AsyncMonitoredSession(BadlyClosed([1, 9]), recovery=NO_BACKOFF), recover)


# -- what hooks may be


class Peculiar(RequestingHook):
    """A hook that equals all others of its kind and has no hash."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Peculiar)

    __hash__ = None  # type: ignore[assignment]


async def test_hooks_are_compared_by_identity() -> None:
    """O30, O68: hooks need no hash, and equal hooks each get what they fetched."""
    hooks = [Peculiar("loss"), Peculiar(["total"]), Peculiar(None)]
    await run_session(counting(*hooks), 1, "train")
    assert [hook.values[0].results for hook in hooks] == [10, [0], None]


async def test_hooks_may_come_from_an_iterator() -> None:
    """O31: the hooks are read once, from any iterable; later changes of a list change nothing."""
    hook = RecordingHook()
    await run_block(counting(*iter([hook])), train())
    given: list[ah.SessionRunHook] = [hook]
    session = counting(*given)
    given.clear()
    await run_block(session, train())
    assert hook.phases() == [*ONE_RUN, "end", "close"] * 2
