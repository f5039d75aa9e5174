"""The loop over runs: `async for values in session.steps(...)`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import RecordingHook
from tests.support.sessions import counting_graph, double

pytestmark = pytest.mark.every_python


async def numbers(*values: Any) -> AsyncIterator[Any]:
    for value in values:
        await asyncio.sleep(0)
        yield value


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
async def test_steps_end_with_their_feeds(asynchronous: bool) -> None:
    """`steps` makes one run an element, sync or async, and ends when there are no more."""
    async with ah.AsyncMonitoredSession(double) as session:
        feeds: Any = numbers(1, 2, 3) if asynchronous else (one for one in (1, 2, 3))
        assert [loss async for loss in session.steps("loss", feeds=feeds)] == [2, 4, 6]
        assert not session.should_stop()
        assert [loss async for loss in session.steps("loss", feeds=[])] == []


async def test_steps_of_a_graph_are_fed_by_mappings() -> None:
    """For a graph, and a step with several parameters, an element is a feed mapping."""

    async def add(first: int, second: int = 100) -> dict[str, int]:
        return {"sum": first + second}

    async with ah.AsyncMonitoredSession(counting_graph()) as session:
        feeds = [{"x": 1}, None, {session.graph.nodes["x"]: 5}]
        assert [loss async for loss in session.steps(["loss", "train"], feeds=feeds)] == [[10, 1], [10, 1], [50, 5]]
    async with ah.AsyncMonitoredSession(add) as session:
        feeds = [{"first": 1}, {"first": 1, "second": 2}]
        assert [total async for total in session.steps("sum", feeds=feeds)] == [101, 3]


async def test_steps_without_feeds_end_at_the_stop() -> None:
    """Without `feeds`, steps continue until a stop; the step during which it came is yielded, and none after it."""
    async with ah.AsyncMonitoredSession(double, [ah.StopAtStepHook(last_step=4)]) as session:
        assert [loss async for loss in session.steps("loss")] == [2, 2, 2, 2]
        assert [loss async for loss in session.steps("loss")] == []
    assert session.stop_reason == "step 4 reached the last step, 4"


@pytest.mark.parametrize("error", [OSError("broken"), ah.OutOfRangeError("end")], ids=repr)
async def test_an_error_of_the_feeds_comes_out_of_the_loop(error: Exception) -> None:
    """An error of the source of feeds comes out of the loop, and ends the session cleanly or not as everywhere."""

    def feeds() -> Iterator[int]:
        yield 1
        raise error

    hook = RecordingHook(fetches="loss")
    clean = isinstance(error, ah.OutOfRangeError)
    with contextlib.nullcontext() if clean else pytest.raises(OSError, match="broken"):
        async with ah.AsyncMonitoredSession(double, [hook]) as session:
            async for _ in session.steps("loss", feeds=feeds()):
                pass
            raise AssertionError("the loop must not end without the error")
    assert hook.results == [2]
    assert ("end" in hook.phases()) is clean


async def test_the_loop_may_be_left_early() -> None:
    """After `break` the rest of the feeds can still be read."""
    feeds = iter([1, 2, 3])
    async with ah.AsyncMonitoredSession(double) as session:
        async for loss in session.steps("loss", feeds=feeds):
            assert loss == 2
            break
        assert await session.run("loss") == 2
    assert list(feeds) == [2, 3]


async def test_the_global_step_does_not_change_how_a_step_is_fed() -> None:
    """One parameter is fed with the element; a mapping that has its name, in a step with the global step, by name as before."""

    async def add(batch: Any, global_step: int) -> dict[str, Any]:
        return {"got": (batch, global_step)}

    async with ah.AsyncMonitoredSession(add) as session:
        feeds = [7, {"batch": 8}, {"other": 9}, None]
        got = [one async for one in session.steps("got", feeds=feeds)]
    assert got == [(7, 0), (8, 1), ({"other": 9}, 2), (None, 3)]


@pytest.mark.parametrize("feed", [list(range(20_000)), {"a": 1, "x" * 50_000: 2}, "x" * 50_000], ids=["list", "key", "text"])
async def test_a_message_is_short_however_large_the_feed(feed: Any) -> None:
    """It says what to do; the value is shown in part."""

    async def step(a: int, b: int) -> None:
        pass

    async with ah.AsyncMonitoredSession(step) as session:
        with pytest.raises(ah.errors.FetchError) as caught:
            await anext(session.steps(feeds=[feed]))
    assert 20 < len(str(caught.value)) < 2_100


async def test_statements_without_async_say_what_to_write() -> None:
    """`with` on a session, `for` over its steps."""
    session = ah.AsyncMonitoredSession(double)
    with pytest.raises(TypeError, match="write `async with`"), session:
        pass
    async with session:
        with pytest.raises(TypeError, match="write `async for`"):
            list(session.steps())  # pyright: ignore
