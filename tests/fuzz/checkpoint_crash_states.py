"""Every state of the disk that a power cut could leave.

    python -m tests.fuzz.checkpoint_crash_states --points 30000

The file operations of a writer are recorded. From the record, states are generated that a power cut could leave: what was
synced is there, and any part of the rest. Each different state is written to disk and checked: the newest acknowledged
checkpoint, or the next one, is there equal to the last bit; no torn checkpoint has a final name; a later save succeeds and
removes leftovers. Only different states are counted.
"""

from __future__ import annotations

import hashlib
import random
import sys
from pathlib import Path

from tests.fuzz._checkpoint_harness import Outcome, Tree, command, materialise, rounds
from tests.fuzz._checkpoint_scenarios import Scenario, check_directory, make_scenarios, prepared, run_writer
from tests.fuzz._crash_model import Crash, Recorder
from tests.fuzz._harness import scratch

MAX_STATES = 600
"""The number of different states of one scenario; then other contents and sizes give more."""
MAX_REPEATED = 60
"""After so many states in a row that were there before, no more crashes at that event are tried."""
LATER_SAVE_EVERY = 4


def crash_states(points: int, seed: int) -> Outcome:
    """Check so many different states."""
    outcome = Outcome("states after a crash")
    with scratch() as root:
        for number, rng in rounds(outcome, points, seed):
            scenarios = make_scenarios(seed + number, 600 + 2000 * (number % 6), two_writers=False)
            for done, scenario in enumerate(scenarios):
                share = -(-(points - outcome.points) // (len(scenarios) - done))  # small counts cover every scenario, too
                _crash_writer(scenario, min(share, MAX_STATES), rng, root, outcome, seed + number)
    return outcome


def _crash_writer(scenario: Scenario, limit: int, rng: random.Random, root: Path, outcome: Outcome, seed: int) -> None:
    work = root / "work"
    prepared(scenario, work)
    recorder = Recorder(work)
    run_writer(scenario, work / "ckpt", recorder, recorder.acknowledge)
    crash = Crash(recorder)
    seen: set[bytes] = set()
    repeated = dict.fromkeys(range(len(crash.events) + 1), 0)
    while len(seen) < limit and repeated:
        at = rng.choice(list(repeated))
        acknowledged = crash.acknowledged(at)
        tree = crash.state(at, rng)
        key = _key(tree, acknowledged)
        if key in seen:
            repeated[at] += 1
            if repeated[at] == MAX_REPEATED:
                del repeated[at]
            continue
        seen.add(key)
        repeated[at] = 0
        with outcome.point(f"{scenario.name}, before event {at} of {len(crash.events)}, seed {seed}"):
            materialise(tree, work)
            check_directory(scenario, work / "ckpt", acknowledged, later=len(seen) % LATER_SAVE_EVERY == 0)


def _key(tree: Tree, acknowledged: int) -> bytes:
    digest = hashlib.blake2b(bytes([acknowledged]))
    for name in sorted(tree):
        data = tree[name]
        digest.update(f"{name}\0{-1 if data is None else len(data)}\0".encode())
        digest.update(data or b"")
    return digest.digest()


if __name__ == "__main__":
    sys.exit(command(crash_states, 30_000, __doc__))
