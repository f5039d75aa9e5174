"""The limits of one hook: its timeout, its `on_error`, and cancellations that are not its
session's.
"""

from __future__ import annotations

import asyncio
import contextlib

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock, RecordingHook
from tests.support.checks import refused
from tests.support.hooks import PhaseHook
from tests.support.kinds import Kinds
from tests.support.sessions import doubling
from tests.support.waiting import advance_clock, forever, parked, ticks

PHASES = ("begin", "before_run", "end", "close")


async def use(*hooks: ah.SessionRunHook | ah.dispatch.HookRegistration) -> None:
    """Run a session with these hooks once."""
    async with doubling(*hooks) as session:
        await session.run("loss")


@pytest.mark.parametrize("phase", PHASES)
async def test_a_timeout_limits_every_phase(phase: str) -> None:
    """A hook that exceeds its `timeout` is ended, in whatever phase, with an error that names it
    and says what to do.

    A note says for which step of which store it waited when its time was up, and at which line.
    """
    with ManualClock() as clock:
        store = ah.MemoryStepStore(run="digits")
        cancelled = list[str]()

        async def hangs(*_: object) -> None:
            try:
                await store.wait_for(7)
            finally:
                cancelled.append(phase)

        using = await parked(
            use(ah.configure(PhaseHook(phase, hangs), timeout=5), RecordingHook()), 40
        )
        await advance_clock(clock, 4.9, 20)
        assert not using.done()
        clock.advance(0.1)
        with refused(
            ah.errors.HookTimeoutError, f"PhaseHook.{phase}", "5 s", "configure(hook, timeout=...)"
        ) as caught:
            await using
        (note,) = [note for note in caught.value.__notes__ if "its time was up" in note]
        assert "waiting for step 7 of digits" in note
        assert "test_hook_limits.py:" in note
        assert cancelled == [phase]


async def test_close_is_always_limited() -> None:
    """A `close` without a timeout of its own has the session's grace period: nothing hangs."""
    with ManualClock() as clock:

        async def hangs(exc: BaseException | None) -> None:
            await forever()

        async def main() -> None:
            async with doubling(PhaseHook("close", hangs), stop_grace_period_secs=7):
                pass

        closing = await parked(main(), 40)
        clock.advance(7)
        with refused(
            ah.errors.HookTimeoutError, "PhaseHook.close took longer than its timeout of 7 s"
        ):
            await closing


async def test_a_call_that_was_left_behind_has_failed() -> None:
    """It is no success when it returns later: `disable_after` counts the failures in a row."""

    class Stubborn:
        async def none(self, value: int) -> None:
            while not released.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await released.wait()

    configured = ah.configure(Stubborn(), timeout=1, on_error="log", disable_after=2)
    group = ah.HookGroup(Kinds, [configured], grace_secs=1)
    with ManualClock() as clock:
        for _ in range(2):
            released = asyncio.Event()
            call = await parked(group.hooks.none(1), 20)
            await advance_clock(clock, 1, 20)
            await advance_clock(clock, 1, 20)
            await call
            released.set()
            await ticks(20)
    assert group.status()[0].disabled
