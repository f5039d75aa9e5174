"""VersionGateHook: a session's step stays near what is published, across resets, recoveries and bad ends."""

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
    """A session that ships as fast as it may, with a gate in front of each run."""

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

    async def settled(self) -> int:
        """The step, when nothing more happens by itself."""
        await ticks(60)
        return self.steps.latest.step

    async def cancelled(self) -> None:
        self.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task
        assert self.versions.statistics().waiting == 0


@pytest.mark.parametrize("max_lag", [0, 1, 3])
async def test_the_step_is_so_far_ahead_at_most(max_lag: int) -> None:
    """Each published version lets one more run begin, and no run begins more than `max_lag` ahead."""
    versions = ah.MemoryStepStore(run="weights")
    shipping = Shipping(versions, max_lag=max_lag)
    seen = [await shipping.settled()]
    for by in (1, 1, max_lag + 1):  # and that is all that was shipped
        await versions.advance(by)
        seen.append(await shipping.settled())
    assert seen == [version + max_lag + 1 for version in (0, 1, 2, max_lag + 3)]
    assert max(ahead for ahead in shipping.ahead if ahead is not None) == max_lag
    assert shipping.hook.waits == 4
    await shipping.cancelled()


async def test_both_clocks_are_trusted_at_the_start() -> None:
    """A session that is resumed ahead of the versions has shipped that much already: it waits until they come near."""
    versions = ah.MemoryStepStore(8)
    shipping = Shipping(versions, steps=ah.MemoryStepStore(10), max_lag=1)
    assert await shipping.settled() == 10
    await versions.advance()
    assert await shipping.settled() == 11
    await shipping.cancelled()


async def test_a_step_that_begins_anew_does_not_open_the_gate() -> None:
    """A session at step 0 beside a trainer at version 500 may ship as much as any other, and no more."""
    versions = ah.MemoryStepStore(500)
    shipping = Shipping(versions, max_lag=1)
    assert await shipping.settled() == 2
    await versions.advance()
    assert await shipping.settled() == 3
    await shipping.cancelled()


async def test_a_reset_of_the_versions_begins_a_generation() -> None:
    """What was shipped before a reset counts no more: the step does not wait until the versions have come back to it."""
    versions = ah.MemoryStepStore(0)
    shipping = Shipping(versions, max_lag=1)
    await versions.advance(100)
    await shipping.settled()
    before = await shipping.settled()
    await versions.reset(40)
    assert await shipping.settled() == before + 2
    await versions.advance()
    assert await shipping.settled() == before + 3
    await shipping.cancelled()


async def test_a_step_that_goes_back_does_not_open_the_gate() -> None:
    """When the session's own step is reset, by a recovery for example, the gate stays where it was."""
    versions = ah.MemoryStepStore(20)
    shipping = Shipping(versions, steps=ah.MemoryStepStore(20), max_lag=1)
    assert await shipping.settled() == 22
    await shipping.steps.reset(5)
    await versions.advance(2)
    assert await shipping.settled() <= 5 + 4
    assert max(ahead for ahead in shipping.ahead if ahead is not None) == 1
    await shipping.cancelled()


async def test_a_run_that_is_repeated_is_let_in_again() -> None:
    """A run that failed and is repeated after a recovery takes no second place."""
    versions = ah.MemoryStepStore()
    shipping = Shipping(versions, max_lag=1)
    shipping.fail_at[1] = ah.AbortedError("lost")
    assert await shipping.settled() == 2
    await versions.advance()
    assert await shipping.settled() == 3
    await shipping.cancelled()


async def test_the_lag_of_a_run() -> None:
    """`lag` says how many versions were published while the run went on."""
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


async def test_a_dead_publisher_ends_the_session() -> None:
    """When who publishes fails, the run that waits raises, caused by that error; when it finishes, the session ends cleanly."""
    versions = ah.MemoryStepStore(run="weights")
    publisher = versions.publisher("trainer")
    shipping = Shipping(versions, max_lag=0)
    await shipping.settled()
    publisher.close(RuntimeError("out of memory"))
    with refused(ah.PublisherFailedError, "trainer failed at step 0, wanted 1") as caught:
        await shipping.task
    assert str(caught.value.__cause__) == "out of memory"

    versions = ah.MemoryStepStore(run="weights")
    publisher = versions.publisher("trainer")
    shipping = Shipping(versions, max_lag=0)
    await shipping.settled()
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
        raise AssertionError("it was let in")
    assert session.stop_reason == "enough"
    assert versions.statistics().waiting == 0


async def test_the_timeout_is_for_the_whole_wait() -> None:
    """The time that a wait may take is counted through resets."""
    with ManualClock() as clock:
        versions = ah.MemoryStepStore(run="weights")
        shipping = Shipping(versions, max_lag=0, timeout=10)
        assert await shipping.settled() == 1
        clock.advance(6)
        await versions.reset(0)
        assert await shipping.settled() == 2, "it is a new generation"
        clock.advance(9)
        assert await shipping.settled() == 2
        clock.advance(1)
        with refused(ah.StepTimeoutError, "step 1 of weights was not reached in 10 s"):
            await shipping.task
        assert shipping.hook.waited_secs == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_lag": -1}, "max_lag -1"),
        ({"max_lag": None}, "max_lag None"),
        ({"max_lag": 1, "timeout": 0}, "timeout is 0"),
    ],
)
def test_what_cannot_be_meant(options: dict[str, Any], message: str) -> None:
    """Bounds and times that cannot be meant are refused."""
    with pytest.raises(ah.errors.InvalidArgumentError, match=message):
        VersionGateHook(ah.MemoryStepStore(), **options)


async def test_the_own_step_is_not_what_is_published() -> None:
    """A session never is ahead of its own step: that cannot be meant. Nor can something that is no store."""
    with pytest.raises(ah.errors.InvalidArgumentError, match="give a StepStore"):
        VersionGateHook(7, max_lag=1)  # type: ignore[arg-type]
    steps = ah.MemoryStepStore()

    async def ship() -> dict[str, int]:
        return {}

    with pytest.raises(ah.errors.InvalidArgumentError, match="give the store of who publishes"):
        async with ah.AsyncMonitoredSession(ship, [VersionGateHook(steps, max_lag=1)], global_step=steps):
            pass
