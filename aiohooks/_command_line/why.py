"""`aiohooks why PID`: ask another process why it waits."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from aiohooks._why.processes import process_state
from aiohooks.errors import printable
from aiohooks.session.why import why_folder

# How long a process may take to answer.
_ANSWER_SECS = 1.5
_MAX_LINE_LENGTH = 10_000


def print_why(pid: int) -> int:
    """Ask a process why it waits, and print its answer.

    Returns:
        The exit code: 0, or 1 if the process has not answered.
    """
    answer, problem = _ask_process(pid)
    if problem is not None:
        answer = f"process {pid}: {problem}"
    print("\n".join(printable(line, _MAX_LINE_LENGTH) for line in answer.splitlines()))
    return int(problem is not None)


def _ask_process(pid: int) -> tuple[str, str | None]:
    """Return the answer of a process, and why there is none."""
    state = process_state(pid)
    if state is not None:
        return "", state
    path = why_folder() / f"{pid}.sock"
    answer = b""
    try:
        for part in _receive_answer(path):
            answer += part
    except TimeoutError:
        # A process sends a space before it makes the graph, to show that its thread runs.
        reason = "it has too many tasks, or the machine is busy: ask again"
        if not answer:
            reason = "it is in C code that does not let Python's other threads run"
        # The process may have been stopped after the first check.
        reason = process_state(pid) or reason
        return "", f"has not answered in {_ANSWER_SECS} s: {reason}{_kernel_wait(pid)}"
    except (FileNotFoundError, ConnectionRefusedError):
        return (
            "",
            f"cannot be asked: it has no socket in {path.parent}; start it with AIOHOOKS_WHY=1, and"
            " ask as its user",
        )
    except OSError as error:
        return "", f"cannot be asked by {path}: {error}"
    text = answer.decode().lstrip()
    return text, None if text else "it has ended meanwhile"


def _receive_answer(path: Path) -> Iterator[bytes]:
    """Yield the parts of an answer. Raise `TimeoutError` if it takes longer than `_ANSWER_SECS`."""
    deadline = time.monotonic() + _ANSWER_SECS
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_SECS)
        connection.connect(str(path))
        while part := connection.recv(1 << 16):
            yield part
            # A timeout of 0 would make the socket non-blocking.
            connection.settimeout(max(deadline - time.monotonic(), 0.001))


def _kernel_wait(pid: int) -> str:
    """Return the end of a message: the kernel function in which a process waits, if readable."""
    with contextlib.suppress(OSError):
        function = Path(f"/proc/{pid}/wchan").read_text()
        if function not in ("", "0"):
            return f"; in the kernel: {function}"
    return ""
