"""Several sessions of one trainer: they share a `VersionGate`, not gates of their own steps."""

from __future__ import annotations

import asyncio

import pytest

import aiohooks as ah
from tests.support.waiting import ticks

pytestmark = pytest.mark.every_python

BATCH = 3


@pytest.mark.parametrize("how", ["cancelled", "failed", "finished"])
async def test_the_others_make_the_items_of_a_session_that_has_left(how: str) -> None:
    """However a session has left, its places in the gate are free for the others, so a trainer with
    a fixed batch continues; no item is older than the bound.
    """
    versions = ah.MemoryStepStore(run="weights")
    gate = ah.version_gate.VersionGate(versions, max_lag=2, per_version=BATCH)
    items: asyncio.Queue[int] = asyncio.Queue()
    ends = {"failed": ZeroDivisionError("crashed"), "finished": ah.OutOfRangeError("no input")}
    leaving: list[str] = []

    async def work(name: str) -> None:
        async def make() -> dict[str, int]:
            await asyncio.sleep(0)
            if name == "first" and leaving:
                raise ends[leaving.pop()]
            return {"version": versions.latest.step}

        async with ah.AsyncMonitoredSession(make, name=name) as session:
            while not session.should_stop():
                async with gate.admit(until=session.until):
                    items.put_nowait(await session.run("version"))

    workers = [asyncio.create_task(work(name)) for name in ("first", "second", "third")]
    lags: list[int] = []
    for number in range(20):
        if number == 5:
            if how == "cancelled":
                workers[0].cancel()
            else:
                leaving.append(how)
        lags += [versions.latest.step - await items.get() for _ in range(BATCH)]
        await versions.advance()
    await ticks()
    assert workers[0].done()
    assert max(lags) <= 2
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    assert versions.statistics().waiting == 0
