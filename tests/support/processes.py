"""Starting child processes that tests send signals to."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

from tests.support.source import ROOT


@contextlib.contextmanager
def default_interrupt() -> Iterator[None]:
    """Give processes that are started in the block the default action of SIGINT.

    A shell starts a command with `&` in a script with SIGINT ignored, and all of its children inherit that.
    """
    # A handler of Python's is reset to the default action in a new program; an ignored signal stays ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start a process in the project's directory, with pipes for its output and the default action of SIGINT."""
    defaults: dict[str, Any] = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with default_interrupt():
        return subprocess.Popen(command, **{**defaults, **options})
