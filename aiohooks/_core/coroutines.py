"""Coroutines: whether a call may wait, results without a task, and their cleanup."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")

_WAITING_OPCODES = frozenset(
    {"GET_AWAITABLE", "GET_ANEXT", "BEFORE_ASYNC_WITH", "SEND", "YIELD_VALUE"},
)


def can_wait(function: object) -> bool:
    """Return whether a call of a function may wait.

    A coroutine function without `await`, `async for` and `async with` cannot wait. Everything else
    may, such as a callable object or a compiled function, which has no bytecode.
    """
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    # Not by `isinstance`: an object of `create_autospec` claims the class of a function.
    if type(function) is not types.FunctionType:
        return True
    return _code_can_wait(function.__code__)


@functools.lru_cache(maxsize=4096)
def _code_can_wait(code: types.CodeType) -> bool:
    if not code.co_flags & inspect.CO_COROUTINE:
        return True
    return any(step.opname in _WAITING_OPCODES for step in dis.get_instructions(code))


def result_now(coro: Any) -> Any:
    """Return the result of a coroutine that cannot wait."""
    try:
        coro.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError(f"{coro!r} has waited")


async def as_coroutine(awaitable: Awaitable[T]) -> T:
    """Await an awaitable, for code that needs a coroutine."""
    return await awaitable


def close_unawaited(awaitable: object) -> None:
    """Close a coroutine that will not be awaited. Python would warn about it."""
    if not inspect.iscoroutine(awaitable):
        return
    if inspect.getcoroutinestate(awaitable) == inspect.CORO_CREATED:
        awaitable.close()
