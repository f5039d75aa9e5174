"""Waits of a session that is opened, which a stop ends: those for others, and for an engine that
does not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from aiohooks._core.waits import opening_until, wait_for_others
from aiohooks.stores._connection import Outages
from tests.support.waiting import parked, ticks

pytestmark = pytest.mark.every_python


async def test_an_engine_that_does_not_answer_is_waited_for_like_others() -> None:
    """Only in an outage, and only while a session is opened; after the outage the wait is for an
    answer again.
    """
    waits: list[Awaitable[Any]] = []

    async def until(awaitable: Awaitable[Any]) -> Any:
        waits.append(awaitable)
        return await awaitable

    outages, answer = Outages(), asyncio.get_running_loop().create_future()
    await outages.wait_in_opening(answer)  # no session is opened here
    with opening_until(until):
        assert await wait_for_others(asyncio.sleep(0, 5)) == 5
        with outages.outage():
            pass
        waiting = await parked(outages.wait_in_opening(answer))
        await ticks()
        assert len(waits) == 1
        with outages.outage():
            await ticks()
        assert (len(waits), waiting.done()) == (2, False)
        answer.set_result(None)
        await waiting
    assert await wait_for_others(asyncio.sleep(0, 6)) == 6
    assert len(waits) == 2
