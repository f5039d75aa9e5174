"""Two writers take a directory in turn, and are killed while they have it.

    python -m tests.fuzz.checkpoint_turns --points 2000

Each of two processes opens the directory as soon as the other has left it, restores, saves, and is killed at a random file
operation or byte, or leaves; another process replaces it. A record lock beside the directory's own shows that there are never
two in it. Whatever is restored, by the next writer or by a reader beside both, is complete, and is the newest save that
returned, or the one during which a writer was killed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import selectors
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from aiohooks.checkpoint import Restored
from aiohooks.checkpoint.saver import CheckpointDirectory
from aiohooks.errors import CheckpointBusyError
from tests.fuzz._checkpoint_harness import Outcome, Seam, ViolationError, command, fork
from tests.fuzz._checkpoint_scenarios import check_restored, directory, make_save
from tests.fuzz._harness import scratch

_WRITERS = 2
_MOST_OPERATIONS = 150
"""A turn has about 50."""
_BEGUN, _DONE, _TURNS = range(3)
"""In the memory that the writers share: the last save that has begun, the newest that is known to be complete, and the turns."""
_CHANGES = frozenset({"ftruncate", "pwrite", "rename", "rmdir", "unlink", "write"})


class OneAtATime(Seam):
    """Kills this process at an operation on the locked directory; a second writer in it is a violation.

    Args:
        witness: a file whose record lock is held while the directory is locked. The kernel releases both locks of a process
            that is killed, this one first.
        at: the number of the operation, counted while the directory is locked.
        after_bytes: how many bytes of it are written, if it is a write.
    """

    def __init__(self, witness: int, at: int, after_bytes: int) -> None:
        super().__init__()
        self._witness = witness
        self._left = at
        self._after_bytes = after_bytes
        self._locked = False

    def do(self, number: int, name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._locked:
            if self._left == 0:
                if name == "write":
                    real(args[0], memoryview(args[1])[: self._after_bytes])
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1
        elif name in _CHANGES:
            raise ViolationError(f"{name} without the lock")
        if name != "flock":
            return real(*args, **kwargs)
        if args[1] == fcntl.LOCK_UN:
            self._locked = False
            fcntl.lockf(self._witness, fcntl.LOCK_UN)
            return real(*args, **kwargs)
        real(*args, **kwargs)
        try:
            fcntl.lockf(self._witness, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ViolationError("two writers have the directory") from None
        self._locked = True


def _write_in_turns(root: Path, journal: memoryview, rng: random.Random) -> None:
    """Save whenever the directory is free, until killed."""
    witness = os.open(root / "witness", os.O_RDWR | os.O_CREAT, 0o600)
    there = directory(root / "ckpt", OneAtATime(witness, rng.randrange(_MOST_OPERATIONS), rng.randrange(600)))
    while True:
        try:
            _take_turn(there, journal, saves=rng.randrange(3))
        except CheckpointBusyError:
            os.sched_yield()
        except Exception as error:
            (root / "violation").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
            raise


def _take_turn(there: CheckpointDirectory, journal: memoryview, saves: int) -> None:
    try:
        found = there.restore(None)
        journal[_TURNS] += 1
        journal[_DONE] = _checked_number(found, {journal[_DONE], journal[_BEGUN]})
        for _ in range(saves):
            journal[_BEGUN] += 1
            save = make_save(journal[_BEGUN])
            there.save(save.state, save.step, save.metrics)
            journal[_DONE] = journal[_BEGUN]
    finally:
        there.close()


def _checked_number(found: Restored | None, possible: set[int]) -> int:
    """Return the number of the restored save, 0 for none; it must be complete, and one of these."""
    number = 0 if found is None else int(found.checkpoint.metrics["number"])
    if number not in possible:
        raise ViolationError(f"save {number} was restored, not one of {sorted(possible)}")
    check_restored(found, make_save(number) if number else None)
    if found is not None and found.set_aside:
        raise ViolationError(f"set aside: {found.set_aside}")
    return number


@contextmanager
def _killed_at_the_end(pids: dict[int, int]) -> Generator[None]:
    try:
        yield
    finally:
        for pidfd, pid in pids.items():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(pidfd)


def turns(points: int, seed: int) -> Outcome:
    """Kill so many writers of one directory."""
    outcome, rng, writers = Outcome("two writers"), random.Random(seed), dict[int, int]()
    journal = memoryview(mmap.mmap(-1, 24)).cast("q")
    with scratch() as root, selectors.DefaultSelector() as ends, _killed_at_the_end(writers):
        reader = directory(root / "ckpt", read_only=True)
        while outcome.points < points and not outcome.violations:
            while len(writers) < _WRITERS:
                pid = fork(partial(_write_in_turns, root, journal, random.Random(rng.random())))
                writers[pidfd := os.pidfd_open(pid)] = pid
                ends.register(pidfd, selectors.EVENT_READ)
            ended = ends.select()[0][0].fd
            with outcome.point(f"kill {outcome.points}, seed {seed}"):
                ends.unregister(ended)
                os.close(ended)
                _, status = os.waitpid(writers.pop(ended), 0)
                if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
                    said = root / "violation"
                    raise ViolationError(said.read_text(encoding="utf-8") if said.exists() else f"it ended with status {status}")
                before = journal[_DONE]
                _checked_number(reader.restore(None), set(range(before, journal[_BEGUN] + 1)))
    outcome.notes.append(f"{journal[_TURNS]} turns, {journal[_BEGUN]} saves")
    return outcome


if __name__ == "__main__":
    sys.exit(command(turns, 2000, __doc__))
