"""The command: `python -m tests.fuzz.signals`."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence

from tests.fuzz import signals
from tests.fuzz._harness import command
from tests.fuzz.signals.processes import send_to_processes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = command("signals", signals.__doc__)
    parser.add_argument(
        "--processes",
        type=int,
        default=150,
        help="processes that get signals (default %(default)s)",
    )
    parser.add_argument("--loop", choices=("asyncio", "uvloop", "both"), default="both")
    options = parser.parse_args(arguments)
    failed = False
    for loop in ("asyncio", "uvloop") if options.loop == "both" else (options.loop,):
        found = send_to_processes(count=options.processes, loop=loop, seed=options.seed)
        print("\n".join(f"{name:20} {count:9}" for name, count in found.phases.items()))
        what = f"{found.sent} signals to {found.phases.total()} processes in {found.secs:.1f} s"
        print(
            f"Python {platform.python_version()}, {loop}: {what}; {len(found.violations)}"
            " violations"
        )
        print("\n".join(found.violations[:20]), flush=True)
        failed = failed or bool(found.violations)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
