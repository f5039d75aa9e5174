"""The version gate: how waits in its queue end."""

from __future__ import annotations

import asyncio
import logging
import sys

import pytest

from aiohooks.stores import MemoryStepStore
from aiohooks.testing.clock import ManualClock
from aiohooks.version_gate import VersionGate
from tests.support.version_gates import admit_items, cancel_tasks, start_waiting
from tests.support.waiting import ticks

pytestmark = pytest.mark.every_python


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
