"""Tickets: how old an item is, whether it may be used, and how its block and a reset settle it."""

from __future__ import annotations

import asyncio

import pytest

from aiohooks.errors import InvalidArgumentError, WrongLoopError
from aiohooks.stores import MemoryStepStore, Position
from aiohooks.stores._protocol import MAX_STEP
from aiohooks.version_gate import VersionGate
from tests.support.version_gates import admit_items, start_waiting
from tests.support.waiting import ticks

pytestmark = pytest.mark.every_python


def test_a_gate_is_used_in_an_event_loop() -> None:
    """Without one it says so."""
    with pytest.raises(WrongLoopError, match="is used where no event loop is running"):
        VersionGate(MemoryStepStore(), max_lag=1).admit().__aenter__().send(None)


async def test_the_version_is_that_at_which_the_task_runs() -> None:
    """A version that is published after an item was admitted and before its task runs is the
    item's: it will read that one.
    """
    versions = MemoryStepStore()
    gate = VersionGate(versions, max_lag=0)
    (first,) = await admit_items(gate, 1)
    late = start_waiting(gate)
    await ticks(10)
    first.drop()
    await versions.advance()
    assert (await late[0]).version == 1


async def test_lag_of_a_position_from_elsewhere() -> None:
    """`lag_of` gives the lag of an item of another process by its position, with the same rule."""
    versions = MemoryStepStore(5)
    gate = VersionGate(versions, max_lag=1)
    assert [gate.lag_of(Position(1, step)) for step in (5, 4, 0, 9)] == [0, 1, 5, 0]
    await versions.reset(5)
    assert gate.lag_of(Position(1, 5)) == MAX_STEP
    assert gate.lag_of(Position(2, 5)) == 0


@pytest.mark.parametrize("how", ["cancelled", "failed", "block never left"])
async def test_the_ticket_of_a_task_that_has_ended_is_given_back(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """When the task that had an open ticket has ended and nothing else refers to it, its place is
    free; a log line says so.
    """
    gate = VersionGate(MemoryStepStore(run="weights"), max_lag=0)
    taken = asyncio.Event()

    async def hold() -> None:
        ticket = (
            await gate.admit().__aenter__()
            if how == "block never left"
            else (await admit_items(gate, 1))[0]
        )
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
    (message,) = caplog.messages
    assert "item 0, admitted by task 'holder', is abandoned" in message


async def test_a_lost_ticket_that_is_reset_counts_once() -> None:
    """A reset invalidates the items of lost tickets too; later their collection changes nothing,
    and it needs no open gate.
    """
    versions = MemoryStepStore()
    gate = VersionGate(versions, max_lag=1)
    await admit_items(gate, 2)  # the tickets are lost here
    await versions.reset(5)
    assert gate.statistics().invalidated == 2
    await ticks()
    statistics = gate.statistics()
    assert (statistics.admitted, statistics.invalidated, statistics.abandoned, statistics.room) == (
        2,
        2,
        0,
        2,
    )


async def test_an_item_is_used_once() -> None:
    """A second `use`, and a `use` or `drop` after the block has shipped the item, are errors that
    say what to do.
    """
    gate = VersionGate(MemoryStepStore(), max_lag=1)
    async with gate.admit() as one:
        assert one.use()
        with pytest.raises(
            InvalidArgumentError, match=r"<Ticket 0 .*> was used already: one item, one use"
        ):
            one.use()
    async with gate.admit() as two:
        pass
    for call in (two.use, two.drop):
        with pytest.raises(
            InvalidArgumentError, match=r"was shipped already: .* call hand_off\(\) inside"
        ):
            call()


async def test_an_item_without_a_block() -> None:
    """`admit_nowait` gives a ticket while there is room; `ship` settles it as the end of a block
    does.
    """
    versions = MemoryStepStore()
    gate = VersionGate(versions, max_lag=0)
    ticket = gate.admit_nowait()
    assert ticket is not None
    assert gate.admit_nowait() is None
    ticket.ship()
    ticket.ship()  # settled
    assert (ticket.state, gate.admit_nowait()) == ("shipped", None)
    await versions.advance()
    assert gate.admit_nowait() is not None
