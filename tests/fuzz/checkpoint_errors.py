"""P10: every system call fails, the disk fills up, limits are reached.

    python -m tests.fuzz.checkpoint_errors --points 1300

Three parts. Errors that strace puts in place of the k-th system call of each kind, once or from there on. A small tmpfs with
less and less left of its pages and inodes. Limits on open files and on file sizes. A save then raises CheckpointError with that
errno or has gone well; earlier checkpoints are there, no file stays open, nothing unfinished stays on the disk, and the next
save works. A failed sync of what is saved is a failed save. Needs strace, and root to mount the tmpfs.
"""

from __future__ import annotations

import json
import mmap
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tests.fuzz import _full, _strace
from tests.fuzz._attempts import RESTORE, Attempt, Trouble, attempt, look
from tests.fuzz._disk import Outcome, Tree, WrongError, command, materialise, rounds, scratch, snapshot
from tests.fuzz._stories import Story, make_stories, prepare

ERRORS = ("ENOSPC", "EIO", "EDQUOT", "EROFS", "EMFILE", "EINTR", "EACCES")


def errors(points: int, seed: int) -> Outcome:
    """Makes so many operations fail, three of thirteen by strace, the rest by full disks; and some by limits."""
    _full.check_suited()
    outcome = Outcome("I/O errors and full disks")
    by_strace = -(-points * 3 // 13)
    injected(outcome, by_strace, seed)
    levels = _full.fill_levels(outcome, points - by_strace, seed)
    by_limits = _full.limits(outcome, -(-points // 13), seed)  # on top
    outcome.notes.append(f"{by_strace} by strace, {levels} fill levels, {by_limits} limits")
    return outcome


def injected(outcome: Outcome, points: int, seed: int, calls: Sequence[str] = _strace.CALLS) -> None:
    """Errors in place of system calls."""
    _strace.check_suited()
    end = outcome.points + points
    with scratch() as root:
        work = root / "work"
        for number, rng in rounds(seed):
            plans: list[tuple[Story, Tree, list[str], Trouble]] = []
            stories = [each for each in make_stories(seed + number, 600) if not each.contended and not each.spoilt]
            stories.append(Story(RESTORE, stories[1].before, ()))
            for story in stories:
                materialise({}, work)
                prepare(story, work / "ckpt")
                tree, paths = snapshot(work), _strace.paths_of(story, work)
                paths = sorted({*paths, *(str(work / name) for name in tree)})
                troubles = [Trouble(error, call, on) for call in calls for error in ERRORS for on in (False, True)]
                # Python tries again after EINTR, for ever if need be.
                troubles = [each for each in troubles if not (each.lasting and each.error == "EINTR")]
                plans += [(story, tree, paths, trouble) for trouble in troubles]
            rng.shuffle(plans)
            for story, tree, paths, trouble in plans:
                when = 1
                while outcome.points < end and _one(outcome, story, tree, work, paths, trouble, when):
                    when += 1
            if outcome.points >= end:
                return


def _one(outcome: Outcome, story: Story, tree: Tree, root: Path, paths: list[str], trouble: Trouble, when: int) -> bool:
    """One run with an error in it; returns whether there was that call at all."""
    materialise(tree, root)
    path, log = root / "ckpt", root.parent / "log"
    with mmap.mmap(-1, 65_536) as answer:

        def child() -> None:
            answer.write(json.dumps(asdict(attempt(story, path))).encode())

        inject = f"{trouble.call}:error={trouble.error}:when={when}{'+' * trouble.lasting}"
        status = _strace.traced(child, paths, inject, str(log))
        text = answer[:].rstrip(b"\0")
    changed = [line for line in log.read_text(errors="replace").splitlines() if "INJECTED" in line]
    if not changed:
        return False
    trouble = replace(trouble, of_saved="/.tmp-step-" in changed[0])
    with outcome.point(f"{story.name}, {trouble.call} {when}{' and all later ones' * trouble.lasting}: {trouble.error}"):
        if status != 0:
            raise WrongError(f"the writer ended with status {status}")
        look(story, path, Attempt(**json.loads(text)), trouble)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return command(errors, 1300, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
