"""Simulate clusters under faults: `python -m tests.fuzz.simulation --count 20000`, of the stores
alone or of a training.

A seed decides everything that happens, on every Python. A seed with a violation is printed with its
faults; `--seed N --trace` shows all that happens in it. `--injected-bugs` injects each bug, and
prints the first seed that finds it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial

from tests.fuzz._harness import Bug, command, find_bugs
from tests.fuzz.simulation.cluster import ENGINES
from tests.fuzz.simulation.injected_bugs import BUGS
from tests.fuzz.simulation.scenario import MakeScenario, Result, simulate, stores
from tests.fuzz.simulation.training import training

SCENARIOS: dict[str, MakeScenario] = {"stores": stores, "training": training}


def simulated(
    seeds: Sequence[int], engine: str = "", scenario: MakeScenario = stores, processes: int = 1
) -> Iterator[Result]:
    """Yield the results of the seeds, in their order."""
    run = partial(simulate, engine=engine, scenario=scenario)
    if processes == 1:
        yield from map(run, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(processes, logging.disable) as pool:
        yield from pool.imap(run, seeds, chunksize=10)


def first_seed_with(bug: Bug, seeds: Sequence[int]) -> Result | None:
    """Return the first result with a violation that is not there without the bug."""
    scenario = bug.found_by or stores
    for seed in seeds:
        with bug.injected():
            found = simulate(seed, scenario=scenario)
        if found.violations and not simulate(seed, scenario=scenario).violations:
            return found
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = command("simulation", __doc__, count=20_000, has_bugs=True)
    parser.add_argument(
        "--engine", choices=sorted(ENGINES), default="", help="one of the engines instead of all"
    )
    parser.add_argument(
        "--scenario",
        choices=sorted(SCENARIOS),
        default="stores",
        help="what they do (default %(default)s)",
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--trace", action="store_true", help="print all that happens in the first seed, and end"
    )
    parser.add_argument("--bug", choices=sorted(BUGS), help="inject this bug")
    options = parser.parse_args(arguments)
    logging.disable()
    seeds, scenario = range(options.seed, options.seed + options.count), SCENARIOS[options.scenario]
    if options.injected_bugs:
        return find_bugs([options.bug] if options.bug else BUGS, partial(_finding, seeds))
    with BUGS[options.bug].injected() if options.bug else contextlib.nullcontext():
        if options.trace:
            result = simulate(options.seed, options.engine, scenario, tracing=True)
            print(*(result.lines or ()), *_describe(result), sep="\n")
            return int(bool(result.violations))
        return _report(simulated(seeds, options.engine, scenario, options.processes))


def _finding(seeds: Sequence[int], name: str) -> str | None:
    found = first_seed_with(BUGS[name], seeds)
    if found is None:
        return None
    return f"seed {found.seed} ({found.engine}): {found.violations[0]:.150}"


def _report(results: Iterator[Result]) -> int:
    began, digest = time.perf_counter(), hashlib.sha256()
    count = bad = events = operations = 0
    secs = 0.0
    for result in results:
        count += 1
        bad += bool(result.violations)
        events += result.events
        operations += result.operations
        secs += result.virtual_secs
        digest.update(result.digest.encode())
        if result.violations:
            print(*_describe(result), sep="\n", flush=True)
        elif count % 1_000 == 0:
            print(f"{count:,} seeds, {bad} with a violation", flush=True)
    print(
        f"{count:,} seeds, {bad} with a violation, {events:,} events, {operations:,} operations,"
        f" {secs / 3600:.1f} hours of virtual time in {time.perf_counter() - began:.0f} s; traces"
        f" {digest.hexdigest()[:16]}"
    )
    return int(bad > 0)


def _describe(result: Result) -> list[str]:
    violations = result.violations or ["no violation"]
    return [
        f"seed {result.seed}, {result.engine}, trace {result.digest[:16]}:",
        *(f"  {one}" for one in (*result.faults, *violations[:5])),
    ]


if __name__ == "__main__":
    sys.exit(main())
