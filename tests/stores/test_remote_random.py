"""Random lives of stores behind a connection: whatever goes wrong on the way, every acknowledged advance counts once."""

from __future__ import annotations

import asyncio
import random

import pytest

import aiohooks as ah
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


@pytest.mark.parametrize("seed", range(30))
async def test_each_departure_and_each_failure_is_told_once(seed: int) -> None:
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
                engine.go()
            elif action < 0.95:
                engine.come_back()
            else:
                clock.advance(random_.choice((0.5, 6.0)))
            await ticks(random_.randrange(8))
        engine.come_back()
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


def test_bad_url() -> None:
    """A URL that names no store is refused with those that do; an option that the store does not take, by name."""
    for url, message in {
        "redos://h": "unknown kind of step store 'redos'; did you mean 'redis'",
        "nothing": "'nothing' is not the beginning of",
        "redis:/user:secret@h": "'redis' is not the beginning of a step store's URL; give one like",
        "": "'' is not the beginning of",
        "local://runs": "'local://runs' has no absolute path; give local:///directory",
        "ray://head:10001": "not of the form ray://namespace/run; .* address='host:6379'",
    }.items():
        with pytest.raises(ah.errors.InvalidArgumentError, match=message):
            ah.open_step_store(url)
    for url, message in {
        "memory://": "a memory step store has no option 'hartbeat'; it takes none",
        "local://": "a local step store has no option 'hartbeat'; known are: join_grace_secs, lease_secs, on_lost",
        "redis://h": "a redis step store has no option 'hartbeat'; did you mean 'heartbeat'",
        "nats://h": "a nats step store has no option 'hartbeat'; did you mean 'heartbeat'",
    }.items():
        with pytest.raises(ah.errors.InvalidArgumentError, match=message):
            ah.open_step_store(url, hartbeat=3)
    with pytest.raises(ah.errors.InvalidArgumentError, match="run='other', but the URL names 'digits'"):
        ah.open_step_store("ray://space/digits", run="other")
    with pytest.raises(ah.errors.InvalidArgumentError, match="url is 7"):
        ah.open_step_store(7)  # type: ignore[arg-type]


def test_url_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left out, URL and run come from the environment."""
    monkeypatch.delenv("AIOHOOKS_STEP_STORE", raising=False)
    with pytest.raises(ah.errors.InvalidArgumentError, match="AIOHOOKS_STEP_STORE"):
        ah.open_step_store()
    monkeypatch.setenv("AIOHOOKS_STEP_STORE", "memory://")
    monkeypatch.setenv("AIOHOOKS_RUN", "digits-7")
    store = ah.open_step_store()
    assert isinstance(store, ah.MemoryStepStore)
    assert store.run == "digits-7"
    assert ah.open_step_store(run="other").run == "other"
