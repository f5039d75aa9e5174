"""Running out of things: pages and inodes of a small tmpfs, open files, the size of a file."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
from collections.abc import Generator
from pathlib import Path

from tests.fuzz._attempts import Trouble, attempt, look, unfinished
from tests.fuzz._disk import Outcome, UnsuitedError, WrongError, open_files, rounds, scratch
from tests.fuzz._stories import Story, make_stories, prepare

PAGE = os.sysconf("SC_PAGE_SIZE")
PAGES = 96
MANY_INODES = 10_000
_REMOUNT = 32
_DETACH = 2


class Memory:
    """A small tmpfs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._libc = ctypes.CDLL(None, use_errno=True)

    def mount(self, flags: int = 0, inodes: int = MANY_INODES) -> None:
        """Mounts it; with a flag, changes how many inodes it may have.

        Raises:
            OSError: that cannot be done.
        """
        options = f"size={PAGES * PAGE},nr_inodes={inodes}".encode()
        if self._libc.mount(b"tmpfs", bytes(self.path), b"tmpfs", flags, options) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def limit_inodes(self, left: int | None) -> None:
        """Leaves so many inodes; None: plenty."""
        if left is None:
            self.mount(_REMOUNT)
        else:
            self.mount(_REMOUNT)
            status = os.statvfs(self.path)
            self.mount(_REMOUNT, status.f_files - status.f_ffree + left)

    def discard(self) -> None:
        """Takes it away."""
        self._libc.umount2(bytes(self.path), _DETACH)

    @property
    def free_pages(self) -> int:
        return os.statvfs(self.path).f_bfree

    def fill(self, left: int) -> None:
        """Leaves so many pages."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path / "ballast")
        (self.path / "ballast").write_bytes(bytes(max(0, self.free_pages - left) * PAGE))


@contextlib.contextmanager
def small_memory() -> Generator[Memory]:
    """A small tmpfs for the length of a block.

    Raises:
        UnsuitedError: this process cannot mount one.
    """
    with scratch() as root:
        memory = Memory(root / "memory")
        memory.path.mkdir()
        try:
            memory.mount()
        except OSError as error:
            raise UnsuitedError(f"disks that are full need a tmpfs, which cannot be mounted here ({error}); be root") from error
        try:
            yield memory
        finally:
            memory.discard()


def check_suited() -> None:
    """Raises `UnsuitedError` unless a tmpfs can be mounted."""
    with small_memory():
        pass


def fill_levels(outcome: Outcome, points: int, seed: int) -> int:
    """Saves with less and less room; returns how many times."""
    begun = outcome.points
    with small_memory() as memory:
        for number, _ in rounds(seed):
            # From less than a page to many: other sizes fail in other places.
            stories = [each for each in make_stories(seed + number, 200 + 1300 * number % 60_000) if not each.contended]
            for story in stories:
                for inodes in (False, True):
                    left, successes = 0, 0
                    while successes < 2 and outcome.points - begun < points:
                        where = f"{story.name}, {left} {'inodes' if inodes else 'pages'} left, seed {seed + number}"
                        with outcome.point(where):
                            successes += _at_level(memory, story, left, inodes=inodes)
                        left += 1
            if outcome.points - begun >= points:
                return points
    raise AssertionError("rounds do not end")


def _at_level(memory: Memory, story: Story, left: int, *, inodes: bool) -> bool:
    """One attempt; returns whether it went well."""
    memory.limit_inodes(None)
    for each in memory.path.iterdir():
        if each.is_dir():
            shutil.rmtree(each)
        else:
            each.unlink()
    path = memory.path / "ckpt"
    prepare(story, path)
    if inodes:
        memory.limit_inodes(left)
    else:
        memory.fill(left)
    room = memory.free_pages
    found = attempt(story, path)
    # The lock's file takes one, where there was none before.
    if found.errno is not None and not found.saves and not story.leftovers and memory.free_pages < room - (not story.before):
        raise WrongError(f"{room - memory.free_pages} pages are not given back: {sorted(unfinished(path))}")
    memory.limit_inodes(None)
    memory.fill(PAGES)
    if not path.exists():
        if found.saves or story.before or found.errno is None:
            raise WrongError("the directory is gone")
        return False
    look(story, path, found, Trouble("ENOSPC"))
    return found.errno is None


def limits(outcome: Outcome, points: int, seed: int) -> int:
    """Saves with few open files, or a limit to the size of a file; returns how many times."""
    begun = outcome.points
    with scratch() as root:
        for number, _ in rounds(seed):
            stories = [each for each in make_stories(seed + number, 200 + 1300 * number) if not each.contended]
            for story in stories:
                for kind, step in ((resource.RLIMIT_NOFILE, 1), (resource.RLIMIT_FSIZE, 61)):
                    level, successes = 0, 0
                    while successes < 2 and outcome.points - begun < points:
                        where = f"{story.name}, limit {kind} at {level * step}, seed {seed + number}"
                        with outcome.point(where):
                            successes += _within(root, story, kind, level * step)
                        level += 1
            if outcome.points - begun >= points:
                return points
    raise AssertionError("rounds do not end")


def _within(root: Path, story: Story, kind: int, level: int) -> bool:
    path = root / "ckpt"
    shutil.rmtree(path, ignore_errors=True)
    prepare(story, path)
    was = resource.getrlimit(kind)
    least = level
    if kind == resource.RLIMIT_NOFILE:
        least = _lowest_with(level)
    # Listing the open files before and after takes one too: hence inside.
    resource.setrlimit(kind, (least, was[1]))
    try:
        found = attempt(story, path)
    finally:
        resource.setrlimit(kind, was)
    if not path.exists() and found.errno is not None and not story.before:
        return False
    # With no file left to open, a folder cannot be emptied either: the next save does that.
    trouble = Trouble("EMFILE", lasting=True) if kind == resource.RLIMIT_NOFILE else Trouble("EFBIG")
    look(story, path, found, trouble)
    return found.errno is None


def _lowest_with(free: int) -> int:
    """The limit under which so many files can still be opened, and one more for looking at what is open."""
    used = {int(fd) for fd, _ in open_files()}
    limit = 0
    while free >= 0 or limit in used:
        free -= limit not in used
        limit += 1
    return limit
