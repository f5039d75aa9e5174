"""Running a program's main coroutine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aiohooks._checks import check_callable
from aiohooks._errors import InvalidArgumentError
from aiohooks._graph import is_coroutine_function

_new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
try:
    import uvloop
except ImportError:  # the extra is not installed, or the system has no uvloop
    pass
else:
    _new_event_loop = uvloop.new_event_loop

T = TypeVar("T")


def run(main: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
    """Runs `main(*args)` to its end in a new event loop: uvloop's where it is installed, else asyncio's.

    Raises:
        InvalidArgumentError: `main` is a coroutine and not the function; write `run(main, ...)`, not `run(main(...))`.
    """
    check_callable(main, "main")
    if not is_coroutine_function(main):
        raise InvalidArgumentError(f"main is {main!r}; give a coroutine function (`async def`)")
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        return runner.run(main(*args))
