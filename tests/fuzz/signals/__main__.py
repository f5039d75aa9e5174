"""The command: `python -m tests.fuzz.signals`."""

from __future__ import annotations

import argparse
import platform
import sys
from collections import Counter
from collections.abc import Sequence

from tests.fuzz import signals
from tests.fuzz.signals.processes import send_to_processes
from tests.fuzz.signals.sweep import sweep


def describe(counts: Counter[str], head: str, loop: str, what: str, secs: float, violations: list[str]) -> str:
    """Return the counts and the violations of one kind of signals."""
    lines = [head, *(f"{name:20} {count:9}" for name, count in counts.items())]
    lines.append(f"Python {platform.python_version()}, {loop}: {what} in {secs:.1f} s; {len(violations)} violations")
    return "\n".join([*lines, *violations[:20]])


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
        what = f"{tally.signals.total()} signals at {tally.once + tally.twice} points ({tally.twice} twice)"
        print(describe(tally.signals, "scenario", loop, what, tally.secs, tally.violations), flush=True)
        found = send_to_processes(count=options.real, loop=loop, seed=options.seed)
        what = f"{found.sent} signals to {found.phases.total()} processes"
        print(describe(found.phases, "where", loop, what, found.secs, found.violations), flush=True)
        failed = failed or bool(tally.violations or found.violations) or tally.signals.total() < options.points
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
