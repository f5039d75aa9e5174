"""P11: a checkpoint is damaged in every way.

    python -m tests.fuzz.checkpoint_corruption --points 50000

The newer of two checkpoints is changed: bits, lengths, stretches of its files; its manifest by someone who knows what it
looks like; other kinds of files, links and folders in its place. It is found out, set aside as it is and reported, and the
older one comes back to the last bit; or the change is harmless, and the newer one does. A manifest that vouches for other
contents cannot be found out: then nothing but errors of this library may come, soon, in little memory. All of it runs in a
child that may not have more than 256 MiB.
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
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from aiohooks.checkpoint.checkpoint import Restored
from aiohooks.errors import CheckpointError
from tests.fuzz import _mutators
from tests.fuzz._disk import HANG_SECS, Outcome, WrongError, command, fork, scratch
from tests.fuzz._mutators import BYTES, MANIFEST, PAYLOADS, Files
from tests.fuzz._stories import check_restored, directory, make_save

MEMORY = 256 * 1024 * 1024
MOST_SECS = 2.0
AT_ONCE = 1_000
OLD, NEW = "step-000000000010.000001", "step-000000000020.000002"

OnFiles = Callable[[Files, random.Random], Files]
OnDisk = Callable[[Path, random.Random], None]
MANIFEST_EDITS: tuple[OnFiles, ...] = (_mutators.rewritten, _mutators.unsigned)
TRUSTED_EDITS: tuple[OnFiles, ...] = (_mutators.edited, _mutators.forged, _mutators.monstrous)
DISK_EDITS: tuple[OnDisk, ...] = (_mutators.exchanged, _mutators.replaced)


class Place:
    """A directory with two checkpoints, which can be put back as it was."""

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

    def put_back(self) -> None:
        """Makes it what it was."""
        for name in os.listdir(self.path):
            if name not in (".lock", OLD):
                each = self.path / name
                if each.is_dir() and not each.is_symlink():
                    shutil.rmtree(each)
                else:
                    each.unlink()
        if not (self.path / OLD).is_dir():  # what a violation may have led to
            self.write(self._good[OLD], OLD)
        self.write(self.good)

    def write(self, files: Files, name: str = NEW) -> None:
        """Writes the files of a checkpoint."""
        folder = self.path / name
        folder.mkdir(exist_ok=True)
        for file, data in files.items():
            (folder / file).write_bytes(data)


def corruption(points: int, seed: int) -> Outcome:
    """Damages so many checkpoints."""
    outcome = Outcome("damaged checkpoints")
    with scratch() as root:
        while outcome.points < points:
            most = min(AT_ONCE, points - outcome.points)
            if not _in_little_memory(outcome, root / str(outcome.points), most, f"{seed}/{outcome.points}"):
                break
    return outcome


def _in_little_memory(outcome: Outcome, path: Path, points: int, seed: str) -> bool:
    """Some of it in a child; returns whether that came to its end."""
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
        outcome.violations.append(f"{where}: the process ended with status {status}, or was there after {HANG_SECS} s")
        return False
    done, violations = json.loads(found.read_text())
    outcome.points += done
    outcome.violations += violations
    return True


def damage(outcome: Outcome, path: Path, points: int, seed: str, now: mmap.mmap) -> None:
    """Damages one directory again and again; notes before each time what it is about to do."""
    rng = random.Random(seed)
    place = Place(path, rng.randrange(2**31))
    while outcome.points < points:
        place.put_back()
        where, files = _damaged(place, rng)
        if files == place.good:
            continue
        where = f"{where}, point {outcome.points} of seed {seed}"
        now[:] = where.encode()[:200].ljust(200, b"\0")
        with outcome.point(where):
            begun = time.process_time()
            kind = where.partition(" ")[0]
            if kind in {each.__name__ for each in TRUSTED_EDITS}:
                _look_trusted(place, kind)
            else:
                _look(place, files)
            if (took := time.process_time() - begun) > MOST_SECS:
                raise WrongError(f"took {took:.1f} s")


def _damaged(place: Place, rng: random.Random) -> tuple[str, Files | None]:
    """Damages it in one way; returns what was done, and the files as they are now, if they still are files."""
    kind = rng.randrange(20)
    if kind < 2:
        on_disk = DISK_EDITS[kind]
        on_disk(place.path / NEW, rng)
        return f"{on_disk.__name__} on disk", None
    if kind < 10:
        on_files = rng.choice(MANIFEST_EDITS if kind < 6 else TRUSTED_EDITS if rng.random() < 0.97 else TRUSTED_EDITS[2:])
        if on_files is _mutators.monstrous and rng.random() < 0.9:  # they cost what they are made to cost
            on_files = _mutators.edited
        where, files = f"{on_files.__name__} manifest", on_files(place.good, rng)
    else:
        name = rng.choice((*PAYLOADS, MANIFEST))
        mutator = rng.choice(BYTES)
        where, files = f"{mutator.__name__} in {name}", {**place.good, name: mutator(place.good[name], rng)}
    place.write(files)
    return where, files


def _look(place: Place, files: Files | None) -> None:
    """It must be found out, and nothing of it lost."""
    names = {each for each in os.listdir(place.path) if each.startswith("step-")} - {OLD}
    found = _restore(place)
    check_restored(found, place.saves[0])
    assert found is not None
    if {name for name, _ in found.set_aside} != names or not all(reason for _, reason in found.set_aside):
        raise WrongError(f"reported {found.set_aside}")
    aside = [each for each in os.listdir(place.path) if each.startswith("damaged-")]
    if aside != [f"damaged-{name}" for name in names]:
        raise WrongError(f"set aside: {aside}")
    if files is not None and place.path.joinpath(aside[0]).is_dir():
        kept = {file: (place.path / aside[0] / file).read_bytes() for file in files}
        if kept != files:
            raise WrongError("what was set aside is not what was there")


def _look_trusted(place: Place, kind: str) -> None:
    """It vouches for itself: found out, or harmless; contents that somebody exchanged may come back as they are."""
    try:
        found = _restore(place)
    except CheckpointError as error:
        if error.errno != errno.ENOTSUP:  # a later version is not for us to judge
            raise
        return
    if found is None:
        raise WrongError("nothing was restored")
    if found.set_aside:
        check_restored(found, place.saves[0])
    elif kind == "forged":
        if found.checkpoint.step != place.saves[1].step:
            raise WrongError(f"restored {found.checkpoint}")
    else:
        # Metrics are not part of the state; whoever signs the manifest may say what they are.
        checkpoint = replace(found.checkpoint, metrics=place.saves[1].metrics)
        check_restored(replace(found, checkpoint=checkpoint), place.saves[1])


def _restore(place: Place) -> Restored | None:
    there = directory(place.path)
    try:
        return there.restore(None)
    finally:
        there.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return command(corruption, 50_000, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
