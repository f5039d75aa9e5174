"""VersionGateHook: a session's step stays near the published version, across resets, recoveries and failures."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.hooks.version_gate import VersionGateHook
from aiohooks.testing import ManualClock
from tests.support.checks import refused
from tests.support.waiting import ticks


class Shipping:
    """A session that runs as fast as its gate allows."""

    def __init__(self, versions: ah.StepStore, *, steps: ah.StepStore | None = None, **options: Any) -> None:
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
        session = ah.AsyncMonitoredSession(self.ship, [self.hook], global_step=self.steps, recovery=recovery)
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
    """Each published version lets one more run begin, and no run begins more than `max_lag` ahead."""
    versions = ah.MemoryStepStore(run="weights")
    shipping = Shipping(versions, max_lag=max_lag)
    seen = [await shipping.idle_step()]
    for by in (1, 1, max_lag + 1):  # the last advance publishes everything that was shipped
        await versions.advance(by)
        seen.append(await shipping.idle_step())
    assert seen == [version + max_lag + 1 for version in (0, 1, 2, max_lag + 3)]
    assert max(ahead for ahead in shipping.ahead if ahead is not None) == max_lag
    assert shipping.hook.waits == 4
    await shipping.cancelled()


async def test_both_clocks_are_trusted_at_the_start() -> None:
    """A session that is resumed ahead of the versions waits until they come within the bound."""
    versions = ah.MemoryStepStore(8)
    shipping = Shipping(versions, steps=ah.MemoryStepStore(10), max_lag=1)
    assert await shipping.idle_step() == 10
    await versions.advance()
    assert await shipping.idle_step() == 11
    await shipping.cancelled()


async def test_a_step_that_begins_anew() -> None:
    """A session at step 0 beside a trainer at version 500 may ship as much as any other, and no more."""
    versions = ah.MemoryStepStore(500)
    shipping = Shipping(versions, max_lag=1)
    assert await shipping.idle_step() == 2
    await versions.advance()
    assert await shipping.idle_step() == 3
    await shipping.cancelled()


async def test_a_reset_of_the_versions() -> None:
    """After a reset earlier runs count no more: the step does not wait until the versions have come back to it."""
    versions = ah.MemoryStepStore(0)
    shipping = Shipping(versions, max_lag=1)
    await versions.advance(100)
    await shipping.idle_step()
    before = await shipping.idle_step()
    await versions.reset(40)
    assert await shipping.idle_step() == before + 2
    await versions.advance()
    assert await shipping.idle_step() == before + 3
    await shipping.cancelled()


async def test_a_step_that_goes_back_does_not_open_the_gate() -> None:
    """When the session's own step is reset, by a recovery for example, no run begins further ahead than `max_lag`."""
    versions = ah.MemoryStepStore(20)
    shipping = Shipping(versions, steps=ah.MemoryStepStore(20), max_lag=1)
    assert await shipping.idle_step() == 22
    await shipping.steps.reset(5)
    await versions.advance(2)
    assert await shipping.idle_step() <= 5 + 4
    assert max(ahead for ahead in shipping.ahead if ahead is not None) == 1
    await shipping.cancelled()


async def test_a_repeated_run_is_admitted_again() -> None:
    """A run that is repeated after a recovery does not count twice."""
    versions = ah.MemoryStepStore()
    shipping = Shipping(versions, max_lag=1)
    shipping.fail_at[1] = ah.AbortedError("lost")
    assert await shipping.idle_step() == 2
    await versions.advance()
    assert await shipping.idle_step() == 3
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
    """If the publisher fails, the waiting run raises, caused by its error; if it finishes, the session ends cleanly."""
    versions = ah.MemoryStepStore(run="weights")
    publisher = versions.publisher("trainer")
    shipping = Shipping(versions, max_lag=0)
    await shipping.idle_step()
    publisher.close(RuntimeError("out of memory"))
    with refused(ah.PublisherFailedError, "trainer failed at step 0, wanted 1") as caught:
        await shipping.task
    assert str(caught.value.__cause__) == "out of memory"

    versions = ah.MemoryStepStore(run="weights")
    publisher = versions.publisher("trainer")
    shipping = Shipping(versions, max_lag=0)
    await shipping.idle_step()
    publisher.close()
    await shipping.task
    assert shipping.reason == "trainer finished at step 0, wanted 1"


async def test_a_stop_ends_the_wait() -> None:
    """A stop ends a run that waits at the gate, cleanly."""
    versions = ah.MemoryStepStore()
    hook = VersionGateHook(versions, max_lag=0)

    async def ship() -> dict[str, int]:
        return {}

    async with ah.AsyncMonitoredSession(ship, [hook]) as session:
        await session.run("ship")
        asyncio.get_running_loop().call_soon(session.request_stop, "enough")
        await session.run("ship")
        raise AssertionError("it was admitted")
    assert session.stop_reason == "enough"
    assert versions.statistics().waiting == 0


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
        with refused(ah.StepTimeoutError, "step 1 of weights was not reached in 10 s"):
            await shipping.task
        assert shipping.hook.waited_secs == 16


async def test_the_sessions_own_step_is_refused() -> None:
    """It is never ahead of itself."""
    steps = ah.MemoryStepStore()

    async def ship() -> dict[str, int]:
        return {}

    with pytest.raises(ah.errors.InvalidArgumentError, match="give the store of the publisher"):
        async with ah.AsyncMonitoredSession(ship, [VersionGateHook(steps, max_lag=1)], global_step=steps):
            pass
