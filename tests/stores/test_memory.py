"""The memory store: the conformance suite, and what is its own."""

from __future__ import annotations

import pytest

import aiohooks as ah
from aiohooks.stores import MemoryStepStore
from aiohooks.testing import check_step_store, step_store_checks
from tests.support.waiting import parked

pytestmark = pytest.mark.every_python


@pytest.mark.parametrize("check", step_store_checks())
async def test_conformance(check: str) -> None:
    """The store of one process passes every check."""
    stores: dict[str, MemoryStepStore] = {}

    def make(run: str) -> MemoryStepStore:
        return stores.setdefault(run, MemoryStepStore(run=run))

    await check_step_store(make, check)


async def test_a_store_in_memory_is_forgotten_by_closing_it() -> None:
    """Code that forgets its run works with every kind of store."""
    store = ah.open_step_store("memory://")
    waits = await parked(store.wait_for(3), 2)
    await store.forget()
    with pytest.raises(ah.errors.StoreClosedError):
        await waits
    with pytest.raises(ah.errors.StoreClosedError):
        await store.advance()
