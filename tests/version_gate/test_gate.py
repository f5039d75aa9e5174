"""The version gate: how many items are admitted, tickets, invalid use, and use without a
session.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import textwrap
from typing import Any

import pytest

from aiohooks.errors import InvalidArgumentError, WrongLoopError
from aiohooks.stores import MemoryStepStore, Position
from aiohooks.stores._protocol import MAX_STEP
from aiohooks.testing import ManualClock
from aiohooks.version_gate import Ticket, VersionGate
from tests.project.test_architecture import NO_FRONT_DOOR, ONLY_CORE
from tests.support.processes import run_python
from tests.support.version_gates import admit_items, admit_one, start_waiting
from tests.support.waiting import ticks

pytestmark = pytest.mark.every_python


async def cancel_tasks(tasks: list[asyncio.Task[Ticket]]) -> None:
    """Cancel the tasks and wait for them."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(("max_lag", "per_version"), [(0, 3), (2, 4)])
async def test_room_for_items(max_lag: int, per_version: int) -> None:
    """Items for the next version and for `max_lag` more are admitted immediately, and one more
    waits.
    """
    versions = MemoryStepStore(7)
    gate = VersionGate(versions, max_lag=max_lag, per_version=per_version)
    tickets = await admit_items(gate, (max_lag + 1) * per_version)
    assert [ticket.step for ticket in tickets] == [
        7 + number // per_version for number in range(len(tickets))
    ]
    assert max(ticket.step - ticket.version for ticket in tickets) == max_lag
    assert gate.statistics().room == 0
    late = start_waiting(gate)
    await ticks(10)
    assert gate.statistics().waiting == 1
    await cancel_tasks(late)


async def test_an_admission_is_entered_once() -> None:
    """The block of one item cannot be entered again."""
    gate = VersionGate(MemoryStepStore(), max_lag=1)
    admission = gate.admit()
    async with admission:
        pass
    with pytest.raises(InvalidArgumentError, match="call admit"):
        async with admission:
            pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_lag": -1}, "max_lag -1"),
        ({"max_lag": 0.5}, "max_lag 0.5"),
        ({"max_lag": True}, "max_lag True"),
        ({"max_lag": 0, "per_version": 0}, "per_version 0"),
    ],
)
def test_invalid_bounds(options: dict[str, Any], message: str) -> None:
    """The bound is a whole number from 0, the number of items of a version one from 1."""
    with pytest.raises(InvalidArgumentError, match=message):
        VersionGate(MemoryStepStore(), **options)


def test_invalid_arguments() -> None:
    """What is not a store, not seconds or not callable is refused."""
    with pytest.raises(InvalidArgumentError, match="versions is 3; give a StepStore"):
        VersionGate(3, max_lag=1)  # type: ignore[arg-type]
    gate = VersionGate(MemoryStepStore(), max_lag=1)
    with pytest.raises(InvalidArgumentError, match="timeout is -1"):
        gate.admit(timeout=-1)
    with pytest.raises(InvalidArgumentError, match="until is 'stop'"):
        gate.admit(until="stop")  # type: ignore[arg-type]


def test_a_gate_belongs_to_a_loop() -> None:
    """In another loop, or in none, everything except reading is refused."""
    gate = VersionGate(MemoryStepStore(), max_lag=1)

    async def main() -> Ticket:
        return await admit_one(gate)

    ticket = asyncio.run(main())
    with pytest.raises(WrongLoopError):
        ticket.use()
    with pytest.raises(WrongLoopError):
        asyncio.run(main())
    assert (gate.statistics().open, ticket.lag, repr(gate)) == (
        1,
        0,
        "<version gate of 'default' at version 0, max_lag 1, 1 open>",
    )


