"""A writer is killed at every file operation and every byte of a write.

    python -m tests.fuzz.checkpoint_kill --points 10000

A forked child saves, and kills itself with SIGKILL before a file operation, or after j bytes of a write. Then the newest
acknowledged checkpoint, or the complete next one, must be restored equal to the last bit; a later save must succeed and
remove leftovers. In the scenario of two writers the child is stopped first: a second writer is refused, and a reader reads.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from aiohooks.errors import CheckpointBusyError
from tests.fuzz._checkpoint_harness import (
    Counting,
    Fatal,
    Outcome,
    Tree,
    ViolationError,
    command,
    fork,
    materialise,
    pick,
    rounds,
)
from tests.fuzz._checkpoint_scenarios import (
    Scenario,
    check_directory,
    check_restored,
    directory,
    make_save,
    make_scenarios,
    prepared,
    run_writer,
)
from tests.fuzz._harness import scratch

Point = tuple[int, int]
"""The number of an operation, and how many bytes of it are written."""


def points_of(scenario: Scenario, tree: Tree, root: Path) -> tuple[list[Point], list[Point]]:
    """Return where a writer can be killed: before each operation, and inside the writes."""
    materialise(tree, root)
    counting = Counting()
    run_writer(scenario, root / "ckpt", counting, lambda _: None)
    first, last = 0, len(counting.done)
    if scenario.two_writers:  # only while it has the lock: before and after, a second writer may save
        locks = [number for number, (name, _) in enumerate(counting.done) if name == "flock"]
        first, last = locks[0] + 1, locks[-1] + 1 if len(locks) > 1 else last - 1
    whole = [(number, 0) for number in range(first, last)]
    inside = [(number, byte) for number in range(first, last) for byte in range(1, counting.done[number][1])]
    return whole, inside


def kill(points: int, seed: int) -> Outcome:
    """Kill so many writers."""
    outcome = Outcome("killed at any byte")
    with scratch() as root:
        work = root / "work"
        for number, rng in rounds(outcome, points, seed):
            plans: list[tuple[Scenario, Tree, list[Point], list[Point]]] = []
            for scenario in make_scenarios(seed + number, 560 + 64 * number):
                tree = prepared(scenario, work)
                plans.append((scenario, tree, *points_of(scenario, tree, work)))
            groups: Sequence[list[tuple[Scenario, Tree, Point]]] = (
                [(scenario, tree, point) for scenario, tree, whole, _ in plans for point in whole],
                [(scenario, tree, point) for scenario, tree, _, inside in plans for point in inside],
            )
            for scenario, tree, point in pick(points - outcome.points, groups, rng):
                with outcome.point(f"{scenario.name}, operation {point[0]}, byte {point[1]}, seed {seed + number}"):
                    _kill_writer(scenario, tree, point, work, later=point[1] % 4 == 0)
    return outcome


def _kill_writer(scenario: Scenario, tree: Tree, point: Point, root: Path, *, later: bool) -> None:
    materialise(tree, root)
    path = root / "ckpt"
    with mmap.mmap(-1, 1) as acknowledged:
        how = signal.SIGSTOP if scenario.two_writers else signal.SIGKILL
        pid = fork(lambda: run_writer(scenario, path, Fatal(*point, how), lambda number: acknowledged.__setitem__(0, number)))
        try:
            _, status = os.waitpid(pid, os.WUNTRACED)
            if scenario.two_writers and os.WIFSTOPPED(status):
                _check_while_stopped(scenario, path, acknowledged[0])
        finally:
            if scenario.two_writers:
                os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            raise ViolationError(f"the writer ended with status {status} and was not killed")
        check_directory(scenario, path, acknowledged[0], later=later)


def _check_while_stopped(scenario: Scenario, path: Path, acknowledged: int) -> None:
    """Check that another process can read, and not save, while the writer is stopped."""
    done = [*scenario.before, *scenario.then[:acknowledged]]
    other = make_save(800)
    try:
        directory(path).save(other.state, other.step, other.metrics)
    except CheckpointBusyError:
        pass
    else:
        raise ViolationError("a second writer saved while the first one had the directory")
    found = directory(path, read_only=True).restore(None)
    coming = scenario.then[acknowledged : acknowledged + 1]
    complete = found is not None and bool(coming) and found.checkpoint.step == coming[0].step
    check_restored(found, coming[0] if complete else done[-1])


if __name__ == "__main__":
    sys.exit(command(kill, 10_000, __doc__))
