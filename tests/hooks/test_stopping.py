"""StopAtStepHook and StopAtTimeHook: no run begins after the step or time, whatever moves them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import aiohooks as ah
from aiohooks._core.clock import set_current_clock
from aiohooks.hooks.stopping import StopAtTimeHook
from aiohooks.testing import ManualClock
from tests.support.sessions import counting


class BusyClock(ManualClock):
    """A clock whose timers are late: the event loop had no time for them."""

    def call_later(self, secs: float, callback: Callable[[], object]) -> Any:
        return super().call_later(secs + 1e9, callback)


async def seconds_run(hook: StopAtTimeHook, clock: ManualClock) -> tuple[int, str | None]:
    """Return how many runs of one second each are made until the stop, and its reason."""
    runs = 0
    async with counting(hook) as session:
        while not session.should_stop():
            runs += 1
            await session.run("train")
            clock.advance(1)
    return runs, session.stop_reason


@pytest.mark.parametrize(
    ("start", "by", "reason"),
    [
        (59, 1, "step 60 reached the last step, 60"),
        (59, 3, "step 62 reached the last step, 60"),
        (60, 0, "step 60 reached the last step, 60"),
        (61, 0, "step 61 reached the last step, 60"),
    ],
)
async def test_the_reason_of_a_stop_at_a_step(start: int, by: int, reason: str) -> None:
    """The reason names the last step, and the present one if that is a later one: sessions may
    share the step.
    """
    steps = ah.MemoryStepStore(start)
    async with counting(ah.StopAtStepHook(last_step=60), global_step=steps) as session:
        if by:
            await steps.raise_to(start + by - 1)
            await session.run("train")
        assert session.stop_reason == reason


@pytest.mark.parametrize(
    ("secs", "runs", "reason"),
    [
        (10, 10, "the time is up: 10 s"),
        (7.5, 8, "the time is up: 7.5 s"),
        (0, 0, "the time is up: 0 s"),
    ],
)
async def test_when_and_why_the_time_is_up(secs: float, runs: int, reason: str) -> None:
    """Runs begin until the time is up, in seconds of the clock."""
    with ManualClock(now=500.0) as clock:
        hook = StopAtTimeHook(secs)
        for _ in range(2):  # the same object has its whole time again in the next session
            assert await seconds_run(hook, clock) == (runs, reason)
        assert clock.pending == 0


async def test_no_run_begins_late_in_a_busy_loop() -> None:
    """If the timer was late, the hook itself refuses the run: nothing is run, and the end is
    clean.
    """
    restore = set_current_clock(clock := BusyClock())
    try:
        late = StopAtTimeHook(secs=10)
        async with counting(late) as session:
            await session.run("train")
            clock.advance(10)
            assert not session.should_stop()
            await session.run("train")
            raise AssertionError("it ran")
        assert session.global_step.latest.step == 1
        assert session.stop_reason == "the time is up: 10 s"

        async def slow() -> None:
            clock.advance(10)

        async with ah.AsyncMonitoredSession(slow, [StopAtTimeHook(secs=10)]) as session:
            await session.run("slow")
            assert session.should_stop()
    finally:
        restore()
