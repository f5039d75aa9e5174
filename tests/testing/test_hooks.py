"""The hooks for tests: one that records its calls, and one that fails at chosen calls."""

from __future__ import annotations

import asyncio

import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook, RecordingHook
from tests.support.sessions import NO_BACKOFF, counting, doubling

PHASES = ["begin", "after_create_session", "before_run", "after_run", "end", "close"]


@pytest.mark.parametrize("suspend", [False, True], ids=["in-turn", "suspended"])
async def test_a_recording_hook_records(suspend: bool) -> None:
    """It records its calls in order, its results, and the argument of `close`."""
    hook = RecordingHook("mine", fetches=["loss"], feed_dict={"x": 5}, suspend=suspend)
    async with counting(hook) as session:
        assert await session.run("train") == 5
    assert hook.phases() == PHASES
    assert hook.record == [("mine", phase) for phase in PHASES]
    assert hook.results == [[50]]
    assert hook.closed_with == [None]
    assert repr(hook) == "RecordingHook('mine')"


async def test_hooks_may_share_a_record() -> None:
    """Hooks that share one list record the order among them; `phases` has the calls of each."""
    record: list[tuple[str, str]] = []
    one, two = (RecordingHook(name, record=record) for name in ("one", "two"))
    async with doubling(one, two) as session:
        await session.run("loss")
    assert record == [
        (name, phase)
        for phase in PHASES
        for name in (("two", "one") if phase == "close" else ("one", "two"))
    ]
    assert one.phases() == two.phases() == PHASES


async def test_a_hook_without_fetches_has_no_results() -> None:
    """Without fetches and feeds it returns None from `before_run`."""
    hook = RecordingHook()
    async with doubling(hook) as session:
        await session.run("loss")
    assert hook.results == [None]


async def test_a_fault_is_raised_at_its_call() -> None:
    """The n-th call of a phase raises its error; all calls are recorded."""
    hook = FaultInjectionHook(
        {("before_run", 2): ah.AbortedError("lost"), ("after_run", 3): OSError("broken")}
    )

    async def use() -> None:
        async with doubling(hook, recovery=NO_BACKOFF) as session:
            for _ in range(5):
                await session.run("loss")

    with pytest.raises(OSError, match="broken"):
        await use()
    runs = ["before_run", "after_run"]
    again = ["before_run", "after_create_session"]
    assert hook.phases() == ["begin", "after_create_session", *runs, *again, *runs, *runs, "close"]


async def test_a_fault_may_be_a_call() -> None:
    """A fault may also be a function without arguments, plain or async."""
    calls: list[str] = []

    async def suspends() -> None:
        await asyncio.sleep(0)
        calls.append("async")

    hook = FaultInjectionHook(
        {("begin", 1): lambda: calls.append("plain"), ("end", 1): suspends}, "mine"
    )
    async with doubling(hook):
        assert calls == ["plain"]
    assert calls == ["plain", "async"]
    assert hook.name == "mine"


@pytest.mark.parametrize("call", [("no_phase", 1), ("begin", 0)])
def test_an_invalid_call_is_refused(call: tuple[str, int]) -> None:
    """A fault for a phase that does not exist, or for a call before the first, is refused with the
    phases there are.
    """
    with pytest.raises(
        ah.errors.InvalidArgumentError,
        match=r"give a method \(begin, .*, close\) and a number from 1 on",
    ):
        FaultInjectionHook({call: OSError("never raised")})
