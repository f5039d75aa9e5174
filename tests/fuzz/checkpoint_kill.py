"""P6: a writer is killed at every byte.

    python -m tests.fuzz.checkpoint_kill --points 10000

A forked child saves; it kills itself with SIGKILL before an operation on files, or after j bytes of a write. Then the newest
acknowledged checkpoint must be there to the last bit, or the one that was coming, whole; a later save must work and sweep up.
In the story of two writers the child is stopped there first: a second writer is refused, and a reader reads.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from aiohooks.errors import CheckpointBusyError
from tests.fuzz._disk import (
    Counting,
    Fatal,
    Outcome,
    Tree,
    WrongError,
    command,
    fork,
    materialise,
    pick,
    rounds,
    scratch,
    snapshot,
)
from tests.fuzz._stories import Story, act, check_restored, directory, judge, make_save, make_stories, prepare

Point = tuple[int, int]
"""Number of an operation, and how many bytes of it are written."""


def points_of(story: Story, tree: Tree, root: Path) -> tuple[list[Point], list[Point]]:
    """Where a writer can be killed: before each operation, and inside the writes."""
    materialise(tree, root)
    counting = Counting()
    act(story, root / "ckpt", counting, lambda _: None)
    first, last = 0, len(counting.done)
    if story.contended:  # while it has the lock: before and after, a second writer rightly goes ahead
        locks = [number for number, (name, _) in enumerate(counting.done) if name == "flock"]
        first, last = locks[0] + 1, locks[-1] + 1 if len(locks) > 1 else last - 1
    whole = [(number, 0) for number in range(first, last)]
    inside = [(number, byte) for number in range(first, last) for byte in range(1, counting.done[number][1])]
    return whole, inside


def kill(points: int, seed: int) -> Outcome:
    """Kills so many writers."""
    outcome = Outcome("killed at any byte")
    with scratch() as root:
        for number, rng in rounds(seed):
            left = points - outcome.points
            if left <= 0:
                return outcome
            stories = make_stories(seed + number, 560 + 64 * number)
            work = root / "work"
            plans: list[tuple[Story, Tree, list[Point], list[Point]]] = []
            for story in stories:
                materialise({}, work)
                prepare(story, work / "ckpt")
                tree = snapshot(work)
                plans.append((story, tree, *points_of(story, tree, work)))
            groups: Sequence[list[tuple[Story, Tree, Point]]] = (
                [(story, tree, point) for story, tree, whole, _ in plans for point in whole],
                [(story, tree, point) for story, tree, _, inside in plans for point in inside],
            )
            for story, tree, point in pick(left, groups, rng):
                with outcome.point(f"{story.name}, operation {point[0]}, byte {point[1]}, seed {seed + number}"):
                    _one(story, tree, point, work, later=point[1] % 4 == 0)
    raise AssertionError("rounds do not end")


def _one(story: Story, tree: Tree, point: Point, root: Path, *, later: bool) -> None:
    materialise(tree, root)
    path = root / "ckpt"
    with mmap.mmap(-1, 1) as acknowledged:
        how = signal.SIGSTOP if story.contended else signal.SIGKILL
        pid = fork(lambda: act(story, path, Fatal(*point, how), lambda number: acknowledged.__setitem__(0, number)))
        try:
            _, status = os.waitpid(pid, os.WUNTRACED)
            if story.contended and os.WIFSTOPPED(status):
                _contend(story, path, acknowledged[0])
        finally:
            if story.contended:
                os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            raise WrongError(f"the writer ended with status {status} and not by the kill")
        judge(story, path, acknowledged[0], later=later)


def _contend(story: Story, path: Path, acknowledged: int) -> None:
    """What another process may do while the writer is in the middle of something: read, and no more."""
    done = [*story.before, *story.then[:acknowledged]]
    other = make_save(800)
    try:
        directory(path).save(other.state, other.step, other.metrics)
    except CheckpointBusyError:
        pass
    else:
        raise WrongError("a second writer saved while the first one had the directory")
    found = directory(path, read_only=True).restore(None)
    coming = story.then[acknowledged : acknowledged + 1]
    complete = found is not None and bool(coming) and found.checkpoint.step == coming[0].step
    check_restored(found, coming[0] if complete else done[-1])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return command(kill, 10_000, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
