"""Replay the recorded scenarios, and print the differences."""

from __future__ import annotations

import argparse
import sys

from tests.conformance.records import Mode, load
from tests.conformance.report import installed_loops, replay_all


def main(argv: list[str] | None = None) -> int:
    """Print a line for each mode and loop, then each disagreement; return 1 if there is any."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.parse_args(argv)
    records = load()
    reports = []
    for loop in installed_loops():
        for mode in Mode:
            reports.append(replay_all(records, mode, loop))
            print(reports[-1], flush=True)
    failed = [report for report in reports if not report.ok]
    for report in failed:
        print(f"\n{report.details()}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
