"""Run a command while the processor is busy: `python -m tests.support.busy --processes 16 -- pytest
-m "not slow"`.

Tests must not depend on the speed of the machine. The exit status is that of the command.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence

# also if this process is killed
BURN = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.busy", description=__doc__)
    parser.add_argument(
        "--processes",
        type=int,
        default=8 * (os.cpu_count() or 1),
        help="default: 8 for each core (%(default)s)",
    )
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    burning = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(options.processes)]
    try:
        return subprocess.run(options.command, check=False).returncode
    finally:
        for process in burning:
            process.kill()
        for process in burning:
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
