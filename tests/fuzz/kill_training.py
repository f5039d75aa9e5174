"""Training that is killed repeatedly ends as if it had not been killed.

    python -m tests.fuzz.kill_training --count 30

`examples/train_torch.py` (AdamW, a scheduler, dropout, bfloat16, shuffled batches taken ahead,
evaluations and checkpoints beside the training) runs as a process, is killed with SIGKILL at random
points and started again; then it runs to its end. All that it tracks must equal that of an
uninterrupted run to the last bit, and so must the records of all steps. Each restart must continue
from a step that is at most two checkpoint intervals back, as training continues in a write.

The points are events, not times: the n-th committed step, or the n-th operation of the checkpoints
on the disk, which is inside a save as a rule.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from aiohooks.checkpoint import Saver
from tests.fuzz._harness import command
from tests.support.processes import run_python
from tests.support.record_files import without_time

INTERVAL = 50
"""Steps between checkpoints."""
PROMISED = 2 * INTERVAL
"""How many steps a kill may cost."""
INTERVALS_PER_KILL = 3
"""How many intervals are trained for each kill; no kill point is later than that."""


class KillPoint(NamedTuple):
    """When to kill a process: at its n-th event of a kind."""

    kind: str
    n: int

    def __str__(self) -> str:
        return f"{self.kind} {self.n}"


THE_END = KillPoint("the end", 0)


def kill_points(kills: int, seed: int) -> list[KillPoint]:
    """Return random points; every second one is an operation on the disk."""
    order = random.Random(seed)
    latest = {"step": INTERVAL * 5 // 2, "file": 90}
    kinds = ["step" if number % 2 else "file" for number in range(kills)]
    return [KillPoint(kind, order.randint(1, latest[kind])) for kind in kinds]


class ProcessRun(NamedTuple):
    """What one process did."""

    status: int
    output: str
    first: int | None
    """The step it began at; None if it was killed before."""
    reached: int | None
    """The last step it committed."""


def train(directory: Path, steps: int, kill_point: KillPoint) -> ProcessRun:
    """Run the example until a point. No evaluation stops it: at which step depends on the
    machine.
    """
    options = ["--every", INTERVAL, "--patience", steps, "--steps", steps]
    files = ["--records", directory.with_suffix(".jsonl"), "--checkpoint-dir", directory]
    seen = directory.with_suffix(".steps")
    arguments = [*kill_point, seen, *options, *files]
    done = run_python("-m", "tests.fuzz._training_process", *map(str, arguments))
    lines = [line.split() for line in seen.read_text().splitlines()] if seen.exists() else []
    first = reached = None
    if lines:
        kind, step = lines[0]
        first = int(step) - (kind == "committed")
        reached = int(lines[-1][1])
    return ProcessRun(done.returncode, done.stdout + done.stderr, first, reached)


@dataclass(slots=True)
class Tally:
    """The results."""

    steps: int
    kills: int = 0
    lost: list[int] = field(default_factory=list[int])
    """How many steps had to be repeated, at each restart."""
    violations: list[str] = field(default_factory=list[str])

    def report(self) -> str:
        """Return a line for the results, and one for each violation."""
        line = (
            f"{self.kills} kills; {len(self.lost)} restarts lost at most"
            f" {max(self.lost, default=0)} steps ({PROMISED} allowed), {sum(self.lost)} in all;"
            f" {self.steps} steps; {len(self.violations)} violations"
        )
        return "\n".join([line, *(f"    {violation}" for violation in self.violations)])


def kill_training(directory: Path, *, kills: int, seed: int) -> Tally:
    """Kill a run so many times, let it end, and compare it with an uninterrupted one."""
    tally = Tally((kills + 1) * INTERVALS_PER_KILL * INTERVAL)
    alone, killed = directory / "alone", directory / "killed"
    tally.violations += violations(train(alone, tally.steps, THE_END), THE_END, 0)
    position = 0  # the step that it had reached
    for kill_point in [*kill_points(kills, seed), THE_END]:
        run = train(killed, tally.steps, kill_point)
        tally.kills += run.status == -9
        if run.first is not None:
            tally.lost.append(position - run.first)
        tally.violations += violations(run, kill_point, position)
        position = position if run.reached is None else run.reached
    if not tally.violations:
        tally.violations += differences(alone, killed, tally.steps)
    return tally


def violations(run: ProcessRun, kill_point: KillPoint, position: int) -> Iterator[str]:
    """Yield what is wrong with a process that was to be killed at a point, where the one before had
    reached `position`.
    """
    if run.status != (0 if kill_point is THE_END else -9):
        yield f"{kill_point}: ended with {run.status}: {run.output[-2000:]}"
    if run.first is not None and not 0 <= position - run.first <= PROMISED:
        yield f"{kill_point}: had reached step {position}, continued from {run.first}"
    if "damaged" in run.output:
        yield f"{kill_point}: a checkpoint was found damaged: {run.output[-2000:]}"


def differences(alone: Path, killed: Path, steps: int) -> Iterator[str]:
    """Yield what differs between two directories at the end, or should not be there."""
    from tests.support.tensors import same_tensors  # imports torch

    whole, cut = (tracked_at_the_end(directory, steps) for directory in (alone, killed))
    for name in whole:
        if not same_tensors(whole[name], cut[name]):
            yield f"the state of {name!r} is not the same to the last bit"
    if whole["best"] < 0.9:
        yield f"nothing was learned: the accuracy is {whole['best']}"
    records = [without_time(path.with_suffix(".jsonl")) for path in (alone, killed)]
    if records[0] != records[1]:
        yield "the records are not the same"
    if [record["step"] for record in records[0]] != [*range(1, steps + 1)]:
        yield "the records have not each step once"
    left = [path.name for path in killed.iterdir() if path.name.startswith((".tmp-", "damaged-"))]
    if left:
        yield f"left in the directory: {', '.join(left)}"


def tracked_at_the_end(directory: Path, steps: int) -> dict[str, Any]:
    """Return all that is tracked, and what was best, of the last checkpoint."""
    restored = asyncio.run(Saver(directory, read_only=True).restore())
    assert restored is not None
    assert restored.checkpoint.step == steps
    return {**restored.state["tracked"], **restored.state["hooks"]["EarlyStoppingHook"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    options = command("kill_training", __doc__, count=30).parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="kill-training-") as directory:
        tally = kill_training(Path(directory), kills=options.count, seed=options.seed)
    print(tally.report(), flush=True)
    return int(bool(tally.violations) or tally.kills < options.count)


if __name__ == "__main__":
    sys.exit(main())
