"""HookTimingHook: what blocks the event loop, and what only waits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

import aiohooks as ah
from aiohooks.hooks.timing import HookTimingHook
from aiohooks.testing import ManualClock
from tests.support.sessions import (
    doubling,
    run_session,
)


class Busy(ah.SessionRunHook):
    """Blocks, waits, and blocks again, in every `before_run`; blocks in `after_run`."""

    def __init__(self, clock: ManualClock, block: float, wait: float = 0.0) -> None:
        self.clock = clock
        self.block = block
        self.wait = wait

    async def before_run(self, run_context: ah.SessionRunContext) -> ah.SessionRunArgs:
        self.clock.advance(self.block)
        if self.wait:
            asyncio.get_running_loop().call_soon(self.clock.advance, self.wait)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            self.clock.advance(self.block)
        return ah.SessionRunArgs("loss")

    async def after_run(
        self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
    ) -> None:
        assert run_values.results == 2
        self.clock.advance(self.block / 2)


def found(timing: HookTimingHook) -> dict[str, tuple[int, float, float, float]]:
    """Return calls, blocking and waiting seconds and the longest block, by hook and phase."""
    return {
        f"{times.hook}.{times.phase}": (
            times.calls,
            times.blocking_secs,
            times.waiting_secs,
            times.longest_block_secs,
        )
        for times in timing.statistics().phases
    }


async def test_blocking_and_waiting(clock: ManualClock) -> None:
    """Time between a resumption and the next suspension is blocking, the rest is waiting; each
    method is measured separately.
    """
    timing = HookTimingHook(warn_secs=100)
    hooks = [timing, Busy(clock, 1.0, 8.0)]
    await run_session(doubling(*hooks), 3, "loss")
    assert found(timing) == {
        "Busy.before_run": (3, 6.0, 24.0, 1.0),
        "Busy.after_run": (3, 1.5, 0.0, 0.5),
    }


async def test_the_report_is_logged(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    """The report is logged as a table at the end."""
    caplog.set_level(logging.INFO, logger="aiohooks.hooks")
    timing = HookTimingHook(warn_secs=100)
    await run_session(doubling(timing, Busy(clock, 0.5)), 3, "loss")
    (logged,) = [text for text in caplog.messages if "hook times" in text]
    assert logged.startswith("hook times at the end, step 3:\n")
    assert "Busy.before_run        3    1.500s   0.000s  0.500000s at step 1" in logged
    assert timing.report() in logged


async def test_code_that_blocks_the_loop_is_found(
    start_watch: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Code that blocks the loop, in a hook or not, is named by function, file and line, while it
    blocks; at most five times.
    """
    timing = HookTimingHook(warn_secs=0.01)

    async def stubborn_step() -> dict[str, int]:
        if not timing.statistics().blockers:
            start_watch()
        await asyncio.sleep(0)  # on a busy machine that was a block of its own
        before = len(timing.statistics().blockers)
        while len(timing.statistics().blockers) == before:
            pass
        return {"loss": 1}

    await run_session(ah.AsyncMonitoredSession(stubborn_step, [timing]), 7, "loss")
    blocker = timing.statistics().blockers[-1]
    assert "stubborn_step" in blocker.where
    assert __file__ in blocker.where
    assert blocker.secs > 0.01
    assert "stubborn_step" in timing.report()
    # The same line may be in a longer text, of a call that it makes.
    ends = [text.endswith(f"s, at {blocker.where}") for text in caplog.messages]
    assert 1 <= sum(ends) <= 5
