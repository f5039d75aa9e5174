"""Explore programs of all that the library promises: `python -m tests.fuzz.explored --seeds 500`.

A program is run under so many schedules, each disturbed in another way: another order of tasks,
cancels of its caller and of its tasks, signals. `--exhaust 1` tries a cancel at every wait instead,
and every single choice; `--exhaust 2` two of them. Fails on any violation, which is printed with
the fewest disturbances that show it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import time
from collections.abc import Sequence
from functools import partial

from tests.fuzz._harness import command, find_bugs
from tests.fuzz.explored.harness import finding
from tests.fuzz.explored.programs import BUGS, PROGRAMS, results


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    parser = command("explored", __doc__, has_bugs=True)
    parser.add_argument(
        "--program", default="", help="only programs, or bugs, whose name contains this"
    )
    parser.add_argument(
        "--seeds", type=int, default=100, help="schedules of each program (default %(default)s)"
    )
    parser.add_argument(
        "--exhaust",
        type=int,
        help="in place of seeds, all schedules with so many disturbances at most",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="number of processes (default %(default)s)",
    )
    options = parser.parse_args(arguments)
    names = [one for one in (BUGS if options.injected_bugs else PROGRAMS) if options.program in one]
    if not names:
        parser.error(
            f"no program contains {options.program!r}; there are: {', '.join([*PROGRAMS, *BUGS])}"
        )
    if options.injected_bugs:
        return find_bugs(names, partial(finding_of, seeds=options.seeds))
    return explore_all(names, options)


def explore_all(names: Sequence[str], options: argparse.Namespace) -> int:
    """Print a row a program, and the sums."""
    began, failed, sums = time.perf_counter(), False, [0, 0, 0]
    print(f"{'program':60} {'schedules':>9} {'cancels':>8} {'events':>8}")
    for result in results(names, options.seeds, options.seed, options.exhaust, options.jobs):
        name, *counts, problem = result
        sums = [one + other for one, other in zip(sums, counts, strict=True)]
        print(
            problem or f"{name:60} {counts[0]:9} {counts[1]:8} {counts[2]:8}",
            flush=True,
        )
        failed = failed or bool(problem)
    print(f"{'sum':60} {sums[0]:9} {sums[1]:8} {sums[2]:8}")
    print(
        f"Python {platform.python_version()}: {len(names)} programs in"
        f" {time.perf_counter() - began:.1f} s"
    )
    return int(failed)


def finding_of(name: str, seeds: int) -> str | None:
    """Return what a bug is found as."""
    bug = BUGS[name]
    found = asyncio.run(finding(bug.program, bug.finding, seeds))
    return bug.finding if bug.finding in found else None


if __name__ == "__main__":
    sys.exit(main())
