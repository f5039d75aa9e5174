"""Something happening to the system calls of a forked child, by strace: no seam in the library, no preloaded library."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.fuzz._disk import UnsuitedError, fork
from tests.fuzz._stories import Story, act
from tests.fuzz._trace import Recorder

CALLS = (
    "openat", "mkdir", "mkdirat", "rename", "renameat", "renameat2", "unlinkat", "fsync", "write", "pwrite64", "ftruncate",
    "close", "flock", "getdents64", "fstat", "newfstatat", "read", "lseek", "fcntl",
)  # fmt: skip


def check_suited() -> None:
    """Raises `UnsuitedError` unless strace can change system calls of a child here."""
    if shutil.which("strace") is None:
        raise UnsuitedError("this programme needs strace")
    if not Path("/proc/self/fd").is_dir():
        raise UnsuitedError("this programme needs Linux, with /proc")
    status = traced(lambda: os.close(os.open("/", os.O_RDONLY)), ["/"], "openat:signal=SIGKILL:when=1")
    if not os.WIFSIGNALED(status):
        raise UnsuitedError("strace cannot change the system calls of a child here (is ptrace allowed?)")


def paths_of(story: Story, root: Path) -> list[str]:
    """Every path that a story touches: strace looks at system calls that name one of these, or an open file of that name."""
    recorder = Recorder(root)
    act(story, root / "ckpt", recorder, lambda _: None)
    inside = {each.replace(" (deleted)", "") for each in recorder.paths}
    finals = {each.replace("/.tmp-drop-", "/").replace("/.tmp-", "/") for each in inside}
    return sorted(inside | finals | {str(root), str(root / "ckpt")})


def traced(fn: Callable[[], None], paths: Iterable[str], inject: str, log: str = os.devnull) -> int:
    """Runs a function in a child with something injected; returns the child's wait status.

    The child is traced only from where the function begins, so an interpreter's start is not in the counts. In `log`,
    each system call that was changed is marked INJECTED, and has the paths of its files.

    Raises:
        UnsuitedError: strace could not take hold of the child.
    """
    reading, writing = os.pipe()

    def child() -> None:
        os.close(writing)
        os.read(reading, 1)
        os.close(reading)
        fn()

    pid = fork(child)
    os.close(reading)
    call = inject.partition(":")[0]
    # With the question position, a call that this machine does not have is no error.
    command = ["strace", "-f", "-y", "-o", log, "-p", str(pid), "-e", f"trace=?{call}", "-e", f"inject=?{inject}"]
    command += [part for path in paths for part in ("-P", path)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as strace:
        assert strace.stderr is not None
        said = ""
        for line in strace.stderr:
            said += line
            if "attached" in line:
                break
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
            os.waitpid(pid, 0)
            os.close(writing)
            raise UnsuitedError(f"strace says: {said.strip()}")
        os.write(writing, b"x")
        os.close(writing)
        _, status = os.waitpid(pid, 0)
        strace.stderr.read()
    return status
