"""The version gate: who is let in, how old an item is at its use, and what a new generation changes."""

from __future__ import annotations

import asyncio

import pytest

from aiohooks.errors import StepTimeoutError
from aiohooks.stores import MemoryStepStore, Position
from aiohooks.stores._protocol import MAX_STEP
from aiohooks.version_gate import VersionGate
from tests.support.version_gates import give_up, let_in, settle, ticket, waiting

pytestmark = pytest.mark.every_python

# Room.


@pytest.mark.parametrize(("max_lag", "per_version"), [(0, 1), (0, 3), (1, 1), (2, 4)])
async def test_so_many_are_let_in(max_lag: int, per_version: int) -> None:
    """Items for the next version and for `max_lag` more are let in at once, and one more waits."""
    versions = MemoryStepStore(7)
    gate = VersionGate(versions, max_lag=max_lag, per_version=per_version)
    tickets = await let_in(gate, (max_lag + 1) * per_version)
    assert [one.step for one in tickets] == [7 + number // per_version for number in range(len(tickets))]
    assert max(one.step - one.version for one in tickets) == max_lag
    assert gate.statistics().room == 0
    late = waiting(gate)
    await settle()
    assert gate.statistics().waiting == 1
    await give_up(late)


async def test_a_version_makes_room_for_its_items() -> None:
    """When items were used and the version they were for is published, as many are let in, first come first served."""
    versions = MemoryStepStore()
    gate = VersionGate(versions, max_lag=1, per_version=2)
    tickets = await let_in(gate, 4)
    late = waiting(gate, 3)
    await settle()
    assert tickets[0].use()
    assert tickets[1].use()
    await settle()
    assert gate.statistics().waiting == 3, "use alone makes no room: the version is not there yet"
    await versions.advance()
    await settle()
    assert [task.done() for task in late] == [True, True, False]
    assert [task.result().version for task in late[:2]] == [1, 1]
    assert [task.result().step for task in late[:2]] == [2, 2]
    await give_up(late)


async def test_an_item_given_up_makes_room_at_once() -> None:
    """A dropped or abandoned item lets the next one in, without any new version."""
    gate = VersionGate(MemoryStepStore(), max_lag=0, per_version=2)
    first, second = await let_in(gate, 2)
    late = waiting(gate, 3)
    await settle()
    first.drop()
    first.drop()  # harmless
    await settle()
    assert [task.done() for task in late] == [True, False, False]
    second.drop()
    await settle()
    assert [task.done() for task in late] == [True, True, False]
    assert gate.statistics().dropped == 2
    await give_up(late)


async def test_nobody_passes_those_who_wait() -> None:
    """Who comes when there is room again, but others wait still, stands behind them."""
    versions = MemoryStepStore()
    gate = VersionGate(versions, max_lag=0)
    (first,) = await let_in(gate, 1)
    order: list[str] = []

    async def enter(name: str) -> None:
        async with gate.admit() as one:
            order.append(name)
            one.drop()

    early = asyncio.create_task(enter("early"))
    await settle()
    first.drop()  # early is let in and has not run yet
    await asyncio.gather(early, enter("late"))
    assert order == ["early", "late"]


async def test_shipped_items_keep_their_places_until_versions_use_them_up() -> None:
    """A block that ends has shipped its item: it is counted until a version was published that used it up."""
    versions = MemoryStepStore()
    gate = VersionGate(versions, max_lag=1, per_version=2)
    for _ in range(4):
        async with gate.admit(timeout=0):
            pass
    with pytest.raises(StepTimeoutError, match="some comes with version 1"):
        await ticket(gate, timeout=0)
    await versions.advance()
    assert gate.statistics().room == 2
    await versions.advance(5)
    assert gate.statistics().room == 4, "and never more than at the start"
    assert (gate.statistics().shipped, gate.statistics().open) == (4, 0)


async def test_a_trainer_may_use_more_or_less_than_it_said() -> None:
    """The room does not depend on what was used long ago: nothing drifts, and nothing is ever used up for good."""
    versions = MemoryStepStore()
    gate = VersionGate(versions, max_lag=1, per_version=2)
    for used in (3, 0, 1, 4, 4, 4, 2):
        for one in await let_in(gate, 4):
            if used > 0:
                used -= one.use()
            else:
                one.drop()
        await versions.advance()
    assert gate.statistics().room == 4


# Lag.


async def test_the_lag_is_measured_at_use() -> None:
    """`lag` counts the versions published since the item was let in, until it is settled."""
    versions = MemoryStepStore(3)
    gate = VersionGate(versions, max_lag=2)
    (one,) = await let_in(gate, 1)
    seen = [one.lag]
    for _ in range(2):
        await versions.advance()
        seen.append(one.lag)
    assert seen == [0, 1, 2]
    assert one.use()
    await versions.advance(4)
    assert (one.lag, one.version, one.state) == (2, 3, "used")
    assert (gate.statistics().lag_max, gate.statistics().lag_mean) == (2, 2.0)


async def test_what_is_too_old_is_not_used() -> None:
    """One version more than `max_lag`, and `use` says no; the place is free again."""
    versions = MemoryStepStore()
    gate = VersionGate(versions, max_lag=1)
    old, new = await let_in(gate, 2)
    await versions.advance(2)
    assert (old.use(), new.use()) == (False, False)
    assert (old.state, old.lag) == ("too old", 2)
    assert not old.use(), "and it stays so"
    statistics = gate.statistics()
    assert (statistics.used, statistics.dropped, statistics.too_old) == (0, 2, 2)
    assert (statistics.lag_max, statistics.room) == (0, 2)


async def test_the_version_is_the_one_at_which_it_runs() -> None:
    """A version that is published after an item was let in and before its task runs is the item's: it will read that one."""
    versions = MemoryStepStore()
    gate = VersionGate(versions, max_lag=0)
    (first,) = await let_in(gate, 1)
    late = waiting(gate)
    await settle()
    first.drop()
    await versions.advance()
    assert (await late[0]).version == 1


async def test_what_is_due() -> None:
    """`due` counts the open items that would be too old with one more version."""
    versions = MemoryStepStore()
    gate = VersionGate(versions, max_lag=1, per_version=2)
    old = await let_in(gate, 2)
    assert gate.due == 0
    await versions.advance()
    await let_in(gate, 2)
    assert gate.due == gate.statistics().due == 2
    assert old[0].use()
    old[1].drop()
    assert gate.due == 0


async def test_a_mark_from_elsewhere() -> None:
    """The lag of an item that came with its position: what another process let in is judged by the same rule."""
    versions = MemoryStepStore(5)
    gate = VersionGate(versions, max_lag=1)
    assert [gate.lag_of(Position(1, step)) for step in (5, 4, 0, 9)] == [0, 1, 5, 0]
    await versions.reset(5)
    assert gate.lag_of(Position(1, 5)) == MAX_STEP
    assert gate.lag_of(Position(2, 5)) == 0


# Generations.


async def test_a_reset_ends_the_items_of_the_old_generation() -> None:
    """After a reset of the versions open items are outdated, and there is as much room as at the beginning."""
    versions = MemoryStepStore(10)
    gate = VersionGate(versions, max_lag=1)
    async with gate.admit():
        pass
    (old,) = await let_in(gate, 1)
    late = waiting(gate, 2)
    await settle()
    await versions.reset(10)  # the number alone does not tell
    new = [await task for task in late]
    assert [one.position for one in new] == [Position(2, 10), Position(2, 10)]
    assert old.lag == MAX_STEP
    assert (old.use(), old.state) == (False, "outdated")
    assert gate.statistics().outdated == 1
    assert gate.statistics().open == 2


async def test_a_counter_that_begins_anew_does_not_open_the_gate_wide() -> None:
    """A gate that is made late, or whose versions leap ahead, lets no more in than one that saw them all."""
    versions = MemoryStepStore(500)
    gate = VersionGate(versions, max_lag=1, per_version=2)
    assert len(await let_in(gate, 4)) == 4
    await versions.raise_to(900)
    statistics = gate.statistics()
    assert (statistics.open, statistics.room) == (4, 0)
    await versions.reset(3)
    assert gate.statistics().room == 4
