"""Unreachable waits of stores over processes fail only after the run was read again: others may
have advanced meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.stores import SharedStepStore
from aiohooks.stores.local._database import RunDatabase
from aiohooks.stores.local.store import Inotify, LocalEngine
from tests.support.fake_engine import FakeConnection, FakeEngine, FakeStepStore
from tests.support.stores import local_store
from tests.support.waiting import forever, parked, ticks

pytestmark = pytest.mark.every_python

Pair = tuple[SharedStepStore, SharedStepStore]
Two = Callable[[], AbstractAsyncContextManager[Pair]]
Wait = Callable[[SharedStepStore], Coroutine[Any, Any, object]]


class Unnotified(FakeConnection):
    """Gets no notifications: it knows only what it has read."""

    async def watch(self) -> None:
        await forever()


class UnnotifiedFiles(LocalEngine):
    """The same in files."""

    def _on_inotify(self, database: RunDatabase, inotify: Inotify) -> None:
        inotify.read_events()


@pytest.fixture(params=["fake", "local"])
def two(request: pytest.FixtureRequest, tmp_path: Path) -> Two:
    """Two stores of one run; the first gets no notifications."""

    @asynccontextmanager
    async def opened() -> AsyncGenerator[Pair]:
        engine = FakeEngine()
        if request.param == "fake":
            async with FakeStepStore(Unnotified(engine)) as a, FakeStepStore(engine) as b:
                yield a, b
        else:
            async with (
                SharedStepStore(UnnotifiedFiles(tmp_path)) as a,
                local_store(tmp_path) as b,
            ):
                yield a, b

    return opened


def wait_for_step(store: SharedStepStore) -> Coroutine[Any, Any, object]:
    """Wait as a worker does."""
    return store.wait_for(5)


async def wait_for_change(store: SharedStepStore) -> object:
    """Wait for a change, as an observer does."""
    changes = store.changes()
    await anext(changes)
    return (await anext(changes)).step


async def wait_initialised(store: SharedStepStore) -> object:
    """Wait for the chief, as a worker does."""
    await store.wait_initialised()
    return store.latest.step


WAITS = [wait_for_step, wait_for_change, wait_initialised]


@pytest.mark.parametrize("wait", WAITS)
async def test_a_new_wait_reads_the_run_first(two: Two, wait: Wait) -> None:
    """No publisher is left as far as is known here, but another process has registered one since:
    the wait continues.
    """
    async with two() as (a, b):
        with a.publisher("trainer"):
            await a.flush()
        await a.flush()
        async with b.lead():
            await b.mark_initialised()
            b.publisher("another")
            await b.flush()
            waits = await parked(wait(a), 20)
            assert not waits.done() or wait is wait_initialised
            await b.advance(5)
            await a.value()
            assert await waits in (0, 5)


async def test_unreachable_waits_fail(two: Two) -> None:
    """When the engine confirms it, they fail, each with an error of its own; later ones
    immediately.
    """
    async with two() as (a, _):
        publisher = a.publisher("trainer")
        waits = [asyncio.ensure_future(wait(a)) for wait in WAITS]
        await ticks(20)
        publisher.close()
        for each in [*waits, *(asyncio.ensure_future(wait(a)) for wait in WAITS)]:
            with pytest.raises(
                (ah.errors.PublisherFinishedError, StopAsyncIteration),
                match=r"trainer finished at step 0|^$",
            ):
                await each


async def test_a_wait_ends_where_the_run_cannot_be_read(caplog: pytest.LogCaptureFixture) -> None:
    """No one can say whether it would succeed; a warning names the error."""
    engine = FakeEngine()
    async with FakeStepStore(Unnotified(engine)) as store:
        publisher = store.publisher("trainer")
        await store.flush()
        waits = await parked(store.wait_for(5), 20)
        engine.damaged.add("default")
        publisher.close()
        with pytest.raises(ah.errors.StoreDamagedError, match="default is damaged"):
            await waits
        assert "run default: could not read the publishers: default is damaged" in caplog.messages
        engine.damaged.clear()
