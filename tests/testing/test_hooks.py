"""The hooks for tests: one that records its calls, one that fails where it is told to."""

from __future__ import annotations

import asyncio

import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook, RecordingHook
from tests.support.sessions import NO_BACKOFF, counting_graph, double

PHASES = ["begin", "after_create_session", "before_run", "after_run", "end", "close"]


@pytest.mark.parametrize("suspend", [False, True], ids=["in-turn", "suspended"])
async def test_a_recording_hook_records(suspend: bool) -> None:
    """It has its calls in order, what it asked for, and what it was closed with."""
    hook = RecordingHook("mine", fetches=["loss"], feed_dict={"x": 5}, suspend=suspend)
    async with ah.AsyncMonitoredSession(counting_graph(), [hook]) as session:
        assert await session.run("train") == 5
    assert hook.phases() == PHASES
    assert hook.record == [("mine", phase) for phase in PHASES]
    assert hook.results == [[50]]
    assert hook.closed_with == [None]
    assert repr(hook) == "RecordingHook('mine')"


async def test_hooks_may_share_a_record() -> None:
    """Several hooks that write into one list show the order among them; each still has its own part."""
    record: list[tuple[str, str]] = []
    one, two = (RecordingHook(name, record=record) for name in ("one", "two"))
    async with ah.AsyncMonitoredSession(double, [one, two]) as session:
        await session.run("loss")
    assert record == [
        (name, phase)
        for phase in PHASES
        for name in (("two", "one") if phase == "close" else ("one", "two"))
    ]  # fmt: skip
    assert one.phases() == two.phases() == PHASES


async def test_a_hook_that_asks_for_nothing_gets_nothing() -> None:
    """Without fetches and feeds it returns None from `before_run`."""
    hook = RecordingHook()
    async with ah.AsyncMonitoredSession(double, [hook]) as session:
        await session.run("loss")
    assert hook.results == [None]


async def test_a_fault_comes_at_its_call() -> None:
    """The n-th call of a phase raises its error; the call is recorded, and all others do nothing else."""
    hook = FaultInjectionHook({("before_run", 2): ah.AbortedError("lost"), ("after_run", 3): OSError("broken")})

    async def use() -> None:
        async with ah.AsyncMonitoredSession(double, [hook], recovery=NO_BACKOFF) as session:
            for _ in range(5):
                await session.run("loss")

    with pytest.raises(OSError, match="broken"):
        await use()
    runs = ["before_run", "after_run"]
    again = ["before_run", "after_create_session"]
    assert hook.phases() == ["begin", "after_create_session", *runs, *again, *runs, *runs, "close"]


async def test_a_fault_may_be_a_call() -> None:
    """Instead of an error a fault may be a function without arguments, plain or async."""
    calls: list[str] = []

    async def suspends() -> None:
        await asyncio.sleep(0)
        calls.append("async")

    hook = FaultInjectionHook({("begin", 1): lambda: calls.append("plain"), ("end", 1): suspends}, "mine")
    async with ah.AsyncMonitoredSession(double, [hook]):
        assert calls == ["plain"]
    assert calls == ["plain", "async"]
    assert hook.name == "mine"