ALONE = """
    import asyncio
    from aiohooks.stores import MemoryStepStore
    from aiohooks.version_gate import VersionGate

    async def main():
        versions = MemoryStepStore()
        gate = VersionGate(versions, max_lag=0)

        async def work():
            async with gate.admit() as ticket:
                return ticket.version

        first, second = asyncio.create_task(work()), asyncio.create_task(work())
        await asyncio.sleep(0)
        await versions.advance()
        assert (await first, await second) == (0, 1)

    asyncio.run(main())
    loaded = sorted(name for name in sys.modules if name.startswith("aiohooks."))
    others = {"aiohooks.graph.session", "aiohooks.graph.graph", "aiohooks.session.coordinator"}
    assert not others & set(loaded), loaded
"""


def test_it_works_alone() -> None:
    """The gate imports and works without the session, with the standard library and anyio only."""
    program = "".join(map(textwrap.dedent, (ONLY_CORE, NO_FRONT_DOOR, ALONE)))
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr


async def test_statistics_of_lags_and_waits(clock: ManualClock) -> None:
    """The mean is over the items used; nothing has waited at first; a wait is counted with its own
    seconds, not the clock's.
    """
    clock.advance(1_000)
    versions = MemoryStepStore()
    gate = VersionGate(versions, max_lag=2)
    new = gate.statistics()
    assert (new.waits, new.waited_secs, new.lag_mean, new.lag_max) == (0, 0.0, 0.0, 0)
    tickets = await admit_items(gate, 3)
    late = start_waiting(gate)
    await ticks(10)
    clock.advance(4)
    for ticket in tickets:
        assert ticket.use()
        await versions.advance()
    await late[0]
    found = gate.statistics()
    assert (found.waits, found.waited_secs) == (1, 4.0)
    assert (found.used, found.lag_mean, found.lag_max) == (3, 1.0, 2)


# -- how waits in its queue end


async def test_ending_all_waits_is_linear() -> None:
    """When no more versions will come each waiter is woken once, so that the work is linear in
    their number.
    """

    async def calls(waiters: int) -> int:
        versions = MemoryStepStore()
        gate = VersionGate(versions, max_lag=0)
        _held = await admit_items(gate, 1)
        tasks = start_waiting(gate, waiters)
        await ticks(10)
        seen: list[str] = []
        sys.setprofile(
            lambda frame, event, argument: seen.append(event) if event == "call" else None
        )
        try:
            await versions.aclose()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            sys.setprofile(None)
        return len(seen)

    assert await calls(500) < 15 * await calls(50)


async def test_a_wait_that_lasts_says_who_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """Once a minute a line says how many wait, for what, who publishes and who admitted the open
    items.
    """
    caplog.set_level(logging.INFO, logger="aiohooks.version_gate")
    with ManualClock() as clock:
        versions = MemoryStepStore(run="weights")
        gate = VersionGate(versions, max_lag=0)
        with versions.publisher("trainer"):
            _held = await asyncio.create_task(admit_items(gate, 1), name="worker-0")
            for secs in (59, 59, 61, 59):
                late = start_waiting(gate, 2)
                await ticks(10)
                clock.advance(secs)
                await cancel_tasks(late)
            late = start_waiting(gate, 1)
            await ticks(10)
            clock.advance(180)
            await cancel_tasks(late)
    gate_now = "<version gate of 'weights' at version 0, max_lag 0, 1 open, {} waiting>"
    for_what = (
        "version 1 or a dropped item, published by trainer; its open items were admitted by"
        " worker-0"
    )
    assert [
        record.getMessage() for record in caplog.records if record.name == "aiohooks.version_gate"
    ] == [
        f"{gate_now.format(count)}: waiting for {for_what}, for {secs} s now"
        for count, secs in ((2, 60), (1, 60), (1, 120), (1, 180))
    ]
    assert clock.pending == 0


# -- tickets


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
    async with gate.admit() as used:
        assert used.use()
        with pytest.raises(
            InvalidArgumentError, match=r"<Ticket 0 .*> was used already: one item, one use"
        ):
            used.use()
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
