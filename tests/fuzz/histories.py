"""Histories of real processes under faults, checked for linearizability: see `tests.support.linearizability`.

    python -m tests.fuzz.histories --engine redis --operations 50000 --seed 1

Three processes make calls at random on one run, four at the same time each, while the engine and one of the processes fail as
in `tests.fuzz.random_faults`; what they began and what was answered is recorded with the times of a clock that they share. After
some calls another run begins. In three of four runs the engine keeps its data, and all answers are checked.

In the fourth it loses its data. Then there is one limit, which the pages of the engines state: the first one to connect brings
back what it has seen, which may not be the last step. So one process alone writes, and lives: its own calls must be
linearizable, and no step may be lost or count twice, or fall for any process. (On Ray all processes write: their sum is exact.)
The local store has no such runs: without its directory a run is over.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.engine_faults import ENGINES, EngineSetup, Group, cluster_of, engine_setup
from tests.support.fault_plans import Plan, strike
from tests.support.history_load import Mix, read_history
from tests.support.linearizability import Operation, find_miscount, find_violation
from tests.support.store_trials import WorkerProcess, reply_to

_LIMIT_SECS = 120.0
"""Calls of one run that take longer are stuck."""


@dataclass
class Outcome:
    """What was recorded, and what is wrong with it."""

    calls: int = 0
    runs: Counter[str] = field(default_factory=Counter[str])
    unanswered: int = 0
    problems: list[str] = field(default_factory=list)
    last_history: list[Operation] = field(default_factory=list)

    def report(self) -> int:
        """Print it; return the exit code."""
        runs = ", ".join(f"{times} {what}" for what, times in sorted(self.runs.items()))
        print(*self.problems, sep="\n", end="\n" if self.problems else "")
        print(f"{self.calls} operations in {self.runs.total()} runs ({runs}), {self.unanswered} without an answer: ", end="")
        print(f"{len(self.problems)} violations")
        return 1 if self.problems else 0


def check_run(setup: EngineSetup, history: Sequence[Operation], *, data_lost: bool) -> str:
    """Return what is wrong with a run; empty if nothing is."""
    if not data_lost:
        return find_violation(history)
    own = [] if setup.exact_sums else [one for one in history if one.process == 0]
    return find_violation(own) or find_miscount(history)


async def record_run(setup: EngineSetup, plan: Plan, mixes: Sequence[Mix], calls: int, seed: int, directory: Path) -> list[Path]:
    """Record a run of its own under the faults of the plan; return the files of the processes, and one with the last read."""
    workers = await setup.begin()
    paths = [directory / f"{number}" for number in range(len(workers) + 1)]
    for path in paths:
        path.write_bytes(b"")
    orders: list[tuple[WorkerProcess, asyncio.Future[dict[str, object]]]] = []
    for number, (one, mix) in enumerate(zip(workers, mixes, strict=True)):
        options = {"process": number, "seed": seed, "mix": mix, "steady": number == 0}
        orders.append((one, one.order("record", path=str(paths[number]), operations=calls // len(workers), **options)))
    await strike(setup, plan, workers)
    for one, order in orders:
        if one.alive and "error" in (reply := await reply_to(order, "recording", _LIMIT_SECS)):
            raise AssertionError(str(reply))
    options = {"process": 0, "seed": seed, "mix": mixes[0], "steady": True}
    await workers[0].do("record", path=str(paths[-1]), operations=0, **options)
    return paths


async def record(
    engine: str, operations: int, seed: int, directory: Path, *, calls_each: int = 1500, most_runs: int = sys.maxsize
) -> Outcome:
    """Record runs until there are so many calls, and check each."""
    outcome = Outcome()
    async with cluster_of(engine) as address, engine_setup(engine, directory, address) as setup:
        number = 0
        while outcome.calls < operations and number < most_runs:
            rnd = random.Random(f"{seed} {number}")
            data_lost = setup.keeps_run and number % 4 == 3
            groups: tuple[Group, ...] = ("data lost",) if data_lost else ("outage longer than a lease", "brief")
            plan = Plan.draw(setup, rnd.choice(groups), rnd)
            if plan.client_fault == "killed" and plan.role == "chief":
                plan = dataclasses.replace(plan, role="waiter")  # the first process lives: it makes the last read
            mix: Mix = rnd.choice(("raises", "resets"))
            others: Mix = "advances" if setup.exact_sums else "reads"
            mixes: list[Mix] = ["advances", others, others] if data_lost else [mix, mix, mix]
            began = time.monotonic()
            try:
                paths = await record_run(setup, plan, mixes, calls_each, seed + number, directory)
                left = await setup.end()
            except AssertionError as error:
                await setup.abandon()
                wrong, left = str(error), ""
            else:
                outcome.last_history, calls = read_history(zip([0, 1, 2, 0], paths, strict=True))
                outcome.calls += calls
                outcome.unanswered += sum(not one.is_known for one in outcome.last_history)
                wrong = check_run(setup, outcome.last_history, data_lost=data_lost) or left
            outcome.runs["with data lost" if data_lost else f"with {mix}"] += 1
            if wrong:
                outcome.problems.append(f"run {number} of seed {seed}, {plan}: {wrong}")
            secs = time.monotonic() - began
            print(f"{number:4} {outcome.calls:7} {secs:5.1f} s  {plan}{': ' if wrong else ''}{wrong}", flush=True)
            number += 1
    return outcome


def main() -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--operations", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(record(given.engine, given.operations, given.seed, Path(directory))).report()


if __name__ == "__main__":
    sys.exit(main())
