"""The benchmarks work. Nothing here looks at a watch; `test_costs.py` counts what runs cost."""

from __future__ import annotations

import asyncio

import pytest

from tests.benchmarks import dispatchers
from tests.benchmarks.__main__ import main
from tests.benchmarks.measure import TINY, Result, measure
from tests.benchmarks.report import (
    line,
    marks,
)
from tests.benchmarks.rows import DISPATCH, GROUPS, ROWS, SECTIONS, SESSION
from tests.support.needs import MissingError
from tests.support.source import ROOT

PAGE = ROOT / "tests" / "benchmarks" / "FIGURES.md"
OTHERS = ("ignite", "tensorflow", "tf-hooks", "aiosignal")


@pytest.mark.parametrize("name", [name for name in (*SESSION, *DISPATCH) if name not in OTHERS])
@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_each_row_can_be_measured(name: str) -> None:
    """Every row gives a bar, a figure and times; those with other processes are in
    `test_store_benchmarks`.
    """
    results = await measure(name, ROWS[name], TINY)
    assert results
    if results[0].missing is not None:
        raise MissingError(results[0].missing)
    for result in results:
        assert_measured(result)


@pytest.mark.parametrize("name", OTHERS)
def test_a_row_about_another_engine_is_measured_or_says_what_is_missing(name: str) -> None:
    """Such a row gives its figure where that engine is installed, and one line that names the
    package where it is not.
    """
    # Not in the loop of a test: what these engines leave behind is theirs.
    results = asyncio.run(measure(name, ROWS[name], TINY))
    if results[0].missing is None:
        for result in results:
            assert_measured(result)
    else:
        assert [result.verdict for result in results] == ["-"]
        assert results[0].missing.endswith("is not installed")
        assert results[0].missing.split()[0] in line(results[0])


def assert_measured(result: Result) -> None:
    """Checks that all of a line is there; a slope, or a loss, out of one round may be anything."""
    assert result.bar is not None or result.row in (
        "checkpoint",
        "group",
        "torch-checkpoint",
    )
    assert result.verdict in (("ok", "MISSED") if result.bar is not None else ("-",))
    assert result.figure is not None
    assert result.figure > 0 or result.row in (
        "marginal",
        "checkpoint",
        "torch-checkpoint",
    )
    assert result.ours_secs is not None
    assert result.theirs_secs is not None


def test_every_row_is_explained() -> None:
    """Each row has a docstring, and tests/benchmarks/FIGURES.md a place for the figures of each
    section.
    """
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name, row in ROWS.items() if not getattr(row, "func", row).__doc__] == []
    sections = [*SECTIONS, dispatchers.SECTION]
    assert [mark for section in sections for mark in marks(section) if mark not in text] == []


def test_rows_are_asked_for_by_name_or_together() -> None:
    """A section or a store stands for all of its rows; what there is none of is refused."""
    assert {name for group in GROUPS.values() for name in group} == set(ROWS)
    assert [name for name in ROWS if name in GROUPS] == []
    with pytest.raises(SystemExit):
        main(["--rows", "no such row"])
