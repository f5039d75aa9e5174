"""Random lives of stores behind a connection: whatever goes wrong on the way, every acknowledged advance counts once."""

from __future__ import annotations

import asyncio
import random

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock
from tests.fake_engine import FakeEngine, FakeStepStore
from tests.stepping import ticks


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

        def settle_advances() -> None:
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
                # Lost with everybody's knowledge of the last steps is lost for good: let all have heard of them.
                if lost and not advances:
                    for one in stores:
                        await one.value()
                    data_lost = True
                    engine.go(data_lost=True)
                else:
                    engine.go()
            elif action < 0.92:
                engine.come_back()
            else:
                clock.advance(random_.choice((0.01, 0.5, 6.0)))
            await ticks(random_.randrange(8))
            settle_advances()
            for step, wait in waits:
                if wait.done():
                    assert wait.result() >= step
        engine.come_back()
        engine.answers_to_lose = 0
        for _ in range(30):
            await ticks(30)
            clock.advance(6)
        settle_advances()
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
        assert not engine.watches


def test_bad_url() -> None:
    """A URL that names no store is refused with those that do; an option that the store does not take, by name."""
    for url, message in {
        "redos://h": "'redos' is no kind of step store; did you mean 'redis'",
        "nothing": "'nothing' is no kind",
        "": "no URL|no kind",
        "memory://x?y": "",
    }.items():
        if message:
            with pytest.raises(ah.InvalidArgumentError, match=message):
                ah.open_step_store(url)
    with pytest.raises(ah.InvalidArgumentError, match=r"does not take these options.*colour"):
        ah.open_step_store("memory://", colour="red")
    with pytest.raises(ah.InvalidArgumentError, match="url=7"):
        ah.open_step_store(7)  # type: ignore[arg-type]


def test_url_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left out, URL and run come from the environment."""
    monkeypatch.delenv("AIOHOOKS_STEP_STORE", raising=False)
    with pytest.raises(ah.InvalidArgumentError, match="AIOHOOKS_STEP_STORE"):
        ah.open_step_store()
    monkeypatch.setenv("AIOHOOKS_STEP_STORE", "memory://")
    monkeypatch.setenv("AIOHOOKS_RUN", "digits-7")
    store = ah.open_step_store()
    assert isinstance(store, ah.MemoryStepStore)
    assert store.run == "digits-7"
    assert ah.open_step_store(run="other").run == "other"
