"""A stop when the process is asked to end: SIGINT and SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable

_logger = logging.getLogger("aiohooks")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopOnSignal:
    """Requests a stop at the first signal; the next one does what it did before the session was entered.

    Sessions of one loop share the signals: the first signal stops all of them, and the last one to close gives the signals
    back.
    """

    _open: dict[asyncio.AbstractEventLoop, tuple[list[StopOnSignal], dict[signal.Signals, object]]] = {}  # noqa: RUF012

    def __init__(self, request_stop: Callable[[str], None]) -> None:
        """Keeps what to call; nothing is installed yet."""
        self._request_stop = request_stop

    def install(self) -> Callable[[], None]:
        """Takes the signals over, and returns what gives them back."""
        loop = asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():
            _logger.warning("handle_signals has no effect outside the main thread")
            return lambda: None
        if loop not in self._open:
            previous: dict[signal.Signals, object] = {number: signal.getsignal(number) for number in _SIGNALS}
            self._open[loop] = ([], previous)
            for number in _SIGNALS:
                loop.add_signal_handler(number, self._received, loop, number)
        self._open[loop][0].append(self)

        def remove() -> None:
            sessions, previous = self._open[loop]
            sessions.remove(self)
            if not sessions:
                del self._open[loop]
                _give_back(loop, previous)

        return remove

    @classmethod
    def reset_in_child(cls) -> None:
        """A forked child must not run its parent's handlers, nor write into its parent's loop."""
        if cls._open:
            cls._open.clear()
            signal.set_wakeup_fd(-1)
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)

    @classmethod
    def _received(cls, loop: asyncio.AbstractEventLoop, number: signal.Signals) -> None:
        sessions, previous = cls._open[loop]
        _give_back(loop, previous)
        for session in tuple(sessions):
            session._request_stop(f"{number.name} received")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=StopOnSignal.reset_in_child)


def _give_back(loop: asyncio.AbstractEventLoop, previous: dict[signal.Signals, object]) -> None:
    for number, handler in previous.items():
        if loop.remove_signal_handler(number):
            signal.signal(number, handler)  # type: ignore[arg-type]  # what getsignal gave; None only for handlers set in C
