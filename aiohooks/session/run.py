"""Running a program's main coroutine."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from aiohooks._core.activity import logger, wait_log
from aiohooks._core.clock import current_clock
from aiohooks._core.validate import check_callable
from aiohooks._core.waits import DEFAULT_GRACE_SECS, LEFT_BEHIND, running_loop
from aiohooks.errors import (
    AiohooksError,
    InvalidArgumentError,
    StopRequestedError,
    WrongLoopError,
    safe_repr,
)
from aiohooks.session.monitored import enable_why_if_asked
from aiohooks.session.signals import stopped_by
from aiohooks.session.status import RUN_LOOPS, activity_of

_new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
try:
    import uvloop
except ImportError:  # the extra is not installed, or the system has no uvloop
    pass
else:
    _new_event_loop = uvloop.new_event_loop

T = TypeVar("T")
_HIDDEN_PACKAGES = {"aiohooks", "anyio", "asyncio", "contextlib", "uvloop"}


def run(main: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
    """Run the coroutine function `main` with `args` in a new event loop: uvloop's if it is
    installed, otherwise asyncio's.

    If no session handles Ctrl-C, it works as in `asyncio.run`: it cancels `main`, and `run` raises
    `KeyboardInterrupt`.

    At the end, `run` cancels the remaining tasks and waits for them, as `asyncio.run` does, and
    logs the tasks that it waits for. A task that ignores its cancellation, and that a group or
    session has already left behind, is abandoned after 10 s with a warning.

    The traceback of an error begins at your code, and that of an error of aiohooks ends there.
    Python's development mode (`python -X dev`) shows all of it.

    Args:
        main: a coroutine function.
        args: its arguments.

    Returns:
        The result of `main`.

    Raises:
        SystemExit: a signal ended a session that handles signals, and `main` returned None, was
            cancelled or raised `StopRequestedError`. The exit code is 128 + the number of the
            signal, as in shells.
        InvalidArgumentError: `main` is a coroutine, or a function that returns none. Write
            `run(main, ...)`, not `run(main(...))`.
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
                coro = main(*args)
                if not inspect.iscoroutine(coro):
                    raise InvalidArgumentError(
                        f"main returned {safe_repr(coro)}; give a coroutine function, `async def`"
                    )
                result: T = runner.run(coro)
            except (KeyboardInterrupt, SystemExit) as error:
                end = error
                # A callback has raised it, perhaps while `main` was ending. Then the loop still has
                # callbacks that stop it, and would stop in the runner's wait for the other tasks.
                # Let these callbacks run now, until `sys.exit` leaves the loop. `loop.stop` would
                # leave another such callback, and a loop of uvloop that is stopped in its last
                # iteration cannot be used at all.
                loop.call_soon(sys.exit)
                with contextlib.suppress(SystemExit, RuntimeError):
                    loop.run_forever()
                raise
    except BaseException as error:
        if end is not None and isinstance(error, RuntimeError):
            # After that end, the runner could not close the loop. The end counts.
            error = end
        number = None if loop is None else stopped_by(loop)
        # Of the errors after a signal, these are its effects, and become the exit code.
        effects = (KeyboardInterrupt, StopRequestedError, asyncio.CancelledError)
        if number is None or not isinstance(error, effects):
            _shorten_traceback(error)
            raise error
        if isinstance(error, KeyboardInterrupt):
            # This is the effect of SIGINT, even if another signal stopped the session before.
            number = signal.SIGINT
        _exit_by_signal(number)
    number = stopped_by(loop)
    if number is not None and result is None:
        _exit_by_signal(number)
    return result


def _shorten_traceback(error: BaseException) -> None:
    """Let the traceback of an error begin at the program, without the frames of the event loop that
    has called it.

    The traceback of an error of aiohooks also ends at the program: its message says enough, so the
    frames of the library are left out. In Python's development mode nothing is left out.
    """
    entries: list[TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        module: str = entry.tb_frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in _HIDDEN_PACKAGES:
            entries.append(entry)
        entry = entry.tb_next
    if not entries or sys.flags.dev_mode:
        return
    if isinstance(error, AiohooksError):
        entries[-1].tb_next = None
    error.__traceback__ = entries[0]


class _OpenRunner:
    """A block with an `asyncio.Runner`. Its end logs what it waits for, and does not wait for tasks
    that a session or a group has left behind.
    """

    def __enter__(self) -> asyncio.Runner:
        self._runner = asyncio.Runner(loop_factory=_new_event_loop)
        self._loop = self._runner.get_loop()
        self._has_stopped_loop = False
        return self._runner

    def __exit__(self, *_: object) -> None:
        """Close the runner, which cancels the remaining tasks and runs the loop until they end.

        `_watch_end` looks at this wait in the loop. If only tasks remain that have ignored their
        cancellation and were left behind, it stops the loop, so that the runner ends without them.
        """
        self._loop.call_soon(self._watch_end)
        try:
            self._runner.close()
        except RuntimeError:
            # The runner raises this when its loop is stopped, after it has closed the loop.
            if not self._has_stopped_loop:
                raise

    def _watch_end(self) -> None:
        """Log the runner's wait if it takes long, and check its tasks after the grace period."""
        wait_log(lambda: f"the end of aiohooks.run: {self._descriptions()}").begin(self)
        current_clock().call_later(DEFAULT_GRACE_SECS, self._check)

    def _descriptions(self) -> str:
        """Return what the end of the runner waits for."""
        activities = [
            activity_of(f"task {task.get_name()!r}", task) for task in asyncio.all_tasks(self._loop)
        ]
        return "; ".join(map(str, activities)) or "threads of the executor, or async generators"

    def _check(self) -> None:
        """End the wait of the runner if only tasks that were left behind remain. Otherwise check
        again in a second.
        """
        remaining = asyncio.all_tasks(self._loop)
        if not remaining or not remaining.issubset(LEFT_BEHIND):
            current_clock().call_later(1.0, self._check)
            return
        # There is no other way to let the runner end without these tasks. The runner then raises a
        # RuntimeError, which `__exit__` catches.
        self._has_stopped_loop = True
        self._loop.stop()
        logger.warning("aiohooks.run ends without %s", self._descriptions())


def _exit_by_signal(number: signal.Signals) -> NoReturn:
    """Raise `SystemExit` with the exit code of a program that a signal has ended."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # The program has ended. Another Ctrl-C must end the interpreter without a traceback of its
        # shutdown.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise SystemExit(128 + number)
