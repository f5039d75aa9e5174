"""Starting child processes: programs that run to their end, and those that tests send signals
to.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tests.support.source import ROOT
from tests.support.waiting import HANG_SECS


@contextlib.contextmanager
def default_interrupt() -> Iterator[None]:
    """Give processes that are started in the block the default action of SIGINT.

    A shell starts a command with `&` in a script with SIGINT ignored, and all of its children
    inherit that.
    """
    # A handler of Python's is reset to the default action in a new program; an ignored signal stays
    # ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, in the project's directory; standard output and error are kept
    apart.
    """
    defaults: dict[str, Any] = {
        "cwd": ROOT,
        "capture_output": True,
        "text": True,
        "timeout": HANG_SECS,
    }
    return subprocess.run(command, check=False, **{**defaults, **options})


def run_python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments so, with warnings as errors."""
    return run([sys.executable, "-W", "error", *arguments], **options)


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start a process in the project's directory, with pipes for its output and the default action
    of SIGINT.
    """
    defaults: dict[str, Any] = {
        "cwd": ROOT,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    with default_interrupt():
        return subprocess.Popen(command, **{**defaults, **options})
