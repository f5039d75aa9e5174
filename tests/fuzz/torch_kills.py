"""Training with torch that is killed repeatedly ends as if it had not been killed.

    python -m tests.fuzz.torch_kills --count 30 --seed 0

examples/train_torch.py (AdamW, a scheduler, dropout, bfloat16, shuffled batches taken ahead, evaluations beside the training)
runs as a process, is killed with SIGKILL at random points and started again; then it runs to its end. The weights, the state of
the optimizer and all else that it tracks, and the records of all steps must equal those of an uninterrupted run to the last bit,
and each restart must continue from a step that is not farther back than promised. The points are those of `kill_training`.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from aiohooks.checkpoint import Restored, Saver
from tests.fuzz.kill_training import INTERVAL, INTERVALS_PER_KILL, Tally, TrainingProcess, kill_points, run_killed, violations
from tests.support.tensors import same_tensors


def torch_process(directory: Path, steps: int) -> TrainingProcess:
    """Start the example, with its records beside its directory. No evaluation stops it: at which step depends on the machine."""
    options = ["--steps", steps, "--every", INTERVAL, "--patience", steps, "--checkpoint-dir", directory]
    return TrainingProcess(directory, "train_torch.py", [*options, "--records", directory.with_suffix(".csv")])


def torch_kills(directory: Path, *, count: int, seed: int, verbose: bool = False) -> Tally:
    """Kill a run so many times, let it end, and compare it with an uninterrupted one."""
    began = time.perf_counter()
    tally = Tally("background", (count + 1) * INTERVALS_PER_KILL * INTERVAL)
    end = torch_process(directory / "alone", tally.steps).run_until(None)
    tally.violations += [f"left alone: {one}" for one in violations(end, None, 0, tally)]
    run_killed(lambda: torch_process(directory / "killed", tally.steps), kill_points(count, seed), tally, verbose=verbose)
    tally.violations += differences(directory / "alone", directory / "killed", tally.steps)
    tally.secs = time.perf_counter() - began
    return tally


def differences(alone: Path, killed: Path, steps: int) -> Iterator[str]:
    """Yield what differs between two runs at their ends."""
    found: list[Restored] = []
    for directory in (alone, killed):
        restored = asyncio.run(Saver(directory, read_only=True).restore())
        if restored is None or restored.checkpoint.step != steps:
            yield f"{directory.name}: the last checkpoint is {restored and restored.checkpoint.step}, not {steps}"
            return
        found.append(restored)
    hooks = [restored.state["hooks"]["EarlyStoppingHook"] for restored in found]
    one, other = (
        {**restored.state["tracked"], "best": (hook["best"], hook["best_step"], hook["best_states"])}
        for restored, hook in zip(found, hooks, strict=True)
    )
    for name in one:
        if not same_tensors(one[name], other[name]):
            yield f"the state of {name!r} is not the same to the last bit"
    if hooks[0]["best"] < 0.9:
        yield f"nothing was learned: the accuracy is {hooks[0]['best']}"
    records = [[(row["step"], row["loss"], row["rate"]) for row in rows(path.with_suffix(".csv"))] for path in (alone, killed)]
    if records[0] != records[1]:
        yield "the records are not the same"
    if [step for step, _, _ in records[0]] != [str(step + 1) for step in range(steps)]:
        yield "the records have not each step once"


def rows(path: Path) -> list[dict[str, str]]:
    """Return the records of a run."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.torch_kills", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=30, help="how many kills (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quiet", action="store_true", help="only the last line")
    options = parser.parse_args(arguments)
    if options.count < 1:
        parser.error("--count is at least 1")
    with tempfile.TemporaryDirectory(prefix="torch-kills-") as directory:
        tally = torch_kills(Path(directory), count=options.count, seed=options.seed, verbose=not options.quiet)
    print(tally.report(), flush=True)
    return int(bool(tally.violations) or tally.kills < options.count)


if __name__ == "__main__":
    sys.exit(main())
