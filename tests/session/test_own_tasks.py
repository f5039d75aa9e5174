"""What a session may have to end has a task and a context of its own: whose cancel it was, what is
seen where, what is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.sessions import (
    doubling,
)

pytestmark = pytest.mark.every_python


# -- what is kept of what a wait has taken


async def test_all_feeds_are_taken_in_one_task() -> None:
    """A generator of feeds may have a time limit around its `yield`, which belongs to a task."""
    tasks: set[Any] = set()

    async def feeds() -> AsyncIterator[int]:
        async with asyncio.timeout(1000):
            for number in range(4):
                await asyncio.sleep(0)
                tasks.add(asyncio.current_task())
                yield number

    async with doubling() as session:
        assert [loss async for loss in session.steps("loss", feeds=feeds())] == [0, 2, 4, 6]
    assert len(tasks) == 1
