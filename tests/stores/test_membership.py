"""The members of the processes: leases, the lead, exits, the publishers of other processes."""

from __future__ import annotations

import asyncio

import pytest

import aiohooks as ah
from aiohooks.stores._protocol import Answer, Request
from aiohooks.testing import ManualClock
from tests.support.fake_engine import FakeEngine, FakeStepStore
from tests.support.waiting import ticks

# --- leases


async def lost(clock: ManualClock, secs: float = 11.0) -> None:
    """Let time pass in which no lease is renewed."""
    clock.advance(secs)
    await ticks(40)


class Killable(FakeStepStore):
    """A process that is dead when `dead` is set: none of its requests arrives any more."""

    dead = False

    async def _request_once(self, request: Request) -> Answer:
        if self.dead:
            await asyncio.Event().wait()
        return await super()._request_once(request)


async def kill(store: Killable) -> None:
    store.dead = True
    for task in tuple(store._tasks):  # pyright: ignore[reportPrivateUsage]
        task.cancel()
    await ticks(40)


async def test_a_dead_publisher_is_found_when_its_lease_runs_out(
    clock: ManualClock, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """A killed publisher counts as dead when its lease runs out, not before, and waiters are notified."""
    dead = Killable(engine)
    async with FakeStepStore(engine) as b:
        dead.publisher("trainer")
        await dead.advance(5)
        await dead.flush()
        wait = asyncio.ensure_future(b.wait_for(9))
        await ticks(40)
        await kill(dead)
        clock.advance(9.9)
        await ticks(40)
        assert not wait.done()
        clock.advance(0.2)
        await ticks(40)
        with pytest.raises(ah.PublisherFailedError, match="trainer failed at step 5, wanted 9") as caught:
            await wait
        assert "found dead" in str(caught.value.__cause__)
    await close_dead(dead, clock)
    assert any("trainer was found dead" in message for message in caplog.messages)


async def test_leases_are_renewed(clock: ManualClock, engine: FakeEngine) -> None:
    """A living publisher is not taken for dead, however long it is idle."""
    async with FakeStepStore(engine) as a, FakeStepStore(engine) as b:
        a.publisher("trainer")
        await a.flush()
        wait = asyncio.ensure_future(b.wait_for(9))
        for _ in range(100):
            await ticks(40)
            clock.advance(1)
        assert not wait.done()
        await a.advance(9)
        assert await wait == 9


async def test_waiters_stay_for_the_next_chief_if_asked(clock: ManualClock, engine: FakeEngine) -> None:
    """With `on_lost="keep"` waiters stay when a publisher is found dead, and are woken by its successor."""
    dead = Killable(engine)
    async with FakeStepStore(engine, on_lost="keep") as b:
        dead.publisher("trainer")
        await dead.advance(5)
        await dead.flush()
        wait = asyncio.ensure_future(b.wait_for(9))
        await ticks(40)
        await kill(dead)
        for _ in range(30):
            clock.advance(1)
            await ticks(40)
        assert b.statistics().publishers == ()
        assert not wait.done()
        async with FakeStepStore(engine) as again:
            with again.publisher("trainer"):
                await again.advance(4)
                assert await wait == 9
    await close_dead(dead, clock)


async def test_the_lead_of_a_dead_chief_is_taken_over(clock: ManualClock, engine: FakeEngine) -> None:
    """The lead is free when the dead chief's lease has run out."""
    dead = Killable(engine)
    lead = dead.lead()
    assert (await lead.__aenter__()).number == 1
    await dead.flush()
    await kill(dead)
    async with FakeStepStore(engine) as b:

        async def second() -> int:
            async with b.lead() as term:
                return term.number

        takes = asyncio.ensure_future(second())
        await ticks(40)
        clock.advance(9)
        await ticks(40)
        assert not takes.done()
        clock.advance(1.1)
        assert await takes == 2
    await close_dead(dead, clock)
    await lead.__aexit__(None, None, None)  # harmless by then


async def test_waiting_for_the_lead_can_be_cancelled(engine: FakeEngine) -> None:
    """A wait for the lead can be cancelled; a chief cannot take the lead twice."""
    async with FakeStepStore(engine) as a, FakeStepStore(engine) as b:
        async with a.lead():
            takes = asyncio.ensure_future(b.lead().__aenter__())
            await ticks(40)
            takes.cancel()
            with pytest.raises(asyncio.CancelledError):
                await takes
        async with b.lead(), asyncio.timeout(5):
            with pytest.raises(ah.errors.InvalidArgumentError, match="leads already"):
                async with b.lead():
                    pass


async def close_dead(dead: Killable, clock: ManualClock) -> None:
    """Close the dead store, which has no engine to answer it."""
    closing = asyncio.ensure_future(dead.aclose())
    for _ in range(4):
        await ticks(40)
        clock.advance(3)
    await closing


async def test_a_local_failure_keeps_its_error(engine: FakeEngine) -> None:
    """In the process that failed, waiters get the error itself as the cause, also after the engine has reported the exit."""
    async with FakeStepStore(engine) as a:
        trainer = a.publisher("trainer")
        await a.flush()
        error = ValueError("a bad batch")
        trainer.close(error)
        await a.flush()
        await a.value()
        with pytest.raises(ah.PublisherFailedError, match="trainer failed at step 0") as caught:
            await a.wait_for(5)
        assert caught.value.__cause__ is error


# --- exits from before the store was opened


async def test_a_run_that_had_ended_may_begin_again(clock: ManualClock, engine: FakeEngine) -> None:
    """A worker that starts before its chief, after an earlier run: its wait ends only when no publisher registers in time."""
    async with FakeStepStore(engine) as a:
        with a.publisher("yesterday's chief"):
            await a.advance(3)
    async with FakeStepStore(engine, join_grace_secs=20) as b, FakeStepStore(engine, join_grace_secs=20) as c:
        early, late = asyncio.ensure_future(b.wait_for(5)), asyncio.ensure_future(c.wait_for(50))
        await ticks(40)
        clock.advance(19)
        await ticks(40)
        assert not early.done()
        clock.advance(2)
        await ticks(40)
        for wait in (early, late):
            with pytest.raises(ah.errors.PublisherFinishedError, match="yesterday's chief finished at step 3"):
                await wait
    async with FakeStepStore(engine, join_grace_secs=20) as b:
        wait = asyncio.ensure_future(b.wait_for(5))
        await ticks(40)
        async with FakeStepStore(engine) as d:
            with d.publisher("chief"):
                await d.flush()
                clock.advance(60)
                await ticks(40)
                await d.advance(2)
                assert await wait == 5
