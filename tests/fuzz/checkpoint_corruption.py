"""A checkpoint is damaged in many ways.

    python -m tests.fuzz.checkpoint_corruption --points 50000

The newer of two checkpoints is changed: bits, lengths and ranges of its files; its manifest, with knowledge of the format; other
kinds of files, links and directories in their target. The damage must be detected and reported, the checkpoint set aside
unchanged, and the older one restored equal to the last bit; or the change is harmless, and the newer one is restored.
Contents that a forged manifest confirms cannot be detected: then only errors of this library may be raised, quickly and with
little memory. All of it runs in a child with 256 MiB at most.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import resource
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from aiohooks.checkpoint import Restored
from aiohooks.errors import CheckpointError
from tests.fuzz import _corruptions
from tests.fuzz._checkpoint_harness import Outcome, ViolationError, command, fork
from tests.fuzz._checkpoint_scenarios import check_restored, directory, make_save
from tests.fuzz._corruptions import BYTES, MANIFEST, PAYLOADS, Files
from tests.fuzz._harness import scratch
from tests.support.waiting import HANG_SECS

MEMORY = 256 * 1024 * 1024
MAX_SECS = 2.0
POINTS_PER_CHILD = 1_000
OLD, NEW = "step-000000000010.000001", "step-000000000020.000002"

OnFiles = Callable[[Files, random.Random], Files]
OnDisk = Callable[[Path, random.Random], None]
MANIFEST_EDITS: tuple[OnFiles, ...] = (_corruptions.rewritten, _corruptions.unsigned)
SIGNED_EDITS: tuple[OnFiles, ...] = (_corruptions.edited, _corruptions.forged, _corruptions.oversized)
DISK_EDITS: tuple[OnDisk, ...] = (_corruptions.file_replaced, _corruptions.directory_replaced)


class Target:
    """A directory with two checkpoints, which can be restored to what it was."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.saves = (make_save(1, size=400, seed=seed), make_save(2, size=400, seed=seed))
        there = directory(path)
        for save in self.saves:
            there.save(save.state, save.step, save.metrics)
        there.close()
        self._good = {name: self._read(name) for name in (OLD, NEW)}
        self.good = self._good[NEW]

    def _read(self, name: str) -> Files:
        return {file: (self.path / name / file).read_bytes() for file in (*PAYLOADS, MANIFEST)}

    def reset(self) -> None:
        """Make it what it was."""
        for name in os.listdir(self.path):
            if name not in (".lock", OLD):
                each = self.path / name
                if each.is_dir() and not each.is_symlink():
                    shutil.rmtree(each)
                else:
                    each.unlink()
        if not (self.path / OLD).is_dir():  # after a violation
            self.write(self._good[OLD], OLD)
        self.write(self.good)

    def write(self, files: Files, name: str = NEW) -> None:
        """Write the files of a checkpoint."""
        checkpoint = self.path / name
        checkpoint.mkdir(exist_ok=True)
        for file, data in files.items():
            (checkpoint / file).write_bytes(data)


def corruption(points: int, seed: int) -> Outcome:
    """Damage so many checkpoints."""
    outcome = Outcome("damaged checkpoints")
    with scratch() as root:
        while outcome.points < points:
            count = min(POINTS_PER_CHILD, points - outcome.points)
            if not _damage_in_child(outcome, root / str(outcome.points), count, f"{seed}/{outcome.points}"):
                break
    return outcome


def _damage_in_child(outcome: Outcome, path: Path, points: int, seed: str) -> bool:
    """Damage some in a child; return whether it finished."""
    found = path.with_suffix(".json")
    with mmap.mmap(-1, 200) as now:

        def child() -> None:
            part = Outcome("part")
            with open("/proc/self/statm", encoding="ascii") as file:
                mapped = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY,) * 2)
            damage(part, path, points, seed, now)
            found.write_text(json.dumps([part.points, part.violations]))

        _, status = os.waitpid(fork(child), 0)
        where = now[:].rstrip(b"\0").decode()
    if status != 0:
        outcome.violations.append(f"{where}: the process ended with status {status}, or ran for {HANG_SECS} s")
        return False
    done, violations = json.loads(found.read_text())
    outcome.points += done
    outcome.violations += violations
    return True


