"""Running a program's main coroutine."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from aiohooks._validate import check_callable
from aiohooks.errors import InvalidArgumentError
from aiohooks.graph.graph import is_coroutine_function
from aiohooks.session.signals import stopped_by

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

    Returns:
        What `main` returns.

    Raises:
        SystemExit: a signal has ended a session that handles signals, and `main` has returned None or was cancelled by it; the
            exit code is 128 + the signal's number, as shells have it. A `main` that returns something else says by itself what
            has become of it.
        InvalidArgumentError: `main` is a coroutine and not the function; write `run(main, ...)`, not `run(main(...))`.
    """
    check_callable(main, "main")
    if not is_coroutine_function(main):
        raise InvalidArgumentError(f"main is {main!r}; give a coroutine function (`async def`)")
    loop: asyncio.AbstractEventLoop | None = None
    try:
        with asyncio.Runner(loop_factory=_new_event_loop) as runner:
            loop = runner.get_loop()
            result = runner.run(main(*args))
    except (KeyboardInterrupt, RuntimeError) as error:
        if loop is None or stopped_by(loop) is None:
            raise
        # uvloop takes itself for running where Ctrl-C comes in its last moment: it cannot be closed then.
        if not isinstance(error, KeyboardInterrupt) and not loop.is_running():
            raise
        _exit(signal.SIGINT)
    number = stopped_by(loop)
    if number is not None and result is None:
        _exit(number)
    return result


def _exit(number: signal.Signals) -> NoReturn:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # All is done: one Ctrl-C more must not write a traceback out of the interpreter's own end.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise SystemExit(128 + number)
