"""Calls of three processes on one run of a step store, without any fault: each history must be
linearizable.

    python -m tests.fuzz.histories --engine redis --count 20000

`tests.fuzz.store_faults` does the same while engines and processes fail.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz._harness import command
from tests.fuzz.store_faults.engines import ENGINES, EngineSetup, cluster_of, engine_setup
from tests.support.step_laws import Operation, find_violation
from tests.support.store_processes import Mix, reply_to

MIXES: tuple[Mix, ...] = ("advances", "raises", "resets")
PER_RUN = 20
"""How many histories follow one another on one run, whose calls are checked together."""


async def make_run(
    setup: EngineSetup,
    seeds: Sequence[int],
) -> list[Operation]:
    """Return the calls that the processes have made on a new run, a history for each seed."""
    workers = await setup.begin()
    for seed in seeds:
        chance = random.Random(seed)
        # An epoch of a run with resets is known by its step, so other runs have one mix as well.
        mix = MIXES[seeds[0] // PER_RUN % len(MIXES)]
        orders = [
            worker.order(
                "call_at_random",
                count=chance.randint(4, 16),
                seed=chance.random().hex(),
                mix=mix,
                steady=worker is workers[0],
            )
            for worker in workers
        ]
        for order in orders:
            reply = await reply_to(order, "calls at random")
            assert "error" not in reply, reply
    await workers[0].do("value")
    left = await setup.end()
    assert not left, left
    return [operation for worker in workers for operation in worker.history]


async def make_histories(
    engine: str,
    seeds: Sequence[int],
    directory: Path,
    parallel: int,
) -> tuple[int, list[str]]:
    """Make a history for each seed; return the number of calls, and what is wrong."""
    calls = 0
    wrong: list[str] = []
    runs = iter([seeds[first : first + PER_RUN] for first in range(0, len(seeds), PER_RUN)])

    async def make_some(address: str) -> None:
        nonlocal calls
        async with engine_setup(engine, directory, address) as setup:
            for run in runs:
                history = await make_run(setup, run)
                calls += len(history)
                violation = find_violation(history)
                if violation:
                    wrong.append(f"seeds {run}: {violation}")
            await setup.abandon()

    async with cluster_of(engine) as address, asyncio.TaskGroup() as tasks:
        for _ in range(parallel):
            tasks.create_task(make_some(address))
    return calls, wrong


def main() -> int:
    """Run the command and return its exit status."""
    parser = command("histories", __doc__, count=20_000)
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--parallel", type=int, default=6, help="how many at the same time")
    given = parser.parse_args()
    seeds = range(given.seed, given.seed + given.count)
    with tempfile.TemporaryDirectory() as directory:
        calls, wrong = asyncio.run(
            make_histories(given.engine, seeds, Path(directory), given.parallel)
        )
    print(*wrong, sep="\n")
    print(f"{given.count:,} histories on {given.engine}, {calls:,} calls, {len(wrong)} violations")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
