"""Tickets: how old an item is, whether it may be used, and how its block and a reset settle it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from aiohooks.errors import InvalidArgumentError, WrongLoopError
from aiohooks.stores import MemoryStepStore, Position
from aiohooks.stores._protocol import MAX_STEP
from aiohooks.version_gate import VersionGate
from tests.support.version_gates import admit_items, start_waiting
from tests.support.waiting import ticks

pytestmark = pytest.mark.every_python


async def test_the_lag_is_measured_at_use() -> None:
    """`lag` counts the versions published since the item was admitted, until it is settled."""
    versions = MemoryStepStore(3)
    gate = VersionGate(versions, max_lag=2)
    (one,) = await admit_items(gate, 1)
    seen = [one.lag]
    for _ in range(2):
        await versions.advance()
        seen.append(one.lag)
    assert seen == [0, 1, 2]
    assert one.use()
    await versions.advance(4)
    assert (one.lag, one.version, one.state) == (2, 3, "used")
    assert (gate.statistics().lag_max, gate.statistics().lag_mean) == (2, 2.0)


def test_a_gate_is_used_in_an_event_loop() -> None:
    """Without one it says so."""
    with pytest.raises(WrongLoopError, match="is used where no event loop is running"):
        VersionGate(MemoryStepStore(), max_lag=1).admit().__aenter__().send(None)


async def test_a_stale_item_is_not_used() -> None:
    """`use` refuses an item that is more than `max_lag` versions old, and its place is free again."""
    versions = MemoryStepStore()
    gate = VersionGate(versions, max_lag=1)
    old, new = await admit_items(gate, 2)
    await versions.advance(2)
    assert (old.use(), new.use()) == (False, False)
    assert (old.state, old.lag) == ("stale", 2)
    assert not old.use(), "it stays stale"
    statistics = gate.statistics()
    assert (statistics.used, statistics.dropped, statistics.stale) == (0, 2, 2)
    assert (statistics.lag_max, statistics.room) == (0, 2)


async def test_the_version_is_that_at_which_the_task_runs() -> None:
    """A version that is published after an item was admitted and before its task runs is the item's: it will read that one."""
    versions = MemoryStepStore()
    gate = VersionGate(versions, max_lag=0)
    (first,) = await admit_items(gate, 1)
    late = start_waiting(gate)
    await ticks(10)
    first.drop()
    await versions.advance()
    assert (await late[0]).version == 1


async def test_due_items() -> None:
    """`due` counts the open items that would be stale with one more version."""
    versions = MemoryStepStore()
    gate = VersionGate(versions, max_lag=1, per_version=2)
    old = await admit_items(gate, 2)
    assert gate.due == 0
    await versions.advance()
    _held = await admit_items(gate, 2)
    assert gate.due == gate.statistics().due == 2
    assert old[0].use()
    old[1].drop()
    assert gate.due == 0


async def test_lag_of_a_position_from_elsewhere() -> None:
    """`lag_of` gives the lag of an item of another process by its position, with the same rule."""
    versions = MemoryStepStore(5)
    gate = VersionGate(versions, max_lag=1)
    assert [gate.lag_of(Position(1, step)) for step in (5, 4, 0, 9)] == [0, 1, 5, 0]
    await versions.reset(5)
    assert gate.lag_of(Position(1, 5)) == MAX_STEP
    assert gate.lag_of(Position(2, 5)) == 0


async def test_a_reset_invalidates_open_items() -> None:
    """After a reset of the versions open items are invalidated, and there is as much room as at the beginning."""
    versions = MemoryStepStore(10)
    gate = VersionGate(versions, max_lag=1)
    async with gate.admit():
        pass
    (old,) = await admit_items(gate, 1)
    late = start_waiting(gate, 2)
    await ticks(10)
    await versions.reset(10)  # the number alone does not show the reset
    new = [await task for task in late]
    assert [one.position for one in new] == [Position(2, 10), Position(2, 10)]
    assert old.lag == MAX_STEP
    assert (old.use(), old.state) == (False, "invalidated")
    assert gate.statistics().invalidated == 1
    assert gate.statistics().open == 2


