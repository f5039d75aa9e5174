"""Why a process waits: asked by its own code, by a signal, or by `aiohooks why PID` from
outside.

A process that is asked answers in a thread of its own, over a Unix socket in a directory that only
its user can use: also while its event loop is blocked. No signal is sent to it. Nothing here runs
before it is asked.

    why_session       the wait-for graph of a session's loop
    enable_why        lets this process be asked
    process_text      its answer
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import socket
import stat
import tempfile
import threading
import types
from collections.abc import Mapping
from pathlib import Path

from aiohooks._core.activity import logger
from aiohooks._core.fork import call_after_fork
from aiohooks._why.builder import wait_graph
from aiohooks._why.graph import WaitGraph
from aiohooks.errors import InvalidArgumentError
from aiohooks.session.lifecycle import OPEN_SESSIONS, Lifecycle
from aiohooks.session.status import RUN_LOOPS, WHY_VARIABLE

_SEND_SECS = 2.0
_PAUSE_SECS = 1.0
_SIGNALS = [signal.Signals[name] for name in ("SIGUSR1", "SIGQUIT") if hasattr(signal, name)]


def why_session(session: Lifecycle) -> WaitGraph:
    """Return the wait-for graph of the loop of a session.

    From another thread, it is that of this moment.
    """
    loop = session.requests.loop
    return _graph({} if loop is None else {loop: session.thread})


def _graph(
    loops: Mapping[asyncio.AbstractEventLoop, int],
    interrupted: types.FrameType | None = None,
) -> WaitGraph:
    """Return the wait-for graph of loops, each with its thread, and of their sessions.

    Args:
        loops: the loops.
        interrupted: the frame that a signal has interrupted, if a signal handler asks.
    """
    sessions = [
        session.awaited() for session in list(OPEN_SESSIONS) if session.requests.loop in loops
    ]
    return wait_graph(loops, sessions, interrupted)


def process_text(interrupted: types.FrameType | None = None) -> str:
    """Return the wait-for graph of all known loops: the answer of this process.

    It may be called between any two instructions of the main thread: only reentrant locks are
    taken, and nothing is raised.
    """
    try:
        return str(_graph(_known_loops(), interrupted))
    except Exception as error:
        return f"that could not be found out: {error!r}"


def _known_loops() -> dict[asyncio.AbstractEventLoop, int]:
    """Return the loops of `run` and of open sessions, each with its thread."""
    loops = dict(RUN_LOOPS)
    for session in list(OPEN_SESSIONS):
        if session.requests.loop is not None:
            loops[session.requests.loop] = session.thread
    return {loop: thread for loop, thread in loops.items() if not loop.is_closed()}


# -- being asked


def enable_why() -> None:
    """Let this process be asked why it waits, by `aiohooks why` of the same user, and by signals
    that have no handler yet.

    What is wrong is logged.
    """
    global _server
    if _server is not None:
        return
    try:
        _server = _Server()
    except (OSError, InvalidArgumentError) as error:
        logger.warning(
            "%s is set, but this process cannot be asked why it waits: %s", WHY_VARIABLE, error
        )
        return
    if threading.current_thread() is not threading.main_thread():
        return
    for number in _SIGNALS:
        handler = signal.getsignal(number)
        if handler == signal.SIG_DFL:
            signal.signal(number, _print_why)
        elif handler not in (signal.SIG_IGN, _print_why):
            # The `&` of a script has SIGQUIT ignored: that is no handler.
            logger.warning(
                "%s does not print why this process waits: it has a handler already, %r",
                number.name,
                handler,
            )


def _print_why(number: int, frame: types.FrameType | None) -> None:
    text = f"why process {os.getpid()} waits:\n{process_text(frame)}\n"
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))


class _Server:
    """Answers questions of other processes, in a thread."""

    def __init__(self) -> None:
        """Listen on the socket that `aiohooks why PID` connects to, and start the thread.

        Raises:
            OSError: the socket cannot be made.
        """
        self._path = why_folder(make=True) / f"{os.getpid()}.sock"
        # A process that was killed and had the same ID has left its socket.
        self._path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(str(self._path))
            self._socket.listen()
        except OSError:
            self._socket.close()
            raise
        call_after_fork(self)
        atexit.register(self.stop)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="aiohooks why", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                # `stop` has closed the socket, or the process has too many open files.
                if not self._stopped.is_set():
                    logger.warning(
                        "a question why this process waits could not be accepted: %s", error
                    )
                if self._stopped.wait(_PAUSE_SECS):
                    return
                continue
            with connection, contextlib.suppress(OSError):  # whoever has asked has gone
                connection.settimeout(_SEND_SECS)
                connection.sendall(b" ")  # the answer has begun: Python's threads run
                connection.sendall(process_text().encode())

    def stop(self) -> None:
        """Close the socket, and remove it."""
        self._stopped.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()
        self._thread.join(_SEND_SECS)
        self._path.unlink(missing_ok=True)

    def after_fork(self) -> None:
        """Leave the socket to the parent. A child that is to answer enables it again, with its
        first session.
        """
        global _server
        self._socket.close()
        atexit.unregister(self.stop)
        _server = None


_server: _Server | None = None


def why_folder(*, make: bool = False) -> Path:
    """Return the directory of the sockets of this user's processes.

    Raises:
        InvalidArgumentError: it is not this user's alone.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise InvalidArgumentError("this system has no Unix sockets; session.why() works here")
    parent = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(parent) / f"aiohooks-{os.getuid()}"
    if make:
        folder.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        found = folder.lstat()
        is_private = stat.S_ISDIR(found.st_mode) and found.st_mode & 0o077 == 0
        if not is_private or found.st_uid != os.getuid():
            raise InvalidArgumentError(
                f"{folder} can be used by others than this user; remove it, or make its mode 0700"
            )
    return folder
