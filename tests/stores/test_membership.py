"""The members of the processes: leases, the lead, exits, the publishers of other processes."""

from __future__ import annotations

import asyncio
import re

import pytest

import aiohooks as ah
from aiohooks.stores._protocol import Answer, Request
from aiohooks.testing import ManualClock
from tests.support.fake_engine import FakeConnection, FakeEngine, FakeStepStore
from tests.support.waiting import (
    HANG_SECS,
    advance_clock,
    cancel_and_wait,
    forever,
    parked,
    parked_wait,
    pass_time,
    ticks,
)

# --- leases


class DyingConnection(FakeConnection):
    """None of its requests arrives any more when `dead` is set."""

    dead = False

    async def request(self, request: Request) -> Answer:
        if self.dead:
            await forever()
        return await super().request(request)


async def kill(store: FakeStepStore) -> None:
    assert isinstance(store.connection, DyingConnection)
    store.connection.dead = True
    for task in tuple(store._connection.tasks.running):
        task.cancel()
    await ticks(40)


async def test_a_dead_publisher_is_found_when_its_lease_runs_out(
    clock: ManualClock, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """A killed publisher counts as dead when its lease runs out, not before, and waiters are
    notified.
    """
    dead = FakeStepStore(DyingConnection(engine))
    async with FakeStepStore(engine) as b:
        dead.publisher("trainer")
        await dead.advance(5)
        await dead.flush()
        wait = await parked(b.wait_for(9), 40)
        await kill(dead)
        await pass_time(clock, 9.5)
        assert not wait.done()
        await pass_time(clock, 3)
        with pytest.raises(
            ah.errors.PublisherFailedError, match="trainer failed at step 5, wanted 9"
        ) as caught:
            await wait
        assert "found dead" in str(caught.value.__cause__)
    await close_dead(dead, clock)
    assert any("trainer was found dead" in message for message in caplog.messages)


@pytest.mark.parametrize("blocked_secs", [7, 13])
async def test_a_publisher_whose_loop_was_blocked(
    clock: ManualClock, engine: FakeEngine, caplog: pytest.LogCaptureFixture, blocked_secs: int
) -> None:
    """A process whose loop was blocked for longer than a lease logs that, for how long, and that it
    was found dead.
    """
    with ManualClock() as own_clock:
        blocked = FakeStepStore(engine)
    async with blocked, FakeStepStore(engine) as b:
        with blocked.publisher("trainer"):
            await blocked.flush()
            wait = await parked(b.wait_for(9), 40)
            own_clock.call_later(
                0, lambda: setattr(own_clock, "_now", blocked_secs)
            )  # nothing else is called meanwhile
            await pass_time(clock, blocked_secs)
            assert wait.done() == (blocked_secs > 10)
            own_clock.advance(0)
            own_clock.advance(0)
            await ticks(40)
            assert b.statistics().publishers == ("trainer",)
            said = [
                f"no lease was renewed for {blocked_secs}.0 s, .* each lasts 10 s",
                "trainer was found dead",
            ]
            for text in said:
                assert bool(re.search(text, caplog.text)) == (blocked_secs > 10)
        await asyncio.gather(wait, return_exceptions=True)


async def test_waiters_stay_for_the_next_chief_if_asked(
    clock: ManualClock, engine: FakeEngine
) -> None:
    """With `on_lost="keep"` waiters stay when a publisher is found dead, and are woken by its
    successor.
    """
    dead = FakeStepStore(DyingConnection(engine))
    async with FakeStepStore(engine, on_lost="keep") as b:
        dead.publisher("trainer")
        await dead.advance(5)
        await dead.flush()
        wait = await parked(b.wait_for(9), 40)
        await kill(dead)
        for _ in range(30):
            await advance_clock(clock, 1, 40)
        assert b.statistics().publishers == ()
        assert not wait.done()
        async with FakeStepStore(engine) as again:
            with again.publisher("trainer"):
                await again.advance(4)
                assert await wait == 9
    await close_dead(dead, clock)


async def test_waiting_for_the_lead_can_be_cancelled(engine: FakeEngine) -> None:
    """A wait for the lead can be cancelled; a chief cannot take the lead twice."""
    async with FakeStepStore(engine) as a, FakeStepStore(engine) as b:
        async with a.lead():
            takes = await parked(b.lead().__aenter__(), 40)
            assert await cancel_and_wait(takes)
        async with b.lead(), asyncio.timeout(HANG_SECS):
            with pytest.raises(ah.errors.InvalidArgumentError, match="leads already"):
                async with b.lead():
                    pass


async def test_a_task_cannot_wait_for_its_own_lead() -> None:
    """In the memory of a process, the store of a standby chief is the same."""
    async with ah.MemoryStepStore() as store, store.lead():
        with pytest.raises(ah.errors.InvalidArgumentError, match=r"leads .* already"):
            async with store.lead():
                pass
        standby = await parked(store.lead().__aenter__())
        assert await cancel_and_wait(standby)


async def close_dead(dead: FakeStepStore, clock: ManualClock) -> None:
    """Close the dead store, which has no engine to answer it."""
    closing = asyncio.ensure_future(dead.aclose())
    for _ in range(4):
        await ticks(40)
        clock.advance(3)
    await closing


async def test_a_local_failure_keeps_its_error(engine: FakeEngine) -> None:
    """In the process that failed, waiters get the error itself as the cause, also after the engine
    has reported the exit.
    """
    async with FakeStepStore(engine) as a:
        trainer = a.publisher("trainer")
        await a.flush()
        error = ValueError("a bad batch")
        trainer.close(error)
        await a.flush()
        await a.value()
        with pytest.raises(
            ah.errors.PublisherFailedError, match="trainer failed at step 0"
        ) as caught:
            await a.wait_for(5)
        assert caught.value.__cause__ is error


async def test_a_run_that_had_failed_may_begin_again(
    clock: ManualClock, engine: FakeEngine
) -> None:
    """A worker that starts before its chief, after a failure, waits for it as if no publisher had
    left.
    """
    async with FakeStepStore(engine) as a:
        await a.advance(3)
        a.publisher("yesterday's chief").close(OSError("the disk is full"))
    async with FakeStepStore(engine) as b, FakeStepStore(engine) as c:
        wait = await parked_wait(b, 5)
        await b.value()
        await pass_time(clock, 60)
        assert not wait.done()
        c.publisher("today's chief").close(OSError("it is full again"))
        with pytest.raises(ah.errors.PublisherFailedError, match="today's chief failed at step 3"):
            await wait


# --- exits from before the store was opened


async def test_a_run_that_had_finished_has_no_successor(engine: FakeEngine) -> None:
    """A wait for a later step ends immediately, as it does in a process that has seen the end."""
    async with FakeStepStore(engine) as a:
        a.publisher("yesterday's chief").close()
    async with FakeStepStore(engine, lease_secs=20) as b:
        with pytest.raises(ah.errors.PublisherFinishedError, match="yesterday's chief finished"):
            await b.wait_for(5)


# --- after a loss
