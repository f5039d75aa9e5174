"""Why a process waits: asked by its own code, by a signal, or by `aiohooks why PID` from
outside.

A process is asked over a Unix socket, in a directory that only its user can use, and answers in a
thread of its own, so even while its event loop is blocked. No signal is sent to it, and until it is
asked, the thread only waits.

    why_session       the wait-for graph of a session's loop
    enable_why        lets other programs ask this process
    process_text      the answer of this process
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
"""How long to wait for a program that has asked, and does not read the answer."""
_PAUSE_SECS = 1.0
"""The pause after a question that could not be accepted."""
_SIGNALS = [signal.Signals[name] for name in ("SIGUSR1", "SIGQUIT") if hasattr(signal, name)]


def why_session(session: Lifecycle) -> WaitGraph:
    """Return the wait-for graph of the event loop of a session. Any thread may ask."""
    loop = session.requests.loop
    return _graph({} if loop is None else {loop: session.thread})


def _graph(
    loops: Mapping[asyncio.AbstractEventLoop, int],
    interrupted: types.FrameType | None = None,
) -> WaitGraph:
    """Return the wait-for graph of loops, each with its thread, and of their sessions.

    Args:
        loops: the loops, each with its thread.
        interrupted: if a signal handler asks, the frame that its signal has interrupted.
    """
    sessions = [
        session.awaited() for session in list(OPEN_SESSIONS) if session.requests.loop in loops
    ]
    return wait_graph(loops, sessions, interrupted)


def process_text(interrupted: types.FrameType | None = None) -> str:
    """Return the wait-for graph of all known loops: the answer of this process.

    A signal handler may call this between any two instructions of the main thread. So it takes only
    reentrant locks, and raises nothing: an error becomes the answer.
    """
    try:
        return str(_graph(_known_loops(), interrupted))
    except Exception as error:
        return f"that could not be found out: {error!r}"


def _known_loops() -> dict[asyncio.AbstractEventLoop, int]:
    """Return the open event loops of `aiohooks.run` and of open sessions, each with its thread."""
    loops = dict(RUN_LOOPS)
    for session in list(OPEN_SESSIONS):
        if session.requests.loop is not None:
            loops[session.requests.loop] = session.thread
    return {loop: thread for loop, thread in loops.items() if not loop.is_closed()}


# -- being asked


def enable_why() -> None:
    """Let `aiohooks why` of the same user ask this process why it waits, and so let signals that
    have no handler yet.

    This does nothing if the process can be asked already. It only logs what does not work.
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
        # Only the main thread can set signal handlers.
        return
    for number in _SIGNALS:
        handler = signal.getsignal(number)
        if handler == signal.SIG_DFL:
            signal.signal(number, _print_why)
        elif handler not in (signal.SIG_IGN, _print_why):
            # An ignored signal is not worth a warning: a script with `&` lets SIGQUIT be ignored.
            logger.warning(
                "%s does not print why this process waits: it has a handler already, %r",
                number.name,
                handler,
            )


def _print_why(number: int, frame: types.FrameType | None) -> None:
    """Write why this process waits to standard error. A signal handler."""
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
        # An earlier process with the same ID that was killed may have left its socket.
        self._path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(str(self._path))
            self._socket.listen()
        except OSError:
            self._socket.close()
            raise
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="aiohooks why", daemon=True)
        call_after_fork(self)
        atexit.register(self.stop)
        self._thread.start()

    def _serve(self) -> None:
        """Answer one question after another, until `stop`. Called in the thread."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                # Either `stop` has closed the socket; or the process has too many open files, and
                # the thread tries again after a pause.
                if not self._stopped.is_set():
                    logger.warning(
                        "a question why this process waits could not be accepted: %s", error
                    )
                if self._stopped.wait(_PAUSE_SECS):
                    return
                continue
            # An OSError means that the program that has asked does not read the answer any more.
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_SEND_SECS)
                # To make the graph may take long. The space shows immediately that this thread
                # runs, so that no C code keeps Python's threads from running.
                connection.sendall(b" ")
                connection.sendall(process_text().encode())

    def stop(self) -> None:
        """Stop the thread, close the socket and remove its file."""
        self._stopped.set()
        with contextlib.suppress(OSError):
            # This ends the `accept` in which the thread waits.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(_SEND_SECS)
        self._path.unlink(missing_ok=True)

    def after_fork(self) -> None:
        """Leave the socket to the parent of a forked child.

        If the child should answer, too, its first session calls `enable_why` again.
        """
        global _server
        self._socket.close()
        atexit.unregister(self.stop)
        _server = None


_server: _Server | None = None


def why_folder(*, make: bool = False) -> Path:
    """Return the directory of the sockets of this user's processes.

    Args:
        make: whether to make the directory if it does not exist.

    Raises:
        InvalidArgumentError: other users can use the directory, or the system has no such sockets.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise InvalidArgumentError("this system has no Unix sockets; session.why() works here")
    parent = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(parent) / f"aiohooks-{os.getuid()}"
    if make:
        folder.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        # `lstat` does not follow a symbolic link, which another user may have made.
        status = folder.lstat()
        is_private = stat.S_ISDIR(status.st_mode) and status.st_mode & 0o077 == 0
        if not is_private or status.st_uid != os.getuid():
            raise InvalidArgumentError(
                f"{folder} can be used by others than this user; remove it, or make its mode 0700"
            )
    return folder
