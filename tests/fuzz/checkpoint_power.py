"""P8: the power is cut at every operation, on a real file system.

    python -m tests.fuzz.checkpoint_power --points 500

An ext4 in a file is mounted over a loop device and shut down in the middle of a save, before the k-th operation, without
writing its journal out (EXT4_IOC_SHUTDOWN). In half of the cuts the journal is written first, by syncing a file that has
nothing to do with it: names are durable then, and data is not. After mounting again, the acknowledged checkpoints must be
there. A file that nobody synced is the proof that the cut was one. Needs root, loop devices and mkfs.ext4.
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
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from tests.fuzz._disk import Counting, Outcome, Seam, UnsuitedError, WrongError, command, fork, pick, rounds, scratch
from tests.fuzz._stories import Story, act, judge, make_stories, prepare

SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2
SIZE = 24 * 1024 * 1024
SYSTEM_TOOLS = ":/usr/sbin:/sbin"
"""Where these are, which not everybody has on the path."""


class Volume:
    """An ext4 in a file, mounted."""

    def __init__(self, root: Path) -> None:
        self.path = root / "volume"
        self._device = ""
        self._image = root / "image"
        self._mounted = False
        self._libc = ctypes.CDLL(None, use_errno=True)

    def make(self) -> None:
        """Makes and mounts it.

        Raises:
            UnsuitedError: this machine cannot.
        """
        if os.geteuid() != 0:
            raise UnsuitedError("power cuts need root, to mount an ext4 over a loop device")
        mkfs = shutil.which("mkfs.ext4", path=os.environ.get("PATH", "") + SYSTEM_TOOLS)
        losetup = shutil.which("losetup", path=os.environ.get("PATH", "") + SYSTEM_TOOLS)
        if mkfs is None or losetup is None:
            raise UnsuitedError("power cuts need mkfs.ext4 (e2fsprogs) and losetup (util-linux)")
        self._losetup = losetup
        self.path.mkdir()
        with self._image.open("wb") as file:
            file.truncate(SIZE)
        _tool(mkfs, "-q", "-F", str(self._image))
        self._device = _tool(losetup, "-f", "--show", str(self._image))
        try:
            self.mount()
        except OSError as error:
            raise UnsuitedError(f"ext4 cannot be mounted from {self._device} ({error})") from error

    def mount(self) -> None:
        """Mounts it, as the machine does when it is switched on again."""
        if self._libc.mount(self._device.encode(), bytes(self.path), b"ext4", 0, b"") != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._mounted = True

    def unmount(self) -> None:
        """Takes it away again."""
        if self._libc.umount2(bytes(self.path), 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._mounted = False

    def sync(self) -> None:
        """Makes all that is there durable: what a story begins with."""
        fd = os.open(self.path, os.O_RDONLY)
        self._libc.syncfs(fd)
        os.close(fd)

    def discard(self) -> None:
        """Gives everything back."""
        if self._mounted:
            self._libc.umount2(bytes(self.path), 2)  # also if something is open in there still
        if self._device:
            _tool(self._losetup, "-d", self._device)


def _tool(*command_line: str) -> str:
    done = subprocess.run(command_line, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UnsuitedError(f"{command_line[0]} says: {done.stderr.strip()}")
    return done.stdout.strip()


@contextlib.contextmanager
def volume() -> Generator[Volume]:
    """A volume for the length of a block.

    Raises:
        UnsuitedError: this machine cannot have one.
    """
    with scratch() as root:
        made = Volume(root)
        try:
            made.make()
            yield made
        finally:
            made.discard()


class Cut(Seam):
    """Cuts the power before one operation, and ends the process."""

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
        """Does it."""
        _write(self._root / "canary", b"nobody synced this")
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
    """Cuts the power so many times."""
    outcome = Outcome("power cuts")
    lost = 0
    with volume() as there:
        for number, rng in rounds(seed):
            left = points - outcome.points
            if left <= 0:
                break
            cuts: list[tuple[Story, int, bool]] = []
            for story in make_stories(seed + number, 600 + 3000 * number):
                if story.contended:
                    continue
                counting = Counting()
                prepare(story, there.path / "run")
                act(story, there.path / "run", counting, lambda _: None)
                shutil.rmtree(there.path / "run")
                operations = [*range(len(counting.done)), -1]  # the last one: when all is done
                cuts += [(story, at, first) for at in operations for first in (False, True)]
            for story, at, first in pick(left, [cuts], rng):
                where = f"{story.name}, before operation {at}, journal {'first' if first else 'lost'}, seed {seed + number}"
                with outcome.point(where):
                    lost += _one(there, story, at, first)
    if outcome.points and not lost:
        outcome.violations.append("no cut lost what was never synced: these were no power cuts")
    outcome.notes.append(f"{lost} of them lost an unsynced file")
    return outcome


def _one(there: Volume, story: Story, at: int, journal_first: bool) -> bool:
    """One cut; returns whether it lost what it may."""
    path = there.path / "run"
    cut = Cut(there.path, at, journal_first=journal_first)
    with mmap.mmap(-1, 1) as acknowledged:

        def child() -> None:
            prepare(story, path)
            there.sync()
            act(story, path, cut, lambda number: acknowledged.__setitem__(0, number))
            cut.cut()

        _, status = os.waitpid(fork(child), 0)
        there.unmount()
        there.mount()
        try:
            if status != 0:
                raise WrongError(f"the writer ended with status {status}")
            judge(story, path, acknowledged[0])
            canary = there.path / "canary"
            return not canary.exists() or canary.read_bytes() != b"nobody synced this"
        finally:
            for each in there.path.iterdir():
                if each.is_dir():
                    shutil.rmtree(each)
                else:
                    each.unlink()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return command(power, 500, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
