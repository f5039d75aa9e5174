"""The base of stores over processes: forks, options, refreshing before a wait fails, closing."""

from __future__ import annotations

import asyncio
import copy
import os
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.stores import SharedStepStore
from aiohooks.stores._protocol import Answer, Join, Request
from aiohooks.testing import ManualClock
from tests.support.fake_engine import FakeConnection, FakeEngine, FakeStepStore
from tests.support.waiting import (
    advance_clock,
    parked,
    ticks,
)

pytestmark = pytest.mark.every_python


async def test_a_forked_store_is_refused() -> None:
    """A forked child cannot use its parent's store, and the error says what to do; the parent still
    can.
    """
    async with FakeStepStore(FakeEngine()) as store:
        child = os.fork()
        if child == 0:
            store.statistics()
            refused = False
            try:
                store.publisher("child")
            except ah.errors.WrongLoopError as error:
                refused = "by a fork" in str(error) and "open_step_store" in str(error)
            except BaseException:
                os._exit(3)
            os._exit(not refused)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert await store.advance() == 1


async def test_a_store_cannot_be_copied_or_pickled() -> None:
    """It stays in its process: the error says what another process does instead."""
    store = FakeStepStore(FakeEngine())
    with pytest.raises(TypeError, match="open_step_store"):
        copy.deepcopy(store)


async def finish(store: SharedStepStore) -> None:
    """Let the only publisher finish, so that the step can advance no more."""
    with store.publisher("trainer"):
        await store.flush()
    await store.flush()


async def test_closing_ends_calls_that_wait_for_the_engine(clock: ManualClock) -> None:
    """Pending calls end with StoreClosedError, not with the unavailability of the engine."""
    engine = FakeEngine()
    store = FakeStepStore(engine)
    await store.advance()
    await finish(store)
    engine.stop()
    calls = [
        store.value(),
        store.wait_for(5),
        store.advance(),
        store.raise_to(9),
        store.lead().__aenter__(),
    ]
    tasks = [asyncio.ensure_future(call) for call in calls]
    await ticks(20)
    closing = asyncio.create_task(store.aclose())
    while not closing.done():  # the lead is given back, or not, while the engine may come back
        await ticks(10)
        clock.advance(1.0)
    assert {type(one) for one in await asyncio.gather(*tasks, return_exceptions=True)} == {
        ah.errors.StoreClosedError
    }


async def test_a_publisher_of_a_damaged_run_is_announced_no_more(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning has what is wrong; another attempt would find the same."""
    engine = FakeEngine()
    async with FakeStepStore(engine, run="digits") as store:
        engine.damaged.add("digits")
        publishers = [store.publisher(name) for name in ("trainer", "helper")]
        await store.flush()
        assert (
            caplog.messages.count(
                "run digits: could not announce its publishers: digits is damaged"
            )
            == 1
        )
        asked = len(engine.requests)
        await advance_clock(clock, 100, 20)
        assert len(engine.requests) == asked
        for publisher in publishers:
            publisher.close()


async def test_what_an_engine_refuses_is_announced_less_often(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A hundred seconds of a full disk are some tens of attempts and one warning;
    then all are announced.

    So is an exit: it is delayed, and not lost.
    """
    full, attempts = True, 0

    class Full(FakeConnection):
        async def request(self, request: Request) -> Answer:
            nonlocal attempts
            attempts += isinstance(request, Join)
            if full:
                raise ah.errors.StoreRefusedError("the disk is full")
            return await super().request(request)

    engine = FakeEngine()
    async with FakeStepStore(Full(engine)) as store:
        with store.publisher("trainer"), store.publisher("helper"):
            for _ in range(500):
                await ticks(10)
                clock.advance(0.2)
            assert 20 <= attempts <= 100
            assert caplog.messages == [
                "run default: could not announce its publishers: the disk is full"
            ]
            full = False
            await advance_clock(clock, 5, 20)
            assert {member.name for member in engine.run("default").members.values()} == {
                "trainer",
                "helper",
            }
            full = True
        await store.flush()
        assert engine.run("default").exits == 0
        full = False
        await advance_clock(clock, 5, 20)
        assert (engine.run("default").exits, engine.run("default").members) == (2, {})


def test_options_of_a_connection_need_one() -> None:
    """An engine that has no connection would ignore them."""

    class Near(FakeConnection):
        remote = False

    for option in ("lease_secs", "heartbeat", "connect_timeout"):
        options: dict[str, Any] = {option: 3.0}
        with pytest.raises(ah.errors.InvalidArgumentError, match=r"leave them out for .*Near"):
            SharedStepStore(Near(FakeEngine()), **options)
    SharedStepStore(Near(FakeEngine()), on_lost="keep")


async def test_closing_ends_waits_before_publishers_leave() -> None:
    """Also the waits that the exit of the last publisher would end."""
    store = FakeStepStore(FakeEngine())
    async with store:
        with store.publisher("other"):
            pass
        store.publisher("trainer")
        wait = await parked(store.wait_for(3))
    with pytest.raises(ah.errors.StoreClosedError, match="was closed, wanted 3"):
        await wait
