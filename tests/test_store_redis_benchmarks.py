"""The benchmarks of the Redis store work."""

from __future__ import annotations

import pytest

from tests.benchmarks.measure import TINY, measure
from tests.benchmarks.store_redis import REDIS_ROWS


@pytest.mark.slow
@pytest.mark.parametrize("name", REDIS_ROWS)
@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.leaves_residue  # a server of its own, with a thread that reads what it prints
async def test_each_row_can_be_measured(name: str) -> None:
    """Every row gives figures, or says what is not installed."""
    for result in await measure(name, REDIS_ROWS[name], TINY):
        assert result.missing or (result.figure is not None and result.figure > 0)
