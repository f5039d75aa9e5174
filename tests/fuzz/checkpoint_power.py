"""The power is cut at every operation, on a real file system.

    python -m tests.fuzz.checkpoint_power --points 500

An ext4 in a file is mounted over a loop device and shut down during a save, before the k-th operation, without writing its
journal (EXT4_IOC_SHUTDOWN). In half of the cuts the journal is written first, by syncing an unrelated file: then names are
durable, and data is not. After mounting it again, the acknowledged checkpoints must be there. A file that was not synced
and is lost proves that the cut works. Needs root, loop devices and mkfs.ext4.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from tests.fuzz._checkpoint_harness import Counting, Outcome, Seam, ViolationError, command, empty, fork, pick, rounds
from tests.fuzz._checkpoint_scenarios import Scenario, check_directory, make_scenarios, prepare, run_writer
from tests.fuzz._harness import scratch
from tests.support.needs import MissingError, program

SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2
SIZE = 24 * 1024 * 1024


class Volume:
    """An ext4 in a file, mounted."""

    def __init__(self, root: Path) -> None:
        self.path = root / "volume"
        self._device = ""
        self._image = root / "image"
        self._mounted = False
        self._libc = ctypes.CDLL(None, use_errno=True)

    def make(self) -> None:
        """Make and mount it.

        Raises:
            MissingError: this machine cannot do so.
        """
        if os.geteuid() != 0:
            raise MissingError("power cuts need root, to mount an ext4 over a loop device")
        mkfs, self._losetup = program("mkfs.ext4"), program("losetup")
        self.path.mkdir()
        with self._image.open("wb") as file:
            file.truncate(SIZE)
        _tool(mkfs, "-q", "-F", str(self._image))
        self._device = _tool(self._losetup, "-f", "--show", str(self._image))
        try:
            self.mount()
        except OSError as error:
            raise MissingError(f"ext4 cannot be mounted from {self._device} ({error})") from error

    def mount(self) -> None:
        """Mount it, as after a restart of the machine."""
        if self._libc.mount(self._device.encode(), bytes(self.path), b"ext4", 0, b"") != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._mounted = True

    def unmount(self) -> None:
        """Unmount it."""
        if self._libc.umount2(bytes(self.path), 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._mounted = False

    def sync(self) -> None:
        """Make all of it durable, before the writer of a scenario starts."""
        fd = os.open(self.path, os.O_RDONLY)
        self._libc.syncfs(fd)
        os.close(fd)

    def discard(self) -> None:
        """Unmount it and release the loop device."""
        if self._mounted:
            self._libc.umount2(bytes(self.path), 2)  # also if a file in it is open
        if self._device:
            _tool(self._losetup, "-d", self._device)


def _tool(*command_line: str) -> str:
    done = subprocess.run(command_line, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MissingError(f"{command_line[0]} failed: {done.stderr.strip()}")
    return done.stdout.strip()


@contextlib.contextmanager
def volume() -> Generator[Volume]:
    """Mount a volume for the block.

    Raises:
        MissingError: this machine cannot do so.
    """
    with scratch() as root:
        made = Volume(root)
        try:
            made.make()
            yield made
        finally:
            made.discard()


class PowerCut(Seam):
    """Cuts the power before one operation, and exits."""

    def __init__(self, root: Path, at: int, *, journal_first: bool) -> None:
        super().__init__()
        self._root = root
        self._at = at
        self._journal_first = journal_first

    def do(self, number: int, name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if number == self._at:
            self.cut()
        return real(*args, **kwargs)

    def cut(self) -> None:
        """Cut the power."""
        _write(self._root / "canary", b"not synced")
        if self._journal_first:
            fd = _write(self._root / "unrelated", b"synced")
            os.fsync(fd)
        fcntl.ioctl(os.open(self._root, os.O_RDONLY), SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        os._exit(0)


def _write(path: Path, data: bytes) -> int:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.write(fd, data)
    return fd


def power(points: int, seed: int) -> Outcome:
    """Cut the power so many times."""
    outcome = Outcome("power cuts")
    lost = 0
    with volume() as there:
        for number, rng in rounds(outcome, points, seed):
            cuts: list[tuple[Scenario, int, bool]] = []
            for scenario in make_scenarios(seed + number, 600 + 3000 * number, two_writers=False):
                counting = Counting()
                prepare(scenario, there.path / "run")
                run_writer(scenario, there.path / "run", counting, lambda _: None)
                shutil.rmtree(there.path / "run")
                operations = [*range(len(counting.done)), -1]  # -1: after the last operation
                cuts += [(scenario, at, first) for at in operations for first in (False, True)]
            for scenario, at, first in pick(points - outcome.points, [cuts], rng):
                where = f"{scenario.name}, before operation {at}, journal {'first' if first else 'lost'}, seed {seed + number}"
                with outcome.point(where):
                    lost += _cut_power(there, scenario, at, first)
    if outcome.points and not lost:
        outcome.violations.append("no cut lost an unsynced file: these were no power cuts")
    outcome.notes.append(f"{lost} of them lost an unsynced file")
    return outcome


def _cut_power(there: Volume, scenario: Scenario, at: int, journal_first: bool) -> bool:
    """Cut once; return whether the unsynced file is lost."""
    path = there.path / "run"
    cut = PowerCut(there.path, at, journal_first=journal_first)
    with mmap.mmap(-1, 1) as acknowledged:

        def child() -> None:
            prepare(scenario, path)
            there.sync()
            run_writer(scenario, path, cut, lambda number: acknowledged.__setitem__(0, number))
            cut.cut()

        _, status = os.waitpid(fork(child), 0)
        there.unmount()
        there.mount()
        try:
            if status != 0:
                raise ViolationError(f"the writer ended with status {status}")
            check_directory(scenario, path, acknowledged[0])
            canary = there.path / "canary"
            return not canary.exists() or canary.read_bytes() != b"not synced"
        finally:
            empty(there.path)


if __name__ == "__main__":
    sys.exit(command(power, 500, __doc__))
