"""What the writers save, and the laws: what must be in the directory whatever has happened to
them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from aiohooks.checkpoint import KeepNewest, Restored
from aiohooks.checkpoint._directory import CheckpointDirectory
from tests.fuzz.checkpoints.operations import Tree, materialise, snapshot
from tests.support import checkpoint_files
from tests.support.checkpoint_files import same

KEEP = 2
LATER = 900
"""The number of the save that must succeed afterwards."""
_TEMPORARY = re.compile(r"\.tmp-(drop-)?step-\d{12,}\.\d{6,}(-\d+)?")
FOREIGN: Tree = {
    "notes.txt": b"mine",
    ".tmp-upload": None,
    ".tmp-upload/part": b"of another program",
    ".tmp-step-7": b"not quite a name of ours",
    "step-5": None,
    "step-5/model": b"of another library",
}
"""Other entries of the directory, which must not be changed."""
LEFTOVERS = (".tmp-step-000000000030.000003", ".tmp-drop-step-000000000001.000001-2")
"""Directories left by a writer that was killed earlier."""


class ViolationError(Exception):
    """A law is broken."""


@dataclass(slots=True)
class Outcome:
    """The result of a program."""

    name: str
    points: int = 0
    violations: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    secs: float = 0.0

    @contextlib.contextmanager
    def point(self, where: str) -> Generator[None]:
        """Count one point. An error raised in the block is a violation."""
        try:
            yield
        except ViolationError as error:
            self.violations.append(f"{where}: {error}")
        except Exception as error:  # any unexpected error is a violation, too
            last = traceback.extract_tb(error.__traceback__)[-1]
            self.violations.append(
                f"{where}: {type(error).__name__}: {error}"
                f" ({Path(last.filename).name}:{last.lineno})"
            )
        self.points += 1

    def rounds(self, points: int, seed: int) -> Iterator[tuple[int, random.Random]]:
        """Yield numbers of rounds, each with a random generator, until there are so many points."""
        for number in itertools.count():
            if self.points >= points:
                return
            yield number, random.Random(seed * 1_000_003 + number)

    def summary(self) -> str:
        """Return the last line of the output."""
        notes = "".join(f"; {note}" for note in self.notes)
        return (
            f"{self.name}: {self.points} points, {len(self.violations)} violations, {self.secs:.1f}"
            f" s{notes}"
        )


@dataclass(frozen=True, slots=True)
class Save:
    """One call of `save`. Its number is also in its metrics, to identify it."""

    number: int
    step: int
    state: dict[str, Any]

    @property
    def metrics(self) -> dict[str, float]:
        return {"number": float(self.number)}

    def to(self, there: CheckpointDirectory) -> None:
        """Make it."""
        there.save(self.state, self.step, self.metrics)


@dataclass(frozen=True, slots=True)
class Scenario:
    """The contents of a directory, and what the writer does during which something happens."""

    name: str
    before: tuple[Save, ...]
    then: tuple[Save, ...]
    leftovers: bool = False
    """`LEFTOVERS` are in the directory."""
    damaged: bool = False
    """The newest of `before` is damaged; the writer restores first, which sets it aside."""

    def prepare(self, path: Path) -> None:
        """Write the contents of the directory; nothing for a first save."""
        if not self.before:
            return
        writer = directory(path)
        for save in self.before:
            save.to(writer)
        writer.close()
        for name, data in FOREIGN.items():
            if data is None:
                (path / name).mkdir()
            else:
                (path / name).write_bytes(data)
        newest = max(path.glob("step-*.*"))
        for name in LEFTOVERS if self.leftovers else ():
            (path / name).mkdir()
            (path / name / "arrays.safetensors").write_bytes(
                (newest / "arrays.safetensors").read_bytes()[:100]
            )
        if self.damaged:
            changed = bytearray((newest / "state.msgpack").read_bytes())
            changed[len(changed) // 2] ^= 4
            (newest / "state.msgpack").write_bytes(changed)

    def prepared(self, work: Path) -> Tree:
        """Write the contents, and nothing else, below a folder; return what is there."""
        materialise({}, work)
        self.prepare(work / "ckpt")
        return snapshot(work)

    def run_writer(
        self, path: Path, fs: Any = os, acknowledge: Callable[[int], None] = lambda saves: None
    ) -> None:
        """Do what the writer does; call `acknowledge` after each save with the number of saves that
        have returned.
        """
        there = directory(path, fs)
        try:
            if self.damaged:
                there.restore(None)
            for number, save in enumerate(self.then, 1):
                save.to(there)
                acknowledge(number)
        finally:
            there.close()

    def returned(self, acknowledged: int) -> tuple[list[Save], tuple[Save, ...]]:
        """Return the undamaged saves that have returned when so many of the writer's have, and the
        one after them, if any.
        """
        done = [*(self.before[:-1] if self.damaged else self.before), *self.then[:acknowledged]]
        return done, self.then[acknowledged : acknowledged + 1]

    def check(
        self, path: Path, acknowledged: int, *, later: bool = True, in_flight: bool = True
    ) -> None:
        """Check what is in the directory after the writer ended.

        Args:
            path: the checkpoint directory.
            acknowledged: how many saves of the writer returned.
            later: whether to make another save, which must succeed.
            in_flight: whether the save after the acknowledged ones may be there, too.

        Raises:
            ViolationError: something is lost, torn or left over.
        """
        done, coming = self.returned(acknowledged)
        coming = coming if in_flight else ()
        good = self._good(path)
        if coming and coming[0].number in good:
            done.append(coming[0])
        expected = {each.number for each in kept(done)}
        if not expected <= good:
            raise ViolationError(f"lost: saves {sorted(expected - good)} of {sorted(expected)}")
        writer = directory(path)
        found = writer.restore(None)
        check_restored(found, done[-1] if done else None)
        if found is not None and len(found.set_aside) > self.damaged:
            raise ViolationError(f"set aside {found.set_aside}")
        if later:
            last = make_save(LATER, size=40)
            last.to(writer)
        writer.close()
        if later:
            self._check_after_later_save(path, kept([*done, last]))

    def _good(self, path: Path) -> set[int]:
        """Return the numbers of the saves whose checkpoints verify. A checkpoint that does not is a
        violation.
        """
        good: set[int] = set()
        opened = directory(path, read_only=True)
        numbers = {
            checkpoint.path: int(checkpoint.metrics["number"])
            for checkpoint in opened.checkpoints()
        }
        for found, damage in opened.verify():
            if damage is None:
                good.add(numbers[found])
            elif not (self.damaged and f"step-{self.before[-1].step:012d}." in found.name):
                raise ViolationError(f"torn under a final name: {found.name}: {damage}")
        return good

    def _check_after_later_save(self, path: Path, expected: Sequence[Save]) -> None:
        good = self._good(path)
        if good != {each.number for each in expected}:
            raise ViolationError(
                f"after a later save {sorted(good)} are there, not"
                f" {sorted(each.number for each in expected)}"
            )
        names = sorted(each.name for each in path.iterdir())
        if left := [name for name in names if _TEMPORARY.fullmatch(name)]:
            raise ViolationError(f"leftovers were not removed: {left}")
        if self.damaged != any(name.startswith("damaged-") for name in names):
            raise ViolationError(f"set aside: {names}")
        for name, data in FOREIGN.items() if self.before else ():
            there = path / name
            if not (
                there.is_dir() if data is None else there.is_file() and there.read_bytes() == data
            ):
                raise ViolationError(f"{name}, which is not ours, was changed")
        check_restored(directory(path, read_only=True).restore(None), expected[-1])


def make_save(number: int, *, step: int | None = None, size: int = 600, seed: int = 0) -> Save:
    """Return a save with values of most types, and an array of about `size` bytes."""
    rng = np.random.default_rng([seed, number])
    state = {
        "weights": rng.standard_normal((size // 8, 2)).astype(np.float32),
        "layers": [
            {
                "bias": np.array(
                    [-0.0, np.inf, np.frombuffer(b"\x01\0\0\0\0\0\xf8\x7f", np.float64)[0]]
                ),
                "on": True,
            }
        ],
        "empty": np.zeros((0, 3), np.int16),
        "seen": (number, 2.5, None, b"\0\xff"),
        "größe": 2**70 + number,
    }
    return Save(number, 10 * number if step is None else step, state)


def make_scenarios(seed: int, size: int) -> list[Scenario]:
    """Return the scenarios of every program."""
    one, two, three, four = (make_save(number, size=size, seed=seed) for number in range(1, 5))
    again = make_save(6, step=two.step, size=size, seed=seed)
    return [
        Scenario("first save", (), (one, two)),
        Scenario("same step", (one, two), (again,)),
        Scenario("retention", (one, two), (three, four)),
        Scenario("leftovers", (one, two), (three,), leftovers=True),
        Scenario("damaged", (one, two), (three,), damaged=True),
    ]


def directory(path: Path, fs: Any = os, *, read_only: bool = False) -> CheckpointDirectory:
    """Return the blocking directory of a `Saver`."""
    return checkpoint_files.directory(path, fs, KeepNewest(KEEP), read_only=read_only)


def kept(saves: Sequence[Save]) -> list[Save]:
    """Return what the policy keeps: the last saves with different steps, newest last."""
    found: list[Save] = []
    for save in reversed(saves):
        if len(found) < KEEP and all(save.step != each.step for each in found):
            found.append(save)
    return found[::-1]


def check_restored(found: Restored | None, save: Save | None) -> None:
    """Raise `ViolationError` unless it is exactly this save."""
    if found is None or save is None:
        if found is not save:
            raise ViolationError(
                f"restored {found and found.checkpoint}, not save {save and save.number}"
            )
    elif found.checkpoint.step != save.step or dict(found.checkpoint.metrics) != save.metrics:
        raise ViolationError(
            f"restored {found.checkpoint}, not save {save.number} of step {save.step}"
        )
    elif not same(found.state, save.state):
        raise ViolationError(f"save {save.number} came back changed")
