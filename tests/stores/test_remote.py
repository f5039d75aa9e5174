"""Stores behind a connection: outages, lost answers, lost data, leases that run out, the end of a process."""

from __future__ import annotations

import asyncio
import logging

import pytest

import aiohooks as ah
from aiohooks.stores._protocol import MAX_STEP, Answer, Position, Request
from aiohooks.testing import ManualClock
from tests.support.fake_engine import FakeEngine, FakeStepStore
from tests.support.waiting import ticks


@pytest.fixture
def engine(clock: ManualClock) -> FakeEngine:
    return FakeEngine()


async def settle() -> None:
    await ticks(40)


# --- outages


async def test_waits_and_writes_survive_an_outage(clock: ManualClock, engine: FakeEngine) -> None:
    """A wait and a write that an outage interrupts end when the engine is back."""
    async with FakeStepStore(engine) as a, FakeStepStore(engine) as b:
        wait = asyncio.ensure_future(b.wait_for(2))
        await a.advance()
        engine.go()
        write = asyncio.ensure_future(a.advance())
        for _ in range(20):
            await settle()
            clock.advance(5)
        assert not write.done()
        assert not wait.done()
        assert a.outage_secs is not None
        engine.come_back()
        await settle()
        clock.advance(6)
        assert await write == 2
        assert await wait == 2
        await settle()
        clock.advance(6)
        await settle()
        assert a.outage_secs is None


async def test_a_lost_answer_counts_once(clock: ManualClock, engine: FakeEngine) -> None:
    """A write whose answer was lost, once or three times, is repeated and counted once."""
    async with FakeStepStore(engine) as a:
        for lost in (1, 3):
            engine.answers_to_lose = lost
            write = asyncio.ensure_future(a.advance())
            while not write.done():
                await settle()
                clock.advance(5)
        assert (await a.value()).step == 2


