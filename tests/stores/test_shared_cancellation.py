"""Stores over processes whose callers are cancelled, or whose store is closed;
`tests.fuzz.explored` does that at every wait.
"""

from __future__ import annotations

import pytest

import aiohooks as ah
from aiohooks.testing.leaks import no_leaks
from tests.support.fake_engine import FakeEngine, FakeStepStore
from tests.support.waiting import cancel_and_wait, forever, parked, ticks

pytestmark = pytest.mark.every_python


@pytest.mark.parametrize("after", range(4))
async def test_a_block_that_is_cancelled_at_its_beginning_leaves_no_connection(
    engine: FakeEngine, after: int
) -> None:
    """`async with store`, cancelled while the store is opened, closes it: the caller cannot."""

    async def block() -> None:
        async with store:
            await forever()

    async with no_leaks():
        store = FakeStepStore(engine)
        task = await parked(block())
        await ticks(after)
        assert await cancel_and_wait(task)
        assert not engine.watchers
        with pytest.raises(ah.errors.StoreClosedError):
            await store.value()
