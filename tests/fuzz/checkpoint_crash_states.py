"""P9: every state of the disk that a crash could leave.

    python -m tests.fuzz.checkpoint_crash_states --points 30000

What a writer does to files is recorded. From that, states are made that a power cut could leave: what was synced is there,
of the rest anything. Each different one is put on disk and judged: the newest acknowledged checkpoint is there to the last
bit, or the one that was coming; nothing torn stands under a final name; a later save works and sweeps up.
Only different states count.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz._disk import Outcome, Tree, command, materialise, rounds, scratch
from tests.fuzz._stories import Story, act, judge, make_stories, prepare
from tests.fuzz._trace import Crash, Recorder

ENOUGH = 600
"""Different states of one story; then other contents and sizes give more."""
STALE = 60
"""When so many in a row were there before, a crash at that moment has little more to give."""
JUDGED_WITH_LATER_SAVE = 4


def crash_states(points: int, seed: int) -> Outcome:
    """Judges so many different states."""
    outcome = Outcome("states after a crash")
    with scratch() as root:
        for number, rng in rounds(seed):
            stories = [story for story in make_stories(seed + number, 600 + 2000 * (number % 6)) if not story.contended]
            for told, story in enumerate(stories):
                left = points - outcome.points
                if left <= 0:
                    return outcome
                share = -(-left // (len(stories) - told))  # small counts too see every story
                _tell(story, min(share, ENOUGH), rng, root, outcome, seed + number)
    raise AssertionError("rounds do not end")


def _tell(story: Story, most: int, rng: random.Random, root: Path, outcome: Outcome, seed: int) -> None:
    work = root / "work"
    materialise({}, work)
    prepare(story, work / "ckpt")
    recorder = Recorder(work)
    act(story, work / "ckpt", recorder, recorder.acknowledge)
    crash = Crash(recorder)
    seen: set[bytes] = set()
    stale = dict.fromkeys(range(len(crash.events) + 1), 0)
    while len(seen) < most and stale:
        at = rng.choice(list(stale))
        acknowledged = crash.acknowledged(at)
        tree = crash.state(at, rng)
        key = _key(tree, acknowledged)
        if key in seen:
            stale[at] += 1
            if stale[at] == STALE:
                del stale[at]
            continue
        seen.add(key)
        stale[at] = 0
        with outcome.point(f"{story.name}, before event {at} of {len(crash.events)}, seed {seed}"):
            materialise(tree, work)
            judge(story, work / "ckpt", acknowledged, later=len(seen) % JUDGED_WITH_LATER_SAVE == 0)


def _key(tree: Tree, acknowledged: int) -> bytes:
    digest = hashlib.blake2b(bytes([acknowledged]))
    for name in sorted(tree):
        data = tree[name]
        digest.update(f"{name}\0{-1 if data is None else len(data)}\0".encode())
        digest.update(data or b"")
    return digest.digest()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return command(crash_states, 30_000, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
