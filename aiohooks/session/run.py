"""Running a program's main coroutine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from aiohooks._core.cancel import running_loop
from aiohooks._core.validate import check_callable, check_instance, is_coroutine_function
from aiohooks.errors import InvalidArgumentError, StopRequestedError, WrongLoopError, failure_of
from aiohooks.session.coordinator import RUN_LOOPS, WHY_VARIABLE
from aiohooks.session.signals import stopped_by

_new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
try:
    import uvloop
except ImportError:  # the extra is not installed, or the system has no uvloop
    pass
else:
    _new_event_loop = uvloop.new_event_loop

T = TypeVar("T")

if sys.version_info < (3, 12):
    # A StopIteration out of `asyncio.to_thread` never arrived: whoever waited hung.
    from concurrent.futures import ThreadPoolExecutor

    class _Executor(ThreadPoolExecutor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            def call() -> Any:
                try:
                    return fn(*args, **kwargs)
                except StopIteration as error:
                    raise failure_of(error, "a function in a thread") from error

            return super().submit(call)


def run(main: Callable[..., Coroutine[Any, Any, T]], *args: Any, why: bool = False) -> T:
    """Call the coroutine function `main` with `args` in a new event loop: uvloop's where it is
    installed, otherwise asyncio's.

    A Ctrl-C that no session handles has the effect that it has in `asyncio.run`: it cancels `main`,
    and `run` raises `KeyboardInterrupt`.

    Args:
        main: a coroutine function.
        args: its arguments.
        why: whether the process can be asked why it waits, as with AIOHOOKS_WHY=1: by `aiohooks
            why`, and by SIGUSR1 and SIGQUIT, which a terminal sends at Ctrl-backslash. Unless they
            have a handler or a session handles them, they print the answer to standard error.

    Returns:
        The result of `main`.

    Raises:
        SystemExit: a signal has ended a session that handles signals, and `main` has returned None,
            was cancelled or has raised `StopRequestedError`. The exit code is 128 + the signal's
            number, as in shells. Any other result is returned.
        InvalidArgumentError: `main` is a coroutine and not the function. Write `run(main, ...)`,
            not `run(main(...))`.
        WrongLoopError: an event loop is running already, as in a notebook. Write `await main(...)`
            there.
    """
    check_callable(main, "main")
    if not is_coroutine_function(main):
        raise InvalidArgumentError(f"main is {main!r}; give a coroutine function (`async def`)")
    if running_loop() is not None:
        raise WrongLoopError(
            "run was called while an event loop is running, as in a notebook; write `await main()`"
            " there"
        )
    check_instance(why, bool, "why")
    if why or WHY_VARIABLE in os.environ:
        from aiohooks.session.why import enable_if_asked, enable_why  # seldom needed

        if why:
            enable_why()
        else:
            enable_if_asked()
    loop: asyncio.AbstractEventLoop | None = None
    end: BaseException | None = None
    try:
        with asyncio.Runner(loop_factory=_new_event_loop) as runner:
            loop = runner.get_loop()
            if sys.version_info < (3, 12):
                loop.set_default_executor(_Executor(thread_name_prefix="asyncio"))
            RUN_LOOPS[loop] = threading.get_ident()
            try:
                result = runner.run(main(*args))
            except (KeyboardInterrupt, SystemExit) as error:
                end = error
                # Raised in a callback while main ends, it leaves callbacks that stop the loop,
                # which waits for the other tasks next. `stop` would leave one, too. After one in
                # its last iteration uvloop cannot be used at all.
                loop.call_soon(sys.exit)
                with contextlib.suppress(SystemExit, RuntimeError):
                    loop.run_forever()
                raise
    except BaseException as error:
        # The loop could not be closed.
        if end is not None and isinstance(error, RuntimeError):
            error = end
        number = None if loop is None else stopped_by(loop)
        if number is None or not isinstance(error, (KeyboardInterrupt, StopRequestedError)):
            raise error
        if isinstance(error, KeyboardInterrupt):
            number = signal.SIGINT
        _exit_by_signal(number)
    number = stopped_by(loop)
    if number is not None and result is None:
        _exit_by_signal(number)
    return result


def _exit_by_signal(number: signal.Signals) -> NoReturn:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # The program has ended: another Ctrl-C must not show a traceback of the interpreter's
        # shutdown.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise SystemExit(128 + number)
