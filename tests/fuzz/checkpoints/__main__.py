"""Let one kind of fault happen to checkpoints, and check the laws: `python -m
tests.fuzz.checkpoints --fault kill --count 10000`.

| fault | where |
| --- | --- |
| kill | the process dies before each file operation, and at each byte of a write; another one reads
beside it, and cannot save | | crash | every state of the disk that a power cut could leave, from a
record of the operations | | power | the power is cut before each operation, on a real ext4 (needs
root) | | error | each operation fails, once or from there on, or after it was done | | full | the
disk is full after so many pages, or files (needs root) | | turns | two processes save in turn, and
are killed while they have the directory | | corruption | the newer of two checkpoints is changed in
any way | | strace | nowhere: the operations of the layer are compared with those which the kernel
gets |

The laws: the newest save that has returned, or the complete next one, is restored equal to the last
bit; earlier ones that are to be kept are there; nothing torn has a final name; what failed or was
damaged is said, with its errno; no file stays open; the next save succeeds, and removes what was
left over, and nothing else.

Exits with 0; with 1 if a law was broken, or there were fewer points than requested; with 2 where
this machine cannot run it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence

from tests.fuzz._harness import command, log_disabled
from tests.fuzz.checkpoints import faults
from tests.fuzz.checkpoints.corruption import corruption
from tests.fuzz.checkpoints.laws import Outcome
from tests.support.needs import MissingError

Program = Callable[[int, int], Outcome]
"""Runs a number of points, with a seed."""
PROGRAMS: Mapping[str, tuple[Program, int]] = {
    "kill": (faults.kill, 10_000),
    "crash": (faults.crash, 30_000),
    "power": (faults.power, 500),
    "error": (faults.error, 3_000),
    "full": (faults.full, 1_300),
    "turns": (faults.turns, 2_000),
    "corruption": (corruption, 50_000),
    "strace": (faults.strace, 300),
}
MAX_SHOWN = 20


def run(program: Program, points: int, seed: int = 0) -> Outcome:
    """Run a program and measure its time. The log of the library, about thousands of damaged files,
    is disabled.
    """
    begun = time.monotonic()
    with log_disabled():
        outcome = program(points, seed)
    outcome.secs = time.monotonic() - begun
    return outcome


def main(
    arguments: Sequence[str] | None = None, programs: Mapping[str, tuple[Program, int]] = PROGRAMS
) -> int:
    """Run the command."""
    parser = command("checkpoints", __doc__)
    parser.add_argument("--fault", choices=list(programs), required=True)
    parser.add_argument("--count", type=int, help="how many points")
    options = parser.parse_args(arguments)
    program, default = programs[options.fault]
    points = default if options.count is None else options.count
    try:
        outcome = run(program, points, options.seed)
    except MissingError as error:
        print(f"not run: {error}", flush=True)
        return 2
    for violation in outcome.violations[:MAX_SHOWN]:
        print(violation)
    short = outcome.points < points
    print(outcome.summary() + (f"; FEWER than the {points} requested" if short else ""), flush=True)
    return int(short or bool(outcome.violations))


if __name__ == "__main__":
    sys.exit(main())