async def test_a_block_that_fails_abandons_its_item() -> None:
    """An error or a cancellation in the block frees the place, also when the ticket was handed off."""
    gate = VersionGate(MemoryStepStore(), max_lag=0)
    with contextlib.suppress(ZeroDivisionError):
        async with gate.admit() as one:
            one.hand_off()
            raise ZeroDivisionError
    assert (one.state, one.use()) == ("abandoned", False)

    async def sleep() -> None:
        async with gate.admit():
            await asyncio.Event().wait()

    task = asyncio.create_task(sleep())
    await ticks(10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    statistics = gate.statistics()
    assert (statistics.abandoned, statistics.dropped, statistics.open, statistics.room) == (2, 2, 0, 1)


@pytest.mark.parametrize("how", ["cancelled", "failed", "block never left"])
async def test_the_ticket_of_a_task_that_has_ended_is_given_back(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """When the task that had an open ticket has ended and nothing else refers to it, its place is free; a log line says so."""
    gate = VersionGate(MemoryStepStore(run="weights"), max_lag=0)
    taken = asyncio.Event()

    async def hold() -> None:
        ticket = await gate.admit().__aenter__() if how == "block never left" else (await admit_items(gate, 1))[0]
        taken.set()
        if how == "failed":
            raise ZeroDivisionError
        if how == "cancelled":
            await asyncio.Event().wait()
        assert ticket.state == "open"

    holder = asyncio.create_task(hold(), name="holder")
    await taken.wait()
    (late,) = start_waiting(gate)
    await ticks(10)
    holder.cancel()
    await asyncio.wait([holder])
    if how == "failed":
        assert isinstance(holder.exception(), ZeroDivisionError)
    del holder  # an error refers to the frames, and so to the ticket
    assert (await late).number == 1
    statistics = gate.statistics()
    assert (statistics.abandoned, statistics.open, statistics.waiting) == (1, 1, 0)
    (record,) = caplog.records
    assert "item 0, admitted by task 'holder', is abandoned" in record.getMessage()


async def test_a_warning_is_about_the_first_lost_ticket(caplog: pytest.LogCaptureFixture) -> None:
    """A program that loses all of its tickets does not log each."""
    gate = VersionGate(MemoryStepStore(), max_lag=2)
    for _ in range(3):
        await admit_items(gate, 1)  # the ticket is lost here
        await ticks()
    assert gate.statistics().abandoned == 3
    assert len(caplog.records) == 1


async def test_a_lost_ticket_that_is_reset_counts_once() -> None:
    """A reset invalidates the items of lost tickets too; later their collection changes nothing, and it needs no open gate."""
    versions = MemoryStepStore()
    gate = VersionGate(versions, max_lag=1)
    await admit_items(gate, 2)  # the tickets are lost here
    await versions.reset(5)
    assert gate.statistics().invalidated == 2
    await ticks()
    statistics = gate.statistics()
    assert (statistics.admitted, statistics.invalidated, statistics.abandoned, statistics.room) == (2, 2, 0, 2)


async def test_an_item_is_shipped_after_the_versions_that_its_block_has_seen() -> None:
    """A version published in the block uses up earlier items only: the place of this one is taken until the next."""
    versions = MemoryStepStore()
    gate = VersionGate(versions, max_lag=1)
    async with gate.admit() as ticket:
        await versions.advance()
    assert (ticket.state, ticket.lag, gate.statistics().room) == ("shipped", 1, 1)
    async with gate.admit() as late:
        await versions.advance(2)
    assert (late.state, late.lag, gate.statistics().room) == ("stale", 2, 2)
    async with gate.admit() as invalid:
        await versions.reset(1)
    assert invalid.state == "invalidated"


async def test_an_item_settled_in_its_block_stays_settled() -> None:
    """A later error or the end of the block does not change the state of a ticket that was settled inside it."""
    gate = VersionGate(MemoryStepStore(), max_lag=1)
    with contextlib.suppress(ZeroDivisionError):
        async with gate.admit() as one:
            assert one.use()
            raise ZeroDivisionError
    async with gate.admit() as two:
        two.drop()
    assert (one.state, two.state) == ("used", "dropped")


async def test_an_item_is_used_once() -> None:
    """A second `use`, and a `use` or `drop` after the block has shipped the item, are errors that say what to do."""
    gate = VersionGate(MemoryStepStore(), max_lag=1)
    async with gate.admit() as one:
        assert one.use()
        with pytest.raises(InvalidArgumentError, match=r"<Ticket 0 .*> was used already: one item, one use"):
            one.use()
    async with gate.admit() as two:
        pass
    for call in (two.use, two.drop):
        with pytest.raises(InvalidArgumentError, match=r"was shipped already: .* call hand_off\(\) inside"):
            call()
