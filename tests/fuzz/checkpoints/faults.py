"""What happens to a writer: each program takes a number of points and a seed, and returns an
`Outcome`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import gc
import hashlib
import itertools
import mmap
import os
import random
import re
import selectors
import signal
import struct
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from aiohooks.checkpoint import Restored
from aiohooks.checkpoint._directory import CheckpointDirectory
from aiohooks.errors import CheckpointBusyError, CheckpointError, CorruptCheckpointError
from tests.fuzz._harness import scratch
from tests.fuzz.checkpoints.laws import (
    LEFTOVERS,
    Outcome,
    Scenario,
    ViolationError,
    check_restored,
    directory,
    make_save,
    make_scenarios,
)
from tests.fuzz.checkpoints.operations import (
    Crash,
    DiedError,
    Dying,
    Failing,
    Recorder,
    Tree,
    materialise,
    open_files,
)
from tests.support.checkpoint_files import Call, Seam
from tests.support.needs import MissingError, program
from tests.support.waiting import HANG_SECS


def fork(fn: Callable[[], None]) -> int:
    """Fork a child that calls a function and exits with 0, or with 70 if that raises; return its
    process id.
    """
    with warnings.catch_warnings():
        # The other threads belong to a numerics library, which the child does not call.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _run_child(fn)
    return pid


def _run_child(fn: Callable[[], None]) -> NoReturn:
    code = 70
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(HANG_SECS)  # a child that runs longer has hung, and is killed
    gc.disable()  # a collection would write to, and so copy, every page of the parent
    try:
        fn()
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def pick(limit: int, groups: Sequence[Sequence[Any]], rng: random.Random) -> list[Any]:
    """Return up to `limit` items: whole groups from the first on, and a random sample, in order, of
    the one that does not fit.
    """
    found: list[Any] = []
    for group in groups:
        left = limit - len(found)
        found += (
            group
            if len(group) <= left
            else [group[i] for i in sorted(rng.sample(range(len(group)), left))]
        )
    return found


def operations_of(scenario: Scenario, tree: Tree, root: Path) -> list[tuple[str, int]]:
    """Return the operations of a writer to which nothing happens, and how many bytes they write."""
    materialise(tree, root)
    fs = Seam()
    scenario.run_writer(root / "ckpt", fs)
    return fs.done


def run_dying(scenario: Scenario, path: Path, fs: Dying, returned: list[int]) -> None:
    """Run a writer until it dies, at its end at the latest; note how many saves have returned."""
    with contextlib.suppress(DiedError):
        scenario.run_writer(path, fs, returned.append)
        fs.die()


# The process dies


def kill(points: int, seed: int) -> Outcome:
    """Let a writer die before each operation, and inside each write."""
    outcome = Outcome("killed at any byte")
    with scratch() as root:
        work = root / "work"
        for number, rng in outcome.rounds(points, seed):
            plans: list[tuple[Scenario, Tree, list[int]]] = []
            for scenario in make_scenarios(seed + number, 560 + 64 * number):
                tree = scenario.prepared(work)
                plans.append(
                    (scenario, tree, [size for _, size in operations_of(scenario, tree, work)])
                )
            groups = (
                [
                    (scenario, tree, at, 0)
                    for scenario, tree, sizes in plans
                    for at in range(len(sizes))
                ],
                [
                    (*plan[:2], at, byte)
                    for plan in plans
                    for at, size in enumerate(plan[2])
                    for byte in range(1, size)
                ],
            )
            for scenario, tree, at, byte in pick(points - outcome.points, groups, rng):
                with outcome.point(
                    f"{scenario.name}, operation {at}, byte {byte}, seed {seed + number}"
                ):
                    materialise(tree, work)
                    _kill_writer(scenario, work / "ckpt", at, byte)
    return outcome


def _kill_writer(scenario: Scenario, path: Path, at: int, byte: int) -> None:
    returned = [0]

    def check_beside() -> None:
        if [name for name, _ in fs.done[:-1]].count(
            "flock"
        ) == 1:  # the writer has the lock; with the second one it is released
            _check_beside(scenario, path, returned[-1])

    fs = Dying(at, byte, check_beside)
    run_dying(scenario, path, fs, returned)
    scenario.check(path, returned[-1], later=byte % 4 == 0)


def _check_beside(scenario: Scenario, path: Path, acknowledged: int) -> None:
    """Check that another process can read, and not save."""
    try:
        make_save(800).to(directory(path))
    except CheckpointBusyError:
        pass
    else:
        raise ViolationError("a second writer saved while the first one had the directory")
    done, coming = scenario.returned(acknowledged)
    found = directory(path, read_only=True).restore(None)
    complete = found is not None and coming and dict(found.checkpoint.metrics) == coming[0].metrics
    check_restored(found, coming[0] if complete else done[-1] if done else None)


# The power is cut: every state of the disk that it could leave, from a record


MAX_STATES = 600
"""The number of different states of one scenario; then other contents and sizes give more."""
MAX_REPEATED = 60
"""After so many states in a row that were there before, no more crashes at that event are tried."""
LATER_SAVE_EVERY = 4


def crash(points: int, seed: int) -> Outcome:
    """Check different states only."""
    outcome = Outcome("states after a crash")
    with scratch() as root:
        for number, rng in outcome.rounds(points, seed):
            scenarios = make_scenarios(seed + number, 600 + 2000 * (number % 6))
            for done, scenario in enumerate(scenarios):
                share = -(
                    -(points - outcome.points) // (len(scenarios) - done)
                )  # small counts cover every scenario, too
                _crash_writer(
                    scenario, min(share, MAX_STATES), rng, root / "work", outcome, seed + number
                )
    return outcome


def _crash_writer(
    scenario: Scenario, limit: int, rng: random.Random, work: Path, outcome: Outcome, seed: int
) -> None:
    scenario.prepared(work)
    recorder = Recorder(work)
    scenario.run_writer(work / "ckpt", recorder, recorder.acknowledge)
    crashes = Crash(recorder)
    seen: set[bytes] = set()
    repeated = dict.fromkeys(range(len(crashes.events) + 1), 0)
    while len(seen) < limit and repeated:
        at = rng.choice(list(repeated))
        acknowledged, tree = crashes.acknowledged(at), crashes.state(at, rng)
        key = hashlib.blake2b(repr((acknowledged, sorted(tree.items()))).encode()).digest()
        if key in seen:
            repeated[at] += 1
            if repeated[at] == MAX_REPEATED:
                del repeated[at]
            continue
        seen.add(key)
        repeated[at] = 0
        with outcome.point(
            f"{scenario.name}, before event {at} of {len(crashes.events)}, seed {seed}"
        ):
            materialise(tree, work)
            scenario.check(work / "ckpt", acknowledged, later=len(seen) % LATER_SAVE_EVERY == 0)


# ... and on a real file system

SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2


def _tool(name: str, *arguments: object) -> None:
    done = subprocess.run(
        [program(name), *map(str, arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise MissingError(f"{name} failed (this needs root): {done.stderr.strip()}")


@contextlib.contextmanager
def mounted(path: Path, *arguments: object) -> Generator[None]:
    """Mount something for the block."""
    _tool("mount", *arguments, path)
    try:
        yield
    finally:
        _tool("umount", "--lazy", path)


def power(points: int, seed: int) -> Outcome:
    """Cut the power before each operation, on an ext4 in a file.

    It is shut down without writing its journal (EXT4_IOC_SHUTDOWN); in half of the cuts the journal
    is written first, by syncing an unrelated file: then names are durable, and data is not. A file
    that was not synced and is lost proves that the cut works.
    """
    outcome, lost = Outcome("power cuts"), 0
    with scratch() as root:
        image, volume = root / "image", root / "volume"
        volume.mkdir()
        with image.open("wb") as file:
            file.truncate(24 << 20)
        _tool("mkfs.ext4", "-q", "-F", image)
        for number, rng in outcome.rounds(points, seed):
            cuts: list[tuple[Scenario, Tree, int, bool]] = []
            for scenario in make_scenarios(seed + number, 600 + 3000 * number):
                tree = scenario.prepared(root / "work")
                operations = len(operations_of(scenario, tree, root / "work"))
                cuts += [
                    (scenario, tree, at, first)
                    for at in range(operations + 1)
                    for first in (False, True)
                ]
            for scenario, tree, at, first in pick(points - outcome.points, [cuts], rng):
                where = (
                    f"{scenario.name}, before operation {at}, journal"
                    f" {'first' if first else 'lost'}, seed {seed + number}"
                )
                with outcome.point(where):
                    lost += _cut_power(scenario, tree, image, volume, at, first)
    if outcome.points and not lost:
        outcome.violations.append("no cut lost an unsynced file: these were no power cuts")
    outcome.notes.append(f"{lost} of them lost an unsynced file")
    return outcome


def _cut_power(
    scenario: Scenario, tree: Tree, image: Path, volume: Path, at: int, journal_first: bool
) -> bool:
    """Cut once; return whether the unsynced file is lost."""
    canary = volume / "canary"

    def cut() -> None:
        canary.write_bytes(b"not synced")
        if journal_first:
            with (volume / "unrelated").open("wb") as file:
                file.write(b"synced")
                file.flush()
                os.fsync(file.fileno())
        fd = os.open(volume, os.O_RDONLY)
        fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        os.close(fd)

    with mounted(volume, "-o", "loop", image):
        materialise({name: data for name, data in tree.items() if name.startswith("ckpt")}, volume)
        _tool("sync", "-f", volume)
        run_dying(scenario, volume / "ckpt", Dying(at, then=cut), returned := [0])
    with mounted(volume, "-o", "loop", image):
        scenario.check(volume / "ckpt", returned[-1])
        return not canary.exists() or canary.read_bytes() != b"not synced"


# An operation fails

ERRORS = ("ENOSPC", "EIO", "EDQUOT", "EROFS", "EMFILE", "EACCES")
RESTORE = "restore"
"""The scenario in which nothing is saved."""


class Attempt(NamedTuple):
    """What a writer did."""

    saves: int
    restored: Restored | None
    failure: CheckpointError | None


def attempt(scenario: Scenario, path: Path, fs: Any = os) -> Attempt:
    """Do what the writer of a scenario does."""
    files, saves = open_files(), [0]
    restored = failure = None
    try:
        if scenario.name == RESTORE:
            with contextlib.closing(directory(path, fs)) as reader:
                restored = reader.restore(None)
        else:
            scenario.run_writer(path, fs, saves.append)
    except CheckpointError as error:
        failure = error
    except (OSError, MemoryError, RuntimeError) as error:
        raise ViolationError(f"raised {type(error).__name__}: {error}") from error
    if left := [" ".join(each) for each in open_files() - files]:
        raise ViolationError(f"left open: {left}")
    return Attempt(saves[-1], restored, failure)


def check_attempt(
    scenario: Scenario, path: Path, found: Attempt, error: str, fs: Failing | None = None
) -> None:
    """Check the result of an attempt in which something failed, and the directory.

    Raises:
        ViolationError: an error was ignored or another one raised, or something is lost or left
            over.
    """
    failure, is_lasting = found.failure, fs is not None and fs.way == "later"
    is_corrupt = isinstance(failure, CorruptCheckpointError)
    if failure is not None and not is_corrupt and failure.errno != getattr(errno, error):
        raise ViolationError(f"raised {failure!r} for {error}")
    unfinished = {each.name for each in path.glob(".tmp-*step-*.*")} - {*LEFTOVERS}
    if failure is not None and not is_lasting and unfinished:
        raise ViolationError(f"not cleaned up: {sorted(unfinished)}")
    if scenario.name == RESTORE:
        there = [
            each.name
            for each in path.iterdir()
            if each.name.startswith(("step-0", "damaged-step-0"))
        ]
        if len(there) != len(scenario.before):
            raise ViolationError(f"a checkpoint was removed: {there}")
        if error == "EIO":  # a file that the disk does not return is damaged
            return
        if is_corrupt or (found.restored is None) != (failure is not None):
            raise ViolationError(
                f"restored {found.restored and found.restored.checkpoint}, raised {failure!r}:"
                " corrupt"
            )
        if found.restored is not None:
            check_restored(found.restored, scenario.before[-1 - scenario.damaged])
    elif is_corrupt:
        raise ViolationError("a save found something corrupt")
    elif failure is None and found.saves < len(scenario.then):
        raise ViolationError(
            f"{found.saves} saves of {len(scenario.then)} returned, and nothing was raised"
        )
    elif failure is None and fs is not None and fs.of_saved:
        raise ViolationError(f"a failed {fs.failed} was ignored")
    scenario.check(path, found.saves, in_flight=is_lasting)


def error(points: int, seed: int, calls: Sequence[str] = ()) -> Outcome:
    """Let each operation fail, or each of these kinds."""
    outcome = Outcome("operations that fail")
    with scratch() as root:
        work = root / "work"
        for number, rng in outcome.rounds(points, seed):
            plans: list[tuple[Scenario, Tree, int, str, Any]] = []
            *scenarios, damaged = make_scenarios(seed + number, 600)
            scenarios += [replace(each, name=RESTORE, then=()) for each in (scenarios[1], damaged)]
            for scenario in scenarios:
                materialise(tree := scenario.prepared(work), work)
                with contextlib.suppress(
                    ViolationError
                ):  # what happens without a fault is found with one as well
                    attempt(scenario, work / "ckpt", fs := Seam())
                places = [at for at, (name, _) in enumerate(fs.done) if not calls or name in calls]
                plans += itertools.product(
                    [scenario], [tree], places, ERRORS, ("once", "done", "later")
                )
            rng.shuffle(plans)
            for scenario, tree, at, name, way in plans[: points - outcome.points]:
                materialise(tree, work)
                with outcome.point(
                    f"{scenario.name}, operation {at} ({way}): {name}, seed {seed + number}"
                ):
                    failing = Failing(at, getattr(errno, name), way)
                    found = attempt(scenario, work / "ckpt", failing)
                    if (work / "ckpt").exists() or scenario.before:
                        check_attempt(scenario, work / "ckpt", found, name, failing)
    return outcome


# Full disks

PAGE = os.sysconf("SC_PAGE_SIZE")
PAGES = 96


class SmallTmpfs(NamedTuple):
    """A small tmpfs."""

    path: Path

    def limit_inodes(self, left: int | None) -> None:
        """Leave so many inodes; None: many."""
        _tool("mount", "-o", "remount,nr_inodes=10000", self.path)
        if left is not None:
            status = os.statvfs(self.path)
            _tool(
                "mount",
                "-o",
                f"remount,nr_inodes={status.f_files - status.f_ffree + left}",
                self.path,
            )

    @property
    def free_pages(self) -> int:
        return os.statvfs(self.path).f_bfree

    def fill(self, left: int) -> None:
        """Leave so many pages."""
        ballast = self.path / "ballast"
        ballast.unlink(missing_ok=True)
        ballast.write_bytes(bytes(max(0, self.free_pages - left) * PAGE))


@contextlib.contextmanager
def small_tmpfs() -> Generator[SmallTmpfs]:
    """Mount a small tmpfs for the block; raise `MissingError` where this process cannot."""
    with scratch() as root:
        (root / "tmpfs").mkdir()
        with mounted(
            root / "tmpfs", "-t", "tmpfs", "-o", f"size={PAGES * PAGE},nr_inodes=10000", "tmpfs"
        ):
            yield SmallTmpfs(root / "tmpfs")


def full(points: int, seed: int) -> Outcome:
    """Save on a tmpfs with more and more free pages or inodes, from none until it has succeeded
    twice.
    """
    outcome = Outcome("full disks")
    with small_tmpfs() as tmpfs:
        for number, _ in outcome.rounds(points, seed):
            # From less than a page to many: other sizes fail at other operations.
            for scenario in make_scenarios(seed + number, 200 + 1300 * number % 60_000):
                for what in ("pages", "inodes"):
                    level, successes = 0, 0
                    while successes < 2 and outcome.points < points:
                        with outcome.point(
                            f"{scenario.name}, {level} {what} left, seed {seed + number}"
                        ):
                            successes += _save_at_level(
                                tmpfs, scenario, level, inodes=what == "inodes"
                            )
                        level += 1
    return outcome


def _save_at_level(tmpfs: SmallTmpfs, scenario: Scenario, left: int, *, inodes: bool) -> bool:
    """Make one attempt; return whether it succeeded."""
    tmpfs.limit_inodes(None)
    path = tmpfs.path / "ckpt"
    materialise({}, tmpfs.path)
    scenario.prepare(path)
    if inodes:
        tmpfs.limit_inodes(left)
    else:
        tmpfs.fill(left)
    free = tmpfs.free_pages
    found = attempt(scenario, path)
    # The file of the lock, if it is new, takes a page.
    given_back = tmpfs.free_pages >= free - (not scenario.before)
    if found.failure is not None and not found.saves and not scenario.leftovers and not given_back:
        raise ViolationError(f"{free - tmpfs.free_pages} pages are not given back")
    tmpfs.limit_inodes(None)
    tmpfs.fill(PAGES)
    if not path.exists():
        if found.saves or scenario.before or found.failure is None:
            raise ViolationError("the directory is gone")
        return False
    check_attempt(scenario, path, found, "ENOSPC")
    return found.failure is None


# Two savers take turns

_WRITERS = 2
_MOST_OPERATIONS = 150
"""A turn has about 50."""
_BEGUN, _DONE, _TURNS = range(3)
"""In the memory that the writers share: the last save that has begun, the newest that is known to
be complete, and the turns.
"""
_CHANGES = frozenset({"ftruncate", "pwrite", "rename", "rmdir", "unlink", "write"})


class OneAtATime(Seam):
    """Kills this process at an operation on the locked directory; a second writer in it is a
    violation.

    Args:
        witness: a file whose record lock is held while the directory is locked. The kernel releases
            both locks of a process that is killed, this one first.
        at: the number of the operation, counted while the directory is locked.
        after_bytes: how many bytes of it are written, if it is a write.
    """

    def __init__(self, witness: int, at: int, after_bytes: int) -> None:
        super().__init__()
        self._witness, self._left, self._after_bytes = witness, at, after_bytes
        self._locked = False

    def do(self, call: Call) -> Any:
        if self._locked:
            if self._left == 0:
                if call.name == "write":
                    fd, data = call.args
                    call.real(fd, memoryview(data)[: self._after_bytes])
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1
        elif call.name in _CHANGES:
            raise ViolationError(f"{call.name} without the lock")
        if call.name != "flock":
            return call.make()
        if call.args[1] == fcntl.LOCK_UN:
            self._locked = False
            fcntl.lockf(self._witness, fcntl.LOCK_UN)
            return call.make()
        call.make()
        try:
            fcntl.lockf(self._witness, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ViolationError("two writers have the directory") from None
        self._locked = True


def turns(points: int, seed: int) -> Outcome:
    """Kill processes that open a directory as soon as the other has left it, restore, save, and
    leave; replace each.
    """
    outcome, rng, writers = Outcome("two writers"), random.Random(seed), dict[int, int]()
    journal = memoryview(mmap.mmap(-1, 24)).cast("q")
    with scratch() as root, selectors.DefaultSelector() as ends, _killed_at_the_end(writers):
        reader = directory(root / "ckpt", read_only=True)
        while outcome.points < points and not outcome.violations:
            while len(writers) < _WRITERS:
                pid = fork(
                    functools.partial(_write_in_turns, root, journal, random.Random(rng.random()))
                )
                writers[pidfd := os.pidfd_open(pid)] = pid
                ends.register(pidfd, selectors.EVENT_READ)
            ended = ends.select()[0][0].fd
            with outcome.point(f"kill {outcome.points}, seed {seed}"):
                ends.unregister(ended)
                os.close(ended)
                _, status = os.waitpid(writers.pop(ended), 0)
                if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
                    said = root / "violation"
                    raise ViolationError(
                        said.read_text(encoding="utf-8")
                        if said.exists()
                        else f"it ended with status {status}"
                    )
                before = journal[_DONE]
                _checked_number(reader.restore(None), set(range(before, journal[_BEGUN] + 1)))
    outcome.notes.append(f"{journal[_TURNS]} turns, {journal[_BEGUN]} saves")
    return outcome


@contextlib.contextmanager
def _killed_at_the_end(pids: dict[int, int]) -> Generator[None]:
    try:
        yield
    finally:
        for pidfd, pid in pids.items():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(pidfd)


def _write_in_turns(root: Path, journal: memoryview, rng: random.Random) -> None:
    """Save whenever the directory is free, until killed."""
    witness = os.open(root / "witness", os.O_RDWR | os.O_CREAT, 0o600)
    there = directory(
        root / "ckpt", OneAtATime(witness, rng.randrange(_MOST_OPERATIONS), rng.randrange(600))
    )
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
            make_save(journal[_BEGUN]).to(there)
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


# The operations are what the kernel gets

_SYSTEM_CALLS = {
    "openat": "open",
    "mkdir": "mkdir",
    "mkdirat": "mkdir",
    "rename": "rename",
    "renameat": "rename",
    "renameat2": "rename",
    "unlinkat": "unlink",
    "fsync": "fsync",
    "write": "write",
    "pwrite64": "pwrite",
    "ftruncate": "ftruncate",
    "flock": "flock",
}


def strace(points: int, seed: int) -> Outcome:
    """Compare the operations of the layer with the system calls on files of the directory; each
    operation is a point.
    """
    outcome = Outcome("operations that the kernel got")
    with scratch() as root:
        work = root / "work"
        for number, _ in outcome.rounds(points, seed):
            # Each chunk of a large array is a write.
            for scenario in make_scenarios(seed + number, 600 + 700_000 * number):
                tree = scenario.prepared(work)
                done = [
                    name.replace("rmdir", "unlink")
                    for name, _ in operations_of(scenario, tree, work)
                ]
                done = [name for name in done if name in _SYSTEM_CALLS.values()]
                materialise(tree, work)
                got = _traced(
                    functools.partial(scenario.run_writer, work / "ckpt"), root / "log", work
                )
                outcome.points += len(done)
                # The parent of the folder, which is synced, is not below it.
                if got != done:
                    outcome.violations.append(
                        f"{scenario.name}: the layer does {done}, and the kernel got {got}"
                    )
    return outcome


def _traced(fn: Callable[[], None], log: Path, root: Path) -> list[str]:
    """Call a function in a child under strace; return the operations on files below `root`."""
    reading, writing = os.pipe()

    def child() -> None:
        os.close(writing)
        os.read(reading, 1)
        os.close(reading)
        fn()

    command = [
        program("strace"),
        "-f",
        "-y",
        "-o",
        str(log),
        "-e",
        f"trace={','.join(f'?{call}' for call in _SYSTEM_CALLS)}",
    ]
    pid = fork(child)
    os.close(reading)
    with subprocess.Popen([*command, "-p", str(pid)], stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr is not None
        said = tracer.stderr.readline()  # that it is attached
        if "attached" not in said:
            os.kill(pid, signal.SIGKILL)
        os.write(writing, b"x")
        os.close(writing)
        _, status = os.waitpid(pid, 0)
        tracer.stderr.read()
    if status != 0:
        raise MissingError(f"strace cannot trace a child here (is ptrace allowed?): {said.strip()}")
    calls = re.findall(r"^\d+\s+(\w+)\((.*)$", log.read_text(errors="replace"), flags=re.MULTILINE)
    return [_SYSTEM_CALLS[call] for call, rest in calls if str(root) in rest]
