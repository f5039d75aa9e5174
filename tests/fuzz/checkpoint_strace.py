"""A writer is killed at every system call.

    python -m tests.fuzz.checkpoint_strace --points 300

Like `checkpoint_kill`, without a replacement of `os`: strace sends SIGKILL at the k-th call of each kind of system call that
names a file of the checkpoint directory, for all k. Needs strace, and permission to trace a child.
"""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

from tests.fuzz._checkpoint_harness import Outcome, Tree, ViolationError, command, materialise, rounds
from tests.fuzz._checkpoint_scenarios import Scenario, check_directory, make_scenarios, prepared, run_writer
from tests.fuzz._harness import scratch
from tests.fuzz._strace import CALLS, check_supported, paths_of, traced


def strace(points: int, seed: int) -> Outcome:
    """Kill so many writers."""
    check_supported()
    outcome = Outcome("killed at system calls")
    seen: set[str] = set()
    with scratch() as root:
        work = root / "work"
        for number, rng in rounds(outcome, points, seed):
            plans: list[tuple[Scenario, Tree, list[str], str]] = []
            # Each chunk of a large array is a write.
            for scenario in make_scenarios(seed + number, 600 + 700_000 * number, two_writers=False):
                tree, paths = prepared(scenario, work), paths_of(scenario, work)
                plans += [(scenario, tree, paths, call) for call in CALLS]
            rng.shuffle(plans)
            for scenario, tree, paths, call in plans:
                when = 0
                killed = True
                while killed and outcome.points < points:
                    when += 1
                    materialise(tree, work)
                    killed = _kill_writer(outcome, scenario, work, paths, call, when)
                if when > 1:
                    seen.add(call)
    outcome.notes.append(f"{len(seen)} kinds of calls")
    return outcome


def _kill_writer(outcome: Outcome, scenario: Scenario, root: Path, paths: list[str], call: str, when: int) -> bool:
    """Kill one writer; return whether there was such a call."""
    path = root / "ckpt"
    with mmap.mmap(-1, 1) as acknowledged:
        status = traced(
            lambda: run_writer(scenario, path, os, lambda number: acknowledged.__setitem__(0, number)),
            paths,
            f"{call}:signal=SIGKILL:when={when}",
        )
        saves = acknowledged[0]
    if status == 0:
        return False
    with outcome.point(f"{scenario.name}, {call} {when}"):
        if not os.WIFSIGNALED(status):
            raise ViolationError(f"the writer ended with status {status} and was not killed")
        check_directory(scenario, path, saves)
    return True


if __name__ == "__main__":
    sys.exit(command(strace, 300, __doc__))