def damage(outcome: Outcome, path: Path, points: int, seed: str, now: mmap.mmap) -> None:
    """Damage one directory repeatedly; note each time in `now` what is done next."""
    rng = random.Random(seed)
    target = Target(path, rng.randrange(2**31))
    while outcome.points < points:
        target.reset()
        where, files = _damage_once(target, rng)
        if files == target.good:
            continue
        where = f"{where}, point {outcome.points} of seed {seed}"
        now[:] = where.encode()[:200].ljust(200, b"\0")
        with outcome.point(where):
            begun = time.process_time()
            kind = where.partition(" ")[0]
            if kind in {each.__name__ for each in SIGNED_EDITS}:
                _check_signed(target, kind)
            else:
                _check_damaged(target, files)
            if (took := time.process_time() - begun) > MAX_SECS:
                raise ViolationError(f"took {took:.1f} s")


def _damage_once(target: Target, rng: random.Random) -> tuple[str, Files | None]:
    """Damage it in one way; return what was done, and the files as they are now, if they are still files."""
    kind = rng.randrange(20)
    if kind < 2:
        on_disk = DISK_EDITS[kind]
        on_disk(target.path / NEW, rng)
        return f"{on_disk.__name__} on disk", None
    if kind < 10:
        on_files = rng.choice(MANIFEST_EDITS if kind < 6 else SIGNED_EDITS if rng.random() < 0.97 else SIGNED_EDITS[2:])
        if on_files is _corruptions.oversized and rng.random() < 0.9:  # these are slow by design
            on_files = _corruptions.edited
        where, files = f"{on_files.__name__} manifest", on_files(target.good, rng)
    else:
        name = rng.choice((*PAYLOADS, MANIFEST))
        mutator = rng.choice(BYTES)
        where, files = f"{mutator.__name__} in {name}", {**target.good, name: mutator(target.good[name], rng)}
    target.write(files)
    return where, files


def _check_damaged(target: Target, files: Files | None) -> None:
    """Check that the damage was detected and nothing was lost."""
    names = {each for each in os.listdir(target.path) if each.startswith("step-")} - {OLD}
    found = _restore(target)
    check_restored(found, target.saves[0])
    assert found is not None
    if {name for name, _ in found.set_aside} != names or not all(reason for _, reason in found.set_aside):
        raise ViolationError(f"reported {found.set_aside}")
    aside = [each for each in os.listdir(target.path) if each.startswith("damaged-")]
    if aside != [f"damaged-{name}" for name in names]:
        raise ViolationError(f"set aside: {aside}")
    if files is not None and target.path.joinpath(aside[0]).is_dir():
        kept = {file: (target.path / aside[0] / file).read_bytes() for file in files}
        if kept != files:
            raise ViolationError("what was set aside is not what was there")


def _check_signed(target: Target, kind: str) -> None:
    """Check what a signed manifest may lead to: the damage is detected or harmless; forged contents may be restored."""
    try:
        found = _restore(target)
    except CheckpointError as error:
        if error.errno != errno.ENOTSUP:  # a later version of the format
            raise
        return
    if found is None:
        raise ViolationError("nothing was restored")
    if found.set_aside:
        check_restored(found, target.saves[0])
    elif kind == "forged":
        if found.checkpoint.step != target.saves[1].step:
            raise ViolationError(f"restored {found.checkpoint}")
    else:
        # Metrics are not part of the state, so a signed manifest may change them.
        checkpoint = replace(found.checkpoint, metrics=target.saves[1].metrics)
        check_restored(replace(found, checkpoint=checkpoint), target.saves[1])


def _restore(target: Target) -> Restored | None:
    there = directory(target.path)
    try:
        return there.restore(None)
    finally:
        there.close()


if __name__ == "__main__":
    sys.exit(command(corruption, 50_000, __doc__))
