"""P7: a writer is killed at every system call, by strace.

    python -m tests.fuzz.checkpoint_strace --points 300

As P6, with nothing of ours between the library and the system: strace sends SIGKILL at the k-th call of each kind of system
call that names a file of the checkpoint directory, for all k. Needs strace, and leave to trace a child.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz._disk import Outcome, Tree, WrongError, command, materialise, rounds, scratch, snapshot
from tests.fuzz._stories import Story, act, judge, make_stories, prepare
from tests.fuzz._strace import CALLS, check_suited, paths_of, traced


def strace(points: int, seed: int) -> Outcome:
    """Kills so many writers."""
    check_suited()
    outcome = Outcome("killed at system calls")
    seen: set[str] = set()
    with scratch() as root:
        work = root / "work"
        for number, rng in rounds(seed):
            if outcome.points >= points:
                break
            # A piece of a large array is a write of its own.
            stories = [each for each in make_stories(seed + number, 600 + 700_000 * number) if not each.contended]
            plans: list[tuple[Story, Tree, list[str], str]] = []
            for story in stories:
                materialise({}, work)
                prepare(story, work / "ckpt")
                tree = snapshot(work)
                paths = paths_of(story, work)
                plans += [(story, tree, paths, call) for call in CALLS]
            rng.shuffle(plans)
            for story, tree, paths, call in plans:
                when = 0
                killed = True
                while killed and outcome.points < points:
                    when += 1
                    materialise(tree, work)
                    killed = _one(outcome, story, work, paths, call, when)
                if when > 1:
                    seen.add(call)
    outcome.notes.append(f"{len(seen)} kinds of calls")
    return outcome


def _one(outcome: Outcome, story: Story, root: Path, paths: list[str], call: str, when: int) -> bool:
    """One kill; returns whether there was that call at all."""
    path = root / "ckpt"
    with mmap.mmap(-1, 1) as acknowledged:
        status = traced(
            lambda: act(story, path, os, lambda number: acknowledged.__setitem__(0, number)),
            paths,
            f"{call}:signal=SIGKILL:when={when}",
        )
        saves = acknowledged[0]
    if status == 0:
        return False
    with outcome.point(f"{story.name}, {call} {when}"):
        if not os.WIFSIGNALED(status):
            raise WrongError(f"the writer ended with status {status} and not by the kill")
        judge(story, path, saves)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return command(strace, 300, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
