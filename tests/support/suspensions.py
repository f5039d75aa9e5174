"""Helpers for tests that let coroutines go on by hand, one suspension at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def parked(coro: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """The coroutine as a task that has come to its first suspension."""
    task = asyncio.create_task(coro)
    await asyncio.sleep(0)
    return task


async def ticks(number: int = 3) -> None:
    """Lets everybody else run, so many times."""
    for _ in range(number):
        await asyncio.sleep(0)


def at_once(coro: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that must not suspend."""
    try:
        coro.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    coro.close()
    raise AssertionError("it suspended")
