"""The version gate: how blocks and waits end, and wrong use."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from aiohooks.errors import (
    InvalidArgumentError,
    PublisherFailedError,
    PublisherFinishedError,
    StepTimeoutError,
    StopRequestedError,
    StoreClosedError,
    WrongLoopError,
)
from aiohooks.session.coordinator import Coordinator
from aiohooks.stores import MemoryStepStore
from aiohooks.testing.clock import ManualClock
from aiohooks.version_gate import Ticket, VersionGate
from tests.project.test_architecture import NO_FRONT_DOOR, ONLY_CORE
from tests.support.source import ROOT
from tests.support.version_gates import give_up, let_in, settle, ticket, waiting

pytestmark = pytest.mark.every_python

# How blocks and waits end.


async def test_a_block_that_fails_abandons_its_item() -> None:
    """An error or a cancellation in the block gives the place back, also when the ticket was handed on."""
    gate = VersionGate(MemoryStepStore(), max_lag=0)
    with contextlib.suppress(ZeroDivisionError):
        async with gate.admit() as one:
            one.hand_on()
            raise ZeroDivisionError
    assert (one.state, one.use()) == ("abandoned", False)

    async def sleep() -> None:
        async with gate.admit():
            await asyncio.Event().wait()

    task = asyncio.create_task(sleep())
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    statistics = gate.statistics()
    assert (statistics.abandoned, statistics.dropped, statistics.open, statistics.room) == (2, 2, 0, 1)


async def test_an_item_used_before_an_error_was_used() -> None:
    """What was settled inside the block stays settled."""
    gate = VersionGate(MemoryStepStore(), max_lag=1)
    with contextlib.suppress(ZeroDivisionError):
        async with gate.admit() as one:
            assert one.use()
            raise ZeroDivisionError
    async with gate.admit() as two:
        two.drop()
    assert (one.state, two.state) == ("used", "dropped")


@pytest.mark.parametrize(
    ("error", "kind"), [(RuntimeError("out of memory"), PublisherFailedError), (None, PublisherFinishedError)]
)
async def test_a_dead_publisher_ends_all_waits(error: Exception | None, kind: type[Exception]) -> None:
    """When nobody is left who could publish, everybody in line is told, each by an error of their own; and so are later ones."""
    versions = MemoryStepStore()
    publisher = versions.publisher("trainer")
    gate = VersionGate(versions, max_lag=0)
    (open_one,) = await let_in(gate, 1)
    late = waiting(gate, 3)
    await settle()
    publisher.close(error)
    raised = await asyncio.gather(*late, return_exceptions=True)
    assert [type(one) for one in raised] == [kind] * 3
    assert len({id(one) for one in raised}) == 3
    assert all(isinstance(one, kind) and one.__cause__ is error and "trainer" in str(one) for one in raised)
    with pytest.raises(kind):
        await ticket(gate)
    assert gate.statistics().waiting == 0
    assert open_one.use(), "what is let in may be used still"


async def test_a_closed_store_ends_all_waits() -> None:
    """Closing the store of the versions ends the waits."""
    versions = MemoryStepStore()
    gate = VersionGate(versions, max_lag=0)
    await let_in(gate, 1)
    late = waiting(gate, 2)
    await settle()
    await versions.aclose()
    assert [type(one) for one in await asyncio.gather(*late, return_exceptions=True)] == [StoreClosedError] * 2


async def test_an_end_costs_each_wait_the_same() -> None:
    """Who waits is called once when no more versions will come, not by each of the others: the work grows with their number."""

    async def calls(waiters: int) -> int:
        versions = MemoryStepStore()
        gate = VersionGate(versions, max_lag=0)
        await let_in(gate, 1)
        tasks = waiting(gate, waiters)
        await settle()
        seen: list[str] = []
        sys.setprofile(lambda frame, event, argument: seen.append(event) if event == "call" else None)
        try:
            await versions.aclose()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            sys.setprofile(None)
        return len(seen)

    assert await calls(500) < 15 * await calls(50)


async def test_a_timeout_is_for_each_wait() -> None:
    """The first in line and those behind give up at their own time; the others go on, and the message says what is missing."""
    with ManualClock() as clock:
        versions = MemoryStepStore(run="weights")
        gate = VersionGate(versions, max_lag=0)
        await let_in(gate, 1)
        first, second, third = [*waiting(gate, timeout=5), *waiting(gate, timeout=2), *waiting(gate)]
        await settle()
        clock.advance(2)
        message = r"within 2 s in <version gate of 'weights' at version 0, .*, published by nobody: some comes with version 1, or"
        with pytest.raises(StepTimeoutError, match=message):
            await second
        clock.advance(3)
        with pytest.raises(StepTimeoutError) as caught:
            await first
        assert (caught.value.wanted, caught.value.seen, caught.value.waited_secs) == (1, 0, 5)
        await versions.advance()
        await settle()
        assert not third.done(), "the item of version 0 is open still"
        clock.advance(1)
        await give_up([third])
        statistics = gate.statistics()
        assert (statistics.waits, statistics.max_waiting, statistics.waited_secs) == (3, 3, 2 + 5 + 6)


async def test_a_stop_ends_the_wait() -> None:
    """With `until` a stop, or the failure of a background task, ends the waits of the first in line and of the others."""
    coord = Coordinator()
    gate = VersionGate(MemoryStepStore(), max_lag=0)
    await let_in(gate, 1)
    late = [*waiting(gate, 2, until=coord.until), *waiting(gate)]
    await settle()
    coord.request_stop("enough")
    for task in late[:2]:
        with pytest.raises(StopRequestedError, match="enough"):
            await task
    await settle()
    assert gate.statistics().waiting == 1, "who did not ask for that waits on"
    await give_up(late)


async def test_a_stop_that_comes_with_the_place_gives_it_back() -> None:
    """Let in and stopped in the same moment: the stop wins, and the next one gets the place."""
    coord = Coordinator()
    gate = VersionGate(MemoryStepStore(), max_lag=0)
    (first,) = await let_in(gate, 1)
    late = [*waiting(gate, until=coord.until), *waiting(gate)]
    await settle()
    first.drop()
    coord.request_stop()
    with pytest.raises(StopRequestedError):
        await late[0]
    assert (await late[1]).state == "open"
    assert gate.statistics().open == 1


async def test_cancelled_with_the_place() -> None:
    """Let in and cancelled in the same moment, in both orders: the next one gets the place."""
    for drop_first in (True, False):
        gate = VersionGate(MemoryStepStore(), max_lag=0)
        (first,) = await let_in(gate, 1)
        late = waiting(gate, 2)
        await settle()
        for act in (first.drop, late[0].cancel) if drop_first else (late[0].cancel, first.drop):
            act()
        with pytest.raises(asyncio.CancelledError):
            await late[0]
        assert (await late[1]).number == 1
        assert late[0].cancelling() == 1
        assert (gate.statistics().open, gate.statistics().waiting) == (1, 0)


async def test_the_listener_hands_over() -> None:
    """When the first in line is cancelled, the next one hears of the next version."""
    versions = MemoryStepStore()
    gate = VersionGate(versions, max_lag=0)
    (first,) = await let_in(gate, 1)
    late = waiting(gate, 3)
    await settle()
    assert versions.statistics().waiting == 1, "one of them waits for the store, however many there are"
    await give_up(late[:1])
    await settle()
    assert first.use()
    await versions.advance()
    assert (await late[1]).version == 1
    await give_up(late[2:])
    assert versions.statistics().waiting == 0


# Wrong use.


async def test_an_item_is_used_once() -> None:
    """A second `use`, and a use after the block has shipped it, are errors that say what to do."""
    gate = VersionGate(MemoryStepStore(), max_lag=1)
    async with gate.admit() as one:
        assert one.use()
        with pytest.raises(InvalidArgumentError, match=r"<Ticket 0 .*> was used already: one item, one use"):
            one.use()
    async with gate.admit() as two:
        pass
    for call in (two.use, two.drop):
        with pytest.raises(InvalidArgumentError, match=r"was shipped already: .* call hand_on\(\) inside"):
            call()


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
def test_bounds_that_cannot_be_meant(options: dict[str, Any], message: str) -> None:
    """The bound is a whole number from 0, the items of a version one from 1."""
    with pytest.raises(InvalidArgumentError, match=message):
        VersionGate(MemoryStepStore(), **options)


def test_other_arguments_that_cannot_be_meant() -> None:
    """No store, no seconds, nothing to call."""
    with pytest.raises(InvalidArgumentError, match="versions is 3; give a StepStore"):
        VersionGate(3, max_lag=1)  # type: ignore[arg-type]
    gate = VersionGate(MemoryStepStore(), max_lag=1)
    with pytest.raises(InvalidArgumentError, match="timeout=-1"):
        gate.admit(timeout=-1)
    with pytest.raises(InvalidArgumentError, match="until is 'stop'"):
        gate.admit(until="stop")  # type: ignore[arg-type]


def test_a_gate_belongs_to_a_loop() -> None:
    """In another loop, or in none, everything but looking is refused."""
    gate = VersionGate(MemoryStepStore(), max_lag=1)

    async def main() -> Ticket:
        return await ticket(gate)

    one = asyncio.run(main())
    with pytest.raises(WrongLoopError):
        one.use()
    with pytest.raises(WrongLoopError):
        asyncio.run(main())
    assert (gate.statistics().open, one.lag, repr(gate)) == (1, 0, "<version gate of 'default' at version 0, max_lag 1, 1 open>")


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
    assert not {"aiohooks.graph.session", "aiohooks.graph.graph", "aiohooks.session.coordinator"} & set(loaded), loaded
"""


def test_it_works_alone() -> None:
    """The gate imports and works without the session, with the standard library and anyio only."""
    program = "".join(map(textwrap.dedent, (ONLY_CORE, NO_FRONT_DOOR, ALONE)))
    subprocess.run([sys.executable, "-W", "error", "-c", program], cwd=ROOT, check=True, timeout=60)
