"""Faults in the system calls of a forked child, injected by strace."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.fuzz._checkpoint_harness import fork
from tests.fuzz._checkpoint_scenarios import Scenario, run_writer
from tests.fuzz._crash_model import Recorder
from tests.support.needs import MissingError, program

CALLS = (
    "openat", "mkdir", "mkdirat", "rename", "renameat", "renameat2", "unlinkat", "fsync", "write", "pwrite64", "ftruncate",
    "close", "flock", "getdents64", "fstat", "newfstatat", "read", "readv", "lseek", "fcntl",
)  # fmt: skip


def check_supported() -> None:
    """Raise `MissingError` unless strace can change system calls of a child here."""
    if not Path("/proc/self/fd").is_dir():
        raise MissingError("this program needs Linux, with /proc")
    status = traced(lambda: os.close(os.open("/", os.O_RDONLY)), ["/"], "openat:signal=SIGKILL:when=1")
    if not os.WIFSIGNALED(status):
        raise MissingError("strace cannot change the system calls of a child here (is ptrace allowed?)")


def paths_of(scenario: Scenario, root: Path) -> list[str]:
    """Return the paths that a scenario uses. strace selects the system calls that name one of these, or an open file of it."""
    recorder = Recorder(root)
    run_writer(scenario, root / "ckpt", recorder, lambda _: None)
    inside = {each.replace(" (deleted)", "") for each in recorder.paths}
    finals = {each.replace("/.tmp-drop-", "/").replace("/.tmp-", "/") for each in inside}
    return sorted(inside | finals | {str(root), str(root / "ckpt")})


def traced(fn: Callable[[], None], paths: Iterable[str], inject: str, log: str = os.devnull) -> int:
    """Call a function in a child with faults injected; return the child's wait status.

    The child is traced only from the call of the function on. In `log`, each system call that was changed is marked
    INJECTED, with the paths of its files.

    Raises:
        MissingError: strace could not attach to the child.
    """
    strace_program = program("strace")
    reading, writing = os.pipe()

    def child() -> None:
        os.close(writing)
        os.read(reading, 1)
        os.close(reading)
        fn()

    pid = fork(child)
    os.close(reading)
    call = inject.partition(":")[0]
    # With a question mark, a system call that this machine does not have is no error.
    command = [strace_program, "-f", "-y", "-o", log, "-p", str(pid), "-e", f"trace=?{call}", "-e", f"inject=?{inject}"]
    command += [part for path in paths for part in ("-P", path)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as strace:
        assert strace.stderr is not None
        output = ""
        for line in strace.stderr:
            output += line
            if "attached" in line:
                break
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
            os.waitpid(pid, 0)
            os.close(writing)
            raise MissingError(f"strace failed: {output.strip()}")
        os.write(writing, b"x")
        os.close(writing)
        _, status = os.waitpid(pid, 0)
        strace.stderr.read()
    return status
