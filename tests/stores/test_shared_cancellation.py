"""Stores over processes whose callers are cancelled, or whose store is closed;
`tests.fuzz.explored` does that at every wait.
"""

from __future__ import annotations

import asyncio

import pytest

import aiohooks as ah
from aiohooks.stores._protocol import Answer, Request
from aiohooks.testing.leaks import no_leaks
from tests.support.fake_engine import FakeConnection, FakeEngine, FakeStepStore
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


class _Broken(FakeConnection):
    async def request(self, request: Request) -> Answer:
        raise LookupError("no engine should raise this")


async def test_an_unexpected_error_ends_every_write_of_the_batch(engine: FakeEngine) -> None:
    """Each caller whose write was in the request gets the error; later writes are tried."""
    async with FakeStepStore(_Broken(engine)) as store:
        ends = await asyncio.gather(
            store.advance(), store.advance(2), store.reset(0), return_exceptions=True
        )
        assert [repr(end) for end in ends] == [repr(LookupError("no engine should raise this"))] * 3
        with pytest.raises(LookupError, match="no engine"):
            await store.advance()
