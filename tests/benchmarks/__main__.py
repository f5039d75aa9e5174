"""Measures what the library costs, prints a table with each bar and figure, and fails if a bar is
missed.

    python -m tests.benchmarks --loop both --json figures.json
    python -m tests.benchmarks --rows stores --json stores.json
    python -m tests.benchmarks --page tests/benchmarks/FIGURES.md figures.json stores.json

The last one puts what was measured into the page; a section of which nothing was measured stays as
it is.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.measure import Counts, Result, measure
from tests.benchmarks.report import Report, line, load, save, write_page
from tests.benchmarks.rows import GROUPS, ROWS, SECTIONS
from tests.conformance.report import LOOPS, installed_loops, loop_factory


def main(argv: list[str] | None = None) -> int:
    """Measure, or write the page; return 1 if a bar is missed."""
    defaults = Counts()
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--loop", choices=[*LOOPS, "both"], default="both", help="both: those that are installed"
    )
    rows = f"{', '.join(ROWS)}; or all of {', '.join(GROUPS)} (default: dispatch and session)"
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=[*GROUPS, *ROWS],
        default=["dispatch", "session"],
        metavar="ROW",
        help=rows,
    )
    parser.add_argument(
        "--rounds", type=int, default=defaults.rounds, help="how often each lane runs"
    )
    parser.add_argument(
        "--slice",
        type=float,
        default=defaults.slice_secs * 1e3,
        metavar="MS",
        help="how long a lane runs in one round",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file")
    parser.add_argument(
        "--page",
        type=Path,
        metavar="PAGE",
        help="put the figures of FILES into a page; measures nothing",
    )
    parser.add_argument("files", nargs="*", type=Path, help="what --json has written")
    options = parser.parse_args(argv)
    if options.page is not None:
        write_page(
            options.page, SECTIONS, [report for file in options.files for report in load(file)]
        )
        return 0
    counts = dataclasses.replace(
        defaults,
        rounds=options.rounds,
        slice_secs=options.slice / 1e3,
    )
    names = [name for given in options.rows for name in GROUPS.get(given, [given])]
    loops = installed_loops() if options.loop == "both" else [options.loop]
    reports: list[Report] = []
    for loop in loops:
        reports.append(report_on(loop, names, counts))
        if options.json is not None:
            save(reports, options.json)
    missed = [f"{report.title}: {result.work}" for report in reports for result in report.missed]
    print("\nAll bars are met." if not missed else "\nMISSED:\n" + "\n".join(missed))
    return 1 if missed else 0


def report_on(loop: str, rows: Sequence[str], counts: Counts) -> Report:
    """Measure rows on one event loop; each line is printed as soon as it is measured."""
    print(f"\nPython {platform.python_version()}, {loop}")

    async def all_rows() -> list[Result]:
        results: list[Result] = []
        for name in rows:
            for result in await measure(name, ROWS[name], counts):
                print(line(result), flush=True)
                results.append(result)
        return results

    with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
        return Report.here(loop, runner.run(all_rows()))


if __name__ == "__main__":
    sys.exit(main())
