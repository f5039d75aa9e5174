"""The command: `python -m tests.fuzz.signals`."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence

from tests.fuzz import signals
from tests.fuzz.signals.processes import ProcessTally, send_to_processes
from tests.fuzz.signals.sweep import Tally, sweep


def describe_sweep(loop: str, tally: Tally) -> str:
    """Return the counts and the violations of the signals inside this process."""
    lines = [f"{'scenario':20} {'signals':>8}"]
    lines += [f"{name:20} {count:8}" for name, count in tally.signals.items()]
    lines.append(
        f"Python {platform.python_version()}, {loop}: {tally.signals.total()} signals at {tally.once + tally.twice} points "
        f"({tally.twice} twice) in {tally.secs:.1f} s; {len(tally.violations)} violations"
    )
    return "\n".join([*lines, *tally.violations[:20]])


def describe_processes(loop: str, found: ProcessTally) -> str:
    """Return the counts and the violations of the signals to processes."""
    lines = [f"{'where':20} {'processes':>9}"]
    lines += [f"{name:20} {count:9}" for name, count in found.phases.items()]
    lines.append(
        f"Python {platform.python_version()}, {loop}: {found.sent} signals to {found.phases.total()} processes "
        f"in {found.secs:.1f} s; {len(found.violations)} violations"
    )
    return "\n".join([*lines, *found.violations[:20]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.signals", description=signals.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=5_000, help="signals inside this process (default %(default)s)")
    parser.add_argument("--real", type=int, default=150, help="processes that get signals (default %(default)s)")
    parser.add_argument("--loop", choices=("asyncio", "uvloop", "both"), default="both")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    failed = False
    for loop in ("asyncio", "uvloop") if options.loop == "both" else (options.loop,):
        tally = sweep(points=options.points, loop=loop, seed=options.seed)
        print(describe_sweep(loop, tally), flush=True)
        found = send_to_processes(count=options.real, loop=loop, seed=options.seed)
        print(describe_processes(loop, found), flush=True)
        failed = failed or bool(tally.violations or found.violations) or tally.signals.total() < options.points
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
