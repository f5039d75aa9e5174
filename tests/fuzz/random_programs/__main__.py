"""Run random programs against the reference model: `python -m tests.fuzz.random_programs --count 200000`.

A violation is printed with the smallest program that shows it; `--only N` prints program N of the seed and its trace.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.fuzz.random_programs.campaign import MODES, Campaign, campaign
from tests.fuzz.random_programs.model import violations
from tests.fuzz.random_programs.programs import generate


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.random_programs", description=__doc__)
    parser.add_argument("--count", type=int, default=200_000, help="programs (default %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="asyncio")
    parser.add_argument("--mode", choices=MODES, default="plain", help="eager: eager tasks, from Python 3.12 on")
    parser.add_argument("--most", type=int, default=10, help="end after so many kinds of violations (default %(default)s)")
    parser.add_argument("--without", default="", help="leave out programs with these actions: `stale,fail takes no note`")
    parser.add_argument("--only", type=int, help="print this program, and what happens in it")
    options = parser.parse_args(arguments)
    if options.only is None:
        without = frozenset(filter(None, options.without.split(",")))
        done = campaign(options.count, options.seed, options.loop, options.mode, options.first, options.most, without)
        return int(bool(done.kinds))
    program = generate(options.seed, options.only)
    with Campaign(options.loop, options.mode) as runner:
        execution = runner.execute(program, tracing=True)
        found = violations(execution)
    print(program, *(execution.trace or ()), *(found or ["no violation"]), sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
