"""Waits of a session that is opened, which a stop ends; and waits for tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from aiohooks._core.waits import opening_until, wait_done, wait_for_others
from aiohooks.testing import ManualClock
from tests.support.waiting import parked

pytestmark = pytest.mark.every_python


async def test_a_wait_for_others_is_given_to_the_session_that_is_opened() -> None:
    """Only while it is opened: before and after that, it is an ordinary wait."""
    waits: list[Awaitable[Any]] = []

    async def until(awaitable: Awaitable[Any]) -> Any:
        waits.append(awaitable)
        return await awaitable

    assert await wait_for_others(asyncio.sleep(0, 4)) == 4
    with opening_until(until):
        assert await wait_for_others(asyncio.sleep(0, 5)) == 5
    assert await wait_for_others(asyncio.sleep(0, 6)) == 6
    assert len(waits) == 1


async def test_what_is_done_when_the_time_is_up_is_done() -> None:
    """Also if the callbacks of the future have not been called yet."""
    with ManualClock() as clock:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = await parked(wait_done([future], 1))
        clock.advance(1)
        future.set_result(None)
        assert await waiting
