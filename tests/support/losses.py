"""The laws of a step store whose engine loses its data."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohooks.errors import (
    SessionNotReadyError,
    StaleTermError,
    StepResetError,
    StoreResetError,
)
from aiohooks.stores import Position, StepStore
from aiohooks.testing._checks import by_name
from aiohooks.testing.step_store import MakeStore, Run, parked, raises


class LosingRun(Run):
    """The stores of one run, of an engine that can lose its data."""

    lose_data: Callable[[], Awaitable[object]]


async def sees(store: StepStore, position: Position) -> None:
    """Wait until the store has received a position."""
    async for seen in store.changes():
        if seen >= position:
            return


async def begins_a_later_epoch_without_its_data(run: LosingRun) -> None:
    """An engine has lost its data: the writes of each process fail until it acknowledges the loss.
    Waits continue, except for those that a reset ends.
    """
    a, b = run.pair
    await a.advance(5)
    await sees(b, Position(1, 5))
    waits = [await parked(store, store.wait_for(6)) for store in (a, b)]
    raising = await parked(b, b.wait_for(6, on_reset="raise"))
    await run.lose_data()
    for store in (a, b):
        await raises(StoreResetError, store.advance())
        await raises(StoreResetError, store.raise_to(9))
        error = await raises(StoreResetError, store.reset(9))
        assert store.acknowledge_loss() is not None
        assert store.acknowledge_loss() is None
        assert error.old == Position(1, 5), error
        assert error.new > error.old, error
    await raises(StepResetError, raising)
    assert not any(wait.done() for wait in waits)
    assert await b.advance() == 6
    assert [await wait for wait in waits] == [6, 6]
    assert (await a.value()).epoch > 1
    assert await a.reset(2) > error.new


async def keeps_the_lead_without_its_data(run: LosingRun) -> None:
    """An engine has lost its data: the chief continues to lead and initialises the run again. A
    standby keeps waiting, and its term is a newer one.
    """
    a, b = run.pair
    async with a.lead() as first:
        await a.mark_initialised()
        await a.advance(3)
        await b.wait_initialised()
        standby = b.lead()
        entering = asyncio.ensure_future(standby.__aenter__())
        await b.wait_for(3)
        wait = await parked(a, a.wait_for(9))
        await run.lose_data()
        await raises(StoreResetError, wait)
        await raises(StoreResetError, a.wait_for(9))
        await raises(StoreResetError, a.mark_initialised())
        a.acknowledge_loss()
        await sees(b, await a.reset(1))
        await b.value()
        await raises(SessionNotReadyError, b.wait_initialised(0))
        await a.mark_initialised()
        await b.wait_initialised()
        assert await a.advance() == 2
        assert not entering.done()
    second = await entering
    assert second.number > first.number
    b.acknowledge_loss()
    assert await b.advance() == 3
    await standby.__aexit__(None, None, None)


async def has_one_chief_without_its_data(run: LosingRun) -> None:
    """An engine has lost its data, and a process without knowledge of a chief may take the lead:
    one of the two chiefs gets an error.
    """
    a, b = run.pair
    # An engine without data grants the first term, so let the chief have a later one.
    for _ in range(2):
        async with a.lead():
            await a.advance(3)
    async with a.lead():
        await a.advance(3)
        await b.aclose()
        await run.lose_data()
        c = await run.open()
        lead = c.lead()
        entering = asyncio.ensure_future(lead.__aenter__())
        await raises(StoreResetError, a.advance())
        a.acknowledge_loss()
        try:
            step = await a.advance()
        except StaleTermError:
            # The new process was granted the lead before this one was back.
            await entering
            await c.advance()
        else:
            assert step > 9
            if entering.done():
                await raises(StaleTermError, c.advance())
        if entering.done():
            await lead.__aexit__(None, None, None)
        entering.cancel()
        await asyncio.wait([entering])


LOSSES = by_name(
    begins_a_later_epoch_without_its_data,
    keeps_the_lead_without_its_data,
    has_one_chief_without_its_data,
)


async def check_loss(
    make: MakeStore, check: str, lose_data: Callable[[], Awaitable[object]]
) -> None:
    """Run a check on two stores of a run."""
    run = LosingRun(make)
    run.lose_data = lose_data
    try:
        run.pair = (await run.open(), await run.open())
        await LOSSES[check](run)
    finally:
        await run.aclose()
