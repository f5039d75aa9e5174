"""The laws of a step store, on the one in memory and on one behind a connection."""

from __future__ import annotations

import pytest

from aiohooks.errors import InvalidArgumentError
from aiohooks.stores import MemoryStepStore
from aiohooks.testing import check_step_store, step_store_checks
from tests.support.fake_engine import FakeEngine, FakeStepStore

pytestmark = pytest.mark.every_python


@pytest.mark.parametrize("law", step_store_checks())
async def test_memory(law: str) -> None:
    """The store of one process keeps every law."""
    stores: dict[str, MemoryStepStore] = {}

    def make(run: str) -> MemoryStepStore:
        return stores.setdefault(run, MemoryStepStore(run=run))

    await check_step_store(make, law)


@pytest.mark.parametrize("law", step_store_checks())
async def test_behind_a_connection(law: str) -> None:
    """So does a store behind a connection, and it leaves nothing in its engine."""
    engine = FakeEngine()
    await check_step_store(lambda run: FakeStepStore(engine, run=run), law)
    assert not engine.watches


async def test_a_law_that_is_broken_is_named() -> None:
    """An error out of a law has a note with its name and what it says."""

    class Forgetful(MemoryStepStore):
        async def raise_to(self, step: int) -> int:
            return step

    stores: dict[str, MemoryStepStore] = {}
    with pytest.raises(AssertionError) as caught:
        await check_step_store(lambda run: stores.setdefault(run, Forgetful(run=run)), "raises_to")
    assert "this breaks the law raises_to" in caught.value.__notes__[0]


async def test_a_law_that_hangs_is_named() -> None:
    """A law that never ends fails after its limit, by name."""

    class Deaf(MemoryStepStore):
        async def wait_for(self, step: int, **_: object) -> int:
            return await super().wait_for(10**9)

    stores: dict[str, MemoryStepStore] = {}
    with pytest.raises(AssertionError, match=r"loses_no_race: stuck for 0\.05 s"):
        await check_step_store(lambda run: stores.setdefault(run, Deaf(run=run)), "loses_no_race", limit_secs=0.05)


async def test_unknown_law() -> None:
    """A law that is not there is refused with those that are."""
    with pytest.raises(InvalidArgumentError, match="law='x': there are counts,"):
        await check_step_store(lambda run: MemoryStepStore(run=run), "x")
