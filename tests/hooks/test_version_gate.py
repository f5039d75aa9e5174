"""VersionGateHook: a session's step stays near the published version, across resets, recoveries and
failures.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.hooks.waiting import VersionGateHook
from aiohooks.testing import ManualClock
from tests.support.checks import refused
from tests.support.waiting import ticks


class Shipping:
    """A session that runs as fast as its gate allows."""

    def __init__(
        self, versions: ah.StepStore, *, steps: ah.StepStore | None = None, **options: Any
    ) -> None:
        self.versions = versions
        self.hook = VersionGateHook(versions, **options)
        self.steps = steps or ah.MemoryStepStore(run="shipped")
        self.ahead: list[int | None] = []
        self.reason: str | None = None
        self.fail_at: dict[int, Exception] = {}
        self.task = asyncio.create_task(self.run())

    async def ship(self) -> dict[str, int]:
        error = self.fail_at.pop(self.steps.latest.step, None)
        if error is not None:
            raise error
        self.ahead.append(self.hook.ahead)
        return {}

    async def run(self) -> None:
        recovery = ah.RecoveryPolicy(backoff=ah.Backoff(0.0))
        session = ah.AsyncMonitoredSession(
            self.ship, [self.hook], global_step=self.steps, recovery=recovery
        )
        try:
            async with session:
                while not session.should_stop():
                    await session.run("ship")
        finally:
            self.reason = session.stop_reason

    async def idle_step(self) -> int:
        """Return the step when the session waits at the gate."""
        await ticks(60)
        return self.steps.latest.step

    async def cancelled(self) -> None:
        self.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task
        assert self.versions.statistics().waiting == 0


@pytest.mark.parametrize("max_lag", [0, 1, 3])
async def test_the_bound(max_lag: int) -> None:
    """Each published version lets one more run begin, and no run begins more than `max_lag`
    ahead.
    """
    versions = ah.MemoryStepStore(run="weights")
    shipping = Shipping(versions, max_lag=max_lag)
    seen = [await shipping.idle_step()]
    for by in (1, 1, max_lag + 1):  # the last advance publishes everything that was shipped
        await versions.advance(by)
        seen.append(await shipping.idle_step())
    assert seen == [version + max_lag + 1 for version in (0, 1, 2, max_lag + 3)]
    assert max(ahead for ahead in shipping.ahead if ahead is not None) == max_lag
    assert shipping.hook.gate.statistics().waits == 4
    await shipping.cancelled()


# (versions, steps, what happens in turn: to the versions or the step, and the step at which the
# session waits then)
CLOCKS: dict[str, tuple[int, int, list[tuple[str, int, int]]]] = {
    "a resumed session is ahead of the versions": (8, 10, [("", 0, 10), ("advance", 1, 11)]),
    "a session begins beside a trainer at work: it may ship as much as any other": (
        500,
        0,
        [("", 0, 2), ("advance", 1, 3)],
    ),
    "after a reset of the versions earlier runs count no more": (
        0,
        0,
        [("", 0, 2), ("advance", 100, 4), ("reset", 40, 6), ("advance", 1, 7)],
    ),
    "a step that goes back does not open the gate": (
        20,
        20,
        [("", 0, 22), ("set the step back", 5, 5), ("advance", 2, 7)],
    ),
    "a run that is repeated after a recovery counts once": (
        0,
        0,
        [("fail once", 1, 2), ("advance", 1, 3)],
    ),
}


@pytest.mark.parametrize("name", CLOCKS)
async def test_the_step_and_the_versions_may_move(name: str) -> None:
    """Both are trusted at the start; whatever moves them, no run begins further ahead than
    `max_lag`.
    """
    start, step, moves = CLOCKS[name]
    versions = ah.MemoryStepStore(start)
    shipping = Shipping(versions, steps=ah.MemoryStepStore(step), max_lag=1)
    for what, by, idle in moves:
        if what == "advance":
            await versions.advance(by)
        elif what == "reset":
            await versions.reset(by)
        elif what == "set the step back":
            await shipping.steps.reset(by)
        elif what == "fail once":
            shipping.fail_at[by] = ah.AbortedError("lost")
        assert await shipping.idle_step() == idle, what
        assert max((ahead for ahead in shipping.ahead if ahead is not None), default=0) <= 1
    await shipping.cancelled()


async def test_the_lag_of_a_run() -> None:
    """`lag` is the number of versions published during the run."""
    versions = ah.MemoryStepStore()
    hook = VersionGateHook(versions, max_lag=5)
    lags: list[int | None] = []

    async def ship(by: int) -> dict[str, int]:
        await (versions.advance(by) if by else versions.reset(7))
        return {}

    async with ah.AsyncMonitoredSession(ship, [hook]) as session:
        for by in (2, 1, 0):
            await session.run("ship", {"by": by})
            lags.append(hook.lag)
    assert lags == [2, 1, None]


async def test_the_end_of_the_publisher() -> None:
    """If the publisher fails, the waiting run raises, caused by its error; if it finishes, the
    session ends cleanly.
    """
    for error in (RuntimeError("out of memory"), None):
        versions = ah.MemoryStepStore(run="weights")
        publisher = versions.publisher("trainer")
        shipping = Shipping(versions, max_lag=0)
        await shipping.idle_step()
        publisher.close(error)
        if error is None:
            await shipping.task
            assert shipping.reason == "trainer finished at step 0, wanted 1"
            return
        with refused(
            ah.errors.PublisherFailedError, "trainer failed at step 0, wanted 1"
        ) as caught:
            await shipping.task
        assert str(caught.value.__cause__) == "out of memory"


async def test_the_timeout_is_for_the_whole_wait() -> None:
    """The time limit is for the whole wait, also if the versions are reset in it."""
    with ManualClock() as clock:
        versions = ah.MemoryStepStore(run="weights")
        shipping = Shipping(versions, max_lag=0, timeout=10)
        assert await shipping.idle_step() == 1
        clock.advance(6)
        await versions.reset(0)
        assert await shipping.idle_step() == 2, "the versions were reset"
        clock.advance(9)
        assert await shipping.idle_step() == 2
        clock.advance(1)
        with refused(ah.errors.StepTimeoutError, "not admitted in 10 s"):
            await shipping.task
        assert shipping.hook.gate.statistics().waited_secs == 16


async def test_the_sessions_own_step_is_refused() -> None:
    """It is never ahead of itself."""
    steps = ah.MemoryStepStore()

    async def ship() -> dict[str, int]:
        return {}

    with pytest.raises(ah.errors.InvalidArgumentError, match="give the store of the publisher"):
        async with ah.AsyncMonitoredSession(
            ship, [VersionGateHook(steps, max_lag=1)], global_step=steps
        ):
            pass
