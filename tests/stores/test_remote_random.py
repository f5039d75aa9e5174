"""Stores behind a connection under random faults: every acknowledged advance counts once."""

from __future__ import annotations

import asyncio
import random

import pytest

from aiohooks.stores import Publisher
from aiohooks.stores._protocol import Join
from aiohooks.testing import ManualClock
from tests.support.fake_engine import FakeEngine, FakeStepStore
from tests.support.waiting import ticks


@pytest.mark.parametrize("seed", range(60))
async def test_exact_count_and_no_lost_wake_up(seed: int) -> None:
    """Outages, lost answers, lost data, cancelled callers: nothing is counted twice, no waiter is left behind or early."""
    random_ = random.Random(seed)
    with ManualClock() as clock:
        engine = FakeEngine()
        stores = [FakeStepStore(engine, heartbeat=1000.0) for _ in range(3)]
        for store in stores:
            await store.value()
        acknowledged = unknown = 0
        advances: list[tuple[int, asyncio.Task[int]]] = []
        waits: list[tuple[int, asyncio.Task[int]]] = []
        data_lost = False

        def collect_advances() -> None:
            nonlocal acknowledged, unknown
            for by, task in tuple(advances):
                if task.done():
                    advances.remove((by, task))
                    if task.cancelled():
                        unknown += by
                    else:
                        task.result()
                        acknowledged += by

        for _ in range(120):
            action = random_.random()
            store = random_.choice(stores)
            if action < 0.45:
                by = random_.choice((1, 1, 2, 5))
                advances.append((by, asyncio.ensure_future(store.advance(by))))
            elif action < 0.65:
                step = random_.randrange(1, 150)
                waits.append((step, asyncio.ensure_future(store.wait_for(step))))
            elif action < 0.70 and advances:
                random_.choice(advances)[1].cancel()
            elif action < 0.75 and waits:
                waits.pop(random_.randrange(len(waits)))[1].cancel()
            elif action < 0.80:
                engine.answers_to_lose = random_.randrange(3)
            elif action < 0.85 and engine.up:
                lost = random_.random() < 0.2
                # Steps that no store knows are lost with the engine's data: let all stores know the last ones.
                if lost and not advances:
                    for one in stores:
                        await one.value()
                    data_lost = True
                    engine.stop(data_lost=True)
                else:
                    engine.stop()
            elif action < 0.92:
                engine.restart()
            else:
                clock.advance(random_.choice((0.01, 0.5, 6.0)))
            await ticks(random_.randrange(8))
            collect_advances()
            for step, wait in waits:
                if wait.done():
                    assert wait.result() >= step
        engine.restart()
        engine.answers_to_lose = 0
        for _ in range(30):
            await ticks(30)
            clock.advance(6)
        collect_advances()
        assert not advances
        step = (await stores[0].value()).step
        assert acknowledged <= step <= acknowledged + unknown, (acknowledged, unknown, step, data_lost)
        await ticks(30)
        assert all(wait.done() == (wanted <= step) for wanted, wait in waits)
        assert sum(store.statistics().waiting for store in stores) == sum(not wait.done() for _, wait in waits)
        for _, wait in waits:
            wait.cancel()
        await asyncio.gather(*(wait for _, wait in waits), return_exceptions=True)
        for store in stores:
            await store.aclose()
        assert not engine.watchers


@pytest.mark.parametrize("seed", range(30))
async def test_each_exit_and_each_failure_counts_once(seed: int) -> None:
    """Outages and lost answers: a publisher leaves once, with its own step, and a failure has the position of its report."""
    random_ = random.Random(seed)
    with ManualClock() as clock:
        engine = FakeEngine()
        stores = [FakeStepStore(engine, heartbeat=1000.0, lease_secs=1e6) for _ in range(3)]
        for store in stores:
            await store.value()
        left: list[str] = []
        failures = 0
        here: list[Publisher] = []
        for number in range(80):
            action = random_.random()
            if action < 0.35:
                here.append(random_.choice(stores).publisher(f"p{number}"))
            elif action < 0.6 and here:
                publisher = here.pop(random_.randrange(len(here)))
                publisher.close(random_.choice((None, ValueError("x"))))
                left.append(publisher.name)
            elif action < 0.65:
                random_.choice(stores).fail(ValueError(f"{number}"))
                failures += 1
            elif action < 0.75:
                engine.answers_to_lose = random_.randrange(1, 4)
            elif action < 0.85:
                engine.stop()
            elif action < 0.95:
                engine.restart()
            else:
                clock.advance(random_.choice((0.5, 6.0)))
            await ticks(random_.randrange(8))
        engine.restart()
        engine.answers_to_lose = 0
        for _ in range(30):
            await ticks(30)
            clock.advance(6)
        run = engine.runs["default"]
        joined = {request.member.id for request in engine.requests if isinstance(request, Join)}
        assert (run.exits, run.revision) == (len(left), len(joined) + len(left) + failures)
        assert sorted(member.name for member in run.members.values()) == sorted(publisher.name for publisher in here)
        for store in stores:
            await store.aclose()
