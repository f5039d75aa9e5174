"""Running a program's main coroutine."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from aiohooks._core.cancel import DEFAULT_GRACE_SECS, LEFT_BEHIND, running_loop
from aiohooks._core.clock import current_clock
from aiohooks._core.reports import logger
from aiohooks._core.validate import check_callable
from aiohooks.errors import StopRequestedError, WrongLoopError
from aiohooks.session.monitored import enable_why_if_asked
from aiohooks.session.signals import stopped_by
from aiohooks.session.status import RUN_LOOPS

_new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
try:
    import uvloop
except ImportError:  # the extra is not installed, or the system has no uvloop
    pass
else:
    _new_event_loop = uvloop.new_event_loop

T = TypeVar("T")


def run(main: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
    """Call the coroutine function `main` with `args` in a new event loop: uvloop's where it is
    installed, otherwise asyncio's.

    A Ctrl-C that no session handles has the effect that it has in `asyncio.run`: it cancels `main`,
    and `run` raises `KeyboardInterrupt`.

    At its end it cancels the remaining tasks and waits for them, as `asyncio.run` does. After 10 s
    it ends without those that ignore their cancellation and that a group or a session has left
    behind for this reason, with a warning.

    Args:
        main: a coroutine function.
        args: its arguments.

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
    if running_loop() is not None:
        raise WrongLoopError(
            "run was called while an event loop is running, as in a notebook; write `await main()`"
            " there"
        )
    loop: asyncio.AbstractEventLoop | None = None
    end: BaseException | None = None
    try:
        with _OpenRunner() as runner:
            loop = runner.get_loop()
            RUN_LOOPS[loop] = threading.get_ident()
            enable_why_if_asked()
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


class _OpenRunner:
    """A runner in a block, whose end does not wait for tasks that were left behind."""

    def __enter__(self) -> asyncio.Runner:
        self._runner = asyncio.Runner(loop_factory=_new_event_loop)
        self._loop = self._runner.get_loop()
        self._has_stopped_loop = False
        return self._runner

    def __exit__(self, *_: object) -> None:
        # The end of the runner runs the loop, and with it the check.
        self._loop.call_soon(current_clock().call_later, DEFAULT_GRACE_SECS, self._check)
        try:
            self._runner.close()
        except RuntimeError:
            if not self._has_stopped_loop:
                raise

    def _check(self) -> None:
        """End the wait of the runner if only tasks that were left behind remain."""
        remaining = asyncio.all_tasks(self._loop)
        if not remaining or not remaining.issubset(LEFT_BEHIND):
            current_clock().call_later(1.0, self._check)
            return
        # The end of the runner has no other way to end without a task. It raises a RuntimeError.
        self._has_stopped_loop = True
        self._loop.stop()
        names = ", ".join(task.get_name() for task in remaining)
        logger.warning("aiohooks.run ends without the tasks %s", names)


def _exit_by_signal(number: signal.Signals) -> NoReturn:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # The program has ended: another Ctrl-C must not show a traceback of the interpreter's
        # shutdown.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise SystemExit(128 + number)
