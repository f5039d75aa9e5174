"""Waits of a session that is being opened: for other sessions and for an engine, until it is stopped."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Generator
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

_until: ContextVar[Callable[[Awaitable[Any]], Awaitable[Any]] | None] = ContextVar("aiohooks_opening", default=None)


@contextlib.contextmanager
def opening_until(until: Callable[[Awaitable[Any]], Awaitable[Any]]) -> Generator[None]:
    """Await with `until`, which a stop ends, what the code of this block waits for with `wait_for_others`."""
    token = _until.set(until)
    try:
        yield
    finally:
        _until.reset(token)


async def wait_for_others(waiter: Awaitable[T]) -> T:
    """Await what only others can bring about: an engine that answers, a chief that initialises the run or leaves its lead.

    Raises:
        StopRequestedError: the session that is being opened here is asked to stop.
    """
    until = _until.get()
    result: T = await (waiter if until is None else until(waiter))
    return result