async def test_an_engine_that_lost_its_data_goes_on_where_it_was(
    clock: ManualClock, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Also without anybody's advance: the members and the step are told again by those who know them."""
    async with FakeStepStore(engine, lease_secs=10_000) as a, FakeStepStore(engine) as b:
        a.publisher("trainer")
        await a.advance(98)
        wait = asyncio.ensure_future(b.wait_for(100))
        await settle()
        engine.go(data_lost=True)
        await settle()
        engine.come_back()
        clock.advance(6)
        await settle()
        assert engine.runs["default"].position.step == 98
        assert [member.name for member in engine.runs["default"].members.values()] == ["trainer"]
        assert await a.advance(2) == 100
        assert await wait == 100
    assert any("came back" in message for message in caplog.messages)


async def test_max_outage_ends_waits_and_writes(clock: ManualClock, engine: FakeEngine) -> None:
    """After `max_outage_secs` waits and writes end with StoreUnavailableError; when the engine is back all works again."""
    async with FakeStepStore(engine, max_outage_secs=30) as a:
        await a.advance()
        wait = asyncio.ensure_future(a.wait_for(9))
        await settle()
        engine.go()
        write = asyncio.ensure_future(a.advance())
        for _ in range(8):
            await settle()
            clock.advance(5)
        await settle()
        for call in (wait, write, a.wait_for(10)):
            with pytest.raises(ah.errors.StoreUnavailableError, match="no connection for 30"):
                await call
        engine.come_back()
        clock.advance(6)
        await settle()
        assert await a.advance() == 2
        assert await a.wait_for(2) == 2


async def test_first_connection_gives_up_in_time(clock: ManualClock, engine: FakeEngine) -> None:
    """The first call fails after `connect_timeout`, and the next one tries again."""
    engine.go()
    store = FakeStepStore(engine, connect_timeout=7)
    calls = [asyncio.ensure_future(store.advance()), asyncio.ensure_future(store.wait_for(3))]
    for _ in range(10):
        await settle()
        clock.advance(1)
    for call in calls:
        with pytest.raises(ah.errors.StoreUnavailableError, match="away"):
            await call
    engine.come_back()
    assert await store.advance() == 1  # the next call tries again
    await store.aclose()


async def test_closing_while_the_engine_is_away_is_bounded(clock: ManualClock, engine: FakeEngine) -> None:
    """Closing does not wait for an engine that is away; pending writes end with StoreClosedError."""
    store = FakeStepStore(engine)
    await store.advance()
    store.publisher("p")
    engine.go()
    writes = [asyncio.ensure_future(store.advance()) for _ in range(3)]
    await settle()
    closing = asyncio.ensure_future(store.aclose())
    for _ in range(4):
        await settle()
        clock.advance(3)
    await closing
    for write in writes:
        with pytest.raises(ah.errors.StoreClosedError):
            await write


async def test_caller_that_leaves_in_an_outage_is_not_written_for(clock: ManualClock, engine: FakeEngine) -> None:
    """An advance that was cancelled before it was sent is never done."""
    async with FakeStepStore(engine) as a:
        await a.advance()
        engine.go()
        first, second = (asyncio.ensure_future(a.advance()) for _ in range(2))
        await settle()
        third = asyncio.ensure_future(a.advance(10))
        await settle()
        third.cancel()
        await settle()
        engine.come_back()
        clock.advance(6)
        await settle()
        clock.advance(6)
        assert [await first, await second] == [2, 3]
        assert (await a.value()).step == 3


# --- combining


async def test_concurrent_advances_are_one_request(engine: FakeEngine) -> None:
    """Advances of one process that come together are one request, and each learns its own step."""
    async with FakeStepStore(engine) as a:
        await a.advance()
        engine.requests.clear()
        results = await asyncio.gather(*(a.advance(number) for number in range(1, 65)))
        assert results == [1 + sum(range(1, number + 1)) for number in range(1, 65)]
        assert len(engine.requests) <= 2


async def test_order_of_different_writes_is_kept(engine: FakeEngine) -> None:
    """Advances are not combined across a raise or a reset."""
    async with FakeStepStore(engine) as a:
        advance, raised, more, reset, last = await asyncio.gather(
            a.advance(2), a.raise_to(10), a.advance(), a.reset(4), a.advance()
        )
        assert (advance, raised, more, reset, last) == (2, 10, 11, Position(2, 4), 5)


async def test_each_caller_gets_an_error_of_its_own(engine: FakeEngine) -> None:
    """Combined callers are refused each with an error of its own."""
    async with FakeStepStore(engine) as a:
        await a.raise_to(MAX_STEP - 1)
        results = await asyncio.gather(a.advance(), a.advance(), return_exceptions=True)
        assert [type(result) for result in results] == [ah.errors.InvalidArgumentError] * 2
        assert results[0] is not results[1]
        assert await a.advance() == MAX_STEP


# --- leases


async def lost(clock: ManualClock, secs: float = 11.0) -> None:
    """Time goes by in which nobody can renew."""
    clock.advance(secs)
    await settle()


class Silent(FakeStepStore):
    """A process that is killed when `dead` is set: nothing it asks for arrives any more."""

    dead = False

    async def _request_once(self, request: Request) -> Answer:
        if self.dead:
            await asyncio.Event().wait()
        return await super()._request_once(request)


async def kill(store: Silent) -> None:
    store.dead = True
    for task in tuple(store._tasks):  # pyright: ignore[reportPrivateUsage]
        task.cancel()
    await settle()


async def test_a_dead_publisher_is_told_within_its_lease(
    clock: ManualClock, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """A publisher that is killed is known dead when its lease runs out, not before, and waiters are told."""
    dead = Silent(engine)
    async with FakeStepStore(engine) as b:
        dead.publisher("trainer")
        await dead.advance(5)
        await dead.flush()
        wait = asyncio.ensure_future(b.wait_for(9))
        await settle()
        await kill(dead)
        clock.advance(9.9)
        await settle()
        assert not wait.done()
        clock.advance(0.2)
        await settle()
        with pytest.raises(ah.PublisherFailedError, match="trainer failed at step 5, wanted 9") as caught:
            await wait
        assert "found dead" in str(caught.value.__cause__)
    await bury(dead, clock)
    assert any("trainer was found dead" in message for message in caplog.messages)


async def test_leases_are_renewed(clock: ManualClock, engine: FakeEngine) -> None:
    """A publisher that lives is not taken for dead, however long it does nothing."""
    async with FakeStepStore(engine) as a, FakeStepStore(engine) as b:
        a.publisher("trainer")
        await a.flush()
        wait = asyncio.ensure_future(b.wait_for(9))
        for _ in range(100):
            await settle()
            clock.advance(1)
        assert not wait.done()
        await a.advance(9)
        assert await wait == 9


async def test_waiters_stay_for_the_next_chief_if_asked(clock: ManualClock, engine: FakeEngine) -> None:
    """With `on_lost="keep"` waiters stay when a publisher is found dead, and are woken by its successor."""
    dead = Silent(engine)
    async with FakeStepStore(engine, on_lost="keep") as b:
        dead.publisher("trainer")
        await dead.advance(5)
        await dead.flush()
        wait = asyncio.ensure_future(b.wait_for(9))
        await settle()
        await kill(dead)
        for _ in range(30):
            clock.advance(1)
            await settle()
        assert b.statistics().publishers == ()
        assert not wait.done()
        async with FakeStepStore(engine) as again:
            with again.publisher("trainer"):
                await again.advance(4)
                assert await wait == 9
    await bury(dead, clock)


async def test_the_lead_of_a_dead_chief_is_taken_over(clock: ManualClock, engine: FakeEngine) -> None:
    """The lead is free when the dead chief's lease has run out."""
    dead = Silent(engine)
    lead = dead.lead()
    assert (await lead.__aenter__()).number == 1
    await dead.flush()
    await kill(dead)
    async with FakeStepStore(engine) as b:

        async def second() -> int:
            async with b.lead() as term:
                return term.number

        takes = asyncio.ensure_future(second())
        await settle()
        clock.advance(9)
        await settle()
        assert not takes.done()
        clock.advance(1.1)
        assert await takes == 2
    await bury(dead, clock)
    await lead.__aexit__(None, None, None)  # harmless by then


async def test_waiting_for_the_lead_can_be_cancelled(engine: FakeEngine) -> None:
    """Who waits for the lead can be cancelled; who has it cannot take it twice."""
    async with FakeStepStore(engine) as a, FakeStepStore(engine) as b:
        async with a.lead():
            takes = asyncio.ensure_future(b.lead().__aenter__())
            await settle()
            takes.cancel()
            with pytest.raises(asyncio.CancelledError):
                await takes
        async with b.lead(), asyncio.timeout(5):
            with pytest.raises(ah.errors.InvalidArgumentError, match="leads already"):
                async with b.lead():
                    pass


async def bury(dead: Silent, clock: ManualClock) -> None:
    """What is left of it in this process is closed."""
    closing = asyncio.ensure_future(dead.aclose())
    for _ in range(4):
        await settle()
        clock.advance(3)
    await closing


async def test_an_own_failure_stays_the_error_itself(engine: FakeEngine) -> None:
    """In the process that failed waiters get its error as the cause, also after the engine has told of it."""
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


# --- departures that were there before


async def test_a_run_that_had_ended_may_begin_again(clock: ManualClock, engine: FakeEngine) -> None:
    """A worker that comes before its chief, after an earlier run: it is told only when nobody has come for a while."""
    async with FakeStepStore(engine) as a:
        with a.publisher("yesterday's chief"):
            await a.advance(3)
    async with FakeStepStore(engine, join_grace_secs=20) as b, FakeStepStore(engine, join_grace_secs=20) as c:
        early, late = asyncio.ensure_future(b.wait_for(5)), asyncio.ensure_future(c.wait_for(50))
        await settle()
        clock.advance(19)
        await settle()
        assert not early.done()
        clock.advance(2)
        await settle()
        for wait in (early, late):
            with pytest.raises(ah.errors.PublisherFinishedError, match="yesterday's chief finished at step 3"):
                await wait
    async with FakeStepStore(engine, join_grace_secs=20) as b:
        wait = asyncio.ensure_future(b.wait_for(5))
        await settle()
        async with FakeStepStore(engine) as d:
            with d.publisher("chief"):
                await d.flush()
                clock.advance(60)
                await settle()
                await d.advance(2)
                assert await wait == 5


# --- no poll


async def test_nothing_is_asked_while_nobody_waits(
    clock: ManualClock, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """No poll: a process without publishers that waits, or does not, asks the engine for nothing."""
    caplog.set_level(logging.INFO)
    async with FakeStepStore(engine) as b:
        wait = asyncio.ensure_future(b.wait_for(5))
        await settle()
        engine.requests.clear()
        for _ in range(60):
            clock.advance(60)
            await settle()
        assert engine.requests == []
        async with FakeStepStore(engine) as a:
            await a.advance(5)
        assert await wait == 5
        assert len(engine.requests) == 1
