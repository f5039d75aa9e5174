"""Faults of engines, links and processes at random moments, of any kind of them together, each
counted.

    python -m tests.fuzz.store_faults --engine redis --count 1000 --seed 1

In each trial three processes work on a run of their own, and the engine fails at a random moment:
in a third of the trials it loses its data, in a third it is away for longer than a lease. Meanwhile
one of the processes may be killed or stopped, or lose its connection, for shorter or longer than a
lease. What they do is in `trials.py`. No trial has

- a call or wait that is stuck;
- a step that counts twice, or is lost unless the engine has lost its data; calls that are not
  linearizable, if no data was lost;
- two leaders that both write: a write accepted after one of a newer term was, or a term of two
  processes;
- a wrong end: a wait that ends while its trainer lives; a living chief that is refused;
- anything that is left in the engine.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz._harness import command
from tests.fuzz.store_faults.engines import (
    ENGINES,
    GROUPS,
    EngineSetup,
    Group,
    cluster_of,
    engine_setup,
)
from tests.fuzz.store_faults.plans import Plan
from tests.fuzz.store_faults.trials import CallTrial, LeadTrial, Trial
from tests.support.store_processes import SlownessWatch


@dataclass
class Outcome:
    """The results of all trials."""

    trials: int = 0
    plans: list[Plan] = field(default_factory=list[Plan])
    """Those of the trials in which the engine fails."""
    statuses: Counter[tuple[Group, str]] = field(default_factory=Counter[tuple[Group, str]])
    texts: list[str] = field(default_factory=list)
    calls: int = 0
    late_secs: float = 0.0
    excused: int = 0
    """How many trials lost their chief because the machine was too slow."""
    watch: SlownessWatch = field(default_factory=SlownessWatch)

    def report(self) -> int:
        """Print the results; return the exit code."""
        for group in GROUPS:
            found = ", ".join(
                f"{times} {status}"
                for (each, status), times in sorted(self.statuses.items())
                if each == group
            )
            print(f"{group}: {found}")
        print(f"{self.trials} faults: {len(self.texts)} violations; {self.calls} calls")
        print(f"all waits ended within {self.late_secs:.2f} s after the faults")
        if self.excused:
            print(
                f"in {self.excused} of them the machine was too slow for the lease, and the chief"
                " was replaced"
            )
        return 1 if self.texts else 0


def kind_of(setup: EngineSetup, number: int, group: Group) -> type[Trial]:
    """Return what the processes do in the trial of this number: in most of them they lead."""
    return CallTrial if number % 4 == 3 and (setup.keeps_run or group != "data lost") else LeadTrial


async def run_trial(setup: EngineSetup, number: int, seed: int, outcome: Outcome) -> None:
    """Run a trial of this number, and add its result."""
    group, chance = GROUPS[number % len(GROUPS)], random.Random(f"{seed} {number}")
    plan = Plan.draw(setup, group, chance)
    began = time.monotonic()
    trial: Trial | None = None
    try:
        await setup.begin(on_lost=plan.on_lost)
        trial = kind_of(setup, number, group)(setup, plan, outcome.watch, chance)
        status = await trial.run()
        outcome.excused += trial.excused
        if left := await setup.end():
            raise AssertionError(f"left over: {left}")
    except AssertionError as error:
        status = "violation"
        outcome.texts.append(f"trial {number} of seed {seed}, {plan}: {error}")
        print(outcome.texts[-1], flush=True)
        await setup.abandon()
    outcome.trials += 1
    outcome.statuses[group, status] += 1
    late = 0.0
    if trial is not None:
        late = trial.late_secs
        outcome.calls += len(trial.history)
        outcome.plans.append(plan)
    outcome.late_secs = max(outcome.late_secs, late)
    kind = type(trial).__name__.removesuffix("Trial").lower()
    print(
        f"{number:5} {kind:5}{status:12} {late:5.2f} of {time.monotonic() - began:5.2f} s  {plan}",
        flush=True,
    )


async def run_trials(
    engine: str,
    count: int,
    seed: int,
    directory: Path,
    *,
    parallel: int,
    only: Sequence[int] = (),
) -> Outcome:
    """Run trials of an engine, some at the same time, as they mostly wait; `only` names the numbers
    of those to run.
    """
    outcome = Outcome()
    numbers: Iterator[int] = iter(only or range(count))

    async def run_some(address: str) -> None:
        async with engine_setup(engine, directory, address) as setup:
            for number in numbers:
                await run_trial(setup, number, seed, outcome)

    async with cluster_of(engine) as address:
        tasks = [
            asyncio.ensure_future(run_some(address))
            for _ in range(min(parallel, len(only) or count))
        ]
        watching = asyncio.ensure_future(outcome.watch.watch())
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in (*tasks, watching):
                task.cancel()
            await asyncio.gather(*tasks, watching, return_exceptions=True)
    return outcome


def main() -> int:
    """Run the command; return the exit code."""
    parser = command("store_faults", __doc__, count=90)
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--parallel", type=int, default=4, help="how many trials at the same time")
    parser.add_argument(
        "--trial",
        type=int,
        action="append",
        default=[],
        help="only the trial of this number; may be repeated",
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        outcome = asyncio.run(
            run_trials(
                given.engine,
                given.count,
                given.seed,
                Path(directory),
                parallel=given.parallel,
                only=given.trial,
            )
        )
    return outcome.report()


if __name__ == "__main__":
    sys.exit(main())
