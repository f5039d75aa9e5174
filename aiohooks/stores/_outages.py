"""Outages of an engine, for sessions that open meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from typing import Any

from aiohooks._core.cancel import wait_done
from aiohooks._core.waiters import Waiters
from aiohooks._core.waits import is_opening, wait_for_others


class Outages:
    """The outages of an engine.

    A session that opens may wait for what a task of its store requests. From an outage on, a stop
    ends this wait.
    """

    def __init__(self) -> None:
        self._current = 0
        self._waiters = Waiters()

    @contextlib.contextmanager
    def outage(self) -> Generator[None]:
        """Mark the time of this block as an outage, in which the engine does not answer."""
        self._current += 1
        self._waiters.wake()
        try:
            yield
        finally:
            self._current -= 1

    async def wait_in_opening(self, answer: asyncio.Future[Any]) -> None:
        """Wait until `answer` is done, if a session is being opened by this code.

        A session whose engine answers is opened even after a stop, and its hooks see the end. So
        this waits like `wait_for_others` only from an outage on.
        """
        if not is_opening():
            return
        if not self._current:
            with self._waiters.added() as outage:
                await asyncio.wait([answer, outage], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            await wait_for_others(wait_done([answer], None))
