"""Errors of every system call, full disks, and limits of the process.

    python -m tests.fuzz.checkpoint_errors --points 1300

Three parts. strace replaces the k-th system call of each kind by an error, once or from there on. A small tmpfs has fewer and
fewer free pages and inodes. Limits apply to open files and file sizes. In each case a save must succeed or raise
CheckpointError with that errno; earlier checkpoints are there, no file stays open, nothing unfinished stays on the disk, and
the next save succeeds. A save whose fsync failed must fail. Needs strace, and root to mount the tmpfs.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import mmap
import os
import resource
import shutil
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from aiohooks.errors import CheckpointError, CorruptCheckpointError
from tests.fuzz import _strace
from tests.fuzz._checkpoint_harness import Outcome, Tree, ViolationError, command, empty, materialise, open_files, rounds
from tests.fuzz._checkpoint_scenarios import (
    LEFTOVERS,
    Scenario,
    check_directory,
    check_restored,
    directory,
    make_scenarios,
    prepare,
    prepared,
    run_writer,
)
from tests.fuzz._harness import scratch
from tests.support.needs import MissingError

ERRORS = ("ENOSPC", "EIO", "EDQUOT", "EROFS", "EMFILE", "EINTR", "EACCES")
RESTORE = "restore"
"""The scenario in which nothing is saved."""


def errors(points: int, seed: int) -> Outcome:
    """Make so many operations fail, 3 of 13 by strace, the others on full disks; and some more by limits."""
    with small_tmpfs():
        pass  # raises before anything else where it cannot be mounted
    outcome = Outcome("I/O errors and full disks")
    by_strace = -(-points * 3 // 13)
    inject_errors(outcome, by_strace, seed)
    levels = fill_levels(outcome, points - by_strace, seed)
    by_limits = limits(outcome, -(-points // 13), seed)
    outcome.notes.append(f"{by_strace} by strace, {levels} fill levels, {by_limits} limits")
    return outcome


# Attempts


@dataclass(slots=True)
class Attempt:
    """What a writer did; plain data, to be sent between processes."""

    saves: int = 0
    errno: int | None = None
    corrupt: bool = False
    restored: int | None = None
    untyped: str | None = None
    left_open: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fault:
    """What fails during an attempt."""

    error: str
    call: str = ""
    """The system call, if it is one."""
    lasting: bool = False
    """Later calls fail, too."""
    of_saved: bool = False
    """The call was for a file that is being saved."""


def attempt(scenario: Scenario, path: Path) -> Attempt:
    """Do what the writer of a scenario does."""
    files, found = open_files(), Attempt()

    def acknowledge(saves: int) -> None:
        found.saves = saves

    try:
        if scenario.name == RESTORE:
            found.restored = _restore(scenario, path)
        else:
            run_writer(scenario, path, os, acknowledge)
    except CorruptCheckpointError:
        found.corrupt = True
    except CheckpointError as error:
        found.errno = error.errno
    except Exception as error:  # any other error is a violation
        found.untyped = f"{type(error).__name__}: {error}"
    found.left_open = [" ".join(each) for each in open_files() - files]
    return found


def _restore(scenario: Scenario, path: Path) -> int:
    reader = directory(path)
    try:
        restored = reader.restore(None)
        assert restored is not None
        saved = next(each for each in scenario.before if each.step == restored.checkpoint.step)
        check_restored(restored, saved)
        return saved.number
    finally:
        reader.close()


def unfinished(path: Path) -> set[str]:
    """Return the names of unfinished checkpoints, except those that a scenario begins with."""
    return {each.name for each in path.glob(".tmp-*step-*.*")} - {*LEFTOVERS}


def check_attempt(scenario: Scenario, path: Path, found: Attempt, fault: Fault) -> None:
    """Check the result of an attempt, and the directory.

    Raises:
        ViolationError: an error was ignored or another one raised, or something is lost or left over.
    """
    if found.untyped is not None:
        raise ViolationError(f"raised {found.untyped}")
    if found.errno not in (None, getattr(errno, fault.error)):
        raise ViolationError(f"raised errno {errno.errorcode.get(found.errno or 0)} for {fault.error}")
    if found.left_open and fault.call != "close":  # a close that strace replaces does not close
        raise ViolationError(f"left open: {found.left_open}")
    failed = found.errno is not None
    if failed and not fault.lasting and (names := unfinished(path)):
        raise ViolationError(f"not cleaned up: {sorted(names)}")
    if scenario.name == RESTORE:
        _check_restore(scenario, path, found, fault)
        return
    if found.corrupt:
        raise ViolationError("a save found something corrupt")
    if not failed and found.saves < len(scenario.then):
        raise ViolationError(f"{found.saves} saves of {len(scenario.then)} returned, and nothing was raised")
    # Without earlier checkpoints nothing is removed, so the call was for a file that is being saved.
    of_saved = fault.of_saved or not scenario.before
    if not failed and of_saved and fault.call in ("write", "fsync") and fault.error != "EINTR":
        raise ViolationError(f"a failed {fault.call} was ignored")
    check_directory(scenario, path, found.saves, in_flight=fault.lasting)


def _check_restore(scenario: Scenario, path: Path, found: Attempt, fault: Fault) -> None:
    if fault.error == "EIO":  # a file that the disk does not return is damaged
        there = [each.name for each in path.iterdir() if each.name.startswith(("step-0", "damaged-step-0"))]
        if len(there) != len(scenario.before):
            raise ViolationError(f"a checkpoint was removed: {there}")
        return
    if found.corrupt or (found.restored is None) != (found.errno is not None):
        raise ViolationError(f"restored {found.restored}, errno {found.errno}, corrupt {found.corrupt}")
    if found.restored not in (None, scenario.before[-1].number):
        raise ViolationError(f"restored save {found.restored}, though the last one is good")
    check_directory(scenario, path, 0)


# Errors of system calls


def inject_errors(outcome: Outcome, points: int, seed: int, calls: Sequence[str] = _strace.CALLS) -> None:
    """Replace system calls by errors."""
    _strace.check_supported()
    end = outcome.points + points
    with scratch() as root:
        work = root / "work"
        for number, rng in rounds(outcome, end, seed):
            plans: list[tuple[Scenario, Tree, list[str], Fault]] = []
            scenarios = [each for each in make_scenarios(seed + number, 600, two_writers=False) if not each.damaged]
            scenarios.append(Scenario(RESTORE, scenarios[1].before, ()))
            for scenario in scenarios:
                tree, paths = prepared(scenario, work), _strace.paths_of(scenario, work)
                paths = sorted({*paths, *(str(work / name) for name in tree)})
                faults = [Fault(error, call, on) for call in calls for error in ERRORS for on in (False, True)]
                # Python retries after EINTR, indefinitely.
                faults = [each for each in faults if not (each.lasting and each.error == "EINTR")]
                plans += [(scenario, tree, paths, fault) for fault in faults]
            rng.shuffle(plans)
            for scenario, tree, paths, fault in plans:
                when = 1
                while outcome.points < end and _run_injected(outcome, scenario, tree, work, paths, fault, when):
                    when += 1


def _run_injected(
    outcome: Outcome, scenario: Scenario, tree: Tree, root: Path, paths: list[str], fault: Fault, when: int
) -> bool:
    """Run once with an error at the call number `when`; return whether there was such a call."""
    materialise(tree, root)
    path, log = root / "ckpt", root.parent / "log"
    with mmap.mmap(-1, 65_536) as answer:

        def child() -> None:
            answer.write(json.dumps(asdict(attempt(scenario, path))).encode())

        inject = f"{fault.call}:error={fault.error}:when={when}{'+' * fault.lasting}"
        status = _strace.traced(child, paths, inject, str(log))
        text = answer[:].rstrip(b"\0")
    changed = [line for line in log.read_text(errors="replace").splitlines() if "INJECTED" in line]
    if not changed:
        return False
    fault = replace(fault, of_saved="/.tmp-step-" in changed[0])
    with outcome.point(f"{scenario.name}, {fault.call} {when}{' and all later ones' * fault.lasting}: {fault.error}"):
        if status != 0:
            raise ViolationError(f"the writer ended with status {status}")
        check_attempt(scenario, path, Attempt(**json.loads(text)), fault)
    return True


# Full disks

PAGE = os.sysconf("SC_PAGE_SIZE")
PAGES = 96
MANY_INODES = 10_000
_REMOUNT = 32
_DETACH = 2


class SmallTmpfs:
    """A small tmpfs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._libc = ctypes.CDLL(None, use_errno=True)

    def mount(self, flags: int = 0, inodes: int = MANY_INODES) -> None:
        """Mount it; with `_REMOUNT`, change the number of its inodes.

        Raises:
            OSError: as the system raised it.
        """
        options = f"size={PAGES * PAGE},nr_inodes={inodes}".encode()
        if self._libc.mount(b"tmpfs", bytes(self.path), b"tmpfs", flags, options) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def limit_inodes(self, left: int | None) -> None:
        """Leave so many inodes; None: `MANY_INODES`."""
        self.mount(_REMOUNT)
        if left is not None:
            status = os.statvfs(self.path)
            self.mount(_REMOUNT, status.f_files - status.f_ffree + left)

    def unmount(self) -> None:
        """Unmount it."""
        self._libc.umount2(bytes(self.path), _DETACH)

    @property
    def free_pages(self) -> int:
        return os.statvfs(self.path).f_bfree

    def fill(self, left: int) -> None:
        """Leave so many pages."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path / "ballast")
        (self.path / "ballast").write_bytes(bytes(max(0, self.free_pages - left) * PAGE))


@contextlib.contextmanager
def small_tmpfs() -> Generator[SmallTmpfs]:
    """Mount a small tmpfs for the block.

    Raises:
        MissingError: this process cannot mount one.
    """
    with scratch() as root:
        tmpfs = SmallTmpfs(root / "tmpfs")
        tmpfs.path.mkdir()
        try:
            tmpfs.mount()
        except OSError as error:
            raise MissingError(f"full disks need a tmpfs, which cannot be mounted here ({error}); be root") from error
        try:
            yield tmpfs
        finally:
            tmpfs.unmount()


def fill_levels(outcome: Outcome, points: int, seed: int) -> int:
    """Save with more and more free pages or inodes, from none; return the number of points."""
    with small_tmpfs() as tmpfs:

        def save(scenario: Scenario, inodes: int, left: int) -> bool:
            return _save_at_level(tmpfs, scenario, left, inodes=bool(inodes))

        # From less than a page to many: other sizes fail at other operations.
        _raise_levels(outcome, points, seed, 60_000, {"pages left": 0, "inodes left": 1}, save)
    return points


def _raise_levels(
    outcome: Outcome, points: int, seed: int, most: int, kinds: dict[str, int], save: Callable[[Scenario, int, int], bool]
) -> None:
    """Call `save` with each scenario, kind and level, from level 0 until it has succeeded twice; for so many points."""
    end = outcome.points + points
    for number, _ in rounds(outcome, end, seed):
        for scenario in make_scenarios(seed + number, 200 + 1300 * number % most, two_writers=False):
            for what, kind in kinds.items():
                level, successes = 0, 0
                while successes < 2 and outcome.points < end:
                    with outcome.point(f"{scenario.name}, level {level} of {what}, seed {seed + number}"):
                        successes += save(scenario, kind, level)
                    level += 1


def _save_at_level(tmpfs: SmallTmpfs, scenario: Scenario, left: int, *, inodes: bool) -> bool:
    """Make one attempt; return whether it succeeded."""
    tmpfs.limit_inodes(None)
    empty(tmpfs.path)
    path = tmpfs.path / "ckpt"
    prepare(scenario, path)
    if inodes:
        tmpfs.limit_inodes(left)
    else:
        tmpfs.fill(left)
    free = tmpfs.free_pages
    found = attempt(scenario, path)
    # The file of the lock, if it is new, takes a page.
    if found.errno is not None and not found.saves and not scenario.leftovers and tmpfs.free_pages < free - (not scenario.before):
        raise ViolationError(f"{free - tmpfs.free_pages} pages are not given back: {sorted(unfinished(path))}")
    tmpfs.limit_inodes(None)
    tmpfs.fill(PAGES)
    if not path.exists():
        if found.saves or scenario.before or found.errno is None:
            raise ViolationError("the directory is gone")
        return False
    check_attempt(scenario, path, found, Fault("ENOSPC"))
    return found.errno is None


# Limits


def limits(outcome: Outcome, points: int, seed: int) -> int:
    """Save with limits to open files or to the size of a file; return the number of points."""
    kinds = {"open files": resource.RLIMIT_NOFILE, "the size of a file": resource.RLIMIT_FSIZE}
    with scratch() as root:
        _raise_levels(outcome, points, seed, sys.maxsize, kinds, functools.partial(_save_with_limit, root))
    return points


def _save_with_limit(root: Path, scenario: Scenario, kind: int, level: int) -> bool:
    path = root / "ckpt"
    shutil.rmtree(path, ignore_errors=True)
    prepare(scenario, path)
    original = resource.getrlimit(kind)
    limit = _limit_leaving(level) if kind == resource.RLIMIT_NOFILE else 61 * level
    # Around the whole attempt, which also opens a file to list the open ones.
    resource.setrlimit(kind, (limit, original[1]))
    try:
        found = attempt(scenario, path)
    finally:
        resource.setrlimit(kind, original)
    if not path.exists() and found.errno is not None and not scenario.before:
        return False
    # Without a free descriptor a directory cannot be emptied either; the next save does that.
    fault = Fault("EMFILE", lasting=True) if kind == resource.RLIMIT_NOFILE else Fault("EFBIG")
    check_attempt(scenario, path, found, fault)
    return found.errno is None


def _limit_leaving(free: int) -> int:
    """Return the limit that leaves so many descriptors, and one more for listing the open ones."""
    used = {int(fd) for fd, _ in open_files()}
    limit = 0
    while free >= 0 or limit in used:
        free -= limit not in used
        limit += 1
    return limit


if __name__ == "__main__":
    sys.exit(command(errors, 1300, __doc__))
