"""Several tasks that close one session, and calls that would wait for themselves."""

from __future__ import annotations

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock
from tests.support.checks import refused
from tests.support.hooks import PhaseHook
from tests.support.sessions import doubling, outcome
from tests.support.waiting import ticks

pytestmark = pytest.mark.every_python


# -- calls that would wait for themselves


@pytest.mark.parametrize("phase", ["before_run", "after_run", "end", "close"])
async def test_a_hook_cannot_close_its_session(phase: str) -> None:
    """`aclose` inside a hook, also one of the end, is refused: it would wait for the hook
    itself.
    """
    attempts: list[str] = []

    async def closes(*_: object) -> None:
        with refused(
            ah.errors.NestedRunError, "aclose was called from inside", "which would deadlock"
        ):
            await session.aclose()
        attempts.append(phase)

    session = doubling(PhaseHook(phase, closes))
    assert await outcome(session, lambda session: session.run("loss")) is None
    assert attempts == [phase]


async def test_a_background_task_cannot_close_its_session(clock: ManualClock) -> None:
    """`aclose` in a background task is refused immediately, before and while the session closes: it
    is to request a stop.
    """
    attempts: list[str] = []

    async def closes() -> None:
        for _ in range(2):
            with refused(
                ah.errors.NestedRunError,
                "called from the background task 'closes'",
                "use request_stop to end",
            ):
                await session.aclose()
            attempts.append(session.status().state)
            await session.coord.wait_for_stop()

    async with doubling() as session:
        session.start_soon(closes)
        session.coord.start_soon(closes)
        await ticks()
    assert (attempts, clock.now()) == (["open", "open", "closing", "closing"], 0)
